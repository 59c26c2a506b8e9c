"""Pictures of every kind that sets hold, made here: sound ones of each format, odd ones, cut ones, and what is no picture.

Run as a program it prints the table of docs/pictures.md.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.decode import decode_image
from pipeline.errors import DecodeError
from shardify import encode
from shardify.config import Encode
from shardify.format.picture import PictureError

SIDES = (60, 80)  # height, width
_END = b"\xff\xd9"


def scene(height: int = SIDES[0], width: int = SIDES[1]) -> npt.NDArray[np.uint8]:
    """Return RGB pixels that no turn, mirror or swap of channels leaves as they are."""
    small = np.random.default_rng(7).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def _saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def photo(**options: Any) -> bytes:
    """Return the scene as a JPEG by Pillow."""
    return _saved(Image.fromarray(scene()), "JPEG", quality=92, **options)


def turned(orientation: int) -> bytes:
    """Return the JPEG with EXIF's orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return photo(exif=exif)


def _cmyk(*, ycck: bool) -> bytes:
    """Return a JPEG of four components as Adobe writes them (inverted); `ycck`: three of them turned into luminance and color."""
    rgb = Image.fromarray(scene())
    parts = (rgb.convert("YCbCr") if ycck else rgb).split()
    black = Image.new("L", rgb.size, 0)
    if ycck:  # Pillow inverts what it writes
        parts = tuple(part.point(lambda value: 255 - value) for part in parts)
    else:
        parts = tuple(part.point(lambda value: 255 - value) for part in parts)
    data = _saved(Image.merge("CMYK", (*parts, black)), "JPEG", quality=95, subsampling=0)
    at = data.index(b"Adobe")
    return data[: at + 11] + bytes([2 if ycck else 0]) + data[at + 12 :]


def _palette(*, transparent: bool) -> bytes:
    picture = Image.fromarray(scene()).quantize(32)
    return _saved(picture, "PNG", **({"transparency": bytes(range(0, 256, 8))} if transparent else {}))


def _alpha(kind: str, **options: Any) -> bytes:
    """Return the scene under an alpha that is 0 in its upper half: its colors are there all the same."""
    picture = Image.fromarray(scene()).convert("RGBA")
    alpha = np.zeros(SIDES, np.uint8)
    alpha[SIDES[0] // 2 :] = 255
    picture.putalpha(Image.fromarray(alpha))
    return _saved(picture, kind, **options)


def _by_cv2(pixels: npt.NDArray[Any], extension: str) -> bytes:
    done, data = cv2.imencode(extension, pixels)
    assert done
    return data.tobytes()


def _deep() -> bytes:
    return _by_cv2(scene()[..., ::-1].astype(np.uint16) * 257, ".png")


def _interlaced() -> bytes:
    """Return a PNG by Adam7, which Pillow and OpenCV read and don't write."""
    pixels, rows = scene(), b""
    for x0, y0, dx, dy in ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)):
        rows += b"".join(b"\0" + row.tobytes() for row in pixels[y0::dy, x0::dx])
    head = struct.pack(">IIBBBBB", SIDES[1], SIDES[0], 8, 2, 0, 0, 1)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    made = b"".join(struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks)
    return b"\x89PNG\r\n\x1a\n" + made


def _frames(kind: str) -> bytes:
    first = Image.fromarray(scene())
    return _saved(first, kind, save_all=True, append_images=[Image.fromarray(255 - scene())], duration=100, lossless=True)


def png_bomb(width: int, height: int) -> bytes:
    """Return a PNG that declares a size and holds nothing of it."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b""))
    made = b"".join(struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks)
    return b"\x89PNG\r\n\x1a\n" + made


def jpeg_bomb(width: int, height: int) -> bytes:
    """Return a JPEG whose frame declares another size than its data has."""
    data = photo()
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def flipped(data: bytes, at: float = 0.6) -> bytes:
    """Return a JPEG in whose pixels' data a byte is wrong."""
    place = int(len(data) * at)
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


def _png_part(*, drop: int = 0, flip: bool = False) -> bytes:
    data = _saved(Image.fromarray(scene()), "PNG")
    if flip:
        at = data.index(b"IDAT") + 400
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    return data[:-drop] if drop else data


