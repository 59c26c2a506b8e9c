"""The question: a torch DataLoader over loose files, as benchmarks/question.py has it, and the answers that move the files.

as written     workers start anew in each epoch
best           workers stay, keep their memory, and leave cv2 one thread each
squashfs       as "best", from a SquashFS image that is mounted by loop (as root)
ram            as "best", from a copy in memory; the first epoch has the copying in it
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import cv2
from jobs import transform
from protocol import Options, Plan, main
from scratch import SHM, unmount
from sides import BYTES
from torch.utils.data import DataLoader

from harddisk import lay_out  # isort: skip  (of the folder above, which protocol names)
from question import Files, keep_memory  # isort: skip


class Bytes(Files):
    """The files as they are."""

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """Return a file's bytes and its label."""
        return Path(self.paths[index]).read_bytes(), self.labels[index]


def write(photos: Path, out: Path, _plan: Plan) -> None:
    """Copy the files as a download lays them; of those that a folder "squashfs" is asked for, make an image."""
    if out.name.partition(".")[0] != "squashfs":
        lay_out(photos, out)
        return
    out.mkdir()
    # JPEGs don't become smaller: their blocks go in as they are.
    command = ["mksquashfs", str(photos), str(out / "photos.squashfs"), "-quiet", "-no-progress", "-noD", "-noF"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def prepared(options: Options, stack: ExitStack) -> Path:
    """Return where the files are read, after what an answer asks for."""
    root = Path(options.folder)
    if options.variant == "squashfs":
        mount = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subprocess.run(["mount", "-o", "loop,ro", str(root / "photos.squashfs"), str(mount)], check=True)
        stack.callback(unmount, mount)
        return mount
    if options.variant == "ram":
        memory = os.environ.get("BENCH_MEMORY", str(SHM))  # gone after the run, however it ends
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)), "photos")
        shutil.copytree(root, copy)
        return copy
    return root


def settle(worker: int) -> None:
    """Let a worker keep its memory, and be one thread."""
    keep_memory(worker)
    cv2.setNumThreads(0)


def read(options: Options) -> Iterator[DataLoader]:
    """Yield the loader for each epoch."""
    best = options.variant != ""
    with ExitStack() as stack:
        files = (Bytes if options.job == BYTES else Files)(prepared(options, stack), options.count)
        if options.job != BYTES:
            files.transform = transform(options.job)
        loader = DataLoader(
            files,
            batch_size=options.batch,
            shuffle=True,
            num_workers=options.workers,
            persistent_workers=best,
            worker_init_fn=settle if best else None,
        )
        for _ in range(options.epochs):
            yield loader
        del loader  # its workers hold files open


if __name__ == "__main__":
    main(write, read)
