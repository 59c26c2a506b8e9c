"""Encoding: pictures that need no change stay byte for byte, what is re-encoded follows one rule, and what is refused says why."""

from __future__ import annotations

import base64
import os
import platform
import re
import resource
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import jpeg

from pipeline.decode import decode_for_crop, decode_image
from shardify import encode, worker
from shardify.config import Encode
from shardify.format.picture import PictureError, probe
from shardify.ingest import File
from shardify.items import Encoded, Refused

# A CMYK JPEG of 16x8 pixels by Pillow, Adobe's inverted kind: cyan 0, magenta and yellow full, which is red.
CMYK = base64.b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwAGBAUGBQQGBgUGBwcGCAoQCgoJCQoUDg8MEBcUGBgXFBYWGh0lHxobIxwWFiAsICMmJykqKRkfLTAtKDAlKCko/8AAFAgACAAQBEMR"
    "AE0RAFkRAEsRAP/EAB8AAAEFAQEBAQEBAAAAAAAAAAABAgMEBQYHCAkKC//EALUQAAIBAwMCBAMFBQQEAAABfQECAwAEEQUSITFBBhNRYQcicRQygZGhCCNCscEVUtHwJDNi"
    "coIJChYXGBkaJSYnKCkqNDU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6g4SFhoeIiYqSk5SVlpeYmZqio6Slpqeoqaqys7S1tre4ubrCw8TFxsfIycrS"
    "09TV1tfY2drh4uPk5ebn6Onq8fLz9PX29/j5+v/aAA4EQwBNAFkASwAAPwD6pr5Ur5Ur6poooor/2Q=="
)
QUARTERS = np.kron(np.array([[0, 80], [160, 255]], np.uint8), np.ones((32, 48), np.uint8))[..., None].repeat(3, axis=2)

# One pixel; OpenCV writes GIF from version 5 on.
GIF = bytes.fromhex("474946383961010001008000000000ffffff2c00000000010001000002024401003b")


def settings(**values: Any) -> Encode:
    """Return encode settings."""
    return Encode.model_validate(values)


def written(pixels: npt.NDArray[Any], extension: str = ".png", *options: int) -> bytes:
    """Return pixels (BGR, grey, with alpha, 16 bits) as a picture."""
    done, data = cv2.imencode(extension, pixels, options)
    assert done
    return data.tobytes()


def pixels_of(data: bytes) -> npt.NDArray[np.uint8]:
    """Return a picture as it is stored: channels and depth as they are, not turned."""
    return np.asarray(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED))


def with_orientation(data: bytes, orientation: int) -> bytes:
    """Return a JPEG with EXIF's orientation."""
    block = b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    return data[:2] + struct.pack(">HH", 0xFFE1, len(block) + 2) + block + data[2:]


def store(turned: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Return the pixels that a camera stores for an upright picture, by EXIF's own table (row 0 and column 0 of what is stored)."""
    stored = {
        1: turned,
        2: turned[:, ::-1],
        3: turned[::-1, ::-1],
        4: turned[::-1],
        5: turned.transpose(1, 0, 2),
        6: turned[:, ::-1].transpose(1, 0, 2),
        7: turned[::-1, ::-1].transpose(1, 0, 2),
        8: turned[::-1].transpose(1, 0, 2),
    }[orientation]
    return np.ascontiguousarray(stored)


def test_what_needs_no_change_stays() -> None:
    """Without settings that change pixels a picture of any packed type goes in byte for byte."""
    for extension, kind, field in ((".jpg", "jpeg", "jpg"), (".png", "png", "png"), (".webp", "webp", "webp")):
        data = written(QUARTERS, extension)
        assert encode.encode(data, settings()) == Encoded(field, data, kind)
        assert encode.encode(data, settings(check="decode")) == Encoded(field, data, kind)
        assert encode.encode(data, settings(resize={"short_side": 64})) == Encoded(field, data, kind)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("resize", [None, {"short_side": 32}])
@pytest.mark.case("I07")
def test_re_encoded_pictures_are_upright(orientation: int, resize: dict[str, int] | None) -> None:
    """A picture turned by EXIF in any of its eight ways comes out upright, once, without the tag (I07)."""
    data = with_orientation(written(store(QUARTERS, orientation), ".jpg", cv2.IMWRITE_JPEG_QUALITY, 98), orientation)
    made = encode.encode(data, settings(quality=98, resize=resize))
    assert probe(made.data).orientation == 1
    expected = QUARTERS if resize is None else cv2.resize(QUARTERS, (48, 32), interpolation=cv2.INTER_AREA)
    found = pixels_of(made.data)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < 3
    upright = np.asarray(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR))  # cv2's own reading of the tag
    assert resize or np.abs(found.astype(int) - upright).mean() < 3


