"""What decoding at a scale changes: the same photographs decoded whole and at a scale, through the same transform.

    python benchmarks/scaled.py PHOTOS [--side 224] [--count 500]

PHOTOS is a set of benchmarks/photos.py. The transform is Resize to `--side`: the pipeline decodes at a scale where the transform
begins with a resize to half of the picture or less. Prints one line of JSON: the share of pictures that were decoded at a scale, the
difference of their pixels (0 to 255, all channels: mean, 99th percentile, largest) and milliseconds a picture of both ways, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np

from pipeline.augment import Augmenter, prepare
from pipeline.decode import decode_image, use_one_thread


def difference(histogram: np.ndarray) -> dict[str, float]:
    """Return mean, 99th percentile and the largest of differences, of which `histogram` counts each from 0 on."""
    total = int(histogram.sum())
    if not total:
        return {"mean": 0.0, "p99": 0.0, "largest": 0.0}
    below = np.cumsum(histogram)
    return {
        "mean": float(histogram @ np.arange(len(histogram)) / total),
        "p99": float(np.searchsorted(below, 0.99 * total)),
        "largest": float(np.flatnonzero(histogram)[-1]),
    }


def compare(pictures: list[bytes], side: int) -> dict[str, Any]:
    """Return what the two ways differ by."""
    use_one_thread()
    prepared = prepare(A.Compose([A.Resize(side, side)]))
    augment = Augmenter(prepared.apply, isolated=False)
    histogram, scaled = np.zeros(256, np.int64), 0
    seconds: dict[str, list[float]] = {"full": [], "scaled": []}
    for data in pictures:
        made = {}
        for way, target in (("full", None), ("scaled", prepared.target)):
            began = time.perf_counter()
            decoded = decode_image(data, target)
            made[way] = decoded.shape, augment(decoded, 0)
            seconds[way].append(time.perf_counter() - began)
        (full_shape, full), (scaled_shape, other) = made["full"], made["scaled"]
        if full_shape != scaled_shape:
            scaled += 1
            histogram += np.bincount(np.abs(full.astype(np.int16) - other).ravel(), minlength=256)
    times = {f"{way}_ms": round(1000 * statistics.median(taken), 3) for way, taken in seconds.items()}
    return {"pictures": len(pictures), "scaled": scaled / len(pictures), **difference(histogram), **times}


def main() -> None:
    """Read the photographs and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--count", type=int, default=500)
    options = parser.parse_args()
    found = sorted(options.photos.rglob("*.jpg"))[: options.count]
    if not found:
        raise SystemExit(f"{options.photos}: no photographs; draw them with python benchmarks/photos.py {options.photos}")
    print(json.dumps(compare([path.read_bytes() for path in found], options.side)))


if __name__ == "__main__":
    main()
