"""Uploads batches to a CUDA device out of pinned memory that is used again, on a stream of its own.

    slot -> pinned memory -> | own stream: upload, work, event | -> the trainer's current stream waits for the event

The trainer's process copies into pinned memory and waits for nothing else, unless both buffers are still being uploaded. It knows
nothing of dtypes and normalizing: `work` is what is to be done on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

_BUFFERS = 2  # one is filled while the other is uploaded
_ALIGNMENT = 64


class Event(Protocol):
    """A point in what was put on a stream."""

    def synchronize(self) -> None:
        """Wait until the device has got there."""


class Streams(Protocol):
    """A device's streams: the uploads' own, and the trainer's current one."""

    def pin(self, size: int) -> torch.Tensor:
        """Return `size` bytes (uint8) of pinned memory."""

    def own(self) -> AbstractContextManager[object]:
        """Return a context in which work is put on the own stream."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device that `host`, in pinned memory, is being copied into; within `own`."""

    def mark(self) -> Event:
        """Return an event behind all that is on the own stream by now."""

    def follow(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """Let the trainer's current stream wait for an event; memory of `tensors` isn't used again before that stream is done."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def pin(self, size: int) -> torch.Tensor:
        """Return `size` bytes (uint8) of pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def own(self) -> AbstractContextManager[object]:
        """Return a context in which work is put on the own stream."""
        return torch.cuda.stream(self._stream)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device that `host`, in pinned memory, is being copied into; within `own`."""
        return host.to(self._device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all that is on the own stream by now; who waits for it sleeps, as workers need the CPUs."""
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def follow(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """Let the trainer's current stream wait for an event; memory of `tensors` isn't used again before that stream is done."""
        assert isinstance(event, torch.cuda.Event)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Tensors that are on their way to the device, or there."""

    images: torch.Tensor | None
    labels: torch.Tensor | None
    ready: Event


class _Buffer:
    """Pinned memory; `uploaded`: the event behind the last upload out of it."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.uploaded: Event | None = None


class Uploader:
    """Uploads a batch at a time."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._buffers = [_Buffer() for _ in range(_BUFFERS)]
        self._turn = -1

    def begin(
        self, images: torch.Tensor | None, labels: torch.Tensor | None, work: Callable[[torch.Tensor], torch.Tensor]
    ) -> Uploaded:
        """Begin to upload a batch of contiguous tensors; they aren't read any more afterwards. `work` is done on the images there.

        Waits where the buffer whose turn it is is still being uploaded.
        """
        streams, buffer = self._streams, self._next()
        images, labels = self._pinned(buffer, images, labels)
        with streams.own():
            try:
                images = None if images is None else streams.upload(images)
                labels = None if labels is None else streams.upload(labels)
            finally:  # one that failed (memory of the device) may have the other under way
                ready = buffer.uploaded = streams.mark()
            if images is not None:
                there = work(images)
                ready = ready if there is images else streams.mark()
                images = there
        return Uploaded(images, labels, ready)

    def hand_over(self, batch: Uploaded) -> None:
        """Let the trainer use a batch on its current stream."""
        self._streams.follow(batch.ready, [tensor for tensor in (batch.images, batch.labels) if tensor is not None])

    def _next(self) -> _Buffer:
        """Return the buffer whose turn it is, once nothing is read out of it any more."""
        self._turn = (self._turn + 1) % _BUFFERS
        buffer = self._buffers[self._turn]
        if buffer.uploaded is not None:
            buffer.uploaded.synchronize()
            buffer.uploaded = None
        return buffer

    def _pinned(self, buffer: _Buffer, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return copies of tensors in a buffer, which grows where they don't fit."""
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += 0 if tensor is None else -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if buffer.memory is None or len(buffer.memory) < size:
            buffer.memory = None  # before there is another
            buffer.memory = self._streams.pin(size)
        copies: list[torch.Tensor | None] = []
        for tensor, start in zip(tensors, starts, strict=True):
            copy = None
            if tensor is not None:
                copy = buffer.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                np.copyto(copy.numpy(), tensor.numpy())  # in this thread: torch's copy_ takes all cores, which decode
            copies.append(copy)
        return copies
