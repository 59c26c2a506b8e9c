"""What is done to each picture: the two jobs as albumentations has them, the same for all programs without operators of their own.

problem   the problem's own: Resize 400, Rotate 15, ChannelDropout 0.1, Normalize
crop      everyone's: RandomResizedCrop 224, flip, Normalize
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
from sides import SIDES

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else the import asks the network for a newer version
import albumentations as A
import cv2


def transform(job: str, *, resized: bool = False) -> Any:
    """Return a job's transform; of pictures that are `resized` already, without the resizing of job "problem"."""
    side = SIDES[job]
    if job == "problem":
        parts = [A.Resize(side, side), A.Rotate(limit=15), A.ChannelDropout(p=0.1), A.Normalize()]
        return A.Compose(parts[1:] if resized else parts)
    return A.Compose([A.RandomResizedCrop((side, side)), A.HorizontalFlip(p=0.5), A.Normalize()])


class Transform:
    """Runs a job's transform on an image; threads and processes that share one have each a copy."""

    def __init__(self, job: str, *, resized: bool = False) -> None:
        self._job, self._resized = job, resized
        self._own: threading.local | None = None

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Return the float32 picture (side, side, 3)."""
        if self._own is None:  # in the process that needs it
            cv2.setNumThreads(0)  # the workers are the parallelism
            self._own = threading.local()
        if not hasattr(self._own, "transform"):
            self._own.transform = transform(self._job, resized=self._resized)
        return self._own.transform(image=image)["image"]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_own": None}


class Picture:
    """Makes a float32 picture (side, side, 3) of a JPEG's bytes."""

    def __init__(self, job: str) -> None:
        self._transform = Transform(job)

    def __call__(self, data: Any) -> np.ndarray:
        """Decode and transform."""
        return self._transform(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB))


def shrink(data: bytes, short_side: int) -> bytes:
    """Return a JPEG's bytes with its shorter side made so many pixels, encoded at quality 90, for writers that don't resize."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    scale = short_side / min(image.shape[:2])
    if scale >= 1:
        return data
    small = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return bytes(cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, 90])[1])
