"""Gathers samples into one preallocated batch, each picture written into its place as it comes.

In a worker the batch lies in one of a few slots of shared memory, used in turn: mapping 30 MB anew for each batch of 64 costs
0.6 ms a 400x400 picture in the worker and 0.4 in the trainer.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from pipeline.errors import OptionsError, TransformError
from pipeline.items import Batch, KeyedBatch, Sample, Slot

_SHARED = "/dev/shm"  # where shared memory of POSIX lies under Linux; a container often has 64 MB of it


class Slots:
    """A worker's slots, used in turn.

    `count` must be one more than the batches that a worker may be ahead of the trainer: then the trainer is done with the slot
    that comes next, as it finishes each batch before it asks for another.
    """

    def __init__(self, worker: int, count: int) -> None:
        self._worker, self._count = worker, count
        self._memory: dict[int, torch.Tensor] = {}
        self._known: set[int] = set()
        self._run = self._turn = -1

    def take(self, run: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Slot]:
        """Return the next slot's memory as a tensor of `shape`, and what tells the trainer of it."""
        if run != self._run:  # the trainer may have dropped what it was sent in the last run
            self._run, self._known = run, set()
        self._turn = (self._turn + 1) % self._count
        size = math.prod(shape) * dtype.itemsize
        if self._turn not in self._memory or len(self._memory[self._turn]) < size:
            if not self._memory:
                check_shared_memory(size, self._count)
            self._memory[self._turn] = _shared(size, self._count)
            self._known.discard(self._turn)
        memory = self._memory[self._turn]
        slot = Slot(self._worker, self._turn, shape, dtype, None if self._turn in self._known else memory)
        self._known.add(self._turn)
        return memory[:size].view(dtype).view(shape), slot


def _shared(size: int, count: int) -> torch.Tensor:
    """Return `size` bytes of shared memory, as torch's own default_collate takes them: unlinked at once, so nothing can be left.

    torch reserves them, so that memory which others took meanwhile is an error here, and no bus error later.
    """
    try:
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise OptionsError(_too_small(size, count, *_space(_SHARED))) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def check_shared_memory(size: int, count: int, place: str = _SHARED) -> None:
    """Raise OptionsError where `place` can't hold `count` batches of `size` bytes for each worker, before there is any of them.

    All workers' together must fit what it holds, this one's what is free: how much others have taken by now isn't known.
    """
    if not os.path.isdir(place):  # noqa: PTH112
        return  # not on Linux, or one that lies elsewhere
    info = get_worker_info()
    whole, free = _space(place)
    if size * count * (1 if info is None else info.num_workers) > whole or size * count > free:
        raise OptionsError(_too_small(size, count, whole, free))


def _space(place: str) -> tuple[int, int]:
    """Return the bytes that a file system holds, and those that are free."""
    found = os.statvfs(place)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _too_small(size: int, count: int, whole: int, free: int) -> str:
    info = get_worker_info()
    workers = 1 if info is None else info.num_workers
    return (
        f"{_SHARED} is too small: it holds {whole / 1e6:.0f} MB, {free / 1e6:.0f} MB of them free, and {workers} workers with "
        f"{count} batches of {size / 1e6:.1f} MB each need {size * count * workers / 1e6:.0f} MB; enlarge it "
        f"(docker run --shm-size=..., mount -o remount,size=... {_SHARED}), or take fewer workers, a smaller batch_size or "
        "prefetch_factor, or num_workers=0"
    )


class _Place:
    """The memory of one batch: (B, H, W, C), its shape and dtype set by the first picture; `sent` is what goes to the trainer."""

    def __init__(self, first: npt.NDArray[Any], size: int, slots: Slots | None, run: int) -> None:
        dtype = torch.uint8 if first.dtype == np.uint8 else torch.float32
        shape = (size, *first.shape)
        self.sent: torch.Tensor | Slot
        if slots is None:
            tensor = self.sent = torch.empty(shape, dtype=dtype)
        else:
            tensor, self.sent = slots.take(run, shape, dtype)
        self.array = tensor.numpy()


def gather(
    samples: Iterable[Sample], *, size: int, keys: bool, pixels: bool, slots: Slots | None, run: int
) -> Iterator[Batch | KeyedBatch]:
    """Yield one batch of `size` samples, in whatever order they come.

    Its images are (B, H, W, C) uint8 or float32, its labels int64 (B,) as an array or None.
    Images are a tensor, a `Slot` where there are slots, or without `pixels` a list of bytes.

    Raises TransformError, naming two keys and their sizes, where pictures don't fit together.
    """
    place: _Place | None = None
    raw = [b""] * size
    labels: list[int | None] = [None] * size
    names = [""] * size
    first: Sample = {}
    for sample in samples:
        at = sample["__place__"]
        names[at], labels[at] = sample["__key__"], sample["label"]
        if not pixels:
            raw[at] = sample["image"]
            continue
        picture = _as_array(sample)
        if place is None:
            place, first = _Place(picture, size, slots, run), sample
        if picture.shape != place.array.shape[1:] or picture.dtype != place.array.dtype:
            raise TransformError(_unequal(place, picture, first, sample))
        place.array[at] = picture
        del picture, sample["image"]  # its memory, which the caches still hold, is what the next one goes to
    images = raw if place is None else place.sent
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


def _unequal(place: _Place, picture: npt.NDArray[Any], first: Sample, other: Sample) -> str:
    """Name both pictures that don't fit into one batch, and the cure."""
    a = f"{place.array.shape[1]}x{place.array.shape[2]}x{place.array.shape[3]} {place.array.dtype}"
    b = f"{picture.shape[0]}x{picture.shape[1]}x{picture.shape[2]} {picture.dtype}"
    if place.array.shape[1:] == picture.shape:
        return (
            f"pictures of two types in one batch: {first['__key__']!r} of {first['__url__']} is {a}, {other['__key__']!r} of "
            f"{other['__url__']} is {b}; "
            "a transform gives all the same: let A.Normalize(p=1) end it"
        )
    return (
        f"pictures of unequal size in one batch (height x width x channels): {first['__key__']!r} of {first['__url__']} is {a}, "
        f"{other['__key__']!r} of {other['__url__']} is {b}; "
        "begin the transform with A.Resize(height, width) or A.RandomResizedCrop((height, width))"
    )
