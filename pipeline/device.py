"""Turns a worker's batch into what the trainer gets: on its device, float32 and normalized, channels first.

On the CPU the float batches are written into memory that is used again once no tensor over it lives: mapping 120 MB anew for each
batch of 64 costs more (1.6 ms a 400x400 picture) than normalizing it (0.3 ms).
"""

from __future__ import annotations

import math
import sys

import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import OptionsError, TransformError
from pipeline.items import Batch, KeyedBatch, Normalization, Slot

# Elements of a tile: it stays in the L2 cache, and torch's operations stay in the calling thread (they are parallel from 32,768
# on). With all cores decoding, OpenMP's threads wait for each other: 4 to 50 ms of CPU a 400x400 picture instead of 0.5.
_TILE = 32_767
_KEPT = 4  # a loop holds one or two batches; more are allocated and left to the garbage collector


def find_device(device: str | torch.device | None) -> torch.device:
    """Return the device that a name means, the CPU for None; raises OptionsError for one that isn't there."""
    try:
        found = torch.device("cpu" if device is None else device)
        if found.type == "cuda" and not torch.cuda.is_available():
            raise OptionsError(f"device={str(device)!r}: torch {torch.__version__} finds no usable CUDA device here")
        return found
    except (RuntimeError, TypeError) as error:
        raise OptionsError(f"device={device!r}: {str(error).splitlines()[0]}") from error


class Finisher:
    """Finishes batches for one device; lives in the trainer's process."""

    def __init__(self, device: torch.device, normalization: Normalization | None, dtype: str) -> None:
        self._device = device
        self._dtype = dtype
        self._normalization = normalization
        self._pool = _Pool()
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Batch | KeyedBatch) -> Batch | KeyedBatch:
        """Return the batch with images (B, C, H, W) on the device; bytes stay as they are."""
        labels = None if batch.labels is None else torch.from_numpy(batch.labels).to(self._device)
        if isinstance(batch.images, list):
            return batch._replace(labels=labels)
        images = self._from_slot(batch.images) if isinstance(batch.images, Slot) else batch.images
        done = self._images(images, owned=images is batch.images)
        return batch._replace(images=done.permute(0, 3, 1, 2), labels=labels)

    def forget(self) -> None:
        """Let go of the workers' slots: another run begins, whose workers send theirs anew."""
        self._slots.clear()

    def _from_slot(self, slot: Slot) -> torch.Tensor:
        """Return a slot's images; they must be copied before another batch is asked for."""
        if slot.memory is not None:
            self._slots[slot.worker, slot.number] = slot.memory
        size = math.prod(slot.shape) * slot.dtype.itemsize
        return self._slots[slot.worker, slot.number][:size].view(slot.dtype).view(slot.shape)

    def _images(self, images: torch.Tensor, *, owned: bool) -> torch.Tensor:
        """Return (B, H, W, C) on the device in its final dtype, in memory of its own."""
        if self._dtype == "uint8" and images.dtype != torch.uint8:
            raise TransformError(
                f"dtype='uint8', but the transform gives {str(images.dtype).removeprefix('torch.')}; "
                "end it with a standard A.Normalize (which the loader then leaves out), or use dtype='float32'"
            )
        done = self._dtype == "uint8" or (images.dtype == torch.float32 and self._normalization is None)
        if self._device.type != "cpu":
            # pin_memory copies out of the slot, into memory that torch keeps until the transfer is over.
            there = (images.pin_memory() if self._device.type == "cuda" else images).to(
                self._device, non_blocking=self._device.type == "cuda"
            )
            return there if done else self._normalized_there(there)
        if not done:
            return self._normalized_here(images)
        return images if owned else self._copied(images)

    def _copied(self, images: torch.Tensor) -> torch.Tensor:
        own = self._pool.take(tuple(images.shape), images.dtype)
        np.copyto(own.numpy(), images.numpy())  # in this thread, as all here
        return own

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

    def _normalized_there(self, images: torch.Tensor) -> torch.Tensor:
        scale, bias = self._scale_bias(images.shape[3])
        return torch.addcmul(torch.from_numpy(bias).to(images.device), images.float(), torch.from_numpy(scale).to(images.device))

    def _normalized_here(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize tile by tile: a tile is some rows of a picture, scale and bias are repeated over a row's pixels."""
        count, height, width, channels = images.shape
        scale, bias = self._row(width, channels)
        out = self._pool.take((count, height, width * channels), torch.float32)
        flat = images.view(count, height, width * channels)
        rows = max(1, _TILE // (width * channels))
        for i in range(count):
            for top in range(0, height, rows):
                tile = out[i, top : top + rows]
                tile.copy_(flat[i, top : top + rows])
                torch.addcmul(bias, tile, scale, out=tile)
        return out.view(count, height, width, channels)

    def _row(self, width: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (width, channels) not in self._rows:
            scale, bias = self._scale_bias(channels)
            self._rows = {(width, channels): (torch.from_numpy(np.tile(scale, width)), torch.from_numpy(np.tile(bias, width)))}
        return self._rows[width, channels]


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
