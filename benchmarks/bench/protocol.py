"""What surrounds each program of the benchmark: its arguments, its epochs, the check of what came, its answer.

A script says in two functions how its loader's authors would have it written and read, and ends with `main(write, read)`:

    write(photos, out, plan)    makes its format of the pictures that `rows(photos)` names
    read(options)               yields for each epoch what the loop goes over: (images, labels), float32 and normalized

    python with_NAME.py write PHOTOS SET [--shards 16] [--short-side 448]
    python with_NAME.py read SET --count N [--job problem] [--workers 2] [--epochs 2] [--variant NAME] [--counters FILE]

Each prints one line of JSON. A label is the number of its picture, so the labels of an epoch tell what was lost or came twice, and
in which order. In job "bytes" images are the pictures' files. Seconds of the first epoch run from before the loader is made:
starting processes, copying and indexing are in them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from photographs import place
from processes import cpu_seconds
from sides import BYTES, JOBS, SIDES

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # at the end: no module of ours may stand for one of a library

from peers import BATCH, counted  # noqa: E402

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of Normalize, for pictures in [0, 1]
BLACK = -np.array(MEAN, np.float32) / np.array(STD, np.float32)
BUFFER_SAMPLES, BUFFER_SHARE, LEAST_BUFFER = 1000, 8, 16


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

    @property
    def remote(self) -> bool:
        """Whether the set is reached by a URL."""
        return "://" in self.folder

    @property
    def buffer(self) -> int:
        """Samples of a shuffle buffer, the same for all that have one: 1,000, of a small set an eighth.

        Of 2,000 pictures 1,000 are all that one of two workers ever sees: it would read its whole epoch before its first batch.
        """
        return max(LEAST_BUFFER, min(BUFFER_SAMPLES, self.count // BUFFER_SHARE))


@dataclass(frozen=True)
class Plan:
    """What a writer is asked for: a number of shards of equal size, and pictures that are resized first where `short_side` is given."""

    shards: int
    short_side: int | None = None

    def samples(self, count: int) -> int:
        """Return the samples of a shard."""
        return math.ceil(count / self.shards)

    def bytes(self, pictures: Iterable[tuple[Path, int]]) -> int:
        """Return the bytes of a shard, for a format that counts those of its pictures."""
        return math.ceil(sum(path.stat().st_size for path, _ in pictures) / self.shards)


Write = Callable[[Path, Path, Plan], None]
Read = Callable[[Options], Iterator[Iterable[tuple[Any, Any]]]]


def rows(photos: Path) -> list[tuple[Path, int]]:
    """Return the path and the label of each picture, in the table's order, which is a shuffled one."""
    with (photos / "train.csv").open(newline="") as file:
        return [(photos / place(row["id"]), int(row["landmark_id"])) for row in csv.DictReader(file)]


class Tally:
    """What came in an epoch; it touches each batch, and refuses what isn't as the job has it."""

    def __init__(self, options: Options, began: float) -> None:
        self._options, self._began = options, began
        self._labels: list[np.ndarray] = []
        self._arrivals: list[float] = []
        self._corners = self._dropped = 0

    def add(self, images: Any, labels: Any) -> None:
        """Count a batch."""
        if self._options.job == BYTES:
            self._check_files(images)
        else:
            self._look(np.asarray(images))
        self._arrivals.append(round(time.monotonic() - self._began, 4))
        self._labels.append(np.array(labels, dtype=np.int64).reshape(-1))
        if len(images) != len(self._labels[-1]):
            sys.exit(f"a batch of {len(images)} pictures with {len(self._labels[-1])} labels")

    def _look(self, array: np.ndarray) -> None:
        side = SIDES[self._options.job]
        if array.dtype != np.float32 or array.shape[1:] not in ((side, side, 3), (3, side, side)):
            sys.exit(f"batches are {array.dtype} {array.shape}, not float32 of {side}x{side}")
        rows_first = array if array.shape[-1] == 3 else array.transpose(0, 2, 3, 1)
        # What isn't in memory yet must come now, the same of each layout.
        points = np.ascontiguousarray(rows_first[:, ::16, ::16]).reshape(len(array), -1, 3)
        if not self._labels and not 0.2 < float(array[:4].std()) < 5:
            sys.exit(f"batches aren't normalized: their standard deviation is {float(array[:4].std()):.3g}")
        self._dropped += int((points.max(axis=1) - points.min(axis=1) < 1e-5).any(axis=1).sum())
        self._corners += int((np.abs(points[:, 0] - BLACK).max(axis=1) < 1e-3).sum())  # a rotated picture's is black

    def _check_files(self, images: Any) -> None:
        if any(bytes(memoryview(data)[:2]) != b"\xff\xd8" for data in images):
            sys.exit("job \"bytes\": a picture that isn't a JPEG's bytes")

    @property
    def labels(self) -> np.ndarray:
        """The labels that came, in their order."""
        return np.concatenate(self._labels) if self._labels else np.zeros(0, np.int64)

    def answer(self, ended: float) -> dict[str, Any]:
        """Return what the epoch came to."""
        labels, count = self.labels, self._options.count
        if len(labels) and not (labels.min() >= 0 and labels.max() < count):
            sys.exit(f"labels from {labels.min()} to {labels.max()} of {count} pictures")
        times = np.bincount(labels, minlength=count)
        each = max(1, len(labels))
        return {
            "seconds": ended - self._began,
            "arrivals": self._arrivals,
            "sizes": [len(part) for part in self._labels],
            "missing": int((times == 0).sum()),
            "doubled": int((times > 1).sum()),
            "in_order": round(float((np.diff(labels) == 1).sum()) / each, 4),
            "black_corners": round(self._corners / each, 4),
            "dropped_channels": round(self._dropped / each, 4),
        }


