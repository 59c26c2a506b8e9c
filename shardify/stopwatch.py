"""Measures how long each stage of a command takes, from what it tells of its progress."""

from __future__ import annotations

import time

from shardify.items import Progress


class Stopwatch:
    """Passes progress on, and keeps the seconds of each stage; the last ends with `stop`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._doing = ""
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.advance = progress.advance

    def begin(self, doing: str, total: int, unit: str = "images") -> None:
        """Start a stage, which ends the one before."""
        self.stop()
        self._doing = doing
        self._progress.begin(doing, total, unit)

    def stop(self) -> dict[str, float]:
        """End the stage; return the seconds of each so far, in their order."""
        now = time.perf_counter()
        if self._doing:
            self.seconds[self._doing] = round(self.seconds.get(self._doing, 0.0) + now - self._since, 3)
        self._since, self._doing = now, ""
        return self.seconds
