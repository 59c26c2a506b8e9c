"""Pictures by their bytes: true type, size and turn without decoding, and a typed reason for everything else."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify.format.picture import (
    CutPictureError,
    EmptyPictureError,
    Picture,
    PictureError,
    UnknownPictureError,
    check_end,
    probe,
)

WRITTEN = {"jpeg": ".jpg", "png": ".png", "webp": ".webp", "bmp": ".bmp", "tiff": ".tiff"}
if cv2.haveImageWriter("a.gif"):  # OpenCV 5
    WRITTEN["gif"] = ".gif"


def picture(extension: str, width: int = 40, height: int = 30) -> bytes:
    """Return a picture of noise that OpenCV wrote."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    done, data = cv2.imencode(extension, pixels)
    assert done
    return data.tobytes()


def exif(orientation: int, order: str = "<") -> bytes:
    """Return a TIFF block with one tag, the orientation."""
    begin = b"II*\0" if order == "<" else b"MM\0*"
    return begin + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def jpeg_with(*segments: tuple[int, bytes], data: bytes | None = None) -> bytes:
    """Return a JPEG with segments put in behind its first marker."""
    whole = data or picture(".jpg")
    return whole[:2] + b"".join(struct.pack(">BBH", 0xFF, m, len(body) + 2) + body for m, body in segments) + whole[2:]


def png_with(kind: bytes, body: bytes) -> bytes:
    """Return a PNG with a chunk put in behind its header."""
    whole = picture(".png")
    return whole[:33] + struct.pack(">I4s", len(body), kind) + body + bytes(4) + whole[33:]


def webp_extended(width: int, height: int) -> bytes:
    """Return an extended WebP without its picture: the canvas."""
    body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = b"VP8X" + struct.pack("<I", 10) + body + b"ALPH" + struct.pack("<I", 3) + b"odd\0"
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def box(kind: bytes, body: bytes) -> bytes:
    """Return an ISO media box."""
    return struct.pack(">I4s", 8 + len(body), kind) + body


def heif(brand: bytes, *sizes: tuple[int, int]) -> bytes:
    """Return the header of a HEIF file that has pictures of these sizes."""
    spans = b"".join(box(b"ispe", bytes(4) + struct.pack(">II", *size)) for size in sizes)
    meta = box(b"meta", bytes(4) + box(b"hdlr", bytes(24)) + box(b"iprp", box(b"ipco", box(b"hvcC", b"x") + spans)))
    return box(b"ftyp", brand + bytes(4) + b"mif1" + brand) + meta


def jxl(*fields: tuple[int, int]) -> bytes:
    """Return a JPEG XL codestream that begins with (value, bits) fields, the lowest bit first."""
    bits = at = 0
    for value, count in fields:
        bits |= value << at
        at += count
    return b"\xff\x0a" + bits.to_bytes(14, "little")


@pytest.mark.parametrize("kind", WRITTEN)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_sizes(kind: str, width: int, height: int) -> None:
    """The type and size of what OpenCV writes are read from the header."""
    assert probe(picture(WRITTEN[kind], width, height)) == Picture(kind, width, height)


