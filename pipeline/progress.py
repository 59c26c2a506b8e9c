"""Holds the shared block in which trainer, prefetcher and workers tell each other how far they are: one writer a word, no locks.

    trainer      run | handed out | sharers | the prefetcher's process
    prefetcher   pid | memory | progress | counters ... | replies by status | devices whose shards are copied
    lanes        of each: places that are resident, with the run for which they are
    workers      of each: the position that it wants, with the run; batches that it read for itself; before what it needs nothing
    report       why the prefetcher couldn't fetch something, a text of its own

A word is 64 bits, written and read whole. What belongs to a run carries the run's number in the same word, so that no other has to
be seen before it.
"""

from __future__ import annotations

import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from pipeline.machine import unnamed
from pipeline.options import MAX_LANES

WORKERS = 256  # rows; workers beyond share them: counts get lost, and one that waits may read for itself

_RUN_BITS = 40  # below it: positions up to 10^12; above: 8 million runs
_BELOW = (1 << _RUN_BITS) - 1
_RUN, _HANDED, _SHARERS, _PROCESS = 0, 1, 2, 3
_FIRST_COUNT, _FIRST_LANE = 8, 64
_FIRST_WORKER = _FIRST_LANE + MAX_LANES
_WANTED, _UNPREFETCHED, _FLOOR, _WORKER_WORDS = 0, 1, 2, 3
_WORDS = _FIRST_WORKER + WORKERS * _WORKER_WORDS
_REPORT_BYTES = 4096
_BYTES = _WORDS * 8 + _REPORT_BYTES
_DEVICES = 4
_FIRST_DEVICE = _FIRST_LANE - _DEVICES
_STATUSES = 16
_FIRST_STATUS = _FIRST_DEVICE - _STATUSES


class Count(IntEnum):
    """The prefetcher's words: bytes, nanoseconds and numbers since it started."""

    PID = 0  # of the prefetcher, 0 until it runs
    MEMORY = 1  # descriptor there of the memory that holds copies, plus 1; 0: none
    PROGRESS = 2  # grows with each byte read and each step done
    WINDOWS = 3  # made resident
    CACHED_BYTES = 4  # found in the page cache
    MEDIUM_BYTES = 5  # read from the medium
    READING_NS = 6
    TURN_NS = 7  # waited for the disk's turn
    FULL_NS = 8  # waited for room: the workers are behind
    TURNS = 9
    WITHOUT_TURN = 10  # windows read without it, after a second
    DROPPED_BYTES = 11
    REFUSED = 12  # drops that had to wait, because another reader holds the shard
    FAILED = 13  # windows that could not be read: workers meet the error, and name it
    UNINDEXED = 14  # reads left to the workers, because the shard has no index
    BUDGET_BYTES = 15
    KEPT_BYTES = 16
    PART_BYTES = 17  # of the set, that this rank reads
    WAY = 18  # how bytes become resident: `Way`
    REPORT = 19  # bytes of the report; 0: there is none
    RETRIES = 20  # requests beyond the first of each range
    WALKED = 21  # shards without an index that were read through for their headers
    PAUSED_NS = 22  # between a failed request and the next, summed over all that were on their way
    SKIPPED_BYTES = 23  # that came and nobody wanted: from servers that can't begin in the middle


class Way(IntEnum):
    """How a set's bytes are made resident."""

    UNKNOWN = 0
    PAGE_CACHE = 1
    MEMORY = 2  # they are there: a file system in memory
    COPIES = 3  # an open throws the pages away, or that can't be told: copied forward into memory of the prefetcher's
    FETCHED = 4  # over the network, into the cache folder


