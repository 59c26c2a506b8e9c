"""The question: a torch DataLoader over loose files, as benchmarks/question.py has it, and the answers that move the files.

as written     workers start anew in each epoch
best           workers stay, and keep their memory (mallopt)
squashfs       as "best", from a SquashFS image that is mounted by loop (as root)
ram            as "best", from a copy in /dev/shm; the first epoch has the copying in it
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from jobs import transform
from protocol import Options, main
from torch.utils.data import DataLoader

from packing import lay_out  # isort: skip  (of the folder above, which protocol names)
from question import Files, keep_memory  # isort: skip


def write(photos: Path, out: Path, _shard_bytes: int) -> None:
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
        stack.callback(subprocess.run, ["umount", "-l", str(mount)], check=True)
        return mount
    if options.variant == "ram":
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")), "photos")
        shutil.copytree(root, copy)
        return copy
    return root


def read(options: Options) -> Iterator[DataLoader]:
    """Yield the loader for each epoch."""
    best = options.variant != ""
    with ExitStack() as stack:
        files = Files(prepared(options, stack), options.count)
        files.transform = transform(options.job)
        loader = DataLoader(
            files,
            batch_size=options.batch,
            shuffle=True,
            num_workers=options.workers,
            persistent_workers=best,
            worker_init_fn=keep_memory if best else None,
        )
        for _ in range(options.epochs):
            yield loader
        del loader  # its workers hold files open


if __name__ == "__main__":
    main(write, read)
