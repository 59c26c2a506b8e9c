"""Stands in for a CUDA device's streams: its own stream works when it is told to, or when somebody waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

import pipeline
from pipeline.device import Finisher
from pipeline.pinned import Event

UNWRITTEN = 170  # what memory holds that nobody wrote to


class StandInEvent:
    """A place in a stand-in's own stream."""

    def __init__(self, streams: StandInStreams, at: int) -> None:
        self._streams, self._at = streams, at

    def synchronize(self) -> None:
        """Wait, in the trainer's process, until the stream has got here."""
        self._streams.waits += self._at > self._streams.done
        self._streams.work_until(self._at)


class StandInStreams:
    """A device of the CPU's memory, whose uploads read pinned memory late, as a device does; with `at_once` it never lags."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.pinned: list[torch.Tensor] = []
        self.followed: list[torch.Tensor] = []
        self.there: list[torch.Tensor] = []  # what was uploaded
        self.waits = self.done = 0
        self.before_upload: Callable[[], object] = lambda: None
        self._queue: list[Callable[[], object]] = []
        self._within = False

    def pin(self, size: int) -> torch.Tensor:
        """Return memory."""
        self.pinned.append(torch.full((size,), UNWRITTEN, dtype=torch.uint8))
        return self.pinned[-1]

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Let work be put on the own stream."""
        assert not self._within
        self._within = True
        try:
            yield
        finally:
            self._within = False

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is filled later."""
        assert any(host.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr() for memory in self.pinned)
        self.before_upload()
        there = torch.full((host.nbytes,), UNWRITTEN, dtype=torch.uint8).view(host.dtype).view(host.shape)
        self.there.append(there)
        self.put(lambda: there.copy_(host))
        return there

    def put(self, work: Callable[[], object]) -> None:
        """Put work on the own stream."""
        assert self._within
        self._queue.append(work)
        if self.at_once:
            self.work_until(len(self._queue))

    def mark(self) -> StandInEvent:
        """Return the stream's end."""
        return StandInEvent(self, len(self._queue))

    def follow(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """Let the trainer, which here reads at once, have what is before an event."""
        assert isinstance(event, StandInEvent)
        self.work_until(event._at)
        self.followed.extend(tensors)

    def work_until(self, count: int) -> None:
        """Do the first `count` things that were put on the stream."""
        while self.done < min(count, len(self._queue)):
            self._queue[self.done]()
            self.done += 1


def let_overlap(loader: pipeline.Loader, streams: StandInStreams) -> pipeline.Loader:
    """Return the loader, whose batches are finished on a stand-in from now on."""
    ever = loader._parts.finish
    dtype = str(ever._dtype).removeprefix("torch.")
    finish = Finisher(torch.device("cpu"), ever._normalization, dtype, lambda _device: streams)
    loader._parts = dataclasses.replace(loader._parts, finish=finish)
    return loader
