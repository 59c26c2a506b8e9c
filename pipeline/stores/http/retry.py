"""Decides whether and when a failed try is made again, within a read's limits."""

from __future__ import annotations

import email.utils
import logging
import math
import random
import threading
import time
from typing import NoReturn

from pipeline.errors import RemoteError
from pipeline.stores import Place
from pipeline.stores.http.counts import Counter
from pipeline.stores.http.options import HttpOptions

_log = logging.getLogger(__name__)

_LONGEST_RETRY_AFTER_SECONDS = 120.0  # a server that asks for an hour is better told to the user than slept through
_WARNED = 3  # failures in a row: then somebody who waits is told why
PROGRESS_BYTES = 64 * 1024  # a server that gives a byte a try would otherwise be asked for ever
_PROGRESS_SHARE = 8  # so is an eighth of the rest


class Again(Exception):  # noqa: N818  (never leaves this package)
    """A try failed in a way that another may not.

    after: the seconds that the server asks to wait. `advice`: what to do if no try helps.
    """

    def __init__(self, why: str, after: float = 0.0, advice: str = "is the server up and its network well? Then run again") -> None:
        super().__init__(why)
        self.why, self.after, self.advice = why, after, advice


class Limits:
    """When one read's waits end: each by its own limit, all of them by the total."""

    def __init__(self, options: HttpOptions) -> None:
        self._connect, self._idle = options.connect_seconds, options.idle_seconds
        self.began = time.monotonic()
        self.end = math.inf if options.total_seconds is None else self.began + options.total_seconds

    def connecting(self) -> float:
        """Return until when a connection must stand."""
        return min(self.end, time.monotonic() + self._connect)

    def waiting(self) -> float:
        """Return until when the next byte must come."""
        return min(self.end, time.monotonic() + self._idle)


class Patience:
    """Counts one read's failures in a row and waits between them: exponential back-off with full jitter."""

    def __init__(self, address: Place, options: HttpOptions, limits: Limits, counter: Counter, closed: threading.Event) -> None:
        self._address, self._options, self._limits, self._counter, self._closed = address, options, limits, counter, closed
        self._failures = 0
        if closed.is_set():
            self._closed_meanwhile()

    def progress(self, size: int, rest: int | None) -> None:
        """Note how many bytes a try brought of those that were left, None where nobody knows how many."""
        if size >= PROGRESS_BYTES or (rest is not None and size * _PROGRESS_SHARE >= rest):
            self._failures = 0

    def wait(self, failure: Again) -> None:
        """Wait until the next try; raises RemoteError when there is none."""
        self._failures += 1
        after = min(failure.after, _LONGEST_RETRY_AFTER_SECONDS)
        most = min(self._options.longest_wait_seconds, self._options.first_wait_seconds * 2.0 ** min(self._failures - 1, 60))
        seconds, now = after + random.uniform(0, most), time.monotonic()
        if now >= self._limits.end:
            self._give_up(failure, f"total_seconds={self._options.total_seconds:g} are over")
        if self._failures >= self._options.attempts:
            self._give_up(failure, f"{self._failures} tries in a row failed")
        if now + after >= self._limits.end:
            self._give_up(failure, f"the server asks to wait {after:.0f} s, beyond total_seconds={self._options.total_seconds:g}")
        seconds = min(seconds, self._limits.end - now)
        level = logging.WARNING if self._failures == _WARNED else logging.INFO
        _log.log(level, "%s: %s; try %d follows in %.1f s", self._address, failure.why, self._failures + 1, seconds)
        self._counter.retry(seconds)
        if self._closed.wait(seconds):
            self._closed_meanwhile()

    def _closed_meanwhile(self) -> NoReturn:
        raise RemoteError(f"{self._address}: the store was closed; open another to read on")

    def _give_up(self, failure: Again, why: str) -> NoReturn:
        took = time.monotonic() - self._limits.began
        raise RemoteError(f"{self._address}: {failure.why} ({why}, in {took:.0f} s); {failure.advice}")


def retry_after(value: str | None) -> float:
    """Return the seconds that a Retry-After header asks for, given as a number or as a date; 0 for none."""
    if not value:
        return 0.0
    if value.strip().isdecimal():
        return min(float(value.strip()[:9]), 1e9)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):
        return 0.0
