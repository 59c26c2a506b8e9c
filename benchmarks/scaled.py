"""What decoding at a scale changes: the same photographs decoded whole and at a scale, through the same transform.

    python benchmarks/scaled.py PHOTOS [--side 224] [--count 500] [--crop]

PHOTOS is a set of benchmarks/photos.py. The transform is Resize to `--side`, with `--crop` RandomResizedCrop: the pipeline decodes at
a scale what the transform makes half as large or less. Prints one line of JSON: the share of pictures that were decoded at a scale,
the difference of their pixels (0 to 255, all channels: mean, 99th percentile, largest) and milliseconds a picture of both ways, means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np

from pipeline.augment import Augmenter, prepare
from pipeline.augment.crops import Foresight
from pipeline.decode import decode_for_crop, decode_image, set_up_worker


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


def compare(pictures: list[bytes], side: int, *, crop: bool = False) -> dict[str, Any]:
    """Return what the two ways differ by."""
    set_up_worker()
    prepared = prepare(A.Compose([A.RandomResizedCrop((side, side)) if crop else A.Resize(side, side)]))
    apply: Any = prepared.apply
    augment, foresight = Augmenter(apply, isolated=False), Foresight(apply) if crop else None
    histogram, scaled = np.zeros(256, np.int64), 0
    seconds: dict[str, list[float]] = {"full": [], "scaled": []}
    for seed, data in enumerate(pictures):
        made = {}
        for way, target in (("full", None), ("scaled", (side, side))):
            began, sides = time.perf_counter(), None
            if foresight is not None and target is not None:
                decoded, sides = decode_for_crop(data, target, partial(foresight, seed=seed))
            else:
                decoded = decode_image(data, target)
            made[way] = decoded.shape, augment(decoded, seed, sides)
            seconds[way].append(time.perf_counter() - began)
        (full_shape, full), (scaled_shape, other) = made["full"], made["scaled"]
        if full_shape != scaled_shape:
            scaled += 1
            histogram += np.bincount(np.abs(full.astype(np.int16) - other).ravel(), minlength=256)
    times = {f"{way}_ms": round(1000 * statistics.mean(taken), 3) for way, taken in seconds.items()}
    return {"pictures": len(pictures), "scaled": scaled / len(pictures), **difference(histogram), **times}


def main() -> None:
    """Read the photographs and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--crop", action="store_true")
    options = parser.parse_args()
    found = sorted(options.photos.rglob("*.jpg"))[: options.count]
    if not found:
        raise SystemExit(f"{options.photos}: no photographs; draw them with python benchmarks/photos.py {options.photos}")
    print(json.dumps(compare([path.read_bytes() for path in found], options.side, crop=options.crop)))


if __name__ == "__main__":
    main()
