"""Tells the fault of a picture from that of the machine: the one place where packing decides it.

A picture's may be left out where that is asked for (`losses`); the machine's ends a build, whatever may be left out. EIO is a
picture's: one bad sector takes one file. A disk that fails takes many, and the build's bound on what it leaves out ends it.
"""

from __future__ import annotations

import errno

_NUMBERS = frozenset(  # descriptors or memory ran out, a mount or a device is gone
    (
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ENODEV,
        errno.ENXIO,
        errno.ETIMEDOUT,
    )
)
_NO_MEMORY = -4  # the code of a cv2.error for which there is no room: cv2.Error.StsNoMem


def is_of_the_machine(error: BaseException) -> bool:
    """Tell whether an error says nothing of the file that was read, or of the picture in it."""
    if isinstance(error, OSError):
        return error.errno in _NUMBERS
    return isinstance(error, MemoryError) or (type(error).__name__ == "error" and getattr(error, "code", 0) == _NO_MEMORY)
