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
_PAUSE = 0.05

Wanted: TypeAlias = Callable[[], bool]


@dataclass(slots=True)
class Flight:
    """A window, or a piece, on its way or landed.

    run, lane, stop: what is said when it has landed (`stop` 0: nothing). last: the last position that needs it. bytes: its size.
    began: in ns of the monotonic clock.
    """

    run: int
    lane: int
    stop: int
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
        self._short = threading.Event()

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
        """Whether something is on its way."""
        return bool(self._flying)

    @property
    def none(self) -> bool:
        """Whether nothing is on its way, nor held."""
        return not self._flying and not self._landed

    @property
    def full(self) -> bool:
        """Whether nothing more may fly."""
        return sum(flight.run == self._run for flight in self._flying) >= self._at_once

    def was_short(self, least: int) -> bool:
        """Tell whether the disk was full before it said so since this was asked last; the folder takes no more then, or `least`."""
        if not self._short.is_set():
            return False
        self._short.clear()
        cache = self._fetcher.cache
        cache.limit = min(cache.limit, max(least, cache.used_bytes()))
        return True

    @property
    def flying_bytes(self) -> int:
        """How much is on its way."""
        return sum(flight.bytes for flight in self._flying)

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
            try:
                fetch(flight, wanted)
                return
            except Superseded:
                return
            except NoRoom as error:
                tries = 0 if self._has_got_room(flight, wanted) else tries + 1
                if tries * _TRY_SECONDS > _STUCK_SECONDS:
                    flight.error = SourceError(str(error))
                    return
            except (OSError, PipelineError) as error:
                flight.error = error
                return

    def _has_got_room(self, flight: Flight, wanted: Wanted) -> bool:
        """Wait until the folder takes less of a disk that was full, or for a second; tells whether it came to that."""
        for part in flight.parts:  # what has come of it stays for the next try, unless another window needs the room more
            part.entry.close()
        flight.parts.clear()
        used, until = self._fetcher.cache.used_bytes(), time.monotonic() + _TRY_SECONDS
        self._short.set()
        while wanted() and time.monotonic() < until:
            if self._fetcher.cache.used_bytes() < used:
                return True
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
