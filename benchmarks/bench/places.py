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

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parent.parent / "tests" / "support")]

from packing import lay_out  # noqa: E402
from reading import Disk  # noqa: E402


class Warm:
    """A folder whose sets are in the page cache."""

    name = "warm"

    def __init__(self, sets: Path) -> None:
        self._sets = sets

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def bring(self, dataset: str) -> Path:
        """Return the folder of a set."""
        return self._sets / dataset

    def ready(self, dataset: str) -> None:
        """Read the set."""
        for path in self.bring(dataset).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(2**22):
                        pass

    def arguments(self, dataset: str) -> list[str]:
        """Return what a program is told of a set."""
        return [str(self.bring(dataset))]


class Dropped(Warm):
    """A folder on a disk whose pages are dropped before each run."""

    name = "disk"

    def __init__(self, sets: Path, on: Path) -> None:
        super().__init__(on)
        self._from = sets

    def bring(self, dataset: str) -> Path:
        """Copy a set to the disk where it isn't there."""
        return copied(self._from / dataset, self._sets)

    def ready(self, dataset: str) -> None:
        """Drop the set's pages; what is dirty would stay."""
        folder = self.bring(dataset)
        subprocess.run(["sync", "-f", str(folder)], check=True)
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


class Driven(Warm):
    """The hard disk in software, cold before each run."""

    name = "drive"

    def __init__(self, sets: Path, home: Path, server: str, touch: float) -> None:
        super().__init__(home / "mnt" / sets.parent.name)
        self._from = sets
        self._disk = Disk(home, server, touch * 2**30)

    def __enter__(self) -> Driven:
        self._disk.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._disk.__exit__(*error)

    def bring(self, dataset: str) -> Path:
        """Copy a set to the drive where it isn't there."""
        return copied(self._from / dataset, self._sets)

    def ready(self, dataset: str) -> None:
        """Bring the set, and forget all that the kernel holds of the drive."""
        self.bring(dataset)
        self._disk.cold()

    def arguments(self, dataset: str) -> list[str]:
        """Name the drive's counters too."""
        return [*super().arguments(dataset), "--counters", str(self._disk.counters)]


class Served(Warm):
    """An nginx over the sets."""

    name = "http"

    def __init__(self, sets: Path, home: Path) -> None:
        super().__init__(sets)
        self._home, self._stack, self._origin = home, ExitStack(), ""

    def __enter__(self) -> Served:
        from nginx import nginx  # noqa: PLC0415  (of the tests)

        self._origin = self._stack.enter_context(nginx(self._sets, self._home))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def arguments(self, dataset: str) -> list[str]:
        """Name the URL, and the folder behind it."""
        return [f"{self._origin}/{dataset}", "--local", str(self.bring(dataset))]


def copied(source: Path, to: Path) -> Path:
    """Copy a set's folder into another folder where it isn't there as it was written last; return the copy."""
    out, partial = to / source.name, to / f"{source.name}.partial"
    record, copied_record = source.with_name(f"{source.name}.json"), to / f"{source.name}.json"
    if out.exists() and copied_record.exists() and copied_record.read_text() == record.read_text():
        return out
    for old in (out, partial):
        shutil.rmtree(old, ignore_errors=True)
    to.mkdir(parents=True, exist_ok=True)
    if (source / "train.csv").exists():  # loose files: as a download lays them, folder after folder, by name
        lay_out(source, out)
    else:
        shutil.copytree(source, partial)
        partial.rename(out)
    shutil.copyfile(record, copied_record)
    os.sync()
    return out
