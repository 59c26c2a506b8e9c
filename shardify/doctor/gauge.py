"""Measures how fast pieces of files are read from a disk: at random by how many are asked for at once, and one after the other.

No file is changed. What is measured is put out of the page cache first (POSIX_FADV_DONTNEED drops a file's data, not its name and
inode; `drop_caches` drops all of the machine's).
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from shardify.errors import SettingsError, StorageError
from shardify.fiemap import first_block
from shardify.machine import advise

T = TypeVar("T")

_CHUNK = 4 * 2**20
_FIRST = 4096  # what cv2.imread asks for first: the kernel then reads on in steps of 16, 32, 64 KiB
_AHEAD = 16  # files whose pages are asked for before they are read
_BLOCK = 4096
_DROP = Path("/proc/sys/vm/drop_caches")
_DEVICES = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a file: `size` bytes from `offset`."""

    path: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Reads:
    """Random reads: how many were asked for at once, how many a second came, their mean bytes, each one's seconds in order."""

    depth: int
    per_second: float
    mean_bytes: int
    seconds: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Stream:
    """Sequential reading: bytes a second, and of what ("shards", "disk", "files")."""

    bytes_per_second: float
    source: str


def drop_caches() -> None:
    """Write back and empty the whole machine's cache: pages, names, inodes.

    Raises SettingsError without the right to, StorageError where the system has no such thing.
    """
    try:
        with _DROP.open("w") as file:
            os.sync()  # what isn't written back stays
            file.write("3")
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise SettingsError(
                f"{_DROP}: {error.strerror}; --drop-caches needs root, and not that of a container: use sudo, or leave it out"
            ) from None
        raise StorageError(f"{_DROP}: {error.strerror}; leave --drop-caches out") from error


def evict(paths: Sequence[str], seconds: float, troubles: list[tuple[str, str]]) -> list[Span]:
    """Drop the data of as many files as `seconds` allow from the page cache; returns them whole, without the empty ones.

    Those that can't be read go to `troubles` as (path, cause). What isn't on the disk yet stays (`write_back`), and so does what
    lies in memory or is mapped by a program.
    """
    if not hasattr(os, "posix_fadvise"):
        raise StorageError(
            "this system lets no program put files out of its page cache (posix_fadvise), so a cold disk can't be measured; run "
            "`shardify doctor` under Linux"
        )
    spans: list[Span] = []

    def drop(path: str) -> None:
        try:
            size = _drop(Span(path, 0, 0))
        except OSError as error:
            troubles.append((path, error.strerror or str(error)))
        else:
            spans.extend([Span(path, 0, size)] if size else [])

    _each(drop, paths, _AHEAD, seconds)
    return spans


def write_back() -> None:
    """Have all that is still to be written brought to the disks.

    One sync for all: fdatasync, file by file, flushes the disk's own cache each time, 2.5 ms for a file with nothing to write.
    """
    os.sync()


def evict_again(spans: Iterable[Span]) -> None:
    """Drop the pages of pieces of files."""
    for span in spans:
        with suppress(OSError):  # gone since
            _drop(span)


