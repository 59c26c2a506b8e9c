"""What is on its way from afar, and what has landed and is held: several at once, each lane's in its order.

send -> flies (fetched by a thread) -> lands: say so -> used up: let go
                                    -> turned back, as the disk is full: `shortage` has it try again
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeline.errors import PipelineError, SourceError, said
from pipeline.prefetch.fetching import FetchedPart, Fetcher, NoRoom, Superseded
from pipeline.progress import Block, Count

Wanted: TypeAlias = Callable[[], bool]

_COMPARING = 2  # flights beside those that ask the network: it isn't left alone while a hash is compared


@dataclass(slots=True)
class Flight:
    """A window, or a piece, on its way or landed.

    run, lane, stop: what is said when it has landed (`stop` 0: nothing). first, last: the positions that need it. bytes: its size.
    began, turned_back: in ns and seconds of the monotonic clock. `future`: None while it is turned back. `asks`: whether it still
    needs the network, and not only the CPU to compare hashes.
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
    fetch: Callable[[Flight, Wanted], None] | None = None
    future: Future[None] | None = None
    pool: ThreadPoolExecutor | None = None
    turned_back: float = 0.0
    asks: bool = True

    def release(self) -> None:
        """Let go of what a try has brought: it stays in the folder until its room is wanted."""
        for part in self.parts:
            part.entry.close()
        self.parts.clear()


class Flights:
    """All that a reader has on its way or holds; for one thread. `let_goes`: how often something was let go of."""

    def __init__(self, fetcher: Fetcher, block: Block, at_once: int) -> None:
        self._fetcher, self._block, self._at_once = fetcher, block, at_once
        self._pool = self._new_pool()
        self._out: list[Flight] = []  # as they were sent
        self._landed: list[Flight] = []
        self._run = self.held_bytes = self.let_goes = 0
        self._ended = False
        self.landing, self._landing = socket.socketpair()  # has something to read once a thread is done
        for end in (self.landing, self._landing):
            end.setblocking(False)

    def begin(self, run: int) -> None:
        """Begin a run: what has landed is let go of; what still flies for another is ended, and holds nobody up until it is."""
        self._run = run
        if any(flight.future is not None for flight in self._out):
            self._pool.shutdown(wait=False)
            self._pool = self._new_pool()
            self._fetcher.interrupt()
        for flight in self.turned_back:
            self._drop(flight)
        self._out = [flight for flight in self._out if flight.future is not None]
        self._block.report("")
        self.let_go(lambda _flight: True)
        self._fetcher.begin()

    @property
    def pending(self) -> bool:
        """Whether something is on its way, for whichever run."""
        return bool(self._out)

    @property
    def flies(self) -> bool:
        """Whether something is on its way for this run, and not turned back."""
        return any(flight.run == self._run and flight.future is not None for flight in self._out)

    @property
    def none(self) -> bool:
        """Whether nothing is on its way, nor held."""
        return not self._out and not self._landed

    @property
    def full(self) -> bool:
        """Whether nothing more may fly."""
        asking = [flight.asks for flight in self._out if flight.run == self._run]
        return sum(asking) >= self._at_once or len(asking) >= self._at_once + _COMPARING

    @property
    def flying_bytes(self) -> int:
        """How much is on its way for this run."""
        return sum(flight.bytes for flight in self._out if flight.run == self._run)

    @property
    def turned_back(self) -> list[Flight]:
        """What the disk had no room for, the earliest needed first."""
        return sorted((flight for flight in self._out if flight.future is None), key=lambda flight: flight.first)

    def send(self, flight: Flight, fetch: Callable[[Flight, Wanted], None]) -> None:
        """Have a thread `fetch` it; what that opens of shards goes into the flight's parts."""
        flight.fetch = fetch
        self._out.append(flight)
        self.held_bytes += flight.bytes
        self.send_again(flight)

    def send_again(self, flight: Flight) -> None:
        """Have a thread fetch what was turned back; what it holds of it is held meanwhile."""
        flight.error, flight.pool, flight.asks = None, self._pool, True
        flight.future = self._pool.submit(self._fly, flight)
        flight.future.add_done_callback(self._tell)

    def fail(self, flight: Flight) -> None:
        """Let what was turned back land with its error."""
        flight.error, flight.future = SourceError(str(flight.error)), Future()
        flight.future.set_result(None)

    def land(self) -> bool:
        """Take over what has landed, each lane's in their order; tells whether any has, or was turned back."""
        news, lanes, rest = False, set[int](), list[Flight]()
        for flight in self._out:
            of_now, done = flight.run == self._run, flight.future is not None and flight.future.done()
            if done and of_now and isinstance(flight.error, NoRoom):
                flight.future, flight.turned_back, flight.asks, done, news = None, time.monotonic(), True, False, True
            if not done or (of_now and flight.lane in lanes):
                if of_now:
                    lanes.add(flight.lane)
                rest.append(flight)
                continue
            news = True
            assert flight.future is not None
            flight.future.result()
            self._take_over(flight)
        self._out = rest
        return news

    def let_go(self, used: Callable[[Flight], bool]) -> None:
        """Let go of what has landed and is used up."""
        rest = list[Flight]()
        for flight in self._landed:
            if used(flight):
                self._drop(flight)
                self.let_goes += 1
            else:
                rest.append(flight)
        self._landed = rest

    def close(self) -> None:
        """End all that flies."""
        self._ended = True
        self._fetcher.stop()
        for pool in {self._pool, *(flight.pool for flight in self._out if flight.pool)}:
            pool.shutdown(cancel_futures=True)
        self._fetcher.close()
        self.landing.close()
        self._landing.close()

    def asks_no_more(self, flight: Flight) -> None:
        """Say that what is left to do needs no network: in its thread."""
        flight.asks = False
        self._tell()

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._at_once + _COMPARING, "fetch")

    def _tell(self, _future: Future[None] | None = None) -> None:
        """Say that something may have landed, or more may fly: in a thread."""
        with suppress(OSError):  # much was said already, or all has ended
            self._landing.send(b"\0")

    def _fly(self, flight: Flight) -> None:
        """Fetch it: in a thread."""
        assert flight.fetch is not None
        before, flight.parts = flight.parts, []  # of a try before: held until this one holds them
        try:
            flight.fetch(flight, lambda: flight.run == self._run and not self._ended)
        except Superseded:
            pass
        except (OSError, PipelineError) as error:
            flight.error = error
        finally:
            for part in before:
                part.entry.close()

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