class Block:
    """A few KB of memory that processes share; lives as long as one of them does, and leaves no file."""

    def __init__(self, descriptor: int) -> None:
        """Map the block behind `descriptor`, which is the block's from now on."""
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, _BYTES)
        self._words = memoryview(self._map)[: _WORDS * 8].cast("q")

    @classmethod
    def make(cls) -> Block:
        """Return a new block, all zero."""
        descriptor = unnamed("pipeline-progress")
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor)

    def __reduce__(self) -> tuple[Callable[..., Block | None], tuple[Any, ...]]:
        # Only a process that starts now can get the descriptor; whoever unpickles it elsewhere has no prefetcher, and no block.
        if multiprocessing.context.get_spawning_popen() is None:
            return _nothing, ()
        return _received, (multiprocessing.reduction.DupFd(self._descriptor),)

    def fileno(self) -> int:
        """Return the descriptor, for a process that is started."""
        return self._descriptor

    def close(self) -> None:
        """Unmap the block; a second call does nothing, and another use is an error."""
        if self._descriptor >= 0:
            self._words.release()
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_words"):
            self.close()

    # The trainer's words.

    @property
    def run(self) -> int:
        """The number of the run that goes on, 0 before the first."""
        return self._words[_RUN]

    @property
    def handed(self) -> tuple[int, int]:
        """(run, global position before which all samples were handed to the loop)."""
        return _split(self._words[_HANDED])

    @property
    def sharers(self) -> int:
        """How many loaders of the trainer have an open epoch, at least 1."""
        return max(1, self._words[_SHARERS])

    def begin(self, run: int, position: int) -> None:
        """Say that a run begins at a global position: batches of others may be given up."""
        self._words[_HANDED] = _join(run, position)
        self._words[_RUN] = run

    def hand_out(self, run: int, position: int) -> None:
        """Say that all samples before a global position were handed to the loop; at an epoch's end, its samples."""
        self._words[_HANDED] = _join(run, position)

    def share(self, sharers: int) -> None:
        """Say how many loaders have an open epoch."""
        self._words[_SHARERS] = sharers

    def started(self, process: int) -> None:
        """Say which process the prefetcher is; it runs once it has put its own number."""
        self._words[_PROCESS] = process

    @property
    def process(self) -> int:
        """The prefetcher's process, 0 where none was started."""
        return self._words[_PROCESS]

    # The prefetcher's words.

    def count(self, which: Count) -> int:
        """Return a word of the prefetcher's."""
        return self._words[_FIRST_COUNT + which]

    def add(self, which: Count, number: int) -> None:
        """Add to a word of the prefetcher's; for itself alone."""
        self._words[_FIRST_COUNT + which] += number

    def put(self, which: Count, number: int) -> None:
        """Set a word of the prefetcher's; for itself alone."""
        self._words[_FIRST_COUNT + which] = number

    def report(self, text: str) -> None:
        """Say why something couldn't be fetched, for the workers that wait for it."""
        data = text.encode("utf-8", "replace")[:_REPORT_BYTES]
        self.put(Count.REPORT, 0)
        self._map[_WORDS * 8 : _WORDS * 8 + len(data)] = data
        self.put(Count.REPORT, len(data))

    @property
    def reported(self) -> str:
        """Why something couldn't be fetched, "" where all could."""
        return self._map[_WORDS * 8 : _WORDS * 8 + self.count(Count.REPORT)].decode("utf-8", "ignore")

    def replied(self, counts: Mapping[int, int]) -> None:
        """Say how many replies of each status came (0: none came); of more than 16 kinds the rest isn't told."""
        for at, (status, count) in enumerate(list(counts.items())[:_STATUSES]):
            self._words[_FIRST_STATUS + at] = _join(status, count)

    @property
    def replies(self) -> dict[int, int]:
        """How many replies of each status came, 0 standing for none."""
        found = (_split(self._words[_FIRST_STATUS + at]) for at in range(_STATUSES))
        return {status: count for status, count in found if count}

    @property
    def copied(self) -> frozenset[int]:
        """The devices (`stat.st_dev`) whose shards are copied."""
        return frozenset(self._words[_FIRST_DEVICE + i] - 1 for i in range(_DEVICES) if self._words[_FIRST_DEVICE + i])

    def copy_nothing(self) -> None:
        """Say that no device's shards are copied."""
        self.put(Count.MEMORY, 0)
        for at in range(_FIRST_DEVICE, _FIRST_DEVICE + _DEVICES):
            self._words[at] = 0

    def copy_device(self, device: int) -> bool:
        """Say that a device's shards are copied; tell whether there was room to say so."""
        for at in range(_FIRST_DEVICE, _FIRST_DEVICE + _DEVICES):
            if self._words[at] in (0, device + 1):
                self._words[at] = device + 1
                return True
        return False

    def resident(self, lane: int, run: int) -> int:
        """Return before which of its places a lane is resident, 0 where the prefetcher is at another run."""
        at, places = _split(self._words[_FIRST_LANE + lane])
        return places if at == run else 0

    def reach(self, lane: int, run: int, places: int) -> None:
        """Say before which of its places a lane is resident."""
        self._words[_FIRST_LANE + lane] = _join(run, places)

    # A worker's words.

    def want(self, worker: int, run: int, position: int) -> None:
        """Say that a worker needs the samples before a global position now."""
        self._words[_row(worker) + _WANTED] = _join(run, position)

    def wanted(self, run: int) -> int:
        """Return the global position before which some worker needs samples, 0 where none does."""
        return max(self.wants(run), default=0)

    def wants(self, run: int) -> list[int]:
        """Return those positions of all workers, where a worker that has had its samples keeps the last one."""
        found = (_split(word) for word in self._words[_FIRST_WORKER + _WANTED :: _WORKER_WORDS].tolist())
        return [position for at, position in found if at == run]

    def pass_by(self, worker: int, run: int, position: int) -> None:
        """Say that a worker needs nothing before a position any more."""
        self._words[_row(worker) + _FLOOR] = _join(run, position)

    def passed(self, run: int, workers: int) -> int:
        """Return the position before which none of the first `workers` workers needs anything."""
        found = (_split(self._words[_row(worker) + _FLOOR]) for worker in range(workers))
        return 0 if workers > WORKERS else min((position if at == run else 0 for at, position in found), default=0)

    def read_alone(self, worker: int) -> None:
        """Count a batch that a worker reads without waiting any longer."""
        self._words[_row(worker) + _UNPREFETCHED] += 1

    @property
    def unprefetched(self) -> int:
        """How many batches workers read for themselves."""
        return sum(self._words[_row(worker) + _UNPREFETCHED] for worker in range(WORKERS))


def _nothing() -> None:
    """Stand for a block where there is none."""


def _received(duplicate: Any) -> Block:
    """Map a block in the process that was started with it."""
    return Block(duplicate.detach())


def _row(worker: int) -> int:
    return _FIRST_WORKER + worker % WORKERS * _WORKER_WORDS


def _join(run: int, low: int) -> int:
    return run << _RUN_BITS | low


def _split(word: int) -> tuple[int, int]:
    return word >> _RUN_BITS, word & _BELOW
