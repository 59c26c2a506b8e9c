"""What each allocator costs a worker: page faults and CPU a picture, with what `make_loader` tells glibc, without it, and elsewhere.

    apt-get install libjemalloc2 libtcmalloc-minimal4 linux-perf
    python benchmarks/allocators.py SHARDS [--rounds 5] [--workers 2]

SHARDS: a manifest in the page cache. Each run is a program of its own, two epochs, ways in turn; of the second the faults (minor ones,
of /proc/PID/stat, as `perf stat -e page-faults` counts them), and CPU of all workers are taken, and of the trainer. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from peers import BATCH, transform
from runs import print_medians

WAYS = {
    "glibc, told to keep": "",
    "glibc as it is": "",
    "jemalloc": "libjemalloc.so.2",
    "tcmalloc": "libtcmalloc_minimal.so.4",
}
MINOR, USER, SYSTEM = 9, 13, 14  # fields of /proc/PID/stat behind the name, counted from the state as 2


def counted(process: int) -> tuple[int, float]:
    """Return a process's minor page faults and seconds of CPU."""
    fields = ["", "", *Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()]
    return int(fields[MINOR]), (int(fields[USER]) + int(fields[SYSTEM])) / os.sysconf("SC_CLK_TCK")


def read(shards: str, way: str, workers: int) -> None:
    """Go over two epochs, and print what the second cost."""
    import pipeline.worker  # noqa: PLC0415
    from pipeline import LoaderOptions, make_loader  # noqa: PLC0415

    if way != "glibc, told to keep":
        pipeline.worker.keep_memory = lambda: None  # workers are forked
    options = LoaderOptions(last_batch="uneven", multiprocessing_context="fork")
    with make_loader(shards, batch_size=BATCH, transform=transform(), num_workers=workers, options=options) as loader:
        for _ in loader:
            pass
        those = [worker.pid for worker in loader._loader._iterator._workers]  # type: ignore[union-attr]
        before, own, samples = [counted(pid) for pid in those], counted(os.getpid()), 0
        for _images, labels in loader:
            samples += len(labels)
        after, now = [counted(pid) for pid in those], counted(os.getpid())
    faults = sum(b[0] for b in after) - sum(a[0] for a in before)
    cpu = sum(b[1] for b in after) - sum(a[1] for a in before)
    trainer = {"trainer faults": (now[0] - own[0]) / samples, "trainer ms": 1000 * (now[1] - own[1]) / samples}
    print(json.dumps({"faults": faults / samples, "ms": 1000 * cpu / samples, **trainer}))


def library(name: str) -> str | None:
    """Return the path of a shared library; None where it isn't here."""
    return next((str(path) for path in Path("/usr/lib").glob(f"*/{name}")), None)


def main() -> None:
    """Measure each way, or with --way one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way:
        read(options.shards, options.way, options.workers)
        return
    here = {way: path for way, name in WAYS.items() if (path := library(name) if name else "") is not None}
    commands = {way: [sys.executable, __file__, options.shards, "--way", way, "--workers", str(options.workers)] for way in here}
    print_medians(commands, options.rounds, {way: {"LD_PRELOAD": path} for way, path in here.items() if path})


if __name__ == "__main__":
    main()
