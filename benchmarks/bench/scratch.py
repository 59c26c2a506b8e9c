"""Two folders for one run, on a disk and in memory, that are gone after it with all that was left or mounted in them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

SHM = Path("/dev/shm")
_OCTAL = re.compile(r"\\([0-7]{3})")


class Scratch:
    """The folders while the `with` block runs: `disk`, and `memory` where this machine has /dev/shm, else the same."""

    def __enter__(self) -> Scratch:
        # Short: a path of a socket in it (Ray's) has 107 bytes at most.
        self.disk = Path(tempfile.mkdtemp(prefix="bench-"))
        self.memory = Path(tempfile.mkdtemp(prefix="bench-", dir=SHM)) if SHM.is_dir() else self.disk
        return self

    def __exit__(self, *_: object) -> None:
        clear(self.disk, self.memory)

    @property
    def environment(self) -> dict[str, str]:
        """What tells a program of them."""
        return {"TMPDIR": str(self.disk), "BENCH_MEMORY": str(self.memory)}


def clear(*folders: Path) -> None:
    """Unmount what is mounted in folders, and remove them."""
    for folder in folders:
        for mount in mounts_below(folder):
            unmount(mount)
        shutil.rmtree(folder, ignore_errors=True)


def mounts_below(folder: Path) -> list[Path]:
    """Return what is mounted in a folder, the innermost first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), line.split()[4])) for line in lines]
    return [point for point in reversed(points) if point.is_relative_to(folder)]


def unmount(point: Path) -> None:
    """Unmount; what is still in use after two seconds is taken out of the tree and unmounted when it isn't any more."""
    for _ in range(20):
        if not subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)
