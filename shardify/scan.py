"""Reads one tar of others from end to end: its samples, its size and its hash, or all that is wrong with it.

Hashing means to read what lies between the headers too. For pictures on a hard disk that costs next to nothing: the platter
turns past them while the head waits for the next header.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardify.errors import FormatError, naming
from shardify.format import tar

_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Scan:
    """A tar's samples in order, its size in bytes, and its sha256 in hex ("" where it wasn't asked for)."""

    records: list[tar.SampleRecord]
    size: int
    sha256: str


def scan(path: Path, *, hashing: bool) -> Scan:
    """Read a tar, once and forward; `hashing` its bytes takes reading all of them, not its headers alone.

    Raises FormatError with its problems where a reader would miss samples or mix them up, where there are none, and where the file
    changes meanwhile; StorageError where it can't be read.
    """
    with naming(path), path.open("rb", buffering=0) as raw:
        before = os.fstat(raw.fileno())
        hashed = _Hashed(raw)
        file: Any = io.BufferedReader(hashed, _READ_BYTES) if hashing else raw
        records = tar.all_samples(file, before.st_size, str(path))
        sha256 = hashed.finish() if hashing else ""
        after = os.fstat(raw.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise FormatError(f"{path}: changed while it was read; wait until it is written, and index it again")
    return Scan(records, before.st_size, sha256)


class _Hashed(io.RawIOBase):
    """A file that is read forward only, every byte of it hashed on the way; where others seek it reads."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw, self._sha256, self._at = raw, hashlib.sha256(), 0
        self._passed = memoryview(bytearray(_READ_BYTES))

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes: forward."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read on into `buffer`; return the number of bytes."""
        count = self._raw.readinto(buffer) or 0
        self._sha256.update(memoryview(buffer)[:count])
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Read on to a position (from the start); return where that ended."""
        while whence == os.SEEK_SET and self._at < offset and self.readinto(self._passed[: offset - self._at]):
            pass
        return self._at

    def finish(self) -> str:
        """Read on to the end; return the hash of all bytes in hex."""
        while self.readinto(self._passed):
            pass
        return self._sha256.hexdigest()
