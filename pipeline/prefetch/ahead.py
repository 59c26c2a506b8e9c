"""A file that is read ahead of whoever walks it: a tar's headers lie between its bodies, and to jump costs a disk as much."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeAlias

from pipeline.machine import open_regular
from pipeline.prefetch import pages
from pipeline.stores.copies import PAGE

ReadAhead: TypeAlias = Callable[[pages.File, int, int], None]

_STEP = 64 * 2**20  # a turn that others may wait for: under half a second of a disk


class AheadFile:
    """A file for `shardify.format.tar`; `read_ahead(file, start, stop)` is called before bytes from `start` on are read.

    `drop`: its pages go once they are behind, as there is no room for all.
    """

    def __init__(self, path: str, read_ahead: ReadAhead, *, drop: bool) -> None:
        """Open a file; raises OSError."""
        self.descriptor = open_regular(path)
        status = os.fstat(self.descriptor)
        self.device, self._size = status.st_dev, status.st_size
        self._read_ahead, self._drop = read_ahead, drop
        self._at = self._begin = self._end = 0
        pages.plain(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()
        os.close(self.descriptor)

    def seek(self, at: int) -> int:
        """Go to a byte."""
        self._at = at
        return at

    def read(self, size: int) -> bytes:
        """Return up to so many bytes; fewer at the end."""
        stop = min(self._at + size, self._size)
        if stop > self._end:
            self._leave()
            self._begin = max(self._end, self._at // PAGE * PAGE)
            self._end = min(self._size, max(stop, self._begin + _STEP))
            self._read_ahead(self, self._begin, self._end)
        data = os.pread(self.descriptor, size, self._at)
        self._at += len(data)
        return data

    def _leave(self) -> None:
        if self._drop:
            pages.drop(self.descriptor, [(self._begin, self._end)])
