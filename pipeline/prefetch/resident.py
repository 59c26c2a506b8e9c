"""Makes ranges of a shard's samples resident, in the way that suits the folder they lie in, and lets go of them again."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pipeline import indexing
from pipeline.epoch import Ints
from pipeline.errors import ShardError
from pipeline.listing import offsets, span
from pipeline.machine import advise, available_memory, open_regular
from pipeline.prefetch import pages, trial
from pipeline.prefetch.ahead import AheadFile
from pipeline.prefetch.beside import Beside, Disk
from pipeline.prefetch.plan import Plan
from pipeline.prefetch.shards import CopiedShards, Done, OpenShard, Shards
from pipeline.prefetch.share import Share
from pipeline.prefetch.turn import Turn
from pipeline.progress import Block, Count, Way
from shardify.errors import FormatError
from shardify.format import tar
from shardify.format.names import index_name

Tell: TypeAlias = Callable[[int, memoryview], None]

_INDEXES = 256  # shards whose samples' places are remembered, 10 KB each
_FEW = 64  # shards whose indexes are asked for at once: they lie side by side, and among windows each would cost two seeks


@dataclass(slots=True)
class Part:
    """What a window holds of a shard: bytes [start, stop), and those of them that go when the window is used up.

    Before `asked` the kernel was asked for them beside another disk, and got `fetched` bytes from the medium.
    """

    shard: OpenShard
    start: int
    stop: int
    done: list[Done]
    asked: int = 0
    fetched: int = 0


@dataclass(slots=True)
class _Index:
    """An index that is read."""

    descriptor: int
    device: int


class Resident:
    """Reads what windows need; `alive` is called between chunks, and may raise to end the reading."""

    def __init__(self, plan: Plan, block: Block, alive: Callable[[], None]) -> None:
        self._plan, self._block, self._alive = plan, block, alive
        self._forward, self._shards = pages.Forward(), Shards(block)
        self._copied: CopiedShards | None = None
        self._no_copies = False  # they were given up
        self._ways: dict[int, Way] = {}
        self._turns: dict[int, Turn] = {}
        self._places: OrderedDict[int, Ints | None] = OrderedDict()
        self._asked = False
        self._beside: Beside | None = None

    def way(self, number: int, first: int, stop: int) -> Way:
        """Return how bytes of a shard's device become resident; the first time that costs up to 4 MiB of these samples."""
        places = self._places_of(number)
        if places is None:
            return Way.UNKNOWN
        shard = self._shards.open(number, self._plan.paths[number])
        try:
            return self._way(shard, *span(places, shard.size, first, stop))
        finally:
            self._shards.release(shard, [], [])

    def open(self, number: int, first: int, stop: int, share: Share) -> Part | None:
        """Find the bytes of samples [first, stop) of a shard; None where it has no index. Raises OSError, ShardError.

        The part is the caller's to release.
        """
        places = self._places_of(number)
        if places is None:
            self._block.add(Count.UNINDEXED, 1)
            return None
        shard = self._shards.open(number, self._plan.paths[number])
        start, end = span(places, shard.size, first, stop)
        part = Part(shard, start, end, self._done(places, shard, (first, stop), share))
        self._shards.keep(shard, start, end)
        return part

    @property
    def devices(self) -> int:
        """How many devices shards were read from."""
        return len(self._ways)

    def read(self, parts: Sequence[Part], later: Sequence[Part] = ()) -> None:
        """Make parts resident, in storage order, one device after the other; raises OSError.

        Of these and of what is wanted `later` other devices than the one that is read are asked for theirs meanwhile.
        """
        ordered = sorted(parts, key=lambda part: (part.shard.device, part.shard.number, part.start))
        for device, group in itertools.groupby(ordered, key=lambda part: part.shard.device):
            mine = list(group)
            self._beside = self._disks([part for part in (*ordered, *later) if part.shard.device != device])
            try:
                self._read(mine)
            finally:
                self._beside = None
            for part in mine:
                part.asked = part.stop

    def _disks(self, parts: Sequence[Part]) -> Beside | None:
        """Return the disks of parts whose pages stay where they are, None where there are none."""
        by_device: dict[int, list[Part]] = {}
        for part in parts:
            if self._ways.get(part.shard.device) is Way.PAGE_CACHE:
                by_device.setdefault(part.shard.device, []).append(part)
        disks = [Disk(self._turn_of(found[0].shard), found) for found in by_device.values()]
        return Beside(disks, self._block, trial.medium_bytes) if disks else None

    def _read(self, parts: Sequence[Part]) -> None:
        """Make parts of one device resident."""
        cached = list[pages.Range]()
        for part in parts:
            way = self._way(part.shard, part.start, part.stop)
            if way is Way.COPIES:
                self._copy(part)
            elif way is Way.PAGE_CACHE and cached and cached[-1].file is part.shard and cached[-1].stop == part.start:
                cached[-1] = cached[-1]._replace(stop=part.stop)
            elif way is Way.PAGE_CACHE:
                cached.append(pages.Range(part.shard, part.start, part.stop))
        if cached:
            self._through_cache(cached, fetched=sum(part.fetched for part in parts))

    def release(self, part: Part, *, used: bool) -> None:
        """Let go of a part: used up, so that what doesn't stay of it is dropped, or held by the windows that read it by now."""
        way, done = self._ways.get(part.shard.device), part.done if used else []
        if way is Way.COPIES and self._copied is not None:
            self._block.add(Count.DROPPED_BYTES, self._copied.drop(part.shard.number, done))
        spans = [(part.start, part.stop)] if used else []
        self._shards.release(part.shard, spans, done if way is Way.PAGE_CACHE else [])

    def leave_turn(self) -> None:
        """Let others have the disk."""
        for turn in self._turns.values():
            if turn.held and turn.counts:
                self._block.add(Count.TURN_NS, turn.waited_ns)
                self._block.add(Count.TURNS if turn.granted else Count.WITHOUT_TURN, 1)
            turn.leave()

    def retry(self) -> None:
        """Drop what another reader held, where it doesn't any more."""
        self._shards.retry()

    def give_up_copies(self) -> None:
        """Have workers read the originals from now on, and give the memory back."""
        if self._copied is not None:
            self._block.put(Count.MEMORY, 0)
            self._copied.copies.empty()  # not closed: a worker that opens it now, by its number, must find no other file there
            self._copied, self._no_copies = None, True

    def _done(self, places: Ints, shard: OpenShard, samples: tuple[int, int], share: Share) -> list[Done]:
        """Return the bytes of samples [first, stop) that don't stay, each with what stays around them."""
        found = []
        for first, stop in share.unkept(shard.number, *samples):
            start, end = span(places, shard.size, first, stop)
            below, above = share.bounds(shard.number, first, stop)
            found.append(
                Done(
                    start,
                    end,
                    span(places, shard.size, below - 1, below)[1] if below else None,
                    span(places, shard.size, above, above + 1)[0] if above < len(places) else None,
                )
            )
        return found

    def _through_cache(self, ranges: Sequence[pages.Range], tell: Tell | None = None, fetched: int = 0) -> None:
        """Read ranges of one device into the page cache, and count the bytes that weren't there; `fetched` of them were counted."""
        before = trial.medium_bytes() - (self._beside.fetched if self._beside else 0)
        try:
            self._forward.read(ranges, self._turn(ranges[0].file), tell or self._tell)
        finally:
            now = trial.medium_bytes() - (self._beside.fetched if self._beside else 0) - before
            self._block.add(Count.MEDIUM_BYTES, now)
            self._block.add(Count.CACHED_BYTES, max(0, sum(stop - start for _, start, stop in ranges) - now - fetched))

    def _copy(self, part: Part) -> None:
        """Copy bytes that aren't there yet; raises OSError where the shard ends before them."""
        if self._copied is None:
            return
        copied, number = self._copied, part.shard.number
        there = part.stop - part.start
        for start, stop in copied.missing(number, part.start, part.stop):
            there -= stop - start

            def tell(offset: int, data: memoryview) -> None:
                copied.add(number, offset, data)
                self._block.add(Count.MEDIUM_BYTES, len(data))
                self._tell(offset, data)

            self._forward.read([pages.Range(part.shard, start, stop)], self._turn(part.shard), tell)
            pages.drop(part.shard.descriptor, [(start, stop)])  # one copy is enough
        self._block.add(Count.CACHED_BYTES, there)
        if copied.missing(number, part.start, part.stop):
            raise OSError(f"{self._plan.paths[number]} ends before byte {part.stop}")

    def _tell(self, _offset: int, data: memoryview) -> None:
        self._block.add(Count.PROGRESS, 1 + len(data))
        if self._beside is not None and data:
            self._beside.advance(len(data))
        self._alive()

    def _turn(self, file: pages.File) -> Turn:
        """Return the turn at a file's disk, having left that at another."""
        turn = self._turn_of(file)
        if any(other.held and other is not turn for other in self._turns.values()):
            self.leave_turn()
        return turn

    def _turn_of(self, file: pages.File) -> Turn:
        turn = self._turns.get(file.device)
        if turn is None:
            path = os.path.realpath(f"/proc/self/fd/{file.descriptor}")
            turn = self._turns[file.device] = Turn(os.path.dirname(path))  # noqa: PTH120
        return turn

    def _way(self, shard: OpenShard, start: int, stop: int) -> Way:
        """Return how bytes of a shard's device become resident; finds out by the first 4 MiB of some that are wanted anyway."""
        way = self._ways.get(shard.device)
        if way is not None:
            return way
        path, stop = self._plan.paths[shard.number], min(stop, start + trial.TRIAL_BYTES)
        if trial.in_memory(path):
            way = Way.MEMORY
        else:
            self._through_cache([pages.Range(shard, start, stop)])
            way = trial.find_way(path, shard.descriptor, start, stop)
        if way is Way.COPIES:
            way = self._begin_copies(shard.device)
        self._ways[shard.device] = way
        self._block.put(Count.WAY, way)
        return way

    def _begin_copies(self, device: int) -> Way:
        """Make the memory for copies; where there can't be any, the page cache has to do."""
        if self._no_copies:
            return Way.PAGE_CACHE
        if self._copied is None:
            try:
                self._copied = CopiedShards()
            except (OSError, AttributeError):
                return Way.PAGE_CACHE
            self._block.put(Count.MEMORY, self._copied.copies.descriptor + 1)
        return Way.COPIES if self._block.copy_device(device) else Way.PAGE_CACHE

    def _places_of(self, number: int) -> Ints | None:
        """Return where a shard's samples begin, from its index; None where it has none."""
        if not self._asked:
            self._ask_for_indexes()
        if number not in self._places:
            self._places[number] = self._read_index(number)
            if len(self._places) > _INDEXES:
                self._places.popitem(last=False)
        self._places.move_to_end(number)
        return self._places[number]

    def _ask_for_indexes(self) -> None:
        """Have the kernel read the indexes of a set of few shards; what is wrong with one shows when it is read."""
        self._asked = True
        before = trial.medium_bytes()
        for number in range(len(self._plan.paths) if len(self._plan.paths) <= _FEW else 0):
            self._tell(0, memoryview(b""))
            with suppress(OSError):
                descriptor = open_regular(self._index_path(number))
                try:
                    advise(descriptor, 0, pages.CHUNK, "WILLNEED")
                finally:
                    os.close(descriptor)
        self._block.add(Count.MEDIUM_BYTES, trial.medium_bytes() - before)

    def _remembered(self, number: int) -> Ints | None:
        """Return where the samples of a tar without an index begin, from the user's cache folder; None where it isn't there."""
        path = self._plan.paths[number]
        records = indexing.cache().get(path, indexing.Stamp.of(path))
        return None if records is None else self._places_in(number, records)

    def _walk(self, number: int) -> Ints | None:
        """Walk a tar that has no index once, forward, and remember its samples for the workers; None where they will say why."""
        path = self._plan.paths[number]
        try:
            if trial.in_memory(path):
                return self._places_in(number, indexing.scan(path))
            stamp = indexing.Stamp.of(path)
            with AheadFile(path, self._read_ahead, drop=2 * int(self._plan.sizes.sum()) > available_memory()) as file:
                records = list(tar.samples(file, stamp.size, path))
        except (FormatError, ShardError):
            return None
        self._block.add(Count.WALKED, 1)
        indexing.cache().put(path, stamp, records)
        return self._places_in(number, records)

    def _read_ahead(self, file: pages.File, start: int, stop: int) -> None:
        """Read bytes for a walk, in one turn of the disk."""
        self._through_cache([pages.Range(file, start, stop)])
        self.leave_turn()

    def _places_in(self, number: int, records: Sequence[tar.SampleRecord]) -> Ints | None:
        if len(records) != int(self._plan.layout.counts[number]):
            return None
        return np.array([record.members[0].offset for record in records], np.int64)

    def _index_path(self, number: int) -> str:
        return self._plan.indexes[number] or index_name(self._plan.paths[number])

    def _read_index(self, number: int) -> Ints | None:
        path = self._index_path(number)
        try:
            descriptor = open_regular(path)
        except FileNotFoundError:
            found = self._remembered(number)
            return self._walk(number) if found is None else found
        chunks = list[bytes]()
        try:
            status = os.fstat(descriptor)
            index = _Index(descriptor, status.st_dev)

            def tell(offset: int, data: memoryview) -> None:
                chunks.append(bytes(data))
                self._tell(offset, data)

            self._through_cache([pages.Range(index, 0, status.st_size)], tell)
        finally:
            os.close(descriptor)
        return offsets(b"".join(chunks), path, int(self._plan.layout.counts[number]))
