"""What is on its way from afar, and what has landed and is held: several at once, each lane's in its order.

send -> flies (fetched by a thread) -> lands: say so -> used up: let go
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeline.errors import PipelineError, SourceError, said
from pipeline.prefetch.fetching import FetchedPart, Fetcher, NoRoom, Superseded
from pipeline.progress import Block, Count

_STUCK_SECONDS = 10.0  # without a change in the folder: others that read there use up a window in that time, or stand still
_TRY_SECONDS = 1.0  # between two tries to write to a full disk of which nothing was given back here
_RECOVERY_SECONDS = 60.0  # without a full disk, until as much is taken of it again as before
_PAUSE = 0.05

Wanted: TypeAlias = Callable[[], bool]


@dataclass(slots=True)
class Flight:
    """A window, or a piece, on its way or landed.

    run, lane, stop: what is said when it has landed (`stop` 0: nothing). first, last: the positions that need it. bytes: its size.
    began: in ns of the monotonic clock.
    """

    run: int
    lane: int
    stop: int
    first: int
    last: int
    bytes: int
    began: int = field(default_factory=time.monotonic_ns)
    parts: list[FetchedPart] = field(default_factory=list)
    error: BaseException | None = None
    future: Future[None] | None = None
    pool: ThreadPoolExecutor | None = None


class Flights:
    """All that a reader has on its way or holds; for one thread."""

    def __init__(self, fetcher: Fetcher, block: Block, at_once: int) -> None:
        self._fetcher, self._block, self._at_once = fetcher, block, at_once
        self._pool = ThreadPoolExecutor(at_once, "fetch")
        self._flying: deque[Flight] = deque()
        self._landed: deque[Flight] = deque()
        self._run = self.held_bytes = 0
        self._stuck: tuple[int, float] | None = (
            None  # what was taken of the folder when there was no room for what is needed now, and since when
        )
        self._ended = threading.Event()
        self._limit, self._shrunk_at = fetcher.cache.limit, 0.0
        self._full = threading.Event()  # the disk was, before it said so
        self._short = threading.Event()  # and a worker waits for what has no room
        self._let_go = self._made_room = 0  # how often windows were let go of, and what stays got less

    def begin(self, run: int) -> None:
        """Begin a run: what has landed is let go of, what still flies for another holds nobody up, and is when it lands."""
        self._run, self._stuck = run, None
        if self._flying:
            self._pool.shutdown(wait=False)
            self._pool = ThreadPoolExecutor(self._at_once, "fetch")
        self._block.report("")
        self.let_go(lambda _flight: True)

    @property
    def pending(self) -> bool:
        """Whether something is on its way, for whichever run."""
        return bool(self._flying)

    @property
    def flies(self) -> bool:
        """Whether something is on its way for this run."""
        return any(flight.run == self._run for flight in self._flying)

    @property
    def none(self) -> bool:
        """Whether nothing is on its way, nor held."""
        return not self._flying and not self._landed

    @property
    def full(self) -> bool:
        """Whether nothing more may fly."""
        return sum(flight.run == self._run for flight in self._flying) >= self._at_once

    def look_at_disk(self, least: int) -> bool:
        """Take no more of a disk that was full before it said so than is taken now, `least` beside others'; until it has recovered.

        Tells whether a worker waits for what had no room: then what stays has to get less.
        """
        cache, now = self._fetcher.cache, time.monotonic()
        if self._full.is_set():
            self._full.clear()
            used = cache.used_bytes()
            cache.limit, self._shrunk_at = min(self._limit, max(used, used - self._fetcher.own_bytes() + least)), now
        elif cache.limit != self._limit and now > self._shrunk_at + _RECOVERY_SECONDS:
            cache.limit = self._limit
            self._fetcher.look_again()
        short = self._short.is_set()
        self._short.clear()
        return short

    def made_room(self, freed: int) -> None:
        """Say that so many bytes of what stayed were given back."""
        self._made_room += freed > 0

    @property
    def flying_bytes(self) -> int:
        """How much is on its way for this run."""
        return sum(flight.bytes for flight in self._flying if flight.run == self._run)

    def send(self, flight: Flight, fetch: Callable[[Flight, Wanted], None]) -> None:
        """Have a thread `fetch` it; what that opens of shards goes into the flight's parts."""
        self._stuck = None
        flight.pool, flight.future = self._pool, self._pool.submit(self._fly, flight, fetch)
        self._flying.append(flight)
        self.held_bytes += flight.bytes

    def land(self) -> bool:
        """Take over what has landed, each lane's in their order; tells whether any has."""
        landed, lanes, rest = False, set[int](), deque[Flight]()
        for flight in self._flying:
            assert flight.future is not None
            of_now = flight.run == self._run
            if not flight.future.done() or (of_now and flight.lane in lanes):
                if of_now:
                    lanes.add(flight.lane)
                rest.append(flight)
                continue
            landed = True
            flight.future.result()
            self._take_over(flight)
        self._flying = rest
        return landed

    def let_go(self, used: Callable[[Flight], bool]) -> None:
        """Let go of what has landed and is used up."""
        rest = deque[Flight]()
        for flight in self._landed:
            if used(flight):
                self._drop(flight)
                self._let_go += 1
            else:
                rest.append(flight)
        self._landed = rest

    def is_stuck(self) -> bool:
        """Tell, where there is no room for what is needed now, whether others don't make any either."""
        used, now = self._fetcher.cache.used_bytes(), time.monotonic()
        if self._stuck is None or used != self._stuck[0]:
            self._stuck = (used, now)
        return now > self._stuck[1] + _STUCK_SECONDS

    def give_up(self, lane: int, stop: int, advice: str) -> None:
        """Tell the worker that waits for what there is no room for that there will never be any; `advice` ends the message."""
        cache = self._fetcher.cache
        self._block.report(
            said(
                SourceError(
                    f"{cache.folder}: no room for what is needed now: {cache.used_bytes() / 2**20:.0f} of "
                    f"{cache.limit / 2**20:.0f} MiB are taken, {cache.room() / 2**20:.0f} are left; other jobs, or what else is on "
                    f"the disk, take the rest: free some of it, raise LoaderOptions(cache_bytes=), or {advice}"
                )
            )
        )
        self._block.add(Count.FAILED, 1)
        self._block.reach(lane, self._run, stop)

    def close(self) -> None:
        """End all that flies."""
        self._ended.set()
        self._fetcher.stop()
        for pool in {self._pool, *(flight.pool for flight in self._flying if flight.pool)}:
            pool.shutdown(cancel_futures=True)
        self._fetcher.close()

    def _fly(self, flight: Flight, fetch: Callable[[Flight, Wanted], None]) -> None:
        """Fetch it: in a thread; again where the disk was full before it said so, as others' windows and what stays make room."""

        def wanted() -> bool:
            return flight.run == self._run and not self._ended.is_set()

        tries = 0
        while wanted():
            held = flight.parts[:]  # by a try before
            flight.parts.clear()
            for part in held:
                part.entry.close()
            try:
                fetch(flight, wanted)
                return
            except Superseded:
                return
            except NoRoom as error:
                tries = 0 if self._waits_for_room(flight, wanted) else tries + 1
                if tries * _TRY_SECONDS > _STUCK_SECONDS:
                    flight.error = SourceError(str(error))
                    return
            except (OSError, PipelineError) as error:
                flight.error = error
                return

    def _waits_for_room(self, flight: Flight, wanted: Wanted) -> bool:
        """Wait until something else was let go of, or for a second where a worker waits too; tells whether something was.

        What came of a window that a worker waits for is held meanwhile; of another it is the first that makes room.
        """
        let_go, made_room, until = self._let_go, self._made_room, time.monotonic() + _TRY_SECONDS
        self._full.set()
        is_lacked, released = False, False
        while wanted():
            if not is_lacked and flight.first < self._block.wanted(flight.run):
                is_lacked, made_room, until = True, self._made_room, time.monotonic() + _TRY_SECONDS
                self._short.set()
            if not is_lacked and not released:
                released = True
                for part in flight.parts:
                    part.entry.close()
                flight.parts.clear()
            if self._let_go != let_go or (is_lacked and self._made_room != made_room):
                return True
            if is_lacked and time.monotonic() > until:
                return False
            self._ended.wait(_PAUSE)
        return False

    def _take_over(self, flight: Flight) -> None:
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
        if flight.stop:
            block.reach(flight.lane, flight.run, flight.stop)  # a worker that meets a failure reads the report
        self._fetcher.alive()

    def _drop(self, flight: Flight) -> None:
        self.held_bytes -= flight.bytes
        for part in flight.parts:
            with suppress(OSError):
                self._fetcher.release(part)
