"""Finds what is wrong with a picture that decodes all the same: what a decoder says on stderr, and PNG's own sums and lengths.

A JPEG whose data ends early, or in which a bit has flipped, decodes: what is missing becomes grey, what is wrong becomes noise, and
libjpeg says so by a line on stderr alone. So that line is what a strict check listens for.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardify.format.picture import CutPictureError, PictureError

# What libjpeg says where the pixels aren't those of the camera (its jerror.h). Other lines are of metadata.
_COMPLAINT = re.compile(
    rb"(?:Corrupt JPEG data|Premature end of JPEG file|Inconsistent progression sequence|Invalid SOS parameters)[^\r\n]*"
)
_STDERR = 2
_PIECE = 1 << 16
_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a PNG's pixel, by its color type
# Adam7: in x every how many pixels from which one on, and in y.
_PASSES = ((8, 0, 8, 0), (8, 4, 8, 0), (4, 0, 8, 4), (4, 2, 4, 0), (2, 0, 4, 2), (2, 1, 2, 0), (1, 0, 2, 1))
_lock = threading.Lock()


@contextmanager
def overheard() -> Iterator[list[str]]:
    """Listen to what C code of this process says on stderr meanwhile: the list has its complaints when the block ends.

    Anything else, such as another thread's progress bar, is passed on to stderr then. One block at a time listens.
    """
    heard: list[str] = []
    with _lock, tempfile.TemporaryFile() as caught:
        with suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        try:
            before = os.dup(_STDERR)
        except OSError:  # closed, as a daemon has it
            before = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(caught.fileno(), _STDERR)
            try:
                yield heard
            finally:
                os.dup2(before, _STDERR)
                caught.seek(0)
                said = caught.read()
                heard += [complaint.decode("ascii", "replace") for complaint in _COMPLAINT.findall(said)]
                _pass_on(_COMPLAINT.sub(b"", said).lstrip(b"\r\n") if heard else said)
        finally:
            os.close(before)


def _pass_on(said: bytes) -> None:
    with suppress(OSError):
        while said:
            said = said[os.write(_STDERR, said) :]


def check_png(data: bytes) -> None:
    """Check a PNG's chunks against their sums, and that its pixels' data is all there and no more; nothing is kept of it.

    Raises CutPictureError, and PictureError with what doesn't fit.
    """
    at, wanted, filled, unpack = 8, -1, 0, zlib.decompressobj()
    while True:
        if at + 12 > len(data):
            raise CutPictureError(f"png of {len(data)} bytes that ends inside its chunks")
        length, kind = struct.unpack_from(">I4s", data, at)
        if at + 12 + length > len(data):
            raise CutPictureError(f"png of {len(data)} bytes that ends inside a chunk")
        body = memoryview(data)[at + 8 : at + 8 + length]
        if zlib.crc32(body, zlib.crc32(kind)) != struct.unpack_from(">I", data, at + 8 + length)[0]:
            raise PictureError(f"png whose chunk {kind.decode('latin-1')!r} at byte {at} doesn't fit its checksum")
        if kind == b"IHDR":
            wanted = _png_bytes(bytes(body))
        elif kind == b"IDAT":
            filled += _unpacked(unpack, bytes(body), wanted - filled)
        elif kind == b"IEND":
            break
        at += 12 + length
    if filled < wanted or wanted < 0:
        raise CutPictureError(f"png with {filled} of its {max(wanted, 0)} bytes of pixels")


def _unpacked(unpack: zlib._Decompress, packed: bytes, wanted: int) -> int:
    """Return how many bytes a piece of the stream unpacks to, counted no further than what is wanted; none of it is kept."""
    count = 0
    try:
        while count < wanted:
            piece = len(unpack.decompress(packed, _PIECE))
            packed = unpack.unconsumed_tail
            count += piece
            if not packed and piece < _PIECE:
                break
    except zlib.error as error:
        raise PictureError(f"png whose pixels don't unpack ({error})") from None
    return count


def _png_bytes(header: bytes) -> int:
    """Return how many bytes the pixels of a PNG unpack to, with each row's filter byte."""
    if len(header) != 13 or header[9] not in _SAMPLES:
        raise PictureError("png with a header that can't be true")
    width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits = depth * _SAMPLES[color]
    if not interlaced:
        return int(height * (1 + (width * bits + 7) // 8))
    total = 0
    for x_step, x_start, y_step, y_start in _PASSES:
        columns, rows = -(-(width - x_start) // x_step), -(-(height - y_start) // y_step)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total
