"""The nouns that the stages of a loader hand to each other: samples, what is wanted of them, batches.

A raw sample is {"__key__", "__url__", "__offset__", "__occurrence__", "__place__", "jpg": bytes, "cls": bytes}, by webdataset's
conventions, the bytes as views where they are decoded at once; decoded, it has "image" and "label" instead of its fields.
"__place__" is its place in the batch: samples come as their bytes do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardify.format.picture import PIXEL_LIMIT

Sample: TypeAlias = dict[str, Any]
Sides: TypeAlias = tuple[int, int]  # height, width
OnFault: TypeAlias = Callable[[Exception, int, str], None]
"""Is told of a sample that can't be used: its error, its place in the batch, and the kind of cause. Raises, or it is left out."""


def sample_bytes(sample: Sample) -> int:
    """Return the bytes of a sample's fields, encoded or decoded."""
    return sum(len(value) if type(value) is bytes else getattr(value, "nbytes", 0) for value in sample.values())


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a loader wants of a sample: the picture's field, the first that it has; the label's, and its name in a json.

    `pixels`: a decoded picture, else its bytes; `most_pixels`: how many it may have.
    """

    image: tuple[str, ...]
    label: str | None = None
    label_name: str | None = None
    pixels: bool = True
    most_pixels: int = PIXEL_LIMIT


@dataclass(frozen=True, slots=True)
class Normalization:
    """What the device does with a batch: value * scale + bias for each channel, float32 (3,) each, or (1,) for all channels."""

    scale: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker's images as they cross to the trainer: a place in shared memory that the worker uses again.

    `memory` (uint8, flat) comes with the first batch that a run has in the slot; later ones name the slot alone.
    """

    worker: int
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: torch.Tensor | None


class Batch(NamedTuple):
    """A batch: images (B, C, H, W), labels int64 (B,).

    From a loader, images are float32, float16, bfloat16 or uint8 in channels-last memory; with `decode="none"` a list of B bytes.
    `labels` is None with `label=None`.
    """

    images: Any
    labels: Any


class KeyedBatch(NamedTuple):
    """A batch with its B samples' keys."""

    images: Any
    labels: Any
    keys: list[str]


class Spent(NamedTuple):
    """What a batch cost where it was made, beside it on its way to the trainer.

    `stages`: (items, bytes, busy seconds, waiting seconds) of each of `stats.WORKER_STAGES`. `idle`: seconds since the batch before
    it. `done`: when it was ready, by `time.monotonic`, which all processes of a machine share.
    """

    worker: int
    stages: tuple[tuple[int, int, float, float], ...]
    idle: float
    done: float


class Skip(NamedTuple):
    """A sample that another one of its batch stands in for: the kind of cause, and the error that it would have been."""

    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class SkippedStats:
    """The samples of an epoch that others stood in for: how many, how many by cause, and the first 20 with the reason.

    Causes: "shard" (can't be read), "picture", "label" (can't be decoded), "transform" (failed on it).
    """

    samples: int = 0
    causes: Mapping[str, int] = field(default_factory=dict)
    first: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = ", ".join(f"{cause} {count}" for cause, count in sorted(self.causes.items(), key=lambda item: (-item[1], item[0])))
        return f"{self.samples} skipped ({told})" if self.samples else "none skipped"


class Delivery(NamedTuple):
    """A batch as it comes from a worker, what it cost, and what of it was skipped."""

    batch: Any  # a Batch, a KeyedBatch, or arrival.Ended where the epoch has no more
    spent: Spent
    skips: tuple[Skip, ...] = ()
