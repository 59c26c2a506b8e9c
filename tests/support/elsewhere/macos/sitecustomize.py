"""Takes from Python what macOS hasn't: a child that has this folder in its PYTHONPATH imports it before all else."""

import ctypes
import multiprocessing
import os
import subprocess  # noqa: F401  it is imported first, as it asks for what goes
import tempfile  # noqa: F401
import time

_ABSENT = (
    "posix_fadvise posix_fallocate memfd_create sched_getaffinity sched_setaffinity eventfd copy_file_range splice pidfd_open "
    "getxattr listxattr O_DIRECT O_PATH O_NOATIME RWF_NOWAIT"
)

for name in [*_ABSENT.split(), *(name for name in dir(os) if name.startswith("POSIX_FADV"))]:
    if hasattr(os, name):
        delattr(os, name)
del time.CLOCK_BOOTTIME


class _Library(ctypes.CDLL):
    """A C library without what glibc alone has."""

    def __getattr__(self, name: str) -> object:
        if name in ("fallocate", "mallopt"):
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = _Library
multiprocessing.set_start_method("spawn")
