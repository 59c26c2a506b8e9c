"""Turns a picture file's bytes into what is packed: checks it and, where the settings ask, shrinks and re-encodes it.

Rules of re-encoding: turned upright by EXIF, always three channels of 8 bits (grey is spread, alpha is dropped, 16 bits keep
their upper 8, CMYK becomes RGB), no metadata. What the settings don't change is packed byte for byte.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import numpy.typing as npt

from shardify.format.picture import Picture, PictureError, check_end, probe
from shardify.items import Encoded

if TYPE_CHECKING:
    from shardify.config.models import Encode, Resize

PIXEL_LIMIT = 200_000_000  # a decoded picture takes 3 bytes a pixel in each process: 600 MB at most
DEFAULT_QUALITY = 90  # where re-encoding is asked for and no quality
FIELDS = {"jpeg": "jpg", "png": "png", "webp": "webp"}  # the types that every reader of shards decodes
_TURNS = {  # EXIF's orientation -> what sets the picture upright: transpose first?, then cv2.flip's code (None: no flip)
    2: (False, 1),
    3: (False, -1),
    4: (False, 0),
    5: (True, None),
    6: (True, 1),
    7: (True, -1),
    8: (True, 0),
}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_LIMIT = 32 * 2**20  # the most that glibc takes


@cache
def _set_up() -> None:
    """Set up a process that encodes, when it begins to: one thread, and memory that is kept.

    The engine's processes are the parallelism: cv2's own threads would only compete with them. glibc is told to keep the memory
    of pictures: mapped and faulted in anew for each, it takes 2 of the 5 ms that decoding one does.
    """
    cv2.setNumThreads(1)
    with suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MMAP_LIMIT)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


class LargePictureError(PictureError):
    """A picture whose header declares more pixels than are decoded."""

    cause = "too large"


class PictureTypeError(PictureError):
    """A picture of a type that isn't packed as it is."""

    cause = "type"


def opencv_version() -> str:
    """Return the version of OpenCV, which decides the bytes of what is re-encoded."""
    return str(cv2.__version__)


def to_jpeg(rgb: npt.NDArray[np.uint8], quality: int) -> bytes:
    """Return an RGB picture (height, width, 3) as a JPEG of the given quality (1 to 100)."""
    _set_up()
    return _to_bytes(cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR), "jpeg", quality)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a picture will be: its true type, its bytes as packed (`exact`, or estimated), its bytes in the source."""

    kind: str
    bytes: int
    exact: bool
    source_bytes: int


def encode(data: bytes, settings: Encode) -> Encoded:
    """Return a picture as it is packed; raises PictureError with the cause and the reason where it can't be."""
    _set_up()
    picture = _check(data, settings)
    if not _is_changed(picture, settings):
        if settings.check == "decode":
            _decode(data, picture)
        return Encoded(FIELDS[picture.kind], data, picture.kind)
    kind = "jpeg" if settings.types == "convert" else picture.kind
    pixels = _shrink(_decode(data, picture), settings.resize)
    return Encoded(FIELDS[kind], _to_bytes(_turn(pixels, picture), kind, settings.quality), picture.kind)


def forecast(data: bytes, settings: Encode) -> Forecast:
    """Say what `encode` will make of a picture, without encoding; raises PictureError."""
    _set_up()
    picture = _check(data, settings)
    if settings.check == "decode":
        _decode(data, picture)
    exact = not _is_changed(picture, settings)
    width, height = _shrunk_size(picture.width, picture.height, settings.resize) or (picture.width, picture.height)
    return Forecast(picture.kind, len(data) * width * height // picture.pixels, exact, len(data))


def _check(data: bytes, settings: Encode) -> Picture:
    """Return what the header says; raises PictureError for what can't be packed under the settings."""
    picture = probe(data)
    check_end(data, picture.kind)
    if picture.pixels > PIXEL_LIMIT:
        raise LargePictureError(_too_large(picture))
    if picture.kind not in FIELDS and settings.types != "convert":
        raise PictureTypeError(f"{picture.kind}, which not every reader of shards decodes; encode.types: convert makes it a JPEG")
    return picture


def check_decodes(data: bytes) -> None:
    """Decode a picture whole; raises PictureError with the reason where that fails."""
    _set_up()
    picture = probe(data)
    check_end(data, picture.kind)
    if picture.pixels > PIXEL_LIMIT:
        raise LargePictureError(_too_large(picture))
    _decode(data, picture)


def _too_large(picture: Picture) -> str:
    return f"{picture.kind} of {picture.width}x{picture.height} pixels; at most {PIXEL_LIMIT} are decoded"


def _is_changed(picture: Picture, settings: Encode) -> bool:
    converted = settings.types == "convert" and picture.kind != "jpeg"
    return converted or settings.quality is not None or _shrunk_size(picture.width, picture.height, settings.resize) is not None


def _shrunk_size(width: int, height: int, resize: Resize | None) -> tuple[int, int] | None:
    """Return the size that `resize` asks for, None where the picture is no larger."""
    if resize is None:
        return None
    target, side = (resize.short_side, min(width, height)) if resize.short_side else (resize.long_side, max(width, height))
    if target is None or side <= target:
        return None
    return max(1, (width * target + side // 2) // side), max(1, (height * target + side // 2) // side)


def _decode(data: bytes, picture: Picture) -> npt.NDArray[np.uint8]:
    """Return BGR pixels as stored (not turned); raises PictureError, whichever way cv2 says no."""
    try:
        # IGNORE_ORIENTATION: probe reads EXIF the same way for every version of OpenCV (TIFF's own tag cv2 heeds either way).
        pixels: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except (cv2.error, MemoryError) as error:
        reason = str(getattr(error, "err", "") or "out of memory")
        raise PictureError(f"{picture.kind} of {picture.width}x{picture.height} that doesn't decode: {reason}") from None
    if pixels is None:
        raise PictureError(f"{picture.kind} of {picture.width}x{picture.height} that OpenCV {opencv_version()} doesn't decode")
    decoded: npt.NDArray[np.uint8] = pixels
    return decoded


def _shrink(pixels: npt.NDArray[np.uint8], resize: Resize | None) -> npt.NDArray[np.uint8]:
    size = _shrunk_size(pixels.shape[1], pixels.shape[0], resize)
    return pixels if size is None else np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), np.uint8)


def _turn(pixels: npt.NDArray[np.uint8], picture: Picture) -> npt.NDArray[np.uint8]:
    transposed, flip = _TURNS.get(picture.orientation, (False, None))
    turned: Any = cv2.transpose(pixels) if transposed else pixels
    return np.asarray(turned if flip is None else cv2.flip(turned, flip), np.uint8)


def _to_bytes(bgr: Any, kind: str, quality: int | None) -> bytes:
    """Encode BGR pixels; quality is JPEG's and WebP's (PNG is lossless)."""
    flags = {"jpeg": cv2.IMWRITE_JPEG_QUALITY, "webp": cv2.IMWRITE_WEBP_QUALITY}
    options = [flags[kind], quality or DEFAULT_QUALITY] if kind in flags else []
    try:
        done, data = cv2.imencode(f".{FIELDS[kind]}", bgr, options)
    except cv2.error as error:
        raise PictureError(f"OpenCV can't write it as {kind}: {error.err}") from None
    if not done:
        raise PictureError(f"OpenCV can't write it as {kind}")
    return data.tobytes()