def exif_block(order: str, entries: list[tuple[int, int, int]]) -> bytes:
    """Return a TIFF block of orientations, each as (type, count, value)."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    body = struct.pack(f"{order}H", len(entries))
    for kind, count, value in entries:
        field = {1: "B3x", 3: "H2x", 4: "I"}[kind]
        body += struct.pack(f"{order}HHI{field}", 0x0112, kind, count, value)
    return mark + struct.pack(f"{order}I", 8) + body + struct.pack(f"{order}I", 0)


def holding(kind: str, pixels: npt.NDArray[Any], block: bytes, *, behind: bool) -> bytes:
    """Return a picture with an EXIF block, before its pixels or (PNG) behind them."""
    if kind == "jpeg":
        data, marked = written(pixels, ".jpg"), b"Exif\0\0" + block
        return data[:2] + b"\xff\xe1" + struct.pack(">H", len(marked) + 2) + marked + data[2:]
    data, chunk = written(pixels), b"eXIf" + block
    whole, at = (
        struct.pack(">I", len(block)) + chunk + struct.pack(">I", zlib.crc32(chunk)),
        len(written(pixels)) - 12 if behind else 33,
    )
    return data[:at] + whole + data[at:]


@given(
    st.sampled_from(["jpeg", "png"]),
    st.sampled_from("<>"),
    st.lists(st.tuples(st.sampled_from([1, 3, 4]), st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_odd_exif_turns_a_picture_in_one_way(
    kind: str, order: str, entries: list[tuple[int, int, int]], behind: bool, cut: bool
) -> None:
    """Whatever stands in it, what is packed anew is the picture that training would have read from the file."""
    block = exif_block(order, entries)
    data = holding(kind, QUARTERS, block[:-6] if cut else block, behind=behind)
    anew = encode.encode(data, settings(types="keep", quality=95)).data
    there, here = (decode_image(found).astype(int) for found in (data, anew))
    assert there.shape == here.shape and np.abs(there - here).mean() < 3
    if kind == "jpeg":
        picture, sides = decode_for_crop(data, (8, 8), lambda sides: sides)
        assert sides is None or (sides[0] < sides[1]) == (picture.shape[0] < picture.shape[1])


def test_no_memory_is_no_fault_of_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for its pixels a build ends, whatever may be skipped."""
    error = cv2.error("Failed to allocate 1440000 bytes")
    error.code, error.err = cv2.Error.StsNoMem, "Failed to allocate 1440000 bytes"
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    for raised in (error, MemoryError()):
        monkeypatch.setattr(cv2, "imdecode", lambda *_, raised=raised: (_ for _ in ()).throw(raised))
        made = worker.encode_file(str(tmp_path), settings(check="decode"), File(str(tmp_path / "a.jpg"), -1, -1))
        assert isinstance(made, Refused) and made.cause == "environment" and "out of memory" in made.reason


def test_a_png_with_exif_is_set_upright() -> None:
    """PNG's orientation counts like JPEG's."""
    block = b"eXIfII*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)
    chunk = struct.pack(">I", len(block) - 4) + block + struct.pack(">I", zlib.crc32(block))
    data = written(store(QUARTERS, 6))
    made = encode.encode(data[:33] + chunk + data[33:], settings(types="keep", quality=90))
    assert np.array_equal(pixels_of(made.data), QUARTERS)


