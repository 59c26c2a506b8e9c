"""Bytes become RGB pictures and integer labels, or a DecodeError that says why."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
from packing import jpeg

from pipeline.decode import decode_image, parse_label
from pipeline.errors import DecodeError
from shardify.format.picture import jpeg_sides, probe


def encode(extension: str, picture: np.ndarray) -> bytes:
    done, data = cv2.imencode(extension, picture)
    assert done
    return data.tobytes()


def with_orientation(data: bytes, orientation: int) -> bytes:
    exif = b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + struct.pack(">H", orientation) + bytes(6)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp", ".bmp"])
@pytest.mark.case("A01")
def test_red_is_red(extension: str) -> None:
    """A red picture has its red in channel 0, whatever its format."""
    red = np.zeros((16, 16, 3), np.uint8)
    red[..., 2] = 255  # cv2 writes BGR
    picture = decode_image(encode(extension, red))
    assert picture[8, 8, 0] > 250
    assert picture[8, 8, 1:].max() < 8


def test_equals_imread(tmp_path: Path) -> None:
    """The pixels are those of cv2.imread and a conversion to RGB."""
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg(1))
    expected = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
    np.testing.assert_array_equal(decode_image(jpeg(1)), expected)


@pytest.mark.parametrize("shape", [(9, 7), (9, 7, 4)])
@pytest.mark.case("I08", "I09")
def test_always_three_channels(shape: tuple[int, ...]) -> None:
    """Grey pictures become RGB and alpha is dropped: always uint8 (H, W, 3)."""
    picture = decode_image(encode(".png", np.full(shape, 77, np.uint8)))
    assert picture.shape == (9, 7, 3)
    assert picture.dtype == np.uint8
    assert (picture == 77).all()


def test_sixteen_bits_become_eight() -> None:
    """A 16-bit PNG is scaled to uint8."""
    assert decode_image(encode(".png", np.full((4, 4, 3), 0x8080, np.uint16)))[0, 0, 0] == 0x80


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.case("I07")
def test_upright_by_exif_also_when_scaled(orientation: int) -> None:
    """EXIF turns a picture, and the scaled decode measures the turned picture's sides."""
    data = with_orientation(jpeg(3, 80, 160), orientation)
    turned = (160, 80) if orientation >= 5 else (80, 160)
    assert decode_image(data).shape[:2] == turned
    assert decode_image(data, (turned[0] // 2, turned[1] // 2)).shape[:2] == (turned[0] // 2, turned[1] // 2)
    assert decode_image(data, (turned[0] // 2 + 1, turned[1] // 2)).shape[:2] == turned


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("target", [(10, 10), (20, 20), (20, 40), (40, 20), (40, 40), (40, 80), (80, 40), (41, 41), (500, 500)])
def test_the_scale_is_what_a_close_look_says(target: tuple[int, int], orientation: int) -> None:
    """A look at the frame alone chooses the scale that all of the header would: the largest that leaves both sides the target's."""
    data = with_orientation(jpeg(3, 80, 160), orientation)
    sides = decode_image(data).shape[:2]
    scale = next((s for s in (8, 4, 2) if sides[0] >= s * target[0] and sides[1] >= s * target[1]), 1)
    assert decode_image(data, target).shape[:2] == (sides[0] // scale, sides[1] // scale)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xe0\x00",
        b"\xff\xd8\xff\xe0\x00\x00\xff\xc0\x00\x11\x08\x00\x02\x00\x03" + bytes(9),  # a segment without its own length
        b"\xff\xd8" + b"\xff\xfe\x00\x02" * 10_000 + b"\xff\xc0\x00\x11\x08\x00\x02\x00\x03" + bytes(9),  # no end of segments
        b"\xff\xd8\xff\xff\xe0\x00\x04ab\xff\xc0\x00\x11\x08\x00\x02\x00\x03" + bytes(9),  # a fill byte: probe looks
        b"\xff\xd8\xff\xc0\x00\x11\x08\x00\x02\x00",  # cut in its frame
        b"\xff\xd8\xff\xda\x00\x04ab\xff\xc0\x00\x11\x08\x00\x02\x00\x03\x03",  # pixels first
        b"\xff\xd8\xff\xc4\xff\xff" + bytes(20),
    ],
)
def test_what_has_no_plain_frame_is_left_to_a_close_look(data: bytes) -> None:
    """Sides are of a frame that is reached segment by segment, or not known; nothing is read beyond the end."""
    assert jpeg_sides(data) is None
    assert jpeg_sides(memoryview(data)) is None


def test_sides_are_those_that_all_of_the_header_says() -> None:
    """Height and width as they lie in the file."""
    for data in (jpeg(3, 80, 160), with_orientation(jpeg(3, 80, 160), 6)):
        picture = probe(data)
        assert jpeg_sides(data) == jpeg_sides(memoryview(data)) == (picture.height, picture.width) == (80, 160)


@pytest.mark.parametrize(
    ("target", "scale"), [((41, 41), 1), ((40, 40), 2), ((30, 40), 2), ((20, 20), 4), ((10, 10), 8), ((1, 1), 8)]
)
def test_scaled_decode_never_goes_below_the_target(target: tuple[int, int], scale: int) -> None:
    """A JPEG of 80x160 is decoded at the smallest scale that leaves both sides at least the target's."""
    picture = decode_image(jpeg(4, 80, 160), target)
    assert picture.shape == (80 // scale, 160 // scale, 3)


def test_scaled_decode_is_for_jpeg_only() -> None:
    """Other formats are decoded whole."""
    assert decode_image(encode(".png", np.zeros((80, 160, 3), np.uint8)), (10, 10)).shape == (80, 160, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "zero bytes"),
        (b"<html>" * 50, "HTML"),
        (b"\xff\xd8\xff\xe0junk", ""),
        (jpeg(5)[:-2], "no end marker"),
        (jpeg(5)[:40], ""),
        (bytes(1000), ""),
        (b"\0\0\0\x20ftypheic\0\0\0\0mif1heic" + bytes(400), "heic"),
    ],
)
@pytest.mark.case("I04")
def test_what_is_no_picture(data: bytes, reason: str) -> None:
    """Empty, foreign and cut files are one typed error that says what they are."""
    with pytest.raises(DecodeError) as caught:
        decode_image(data)
    assert reason.lower() in str(caught.value).lower()
    assert str(caught.value).strip()


@pytest.mark.case("I14")
def test_a_bomb_is_refused_by_its_header() -> None:
    """A picture that declares 65,000 x 65,000 pixels is an error of this sample, not of the process."""
    png = encode(".png", np.zeros((8, 8), np.uint8))
    import zlib

    ihdr = b"IHDR" + struct.pack(">IIBBBBB", 65000, 65000, 8, 0, 0, 0, 0)
    bomb = png[:12] + ihdr + struct.pack(">I", zlib.crc32(ihdr)) + png[33:]
    with pytest.raises(DecodeError):
        decode_image(bomb)


@pytest.mark.parametrize("text", [b"0", b"12", b"9223372036854775807", b"5\n"])
def test_labels(text: bytes) -> None:
    """A label is an ASCII integer below 2^63; `echo` writes a line's end behind it."""
    assert parse_label(text, None) == int(text)


@pytest.mark.parametrize(
    "text", [b"", b"1.0", b"-1", b" 1", b"1 ", b"1\n\n", b"9223372036854775808", "٣".encode(), b"abc", b"9" * 5000]
)
def test_wrong_labels(text: bytes) -> None:
    """What isn't one is an error that shows it."""
    with pytest.raises(DecodeError, match="label"):
        parse_label(text, None)


def test_labels_in_json() -> None:
    """json:name takes an integer of that name and nothing else."""
    assert parse_label(b'{"a": 3}', "a") == 3
    for text in (b"{", b"[]", b'{"b": 1}', b'{"a": 1.0}', b'{"a": true}', b'{"a": "3"}', b'{"a": 9223372036854775808}', b"\xff"):
        with pytest.raises(DecodeError, match="json"):
            parse_label(text, "a")


def test_a_json_of_thousands_of_brackets_is_our_own_error() -> None:
    """Python's parser gives up on it in its own way; a value that is no label is shown in part."""
    with pytest.raises(DecodeError, match="the json can't be read"):
        parse_label(b'{"a":' + b"[" * 100_000, "a")
    with pytest.raises(DecodeError) as caught:
        parse_label(json.dumps({"a": "x" * 100_000}).encode(), "a")
    assert len(str(caught.value)) < 200


def tiff_of(*entries: tuple[int, int, int, int]) -> bytes:
    """Return a TIFF's header and directory: (tag, type, count, value) each."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + bytes(4)


@pytest.mark.parametrize(
    "entries",
    [
        [(256, 4, 1, 12000), (257, 4, 1, 12000), (256, 4, 1, 1), (257, 4, 1, 1)],
        [(256, 4, 1, 1), (257, 4, 1, 1), (256, 4, 1, 12000), (257, 4, 1, 12000)],
        [(256, 9, 1, 6000), (257, 9, 1, 6000), (256, 4, 1, 1), (257, 4, 1, 1)],
        [(256, 4, 2, 8), (257, 4, 1, 1)],
        [(256, 16, 1, 8), (257, 4, 1, 1)],
    ],
)
def test_a_tiff_says_its_sides_once(entries: list[tuple[int, int, int, int]]) -> None:
    """Two of a kind, of which a decoder takes the other one, are how a bomb would get by its limit."""
    with pytest.raises(DecodeError, match="tiff whose header gives a side as no plain number, or twice"):
        decode_image(tiff_of(*entries), None, 1000)
