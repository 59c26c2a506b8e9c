"""Measure what the plan of a very large set costs: seconds and memory from nothing to the first token's samples.

    python benchmarks/plan.py [--shards 1000000] [--rounds 3] [--work plan-scratch] [--profile]

order     Layout, EpochOrder, Steps, the first token and its places, from synthetic counts: 1,000 samples a shard
manifest  `resolve` of a manifest of that many shards (which aren't there: only their names are looked up, one listing of a folder
          of empty files), from reading it to the set; with --profile, where the time goes

Each run is a process of its own: seconds from before it imports what it measures, its peak resident memory (the program's
imports, some 60 MB, included), and the seconds of each step. Folder and manifest are made once, in --work (on a tmpfs: an ext4 takes
minutes for a million files).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import runs

HERE = Path(__file__).resolve()
SAMPLES = 1000  # a shard
WINDOW = 335  # samples of 100 KB in 32 MiB
BATCH = 64
GOAL_SECONDS, GOAL_BYTES = 10, 2e9


class Watch:
    """The seconds of each step."""

    def __init__(self) -> None:
        self.began = self._last = time.perf_counter()
        self.steps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End a step."""
        now = time.perf_counter()
        self.steps[name], self._last = now - self._last, now


def order(shards: int) -> dict[str, Any]:
    """Plan an epoch from counts alone, as the first token needs it."""
    watch = Watch()
    import numpy as np  # noqa: PLC0415

    from pipeline.epoch import EpochOrder, Layout, OrderSettings, Steps  # noqa: PLC0415

    watch.lap("import")
    counts = np.full(shards, SAMPLES)
    layout = Layout(counts, OrderSettings(window=WINDOW))
    watch.lap("layout")
    epoch = EpochOrder(layout, 0)
    watch.lap("epoch")
    steps = Steps(samples=layout.samples, batch_size=BATCH, last_batch="drop")
    positions, _ = steps.token(0).positions(layout.samples, 1)
    shard, _ = epoch.locate(positions)
    watch.lap("token")
    windows = [next(epoch.windows(lane)) for lane in range(8)]
    watch.lap("windows")
    return {"samples": len(shard), "windows": len(windows), **done(watch)}


def manifest(folder: Path, *, profile: bool) -> dict[str, Any]:
    """Resolve a manifest."""
    watch = Watch()
    from pipeline.urls import resolve  # noqa: PLC0415

    watch.lap("import")
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    found = resolve(folder / "train-shardindex.json")
    profiler.disable()
    watch.lap("resolve")
    digest = found.digest
    watch.lap("digest")
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    return {"shards": len(found.shards), "digest": digest[:12], **done(watch)}


def done(watch: Watch) -> dict[str, Any]:
    """Return what a run took."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": time.perf_counter() - watch.began, "peak": peak, "steps": watch.steps}


def lay(folder: Path, shards: int) -> None:
    """Write a manifest of `shards` shards, and an empty file for each."""
    from shardify.format import manifest as layout  # noqa: PLC0415
    from shardify.format.names import shard_name  # noqa: PLC0415

    folder.mkdir(parents=True)
    entries = []
    for number in range(shards):
        name = shard_name("train", number)
        (folder / name).touch()
        entries.append(layout.ShardEntry(name, SAMPLES, SAMPLES * 100_000, f"{number:064x}"))
    whole = layout.Manifest("plan", "train", tuple(entries), classes=tuple(f"class {n}" for n in range(1000)))
    (folder / "train-shardindex.json").write_bytes(layout.dump(whole))


def measure(options: argparse.Namespace, results: runs.Results) -> None:
    """Run each program in processes of its own, in turn."""
    for number in range(options.rounds):
        for what in ("order", "manifest"):
            found = runs.run([sys.executable, HERE, "--be", what, "--shards", str(options.shards), "--work", options.work]).answer
            results.add(round=number, what=what, seconds=found["seconds"], peak=found["peak"], steps=found["steps"])
    for what in ("order", "manifest"):
        results.expect(f"{what}: seconds", results.median(what, "seconds"), at_most=GOAL_SECONDS)
        results.expect(f"{what}: peak bytes", results.median(what, "peak"), at_most=GOAL_BYTES)
    total = sum(results.median(what, "seconds") for what in ("order", "manifest"))
    results.expect("manifest and order: seconds to the first token", total, at_most=GOAL_SECONDS)


def main() -> None:
    """Measure, or with --be be the measured program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("plan-scratch"), help="a new folder, removed at the end")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--be", choices=["order", "manifest"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        print(json.dumps(order(options.shards) if options.be == "order" else manifest(options.work, profile=options.profile)))
        return
    lay(options.work, options.shards)
    try:
        results = runs.Results("plan")
        measure(options, results)
        if options.profile:
            manifest(options.work, profile=True)
    finally:
        shutil.rmtree(options.work)
    results.show()


if __name__ == "__main__":
    main()
