"""Fetches shards that nobody counted, piece by piece, in the order in which workers walk them in the first epoch.

begin -> a piece flies (fetched by a thread) -> it lands: say so, in its lane's order -> no worker needs it any more: let go

Pieces are bytes of whole shards (`arrival.Pieces`): where samples begin, workers find out for themselves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.arrival import ArrivalSettings, Pieces
from pipeline.errors import PipelineError, SourceError, said
from pipeline.machine import available_memory
from pipeline.prefetch.fetching import FetchedPart, Fetcher, Superseded
from pipeline.prefetch.plan import Fetching, Plan
from pipeline.prefetch.share import read_ahead
from pipeline.progress import Block, Count, Way
from pipeline.stores.cache import CHUNK

_STUCK_SECONDS = 10.0  # without a change in the folder, as in `remote`


@dataclass(slots=True)
class _Flight:
    """A piece on its way, or landed: its size in bytes, what it holds, when it set out."""

    run: int
    number: int
    bytes: int
    began: int
    parts: list[FetchedPart] = field(default_factory=list)
    error: BaseException | None = None
    future: Future[None] | None = None


class ArrivingReader:
    """Makes the pieces of a first epoch resident; what `RemoteReader` is for shards that are counted."""

    def __init__(self, plan: Plan, fetching: Fetching, block: Block) -> None:
        """Open the cache folder; raises SourceError where it can't be used, or has too little room."""
        self._block, self._sizes = block, [int(size) for size in plan.sizes]
        settings = ArrivalSettings(**fetching.arrival)
        self._lanes, self._workers, self._ranks = settings.lanes, fetching.workers, plan.world.local_world_size
        self._pieces = Pieces(self._sizes, settings, 0)
        # A worker holds two windows of a lane, and waits for the next one.
        self._least = min(sum(self._sizes), (3 * settings.lanes + 1) * settings.window_bytes)
        self._available, self._at_once = available_memory(), fetching.connections
        self._fetcher = Fetcher(plan, fetching, block)
        self._kept = self._choose(fetching.set)
        self._pool = ThreadPoolExecutor(self._at_once, "fetch")
        self._flying: deque[_Flight] = deque()
        self._landed: deque[_Flight] = deque()
        self._held = self._run = 0
        self._numbers: Iterator[int] = iter(())
        self._next: int | None = None
        self._stuck = (0, 0.0)  # what was taken of the folder when there was no room for what is needed now, and since when
        self._ended = threading.Event()
        block.put(Count.WAY, Way.FETCHED)
        block.put(Count.KEPT_BYTES, sum(self._sizes[number] for number in self._kept))
        block.put(Count.PART_BYTES, sum(self._sizes))

    def begin(self, run: int, epoch: int, position: int, claimed: int = 0, wrapped: int = 0) -> None:
        """Begin a run; what still flies for another lands soon, and is let go of."""
        del epoch, position, claimed, wrapped  # it is the first one, and workers say what they don't need of it
        self._run, self._stuck = run, (0, 0.0)
        self._block.report("")
        self._let_go(None)
        self._numbers = iter(self._pieces)
        self._next = next(self._numbers, None)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until another run begins."""
        return self._next is None and not self._landed and not self._flying

    @property
    def full(self) -> bool:
        """Whether there is more to fetch than there is room for."""
        return self._next is not None and len(self._flying) < self._at_once

    @property
    def pending(self) -> bool:
        """Whether something is on its way."""
        return bool(self._flying)

    def step(self) -> bool:
        """Say what has landed, let go of what is used up, let the next piece fly if there is room; tells whether it did."""
        landed = self._land()
        passed = self._block.passed(self._run, self._workers)
        self._let_go(passed)
        while self._next is not None and self._next < passed:  # a run that goes on in the middle
            self._reach(self._next)
            self._next = next(self._numbers, None)
        number = self._next
        if number is None or len(self._flying) >= self._at_once:
            return landed
        ranges = self._pieces.ranges(number)
        size = sum(end - begin for _, begin, end in ranges)
        if not self._has_room(size, number):
            if not self._flying and number < self._block.wanted(self._run):
                self._wait_for_room(number)
            return landed
        flight = _Flight(self._run, number, size, time.monotonic_ns())
        flight.future = self._pool.submit(self._fly, flight, ranges)
        self._flying.append(flight)
        self._held += size
        self._next = next(self._numbers, None)
        return True

    def close(self) -> None:
        """End all that flies."""
        self._ended.set()
        self._fetcher.close()
        self._pool.shutdown(cancel_futures=True)

    def _fly(self, flight: _Flight, ranges: list[tuple[int, int, int]]) -> None:
        """Fetch a piece: in a thread."""

        def wanted() -> bool:
            return flight.run == self._run and not self._ended.is_set()

        try:
            for shard, begin, end in ranges:
                flight.parts.append(self._fetcher.open_bytes(shard, begin, end, keep=shard in self._kept))
                self._fetcher.fill(shard, flight.parts[-1], wanted)
        except Superseded:
            pass
        except (OSError, PipelineError) as error:
            flight.error = error

    def _land(self) -> bool:
        """Take over what has landed, each lane's pieces in their order; tells whether any has."""
        landed, lanes, rest = False, set[int](), deque[_Flight]()
        for flight in self._flying:
            assert flight.future is not None
            lane = flight.number % self._lanes
            if not flight.future.done() or (flight.run == self._run and lane in lanes):
                lanes.add(lane)
                rest.append(flight)
                continue
            landed = True
            flight.future.result()
            self._take_over(flight)
        self._flying = rest
        return landed

    def _take_over(self, flight: _Flight) -> None:
        block = self._block
        if flight.run != self._run:
            self._drop(flight)
            return
        if flight.error is not None:
            block.add(Count.FAILED, 1)
            block.report(said(flight.error))
        self._landed.append(flight)
        block.add(Count.READING_NS, time.monotonic_ns() - flight.began)
        block.add(Count.WINDOWS, 1)
        self._reach(flight.number)  # a worker that meets a failure reads the report
        self._fetcher.alive()

    def _reach(self, number: int) -> None:
        k, lane = divmod(number, self._lanes)
        self._block.reach(lane, self._run, k + 1)

    def _let_go(self, passed: int | None) -> None:
        """Let go of what landed before a number, None for all."""
        rest = deque[_Flight]()
        for flight in self._landed:
            if passed is None or flight.number < passed:
                self._drop(flight)
            else:
                rest.append(flight)
        self._landed = rest

    def _drop(self, flight: _Flight) -> None:
        self._held -= flight.bytes
        for part in flight.parts:
            with suppress(OSError):
                self._fetcher.release(part)

    def _has_room(self, size: int, number: int) -> bool:
        """Tell whether a piece may be fetched: it fits the budget, or a worker waits for it; and the folder has room for it."""
        budget = read_ahead(self._available, self._least, self._ranks, self._block.sharers)
        self._block.put(Count.BUDGET_BYTES, budget)
        ahead = number >= self._block.wanted(self._run)
        if ahead and self._held + size > budget:
            return False
        # Reading ahead beyond its least it leaves room for another job's.
        beside = sum(flight.bytes for flight in self._flying) + (self._least if ahead and self._held + size > self._least else 0)
        return self._fetcher.has_room(size, beside, lambda: self._fetcher.reclaim_shards(self._kept))

    def _wait_for_room(self, number: int) -> None:
        """Wait for others to let go of some, not for ever."""
        used, now = self._fetcher.cache.used_bytes(), time.monotonic()
        if used != self._stuck[0]:
            self._stuck = (used, now)
        elif now > self._stuck[1] + _STUCK_SECONDS:
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        """Tell the worker that waits for a piece that there will never be room for it."""
        cache = self._fetcher.cache
        self._block.report(
            said(
                SourceError(
                    f"{cache.folder}: no room for what is needed now: {cache.used_bytes() / 2**20:.0f} of "
                    f"{cache.limit / 2**20:.0f} MiB are taken; raise "
                    "LoaderOptions(cache_bytes=), free some of the disk, or index these tars (`python -m pipeline index`)"
                )
            )
        )
        self._block.add(Count.FAILED, 1)
        self._reach(number)
        self._next = None

    def _choose(self, set_name: str) -> frozenset[int]:
        """Choose which shards stay in the folder, as many as there is room for; raises SourceError where there is too little."""
        cache = self._fetcher.cache
        cache.make_room(sum(self._sizes))
        mine = cache.bytes_of(set_name)
        room = min(cache.limit - (cache.used_bytes() - mine), cache.room() + mine)
        if room < (least := self._least * self._ranks):
            raise SourceError(
                f"{cache.folder}: {room / 2**20:.0f} MiB of room, and {least / 2**20:.0f} MiB are needed to read tars that "
                f"nobody counted (three windows for each of {self._lanes} lanes, and one): raise LoaderOptions(cache_bytes=), name "
                "a cache_dir on a larger disk, or lower window_bytes or lanes"
            )
        # Twice the least is left to what comes and goes: with batches of several windows a worker holds more than three.
        whole = sum(self._sizes) + 2 * CHUNK * len(self._sizes)
        left, kept = room if room >= whole else room - 2 * least, set[int]()
        for shard, size in enumerate(self._sizes):
            if size <= left:
                kept.add(shard)
                left -= size
        return frozenset(kept)
