"""Tells from a picture's bytes what it is: its true type, its size in pixels and how EXIF turns it; nothing is decoded.

Every walk over segments, chunks or boxes is bounded by the bytes at hand and by `_STEPS`; declared sizes are never allocated.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardify.errors import FormatError

PIXEL_LIMIT = 200_000_000  # where no other is set: a decoded picture takes 3 bytes a pixel in each process, 600 MB at most
_STEPS = 10_000  # segments, chunks or boxes before the pixels; real files have tens, an ICC profile or XMP a few hundred
_UPRIGHT = 1
_MARKER = re.compile(rb"\xff([^\x00\xff])")  # what isn't a marker before it is skipped, as libjpeg does
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_AVIF = (b"avif", b"avis")
_HEIC = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
_JXL_BOX = b"\0\0\0\x0cJXL \r\n\x87\n"
_OTHERS = (
    (b"%PDF", "a PDF document"),
    (b"8BPS", "a Photoshop document"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 picture"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"II\x2b\0", "a BigTIFF picture"),
    (b"MM\0\x2b", "a BigTIFF picture"),
    (b"\0\x05\x16\x07", "a macOS companion file (AppleDouble)"),
)


class PictureError(FormatError):
    """Bytes that are no usable picture; `cause` is a short fixed word to count by, the message the reason in full."""

    cause = "damaged"


class EmptyPictureError(PictureError):
    """Zero bytes."""

    cause = "empty"


class UnknownPictureError(PictureError):
    """Text, HTML or a type that isn't known here."""

    cause = "not a picture"


class CutPictureError(PictureError):
    """A picture that ends too early."""

    cause = "cut"


@dataclass(frozen=True, slots=True)
class Picture:
    """What a picture's header says: type ("jpeg", "png", "webp", "gif", "bmp", "tiff", "avif", "heic", "jxl"), size, orientation.

    `width` and `height` are pixels as stored; `orientation` is EXIF's (1 to 8, 1 is upright) of a JPEG, else 1: a decoder at a
    scale must know it before it decodes.
    """

    kind: str
    width: int
    height: int
    orientation: int = _UPRIGHT

    @property
    def pixels(self) -> int:
        """The number of pixels."""
        return self.width * self.height


def probe(data: bytes) -> Picture:
    """Return what the header of a picture says, from its bytes or from enough of their beginning.

    Raises EmptyPictureError, UnknownPictureError (text, HTML, other types: named), CutPictureError (the header ends too early)
    and PictureError (a header that can't be true).
    """
    if not data:
        raise EmptyPictureError("zero bytes")
    kind, measure = _recognize(data)
    try:
        picture = measure(data)
    except (struct.error, IndexError):
        raise CutPictureError(f"{kind} of {len(data)} bytes that ends inside its header") from None
    if picture.width < 1 or picture.height < 1:
        raise PictureError(f"{kind} whose header says {picture.width}x{picture.height} pixels")
    return picture


def check_end(data: bytes, kind: str) -> None:
    """Check cheaply that a picture's end is there: JPEG's and PNG's end marks, WebP's stated length.

    A JPEG without its last two bytes still opens in some readers (cv2.imread) and not in others (cv2.imdecode, Pillow).
    Raises CutPictureError; other types pass.
    """
    if kind == "jpeg":
        # At the very end it stands in nearly all; others may have something behind it (a second walk costs 45 us).
        whole = data.endswith(b"\xff\xd9") or data.rfind(b"\xff\xd9", _jpeg_walk(data)[1]) >= 0
    elif kind == "png":
        whole = data.rfind(b"IEND") >= 0
    elif kind == "webp":
        whole = len(data) >= struct.unpack_from("<I", data, 4)[0] + 8
    else:
        whole = True
    if not whole:
        raise CutPictureError(f"{kind} of {len(data)} bytes without its end: the file was cut; copy it again")


