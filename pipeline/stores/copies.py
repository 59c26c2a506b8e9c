"""Holds parts of shards as copies in memory, for folders whose pages are thrown away whenever another process opens a file.

One sparse file without a name holds them all, a shard in each 1 TiB of it, at the shard's own offsets; it takes the memory of what
is there and no more, and is gone with the last process that has it open. A file in a folder would have to be written to some disk,
and be found and removed after a kill.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

PAGE = 4096

_SHARD_BITS = 40
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


class Ranges:
    """Disjoint ranges of bytes in order; those that touch are one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def add(self, start: int, stop: int) -> None:
        """Add a range."""
        low, high = bisect.bisect_left(self._stops, start), bisect.bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high], self._stops[low:high] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take a range out."""
        low, high = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)
        if low >= high:
            return
        rest = [(self._starts[low], start), (stop, self._stops[high - 1])]
        rest = [(begin, end) for begin, end in rest if begin < end]
        self._starts[low:high], self._stops[low:high] = [begin for begin, _ in rest], [end for _, end in rest]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of a range that aren't there."""
        found, at = list[tuple[int, int]](), bisect.bisect_right(self._stops, start)
        while start < stop and at < len(self._starts) and self._starts[at] < stop:
            if start < self._starts[at]:
                found.append((start, self._starts[at]))
            start, at = self._stops[at], at + 1
        return [*found, (start, stop)] if start < stop else found

    def around(self, start: int, stop: int) -> tuple[int | None, int | None]:
        """Return where the nearest range below a range that isn't there ends, and where the nearest above begins."""
        below, above = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)
        return (self._stops[below - 1] if below else None, self._starts[above] if above < len(self._starts) else None)


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int]:
    """Return the C library's own, which tells why it failed; raises OSError where it has none (macOS)."""
    call: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found: Callable[[int, int, int, int], int] = call
    return found


def punch(descriptor: int, start: int, length: int) -> None:
    """Give the blocks of a file's range back; raises OSError where its file system can't, and for a disk that fails."""
    if _fallocate()(descriptor, _KEEP_SIZE | _PUNCH_HOLE, start, length):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Copies:
    """The copies, for the process that makes them; raises OSError where the system has no such memory."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("pipeline-copies")

    def write(self, shard: int, offset: int, data: memoryview) -> None:
        """Copy bytes of a shard."""
        at = shard << _SHARD_BITS | offset
        while len(data):
            done = os.pwrite(self.descriptor, data, at)
            data, at = data[done:], at + done

    def drop(self, shard: int, start: int, stop: int) -> None:
        """Give the memory of whole pages [start, stop) back."""
        with suppress(OSError):
            punch(self.descriptor, shard << _SHARD_BITS | start, stop - start)

    def empty(self) -> None:
        """Give all memory back; readers find nothing in it from now on."""
        os.ftruncate(self.descriptor, 0)

    def used_bytes(self) -> int:
        """Return how much memory the copies take."""
        return os.fstat(self.descriptor).st_blocks * 512

    def close(self) -> None:
        """Give all memory back once nobody else has it open."""
        os.close(self.descriptor)


class CopyReader:
    """The copies, for processes that read them: by the number of the process that makes them and its descriptor."""

    def __init__(self, process: int, descriptor: int) -> None:
        """Open the copies; raises OSError where that process has ended."""
        self._fd = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, shard: int, offset: int, size: int) -> bytes | None:
        """Return exactly `size` bytes of a shard from `offset`, None where some of them were never copied."""
        at = shard << _SHARD_BITS | offset
        try:
            if size and os.lseek(self._fd, at, os.SEEK_HOLE) < at + size:
                return None
        except OSError:  # it lies beyond the end of all copies
            return None
        data = os.pread(self._fd, size, at)
        return data if len(data) == size else None

    def close(self) -> None:
        """Close the copies; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()
