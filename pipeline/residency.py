"""Has a worker wait until samples of its batch are resident, never for long where nothing moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.machine import has_ended
from pipeline.progress import Block, Count
from pipeline.stores import Readable, Source
from pipeline.stores.copies import CopyReader

Ints: TypeAlias = npt.NDArray[np.int64]

PATIENCE = 2.0  # seconds without a byte: a prefetcher that is alive on a slow disk has read some
START_PATIENCE = 10.0  # seconds for its process to start: 0.4 s, on a busy machine 3

_SHORTEST, _LONGEST = 0.001, 0.02  # seconds between two looks


class Outcome(Enum):
    """How a wait ended."""

    RESIDENT = "the samples are there"
    UNPREFETCHED = "nothing moves: the worker reads for itself"
    GIVEN_UP = "another run has begun: nobody wants the batch"


class GivenUp(Exception):  # noqa: N818  (no error)
    """Another run has begun while a copy was read: what was read may be gone."""


class Residency:
    """A worker's view of what is resident, for lanes that positions go round."""

    def __init__(self, block: Block, lanes: int, worker: int = 0, *, patient: bool = False) -> None:
        """Take the block; `patient`: wait for as long as the prefetcher lives, as nobody else can read what is remote."""
        self._block, self._lanes, self._worker, self._patient = block, lanes, worker, patient
        self._stalled = -1  # the progress at which a wait was in vain: until it moves no other wait is tried
        self._copies: tuple[tuple[int, int], CopyReader] | None = None
        self.waited_seconds = 0.0  # by the last wait, so far

    def wait(self, run: int, positions: Ints) -> Iterator[tuple[Outcome, Ints]]:
        """Yield which of the samples at global positions of a run, (n,), are there: as soon as some are, until all are.

        Each comes once, as its number in `positions`. Ends at once when another run begins; after `PATIENCE` without progress,
        which is counted, the rest comes as unprefetched.
        """
        self.waited_seconds = 0.0
        needed = self._places(positions)
        if needed:
            self._block.want(self._worker, run, int(positions.max()) + 1)
        of_lane = positions % self._lanes
        while needed:
            began = time.monotonic()
            outcome, arrived = self._wait(run, needed)
            self.waited_seconds += time.monotonic() - began
            chosen = np.flatnonzero(np.isin(of_lane, list(arrived)))
            needed = {lane: places for lane, places in needed.items() if lane not in arrived}
            yield outcome, chosen

    def copies(self, run: int) -> Copies | None:
        """Return the copies that a run's resident samples are read from, None where they are read from their shards."""
        block = self._block
        made, descriptor = block.count(Count.PID), block.count(Count.MEMORY) - 1
        if descriptor < 0:
            return None
        if self._copies is None or self._copies[0] != (made, descriptor):
            try:
                self._copies = (made, descriptor), CopyReader(made, descriptor)
            except OSError:  # it died just now: the shards are there
                return None
        return Copies(self._copies[1], block, run)

    def _wait(self, run: int, needed: dict[int, int]) -> tuple[Outcome, set[int]]:
        """Wait until a lane has come past the places that are needed of it; return how that ended, and the lanes it is true for."""
        block, worker = self._block, self._worker
        pause, seen, since = _SHORTEST, block.count(Count.PROGRESS), time.monotonic()
        while True:
            arrived = {lane for lane, places in needed.items() if block.resident(lane, run) >= places}
            if arrived:
                return Outcome.RESIDENT, arrived
            if block.run != run:
                return Outcome.GIVEN_UP, set(needed)
            progress = block.count(Count.PROGRESS)
            if progress != seen:
                seen, since, self._stalled = progress, time.monotonic(), -1
            stalled = progress == self._stalled and (not self._patient or has_ended(block.process))
            if stalled or self._in_vain(time.monotonic() - since):
                self._stalled = progress
                block.read_alone(worker)
                return Outcome.UNPREFETCHED, set(needed)
            time.sleep(pause)
            pause = min(_LONGEST, 1.5 * pause)

    def _in_vain(self, seconds: float) -> bool:
        """Tell whether to wait no longer, when nothing has moved for so many seconds."""
        if seconds <= PATIENCE:
            return False
        process = self._block.process
        if self._patient:
            return has_ended(process)
        starting = process != self._block.count(Count.PID) and not has_ended(process)
        return not starting or seconds > START_PATIENCE

    def _places(self, positions: Ints) -> dict[int, int]:
        """Return up to which place each lane that positions touch is needed."""
        places, lanes = np.divmod(positions, self._lanes)
        needed = np.zeros(self._lanes, np.int64)
        np.maximum.at(needed, lanes, places + 1)
        return {lane: count for lane, count in enumerate(needed.tolist()) if count}


class Copies:
    """The copies of a run: gone when another begins."""

    def __init__(self, reader: CopyReader, block: Block, run: int) -> None:
        self._reader, self._block, self._run = reader, block, run
        self._devices = block.copied

    def of(self, shard: int, source: Source) -> Readable | None:
        """Return a shard's copy, None where shards of its source's device aren't copied."""
        return _Copy(self, shard, source) if source.device in self._devices else None

    def read(self, shard: int, offset: int, size: int) -> bytes | None:
        """Return bytes of a shard's copy, None where they aren't in it; raises GivenUp where another run has begun."""
        data = self._reader.read(shard, offset, size)
        if self._block.run != self._run:
            raise GivenUp
        return data


class _Copy:
    """The copy of a shard; what isn't in it comes from the shard."""

    def __init__(self, copies: Copies, shard: int, source: Readable) -> None:
        self._copies, self._shard, self._source = copies, shard, source

    def read(self, offset: int, size: int) -> bytes:
        data = self._copies.read(self._shard, offset, size)
        return self._source.read(offset, size) if data is None else data
