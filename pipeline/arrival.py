"""Decides the order of an epoch over shards that nobody counted, while they are read: whole shards, lanes that run out passed over.

    deal      shards in an order by (seed, epoch), each to the lane that has the fewest bytes
    lanes     |- a -|--- d ---|   each is walked forward, header by header
              |-- b --|- e -|
              |---- c ----|
    windows   |w|-w-|---w---|     a lane's samples are permuted within some bytes of it, few at first
    position  round k takes the sample at place k of each lane that has one

Which sample stands at a position follows from the shards, the seed and the settings alone; so every process can find it out for
itself, and all find the same. Only what lies behind the position is unknown: where the epoch ends, say.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from pipeline.epoch import RAMP, Steps, Token, fold, permutation
from pipeline.errors import PipelineError
from pipeline.options import LastBatch, check_int
from shardify.format.tar import SampleRecord, padded

Records: TypeAlias = Callable[[int], Iterator[SampleRecord]]
Hint: TypeAlias = Callable[[int, int, int], None]

_DEAL, _WINDOW = 5, 6  # what a draw is for; epoch.py has 1 to 4
_CUT = 64 * 1024  # bytes of a shard at which pieces are cut: what a cache folder counts in
_WINDOW_SAMPLES = 4096  # at most, however small they are: a window's records are held, 1.4 KB each


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivalSettings:
    """What decides the order besides the shards and the epoch; unshuffled is one lane, in storage order."""

    seed: int = 0
    lanes: int = 8
    window_bytes: int = 32 * 2**20
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_int("window_bytes", self.window_bytes, 1)
        if not self.shuffle:
            object.__setattr__(self, "lanes", 1)

    def window(self, lane: int, number: int) -> int:
        """Return the bytes at which a lane's window closes: few, then doubling, one by which lanes differ, then full ones."""
        ramp = [size for k in range(RAMP.bit_length()) if (size := max(1, self.window_bytes // RAMP) << k) < self.window_bytes]
        if number < len(ramp):
            return ramp[number]
        # As in epoch.py: after this one the lanes don't all turn at once.
        return -(-self.window_bytes * (lane + 1) // self.lanes) if number == len(ramp) else self.window_bytes


def deal(sizes: Sequence[int], settings: ArrivalSettings, epoch: int) -> list[list[int]]:
    """Return the shards of each lane in the order of reading; `sizes` are in bytes."""
    if not settings.shuffle:
        return [list(range(len(sizes)))]
    lanes: list[list[int]] = [[] for _ in range(settings.lanes)]
    filled = [(0, lane) for lane in range(settings.lanes)]
    for shard in permutation(len(sizes), fold(_DEAL, settings.seed, epoch)).tolist():
        held, lane = heapq.heappop(filled)
        lanes[lane].append(shard)
        heapq.heappush(filled, (held + sizes[shard], lane))
    return lanes


class Pieces:
    """The bytes of an epoch in the order in which they are wanted: lanes' shards end to end, cut about where windows close.

    Piece k * lanes + l is the k-th of lane l; a lane that is shorter leaves its last numbers out. `sizes`: of the shards in bytes.
    """

    def __init__(self, sizes: Sequence[int], settings: ArrivalSettings, epoch: int) -> None:
        self._sizes, self._lanes = sizes, deal(sizes, settings, epoch)
        self._begins = [list(itertools.accumulate((sizes[shard] for shard in lane), initial=0)) for lane in self._lanes]
        self._place = {shard: (number, at) for number, lane in enumerate(self._lanes) for at, shard in enumerate(lane)}
        self._cuts = [self._cut(lane, settings) for lane in range(len(self._lanes))]

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of all pieces, in order."""
        longest = max(map(len, self._cuts))
        places = itertools.product(range(longest), range(len(self._cuts)))
        return (k * len(self._cuts) + lane for k, lane in places if k < len(self._cuts[lane]))

    def ranges(self, number: int) -> list[tuple[int, int, int]]:
        """Return what a piece holds: (shard, begin, end) in bytes each."""
        k, lane = divmod(number, len(self._cuts))
        begin, end = self._cuts[lane][k - 1] if k else 0, self._cuts[lane][k]
        first = bisect.bisect(self._begins[lane], begin) - 1
        found = []
        for at in range(first, len(self._lanes[lane])):
            start, stop = self._begins[lane][at : at + 2]
            if start >= end:
                break
            if max(begin, start) < min(end, stop):
                found.append((self._lanes[lane][at], max(begin, start) - start, min(end, stop) - start))
        return found

    def number(self, shard: int, byte: int) -> int:
        """Return which piece holds a byte of a shard."""
        lane, at = self._place[shard]
        return self.number_in(lane, self._begins[lane][at] + byte)

    def number_in(self, lane: int, byte: int) -> int:
        """Return which piece holds a byte of a lane, the last one for what lies behind its end."""
        cuts = self._cuts[lane]
        return min(bisect.bisect(cuts, byte), len(cuts) - 1) * len(self._cuts) + lane

    def _cut(self, lane: int, settings: ArrivalSettings) -> list[int]:
        """Return where a lane's pieces end: at whole `_CUT`s of a shard, or at its end."""
        begins, at, cuts = self._begins[lane], 0, list[int]()
        while at < begins[-1]:
            at = min(at + settings.window(lane, len(cuts)), begins[-1])
            start, stop = begins[bisect.bisect_left(begins, at) - 1 :][:2]
            at = min(start + -(-(at - start) // _CUT) * _CUT, stop)
            cuts.append(at)
        return cuts


class Found(NamedTuple):
    """A sample by its place in the set, and its members."""

    shard: int
    at: int
    record: SampleRecord


class _Lane:
    """Walks a lane's shards forward; knows the samples of its last two windows, and begins anew for earlier ones."""

    def __init__(self, number: int, shards: Sequence[int], order: ArrivalOrder) -> None:
        self._number, self._shards, self._order = number, shards, order
        self.size: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._stream = self._samples()
        self.walked = self._bytes = self._hinted = 0
        self._windows: list[tuple[int, list[Found]]] = []
        self._from: list[int] = []  # the bytes at which these begin
        self._count = 0

    def close(self) -> None:
        """Leave the shard that is being read."""
        self._stream.close()

    def reaches(self, place: int) -> bool:
        """Tell whether the lane has a sample at a place; walks as far as that takes."""
        if self.size is not None:
            return place < self.size
        while self.walked <= place and self.size is None:
            self._walk()
        return place < self.walked

    def at(self, place: int) -> Found:
        """Return the sample at a place that the lane reaches."""
        if self._windows and place < self._windows[0][0]:
            self._begin()
        while self.walked <= place:
            self._walk()
        start, samples = self._windows[bisect.bisect(self._windows, place, key=lambda window: window[0]) - 1]
        return samples[place - start]

    def floor(self, place: int) -> int | None:
        """Return the byte before which nothing is needed once all places up to `place` were read, None where the lane has ended."""
        if self.size is not None and self.size <= place + 1:
            return None
        return self._from[0] if self._from else 0

    def _walk(self) -> None:
        """Take in the next window, or learn that there is none."""
        settings, order = self._order.settings, self._order
        limit = settings.window(self._number, self._count)
        self._read_ahead(limit + settings.window(self._number, self._count + 1))
        samples, begin = list[Found](), self._bytes
        try:
            for found in self._stream:
                samples.append(found)
                if self._bytes - begin >= limit or len(samples) == _WINDOW_SAMPLES:
                    break
        except BaseException:
            self._begin()  # a generator that raised is at its end, which the lane isn't
            raise
        if not samples:
            self.size = self.walked
            return
        if settings.shuffle:
            key = fold(_WINDOW, settings.seed, order.epoch, self._number, self._count)
            samples = [samples[at] for at in permutation(len(samples), key).tolist()]
        self._windows = [*self._windows[-1:], (self.walked, samples)]
        self._from = [*self._from[-1:], begin]
        self.walked += len(samples)
        self._count += 1

    def _samples(self) -> Generator[Found, None, None]:
        """Yield the samples of the shards, and keep count of the bytes."""
        done = 0
        for shard in self._shards:
            index = -1
            for index, record in enumerate(self._order.records(shard)):
                self._bytes = done + max(member.offset + padded(member.size) for member in record.members)
                yield Found(shard, index, record)
            self._order.counts[shard] = index + 1
            done += self._order.sizes[shard]
            self._bytes = done

    def _read_ahead(self, ahead: int) -> None:
        """Have the next bytes read that aren't asked for yet: this window's and the next one's."""
        begin, end = max(self._hinted, self._bytes), self._bytes + ahead
        self._hinted, at = max(begin, end), 0
        for shard in self._shards:
            size = self._order.sizes[shard]
            if max(begin, at) < min(end, at + size):
                self._order.hint(shard, max(begin, at) - at, min(end, at + size) - at)
            at += size


class ArrivalOrder:
    """The order of one epoch, as far as it was asked for. `sizes`: of the shards in bytes.

    `records` yields a shard's samples, forward; `hint` is told which bytes of a shard are wanted soon. `counts` are the shards'
    samples, None for those that aren't read to their end.
    """

    def __init__(
        self, sizes: Sequence[int], settings: ArrivalSettings, epoch: int, *, records: Records, hint: Hint | None = None
    ) -> None:
        check_int("epoch", epoch, 0, 2**64 - 1)
        self.sizes, self.settings, self.epoch, self.records = sizes, settings, epoch, records
        self.hint: Hint = hint or _no_hint
        self.counts: list[int | None] = [None] * len(sizes)
        self.closed = False
        self._lanes = [_Lane(number, shards, self) for number, shards in enumerate(deal(sizes, settings, epoch))]

    @property
    def samples(self) -> int | None:
        """The samples of the epoch, None before its end was seen."""
        sizes = [lane.size for lane in self._lanes if lane.size is not None]
        return sum(sizes) if len(sizes) == len(self._lanes) else None

    def locate(self, positions: Sequence[int]) -> list[Found]:
        """Return the samples at global positions, which ascend; fewer, where the epoch ends before the last of them."""
        if self.closed:
            raise PipelineError("this iteration was closed with its dataset; make another dataset to read on")
        found: list[Found] = []
        try:
            for position in positions:
                if (at := self._place(position)) is None:
                    break
                found.append(self._lanes[at[0]].at(at[1]))
        except BaseException:
            self.close()  # a lane that failed, or was closed, would look like one at its end
            raise
        return found

    def floors(self, position: int) -> dict[int, int]:
        """Return by lane the byte before which nothing is needed once all positions up to `position` were read."""
        at = self._place(position)
        floors = {} if at is None else {number: lane.floor(at[1]) for number, lane in enumerate(self._lanes)}
        return {number: floor for number, floor in floors.items() if floor is not None}

    def close(self) -> None:
        """Leave the shards that are being read; the order can't be asked any more."""
        self.closed = True
        for lane in self._lanes:
            lane.close()

    def _place(self, position: int) -> tuple[int, int] | None:
        """Return (lane, place) of a position, None behind the end."""
        while True:
            ended = sorted(lane.size for lane in self._lanes if lane.size is not None)
            left, base, running = position, 0, len(self._lanes)
            for size in ended:
                if left < (size - base) * running:
                    break
                left -= (size - base) * running
                base, running = size, running - 1
            if not running:
                return None
            place, nth = base + left // running, left % running
            lanes = [number for number, lane in enumerate(self._lanes) if lane.reaches(place)]
            if len(lanes) == running:  # otherwise a lane turned out to end before this place
                return lanes[nth], place


def _no_hint(shard: int, begin: int, end: int) -> None:
    """Do nothing."""


class Ended(NamedTuple):
    """Comes in place of a batch that the epoch doesn't have any more: the samples of each shard."""

    counts: tuple[int, ...]


class OpenSteps:
    """The batches of an epoch whose end nobody knows yet, from global position `start` on; of one process alone.

    What becomes of its last samples is as in `Steps`; which come once more (`wrapped`) isn't known either.
    """

    wrapped = 0

    def __init__(self, batch_size: int, last_batch: LastBatch, start: int = 0) -> None:
        self._batch_size, self._last_batch, self._start = batch_size, last_batch, start
        self.counts: tuple[int, ...] | None = None

    @property
    def samples(self) -> int | None:
        """The samples of the epoch, None before its end was seen."""
        return None if self.counts is None else sum(self.counts)

    def end(self, counts: tuple[int, ...]) -> None:
        """Say that the epoch has ended, and how many samples each shard holds; raises OptionsError where that gives no step."""
        self.counts = counts
        Steps(samples=sum(counts), batch_size=self._batch_size, last_batch=self._last_batch)

    @property
    def total(self) -> int | None:
        """How many steps there are: nobody knows."""
        return None

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of steps, until the end is known."""
        return itertools.takewhile(lambda _: self.counts is None, itertools.count())

    def token(self, step: int, *, run: int = 0, epoch: int = 0) -> Token:
        """Return what step `step` has to make, if the epoch goes as far."""
        return Token(run, epoch, self._start + step * self._batch_size, self._batch_size)

    def position_after(self, step: int) -> int:
        """Return where the epoch goes on after `step`."""
        return self._start + (step + 1) * self._batch_size
