"""Locks of ranges of files that go with their process: of an open file, so that two of one process see each other.

They are advice that others may be unable to see, where the system or the file system has none.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress

# Locks of ranges that belong to an open file: another descriptor's are seen, also of the same process, and a close of a third one
# lets none go. Of whole files two ranks with few shards, each of which both read, would never drop a page.
_SET, _GET = (getattr(fcntl, name, None) for name in ("F_OFD_SETLK", "F_OFD_GETLK"))
_FLOCK = struct.Struct("hhqqi")  # type, whence, start, length, process


def hold(descriptor: int, start: int, stop: int) -> None:
    """Say that a range of a file is read."""
    with suppress(OSError):
        _lock(descriptor, fcntl.F_RDLCK, start, stop)


def let_go(descriptor: int, start: int, stop: int) -> None:
    """Say that a range of a file is no longer read, or written."""
    with suppress(OSError):
        _lock(descriptor, fcntl.F_UNLCK, start, stop)


def try_write(descriptor: int, start: int, stop: int) -> bool:
    """Take a range for oneself, and tell whether nobody else has a part of it; `stop` 0: up to the end and beyond."""
    try:
        _lock(descriptor, fcntl.F_WRLCK, start, stop)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # no such locks here
        return True
    return True


def is_held(descriptor: int, start: int, stop: int) -> bool:
    """Tell whether another reader holds a part of a range."""
    if _GET is None:
        return False
    with suppress(OSError):
        found = fcntl.fcntl(descriptor, _GET, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
    return False


def _lock(descriptor: int, kind: int, start: int, stop: int) -> None:
    if _SET is not None and (start < stop or stop == 0):
        fcntl.fcntl(descriptor, _SET, _FLOCK.pack(kind, os.SEEK_SET, start, stop - start if stop else 0, 0))
