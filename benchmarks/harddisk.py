"""The hard disk in software (drive.py) as programs start it, make it cold and read its counters, and how a download fills a disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOUCH = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"


class Drive:
    """drive.py's disk, up while the `with` block runs; `touch`: bytes of memory that are taken and given back when it is made cold.

    A virtual machine may hand memory that nobody used lately to its host, and get it again page by page: 2.7 s of CPU a GB.
    """

    def __init__(self, home: Path, server: str, touch: float = 0) -> None:
        self.home, self.mount = home, home / "mnt"
        self._server, self._touch = server, int(touch)

    def __enter__(self) -> Drive:
        self._tell("up")
        return self

    def __exit__(self, *_: object) -> None:
        self._tell("down")

    def cold(self) -> str:
        """Forget what the kernel holds of it, and count from zero; return what must be said of how, mostly nothing."""
        said = self._tell("cold").strip()
        if self._touch:
            subprocess.run([sys.executable, "-c", TOUCH, str(self._touch)], check=True)
        return said

    @property
    def counters(self) -> Path:
        """The file that tells of reads since it was cold."""
        return self.home / "fuse" / "stats"

    def counted(self) -> dict[str, float]:
        """Return its counters since it was cold."""
        found = json.loads(self._tell("stats"))
        return {name: value if name.endswith("_s") else int(value) for name, value in found.items()}

    def _tell(self, verb: str) -> str:
        command = [self._server, str(HERE / "drive.py"), verb, str(self.home)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout


def lay_out(photos: Path, source: Path) -> None:
    """Copy a set to a disk as a download lays it there: folder after folder, by name."""
    if source.exists():
        return
    partial = source.with_name(source.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    packed = subprocess.Popen(["tar", "-C", photos, "--sort=name", "-cf", "-", "train", "train.csv"], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-C", partial, "-xf", "-"], stdin=packed.stdout, check=True)
    if packed.wait():
        sys.exit(f"tar of {photos}: exit code {packed.returncode}")
    partial.rename(source)
    os.sync()
