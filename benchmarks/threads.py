"""Decodes and transforms in threads of one process, in processes, and in processes of threads: without any loader, hand-over or disk.

    python benchmarks/threads.py PHOTOS [--count 1000] [--rounds 5]

PHOTOS is a set of benchmarks/photos.py; its pictures are in memory. The work is a worker's: `decode_image`, the problem's transform, the
picture written into its place in a batch. All ways have as many threads in all as there are cores; ways in turn, medians of images/s.
A way of threads hands nothing over and shares the interpreter's lock; what processes cost beside the work is in benchmarks/bench.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import threading
import time
from pathlib import Path

import numpy as np
from peers import BATCH, transform

from pipeline.augment import Augmenter, prepare
from pipeline.decode import decode_image, set_up_worker
from pipeline.machine import keep_memory

SIDE = 400


def work(pictures: list[bytes]) -> None:
    """Decode and transform pictures, into the places of a batch."""
    augment = Augmenter(prepare(transform()).apply, isolated=False)
    places = np.empty((BATCH, SIDE, SIDE, 3), np.uint8)
    for number, data in enumerate(pictures):
        places[number % BATCH] = augment(decode_image(data), number)


def process(pictures: list[bytes], threads: int) -> None:
    """Do it in so many threads."""
    keep_memory()
    set_up_worker()
    if threads == 1:
        work(pictures)
        return
    running = [threading.Thread(target=work, args=(pictures[number::threads],)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def measure(pictures: list[bytes], processes: int, threads: int) -> float:
    """Return images a second of processes of threads; their start by fork is in it."""
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=process, args=(pictures[number::processes], threads)) for number in range(processes)]
    began = time.perf_counter()
    for one in running:
        one.start()
    for one in running:
        one.join()
        assert one.exitcode == 0
    return len(pictures) / (time.perf_counter() - began)


def main() -> None:
    """Measure all ways that the cores allow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pictures = [path.read_bytes() for path in sorted(options.photos.rglob("*.jpg"))[: options.count]]
    cores = len(os.sched_getaffinity(0))
    ways = [(processes, cores // processes) for processes in range(1, cores + 1) if cores % processes == 0]
    rates: dict[tuple[int, int], list[float]] = {way: [] for way in [*ways, (1, 1)]}
    for _ in range(options.rounds):
        for way, so_far in rates.items():
            so_far.append(measure(pictures, *way))
    for (processes, threads), found in rates.items():
        print(
            f"{processes} processes of {threads} threads: {statistics.median(found):.0f} images/s ({min(found):.0f} to {max(found):.0f})"
        )


if __name__ == "__main__":
    main()
