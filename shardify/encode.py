"""Turns a picture file's bytes into what is packed: checks it and, where the settings ask, shrinks and re-encodes it.

Rules of re-encoding: turned upright by EXIF, always three channels of 8 bits (grey is spread, alpha is dropped, 16 bits keep
their upper 8, CMYK becomes RGB), no metadata. What the settings don't change is packed byte for byte, but for the end mark of a
JPEG, which `repair` puts back.
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

from shardify.complaints import check_png, overheard
from shardify.errors import SettingsError
from shardify.faults import is_of_the_machine
from shardify.format.picture import PIXEL_LIMIT, CutPictureError, Picture, PictureError, check_end, probe
from shardify.items import MENDED, Encoded

if TYPE_CHECKING:
    from shardify.config.models import Encode, Resize

DEFAULT_QUALITY = 90  # where re-encoding is asked for and no quality
FIELDS = {"jpeg": "jpg", "png": "png", "webp": "webp"}  # the types that every reader of shards decodes
_JPEG_END = b"\xff\xd9"

_SILENT = 0  # of cv2's log levels
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_LIMIT = 32 * 2**20  # the most that glibc takes


@cache
def _set_up() -> None:
    """Set up a process that encodes, when it begins to: one thread, memory that is kept, no log lines beside our own errors.

    The engine's processes are the parallelism: cv2's own threads would only compete with them. glibc is told to keep the memory
    of pictures: mapped and faulted in anew for each, it takes 2 of the 5 ms that decoding one does.
    """
    cv2.setNumThreads(1)
    for module in (cv2, getattr(cv2.utils, "logging", None)):  # OpenCV 4 has it here, 5 there
        getattr(module, "setLogLevel", lambda level: None)(_SILENT)
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


def check_able(settings: Encode) -> None:
    """Raise SettingsError where this machine's OpenCV can't check as the settings ask."""
    if settings.check == "strict" or settings.repair:
        _make_sure_to_hear()


def encode(data: bytes, settings: Encode) -> Encoded:
    """Return a picture as it is packed; raises PictureError with the cause and the reason where it can't be."""
    _set_up()
    picture, whole = _check(data, settings)
    note = "" if whole is data else MENDED
    if not _is_changed(picture, settings):
        _examine(whole, picture, settings.check)
        return Encoded(FIELDS[picture.kind], whole, picture.kind + note)
    kind = "jpeg" if settings.types == "convert" else picture.kind
    pixels = _shrink(_examine(whole, picture, "strict" if settings.check == "strict" else "decode"), settings.resize)
    return Encoded(FIELDS[kind], _to_bytes(pixels, kind, settings.quality), picture.kind + note)


