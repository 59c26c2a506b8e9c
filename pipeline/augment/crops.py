"""Tells how large a picture must be decoded for a random resized crop: that of its draws, before there are any pixels."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import albumentations as A
import numpy as np

from pipeline.items import Sides

CropStep = Callable[[Any, Sides], Any]


def crops_first(compose: Any) -> bool:
    """Tell whether a Compose begins with a random resized crop, and always takes it."""
    first: Any = compose.transforms[0] if compose.transforms else None
    return type(first) is A.RandomResizedCrop and first.p >= 1 and compose.p >= 1


class Foresight:
    """Draws the crop that a Compose will take under a seed, from generators of its own."""

    def __init__(self, compose: Any) -> None:
        """Take a Compose for which `crops_first` holds."""
        self._random = random.Random(0)
        self._crop = copy.copy(compose.transforms[0])
        self._crop.set_random_state(np.random.default_rng(0), self._random)  # it draws from the other one alone

    def __call__(self, sides: Sides, seed: int) -> Sides:
        """Return height and width of the crop of a picture of these sides."""
        self._random.seed(seed)
        self._random.random()  # the Compose's own draw, against its p
        left, top, right, bottom = _drawn(self._crop, (*sides, 3))
        return bottom - top, right - left


def from_scaled(crop: Any) -> CropStep:
    """Return what takes a crop out of a picture that was decoded at a scale: by the draws for the picture in full.

    Its bounds are rounded to pixels of the scaled picture: they are off by at most half a pixel of the result, which is no larger.
    """

    def step(picture: Any, sides: Sides) -> Any:
        left, top, right, bottom = _drawn(crop, (*sides, picture.shape[2]))
        height, width = picture.shape[:2]
        rows, columns = height / sides[0], width / sides[1]
        top, left = round(top * rows), round(left * columns)
        bottom, right = max(top + 1, round(bottom * rows)), max(left + 1, round(right * columns))
        part = crop.apply(picture, crop_coords=(left, top, min(right, width), min(bottom, height)))
        return np.ascontiguousarray(part)

    return step


def _drawn(crop: Any, shape: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of the crop of a picture of this shape; it looks at nothing else of it."""
    found: tuple[int, int, int, int] = crop.get_params_dependent_on_data({"shape": shape}, {})["crop_coords"]
    return found
