"""Finds out whether pages that one process read are there for another: FUSE, 9p and others may throw them away at each open.

/proc/mounts says memory (tmpfs)                                      -> MEMORY
read 4 MiB, open afresh in another process, RWF_NOWAIT there
all is there                                                      -> PAGE_CACHE
not all is                                                        -> COPIES
not known: bytes from the medium, as the kernel counts them for a process
a cold read is counted, and the other process's isn't there   -> PAGE_CACHE
anything else: they went to the medium, or can't be told      -> COPIES
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from pipeline.machine import file_system
from pipeline.prefetch import pages
from pipeline.progress import Way

TRIAL_BYTES = 4 * 2**20
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "rootfs")
_HERE, _GONE, _UNKNOWN, _FAILED = 10, 11, 12, 13  # exit codes of the other process


def find_way(path: str, descriptor: int, start: int, stop: int) -> Way:
    """Return how the bytes of a file, and of all files on its device, are made resident; [start, stop) was read just now."""
    found = _elsewhere(_look, path, start, stop)
    if found == _UNKNOWN:
        # Would the kernel say that a read went to the medium? Only a cold one can tell.
        pages.drop(descriptor, [(start, stop)])
        before = medium_bytes()
        _read(descriptor, start, stop)
        if medium_bytes() - before >= (stop - start) // 2:
            found = _elsewhere(_read_afresh, path, start, stop)
    return Way.PAGE_CACHE if found == _HERE else Way.COPIES


def in_memory(path: str) -> bool:
    """Tell whether a path lies on a file system in memory, where nothing has to be read ahead."""
    return file_system(path) in _IN_MEMORY


def medium_bytes() -> int:
    """Return how many bytes this process had read from media; 0 where the kernel doesn't count."""
    with suppress(OSError), open("/proc/self/io", "rb") as file:  # noqa: PTH123
        for line in file:
            if line.startswith(b"read_bytes:"):
                return int(line.split()[1])
    return 0


def _read(descriptor: int, at: int, stop: int) -> None:
    while at < stop and (data := os.pread(descriptor, min(pages.CHUNK, stop - at), at)):
        at += len(data)


def _elsewhere(look: Callable[[str, int, int], int], path: str, start: int, stop: int) -> int:
    """Run a function in a process of its own; returns its exit code."""
    child = os.fork()
    if child == 0:
        code = _FAILED
        try:
            code = look(path, start, stop)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _look(path: str, at: int, stop: int) -> int:
    """Open a file afresh and tell whether bytes of it are there, without waiting for them."""
    descriptor, buffer = os.open(path, os.O_RDONLY), memoryview(bytearray(pages.CHUNK))
    if not hasattr(os, "RWF_NOWAIT"):
        return _UNKNOWN
    while at < stop:
        try:
            at += os.preadv(descriptor, [buffer[: stop - at]], at, os.RWF_NOWAIT) or stop
        except BlockingIOError:
            return _GONE
        except OSError:
            return _UNKNOWN
    return _HERE


def _read_afresh(path: str, start: int, stop: int) -> int:
    """Open a file afresh and tell whether bytes of it come from the cache, where the kernel counts those that don't."""
    before = medium_bytes()
    _read(os.open(path, os.O_RDONLY), start, stop)
    return _HERE if medium_bytes() == before else _GONE