@pytest.mark.parametrize(
    ("data", "colour"),
    [
        (written(np.full((40, 50), 90, np.uint8)), (90, 90, 90)),
        (written(np.full((40, 50), 90, np.uint8), ".jpg"), (90, 90, 90)),
        (written(np.full((40, 50, 3), (10, 20, 30), np.uint16) * 257), (10, 20, 30)),
        (written(np.full((40, 50, 4), (10, 20, 30, 0), np.uint8)), (10, 20, 30)),
        (CMYK, (0, 0, 255)),
        (written(np.full((40, 50, 3), (10, 20, 30), np.uint8), ".bmp"), (10, 20, 30)),
        (written(np.full((40, 50, 3), (10, 20, 30), np.uint8), ".tiff"), (10, 20, 30)),
    ],
    ids=["grey", "grey-jpeg", "16-bit", "transparent", "cmyk", "bmp", "tiff"],
)
@pytest.mark.case("I06")
def test_re_encoded_pictures_have_three_channels(data: bytes, colour: tuple[int, int, int]) -> None:
    """Grey is spread, 16 bits keep the upper 8, alpha is dropped, CMYK becomes RGB; all as JPEG under `types: convert`."""
    made = encode.encode(data, settings(types="convert", quality=100))
    found = pixels_of(made.data)
    assert (made.field, found.ndim, found.shape[2], found.dtype) == ("jpg", 3, 3, np.uint8)
    assert np.abs(found.reshape(-1, 3).mean(axis=0) - colour).max() <= 3


def test_types_policies() -> None:
    """`keep` keeps a PNG a PNG, shrunk or not; `convert` makes it a JPEG and leaves JPEGs alone."""
    data, photo = written(QUARTERS), jpeg(1)
    kept = encode.encode(data, settings(types="keep", resize={"long_side": 48}))
    assert (kept.field, probe(kept.data).kind, pixels_of(kept.data).shape) == ("png", "png", (32, 48, 3))
    assert encode.encode(data, settings(types="convert")).field == "jpg"
    assert encode.encode(photo, settings(types="convert")).data == photo


@given(width=st.integers(1, 30000), height=st.integers(1, 30000), target=st.integers(1, 30000), short=st.booleans())
def test_resizing_only_shrinks(width: int, height: int, target: int, short: bool) -> None:
    """The named side becomes the target exactly, the other keeps the shape within half a pixel, and nothing grows."""
    resize = Encode.model_validate({"resize": {"short_side" if short else "long_side": target}}).resize
    size = encode._shrunk_size(width, height, resize)
    side = min(width, height) if short else max(width, height)
    if size is None:
        assert side <= target
        return
    assert (min(size) if short else max(size)) == target < side
    assert abs(size[0] - width * target / side) <= max(0.5, 1 - width * target / side)
    assert abs(size[1] - height * target / side) <= max(0.5, 1 - height * target / side)


def test_shrinking_averages() -> None:
    """Shrinking is by area: a fine checkerboard becomes grey, not stripes."""
    board = np.indices((64, 64)).sum(axis=0).astype(np.uint8)[..., None].repeat(3, axis=2) % 2 * 255
    made = encode.encode(written(board), settings(types="keep", resize={"short_side": 16}))
    assert np.abs(pixels_of(made.data).astype(int) - 127).max() <= 1