def _heif(brand: bytes) -> bytes:
    def box(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I4s", 8 + len(body), kind) + body

    size = box(b"ispe", bytes(4) + struct.pack(">II", SIDES[1], SIDES[0]))
    meta = box(b"meta", bytes(4) + box(b"hdlr", bytes(24)) + box(b"iprp", box(b"ipco", size)))
    return box(b"ftyp", brand + bytes(4) + b"mif1" + brand) + meta + box(b"mdat", bytes(200))


KINDS: dict[str, Callable[[], bytes]] = {
    "JPEG": photo,
    "JPEG, progressive": lambda: photo(progressive=True),
    "JPEG, grey": lambda: _saved(Image.fromarray(scene()).convert("L"), "JPEG", quality=92),
    "JPEG, CMYK": lambda: _cmyk(ycck=False),
    "JPEG, YCCK": lambda: _cmyk(ycck=True),
    "JPEG with restart marks": lambda: photo(restart_marker_rows=1),
    "JPEG with bytes behind its end": lambda: photo() + b"trailer" * 9,
    "JPEG of 1x1": lambda: _saved(Image.fromarray(scene(1, 1)), "JPEG"),
    "JPEG of 1x3000": lambda: _saved(Image.fromarray(scene(3000, 1)), "JPEG"),
    "JPEG of 65500x2": lambda: _saved(Image.fromarray(scene(2, 65500)), "JPEG"),
    "JPEG named .png": photo,
    "JPEG without its last two bytes": lambda: photo()[:-2],
    "JPEG without its last byte": lambda: photo()[:-1],
    "JPEG cut in its pixels": lambda: photo()[: len(photo()) // 2],
    "JPEG cut in its pixels, with an end mark (half grey)": lambda: photo()[: len(photo()) // 2] + _END,
    "JPEG with a wrong byte in its pixels": lambda: flipped(photo()),
    "JPEG cut in its header": lambda: photo()[:200],
    "JPEG that declares 65000x65000": lambda: jpeg_bomb(65000, 65000),
    "PNG": _png_part,
    "PNG, grey": lambda: _saved(Image.fromarray(scene()).convert("L"), "PNG"),
    "PNG, 1 bit": lambda: _saved(Image.fromarray(scene()).convert("1"), "PNG"),
    "PNG, palette": lambda: _palette(transparent=False),
    "PNG, palette with transparency": lambda: _palette(transparent=True),
    "PNG, alpha": lambda: _alpha("PNG"),
    "PNG, grey and alpha": lambda: _saved(Image.fromarray(scene()).convert("LA"), "PNG"),
    "PNG, 16 bits": _deep,
    "PNG, interlaced": _interlaced,
    "PNG named .jpg": _png_part,
    "PNG cut in its pixels": lambda: _png_part(drop=900),
    "PNG without its last chunk": lambda: _png_part(drop=12),
    "PNG with a wrong byte in its pixels": lambda: _png_part(flip=True),
    "PNG that declares 33000x33000": lambda: png_bomb(33000, 33000),
    "WebP": lambda: _saved(Image.fromarray(scene()), "WEBP", quality=95),
    "WebP, lossless": lambda: _saved(Image.fromarray(scene()), "WEBP", lossless=True),
    "WebP, alpha": lambda: _alpha("WEBP", lossless=True, exact=True),
    "WebP, moving": lambda: _frames("WEBP"),
    "WebP cut in its pixels": lambda: _saved(Image.fromarray(scene()), "WEBP", quality=95)[:-300],
    "GIF": lambda: _saved(Image.fromarray(scene()), "GIF"),
    "BMP": lambda: _saved(Image.fromarray(scene()), "BMP"),
    "TIFF": lambda: _saved(Image.fromarray(scene()), "TIFF"),
    "AVIF": lambda: _saved(Image.fromarray(scene()), "AVIF", quality=95),
    "HEIC": lambda: _heif(b"heic"),
    "JPEG XL": lambda: b"\xff\x0a" + bytes([0x4D, 0x13]) + bytes(60),
    "JPEG 2000": lambda: b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(80),
    "zero bytes": lambda: b"",
    "HTML": lambda: b"<!doctype html><title>404 Not Found</title>" * 3,
    "text": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "zeros": lambda: bytes(4096),
    "random bytes": lambda: np.random.default_rng(1).bytes(4096),
    "macOS companion (AppleDouble)": lambda: b"\0\x05\x16\x07\0\x02\0\0" + bytes(100),
} | {f"JPEG, EXIF orientation {n}": lambda n=n: turned(n) for n in range(1, 9)}  # type: ignore[misc]


@dataclass(frozen=True)
class Fate:
    """What becomes of a picture: packed under each check, mended, converted, and read."""

    header: str
    decode: str
    strict: str
    repair: str
    convert: str
    read: str


def fate(data: bytes) -> Fate:
    """Pack a picture in each way, and read it."""
    return Fate(
        header=_packed(data, check="header"),
        decode=_packed(data, check="decode"),
        strict=_packed(data, check="strict"),
        repair=_packed(data, repair=True),
        convert=_packed(data, types="convert"),
        read=_read(data),
    )


def _packed(data: bytes, **settings: Any) -> str:
    try:
        made = encode.encode(data, Encode.model_validate(settings))
    except PictureError as error:
        return error.cause
    if made.data == data:
        return "kept"
    return "mended" if "+" in made.kind else "JPEG"


def _read(data: bytes) -> str:
    try:
        decode_image(data)
    except DecodeError:
        return "error"
    return "RGB"


def rows() -> Iterator[tuple[str, Fate]]:
    """Yield each kind and what becomes of it."""
    for name, make in KINDS.items():
        yield name, fate(make())


def table() -> str:
    """Return the table of docs/pictures.md; rows that are equal stand together."""
    lines = ["| picture | header | decode | strict | repair | convert | read |", "|---|---|---|---|---|---|---|"]
    for name, found in rows():
        cells = (found.header, found.decode, found.strict, found.repair, found.convert, found.read)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