def test_a_lossless_webp() -> None:
    """WebP's lossless header is another one than its lossy one."""
    pixels = np.zeros((7, 301, 3), np.uint8)
    assert probe(cv2.imencode(".webp", pixels, [cv2.IMWRITE_WEBP_QUALITY, 101])[1].tobytes()) == Picture("webp", 301, 7)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (heif(b"heic", (160, 120), (4032, 3024), (512, 512)), Picture("heic", 4032, 3024)),
        (heif(b"avif", (8, 9)), Picture("avif", 8, 9)),
        (jxl((1, 1), (3, 5), (3, 3)), Picture("jxl", 42, 32)),
        (jxl((0, 1), (1, 2), (999, 13), (0, 3), (2, 2), (70000, 18)), Picture("jxl", 70001, 1000)),
        (b"\0\0\0\x0cJXL \r\n\x87\n" + box(b"ftyp", b"jxl ") + box(b"jxlc", jxl((1, 1), (0, 5), (1, 3))), Picture("jxl", 8, 8)),
        (b"\0\0\0\x0cJXL \r\n\x87\n" + box(b"jxlp", bytes(4) + jxl((1, 1), (0, 5), (1, 3))), Picture("jxl", 8, 8)),
        (b"BM" + struct.pack("<I4xIIHH", 26, 26, 12, 5, 6) + bytes(8), Picture("bmp", 5, 6)),
        (b"BM" + struct.pack("<I4xIIii", 54, 54, 40, 5, -6) + bytes(20), Picture("bmp", 5, 6)),
        (b"MM\0*" + struct.pack(">IHHHIHHHHII", 8, 2, 256, 3, 1, 70, 0, 257, 4, 1, 80), Picture("tiff", 70, 80)),
        (webp_extended(5000, 70000), Picture("webp", 5000, 70000)),
    ],
)
def test_types_and_forms_that_opencv_does_not_write(data: bytes, expected: Picture) -> None:
    """Other types and forms are known too: a reason can name them, and their size."""
    assert probe(data) == expected


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", "<>")
def test_orientation(orientation: int, order: str) -> None:
    """EXIF's orientation is found in a JPEG, in either byte order."""
    assert probe(jpeg_with((0xE1, b"Exif\0\0" + exif(orientation, order)))).orientation == orientation


def test_orientation_behind_another_app1() -> None:
    """An XMP segment before EXIF's, which has the same marker, doesn't hide it."""
    xmp = (0xE1, b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>")
    assert probe(jpeg_with(xmp, (0xE1, b"Exif\0\0" + exif(6)))).orientation == 6


@pytest.mark.parametrize(
    "block", [b"", b"II*\0", exif(0), exif(9), exif(6)[:-6], b"XX" + exif(6)[2:], exif(6).replace(b"\1", b"\2")]
)
def test_damaged_exif_is_upright(block: bytes) -> None:
    """EXIF that can't be true doesn't refuse a picture: it stays as it is."""
    assert probe(jpeg_with((0xE1, b"Exif\0\0" + block))) == Picture("jpeg", 40, 30)


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"", EmptyPictureError, "zero bytes"),
        (b"<html>" * 50, UnknownPictureError, "HTML"),
        (b"\xef\xbb\xbf \n<?xml version='1.0'?><svg/>", UnknownPictureError, "XML"),
        (b"Not found\n", UnknownPictureError, "text, not a picture: it begins with 'Not found"),
        (b"%PDF-1.7", UnknownPictureError, "a PDF document"),
        (b"PK\x03\x04....", UnknownPictureError, "a zip archive"),
        (bytes(5000), UnknownPictureError, "zeros"),
        (box(b"ftyp", b"isom" + bytes(4) + b"mp41"), UnknownPictureError, "video"),
        (b"\x00\x01\x02\x03\x04", UnknownPictureError, "00 01 02 03 04"),
        (b"\xff\xd8\xff\xe0junk", CutPictureError, "jpeg of 8 bytes"),
        (b"\xff\xd8\xff\xd9", PictureError, "ends before its picture begins"),
        (b"\x89PNG\r\n\x1a\n", CutPictureError, "png of 8 bytes that ends inside its header"),
        (b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"CgBI", 5, 5), PictureError, "IHDR"),
        (b"RIFF\0\0\0\0WEBPVP8 " + bytes(20), PictureError, "start code"),
        (b"RIFF\0\0\0\0WEBPICCP" + bytes(20), PictureError, "begins with a chunk"),
        (b"GIF89a", CutPictureError, "gif of 6 bytes"),
        (b"II*\0" + struct.pack("<I", 10**9), CutPictureError, "tiff"),
        (heif(b"heic"), CutPictureError, "heic"),
        (b"\xff\x0a", CutPictureError, "jxl"),
        (b"GIF89a\0\0\5\0", PictureError, "0x5"),
        (jpeg_with(*[(0xE5, b"")] * 10_001), PictureError, "more than 10000 segments"),
    ],
)
def test_what_is_no_picture(data: bytes, error: type[PictureError], said: str) -> None:
    """Each thing that isn't a usable picture has a type to count it by and a reason that names it."""
    with pytest.raises(error, match=said) as caught:
        probe(data)
    assert type(caught.value) is error
    assert error.cause in ("empty", "not a picture", "cut", "damaged")


