"""Fetches shards that nobody counted, piece by piece, in the order in which workers walk them in the first epoch.

begin -> a piece flies (fetched by a thread) -> it lands: say so, in its lane's order -> no worker needs it any more: let go

Pieces are bytes of whole shards (`arrival.Pieces`): where samples begin, workers find out for themselves.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

from pipeline.arrival import ArrivalSettings, Pieces
from pipeline.errors import SourceError
from pipeline.machine import available_memory
from pipeline.prefetch.fetching import Fetcher
from pipeline.prefetch.flights import Flight, Flights, Wanted
from pipeline.prefetch.plan import Fetching, Plan
from pipeline.prefetch.share import read_ahead
from pipeline.prefetch.shortage import Shortage
from pipeline.progress import Block, Count, Way
from pipeline.stores.cache import CHUNK


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
        self._available = available_memory()
        self._fetcher = Fetcher(plan, fetching, block)
        self._flights, self._run = Flights(self._fetcher, block, fetching.connections), 0
        self._shortage = Shortage(self._fetcher, self._flights, block, self._least * self._ranks)
        self._numbers: Iterator[int] = iter(())
        self._next: int | None = None
        block.put(Count.WAY, Way.FETCHED)
        block.put(Count.PART_BYTES, sum(self._sizes))
        self._kept = self._keep(self._choose(fetching.set))

    def begin(self, run: int, epoch: int, position: int, claimed: int = 0, wrapped: int = 0) -> None:
        """Begin a run; what still flies for another lands soon, and is let go of."""
        del epoch, position, claimed, wrapped  # it is the first one, and workers say what they don't need of it
        self._run = run
        self._flights.begin(run)
        self._shortage.begin()
        self._numbers = iter(self._pieces)
        self._next = next(self._numbers, None)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until another run begins."""
        return self._next is None and self._flights.none

    @property
    def full(self) -> bool:
        """Whether there is more to fetch than there is room for."""
        return self._next is not None and not self._flights.full

    @property
    def pending(self) -> bool:
        """Whether something is on its way."""
        return self._flights.pending

    @property
    def landing(self) -> socket.socket:
        """What has something to read once something may have landed."""
        return self._flights.landing

    def step(self) -> bool:
        """Say what has landed, let go of what is used up, let the next piece fly if there is room; tells whether it did."""
        landed = self._flights.land()
        passed = self._block.passed(self._run, self._workers)
        self._flights.let_go(lambda flight: flight.last < passed)
        if self._shortage.step(self._is_lacked, self._make_room, lambda: None):
            return landed
        while self._next is not None and self._next < passed:  # a run that goes on in the middle
            self._block.reach(*self._said(self._next))
            self._next = next(self._numbers, None)
        number = self._next
        if number is None or self._flights.full:
            return landed
        ranges = self._pieces.ranges(number)
        size = sum(end - begin for _, begin, end in ranges)
        lacked = self._is_lacked(number)
        if not self._has_room(size, number, lacked=lacked):
            if lacked and not self._flights.flies:
                self._make_do(number)
            return landed
        self._shortage.has_room()
        lane, run, stop = self._said(number)
        self._flights.send(Flight(run, lane, stop, number, number, size), partial(self._fetch, ranges))
        self._next = next(self._numbers, None)
        return True

    def close(self) -> None:
        """End all that flies."""
        self._flights.close()

    def _fetch(self, ranges: list[tuple[int, int, int]], flight: Flight, wanted: Wanted) -> None:
        """Fetch a piece: in a thread."""
        for shard, begin, end in ranges:
            flight.parts.append(self._fetcher.open_bytes(shard, begin, end, keep=shard in self._kept))
            self._fetcher.fill(shard, flight.parts[-1], wanted)
            self._fetcher.compare(shard, flight.parts[-1], wanted)

    def _said(self, number: int) -> tuple[int, int, int]:
        """Return what is said once a piece is there: its lane, the run, and up to where the lane is there."""
        k, lane = divmod(number, self._lanes)
        return lane, self._run, k + 1

    def _has_room(self, size: int, number: int, *, lacked: bool) -> bool:
        """Tell whether a piece may be fetched: it fits the budget, or a worker waits for it; and the folder has room for it."""
        budget = read_ahead(self._available, self._least, self._ranks, self._block.sharers)
        self._block.put(Count.BUDGET_BYTES, budget)
        ahead, held = not lacked, self._flights.held_bytes
        if ahead and held + size > budget:
            return False
        # Reading ahead beyond its least it leaves room for another job's.
        beside = self._flights.flying_bytes + (self._least if ahead and held + size > self._least else 0)
        return self._fetcher.has_room(size, beside, lambda: self._fetcher.reclaim_shards(self._kept))

    def _make_do(self, number: int) -> None:
        """Let half of what stays go, where there is no room for what is needed now; in the end wait for others, not for ever."""
        if self._kept:
            self._let_stay_less()
        elif self._shortage.is_stuck():
            lane, _, stop = self._said(number)
            self._shortage.give_up(self._run, lane, stop, "index these tars (`python -m pipeline index`)")
            self._next = None

    def _is_lacked(self, number: int) -> bool:
        """Tell whether a worker waits for a piece."""
        return number < self._block.wanted(self._run)

    def _make_room(self) -> bool:
        """Give back what doesn't stay and nobody reads, else half of what stays; tells whether that was anything."""
        freed = self._fetcher.reclaim_shards(self._kept)
        if not freed and self._kept:
            freed = self._let_stay_less()
        return freed > 0

    def _let_stay_less(self) -> int:
        """Let half of the shards that stay go; returns how many bytes went."""
        self._kept = self._keep(frozenset(sorted(self._kept)[: len(self._kept) // 2]))
        freed = self._fetcher.reclaim_shards(self._kept)
        self._fetcher.look_again()
        return freed

    def _keep(self, shards: frozenset[int]) -> frozenset[int]:
        """Say how much stays; returns the shards."""
        self._block.put(Count.KEPT_BYTES, sum(self._sizes[shard] for shard in shards))
        return shards

    def _choose(self, set_name: str) -> frozenset[int]:
        """Choose which shards stay in the folder, as many as there is room for; raises SourceError where there is too little."""
        cache = self._fetcher.cache
        cache.make_room(sum(self._sizes))
        mine = cache.bytes_of(set_name)
        room = min(cache.limit - (cache.used_bytes() - mine), cache.room() + mine)
        if room < (least := self._least * self._ranks):
            raise SourceError(
                f"{cache.folder}: {cache.said_of(room)}, and {least / 2**20:.0f} MiB are needed to read tars that "
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
