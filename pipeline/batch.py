"""Gathers samples into one preallocated batch, each picture written into its place as it comes.

In a worker the batch lies in shared memory from the start, so that it reaches the trainer without another copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import TransformError
from pipeline.items import Batch, KeyedBatch, Sample


class _Place:
    """The memory of one batch: (B, H, W, C), its shape and dtype set by the first picture."""

    def __init__(self, first: npt.NDArray[Any], size: int, shared: bool) -> None:
        dtype = torch.uint8 if first.dtype == np.uint8 else torch.float32
        self.tensor = _empty((size, *first.shape), dtype, shared)
        self.array = self.tensor.numpy()


def _empty(shape: tuple[int, ...], dtype: torch.dtype, shared: bool) -> torch.Tensor:
    if not shared:
        return torch.empty(shape, dtype=dtype)
    # As torch's own default_collate does in a worker: allocated in shared memory, so that handing it over copies nothing.
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def gather(samples: Iterable[Sample], *, size: int, keys: bool, shared: bool) -> Iterator[Batch | KeyedBatch]:
    """Yield one batch of `size` samples: images (B, H, W, C) uint8 or float32 (a list where they are bytes), labels an int64 array.

    Raises TransformError, naming two keys and their sizes, where pictures don't fit together.
    """
    place: _Place | None = None
    raw: list[bytes] = []
    labels: list[int | None] = []
    names: list[str] = []
    where: list[str] = []
    for i, sample in enumerate(samples):
        names.append(sample["__key__"])
        where.append(sample["__url__"])
        labels.append(sample["label"])
        if isinstance(sample["image"], bytes):
            raw.append(sample["image"])
            continue
        picture = _as_array(sample)
        if place is None:
            place = _Place(picture, size, shared)
        if picture.shape != place.array.shape[1:] or picture.dtype != place.array.dtype:
            raise TransformError(_unequal(place, picture, (where[0], names[0]), (where[i], names[i])))
        place.array[i] = picture
    images = raw if place is None else place.tensor
    # Not a tensor: each would cross to the trainer in shared memory and a descriptor of its own.
    targets = None if None in labels else np.array(labels, np.int64)
    yield KeyedBatch(images, targets, names) if keys else Batch(images, targets)


def _as_array(sample: Sample) -> npt.NDArray[Any]:
    """Return what a transform gave (array HWC or HW, tensor CHW or HW) as an array (H, W, C), uint8 or float32."""
    image: Any = sample["image"]
    if isinstance(image, torch.Tensor):
        image = image.detach().permute(1, 2, 0).numpy() if image.ndim == 3 else image.detach().numpy()
    if not isinstance(image, np.ndarray):
        raise TransformError(
            f"{sample['__url__']}: sample {sample['__key__']!r}: the transform gave {type(image).__name__}, "
            "not an array (H, W, C) or a tensor (C, H, W)"
        )
    if image.ndim == 2:
        image = image[..., None]
    if image.dtype in (np.float64, np.float16):  # some of albumentations' own transforms give these
        image = image.astype(np.float32)
    if image.ndim != 3 or 0 in image.shape or image.dtype not in (np.uint8, np.float32):
        raise TransformError(
            f"{sample['__url__']}: sample {sample['__key__']!r}: the transform gave {image.dtype} {image.shape}; "
            "a batch takes uint8 or float pictures of (H, W, C), or tensors of (C, H, W)"
        )
    picture: npt.NDArray[Any] = image
    return picture


def _unequal(place: _Place, picture: npt.NDArray[Any], first: tuple[str, str], other: tuple[str, str]) -> str:
    """Name both pictures that don't fit into one batch, and the cure."""
    a = f"{place.array.shape[1]}x{place.array.shape[2]}x{place.array.shape[3]} {place.array.dtype}"
    b = f"{picture.shape[0]}x{picture.shape[1]}x{picture.shape[2]} {picture.dtype}"
    return (
        f"pictures of unequal size in one batch (height x width x channels): {first[1]!r} of {first[0]} is {a}, "
        f"{other[1]!r} of {other[0]} is {b}; "
        "begin the transform with A.Resize(height, width) or A.RandomResizedCrop((height, width))"
    )