def _recognize(data: bytes) -> tuple[str, Callable[[bytes], Picture]]:
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg", lambda d: _jpeg_walk(d)[0]
    brands = _brands(data)
    known: tuple[tuple[bool, str, Callable[[bytes], Picture]], ...] = (
        (data.startswith(b"\x89PNG\r\n\x1a\n"), "png", _png),
        (data[:4] == b"RIFF" and data[8:12] == b"WEBP", "webp", _webp),
        (data[:6] in (b"GIF87a", b"GIF89a"), "gif", lambda d: Picture("gif", *struct.unpack_from("<HH", d, 6))),
        (data.startswith(b"BM") and data[6:10] == bytes(4), "bmp", _bmp),
        (data[:4] in (b"II*\0", b"MM\0*"), "tiff", _tiff),
        (any(b in _AVIF for b in brands), "avif", lambda d: _heif(d, "avif")),
        (any(b in _HEIC for b in brands), "heic", lambda d: _heif(d, "heic")),
        (data.startswith((_JXL_BOX, b"\xff\x0a")), "jxl", _jxl),
    )
    for fits, kind, measure in known:
        if fits:
            return kind, measure
    raise UnknownPictureError(_name_other(data, brands))


def _name_other(data: bytes, brands: list[bytes]) -> str:
    for magic, name in _OTHERS:
        if data.startswith(magic):
            return f"{name}, not a picture that can be packed"
    if brands:
        return "a video or another ISO media file, not a picture"
    if not any(data[:4096]):
        return "zeros, not a picture: the file has holes (an unfinished download or copy?)"
    start = data[:512].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"<"):
        return "HTML or XML text, not a picture (an error page saved as one?)"
    if all(31 < byte < 127 or byte in b"\t\n\r\f" for byte in data[:512]):
        return f"text, not a picture: it begins with {data[:40].decode('ascii')!r}"
    return f"not a picture of a known type: it begins with {data[:8].hex(' ')}"


