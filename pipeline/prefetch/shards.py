"""Holds the bytes of the windows that are resident, and drops what is done with unless another reader holds it."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field

from pipeline.machine import open_regular
from pipeline.prefetch import pages
from pipeline.progress import Block, Count
from pipeline.stores import locks
from pipeline.stores.copies import PAGE, Copies, Ranges

_FOLIO = 2 * 2**20  # the largest unit of the page cache: what a drop cuts through stays, and goes with the drop that follows it
_WAITING = 64  # shards that another reader holds, before the oldest is forgotten and left to the kernel


@dataclass(slots=True)
class OpenShard:
    """An open shard: what windows hold of it, which is locked as read, and what waits to be dropped."""

    number: int
    descriptor: int
    size: int
    device: int
    holders: int = 0
    stays: Ranges = field(default_factory=Ranges)
    waits: Ranges = field(default_factory=Ranges)


@dataclass(frozen=True, slots=True)
class Done:
    """Bytes [start, stop) that a window is done with; what is kept ends below them and begins above (None: nothing is)."""

    start: int
    stop: int
    below: int | None
    above: int | None


class Shards:
    """The shards that are open, by number."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._open: dict[int, OpenShard] = {}
        self._waiting: OrderedDict[int, None] = OrderedDict()

    def open(self, number: int, path: str) -> OpenShard:
        """Return a shard, opened if it isn't yet, held once more; raises OSError."""
        shard = self._open.get(number)
        if shard is None:
            descriptor = open_regular(path)
            pages.plain(descriptor)
            status = os.fstat(descriptor)
            shard = self._open[number] = OpenShard(number, descriptor, status.st_size, status.st_dev)
        if not shard.holders:
            self._waiting.pop(number, None)
        shard.holders += 1
        return shard

    def keep(self, shard: OpenShard, start: int, stop: int) -> None:
        """Say that a window holds bytes of a shard."""
        shard.stays.add(start, stop)
        locks.hold(shard.descriptor, start, stop)

    def release(self, shard: OpenShard, spans: list[tuple[int, int]], done: list[Done]) -> None:
        """Let go of a window's bytes of a shard, and drop what is done with: now, or once no other reader holds the shard."""
        for start, stop in spans:
            shard.stays.remove(start, stop)
            locks.let_go(shard.descriptor, start, stop)
        for part in done:
            start, stop = whole_pages(part, *shard.stays.around(part.start, part.stop))
            if start < stop:
                shard.waits.add(start, stop)
        shard.holders -= 1
        self._settle(shard)

    def retry(self) -> None:
        """Drop what had to wait, where nobody holds it any more."""
        for number in list(self._waiting):
            self._settle(self._open[number])

    def _settle(self, shard: OpenShard) -> None:
        if shard.waits:
            self._drop(shard)
        if shard.holders:
            return
        self._waiting.pop(shard.number, None)
        if shard.waits:
            self._waiting[shard.number] = None
            if len(self._waiting) <= _WAITING:
                return
            shard = self._open[self._waiting.popitem(last=False)[0]]
        os.close(self._open.pop(shard.number).descriptor)

    def _drop(self, shard: OpenShard) -> None:
        """Drop what waits, but for what a later window has read again, if that is allowed."""
        ranges = [part for start, stop in shard.waits for part in shard.stays.missing(start, stop)]
        refused = pages.drop(shard.descriptor, ranges)
        self._block.add(Count.DROPPED_BYTES, _bytes_of(ranges) - _bytes_of(refused))
        self._block.add(Count.REFUSED, len(refused) > 0)
        shard.waits = Ranges()
        for start, stop in refused:
            shard.waits.add(start, stop)


def _bytes_of(ranges: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


class CopiedShards:
    """The copies that are there, by shard."""

    def __init__(self) -> None:
        self.copies = Copies()
        self._there: dict[int, Ranges] = {}

    def missing(self, number: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of a shard's bytes of which there is no copy."""
        there = self._there.get(number)
        return [(start, stop)] if there is None else there.missing(start, stop)

    def add(self, number: int, offset: int, data: memoryview) -> None:
        """Copy bytes of a shard."""
        if len(data):
            self.copies.write(number, offset, data)
            self._there.setdefault(number, Ranges()).add(offset, offset + len(data))

    def drop(self, number: int, done: list[Done]) -> int:
        """Give back what is done with; returns how many bytes."""
        there, given = self._there.get(number, Ranges()), 0
        for part in done:
            there.remove(part.start, part.stop)
            start, stop = whole_pages(part, *there.around(part.start, part.stop))
            if start < stop:
                self.copies.drop(number, start, stop)
                given += part.stop - part.start
        if not there:
            self._there.pop(number, None)
        return given


def whole_pages(done: Done, below: int | None = None, above: int | None = None) -> tuple[int, int]:
    """Return the whole pages of what is done with that share nothing with what is kept, or resident `below` and `above`.

    They begin before it, at what stays or at most a folio below: there lies what the drop before this one cut through.
    """
    low = max([done.start - _FOLIO, 0, *(bound for bound in (below, done.below) if bound is not None)])
    high = min([-(-done.stop // PAGE) * PAGE, *(bound for bound in (above, done.above) if bound is not None)])
    return -(-low // PAGE) * PAGE, high // PAGE * PAGE
