"""Says what a path lies on (file system, mount, disk), and which share of its files is in memory now."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardify import machine

_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "virtiofs", "beegfs", "gpfs", "afs", "sshfs")
_LAYERS = ("overlay", "aufs", "unionfs")
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Medium:
    """What a path lies on: its mount point, file system and source ("/dev/sda1", "server:/data"); the disk where there is one.

    `rotational` is what the kernel says of the disk; None where there is none or it isn't seen. `kind` says it in words.
    """

    mount: str
    filesystem: str
    source: str
    disk: str | None
    rotational: bool | None

    @property
    def is_memory(self) -> bool:
        """Whether files always lie in memory."""
        return self.filesystem in _MEMORY

    @property
    def has_own_cache(self) -> bool:
        """Whether something beyond this kernel's page cache (a server, another process) may hold files in memory."""
        return self.filesystem.partition(".")[0] in ("fuse", "fuseblk") or self.filesystem in _NETWORK

    @property
    def kind(self) -> str:
        """What it is, in a word or two."""
        if self.is_memory:
            return "memory"
        if self.filesystem in _NETWORK:
            return "network"
        if self.filesystem.partition(".")[0] == "fuse":
            return "a user-space file system (FUSE)"
        if self.rotational is None:
            return "layers of other file systems" if self.filesystem in _LAYERS else "unknown"
        return "rotating disk" if self.rotational else "no rotating disk (SSD, NVMe or virtual)"


def find(path: Path, mounts: Path = _MOUNTS) -> Medium:
    """Return what an existing path lies on; what can't be told is "" or None."""
    real = path.resolve()
    device = real.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    best, best_rank = ("", "", ""), (-1, False)
    lines: list[str] = []
    with suppress(OSError):
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    for line in lines:  # "31 23 0:27 <root> <mount point> rw - ext4 /dev/sda1 rw"; later ones hide earlier ones
        left, _, right = line.partition(" - ")
        (_, _, mounted, _, point, *_), (kind, source, *_) = left.split(" "), right.split(" ")
        where = _unescaped(point)
        rank = (len(Path(where).parts), mounted == number)
        if real.is_relative_to(where) and rank >= best_rank:
            best, best_rank = (where, kind, _unescaped(source)), rank
    disk = machine.disk_of(device)
    if disk.rotational is None and best[2].startswith("/dev/"):  # btrfs and others have device numbers of their own
        with suppress(OSError):
            disk = machine.disk_of(Path(best[2]).stat().st_rdev)
    return Medium(*best, None if disk.rotational is None else disk.name, disk.rotational)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def cached_share(paths: Sequence[str]) -> float | None:
    """Return the share (0 to 1) of the files' pages that is in the page cache now; None where that can't be told.

    Only files that this user owns or may write count: of others' the kernel says that all of them are (mincore, since Linux 5.2).
    """
    pages = held = 0
    for path in paths:
        with suppress(OSError):
            found = _resident(path)
            if found is not None:
                held, pages = held + found[0], pages + found[1]
    return held / pages if pages else None


def _resident(path: str) -> tuple[int, int] | None:
    """Return how many pages of a file are in memory, of how many; None for what is empty or another user's."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        state = os.fstat(descriptor)
        if not state.st_size or not (state.st_uid == os.geteuid() or os.access(path, os.W_OK, effective_ids=True)):
            return None
        return _mincore(descriptor, state.st_size)
    finally:
        os.close(descriptor)


def _mincore(descriptor: int, size: int) -> tuple[int, int] | None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)  # maps, reads nothing
    if address == _MAP_FAILED:
        return None
    try:
        pages = -(-size // mmap.PAGESIZE)
        vector = ctypes.create_string_buffer(pages)
        if libc.mincore(address, size, vector):
            return None
        return sum(byte & 1 for byte in vector.raw[:pages]), pages
    finally:
        libc.munmap(address, size)
