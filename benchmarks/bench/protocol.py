"""What surrounds each program of the benchmark: its arguments, its epochs, the check that every picture came once, its answer.

A script says in two functions how its loader's authors would have it written and read, and ends with `main(write, read, ...)`:

    write(photos, out, shard_bytes)    makes its format of the pictures that `rows(photos)` names
    read(options)                      yields for each epoch what the loop goes over: (images, labels), float32 and normalized

    python with_NAME.py write PHOTOS SET [--shard-bytes N]
    python with_NAME.py read SET --count N [--job problem] [--workers 2] [--epochs 2] [--variant NAME] [--counters FILE]

Each prints one line of JSON. A label is the number of its picture, so the labels of an epoch tell what was lost or came twice.
Seconds of the first epoch run from before the loader is made: starting processes, copying and indexing are in them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # at the end: no module of ours may stand for one of a library

from peers import BATCH, counted  # noqa: E402
from sides import SIDES  # noqa: E402

COMMON = ("torch", "numpy", "opencv-python-headless", "albumentations")


@dataclass(frozen=True)
class Options:
    """What a program is asked to read.

    folder: its set, as a path or a URL; `local` is then the folder that the server has.
    """

    folder: str
    local: Path
    count: int
    job: str
    workers: int
    epochs: int
    variant: str
    batch: int = BATCH

    def files(self, suffix: str) -> list[str]:
        """Return the set's files with a suffix, as paths or URLs, in order."""
        return [f"{self.folder}/{path.name}" for path in sorted(self.local.iterdir()) if path.name.endswith(suffix)]


Write = Callable[[Path, Path, int], None]
Read = Callable[[Options], Iterator[Iterable[tuple[Any, Any]]]]


def rows(photos: Path) -> list[tuple[Path, int]]:
    """Return the path and the label of each picture, in the table's order, which is a shuffled one."""
    with (photos / "train.csv").open(newline="") as file:
        return [(photos / place(row["id"]), int(row["landmark_id"])) for row in csv.DictReader(file)]


def place(key: str) -> str:
    """Return a picture's path in its set of loose files."""
    return f"train/{key[0]}/{key[1]}/{key[2]}/{key}.jpg"


class Tally:
    """What came in an epoch; it touches each batch, and refuses what isn't a float32 batch of the job's size."""

    def __init__(self, options: Options, began: float) -> None:
        self._options, self._began = options, began
        self._labels: list[np.ndarray] = []
        self._first = 0.0

    def add(self, images: Any, labels: Any) -> None:
        """Count a batch."""
        array = np.asarray(images)
        rows_first = array if array.shape[-1] == 3 else array.transpose(0, 2, 3, 1)
        float(rows_first[:, ::16, ::16].sum())  # what isn't in memory yet must come now, the same of each layout
        if not self._labels:
            self._first = time.monotonic() - self._began
        self._check(array)
        self._labels.append(np.array(labels, dtype=np.int64).reshape(-1))
        if len(array) != len(self._labels[-1]):
            sys.exit(f"a batch of {len(array)} pictures with {len(self._labels[-1])} labels")

    def _check(self, array: np.ndarray) -> None:
        side = SIDES[self._options.job]
        if array.dtype != np.float32 or array.shape[1:] not in ((side, side, 3), (3, side, side)):
            sys.exit(f"batches are {array.dtype} {array.shape}, not float32 of {side}x{side}")
        if not self._labels and not 0.2 < float(array[:4].std()) < 5:
            sys.exit(f"batches aren't normalized: their standard deviation is {float(array[:4].std()):.3g}")

    def answer(self, ended: float) -> dict[str, Any]:
        """Return what the epoch came to."""
        labels = np.concatenate(self._labels) if self._labels else np.zeros(0, np.int64)
        count = self._options.count
        if len(labels) and not (labels.min() >= 0 and labels.max() < count):
            sys.exit(f"labels from {labels.min()} to {labels.max()} of {count} pictures")
        times = np.bincount(labels, minlength=count)
        return {
            "seconds": ended - self._began,
            "first_batch": self._first,
            "samples": len(labels),
            "batches": len(self._labels),
            "first_samples": len(self._labels[0]) if self._labels else 0,
            "missing": int((times == 0).sum()),
            "doubled": int((times > 1).sum()),
        }


def measure(read: Read, options: Options, counters: Path | None) -> dict[str, Any]:
    """Go over the epochs."""
    epochs, before = list[dict[str, Any]](), counted(counters)
    began = time.monotonic()
    loaders = read(options)
    first = 0.0
    for number in range(options.epochs):
        began = time.monotonic() if number else began
        tally = Tally(options, began)
        for images, labels in next(loaders):
            tally.add(images, labels)
        ended, now = time.monotonic(), counted(counters)
        epochs.append(tally.answer(ended) | {"drive": {name: now[name] - before[name] for name in now}})
        before, first = now, first or began + epochs[0]["first_batch"]
    next(loaders, None)  # past its last epoch, it cleans up
    return {"from_start": first - process_start(), "epochs": epochs}


def process_start() -> float:
    """Return when this process began, by the monotonic clock."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - since_boot


def measure_writing(write: Write, photos: Path, out: Path, shard_bytes: int) -> dict[str, Any]:
    """Write the set until its bytes are on the disk; return the seconds and what it takes there."""
    began = time.monotonic()
    write(photos, out, shard_bytes)
    subprocess.run(["sync", "-f", str(out)], check=True)
    seconds = time.monotonic() - began
    found = [path for path in out.rglob("*") if path.is_file()]
    return {"seconds": seconds, "bytes": sum(path.lstat().st_blocks * 512 for path in found), "files": len(found)}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, and Python's."""
    found = {"python": platform.python_version()}
    for name in (*packages, *COMMON):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def parse() -> argparse.Namespace:
    """Read the command line of a program's script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write")
    writing.add_argument("photos", type=Path)
    writing.add_argument("set", type=Path)
    writing.add_argument("--shard-bytes", type=int, default=64 * 2**20)
    reading = verbs.add_parser("read")
    reading.add_argument("set", help="a folder or a URL")
    reading.add_argument("--local", type=Path, help="the folder behind a URL")
    reading.add_argument("--count", type=int, required=True, help="pictures in the set")
    reading.add_argument("--job", choices=SIDES, default="problem")
    reading.add_argument("--workers", type=int, default=2)
    reading.add_argument("--epochs", type=int, default=2)
    reading.add_argument("--variant", default="")
    reading.add_argument("--counters", type=Path, help="the drive's counters, read at the end of each epoch")
    return parser.parse_args()


def main(write: Write | None, read: Read, *, packages: Sequence[str] = ()) -> None:
    """Run a program."""
    given = parse()
    if given.verb == "write":
        if write is None:
            sys.exit("this program reads another one's set")
        answer = measure_writing(write, given.photos.resolve(), given.set.absolute(), given.shard_bytes)
    else:
        remote = "://" in given.set
        folder = given.set.rstrip("/") if remote else str(Path(given.set).resolve())
        local = given.local if remote else Path(folder)
        options = Options(folder, local, given.count, given.job, given.workers, given.epochs, given.variant)
        answer = measure(read, options, given.counters)
    print("\n" + json.dumps(answer | {"versions": versions(packages)}), flush=True)