def repeated(labels: np.ndarray, before: np.ndarray | None) -> float:
    """Return the share of an epoch's labels that came at the same place in the epoch before it."""
    return float((labels == before).mean()) if before is not None and len(labels) == len(before) and len(labels) else 0.0


def measure(read: Read, options: Options, counters: Path | None) -> dict[str, Any]:
    """Go over the epochs."""
    # Below its supervisor lie the program's daemons too.
    root = os.getppid() if "BENCH_MEMORY" in os.environ else os.getpid()
    epochs, labels = list[dict[str, Any]](), None
    drive, cpu, began = counted(counters), cpu_seconds(root), time.monotonic()
    loaders = read(options)
    for number in range(options.epochs):
        began = time.monotonic() if number else began
        tally = Tally(options, began)
        for images, labels_of_batch in next(loaders):
            tally.add(images, labels_of_batch)
        images = labels_of_batch = None  # a batch in the loader's own memory would keep it from being given back
        ended, drive_now, cpu_now = time.monotonic(), counted(counters), cpu_seconds(root)
        more = {
            "cpu": round(cpu_now - cpu, 2),
            "repeated": round(repeated(tally.labels, labels), 4),
            "drive": {name: round(drive_now[name] - drive[name], 2) for name in drive_now},
        }
        epochs.append(tally.answer(ended) | more)
        drive, cpu, labels = drive_now, cpu_now, tally.labels
    next(loaders, None)  # past its last epoch, it cleans up
    return {"epochs": epochs}


def measure_writing(write: Write, photos: Path, out: Path, plan: Plan) -> dict[str, Any]:
    """Write the set until its bytes are on the disk; return the seconds and what it takes there."""
    began = time.monotonic()
    write(photos, out, plan)
    subprocess.run(["sync", "-f", str(out)], check=True)
    seconds = time.monotonic() - began
    found = [path for path in out.rglob("*") if path.is_file()]
    return {"seconds": seconds, "bytes": sum(path.lstat().st_blocks * 512 for path in found), "files": len(found)}


def versions() -> dict[str, str]:
    """Return the version of all that is installed here, and Python's."""
    found = {str(part.name).lower(): part.version for part in metadata.distributions()}
    return {"python": platform.python_version()} | dict(sorted(found.items()))


def parse() -> argparse.Namespace:
    """Read the command line of a program's script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write")
    writing.add_argument("photos", type=Path)
    writing.add_argument("set", type=Path)
    writing.add_argument("--shards", type=int, default=16)
    writing.add_argument("--short-side", type=int, help="resize the pictures first, to so many pixels")
    reading = verbs.add_parser("read")
    reading.add_argument("set", help="a folder or a URL")
    reading.add_argument("--local", type=Path, help="the folder behind a URL")
    reading.add_argument("--count", type=int, required=True, help="pictures in the set")
    reading.add_argument("--job", choices=JOBS, default="problem")
    reading.add_argument("--workers", type=int, default=2)
    reading.add_argument("--epochs", type=int, default=2)
    reading.add_argument("--variant", default="")
    reading.add_argument("--counters", type=Path, help="the drive's counters, read at the end of each epoch")
    return parser.parse_args()


def main(write: Write | None, read: Read) -> None:
    """Run a program."""
    given = parse()
    if given.verb == "write":
        if write is None:
            sys.exit("this program reads another one's set")
        plan = Plan(given.shards, given.short_side)
        answer = measure_writing(write, given.photos.resolve(), given.set.absolute(), plan)
    else:
        remote = "://" in given.set
        folder = given.set.rstrip("/") if remote else str(Path(given.set).resolve())
        local = given.local if remote else Path(folder)
        options = Options(folder, local, given.count, given.job, given.workers, given.epochs, given.variant)
        answer = measure(read, options, given.counters)
    print("\n" + json.dumps(answer | {"versions": versions()}), flush=True)
