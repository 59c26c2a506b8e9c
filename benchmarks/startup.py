"""What a trainer waits for until its first batch: importing, `make_loader`, starting workers, the first window.

    python benchmarks/startup.py SHARDS [--rounds 5] [--workers 2] [--device cpu]

SHARDS: a manifest in the page cache. Each start is a program of its own that has imported torch, as a trainer has; ways in turn. Prints
medians in milliseconds: `import` of pipeline and albumentations after torch, `make_loader`, `iter` (workers and prefetcher are
started), and `batch`, from then until the first batch of 64 is there; and until the first batch of a second epoch, with the same
workers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise

from peers import BATCH, transform
from runs import print_medians

WAYS = {
    "fork": {"multiprocessing_context": "fork"},
    "forkserver": {"multiprocessing_context": "forkserver"},
    "spawn": {"multiprocessing_context": "spawn"},
    "fork, no prefetcher": {"multiprocessing_context": "fork", "prefetch": False},
    "no workers": {},
}


def start(shards: str, way: str, workers: int) -> None:
    """Begin to train, and print the milliseconds of each stage."""
    import torch  # noqa: F401, PLC0415

    marks = [time.perf_counter()]
    import albumentations  # noqa: F401, PLC0415

    from pipeline import LoaderOptions, make_loader  # noqa: PLC0415

    marks.append(time.perf_counter())
    apply = transform()
    options = LoaderOptions(**WAYS[way])  # type: ignore[arg-type]
    workers = 0 if way == "no workers" else workers
    with make_loader(shards, batch_size=BATCH, transform=apply, num_workers=workers, options=options) as loader:
        marks.append(time.perf_counter())
        batches = iter(loader)
        marks.append(time.perf_counter())
        next(batches)
        marks.append(time.perf_counter())
        for _ in batches:
            pass
        again = time.perf_counter()
        next(iter(loader))
        seconds = [after - before for before, after in pairwise(marks)] + [time.perf_counter() - again]
    stages = ("import", "make_loader", "iter", "batch", "second epoch")
    print(json.dumps({stage: 1000 * taken for stage, taken in zip(stages, seconds, strict=True)}))


def main() -> None:
    """Start again and again, or with --way once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way:
        start(options.shards, options.way, options.workers)
        return
    commands = {way: [sys.executable, __file__, options.shards, "--way", way, "--workers", str(options.workers)] for way in WAYS}
    print_medians(commands, options.rounds, {})


if __name__ == "__main__":
    main()
