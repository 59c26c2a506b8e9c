"""Takes turns at a disk with all other readers of the machine: a lock on the mount's root, which is advice.

The lock is `flock` on a descriptor that only reads, so any user can take it and no file is left.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from contextlib import suppress
from types import FrameType

LONGEST_WAIT = 1.0  # seconds; whoever holds a turn for longer is stopped, or another program
# Seconds for those who wait to wake up. Two readers of 20 turns each alternated 39 times; 8 to 13 times where the lock was asked
# for again at once.
_BREATH = 0.001


class _Late(Exception):  # noqa: N818  (no error)
    """The wait for a turn took too long."""


class Turn:
    """The turn at the disk that a folder lies on. For a process's main thread: the wait is ended by SIGALRM."""

    def __init__(self, folder: str) -> None:
        self._descriptor = _lockable(folder)
        self._left = 0.0
        self.held = False  # reading may go on: with the turn, or after waiting for it in vain
        self.granted = False
        self.counts = True
        self.waited_ns = 0

    def take(self) -> None:
        """Wait for the turn, at most a second; `granted` tells whether it came, `waited_ns` how long that took."""
        began = time.monotonic_ns()
        time.sleep(max(0.0, self._left + _BREATH - time.monotonic()))
        self.granted = self._descriptor is None or _lock(self._descriptor)
        self.held, self.counts, self.waited_ns = True, True, time.monotonic_ns() - began

    def take_if_free(self) -> bool:
        """Take the turn where nobody has it or was let by just now; tells whether it came. Such a turn isn't counted."""
        if time.monotonic() < self._left + _BREATH:
            return False
        if self._descriptor is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        self.held, self.granted, self.counts, self.waited_ns = True, True, False, 0
        return True

    def leave(self) -> None:
        """Let others have the turn."""
        if self._descriptor is not None and self.held:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._left = time.monotonic()
        self.held = self.granted = False

    def close(self) -> None:
        """Give the descriptor back, and the turn with it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self.held = None, False


def _lock(descriptor: int) -> bool:
    """Take the lock within a second; blocking, so that the kernel wakes those who wait."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    before = signal.signal(signal.SIGALRM, _raise_late)
    try:
        signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Late:
        return False
    finally:
        signal.signal(signal.SIGALRM, before)
    return True


def _raise_late(_signal: int, _frame: FrameType | None) -> None:
    raise _Late


def _lockable(folder: str) -> int | None:
    """Return a descriptor to lock: of the mount's root, else of the folder, else none (a network that knows no such locks)."""
    for find in (mount_root, os.path.realpath):
        try:
            descriptor = os.open(find(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None


def mount_root(folder: str) -> str:
    """Return the root of the file system that a folder lies on."""
    path = os.path.realpath(folder)
    device = os.stat(path).st_dev  # noqa: PTH116
    while (parent := os.path.dirname(path)) != path and os.stat(parent).st_dev == device:  # noqa: PTH116, PTH120
        path = parent
    return path
