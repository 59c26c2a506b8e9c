#!/usr/bin/env python3
"""Measure what a table of N rows costs before the first file is touched: read it, draw the splits, put the rows in order.

    rows.py N [--mode shuffle|stratified|source] [--group]

The table is made in a temporary folder, in the layout of Google Landmarks 2020: ids of 16 hex digits, landmark ids of 80,000
classes (few large ones, many small; of less than 1.6 million rows, a class for 20), paths train/{id[0]}/{id[1]}/{id[2]}/{id}.jpg;
with --group also a column of groups of 4 rows. The stages run in a process of their own. Printed are its seconds and seconds of CPU
by stage, its peak memory (RSS), and bytes a row: what the peak is above that of the process with all imported, and what stays.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardify import order, sources
from shardify.config import BuildConfig

CLASSES = 80_000
BATCH = 1 << 16


def make_table(path: Path, rows: int, *, grouped: bool) -> None:
    """Write `rows` rows, whose ids differ, as a bijection of 64-bit numbers gives them."""
    random = np.random.default_rng(0)
    classes = max(1, min(CLASSES, rows // 20))
    weights = 1 / np.arange(1, classes + 1) ** 0.6
    weights /= weights.sum()
    with path.open("w", newline="") as file:
        file.write("id,landmark_id,shoot\n" if grouped else "id,landmark_id\n")
        for start in range(0, rows, BATCH):
            count = min(BATCH, rows - start)
            ids = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            labels = random.choice(classes, count, p=weights) * 2 + 7
            numbers = zip(range(start, start + count), ids.tolist(), labels.tolist(), strict=True)
            file.writelines(f"{i:016x},{label}" + (f",s{row // 4}\n" if grouped else "\n") for row, i, label in numbers)


def settings(root: Path, mode: str, *, grouped: bool) -> BuildConfig:
    source = {"kind": "csv", "root": root, "table": "train.csv", "id": "id", "label": "landmark_id"}
    source |= {"path": "train/{id[0]}/{id[1]}/{id[2]}/{id}.jpg"} | ({"group": "shoot"} if grouped else {})
    return BuildConfig.model_validate(
        {
            "name": "rows",
            "source": source,
            "splits": {"train": 0.98, "val": 0.02},
            "order": {"mode": mode},
            "shards": {"out": root / "out"},
        }
    )


def resident() -> int:
    """Return this process's memory now, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(config: BuildConfig) -> None:
    """Run the stages and print what they took."""
    before, times = resident(), [(time.perf_counter(), time.process_time())]
    items = sources.read(config)
    times.append((time.perf_counter(), time.process_time()))
    keys = items.keys if items.groups is None else items.groups
    items = replace(items, splits=order.draw_splits(keys, config.shares or (), config.splits_seed))
    times.append((time.perf_counter(), time.process_time()))
    parts = [np.flatnonzero(items.splits == split) for split in range(len(items.split_names))]
    settings = config.order
    slots = [order.arrange(items.keys, items.labels, mode=settings.mode, seed=settings.seed, rows=rows) for rows in parts]
    times.append((time.perf_counter(), time.process_time()))
    peak, rows = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, len(items)
    for name, (wall, cpu), (wall_before, cpu_before) in zip(("read", "splits", "order"), times[1:], times, strict=False):
        print(f"{name:8}{wall - wall_before:8.2f} s{cpu - cpu_before:8.2f} s of CPU")
    print(f"{'all':8}{times[-1][0] - times[0][0]:8.2f} s{times[-1][1] - times[0][1]:8.2f} s of CPU")
    print(f"{rows:,} rows in {sum(map(len, slots)):,} slots, {len(items.classes or ()):,} classes")
    print(
        f"peak RSS {peak / 1e6:,.0f} MB; {(peak - before) / rows:.0f} bytes a row at the peak, {(resident() - before) / rows:.0f} at the end"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int)
    parser.add_argument("--mode", choices=("shuffle", "stratified", "source"), default="shuffle")
    parser.add_argument("--group", action="store_true", help="keep groups of 4 rows in one split")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)  # the process that is measured is told where the table is
    given = parser.parse_args()
    if given.root is not None:
        measure(settings(given.root, given.mode, grouped=given.group))
        return
    with tempfile.TemporaryDirectory() as root:
        make_table(Path(root, "train.csv"), given.rows, grouped=given.group)
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--root", root], check=True)


if __name__ == "__main__":
    main()
