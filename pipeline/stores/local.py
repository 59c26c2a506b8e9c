"""Reads shards from a local file system by offset."""

from __future__ import annotations

import os

from pipeline.errors import ShardError
from pipeline.machine import advise, open_regular

_HINT_BYTES = 2**20  # WILLNEED covers no more a call


class LocalFile:
    """A shard as a local file; `pread`, never mmap: a mapped page can't be dropped from the cache."""

    def __init__(self, path: str) -> None:
        """Open `path`; raises ShardError with the path and the system's reason."""
        self._path, self._fd = path, -1
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise ShardError(f"{path}: can't be opened ({error.strerror}); is the disk mounted and the set complete?") from error
        status = os.fstat(self._fd)
        self.size, self.device = status.st_size, status.st_dev

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`; raises ShardError for more than the file has, or a failing disk."""
        if offset + size > self.size:  # no memory is taken for what an index of another file claims
            raise self._too_short(self.size, offset, size)
        try:
            data = os.pread(self._fd, size, offset)
            while 0 < len(data) < size:  # a signal or a network file system may return less
                more = os.pread(self._fd, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise ShardError(f"{self._path}: reading {size} bytes at {offset} failed ({error.strerror}); check the disk") from error
        if len(data) < size:
            raise self._too_short(offset + len(data), offset, size)
        return data

    def _too_short(self, end: int, offset: int, size: int) -> ShardError:
        return ShardError(
            f"{self._path}: ends at byte {end}, and a sample needs {size} bytes from {offset}; "
            "it was cut after it was indexed, or its index is of another tar: copy or pack it again"
        )

    def hint(self, begin: int, end: int) -> None:
        """Have the kernel read bytes [begin, end) ahead; what it doesn't is read when it is wanted."""
        for at in range(begin, end, _HINT_BYTES):
            advise(self._fd, at, min(_HINT_BYTES, end - at), "WILLNEED")

    def __del__(self) -> None:
        # A loader that nobody closed is collected: without this its shards would stay open for ever.
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
