"""Asks a file system where on its disk a file begins (Linux's FIEMAP; the kernel's Documentation/filesystems/fiemap.rst)."""

from __future__ import annotations

import fcntl
import struct

_FS_IOC_FIEMAP = 0xC020660B
_REQUEST = struct.Struct("=QQIIII")  # start, length, flags, extents mapped, extents asked for, reserved
_EXTENT = struct.Struct("=QQQQQIIII")  # logical, physical, length, 2 reserved, flags, 3 reserved
_FIRST = _REQUEST.pack(0, 1, 0, 0, 1, 0) + bytes(_EXTENT.size)  # no FLAG_SYNC: that would write dirty files back
_NOWHERE = 0x2 | 0x4 | 0x8 | 0x200 | 0x400  # UNKNOWN, DELALLOC, ENCODED, DATA_INLINE, DATA_TAIL: the address says nothing


def first_block(descriptor: int) -> int | None:
    """Return the byte on the file system's device where an open file's first extent lies.

    None where there is none: an empty file, one not yet written, inline or compressed data, a file system that doesn't tell.
    """
    answer = bytearray(_FIRST)
    try:
        fcntl.ioctl(descriptor, _FS_IOC_FIEMAP, answer)
    except OSError:
        return None
    if _REQUEST.unpack_from(answer)[3] == 0:
        return None
    _, physical, _, _, _, flags, *_ = _EXTENT.unpack_from(answer, _REQUEST.size)
    return None if flags & _NOWHERE else int(physical)
