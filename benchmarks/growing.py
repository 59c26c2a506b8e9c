"""Simulate how an epoch's time grows with the set, from 1,000 to a million pictures, loose files beside shards.

    python benchmarks/growing.py [--memory 64e9] [--cpu 3.3] [--cores 2]

Nothing is read: the requests are those of the order itself (`EpochOrder.windows`) and of a shuffled `DataLoader`, their time that of
benchmarks/drive.py's model of a 7200 rpm drive, on 2 TB of which the set takes its part. What it leaves out: file systems. Of loose
files only the one seek to each picture's bytes is counted, of shards only their windows, so both are the least that it can be.

    files   `cores` workers, each asks for a picture, waits, and decodes it; the drive serves the nearest that is asked for
    shards  windows in turn, ranges in storage order, read while others are decoded; decoding begins with the first window

A second epoch has `memory` bytes of page cache: loose files in the kernel's order (least recently used, at random), shards with
the same blocks kept. Seconds to plan the epoch (Layout, EpochOrder, first windows) are measured. Prints one line a size, then JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from drive import Model

from pipeline.epoch import EpochOrder, Layout, OrderSettings, Window, window_samples

DRIVE = Model(2e12, span=1)  # the whole drive, of which the set takes its part
PICTURE, SHARD, WINDOW = 100_000, 128 * 2**20, 32 * 2**20
LOOKED_AT = 20_000  # loose pictures that are simulated; the others cost the same
SIZES = (1_000, 10_000, 100_000, 1_000_000)


class Drive:
    """A head, and the time that has passed."""

    def __init__(self) -> None:
        self.now, self._head, self.seeks = 0.0, 0, 0

    def positioning(self, offset: int) -> float:
        """Return the seconds until the head is where bytes begin."""
        return DRIVE.positioning(self._head, offset, self.now)

    def read(self, offset: int, size: int) -> None:
        """Let the time pass that a read takes."""
        self.seeks += not DRIVE.reads_through(self._head, offset)
        self.now += self.positioning(offset) + size / DRIVE.rate
        self._head = offset + size


class Row(NamedTuple):
    """Seconds of epochs of a set of so many pictures: the first and the second; of shards the drive's part, and the plan's."""

    pictures: int
    plan: float
    files: float
    files_again: float
    shards: float
    shards_again: float
    shards_drive: float
    files_seeks: float
    shards_seeks: int


def files_epoch(pictures: int, cores: int, cpu: float, cached: float) -> tuple[float, float]:
    """Return the seconds of an epoch over loose files of which a share is in memory, and the seeks."""
    draw = random.Random(0)
    looked = min(pictures, LOOKED_AT)
    order = iter(draw.sample(range(pictures), looked))
    drive, waiting, end = Drive(), list[int](), 0.0
    ready = [0.0] * cores  # when each worker that the drive doesn't serve asks for its next picture
    while ready or waiting:
        while ready and (ready[0] <= drive.now or not waiting):
            asked = heapq.heappop(ready)
            at = next(order, None)
            if at is None:
                end = max(end, asked)
            elif draw.random() < cached:
                heapq.heappush(ready, asked + cpu)
            else:
                drive.now = max(drive.now, asked)
                waiting.append(at * PICTURE)
        if waiting:
            nearest = min(waiting, key=drive.positioning)
            waiting.remove(nearest)
            drive.read(nearest, PICTURE)
            heapq.heappush(ready, drive.now + cpu)
    return end * pictures / looked, drive.seeks * pictures / looked


def windows_in_turn(order: EpochOrder) -> list[Window]:
    """Return an epoch's windows in the order in which they are wanted."""
    lanes = order.layout.settings.lanes
    return sorted(
        (window for lane in range(lanes) for window in order.windows(lane)), key=lambda window: (window.start, window.lane)
    )


def shards_drive(windows: Sequence[Window], counts: Sequence[int], kept: float) -> tuple[float, float, int]:
    """Return the drive's seconds for an epoch, those until a window of each lane is there, and the seeks; `kept`: share in memory."""
    starts = np.concatenate([[0], np.cumsum(counts)]) * PICTURE
    drive, first, lanes = Drive(), 0.0, len({window.lane for window in windows})
    for number, window in enumerate(windows):
        for shard, begin, end in sorted(window.reads.tolist()):
            left = end - begin - int((end - begin) * kept)
            drive.read(int(starts[shard]) + begin * PICTURE, left * PICTURE)
        if number == lanes - 1:
            first = drive.now
    return drive.now, first, drive.seeks


def simulate(pictures: int, options: argparse.Namespace) -> Row:
    """Return what a set of so many pictures costs."""
    cpu, size = options.cpu / 1000, pictures * PICTURE
    per_shard = SHARD // PICTURE
    counts = [min(per_shard, pictures - at) for at in range(0, pictures, per_shard)]
    began = time.perf_counter()
    layout = Layout(counts, OrderSettings(window=window_samples(WINDOW, size, pictures)))
    order = EpochOrder(layout, 0)
    for lane in range(layout.settings.lanes):
        next(order.windows(lane))
    plan = time.perf_counter() - began
    windows = windows_in_turn(order)
    decode = pictures * cpu / options.cores
    fits = min(1.0, options.memory / size)
    first, ramp, seeks = shards_drive(windows, counts, 0.0)
    again = 0.0 if fits == 1 else shards_drive(windows, counts, fits)[0]
    files, files_seeks = files_epoch(pictures, options.cores, cpu, 0.0)
    # Of a random order an LRU cache that holds the share f has f^2 / 2 of what is asked for.
    files_again, _ = files_epoch(pictures, options.cores, cpu, 1.0 if fits == 1 else fits * fits / 2)
    return Row(pictures, plan, files, files_again, max(first, ramp + decode), max(again, decode), first, files_seeks, seeks)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=64e9, help="bytes of page cache")
    parser.add_argument("--cpu", type=float, default=3.3, help="milliseconds of CPU a picture")
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    rows = [simulate(pictures, options) for pictures in SIZES]
    print(
        f"{'pictures':>9}{'plan s':>9}{'files s':>10}{'again s':>10}{'shards s':>10}{'again s':>10}{'ratio':>7}{'seeks':>11}{'seeks':>8}"
    )
    for row in rows:
        print(
            f"{row.pictures:>9,}{row.plan:>9.4f}{row.files:>10,.0f}{row.files_again:>10,.0f}{row.shards:>10,.0f}"
            f"{row.shards_again:>10,.0f}{row.files / row.shards:>7.1f}{row.files_seeks:>11,.0f}{row.shards_seeks:>8,}"
        )
    print(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
