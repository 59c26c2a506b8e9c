"""Agrees on the epoch of each iteration of a dataset, between the trainer's process and any number of workers.

torch tells an iterable dataset's workers nothing of epochs: they begin anew in each, as copies of what the trainer holds, or
persist and begin again. So the workers of one iteration find each other by what they share, torch's base seed and how often they
began, and the first of them takes the next epoch for all.

Each rank has a block of its own, as ranks may be given one dataset; until it begins, the epoch set before there were ranks counts.
"""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipeline.machine import unnamed

_ENTRIES = 16  # iterations that can go on at once; a repeated dataset's workers may be some apart
_SLOTS = 256  # workers of an iteration
_RANKS = 1024  # that can share the memory: those of one machine
_HEAD = struct.Struct("=?Qq")  # whether anything is said here, next epoch, entries written
_ENTRY = struct.Struct(f"=qqqQ{_SLOTS}s")  # base seed, iteration, repetition, epoch, who began
_BLOCK = _HEAD.size + _ENTRIES * _ENTRY.size
_BYTES = (1 + _RANKS) * _BLOCK  # pages that nobody writes take no memory


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a worker knows its iteration: torch's base seed, its number among the workers, how often it began and repeated."""

    base_seed: int
    worker: int
    iteration: int
    repetition: int


class Rounds:
    """A few KB of memory that a dataset's copies share, in whatever processes they are; leaves no file.

    `epochs`: those that come next, by rank; rank None is a process that is alone.
    """

    def __init__(self, descriptor: int | None = None, epochs: Mapping[int | None, int] | None = None) -> None:
        self._descriptor = _memory() if descriptor is None else descriptor
        self._map = mmap.mmap(self._descriptor, _BYTES)
        self._threads = threading.Lock()
        for rank, epoch in (epochs or {}).items():
            self.set_next(rank, epoch)

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that starts now gets the memory itself; what is pickled otherwise is a dataset of its own.
        if multiprocessing.context.get_spawning_popen() is None:
            return Rounds, (None, {rank: self.next(rank) for rank in (None, *range(_RANKS)) if self._head(_start(rank))[0]})
        return _received, (multiprocessing.reduction.DupFd(self._descriptor),)

    def __del__(self) -> None:
        if hasattr(self, "_map"):
            self._map.close()
            os.close(self._descriptor)

    def next(self, rank: int | None) -> int:
        """Return the epoch that a rank's next iteration gets."""
        said, epoch, _ = self._head(_start(rank))
        return epoch if said else self._head(_start(None))[1]

    def set_next(self, rank: int | None, epoch: int) -> None:
        """Set the epoch that a rank's next iteration gets."""
        with self._alone():
            self._put_head(_start(rank), epoch, self._head(_start(rank))[2])

    def take(self, rank: int | None, beginning: Beginning | None) -> int:
        """Return the epoch of an iteration that begins: the rank's next one, or the one that another of its workers took before.

        `beginning` is None outside of workers: nobody else takes part.
        """
        start = _start(rank)
        with self._alone():
            if beginning is not None and (at := self._find(start, beginning)) is not None:
                epoch, began = _ENTRY.unpack_from(self._map, at)[3:]
                self._put(at, beginning, epoch, began)
                return int(epoch)
            epoch, written = self.next(rank), self._head(start)[2]
            if beginning is not None:
                self._put(_entry(start, written), beginning, epoch, bytes(_SLOTS))
                written += 1
            self._put_head(start, epoch + 1, written)
            return epoch

    def _head(self, start: int) -> tuple[bool, int, int]:
        said, epoch, written = _HEAD.unpack_from(self._map, start)
        return said, epoch, written

    def _put_head(self, start: int, epoch: int, written: int) -> None:
        _HEAD.pack_into(self._map, start, True, epoch, written)

    def _find(self, start: int, beginning: Beginning) -> int | None:
        """Return this iteration's entry, unless the worker began that: a trainer that seeds torch anew repeats base seeds."""
        wanted = (beginning.base_seed, beginning.iteration, beginning.repetition)
        written = self._head(start)[2]
        for number in range(written - 1, max(written - _ENTRIES, 0) - 1, -1):
            found = _ENTRY.unpack_from(self._map, _entry(start, number))
            if found[:3] == wanted:
                return None if found[4][beginning.worker % _SLOTS] else _entry(start, number)
        return None

    def _put(self, at: int, beginning: Beginning, epoch: int, began: bytes) -> None:
        slot = beginning.worker % _SLOTS
        began = began[:slot] + b"\1" + began[slot + 1 :]
        words = (beginning.base_seed, beginning.iteration, beginning.repetition, epoch, began)
        _ENTRY.pack_into(self._map, at, *words)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and processes out; a process that dies in here lets go of the lock."""
        with self._threads:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def _start(rank: int | None) -> int:
    """Return where the block of a rank begins."""
    return 0 if rank is None else (1 + rank % _RANKS) * _BLOCK


def _entry(start: int, number: int) -> int:
    return start + _HEAD.size + number % _ENTRIES * _ENTRY.size


def _received(duplicate: Any) -> Rounds:
    return Rounds(duplicate.detach())


def _memory() -> int:
    descriptor = unnamed("pipeline-rounds")
    os.ftruncate(descriptor, _BYTES)
    return descriptor