def read_random(spans: Sequence[Span], depth: int, seconds: float, *, whole: bool = False) -> Reads | None:
    """Read pieces in their order, `depth` at once, for `seconds` or until there are no more; None where none could be read.

    A piece is opened by name and read as a decoder reads a file, in steps that grow; `whole` asks for all of it at once.
    """
    done: list[tuple[float, float, int]] = []  # (when, seconds, bytes) of each read

    def read(span: Span) -> None:
        start = time.perf_counter()
        with suppress(OSError):  # gone since, or a bad sector
            size = _read(span, whole=whole)
            done.append((time.perf_counter(), time.perf_counter() - start, size))

    depth = min(depth, max(1, len(spans)))
    start = time.perf_counter()
    ends = _each(read, spans, depth, seconds)
    if not done:
        return None
    # Until the first thread found nothing more to do all were busy; what the others were at counts half.
    full = min(ends) - start
    early = sum(1 for when, _, _ in done if when <= min(ends))
    rate = (early + (len(done) - early) / 2) / full if early >= depth else len(done) / (max(ends) - start)
    return Reads(depth, rate, sum(size for _, _, size in done) // len(done), tuple(spent for _, spent, _ in done))


def read_forward(spans: Sequence[Span], seconds: float, source: str) -> Stream | None:
    """Read pieces one after the other, asking ahead, for `seconds` or until there are no more; None where none could be read."""
    start, read = time.perf_counter(), 0
    for first in range(0, len(spans), _AHEAD):
        batch = spans[first : first + _AHEAD]
        with suppress(OSError):
            for span in (span for span in batch[1:] if span.size <= _CHUNK):  # else only seeks to their first MiB
                _ask(span)
        for span in batch:
            with suppress(OSError):
                read += _read_forward(span, start + seconds)
        if time.perf_counter() > start + seconds:
            break
    return Stream(read / (time.perf_counter() - start), source) if read else None


def on_disk(spans: Sequence[Span], size: int) -> Span | None:
    """Return `size` bytes of the disk itself, around where these files begin: there a packed set could lie; less on a smaller disk.

    None without the right to read it (root), without a block device, and where the file system doesn't say where a file lies.
    """
    node = _node(spans[0].path) if spans else None
    places = sorted(place for span in spans if (place := _place(span.path)) is not None)
    if node is None or not places or not os.access(node, os.R_OK):
        return None
    with suppress(OSError):
        descriptor = os.open(node, os.O_RDONLY | os.O_CLOEXEC)
        try:
            end = os.lseek(descriptor, 0, os.SEEK_END)
        finally:
            os.close(descriptor)
        start = max(0, min(places[len(places) // 2] - size // 2, end - size))
        return Span(node, start - start % _BLOCK, min(size, end - start))
    return None


def read_each(spans: Iterable[Span]) -> Iterator[bytes]:
    """Yield the bytes of each piece that can be read."""
    for span in spans:
        with suppress(OSError):
            descriptor = _open(span.path)
            try:
                data = os.pread(descriptor, span.size, span.offset)
            finally:
                os.close(descriptor)
            yield data


def in_disk_order(spans: Sequence[Span]) -> list[Span]:
    """Return the files in the order in which they lie on the disk, where the file system tells, else by inode."""
    known: list[tuple[int, int, Span]] = []
    for span in spans:
        with suppress(OSError):
            place = _place(span.path)
            known.append((place is None, place if place is not None else Path(span.path).stat().st_ino, span))
    return [span for _, _, span in sorted(known, key=lambda found: found[:2])]


def _each(work: Callable[[T], None], tasks: Iterable[T], threads: int, seconds: float) -> list[float]:
    """Do `work` on tasks in `threads` threads until there are no more or `seconds` are over; returns when each thread ended."""
    waiting = iter(tasks)
    end = time.perf_counter() + seconds

    def go() -> float:
        for task in waiting:  # a list's iterator hands each item to one thread only
            work(task)
            if time.perf_counter() > end:
                break
        return time.perf_counter()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda _: go(), range(threads)))


def _open(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO mustn't block
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def _drop(span: Span) -> int:
    """Put a piece of a file (size 0: to its end) out of the page cache; returns the file's size."""
    descriptor = _open(span.path)
    try:
        advise(descriptor, span.offset, span.size, "DONTNEED")
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _ask(span: Span) -> None:
    """Have the kernel read a piece ahead."""
    descriptor = _open(span.path)
    try:
        advise(descriptor, span.offset, span.size, "WILLNEED")
    finally:
        os.close(descriptor)


def _read(span: Span, *, whole: bool) -> int:
    descriptor = _open(span.path)
    try:
        first = span.size if whole else min(_FIRST, span.size)
        size = len(os.pread(descriptor, first, span.offset))
        return size + (len(os.pread(descriptor, span.size - first, span.offset + first)) if size < span.size else 0)
    finally:
        os.close(descriptor)


def _read_forward(span: Span, end: float) -> int:
    descriptor, read = _open(span.path), 0
    try:
        while read < span.size and (read == 0 or time.perf_counter() < end):
            piece = len(os.pread(descriptor, min(_CHUNK, span.size - read), span.offset + read))
            if not piece:
                break
            read += piece
    finally:
        os.close(descriptor)
    return read


def _place(path: str) -> int | None:
    descriptor = _open(path)
    try:
        return first_block(descriptor)
    finally:
        os.close(descriptor)


def _node(path: str) -> str | None:
    """Return the device file of the block device that a file lies on."""
    device = Path(path).stat().st_dev
    with suppress(OSError):
        for line in (_DEVICES / f"{os.major(device)}:{os.minor(device)}" / "uevent").read_text().splitlines():
            if line.startswith("DEVNAME="):
                return f"/dev/{line.removeprefix('DEVNAME=')}"
    return None
