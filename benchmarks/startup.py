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
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

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
    import albumentations as A  # noqa: PLC0415

    from pipeline import LoaderOptions, make_loader  # noqa: PLC0415

    marks.append(time.perf_counter())
    apply = A.Compose([A.Resize(400, 400), A.Rotate(limit=15), A.ChannelDropout(p=0.1), A.Normalize()])
    options = LoaderOptions(**WAYS[way])  # type: ignore[arg-type]
    workers = 0 if way == "no workers" else workers
    with make_loader(shards, batch_size=64, transform=apply, num_workers=workers, options=options) as loader:
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


def measured(shards: str, rounds: int, workers: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each way with its milliseconds, round after round; what comes first warms the page cache and doesn't count."""
    for number in range(rounds + 1):
        for way in WAYS:
            command = [sys.executable, __file__, shards, "--way", way, "--workers", str(workers)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            if number:
                yield way, json.loads(done.stdout)


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
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for way, stages in measured(options.shards, options.rounds, options.workers):
        found[way].append(stages)
    for way, all_of in found.items():
        medians = {stage: statistics.median(one[stage] for one in all_of) for stage in all_of[0]}
        print(f"{way}: " + ", ".join(f"{stage} {value:.0f}" for stage, value in medians.items()))


if __name__ == "__main__":
    main()
