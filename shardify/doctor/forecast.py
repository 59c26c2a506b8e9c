"""Forecasts how long an epoch takes, from what was measured; a pure function from figures to figures.

    workers -> disk (reads/s by how many wait) -> CPU (as many at once as there are CPUs) -> back to the disk

A worker waits for its picture, then works on it. W of them go round between two stations, so disk and CPU overlap as far as W
allows: no epoch is simply the sum of both times, nor the longer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# What a training transform and delivery cost beside decoding, as so many million pixels more to decode: Resize 400, Rotate,
# ChannelDropout, Normalize and float32 batches took 2.5 ms a picture where decoding 800x600 takes 2.0, through make_loader.
TRANSFORM_MEGAPIXELS = 0.6
# A plain torch loader over files needs so many times the CPU of make_loader for the same work (docs/decisions, warm throughput).
PLAIN_COST = 2.2
# Inodes that one read of an inode table brings: ext4 reads 32 blocks ahead. A folder of more files counts as several.
_INODES_A_READ = 512


@dataclass(frozen=True, slots=True)
class Curve:
    """Reads a second by how many wait at once: measured points (depth, reads/s), interpolated on a log scale, flat beyond."""

    points: tuple[tuple[int, float], ...]

    def __call__(self, depth: int) -> float:
        """Return the reads a second with `depth` waiting (1 or more)."""
        points = sorted(self.points)
        if depth <= points[0][0]:
            return points[0][1]
        for (low, slow), (high, fast) in pairwise(points):
            if depth <= high:
                part = math.log(depth / low) / math.log(high / low)
                return float(slow * (fast / slow) ** part)
        return points[-1][1]


@dataclass(frozen=True, slots=True)
class Machine:
    """Who works: `workers` processes (0: the trainer's own) on `cpus` CPUs, `cpu_seconds` a picture."""

    workers: int
    cpus: int
    cpu_seconds: float

    @property
    def warm_rate(self) -> float:
        """Pictures a second where no disk has to be waited for."""
        return min(max(1, self.workers), self.cpus) / self.cpu_seconds


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch: its seconds, its pictures a second, and what limits it ("disk" or "CPU")."""

    seconds: float
    per_second: float
    limit: str


def cold_files(data: Curve, requests: Curve, names: float, workers: int) -> Callable[[int], float]:
    """Return the files a second of `workers` by how many of them wait, where names and inodes take `names` seconds a file besides.

    `data` are files read in steps, `requests` pieces read in one request. A decoder asks for a file in steps, and each step of one
    worker may meet another's in between, whether or not they wait at the same moment: on an emulated hard disk two workers made
    6,500 seeks for 2,000 files, as two threads that only read, where one thread made 3,700. So no file comes faster than with all
    workers at work. Looking up a name is single requests, which more workers don't slow down.
    """
    alone, together = requests(1), data(max(1, workers))
    return lambda waiting: 1 / (1 / min(data(waiting), together) + names * alone / requests(waiting))


def read_one_by_one(pictures: int, disk: Callable[[int], float], machine: Machine) -> Epoch:
    """Return the epoch of workers that each wait for the picture they need.

    A closed queue of two stations with W customers (birth and death: `weights[n]` is how often n of them wait for the disk); each
    station's service is taken as exponential, which for W = 1 is exact: the sum of both times.
    """
    workers = max(1, machine.workers)
    logs = [0.0]
    for waiting in range(1, workers + 1):
        computing = min(workers - waiting + 1, machine.cpus)
        logs.append(logs[-1] + math.log(computing / machine.cpu_seconds / disk(waiting)))
    top = max(logs)
    weights = [math.exp(log - top) for log in logs]
    rate = sum(weight * disk(n) for n, weight in enumerate(weights) if n) / sum(weights)
    return Epoch(pictures / rate, rate, "disk" if disk(workers) < machine.warm_rate else "CPU")


def read_ahead(pictures: int, per_second: float, machine: Machine) -> Epoch:
    """Return the epoch where a reader of its own runs ahead of the workers: the slower of both decides."""
    rate = min(per_second, machine.warm_rate)
    return Epoch(pictures / rate, rate, "disk" if per_second < machine.warm_rate else "CPU")


def warm(pictures: int, machine: Machine) -> Epoch:
    """Return the epoch from the page cache."""
    return Epoch(pictures / machine.warm_rate, machine.warm_rate, "CPU")


def name_seconds(cold: Sequence[float], data_seconds: float, pictures: int, folders: float) -> float:
    """Return how long an epoch of cold names and inodes takes at depth 1, all files together.

    `cold` are the seconds that random files took one after the other, in order, where nothing was cached; `data_seconds` what one
    takes when its name and inode are. What a file costs beside its data is paid once for each neighborhood of inodes (a folder, or
    512 files of a large one), so a sample, whose files are nearly all the first of theirs, says too much for a whole set.
    The second half of the sample tells what a neighborhood costs; what the first half took beyond that (upper folders, inode
    tables that many folders share) is paid once.
    """
    if not cold or not pictures:
        return 0.0
    hoods = max(1.0, folders * math.ceil(pictures / max(1.0, folders) / _INODES_A_READ))
    half, first = len(cold) // 2, _touched(len(cold) // 2, pictures, hoods)
    excess = [seconds - data_seconds for seconds in cold]
    each = max(0.0, sum(excess[half:])) / max(_touched(len(cold), pictures, hoods) - first, 1e-3)
    once = max(0.0, sum(excess[:half]) - each * first)
    return once + each * hoods


def _touched(files: int, pictures: int, hoods: float) -> float:
    """Return in how many of `hoods` equal neighborhoods of `pictures` files some of them, taken at random, lie."""
    return hoods * (1 - math.pow(max(0.0, 1 - files / pictures), pictures / hoods))
