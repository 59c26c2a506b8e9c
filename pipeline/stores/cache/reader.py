"""Reads an object of the cache as a worker does: never a byte that isn't there."""

from __future__ import annotations

import mmap
import os

from pipeline.errors import ShardError
from pipeline.stores.cache import layout
from pipeline.stores.cache.layout import CHUNK


class AbsentError(ShardError):
    """Bytes of an object that aren't in the cache, not yet or no longer."""


class CachedFile:
    """An object's file, open to read."""

    def __init__(self, path: str, url: str) -> None:
        """Open the file at `path`; raises AbsentError where there is none, or another thing."""
        self._url, self._descriptor = url, -1
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for ever
        except OSError as error:
            raise AbsentError(f"{url}: isn't in the cache ({path}: {error.strerror})") from error
        try:
            head = layout.read(descriptor)
            if head is None:
                raise AbsentError(f"{url}: isn't in the cache ({path} is none of its files)")
            at = layout.table_at(head.facts.size)
            self._map = mmap.mmap(descriptor, layout.chunks(head.facts.size) or 1, prot=mmap.PROT_READ, offset=at)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self.size, self.device = descriptor, head.facts.size, os.fstat(descriptor).st_dev

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`; raises AbsentError where some of them aren't there."""
        first, last = offset // CHUNK, -(-(offset + size) // CHUNK) if size else offset // CHUNK
        if offset + size > self.size:
            raise ShardError(
                f"{self._url}: ends at byte {self.size}, and a sample needs {size} bytes from {offset}: index it again"
            )
        whole = b"\1" * (last - first)
        data = os.pread(self._descriptor, size, offset) if self._map[first:last] == whole else b""
        if len(data) < size or self._map[first:last] != whole:  # after the read as before it: it may just have been given back
            raise AbsentError(f"{self._url}: bytes {offset} to {offset + size} aren't in the cache")
        return data

    def hint(self, begin: int, end: int) -> None:
        """Do nothing: what is in the cache was read ahead."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()
