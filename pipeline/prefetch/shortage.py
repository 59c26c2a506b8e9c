"""Decides what comes of windows that the cache folder has no room for, though its limit allows them: its disk or quota is full.

turned back -> the earliest tries again once something went -> the next batch needs it: less stays -> nothing goes: an error
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from pipeline.errors import SourceError, said
from pipeline.prefetch.fetching import Fetcher
from pipeline.prefetch.flights import Flight, Flights
from pipeline.progress import Block, Count

_log = logging.getLogger("pipeline")

_TRY_SECONDS = 1.0  # between two tries to write to a full disk of which nothing could be given back
_STUCK_SECONDS = 10.0  # without a change in the folder: others that read there use up a window in that time, or stand still
_RECOVERY_SECONDS = 60.0  # until as much is taken of a full disk again as before; each time twice as long: a quota stays
_LONGEST_RECOVERY_SECONDS = 3600.0


class Shortage:
    """What a reader does about no room; for one thread."""

    def __init__(self, fetcher: Fetcher, flights: Flights, block: Block, least: int) -> None:
        """Take what the reader has; `least`: bytes beside others' with which all of this machine's ranks can read."""
        self._fetcher, self._flights, self._block, self._least = fetcher, flights, block, least
        self._limit, self._shrunk, self._shrunk_until, self._seconds = fetcher.cache.limit, False, 0.0, _RECOVERY_SECONDS
        self._trying: Flight | None = None
        self._let_goes, self._told, self._freed = 0, 0.0, 0.0
        self._stuck: tuple[int, float] | None = None  # what the folder holds while nothing can be written, and since when

    def begin(self) -> None:
        """Begin a run."""
        self._trying = self._stuck = None

    def step(self, lacked: Callable[[int], bool], make_room: Callable[[], bool], recovered: Callable[[], None]) -> bool:
        """Have the earliest that was turned back try again where that may help; tells whether anything is: then no more may fly.

        `lacked` tells whether the next batch needs a position; `make_room` gives something back, and tells whether it could;
        `recovered` is told when as much may be taken again as before.
        """
        now, waiting = time.monotonic(), self._flights.turned_back
        if any(flight.turned_back > self._told for flight in waiting) or self._fetcher.was_full():
            self._told = now
            self._take_no_more(now)
        elif self._shrunk and now > self._shrunk_until and not waiting:
            self._fetcher.cache.limit, self._shrunk = self._limit, False
            self._fetcher.look_again()
            recovered()
        if self._trying is not None and (self._trying.future is None or self._trying.future.done()):
            self._trying = None
        if waiting and self._trying is None:
            self._try_again(now, waiting, lacked, make_room)
        return bool(waiting)

    def is_stuck(self) -> bool:
        """Tell, where there is no room for what is needed now, whether others don't make any either."""
        used, now = self._fetcher.cache.used_bytes(), time.monotonic()
        if self._stuck is None or used != self._stuck[0]:
            self._stuck = (used, now)
        return now > self._stuck[1] + _STUCK_SECONDS

    def has_room(self) -> None:
        """Say that there was room for what is needed now."""
        self._stuck = None

    def give_up(self, run: int, lane: int, stop: int, advice: str) -> None:
        """Tell the worker that waits for what there is no room for that there will never be any; `advice` ends the message."""
        cache = self._fetcher.cache
        self._block.report(
            said(
                SourceError(
                    f"{cache.folder}: no room for what is needed now: {cache.said_of(cache.room())}; other jobs, or what else is "
                    f"on the disk, take the rest: free some of it, raise LoaderOptions(cache_bytes=), or {advice}"
                )
            )
        )
        self._block.add(Count.FAILED, 1)
        self._block.reach(lane, run, stop)

    def _take_no_more(self, now: float) -> None:
        """Take no more of the folder than is taken now, but the least: its disk was full."""
        cache = self._fetcher.cache
        if not self._shrunk:
            _log.warning(
                "%s: its disk is full, or a quota used up; for %.0f s no more of it is taken than now", cache.folder, self._seconds
            )
            self._shrunk, self._shrunk_until = True, now + self._seconds
            self._seconds = min(2 * self._seconds, _LONGEST_RECOVERY_SECONDS)
        used = cache.used_bytes()
        cache.limit = min(self._limit, max(used, used - self._fetcher.own_bytes() + self._least))
        self._fetcher.look_again()

    def _try_again(self, now: float, waiting: list[Flight], lacked: Callable[[int], bool], make_room: Callable[[], bool]) -> None:
        """Have the earliest try again, where there may be room; end it where there never will be."""
        flights = self._flights
        first, *others = waiting
        for flight in others if lacked(first.first) else waiting:
            flight.release()  # what came of it is the first that makes room
        if flights.let_goes != self._let_goes:
            self._let_goes, self._stuck, self._freed = flights.let_goes, None, now
        if first.turned_back <= self._freed:  # something went since: room for one may be room for the next, too
            self._try(first)
        elif not lacked(first.first):
            if now > first.turned_back + _STUCK_SECONDS:
                self._try(first)
        elif self._could(make_room):
            self._stuck, self._freed = None, now
            self._try(first)
        elif now > first.turned_back + _TRY_SECONDS:
            if self.is_stuck():
                flights.fail(first)
            else:
                self._try(first)

    def _try(self, flight: Flight) -> None:
        self._trying = flight
        self._flights.send_again(flight)

    def _could(self, make_room: Callable[[], bool]) -> bool:
        with suppress(OSError):  # a full disk may have no room to give something back
            return make_room()
        return False
