"""Measure our loader against the problem's own, both from a warm page cache: interleaved rounds, medians, the ratio.

    python benchmarks/photos.py P --count 2000
    shardify build configs/glr2020.yaml --source P --out S
    python benchmarks/warm.py P S/train-shardindex.json S/val-shardindex.json [--rounds 5] [--workers 2]

Every round starts each program anew and runs two epochs; the second is compared (the problem's loader starts its workers in each
epoch, ours keeps them: both as written). float32 batches are delivered to a loop that counts.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def ours(shards: list[str], workers: int, dtype: str) -> None:
    """Run two epochs of our loader with the problem's transform, and print what `question.py` prints."""
    import albumentations as A  # noqa: PLC0415

    from pipeline import LoaderOptions, make_loader  # noqa: PLC0415

    aug = A.Compose([A.Resize(400, 400), A.Rotate(limit=15), A.ChannelDropout(p=0.1), A.Normalize()])
    options = LoaderOptions(last_batch="uneven", dtype=dtype)  # type: ignore[arg-type]
    with make_loader(shards, batch_size=64, transform=aug, num_workers=workers, options=options) as loader:
        for epoch in range(2):
            start, seen = time.perf_counter(), 0
            for _images, labels in loader:
                seen += len(labels)
            seconds = time.perf_counter() - start
            print(f"epoch {epoch}: {seconds:.2f} s, {seen / seconds:.1f} images/s", flush=True)


def run(*command: str) -> list[float]:
    """Return the images/s of each epoch that a program prints."""
    out = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout
    return [float(found) for found in re.findall(r"([\d.]+) images/s", out)]


def main() -> None:
    """Measure, or with --ours be the measured program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos")
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ours", choices=["float32", "uint8"])
    options = parser.parse_args()
    if options.ours:
        ours(options.shards, options.workers, options.ours)
        return
    workers = ["--workers", str(options.workers)]
    mine = [str(HERE / "warm.py"), options.photos, *options.shards, *workers, "--ours"]
    programs = {
        "question as written": [str(HERE / "question.py"), options.photos, *workers, "--epochs", "2"],
        "ours": [*mine, "float32"],
        "question, persistent and malloc": [
            str(HERE / "question.py"),
            options.photos,
            *workers,
            "--epochs",
            "2",
            "--persistent",
            "--malloc",
        ],
        "ours, uint8": [*mine, "uint8"],
    }
    run(*programs["question as written"])
    run(*programs["ours"])  # what isn't in the page cache is now
    measured: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(options.rounds):
        for name, command in programs.items():
            measured[name].append(run(*command)[1])
            print(f"round {number}: {name}: {measured[name][-1]:.1f} images/s", flush=True)
    base = measured["question as written"]
    for name, rates in measured.items():
        ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
        print(
            f"{name}: median {statistics.median(rates):.1f} images/s; against the question as written: "
            f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
