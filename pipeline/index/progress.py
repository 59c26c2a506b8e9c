"""Says on a stream, every few seconds, how far many tars are: for people and logs."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TextIO

_EVERY_SECONDS = 5.0


class Progress:
    """Counts tars and bytes, from any thread; the first line comes after some seconds, so that short work says little."""

    def __init__(self, stream: TextIO | None, tars: int, size: int) -> None:
        """Take what there is to do; `size` in bytes, 0 where that isn't known."""
        self._stream, self._tars, self._size = stream, tars, size
        self._done = self._bytes = 0
        self._began = self._shown = time.monotonic()
        self._lock = threading.Lock()

    def passed(self, size: int) -> None:
        """Count bytes."""
        with self._lock:
            self._bytes += size
            self._show()

    def done(self) -> None:
        """Count a tar."""
        with self._lock:
            self._done += 1
            self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if self._stream is None or now - self._shown < _EVERY_SECONDS:
            return
        self._shown = now
        speed = self._bytes / (now - self._began)
        left = round((self._size - self._bytes) / speed) if speed and self._size > self._bytes else None
        eta = "" if left is None else f", ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        of = f" of {self._size / 1e6:,.0f}" if self._size else ""
        line = f"indexing: {self._done:,} of {self._tars:,} tars, {self._bytes / 1e6:,.0f}{of} MB, {speed / 1e6:,.1f} MB/s{eta}"
        with suppress(OSError, ValueError):  # a log that is full or gone never costs the work
            print(line, file=self._stream, flush=True)
