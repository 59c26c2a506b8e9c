"""Counts what the network was asked for and what it cost; safe for many readers at once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """What a store did so far.

    requests: replies by status (0: none came). `connections`: opened. `retries`: tries beyond the first of each read.
    bytes: of the objects, as they came. `skipped_bytes`: those that nobody wanted, of servers that can't begin in the middle.
    waited_seconds: spent between tries, added up over all readers.
    """

    requests: Mapping[int, int]
    connections: int
    retries: int
    bytes: int
    skipped_bytes: int
    waited_seconds: float


class Counter:
    """The running counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = dict[int, int]()
        self._connections = self._retries = self._bytes = self._skipped = 0
        self._waited = 0.0

    def reply(self, status: int) -> None:
        """Count a reply, 0 for none."""
        with self._lock:
            self._requests[status] = self._requests.get(status, 0) + 1

    def connection(self) -> None:
        """Count a connection that was opened."""
        with self._lock:
            self._connections += 1

    def retry(self, seconds: float) -> None:
        """Count a try beyond the first, and the wait before it."""
        with self._lock:
            self._retries += 1
            self._waited += seconds

    def body(self, size: int, skipped: int = 0) -> None:
        """Count bytes of a body, `skipped` of them thrown away."""
        with self._lock:
            self._bytes += size
            self._skipped += skipped

    def now(self) -> Counts:
        """Return the counts as they stand."""
        with self._lock:
            requests = dict(sorted(self._requests.items()))
            return Counts(requests, self._connections, self._retries, self._bytes, self._skipped, self._waited)