def test_quality_counts() -> None:
    """A lower quality makes fewer bytes, the default one is stated, and the same input the same bytes."""
    data = jpeg(3, 200, 300)
    sizes = [len(encode.encode(data, settings(quality=quality)).data) for quality in (20, 60, 95)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3
    small = settings(resize={"short_side": 100})
    assert encode.encode(data, small).data == encode.encode(data, small).data
    assert encode.encode(data, small).data == encode.encode(data, settings(resize={"short_side": 100}, quality=90)).data


def test_to_jpeg_takes_rgb() -> None:
    """to_jpeg's red is red."""
    red = np.zeros((16, 16, 3), np.uint8)
    red[..., 0] = 255
    assert np.abs(pixels_of(encode.to_jpeg(red, 95)).reshape(-1, 3).mean(axis=0) - (0, 0, 255)).max() < 3


def bomb(width: int, height: int) -> bytes:
    """Return the header of a PNG that declares this size, and an end."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT....\0\0\0\0IEND\xaeB`\x82"


@pytest.mark.parametrize(
    ("data", "values", "cause", "said"),
    [
        (b"", {}, "empty", "zero bytes"),
        (b"<html>" * 50, {}, "not a picture", "HTML"),
        (jpeg(1)[:-2], {}, "cut", "without its end"),
        (jpeg(1)[:300], {}, "cut", "jpeg of 300 bytes"),
        (GIF, {}, "type", "gif.*encode.types: convert"),
        (written(QUARTERS, ".bmp"), {"types": "keep"}, "type", "bmp"),
        (bomb(33000, 33000), {}, "too large", "33000x33000"),
        (bomb(33000, 33000), {"check": "decode", "quality": 90}, "too large", "33000x33000"),
        (bomb(64, 64), {"check": "decode"}, "damaged", "64x64 that"),
        (bomb(64, 64), {"types": "convert"}, "damaged", "64x64 that"),
    ],
)
@pytest.mark.case("I04", "I14")
def test_refusals_have_a_cause_and_a_reason(tmp_path: Path, data: bytes, values: dict[str, Any], cause: str, said: str) -> None:
    """What can't be packed comes back with its path, a word to count by and the reason, whichever way cv2 says no (I04, I14)."""
    (tmp_path / "a.jpg").write_bytes(data)
    start = time.monotonic()
    refused = worker.encode_file(str(tmp_path), settings(**values), File(str(tmp_path / "a.jpg")))
    assert isinstance(refused, Refused)
    assert (refused.path, refused.cause) == ("a.jpg", cause)
    assert re.search(said, refused.reason)
    assert time.monotonic() - start < 2
    if cause != "damaged" or settings(**values).check == "decode":
        assert worker.forecast_file(str(tmp_path), settings(**values), File(str(tmp_path / "a.jpg"))) == refused


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder, a FIFO, a name with NUL: refused at once, never a hang or a traceback."""
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "fifo.jpg")
    paths = ("none.jpg", "folder.jpg", "fifo.jpg", "nul\0.jpg", "x" * 300 + ".jpg", "half\ud800.jpg")
    found = [worker.encode_file(str(tmp_path), settings(), File(f"{tmp_path}/{path}")) for path in paths]
    assert [refused.cause for refused in found if isinstance(refused, Refused)] == [
        "missing",
        "unreadable",
        "unreadable",
        "missing",
        "unreadable",
        "missing",
    ]


@pytest.mark.case("S12")
def test_a_file_without_permission(no_root: Path) -> None:
    """A file that may not be read is named with the system's reason (S12)."""
    (no_root / "a.jpg").write_bytes(jpeg(1))
    (no_root / "a.jpg").chmod(0)
    refused = worker.encode_file(str(no_root), settings(), File(str(no_root / "a.jpg")))
    assert isinstance(refused, Refused) and refused.reason == "Permission denied"


def test_forecasts_are_what_is_packed(tmp_path: Path) -> None:
    """A forecast of a picture that stays is exact; one that is shrunk is estimated by its pixels and says so."""
    data = jpeg(5, 100, 200)
    (tmp_path / "a.jpg").write_bytes(data)
    stays = worker.forecast_file(str(tmp_path), settings(), File(str(tmp_path / "a.jpg")))
    assert stays == encode.Forecast("jpeg", len(data), True, len(data))
    shrunk = worker.forecast_file(str(tmp_path), settings(resize={"short_side": 50}), File(str(tmp_path / "a.jpg")))
    assert shrunk == encode.Forecast("jpeg", len(data) // 4, False, len(data))


def test_check_decodes() -> None:
    """check_decodes passes what decodes and names what doesn't."""
    encode.check_decodes(jpeg(1))
    for data, said in ((b"", "zero bytes"), (bomb(64, 64), "64x64"), (bomb(33000, 33000), "at most")):
        with pytest.raises(PictureError, match=said):
            encode.check_decodes(data)


def test_one_thread() -> None:
    """cv2 starts no threads of its own beside the engine's processes."""
    assert cv2.getNumThreads() == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_memory_is_kept_between_pictures() -> None:
    """Decoding one picture after another doesn't map and fault in its memory anew: 1.3 MB would be 340 faults each."""
    data = jpeg(1, 600, 800)
    for _ in range(3):
        encode.check_decodes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        encode.check_decodes(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 20 * 34
