"""Turns a worker's batch into what the trainer gets: on its device, of its dtype and normalized, channels first.

On the CPU the float batches are written into memory that is used again once no tensor over it lives: mapping 120 MB anew for each
batch of 64 costs more (1.6 ms a 400x400 picture) than normalizing it (0.3 ms). Normalizing computes in float32, whatever comes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import OptionsError, TransformError
from pipeline.items import Batch, KeyedBatch, Normalization, Slot
from pipeline.pinned import CudaStreams, Streams, Uploaded, Uploader

# Elements of a tile: it stays in the L2 cache, and torch's operations stay in the calling thread (they are parallel from 32,768
# on). With all cores decoding, OpenMP's threads wait for each other: 4 to 50 ms of CPU a 400x400 picture instead of 0.5.
_TILE = 32_767
_KEPT = 4  # a loop holds one or two batches; more are allocated and left to the garbage collector
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


def find_device(device: str | torch.device | None) -> torch.device:
    """Return the device that a name means, the CPU for None; raises OptionsError for one that isn't there."""
    try:
        found = torch.device("cpu" if device is None else device)
        if found.type == "cuda" and not torch.cuda.is_available():
            raise OptionsError(f"device={str(device)!r}: torch {torch.__version__} finds no usable CUDA device here")
        return found
    except (RuntimeError, TypeError) as error:
        raise OptionsError(f"device={device!r}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True, slots=True)
class Begun:
    """A batch that is finished, or, with `uploaded`, being finished on the device."""

    batch: Batch | KeyedBatch
    uploaded: Uploaded | None = None


class Finisher:
    """Finishes batches for one device; lives in the trainer's process.

    `overlaps`: a batch that is begun early is finished while the trainer works. `streams` makes what a CUDA device is asked by.
    """

    def __init__(
        self,
        device: torch.device,
        normalization: Normalization | None,
        dtype: str,
        streams: Callable[[torch.device], Streams] | None = None,
    ) -> None:
        self._device = device
        self._dtype = _DTYPES[dtype]
        self._normalization = normalization
        self._pool = _Pool()
        self._scratch = torch.empty(0)
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._there: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._streams = CudaStreams if streams is None and device.type == "cuda" else streams
        self._uploader: Uploader | None = None  # made with the first batch: it begins to use the device
        self.overlaps = self._streams is not None

    def __call__(self, batch: Batch | KeyedBatch) -> Batch | KeyedBatch:
        """Return the batch with images (B, C, H, W) on the device; bytes stay as they are."""
        return self.hand_over(self.begin(batch))

    def begin(self, batch: Batch | KeyedBatch) -> Begun:
        """Begin to finish a batch; nothing is read out of a worker's slot any more afterwards.

        Raises TransformError for images that can't be had in the dtype asked for, or don't fit the Normalize.
        """
        labels = None if batch.labels is None else torch.from_numpy(batch.labels)
        images = self._from_slot(batch.images) if isinstance(batch.images, Slot) else batch.images
        pixels = isinstance(images, torch.Tensor)
        if pixels:
            self._check(images)
        if self._streams is not None:
            if self._uploader is None:
                self._uploader = Uploader(self._streams(self._device))
            return Begun(batch, self._uploader.begin(images if pixels else None, labels, self._finished_there))
        if pixels and self._device.type == "cpu":
            images = self._finished_here(images, owned=images is batch.images).permute(0, 3, 1, 2)
        elif pixels:
            images = self._finished_there(images.to(self._device)).permute(0, 3, 1, 2)
        return Begun(batch._replace(images=images, labels=None if labels is None else labels.to(self._device)))

    def hand_over(self, begun: Begun) -> Batch | KeyedBatch:
        """Return a batch that was begun, for the trainer's current stream."""
        batch, uploaded = begun.batch, begun.uploaded
        if uploaded is None or self._uploader is None:
            return batch
        self._uploader.hand_over(uploaded)
        images = batch.images if uploaded.images is None else uploaded.images.permute(0, 3, 1, 2)
        return batch._replace(images=images, labels=uploaded.labels)

    def forget(self) -> None:
        """Let go of the workers' slots: another run begins, whose workers send theirs anew."""
        self._slots.clear()

    def _from_slot(self, slot: Slot) -> torch.Tensor:
        """Return a slot's images; they must be copied before another batch is asked for."""
        if slot.memory is not None:
            self._slots[slot.worker, slot.number] = slot.memory
        size = math.prod(slot.shape) * slot.dtype.itemsize
        return self._slots[slot.worker, slot.number][:size].view(slot.dtype).view(slot.shape)

    def _check(self, images: torch.Tensor) -> None:
        if self._dtype == torch.uint8 and images.dtype != torch.uint8:
            raise TransformError(
                f"dtype='uint8', but the transform gives {str(images.dtype).removeprefix('torch.')}; "
                "end it with a standard A.Normalize (which the loader then leaves out), or use dtype='float32'"
            )

    def _stays(self, images: torch.Tensor) -> bool:
        """Tell whether the values stay as they are: bytes that are wanted, floats of a transform without a Normalize."""
        return self._dtype == torch.uint8 or (images.dtype == torch.float32 and self._normalization is None)

    def _finished_here(self, images: torch.Tensor, *, owned: bool) -> torch.Tensor:
        """Return (B, H, W, C) in the final dtype, in memory of its own."""
        if not self._stays(images):
            return self._normalized_here(images)
        if images.dtype == self._dtype and owned:
            return images
        own = self._pool.take(tuple(images.shape), self._dtype)
        if images.dtype == self._dtype:
            np.copyto(own.numpy(), images.numpy())  # in this thread, as all here
        else:
            for target, source in zip(_split(own.view(-1), _TILE), _split(images.view(-1), _TILE), strict=True):
                target.copy_(source)
        return own

    def _finished_there(self, images: torch.Tensor) -> torch.Tensor:
        """Return (B, H, W, C), which are on the device, in the final dtype."""
        if self._stays(images):
            return images.to(self._dtype)
        channels = images.shape[3]
        if channels not in self._there:
            scale, bias = self._scale_bias(channels)
            self._there = {channels: (torch.from_numpy(scale).to(images.device), torch.from_numpy(bias).to(images.device))}
        scale_there, bias_there = self._there[channels]
        if self._streams is None:
            return torch.addcmul(bias_there, images.float(), scale_there).to(self._dtype)
        # One kernel: it reads bytes, computes in float32 (the common dtype) and writes the final one.
        return torch.addcmul(bias_there, images, scale_there, out=torch.empty_like(images, dtype=self._dtype))

    def _scale_bias(self, channels: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return scale and bias for each channel; without a Normalize, bytes become [0, 1]."""
        normal = self._normalization
        if normal is None:
            return np.full(channels, 1 / 255, np.float32), np.zeros(channels, np.float32)
        if normal.scale.size not in (1, channels) or normal.bias.size not in (1, channels):
            raise TransformError(
                f"A.Normalize for {normal.bias.size} channels after a transform that gives {channels}; give it as many"
            )
        return np.resize(normal.scale, channels), np.resize(normal.bias, channels)

    def _normalized_here(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize tile by tile: a tile is some rows of pixels, over each of which scale and bias are repeated.

        What isn't float32 is computed in a tile that is used for all of them, and written once.
        """
        count, height, width, channels = images.shape
        scale, bias = self._row(width, channels)
        row = width * channels
        rows = max(1, _TILE // row)
        out = self._pool.take((count * height, row), self._dtype)
        if self._dtype != torch.float32 and self._scratch.shape != (rows, row):
            self._scratch = torch.empty(rows, row)
        for target, source in zip(_split(out, rows), _split(images.view(count * height, row), rows), strict=True):
            tile = target if self._dtype == torch.float32 else self._scratch[: len(target)]
            tile.copy_(source)
            torch.addcmul(bias, tile, scale, out=tile)
            if tile is not target:
                target.copy_(tile)
        return out.view(count, height, width, channels)

    def _row(self, width: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (width, channels) not in self._rows:
            scale, bias = self._scale_bias(channels)
            self._rows = {(width, channels): (torch.from_numpy(np.tile(scale, width)), torch.from_numpy(np.tile(bias, width)))}
        return self._rows[width, channels]


def _split(tensor: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Return views of a tensor, `size` long in its first dimension, the last one perhaps shorter."""
    views: Sequence[torch.Tensor] = tensor.split(size)  # type: ignore[no-untyped-call]
    return views


class _Pool:
    """Memory that is given out again when nothing else refers to it: a tensor from numpy holds its array until its storage dies."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with undefined contents, which shares memory with no other living tensor."""
        size = math.prod(shape) * dtype.itemsize
        for index in range(len(self._arrays)):
            # Two references: the list's and getrefcount's own argument.
            if self._arrays[index].size >= size and sys.getrefcount(self._arrays[index]) == 2:
                return torch.from_numpy(self._arrays[index])[:size].view(dtype).view(shape)
        array = np.empty(size, np.uint8)
        self._arrays = [array, *self._arrays[: _KEPT - 1]]
        return torch.from_numpy(array).view(dtype).view(shape)
