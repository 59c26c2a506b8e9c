"""Walks a rank's plan over remote shards: several windows are fetched at once, and those that are used up are given back.

begin -> a window flies (fetched by a thread) -> it lands: say so, in its lane's order -> its batches are handed out: let go

It differs from `reader` in what there is little of: there a disk's head, here round trips and the cache folder's room.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from functools import partial

from pipeline.epoch import EpochOrder, Ints
from pipeline.errors import SourceError
from pipeline.machine import available_memory
from pipeline.prefetch.fetching import FetchedPart, Fetcher
from pipeline.prefetch.flights import Flight, Flights, Wanted
from pipeline.prefetch.plan import Fetching, Plan
from pipeline.prefetch.share import Share, read_ahead
from pipeline.prefetch.shortage import Shortage
from pipeline.prefetch.walk import Need, lanes_of, needs, ranges
from pipeline.progress import Block, Count, Way
from pipeline.stores.cache import CHUNK

_BESIDE_SHARD, _BESIDE_SAMPLE = 16 * 1024, 90  # bytes in the folder beside the shards': tables, heads and indexes
_AHEAD_PART = 8  # of the room for what doesn't all fit: what is kept for reading ahead isn't kept from epoch to epoch
_END = 2**62  # the position of what comes once more, behind all others


class RemoteReader:
    """Makes the windows of one run after the other resident; what `Reader` is for local shards."""

    def __init__(self, plan: Plan, fetching: Fetching, block: Block, available: int | None = None) -> None:
        """Open the cache folder; raises SourceError where it can't be used, or has too little room."""
        self._plan, self._block = plan, block
        self._lanes = lanes_of(plan.world, plan.layout.settings.lanes, 0)
        self._mean = plan.mean_bytes()
        self._beside = _BESIDE_SHARD * len(plan.paths) + _BESIDE_SAMPLE * plan.layout.samples
        self._least = min((len(self._lanes) + 1) * (plan.window_bytes() + _cut_bytes(plan)) + self._beside, self._whole())
        self._available = available_memory() if available is None else available
        self._fetcher = Fetcher(plan, fetching, block)
        self._fetcher.reserve = 2 * self._least
        self._check_room()
        self._flights, self._run = Flights(self._fetcher, block, fetching.connections), 0
        self._shortage = Shortage(self._fetcher, self._flights, block, self._least * plan.world.local_world_size)
        self._needs: Iterator[Need] = iter(())
        self._next: Need | None = None
        self._share: Share | None = None
        self._fits = False  # whether there was room for all of the set
        self._batch = 2**40  # positions from one batch of all ranks to the next, at the most
        block.put(Count.WAY, Way.FETCHED)

    def begin(self, run: int, epoch: int, position: int, claimed: int = 0, wrapped: int = 0) -> None:
        """Begin a run at a global position of an epoch; what still flies for another lands soon, and is let go of.

        What comes once more at the epoch's end (`wrapped`) is held until the run ends, and fetched once more if it has gone.
        """
        del claimed  # it is of memory
        plan = self._plan
        self._run, self._batch = run, 2**40
        self._flights.begin(run)
        self._shortage.begin()
        lanes = lanes_of(plan.world, plan.layout.settings.lanes, position)
        order = EpochOrder(plan.layout, epoch)
        self._needs = itertools.chain(needs(order, lanes, position), _once_more(order, wrapped))
        self._next = next(self._needs, None)
        if self._share is None:
            self._keep(self._room_to_keep())

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
        """Say what has landed, let go of what is used up, let the next window fly if there is room; tells whether it did."""
        landed = self._flights.land()
        run, position = self._block.handed
        if run == self._run:
            self._flights.let_go(lambda flight: flight.last < position)
        if self._shortage.step(self._is_lacked, self._make_room, self._keep_again):
            return landed
        need = self._next
        if need is None or self._flights.full:
            return landed
        lacked = self._is_lacked(need.first)  # once: a worker may come to wait at any time
        if not self._has_room(need, lacked=lacked):
            if lacked and not self._flights.flies:
                self._make_do(need)
            return landed
        self._shortage.has_room()
        window, again = need.window, need.first == _END
        flight = Flight(self._run, window.lane, 0 if again else window.stop, need.first, need.last, self._bytes(window.reads))
        self._flights.send(flight, partial(self._fetch, window.reads))
        self._next = next(self._needs, None)
        return True

    def close(self) -> None:
        """End all that flies."""
        self._flights.close()

    def _fetch(self, reads: Ints, flight: Flight, wanted: Wanted) -> None:
        """Fetch a window: in a thread."""
        share = self._share
        assert share is not None
        opened = list[tuple[int, FetchedPart]]()
        for number, first, stop in ranges(reads):
            part = self._fetcher.open(number, first, stop, share, wanted)
            flight.parts.append(part)
            opened.append((number, part))
        for number, part in opened:
            self._fetcher.fill(number, part, wanted)
        self._flights.asks_no_more(flight)
        for number, part in opened:
            self._fetcher.compare(number, part, wanted)

    def _has_room(self, need: Need, *, lacked: bool) -> bool:
        """Tell whether a window may be fetched: it fits the budget, or a worker waits for it; and the folder has room for it."""
        size, held = self._bytes(need.window.reads), self._flights.held_bytes
        if held + size > self._budget() and self._block.wanted(self._run) <= need.first < _END:
            return False
        assert self._share is not None
        # Beyond its least it leaves room for another job's: it would read ahead while that one starves.
        leaves = held + size > self._least and not lacked
        beside = self._flights.flying_bytes + (self._least if leaves else 0)
        if self._fetcher.has_room(size, beside, partial(self._fetcher.reclaim, self._share)):
            return True
        # Where all stays some of it is there, or on its way: no more comes than what isn't.
        return self._fits and lacked and self._fetcher.has_room_for_all(self._whole())

    def _is_lacked(self, first: int) -> bool:
        """Tell whether the next batch waits for what is needed from a position on: a later one may wait until this one is used."""
        run, handed = self._block.handed
        if run != self._run or first == _END:
            return run == self._run
        self._batch = min([self._batch, *(end - handed for end in self._block.wants(run) if end > handed)])
        return first < min(handed + self._batch, self._block.wanted(run))

    def _make_do(self, need: Need) -> None:
        """Let half of what stays go, where there is no room for what is needed now; in the end wait for others, not for ever."""
        assert self._share is not None
        if self._share.kept_bytes:
            self._let_stay_less(self._share)
        elif self._shortage.is_stuck():
            self._shortage.give_up(self._run, need.window.lane, need.window.stop, "lower window_bytes")
            self._next = None

    def _make_room(self) -> bool:
        """Give back what doesn't stay and nobody reads, else half of what stays; tells whether that was anything."""
        assert self._share is not None
        freed = self._fetcher.reclaim(self._share)
        if not freed and self._share.kept_bytes:
            freed = self._let_stay_less(self._share)
        return freed > 0

    def _let_stay_less(self, share: Share) -> int:
        """Let half of what stays go, all of what is little; returns how many bytes went."""
        self._fits = False
        freed = self._fetcher.reclaim(self._keep(share.kept_bytes // 2 if share.kept_bytes > self._least else 0))
        self._fetcher.look_again()
        return freed

    def _keep_again(self) -> None:
        """Let as much stay as there is room for now."""
        assert self._share is not None
        self._keep(max(self._share.kept_bytes, self._room_to_keep()))

    def _budget(self) -> int:
        budget = read_ahead(self._available, self._least, self._plan.world.local_world_size, self._block.sharers)
        self._block.put(Count.BUDGET_BYTES, budget)
        return budget

    def _bytes(self, reads: Ints) -> int:
        return int((reads[:, 2] - reads[:, 1]).sum() * self._mean)

    def _check_room(self) -> None:
        """Raise SourceError where the folder can't hold a window of each lane, and one more."""
        cache, ranks = self._fetcher.cache, self._plan.world.local_world_size
        least = min(self._least * ranks, self._whole())
        cache.make_room(least)
        room = min(cache.limit, cache.room() + cache.bytes_of(self._plan.fetching.set if self._plan.fetching else ""))
        if room < least:
            raise SourceError(
                f"{cache.folder}: {cache.said_of(room)}, and {least / 2**20:.0f} MiB are needed to read (all of the set, or "
                f"{len(self._lanes)} lanes and one more, a window of {self._plan.window_bytes() / 2**20:.1f} MiB each, indexes"
                f"{f', {ranks} ranks' if ranks > 1 else ''}): "
                "raise LoaderOptions(cache_bytes=), name a cache_dir on a larger disk, or lower window_bytes or lanes"
            )
        if room < (whole := self._whole()) and not cache.gives_back():
            raise SourceError(
                f"{cache.folder}: its file system can't give parts of files back, so only a set that fits whole can be read; "
                f"{whole / 2**20:.0f} MiB don't fit into {room / 2**20:.0f} MiB of room: raise LoaderOptions(cache_bytes=), "
                "or name a cache_dir on a local disk (ext4, XFS, btrfs) or in memory"
            )

    def _whole(self) -> int:
        """Return how many bytes all of the set takes in the folder."""
        return int(self._plan.sizes.sum()) + CHUNK * len(self._plan.paths) + self._beside

    def _room_to_keep(self) -> int:
        """Return what of the folder may stay: asked once in the loader's life, as a share that changes is fetched anew."""
        plan, cache = self._plan, self._fetcher.cache
        ranks = plan.world.local_world_size
        mine = cache.bytes_of(plan.fetching.set if plan.fetching else "")
        others = sum(held.bytes for held in cache.sets() if held.reading) - mine
        room = min(cache.limit - max(0, others), cache.room() + mine)
        if room >= (whole := self._whole()):
            self._fits = True
            return whole
        room -= ranks * max(self._least, min(self._budget(), room // _AHEAD_PART))
        if self._fetcher.unpacks:  # what comes before the windows that are wanted needs room to stay until its turn
            room -= min(room // 2, self._fetcher.reserve + ranks * len(self._lanes) * int(plan.sizes.max()))
        together = not plan.layout.fixed or len(self._lanes) == plan.layout.settings.lanes
        return max(0, room if together else room // ranks)

    def _keep(self, size: int) -> Share:
        """Choose what stays in the folder; of less room a part of what more would have chosen."""
        self._share = Share(self._plan.layout, self._plan.sizes, self._lanes, size)
        self._block.put(Count.KEPT_BYTES, self._share.kept_bytes)
        self._block.put(Count.PART_BYTES, self._share.part_bytes)
        return self._share


def _once_more(order: EpochOrder, wrapped: int) -> Iterator[Need]:
    """Yield the windows of all lanes that hold positions below `wrapped`, as what an epoch needs at its very end."""
    for need in needs(order, list(range(order.layout.settings.lanes)), 0) if wrapped else ():
        if need.first >= wrapped:
            return
        yield need._replace(first=_END, last=_END)


def _cut_bytes(plan: Plan) -> int:
    """Return what a window takes beyond its samples, at the most: each part of a shard in it is cut out of chunks at both ends."""
    layout = plan.layout
    blocks = len(layout.pieces(0).size)
    window = min(layout.settings.window, layout.samples)
    parts = 2 + window * blocks // max(1, layout.samples)  # a block that is entered in its middle and wraps is two
    return 2 * CHUNK * parts