def forecast(data: bytes, settings: Encode) -> Forecast:
    """Say what `encode` will make of a picture, without encoding; raises PictureError."""
    _set_up()
    picture, whole = _check(data, settings)
    _examine(whole, picture, settings.check)
    exact = not _is_changed(picture, settings)
    width, height = _shrunk_size(picture.width, picture.height, settings.resize) or (picture.width, picture.height)
    kind = picture.kind + ("" if whole is data else MENDED)
    return Forecast(kind, len(whole) * width * height // picture.pixels, exact, len(data))


def _check(data: bytes, settings: Encode) -> tuple[Picture, bytes]:
    """Return what the header says and the bytes, mended where the settings ask; raises PictureError for what can't be packed."""
    picture = probe(data)
    _refuse_bomb(picture, settings.pixels)
    if picture.kind not in FIELDS and settings.types != "convert":
        raise PictureTypeError(f"{picture.kind}, which not every reader of shards decodes; encode.types: convert makes it a JPEG")
    try:
        check_end(data, picture.kind)
    except CutPictureError:
        if not settings.repair or picture.kind != "jpeg":
            raise
        data = _mended(data, picture)
    return picture, data


def _mended(data: bytes, picture: Picture) -> bytes:
    """Return a JPEG with the end mark that it lacks; raises CutPictureError where more than that is missing."""
    whole = data.removesuffix(_JPEG_END[:1]) + _JPEG_END
    try:
        _decode_strictly(whole, picture)
    except PictureError as error:
        raise CutPictureError(f"jpeg of {len(data)} bytes without its end, and not that alone is missing: {error}") from None
    return whole


def check_decodes(data: bytes, *, strict: bool = False, pixels: int = PIXEL_LIMIT) -> None:
    """Decode a picture whole, `strict` without complaint; raises PictureError with the reason where that fails."""
    _set_up()
    picture = probe(data)
    check_end(data, picture.kind)
    _refuse_bomb(picture, pixels)
    _examine(data, picture, "strict" if strict else "decode")


def _examine(data: bytes, picture: Picture, check: str) -> npt.NDArray[np.uint8]:
    """Return the pixels, of a check of the header alone none; raises PictureError."""
    if check == "header":
        return np.zeros((0, 0, 3), np.uint8)
    return _decode_strictly(data, picture) if check == "strict" else _decode(data, picture)


def _decode_strictly(data: bytes, picture: Picture) -> npt.NDArray[np.uint8]:
    """Return what `_decode` does; raises PictureError also where the decoder complains, or sums and lengths don't fit."""
    if picture.kind == "png":
        check_png(data)
    if picture.kind != "jpeg":
        return _decode(data, picture)
    _make_sure_to_hear()
    with overheard() as complaints:
        pixels = _decode(data, picture)
    if complaints:
        raise PictureError(f"jpeg of {picture.width}x{picture.height} that decodes with a complaint: {complaints[0]}")
    return pixels


@cache
def _make_sure_to_hear() -> None:
    """Raise SettingsError where this OpenCV's decoder says nothing of half a picture: a strict check would pass all."""
    noise = np.arange(64 * 64 * 3, dtype=np.uint32).reshape(64, 64, 3) * 2_654_435_761 >> 24
    whole = _to_bytes(noise.astype(np.uint8), "jpeg", 90)
    with overheard() as complaints:
        cv2.imdecode(np.frombuffer(whole[: len(whole) // 2] + _JPEG_END, np.uint8), cv2.IMREAD_COLOR)
    if not complaints:
        raise SettingsError(
            f"OpenCV {opencv_version()} decodes half a JPEG and says nothing of it, so a strict check can't be made here; "
            "use the wheel opencv-python-headless, or check: decode without repair"
        )


def _refuse_bomb(picture: Picture, limit: int) -> None:
    if picture.pixels > limit:
        raise LargePictureError(
            f"{picture.kind} of {picture.width}x{picture.height} pixels; at most {limit} are decoded (encode.pixels)"
        )


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
    """Return BGR pixels, upright as reading in training has them; raises PictureError, whichever way cv2 says no.

    EXIF can be read in several ways where it is odd: one decoder decides for what is packed anew and for what is read as it was.
    """
    try:
        pixels: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except (cv2.error, MemoryError) as error:
        what = f"{picture.kind} of {picture.width}x{picture.height}"
        if is_of_the_machine(error):
            raise MemoryError(f"out of memory, decoding {what}") from None
        raise PictureError(f"{what} that doesn't decode: {getattr(error, 'err', error)}") from None
    if pixels is None:
        raise PictureError(f"{picture.kind} of {picture.width}x{picture.height} that OpenCV {opencv_version()} doesn't decode")
    decoded: npt.NDArray[np.uint8] = pixels
    return decoded


def _shrink(pixels: npt.NDArray[np.uint8], resize: Resize | None) -> npt.NDArray[np.uint8]:
    size = _shrunk_size(pixels.shape[1], pixels.shape[0], resize)
    return pixels if size is None else np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), np.uint8)


def _to_bytes(bgr: Any, kind: str, quality: int | None) -> bytes:
    """Encode BGR pixels; quality is JPEG's and WebP's (PNG is lossless)."""
    flags = {"jpeg": cv2.IMWRITE_JPEG_QUALITY, "webp": cv2.IMWRITE_WEBP_QUALITY}
    options = [flags[kind], quality or DEFAULT_QUALITY] if kind in flags else []
    try:
        done, data = cv2.imencode(f".{FIELDS[kind]}", bgr, options)
    except cv2.error as error:
        if is_of_the_machine(error):
            raise MemoryError(f"out of memory, writing {kind}") from None
        raise PictureError(f"OpenCV can't write it as {kind}: {error.err}") from None
    if not done:
        raise PictureError(f"OpenCV can't write it as {kind}")
    return data.tobytes()
