"""Gives files of the cache folder their names, once each, and takes them away from files that nobody reads."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from pipeline.stores import locks

_NAMING = ".naming"


def remove(path: Path) -> bool | None:
    """Remove a file that nobody holds a part of; None where someone does, False where it is gone already."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        if not locks.try_write(descriptor, 0, 0):
            return None
        if os.fstat(descriptor).st_nlink and os.stat(path).st_ino == os.fstat(descriptor).st_ino:  # noqa: PTH116
            path.unlink(missing_ok=True)
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: str) -> None:
    """Give a file that is whole its name, unless another process just gave it to its own."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        _rename_unless(str(temporary), path)


def _rename_unless(temporary: str, path: str) -> None:
    """Give a file a name that no other has, where there are no hard links (exFAT): one at a time, by the lock of one file."""
    lock = os.open(os.path.join(os.path.dirname(path), _NAMING), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # noqa: PTH118, PTH120
    try:
        while not locks.try_write(lock, 0, 1):
            time.sleep(0.001)
        if not os.path.exists(path):  # noqa: PTH110
            os.rename(temporary, path)  # noqa: PTH104
    finally:
        os.close(lock)
