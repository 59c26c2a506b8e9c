"""A memory cgroup (version 1) to run a program in: its limit counts the page cache too, so a set can't be read into memory whole."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup/memory")
LOOK_SECONDS = 0.05


class Cgroup:
    """A group while the `with` block runs; `own_peak` are the most bytes that its programs held beside the page cache."""

    def __init__(self, limit: int | None = None) -> None:
        self._folder, self._limit = MOUNT / f"shardify-{os.getpid()}", limit
        self.own_peak = 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Cgroup:
        self._folder.mkdir()
        if self._limit is not None:
            (self._folder / "memory.limit_in_bytes").write_text(str(self._limit))
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        for _try in range(100):
            try:
                return self._folder.rmdir()
            except OSError:  # the last processes are still going
                time.sleep(0.05)
        return self._folder.rmdir()

    def within(self, command: Sequence[str | Path]) -> list[str | Path]:
        """Return a command that enters the group and then becomes `command`."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', self._folder / "cgroup.procs", *command]

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            lines = (self._folder / "memory.stat").read_text().splitlines()
            stat = {name: int(value) for name, value in (line.split() for line in lines)}
            self.own_peak = max(self.own_peak, stat["rss"] + stat.get("shmem", 0))


def can_limit() -> bool:
    """Tell whether this process may make such groups here."""
    return (MOUNT / "memory.limit_in_bytes").exists() and os.access(MOUNT, os.W_OK)
