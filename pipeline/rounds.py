"""Agrees on the epoch of each iteration of a dataset, between the trainer's process and any number of workers.

torch tells an iterable dataset's workers nothing of epochs: they begin anew in each, as copies of what the trainer holds, or
persist and begin again. So the workers of one iteration find each other by what they share, torch's base seed and how often they
began, and the first of them takes the next epoch for all.
"""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_ENTRIES = 16  # iterations that can go on at once; a repeated dataset's workers may be some apart
_SLOTS = 256  # workers of an iteration
_HEAD = struct.Struct("=Qq")  # next epoch, entries written
_ENTRY = struct.Struct(f"=qqqQ{_SLOTS}s")  # base seed, iteration, repetition, epoch, who began
_BYTES = _HEAD.size + _ENTRIES * _ENTRY.size


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a worker knows its iteration: torch's base seed, its number among the workers, how often it began and repeated."""

    base_seed: int
    worker: int
    iteration: int
    repetition: int


class Rounds:
    """A few KB of memory that a dataset's copies share, in whatever processes they are; leaves no file."""

    def __init__(self, descriptor: int | None = None, epoch: int = 0) -> None:
        self._descriptor = _memory() if descriptor is None else descriptor
        self._map = mmap.mmap(self._descriptor, _BYTES)
        self._threads = threading.Lock()
        if descriptor is None:
            self.set_next(epoch)

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that starts now gets the memory itself; what is pickled otherwise is a dataset of its own.
        if multiprocessing.context.get_spawning_popen() is None:
            return Rounds, (None, self.next)
        return _received, (multiprocessing.reduction.DupFd(self._descriptor),)

    def __del__(self) -> None:
        if hasattr(self, "_map"):
            self._map.close()
            os.close(self._descriptor)

    @property
    def next(self) -> int:
        """The epoch that the next iteration gets."""
        return int(_HEAD.unpack_from(self._map)[0])

    def set_next(self, epoch: int) -> None:
        """Set the epoch that the next iteration gets."""
        with self._alone():
            _HEAD.pack_into(self._map, 0, epoch, _HEAD.unpack_from(self._map)[1])

    def take(self, beginning: Beginning | None) -> int:
        """Return the epoch of an iteration that begins: the next one, or the one that another of its workers took before.

        `beginning` is None outside of workers: nobody else takes part.
        """
        with self._alone():
            if beginning is not None and (at := self._find(beginning)) is not None:
                epoch, began = self._entry(at)[3:]
                self._put(at, beginning, epoch, began)
                return int(epoch)
            epoch, written = _HEAD.unpack_from(self._map)
            if beginning is not None:
                self._put(written % _ENTRIES, beginning, epoch, bytes(_SLOTS))
                written += 1
            _HEAD.pack_into(self._map, 0, epoch + 1, written)
            return int(epoch)

    def _find(self, beginning: Beginning) -> int | None:
        """Return this iteration's entry, unless the worker began that: a trainer that seeds torch anew repeats base seeds."""
        wanted = (beginning.base_seed, beginning.iteration, beginning.repetition)
        written = _HEAD.unpack_from(self._map)[1]
        for number in range(written - 1, max(written - _ENTRIES, 0) - 1, -1):
            found = self._entry(number % _ENTRIES)
            if found[:3] == wanted:
                return None if found[4][beginning.worker % _SLOTS] else number % _ENTRIES
        return None

    def _entry(self, at: int) -> tuple[Any, ...]:
        return _ENTRY.unpack_from(self._map, _HEAD.size + at * _ENTRY.size)

    def _put(self, at: int, beginning: Beginning, epoch: int, began: bytes) -> None:
        slot = beginning.worker % _SLOTS
        began = began[:slot] + b"\1" + began[slot + 1 :]
        words = (beginning.base_seed, beginning.iteration, beginning.repetition, epoch, began)
        _ENTRY.pack_into(self._map, _HEAD.size + at * _ENTRY.size, *words)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and processes out; a process that dies in here lets go of the lock."""
        with self._threads:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def _received(duplicate: Any) -> Rounds:
    return Rounds(duplicate.detach())


def _memory() -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pipeline-rounds")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _BYTES)
    return descriptor
