"""Reads files whole, in the order given, with the disk kept busy ahead and the page cache left as it was.

The kernel is asked for the next tens of MiB across files before the first of them is read, so that a disk always has a queue to
sort; who reads (this process or a worker) finds the bytes there. Pages that weren't cached before are dropped once read: reading
a set once must not push out what the machine's other programs use.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardify.items import modified
from shardify.machine import advise

WINDOW_BYTES = 32 * 2**20  # asked for ahead: some 300 photographs that the disk may serve in its own order
FILE_LIMIT = 2**30  # bytes; no picture, and each process holds one file
_WILLNEED_BYTES = 2**20  # the kernel heeds no more of one call
_NOATIME = getattr(os, "O_NOATIME", 0)


class ChangedFileError(OSError):
    """A file that isn't what it was when it was looked up."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to be read: its path, its bytes and time (ns) as looked up (-1: not known), and whether to drop its pages after."""

    path: str
    size: int = -1
    mtime: int = -1
    drop: bool = False

    def __repr__(self) -> str:
        return repr(self.path)


def ahead(files: Iterable[File], window: int = WINDOW_BYTES) -> Iterator[File]:
    """Yield the files, each when the kernel has been asked for it and for `window` bytes after it.

    What can't be opened is passed on: who reads it finds the reason.
    """
    asked: deque[File] = deque()
    held = 0
    for file in files:
        asked.append(_ask(file))
        held += max(file.size, 0)
        while asked and held > window:
            held -= max(asked[0].size, 0)
            yield asked.popleft()
    yield from asked


def read(file: File) -> bytes:
    """Return a file's bytes; raises OSError: ChangedFileError where they aren't those that were looked up."""
    descriptor = _open(file.path)
    with os.fdopen(descriptor, "rb", buffering=0) as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size > FILE_LIMIT:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes; at most {FILE_LIMIT} are taken for a picture")
        data = opened.read()
        if file.drop:
            advise(descriptor, 0, 0, "DONTNEED")
        _check(file, status, len(data))
        return data


def _check(file: File, status: os.stat_result, length: int) -> None:
    if file.size >= 0 and (status.st_size, modified(status)) != (file.size, file.mtime):
        raise ChangedFileError(errno.EIO, f"changed since it was looked up ({file.size} bytes then, {status.st_size} now)")
    if length != status.st_size:
        raise ChangedFileError(errno.EIO, f"changed while it was read ({status.st_size} bytes stated, {length} read)")


def _ask(file: File) -> File:
    """Ask the kernel for a file; returns it with `drop` set where its pages weren't there before."""
    try:
        descriptor = _open(file.path)
    except (OSError, ValueError):
        return file
    try:
        if not _is_cold(descriptor):
            return file
        for offset in range(0, max(file.size, 0), _WILLNEED_BYTES):
            advise(descriptor, offset, _WILLNEED_BYTES, "WILLNEED")
        return replace(file, drop=True)
    finally:
        os.close(descriptor)


def _is_cold(descriptor: int) -> bool:
    """Tell whether a file isn't in the page cache; where the system or the file system can't say, it counts as cached."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _open(path: str) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO mustn't block
    try:
        return os.open(path, flags | _NOATIME)  # a disk needn't write an inode for each file that is read
    except PermissionError:  # the owner's right
        return os.open(path, flags)