@given(st.binary(max_size=300), st.sampled_from(sorted(WRITTEN)))
def test_noise_raises_only_picture_errors(noise: bytes, kind: str) -> None:
    """Any bytes, also behind a true beginning, give a Picture or a PictureError."""
    for data in (noise, picture(WRITTEN[kind])[:12] + noise):
        try:
            found = probe(data)
            check_end(data, found.kind)
        except PictureError:
            continue
        assert found.width > 0 and found.height > 0 and 1 <= found.orientation <= 8


SEEDS = [
    picture(".jpg"),
    jpeg_with((0xE1, b"Exif\0\0" + exif(6))),
    png_with(b"eXIf", exif(3)),
    picture(".webp"),
    webp_extended(9, 9),
    picture(".tiff", 4, 4),
    heif(b"avif", (8, 9)),
    b"\0\0\0\x0cJXL \r\n\x87\n" + box(b"jxlc", jxl((1, 1), (0, 5), (1, 3))),
]


@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 700), st.binary(min_size=1, max_size=5)), max_size=4),
    st.integers(0, 99),
)
def test_damage_raises_only_picture_errors(data: bytes, patches: list[tuple[int, bytes]], cut: int) -> None:
    """A picture that is patched and cut anywhere gives a Picture or a PictureError."""
    whole = bytearray(data)
    for at, noise in patches:
        whole[at % len(data) : at % len(data) + len(noise)] = noise
    damaged = bytes(whole[: len(whole) * (100 - cut) // 100])
    with contextlib.suppress(PictureError):
        check_end(damaged, probe(damaged).kind)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff" + b"\xff" * 4_000_000,
        b"\xff\xd8\xff" + b"\xff\xd0" * 2_000_000,
        b"\xff\xd8\xff" + b"\0" * 4_000_000,
        picture(".png")[:33] + b"\0\0\0\0tEXt\0\0\0\0" * 300_000,
        b"RIFF\0\0\0\0WEBPVP8X" + struct.pack("<IB", 10, 8) + bytes(9) + b"ABCD\0\0\0\0" * 500_000,
        box(b"ftyp", b"heic" * 64) + b"\0\0\0\x08free" * 500_000,
    ],
)
def test_long_nonsense_ends_soon(data: bytes) -> None:
    """Files made to keep a walker busy are given up at once."""
    start = time.monotonic()
    with contextlib.suppress(PictureError):
        probe(data)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    "cut",
    [
        lambda: picture(".jpg")[:-2],
        lambda: picture(".jpg")[:-1],
        lambda: jpeg_with((0xE1, b"Exif\0\0" + picture(".jpg", 8, 8)))[:-2],  # a thumbnail's end isn't the picture's
        lambda: picture(".png")[:-12],
        lambda: picture(".webp")[:-1],
    ],
)
@pytest.mark.case("I01")
def test_a_missing_end_is_found(cut: Callable[[], bytes]) -> None:
    """A picture without its end is refused, also a JPEG that only lacks its last bytes (I01)."""
    data = cut()
    with pytest.raises(CutPictureError, match="without its end"):
        check_end(data, probe(data).kind)


@pytest.mark.parametrize("extension", WRITTEN.values())
def test_bytes_behind_the_end_do_no_harm(extension: str) -> None:
    """Whole pictures pass, also those of phones that append data of their own."""
    data = picture(extension)
    check_end(data, probe(data).kind)
    check_end(data + b"\0trailer" * 9, probe(data).kind)
