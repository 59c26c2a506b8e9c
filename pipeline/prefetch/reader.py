"""Walks a rank's plan, window after window, and has each made resident ahead of the workers, within a budget.

begin -> read a window, in one turn of the disk -> say so -> ... -> its batches are handed out -> let go of it
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipeline.epoch import EpochOrder, Ints
from pipeline.errors import ShardError
from pipeline.machine import available_memory
from pipeline.prefetch.plan import Plan
from pipeline.prefetch.resident import Part, Resident
from pipeline.prefetch.share import Share, keep_limit, read_ahead
from pipeline.prefetch.walk import Need, lanes_of, needs, ranges
from pipeline.progress import Block, Count, Way

_REST = 2  # windows: as large may what is left of a piece be. 900 MB in 18 shards are 114 ranges with it, 162 without
_TURN_BYTES = 100_000_000  # that others may wait for: after a second without their turn they would read anyway
_GROWN = 2  # windows of half a full one or more: before, workers would wait for what isn't theirs


@dataclass(slots=True)
class _Read:
    """What was read: the last global position that takes from it, its size in bytes, what it holds."""

    last: int
    bytes: int
    parts: list[Part] = field(default_factory=list)


class Reader:
    """Makes the windows of one run after the other resident; `alive` is called between chunks, and may raise to end a run."""

    def __init__(self, plan: Plan, block: Block, alive: Callable[[], None], available: int | None = None) -> None:
        self._plan, self._block = plan, block
        self._lanes = lanes_of(plan.world, plan.layout.settings.lanes, 0)
        self._mean = plan.mean_bytes()
        self._least = (len(self._lanes) + 1) * plan.window_bytes()
        self._available = available_memory() if available is None else available
        self._resident = Resident(plan, block, alive)
        self._read_windows: deque[_Read] = deque()
        self._rests: dict[int, _Read] = {}  # what was read with a lane's last window beyond it
        self._turn_bytes = _TURN_BYTES
        self._entered: set[int] = set()  # lanes of which the run has a window
        self._read_bytes = self._run = 0
        self._needs: Iterator[Need] = iter(())
        self._next: Need | None = None
        self._coming: deque[Need] = deque()  # those after the next one, as far as they were looked at
        self._early: dict[tuple[int, int], _Read] = {}  # windows on other disks, by `_name`, which the kernel was asked for
        self._share: Share | None = None

    def begin(self, run: int, epoch: int, position: int, claimed: int = 0, wrapped: int = 0) -> None:
        """Begin a run at a global position of an epoch; `claimed`: bytes that other loaders of the trainer keep.

        What comes once more (`wrapped`) workers read where it lies.
        """
        del wrapped
        self._let_go(lambda _window: True)
        for held in [*self._rests.values(), *self._early.values()]:
            self._release(held, used=True)
        self._rests, self._early = {}, {}
        self._coming.clear()
        plan = self._plan
        lanes = lanes_of(plan.world, plan.layout.settings.lanes, position)
        self._entered = set()
        self._needs = needs(EpochOrder(plan.layout, epoch), lanes, position)
        self._next, self._run = next(self._needs, None), run
        if self._share is None:
            self._share = self._choose(claimed)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until another run begins."""
        return self._next is None and not self._read_windows

    pending, landing = False, None  # nothing is on its way between two steps

    @property
    def full(self) -> bool:
        """Whether there is more to read than there is room for."""
        return self._next is not None

    def step(self) -> bool:
        """Let go of what is used up, and read the next window if there is room; tells whether one was read."""
        run, position = self._block.handed
        if run == self._run:
            self._let_go(lambda window: window.last < position)
        need = self._next
        if need is None or not self._has_room(need):
            return False
        began = time.monotonic_ns()
        self._read(need)
        self._block.add(Count.READING_NS, time.monotonic_ns() - began)
        self._next = self._coming.popleft() if self._coming else next(self._needs, None)
        return True

    def _choose(self, claimed: int) -> Share:
        """Choose what stays: once for the loader's life, as a share that changes is read anew."""
        plan, ranks = self._plan, self._plan.world.local_world_size
        limit = plan.keep_bytes
        if limit is None:
            way = self._way()
            together = way is not Way.COPIES and (not plan.layout.fixed or len(self._lanes) == plan.layout.settings.lanes)
            limit = keep_limit(self._available, self._budget(), ranks, together=together, claimed=claimed, growth=plan.growth)
            if way is Way.COPIES:  # the kernel can't take these back
                limit = min(limit, max(0, self._available // 4 // ranks - self._budget()))
            limit = max(limit, self._block.count(Count.KEPT_BYTES))  # what one that died kept isn't available, but there
        share = Share(plan.layout, plan.sizes, self._lanes, limit)
        self._block.put(Count.KEPT_BYTES, share.kept_bytes)
        self._block.put(Count.PART_BYTES, share.part_bytes)
        return share

    def _way(self) -> Way:
        if self._next is None:
            return Way.UNKNOWN
        try:
            return self._resident.way(*ranges(self._next.window.reads)[0])
        except (OSError, ShardError):
            return Way.UNKNOWN
        finally:
            self._resident.leave_turn()

    def _budget(self) -> int:
        budget = read_ahead(self._available, self._least, self._plan.world.local_world_size, self._block.sharers)
        self._block.put(Count.BUDGET_BYTES, budget)
        return budget

    def _has_room(self, need: Need) -> bool:
        """Tell whether a window may be read: it fits, or a worker waits for it."""
        there = self._rests.get(need.window.lane), self._early.get(_name(need))
        held = self._read_bytes - sum(read.bytes for read in there if read)
        return held + self._bytes(need.window.reads) <= self._budget() or need.first < self._block.wanted(self._run)

    def _bytes(self, reads: Ints) -> int:
        return int((reads[:, 2] - reads[:, 1]).sum() * self._mean)

    def _read(self, need: Need) -> None:
        """Read a window in one turn, and say that it is resident; also of one that can't be read: the workers will say why.

        With it goes what is left of its last piece, if that is little and there is room: one range instead of two or three.
        """
        lane = need.window.lane
        before, early = self._rests.pop(lane, None), self._early.pop(_name(need), None)
        read = early or self._hold(need)
        rest = _Read(need.last, self._bytes(need.rest))
        self._read_windows.append(read)
        wanted = [] if early else [(read, need.window.reads)]
        if self._reads_rest(lane, read.bytes, rest.bytes):
            self._rests[lane] = rest
            self._read_bytes += rest.bytes
            wanted.append((rest, need.rest))
        self._entered.add(lane)
        assert self._share is not None
        try:
            for held, reads in wanted:
                self._open(held, reads)
            self._release(before, used=False)
            before = None
            self._resident.read([*read.parts, *(rest.parts if lane in self._rests else [])], self._look_beside())
        except (OSError, ShardError):
            self._block.add(Count.FAILED, 1)
            self._resident.give_up_copies()
        finally:
            self._release(before, used=True)
            self._resident.leave_turn()
        self._block.add(Count.WINDOWS, 1)
        self._block.reach(need.window.lane, self._run, need.window.stop)
        self._block.add(Count.PROGRESS, 1)

    def _reads_rest(self, lane: int, window: int, rest: int) -> bool:
        """Tell whether bytes that are left of a piece are read with a window: where that delays nobody, and takes nobody's room.

        Not with the first windows of a run, for which workers wait; others that want the disk wait a second at most.
        """
        company = self._plan.world.local_world_size * self._block.sharers - 1
        rests, budget = sum(held.bytes for held in self._rests.values()), self._budget()
        return (
            lane in self._entered
            and window * _GROWN >= self._plan.window_bytes()
            and 0 < rest <= _REST * window
            and (window + rest) * company <= self._turn_bytes
            and rests + rest <= budget - self._least
            and self._read_bytes + rest <= budget
        )

    def _hold(self, need: Need) -> _Read:
        """Count a window in the budget."""
        read = _Read(need.last, self._bytes(need.window.reads))
        self._read_bytes += read.bytes
        return read

    def _open(self, read: _Read, reads: Ints) -> None:
        assert self._share is not None
        for number, first, stop in ranges(reads):
            part = self._resident.open(number, first, stop, self._share)
            if part is not None:
                read.parts.append(part)

    def _look_beside(self) -> list[Part]:
        """Return what is wanted next, as many windows as there are disks, as far as they fit; they are opened by now."""
        if self._resident.devices < 2:  # found by reading: to look at all shards of a large set first would take long
            return []
        found = list[Part]()
        for coming in self._peek(self._resident.devices):
            if (early := self._early.get(_name(coming))) is None:
                if self._read_bytes + self._bytes(coming.window.reads) > self._budget():
                    break
                early = self._early[_name(coming)] = self._hold(coming)
                try:
                    self._open(early, coming.window.reads)
                except (OSError, ShardError):  # met again, and counted, when it is read
                    self._release(self._early.pop(_name(coming)), used=True)
                    break
            found += early.parts
        return found

    def _peek(self, count: int) -> list[Need]:
        """Return the windows after the next one, up to so many."""
        while len(self._coming) < count and (need := next(self._needs, None)) is not None:
            self._coming.append(need)
        return list(self._coming)

    def _release(self, held: _Read | None, *, used: bool) -> None:
        """Let go of what was read beyond a window, or early: for the window that holds it by now, or as used up."""
        if held is not None:
            self._read_bytes -= held.bytes
            for part in held.parts:
                self._resident.release(part, used=used)

    def _let_go(self, used: Callable[[_Read], bool]) -> None:
        """Let go of the windows that are used up; they come in the order in which they were read, more or less."""
        rest = deque[_Read]()
        for read in self._read_windows:
            if not used(read):
                rest.append(read)
                continue
            self._read_bytes -= read.bytes
            for part in read.parts:
                self._resident.release(part, used=True)
        if len(rest) < len(self._read_windows):
            self._resident.retry()
        self._read_windows = rest


def _name(need: Need) -> tuple[int, int]:
    return need.window.lane, need.window.start