def jpeg_sides(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return height and width of a JPEG as its frame states them, before any turning; None where `probe` has to look closer.

    It walks over segments without opening them, and no further than the frame: `probe` also looks for the orientation.
    """
    at, end = 2, len(data) - 9
    for _ in range(_STEPS):
        if at > end or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker in _FRAMES:
            return data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
        length = data[at + 2] << 8 | data[at + 3]
        if length < 2 or not 0xC0 <= marker <= 0xFE or 0xD0 <= marker <= 0xDA:
            return None
        at += 2 + length
    return None


def _jpeg_walk(data: bytes) -> tuple[Picture, int]:
    """Walk a JPEG's segments; returns its picture and where its first scan starts."""
    at, orientation, size = 2, _UPRIGHT, (0, 0)
    for _ in range(_STEPS):
        found = _MARKER.search(data, at)
        if found is None:
            break
        at, marker = found.end(), found[1][0]
        if marker == 0xD9:
            raise PictureError("jpeg that ends before its picture begins")
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:
            continue
        length = struct.unpack_from(">H", data, at)[0]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            size = width, height
        elif marker == 0xDA:
            return Picture("jpeg", *size, orientation), at
        elif marker == 0xE1 and data[at + 2 : at + 8] == b"Exif\0\0" and orientation == _UPRIGHT:
            orientation = _exif(data[at + 8 : at + length])
        at += max(length, 2)
    else:
        raise PictureError(f"jpeg with more than {_STEPS} segments before its picture")
    raise CutPictureError(f"jpeg of {len(data)} bytes that ends before its picture begins")


def _png(data: bytes) -> Picture:
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise PictureError("png that doesn't begin with IHDR")
    return Picture("png", width, height)


def _webp(data: bytes) -> Picture:
    chunk = data[12:16]
    if chunk == b"VP8 ":
        if len(data) >= 26 and data[23:26] != b"\x9d\x01\x2a":
            raise PictureError("webp without the start code of its picture")
        width, height = struct.unpack_from("<HH", data, 26)
        return Picture("webp", width & 0x3FFF, height & 0x3FFF)
    if chunk == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return Picture("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if chunk != b"VP8X":
        raise PictureError(f"webp that begins with a chunk {chunk!r}")
    wide, wide_high, high, high_high = struct.unpack_from("<4xHBHB", data, 20)
    return Picture("webp", (wide | wide_high << 16) + 1, (high | high_high << 16) + 1)


def _bmp(data: bytes) -> Picture:
    if struct.unpack_from("<I", data, 14)[0] == 12:
        return Picture("bmp", *struct.unpack_from("<HH", data, 18))
    width, height = struct.unpack_from("<ii", data, 18)
    return Picture("bmp", width, abs(height))


def _tiff(data: bytes) -> Picture:
    tags = _ifd(data, strict=(256, 257))
    if 256 not in tags or 257 not in tags:
        raise CutPictureError(f"tiff of {len(data)} bytes whose directory isn't in them")
    return Picture("tiff", tags[256], tags[257])


def _ifd(data: bytes, strict: tuple[int, ...] = ()) -> dict[int, int]:
    """Return the first directory's numbers of one value, by tag, of repeated ones the first; what lies beyond the data is left out.

    Raises PictureError where one of the tags `strict` is repeated, or no plain number: a decoder may read another one than this.
    """
    order = "<" if data[:2] == b"II" else ">"
    start = struct.unpack_from(f"{order}I", data, 4)[0]
    count = struct.unpack_from(f"{order}H", data, start)[0]
    tags: dict[int, int] = {}
    for at in range(start + 2, min(start + 2 + 12 * count, len(data) - 11), 12):
        tag, kind, values = struct.unpack_from(f"{order}HHI", data, at)
        plain = values == 1 and kind in (3, 4)
        if tag in strict and (not plain or tag in tags):
            raise PictureError(f"tiff whose header gives a side as no plain number, or twice (tag {tag})")
        if plain and tag not in tags:
            tags[tag] = struct.unpack_from(order + ("H" if kind == 3 else "I"), data, at + 8)[0]
    return tags


def _exif(data: bytes) -> int:
    """Return EXIF's orientation; a damaged or absent one is upright, as every viewer has it."""
    if data[:4] not in (b"II*\0", b"MM\0*"):
        return _UPRIGHT
    try:
        orientation = _ifd(data).get(0x0112, _UPRIGHT)
    except struct.error:
        return _UPRIGHT
    return orientation if 1 <= orientation <= 8 else _UPRIGHT


def _boxes(data: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the ISO media boxes between two positions: type, where the content starts, where it stops."""
    for _ in range(_STEPS):
        if start + 8 > min(stop, len(data)):
            return
        length, kind = struct.unpack_from(">I4s", data, start)
        content = start + 8
        if length == 1:
            length = struct.unpack_from(">Q", data, content)[0]
            content += 8
        end = start + length if length else stop
        if end < content:
            return
        yield kind, content, min(end, stop)
        start = end


def _brands(data: bytes) -> list[bytes]:
    if data[4:8] != b"ftyp":
        return []
    end = min(int.from_bytes(data[:4], "big"), 8 + 4 * 64)
    return [data[8:12], *(data[at : at + 4] for at in range(16, end - 3, 4))]


def _heif(data: bytes, kind: str) -> Picture:
    """Measure an AVIF or HEIC: the largest of its pictures (the others are tiles, thumbnails, alpha)."""
    sizes: list[tuple[int, int]] = []
    spans = [(0, len(data))]
    for name, skip in ((b"meta", 4), (b"iprp", 0), (b"ipco", 0)):
        spans = [(first + skip, last) for span in spans[:1] for box, first, last in _boxes(data, *span) if box == name]
    for span in spans[:1]:
        sizes = [struct.unpack_from(">II", data, first + 4) for box, first, _ in _boxes(data, *span) if box == b"ispe"]
    if not sizes:
        raise CutPictureError(f"{kind} of {len(data)} bytes whose size isn't in them")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    return Picture(kind, width, height)


def _jxl(data: bytes) -> Picture:
    stream = data
    if data.startswith(_JXL_BOX):
        found = [first + (4 if box == b"jxlp" else 0) for box, first, _ in _boxes(data, 0, len(data)) if box in (b"jxlc", b"jxlp")]
        stream = data[found[0] : found[0] + 16] if found else b""
    if len(stream) < 12:
        raise CutPictureError(f"jxl of {len(data)} bytes that ends inside its header")
    return Picture("jxl", *_jxl_size(int.from_bytes(stream[2:12], "little")))


def _jxl_size(bits: int) -> tuple[int, int]:
    """Read a JPEG XL size header (ISO/IEC 18181-1, D.2) from its bits, least significant first."""

    def take(count: int) -> int:
        nonlocal bits
        value, bits = bits & ((1 << count) - 1), bits >> count
        return value

    small = take(1)

    def side() -> int:
        return 8 * (take(5) + 1) if small else take((9, 13, 18, 30)[take(2)]) + 1

    height = side()
    ratio = take(3)
    if ratio:
        across, down = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))[ratio - 1]
        return height * across // down, height
    return side(), height
