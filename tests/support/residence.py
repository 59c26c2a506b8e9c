"""What lies in the page cache, and what is needed to try the prefetcher on it: cold files, sets of incompressible samples, mounts."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from packing import PackedSet, pack

PAGE = 4096


@contextlib.contextmanager
def within_memory(most: int) -> Iterator[None]:
    """Fail where this process takes more than `most` bytes more than it has, at whatever moment; what it once had doesn't count."""
    Path("/proc/self/clear_refs").write_text("5")  # its peak is what it has now
    before = _status("VmRSS")
    yield
    taken = _status("VmHWM") - before
    assert taken < most, f"{taken:,} bytes"


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def big_set(folder: Path, count: int = 240, shards: int = 3, size: int = 40_000) -> PackedSet:
    """Pack `count` samples of `size` bytes each, whose bytes follow from their number."""
    return pack(folder, count, shards, make=lambda number: np.random.default_rng(number).bytes(size))


def chill(*paths: Path) -> None:
    """Have the kernel forget the pages of files; skips the test where it doesn't."""
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(resident(path) for path in paths):
        pytest.skip("the pages of files can't be dropped here")


def resident(path: Path, start: int = 0, stop: int | None = None) -> int:
    """Return how many bytes of a file of one's own lie in the page cache, by whole pages (of others' files mincore tells nothing)."""
    size = path.stat().st_size
    first, last = start // PAGE, -(-(size if stop is None else min(stop, size)) // PAGE)
    found = (ctypes.c_ubyte * -(-size // PAGE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(size), found)
        del view
        assert not failed
    return sum(page & 1 for page in found[first:last]) * PAGE


def is_read(path: Path, start: int = 0, stop: int = 0) -> bool:
    """Tell whether some reader has locked a part of [start, stop) of a file; 0 is its end."""
    with path.open("rb") as file:
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, start, stop - start if stop else 0, 0)
        return bool(struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)


def lock_range(descriptor: int, start: int = 0, stop: int = 0, *, free: bool = False) -> None:
    """Lock [start, stop) of an open file as one that reads it, or let it go; 0 is its end."""
    kind = fcntl.F_UNLCK if free else fcntl.F_RDLCK
    asked = struct.pack("hhqqi", kind, os.SEEK_SET, start, stop - start if stop else 0, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, asked)


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is true; a hang is a failure."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it didn't come true"
        time.sleep(0.005)


@contextlib.contextmanager
def mounted(kind: str, point: Path, options: str) -> Iterator[Path]:
    """Mount a file system at `point`; skips the test where that isn't allowed."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounts a file system: needs root")
    point.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", kind, kind, point, "-o", options], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"{kind} can't be mounted here")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", point], check=False, capture_output=True)


@contextlib.contextmanager
def other_disk(folder: Path, megabytes: int = 32) -> Iterator[Path]:
    """A disk of its own, with an ext4, in a file; skips the test where it can't be made."""
    image, point = folder / "disk.img", folder / "disk"
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("mount", "mkfs.ext4")):
        pytest.skip("makes a disk: needs root and mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(megabytes * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    point.mkdir()
    if subprocess.run(["mount", "-o", "loop", image, point], capture_output=True, check=False).returncode:
        pytest.skip("a file can't be mounted here")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", point], check=False, capture_output=True)


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """Make a group of processes with a limit of memory; yields the file that takes a process into it. Skips where that isn't allowed."""
    own = {line.split(":")[1]: line.strip().split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    version_1 = Path("/sys/fs/cgroup/memory")
    parent = (
        version_1 / own.get("memory", "/").lstrip("/")
        if version_1.is_dir()
        else Path("/sys/fs/cgroup") / own.get("", "/").lstrip("/")
    )
    group = (parent if parent.is_dir() else version_1) / f"residence-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("makes a memory cgroup: needs root and its controller")
    try:
        limits = group / ("memory.limit_in_bytes" if version_1.is_dir() else "memory.max")
        try:
            limits.write_text(str(limit))
        except OSError:
            pytest.skip("a cgroup's memory can't be limited here")
        yield group / "cgroup.procs"
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
