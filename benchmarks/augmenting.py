"""Measure what augmenting a picture costs a worker: by albumentations' own call, by the compiled one, by cv2 alone.

    python benchmarks/photos.py P --count 2000
    python benchmarks/augmenting.py P [--count 300] [--rounds 5]

Two jobs: the problem's (Resize 400, Rotate 15, ChannelDropout 0.1), and RandomResizedCrop 224 with a flip; the last Normalize of both
is the device's. Each picture is decoded and augmented by one way after the other, with caches as a worker has them; each picture
begins with another way. Printed are milliseconds of CPU a picture, without the decoding: medians over the rounds, and of their
differences. "cv2 alone" calls its functions with constants for draws: what no Compose can be faster than.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations as A
import cv2

from pipeline.augment import Augmenter, prepare, sample_seed
from pipeline.decode import decode_image, set_up_worker
from pipeline.machine import keep_memory

JOBS = {
    "the problem's": A.Compose([A.Resize(400, 400), A.Rotate(limit=15), A.ChannelDropout(p=0.1), A.Normalize()]),
    "RandomResizedCrop 224, flip": A.Compose([A.RandomResizedCrop((224, 224)), A.HorizontalFlip(), A.Normalize()]),
}


class Alone:
    """The cv2 calls of both jobs, every second picture warped or flipped, every tenth without a channel."""

    def __init__(self, job: str) -> None:
        self._call = self._problem if job == "the problem's" else self._crop
        self._matrix = cv2.getRotationMatrix2D((199.5, 199.5), 7, 1)

    def __call__(self, picture: Any, seed: int) -> Any:
        """Return the augmented picture."""
        return self._call(picture, seed)

    def _problem(self, picture: Any, seed: int) -> Any:
        picture = cv2.resize(picture, (400, 400))
        if seed % 2:
            picture = cv2.warpAffine(picture, self._matrix, (400, 400), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT)
        if seed % 10 == 0:
            picture = picture.copy()
            picture[..., seed % 3] = 0
        return picture

    def _crop(self, picture: Any, seed: int) -> Any:
        height, width = picture.shape[:2]
        top, left = height // 7, width // 7
        picture = cv2.resize(picture[top : top + height * 7 // 10, left : left + width * 7 // 10], (224, 224))
        return cv2.flip(picture, 1) if seed % 2 else picture


def ways(job: str) -> dict[str, Callable[[Any, int], Any]]:
    """Return the ways to augment by name, each with a transform of its own."""
    own = prepare(JOBS[job]).apply
    as_ever = Augmenter(own, isolated=False)
    as_ever._apply = lambda picture: own(image=picture)["image"]
    return {
        "albumentations": as_ever,
        "compiled": Augmenter(prepare(JOBS[job]).apply, isolated=False),
        "cv2 alone": Alone(job),
    }


def measure(
    found: dict[str, Callable[[Any, int], Any]], data: list[bytes], target: tuple[int, int] | None, number: int
) -> dict[str, float]:
    """Return milliseconds of CPU a picture that augmenting takes each way, each picture decoded just before."""
    spent, clock, names = dict.fromkeys(found, 0), time.thread_time_ns, list(found)
    for at, encoded in enumerate(data):
        seed = sample_seed(number, 0, str(at))
        for turn in range(len(names)):
            name = names[(at + turn) % len(names)]
            picture = decode_image(encoded, target)
            began = clock()
            found[name](picture, seed)
            spent[name] += clock() - began
    return {name: taken / len(data) / 1e6 for name, taken in spent.items()}


def main() -> None:
    """Measure both jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    set_up_worker()
    keep_memory()
    data = [path.read_bytes() for path in sorted(options.photos.rglob("*.jpg"))[: options.count]]
    for job, transform in JOBS.items():
        target, found = prepare(transform).target, ways(job)
        measure(found, data[:20], target, 0)
        rounds = [measure(found, data, target, number) for number in range(options.rounds)]
        print(f"{job}: {len(data)} pictures, {options.rounds} rounds")
        for name in found:
            each, less = [r[name] for r in rounds], [r["albumentations"] - r[name] for r in rounds]
            print(
                f"  {name:15} {statistics.median(each):.3f} ms ({min(each):.3f} to {max(each):.3f}), "
                f"less than albumentations by {statistics.median(less):.3f} ({min(less):.3f} to {max(less):.3f})"
            )


if __name__ == "__main__":
    main()
