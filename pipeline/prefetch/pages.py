"""Reads files forward so that their pages stay in the page cache, and drops pages that nobody else reads.

Never asks what is resident: mincore calls another user's cold file resident. What is there is read without waiting (RWF_NOWAIT);
where that comes up short, or the file system doesn't know it, the disk's turn is taken and the rest is read as it comes.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pipeline.machine import advise
from pipeline.prefetch.turn import Turn
from pipeline.stores.copies import PAGE
from pipeline.stores.locks import is_held

CHUNK = 2**20  # WILLNEED covers no more a call; with _AHEAD at 1, 2, 4, 8 a busy machine read 76, 82, 91, 93 MB/s (dd: 105)
_FIRST_CHUNK = 2**17
_LEAST_CHUNK = 2**14
_AHEAD = 4  # chunks that the kernel is asked for before they are read, so that the disk doesn't wait for this process
_CHUNK_SECONDS = 0.1  # between two signs of life on a slow disk
_NOT_KNOWN = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class File(Protocol):
    """An open file, and its device (`stat.st_dev`)."""

    descriptor: int
    device: int


class Range(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: File
    start: int
    stop: int


class Forward:
    """Reads ranges of files forward into one buffer."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(CHUNK))
        self._chunk, self._ahead = _FIRST_CHUNK, 0  # nothing is asked ahead of a disk that may be slow
        self._without: set[int] = set()  # devices that don't know RWF_NOWAIT

    def read(self, ranges: Sequence[Range], turn: Turn, tell: Callable[[int, memoryview], None]) -> None:
        """Read ranges of a device's files, as far as these go, in one turn if it takes any, which the caller leaves.

        `tell` gets each chunk and its offset, and an empty one when the turn was taken; its exceptions end the reading.
        """
        waited, began = 0, 0.0
        for file, start, stop in ranges:
            at = asked = start
            while at < stop:
                if not turn.held:
                    if done := self._at_hand(file, at, stop):
                        tell(at, self._buffer[:done])
                        at += done
                        continue
                    turn.take()
                    tell(at, self._buffer[:0])  # a second may have gone by
                began = began or time.monotonic()
                asked = self._ask(file.descriptor, max(asked, at), min(stop, at + self._ahead * self._chunk))
                done = os.preadv(file.descriptor, [self._buffer[: min(self._chunk - at % PAGE, stop - at)]], at)
                if not done:
                    break  # the file ends here: whoever needs more says so
                waited += done
                self._pace(waited, time.monotonic() - began)
                tell(at, self._buffer[:done])
                at += done

    def _at_hand(self, file: File, at: int, stop: int) -> int:
        """Read what is in the cache at an offset; returns how much, 0 where nothing is or that can't be asked."""
        if file.device in self._without or not hasattr(os, "RWF_NOWAIT"):
            return 0
        try:
            return os.preadv(file.descriptor, [self._buffer[: min(CHUNK, stop - at)]], at, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _NOT_KNOWN:
                raise
            self._without.add(file.device)
            return 0

    def _ask(self, descriptor: int, asked: int, stop: int) -> int:
        """Have the kernel read up to `stop`; returns up to where it was asked.

        Not beyond the range's end: two ranges that are waited for at once cost the drive model 130 seeks more on 170 ranges.
        """
        while asked < stop:
            size = min(CHUNK - asked % PAGE, stop - asked)
            advise(descriptor, asked, size, "WILLNEED")
            asked += size
        return asked

    def _pace(self, done: int, seconds: float) -> None:
        """Fit the chunk to the disk that gave so many bytes so far: 1 MiB of a disk of 100 KB/s would look like 10 s of silence."""
        fitting = int(done / max(seconds, 1e-6) * _CHUNK_SECONDS) // PAGE * PAGE
        self._chunk, self._ahead = max(_LEAST_CHUNK, min(CHUNK, 2 * self._chunk, fitting)), _AHEAD


def plain(descriptor: int) -> None:
    """Keep the kernel from reading past what it is asked for: 1.6 MB behind each window were, while the next one was read."""
    advise(descriptor, 0, 0, "RANDOM")


def drop(descriptor: int, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Drop pages of ranges of a file; returns the ranges that another reader holds, which stay."""
    refused = []
    for start, stop in ranges:
        if is_held(descriptor, start, stop):
            refused.append((start, stop))
        else:
            advise(descriptor, start, stop - start, "DONTNEED")
    return refused
