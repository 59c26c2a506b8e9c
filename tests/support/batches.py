"""What tests of the loader make of its batches."""

from __future__ import annotations

import random
from typing import Any

import cv2
import numpy as np
import torch

from pipeline import LoaderOptions

KEYED = LoaderOptions(keys=True, last_batch="uneven")


def batches_of(loader: Any) -> list[tuple[str, ...]]:
    return [tuple(batch.keys) for batch in loader]


def plain(data: bytes) -> np.ndarray:
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def draw_all(image: np.ndarray) -> np.ndarray:
    values = (random.random(), np.random.rand(), float(torch.rand(1)))
    return np.full((2, 2, 3), values, np.float32)
