"""What is compressed unpacks to what it was made of, in bounded pieces, however it comes; what is wrong with it is said."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from squeezed import PACKERS, in_members

from pipeline.errors import ShardError
from pipeline.stores.unpacking import Unpacking, coding_of, kept_as, plain_name

DATA = random.Random(1).randbytes(150_000) + bytes(60_000)


def unpacked(data: bytes, ending: str, step: int = 10**6) -> bytes:
    """Return what data unpacks to when it comes in steps."""
    unpacking = Unpacking(coding_of(f"/a.{ending}"), "http://h/a")
    found = b"".join(piece for at in range(0, len(data), step) for piece in unpacking.feed(memoryview(data)[at : at + step]))
    unpacking.end()
    return found


@pytest.mark.parametrize("ending", PACKERS)
@given(st.binary(max_size=600), st.integers(1, 700), st.integers(60, 700), st.integers(0, 3))
def test_members_of_any_size_in_steps_of_any_size(ending: str, data: bytes, step: int, size: int, zeros: int) -> None:
    """Several members are one content, and zeros may fill what is behind them."""
    packed = (in_members(data, ending, size) or PACKERS[ending](b"")) + bytes(4 * zeros)
    assert unpacked(packed, ending, step) == data


@pytest.mark.parametrize("ending", PACKERS)
def test_a_cut_is_an_error_wherever_it_is(ending: str) -> None:
    """Also within the last bytes, when all content is there, and at the very beginning."""
    packed = PACKERS[ending](DATA)
    for size in [*range(40), len(packed) // 2, *range(len(packed) - 12, len(packed))]:
        with pytest.raises(ShardError, match=r"http://h/a: (ends in the middle|is empty|isn't compressed)"):
            unpacked(packed[:size], ending)


@pytest.mark.parametrize("ending", PACKERS)
def test_what_follows_the_end_is_named(ending: str) -> None:
    """Whether it is long or a single byte; whatever was there before is whole."""
    packed = PACKERS[ending](DATA)
    for garbage in (b"x", b"garbage" * 1000, b"\0\0\0y", packed[:3]):
        with pytest.raises(ShardError, match="something follows that is no"):
            unpacked(packed + garbage, ending)


@pytest.mark.parametrize("ending", PACKERS)
def test_damage_is_found(ending: str) -> None:
    """By the format's own checks: any bit in its middle. zstd checks content only where its writer wanted that."""
    packed = bytearray(PACKERS[ending](DATA))
    packed[len(packed) // 2] ^= 0x10
    try:
        assert unpacked(bytes(packed), ending) != DATA
        assert ending == "tar.zst"
    except ShardError as error:
        assert "damaged" in str(error)


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("data", [b"train-0/a.jpg" + bytes(1000), b"<html>", b"\x1f\x8a123456789", b"x"])
def test_what_isn_t_compressed_so_is_said(ending: str, data: bytes) -> None:
    """A plain tar under such a name above all."""
    with pytest.raises(ShardError, match=r"isn't compressed by .*, as its name says"):
        unpacked(data, ending)


@pytest.mark.parametrize("ending", PACKERS)
def test_a_bomb_comes_in_pieces(ending: str) -> None:
    """64 MiB of zeros take a few MiB, whatever little they were packed to."""
    packed = PACKERS[ending](bytes(64 * 2**20))
    unpacking, size = Unpacking(coding_of(f"/a.{ending}"), "bomb"), 0
    tracemalloc.start()
    for piece in unpacking.feed(packed):
        assert len(piece) <= 2**20
        size += len(piece)
    assert size == 64 * 2**20
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()
    unpacking.end()


def test_frames_that_are_skipped_and_headers_with_names() -> None:
    """pzstd writes frames without content, gzip the file's name."""
    frame = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"abcd"
    assert unpacked(frame + PACKERS["tar.zst"](DATA) + frame, "tar.zst") == DATA
    squeezer = zlib.compressobj(wbits=-15)
    body = squeezer.compress(DATA) + squeezer.flush()
    named = b"\x1f\x8b\x08\x08" + bytes(6) + b"train.tar\0" + body + struct.pack("<II", zlib.crc32(DATA), len(DATA))
    assert unpacked(named, "tar.gz") == DATA


@pytest.mark.parametrize(
    ("name", "coding", "plain"),
    [
        ("a.tar", "", "a.tar"),
        ("a.tar.gz", "gzip", "a.tar"),
        ("A.TGZ", "gzip", "A.tar"),
        ("a-0.tar.zst", "zstd", "a-0.tar"),
        ("a.tar.xz", "xz", "a.tar"),
        ("a.tbz2", "bzip2", "a.tar"),
        ("a.gz", "", "a.gz"),
        ("a.tar.lz4", "", "a.tar.lz4"),
        ("a.tar.gz.tar", "", "a.tar.gz.tar"),
    ],
)
def test_names(name: str, coding: str, plain: str) -> None:
    """A name says how a tar is compressed, and what it is called without that."""
    assert (coding_of(f"/folder.tgz/{name}"), plain_name(name)) == (coding, plain)
    assert (kept_as(f"http://h/{name}") != f"http://h/{name}") == bool(coding)
    assert (kept_as(f"http://h/{name}?v=2") != f"http://h/{name}?v=2") == bool(coding)
