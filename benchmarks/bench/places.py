"""Where the sets lie when they are read: each place brings a set there, and makes it warm or cold before a run.

warm    a folder, in the page cache
drive   a hard disk in software (drive.py), cold
disk    a folder on a disk of this machine, its pages dropped
http    a local nginx over the folder, in the page cache
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parent.parent / "tests" / "support")]

from harddisk import Drive, lay_out  # noqa: E402

DROP = Path("/proc/sys/vm/drop_caches")


class PageCache:
    """A folder whose sets are in the page cache."""

    name = "warm"

    def __init__(self, sets: Path) -> None:
        self._sets = sets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def hold(self, dataset: str) -> Path:
        """Have a set there; return its folder."""
        return self._sets / dataset

    def prepare(self, dataset: str) -> str:
        """Make a set as the place has it before a run; return what must be said of how that was done."""
        for path in self.hold(dataset).rglob("*"):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.read(2**22):
                        pass
        return ""

    def arguments(self, dataset: str) -> list[str]:
        """Return what a program is told of a set."""
        return [str(self.hold(dataset))]


class ColdDisk(PageCache):
    """A folder on a disk whose pages are dropped before each run, by root with all inodes and folders too."""

    name = "disk"

    def __init__(self, sets: Path, on: Path) -> None:
        super().__init__(on)
        self._from = sets

    def hold(self, dataset: str) -> Path:
        """Copy a set to the disk where it isn't there."""
        return copied(self._from / dataset, self._sets)

    def prepare(self, dataset: str) -> str:
        """Drop the set's pages; what is dirty would stay."""
        folder = self.hold(dataset)
        subprocess.run(["sync", "-f", str(folder)], check=True)
        if os.access(DROP, os.W_OK):
            DROP.write_text("3")
            return ""
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        return "inodes and folders were warm (not root)"


class ColdDrive(PageCache):
    """The hard disk in software, cold before each run."""

    name = "drive"

    def __init__(self, sets: Path, home: Path, server: str, touch_gib: float) -> None:
        super().__init__(home / "mnt" / sets.parent.name)
        self._from = sets
        self._disk = Drive(home, server, touch_gib * 2**30)

    def __enter__(self) -> Self:
        self._disk.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._disk.__exit__(*error)

    def hold(self, dataset: str) -> Path:
        """Copy a set to the drive where it isn't there."""
        return copied(self._from / dataset, self._sets)

    def prepare(self, dataset: str) -> str:
        """Bring the set, and forget all that the kernel holds of the drive."""
        self.hold(dataset)
        return self._disk.cold()

    def arguments(self, dataset: str) -> list[str]:
        """Name the drive's counters too."""
        return [*super().arguments(dataset), "--counters", str(self._disk.counters)]


class WebServer(PageCache):
    """An nginx over the sets."""

    name = "http"

    def __init__(self, sets: Path, home: Path) -> None:
        super().__init__(sets)
        self._home, self._stack, self._origin = home, ExitStack(), ""

    def __enter__(self) -> Self:
        from nginx import nginx  # noqa: PLC0415  (of the tests)

        self._origin = self._stack.enter_context(nginx(self._sets, self._home))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def arguments(self, dataset: str) -> list[str]:
        """Name the URL, and the folder behind it."""
        return [f"{self._origin}/{dataset}", "--local", str(self.hold(dataset))]


def lacking(place: str, server: str) -> str | None:
    """Say what a place needs and this machine hasn't, None where nothing."""
    if place == "http":
        from nginx import NGINX  # noqa: PLC0415  (of the tests)

        return None if NGINX else "nginx isn't here: apt-get install nginx"
    if place == "drive":
        tools = {"fusermount3": "fuse3", "mkfs.ext4": "e2fsprogs", "losetup": "mount"}
        absent = [
            package for tool, package in tools.items() if not shutil.which(tool, path=f"{os.environ['PATH']}:/sbin:/usr/sbin")
        ]
        if os.getuid():
            return "the disk in software needs root; --places disk reads a folder's disk without"
        if absent or not Path("/dev/fuse").exists():
            return f"the disk in software needs /dev/fuse and: apt-get install {' '.join(absent) or 'fuse3'}"
        probe = subprocess.run([server, "-c", "import mfusepy"], capture_output=True, check=False)
        return (
            f"{server} has no mfusepy: pip install mfusepy, or --server names an interpreter that has it"
            if probe.returncode
            else None
        )
    return None


def copied(source: Path, to: Path) -> Path:
    """Copy a set's folder into another folder where it isn't there as it was written last; return the copy."""
    out, partial = to / source.name, to / f"{source.name}.partial"
    record, copied_record = source.with_name(f"{source.name}.digest"), to / f"{source.name}.digest"
    if out.exists() and copied_record.exists() and copied_record.read_text() == record.read_text():
        return out
    for old in (out, partial):
        shutil.rmtree(old, ignore_errors=True)
    to.mkdir(parents=True, exist_ok=True)
    try:
        if (source / "train.csv").exists():  # loose files: as a download lays them, folder after folder, by name
            lay_out(source, out)
        else:
            shutil.copytree(source, partial)
            partial.rename(out)
        shutil.copyfile(record, copied_record)
    except BaseException:
        for old in (out, partial):
            shutil.rmtree(old, ignore_errors=True)
        raise
    subprocess.run(["sync", "-f", str(to)], check=True)
    return out
