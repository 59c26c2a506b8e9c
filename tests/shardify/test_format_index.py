"""Indexes: DALI's layout, to the letter, and damage is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify.errors import FormatError
from shardify.format import index
from shardify.format.tar import Member, SampleRecord

TEXT = b"v1.2 2\njpg 512 48213 a1.jpg cls 49664 1 a1.cls\njpg 51200 50011 b7.jpg cls 102400 2 b7.cls\n"
RECORDS = [
    SampleRecord("a1", ("jpg", "cls"), (Member("a1.jpg", 512, 48213), Member("a1.cls", 49664, 1))),
    SampleRecord("b7", ("jpg", "cls"), (Member("b7.jpg", 51200, 50011), Member("b7.cls", 102400, 2))),
]
KEYS = st.from_regex(r"[A-Za-z0-9-][A-Za-z0-9_-]{0,9}", fullmatch=True)
FIELDS = st.lists(st.sampled_from(["jpg", "cls", "json", "tar.gz"]), min_size=1, max_size=4, unique=True)


def test_the_layout() -> None:
    """An index is what FORMATS.md says, byte for byte, both ways."""
    assert index.dump(RECORDS) == TEXT
    assert index.load(TEXT) == RECORDS
    assert index.count("v1.2 2") == 2


@given(st.lists(st.tuples(KEYS, FIELDS), max_size=5), st.integers(0, 2**40))
def test_what_is_written_is_read(samples: list[tuple[str, list[str]]], offset: int) -> None:
    """load inverts dump for any samples."""
    records = [
        SampleRecord(key, tuple(fields), tuple(Member(f"{key}.{field}", offset, 7) for field in fields)) for key, fields in samples
    ]
    assert index.load(index.dump(records)) == records


@given(st.integers(0, len(TEXT) - 2))
def test_a_cut_index_is_an_error(size: int) -> None:
    """Wherever an index is cut, it isn't taken for a shorter one."""
    with pytest.raises(FormatError, match=r"x\.idx"):
        index.load(TEXT[:size], "x.idx")


@given(st.binary(max_size=200))
def test_noise_is_a_format_error(noise: bytes) -> None:
    """Bytes that are no index raise FormatError and nothing else."""
    with pytest.raises(FormatError):
        index.load(b"v1.2 1\n" + noise.replace(b" 1 ", b"") + b"\n!")


@pytest.mark.parametrize(
    "line",
    [
        "jpg 512 1 a.jpg cls 2",
        "jpg -5 1 a.jpg",
        "jpg 1_0 1 a.jpg",
        "jpg ٣ 1 a.jpg",
        "png 512 1 a.jpg",
        "jpg 512 1 a",
        "jpg 512 1 a.jpg cls 1024 1 b.cls",
        "jpg 512 1 a.jpg jpg 1024 1 a.jpg",
        "",
    ],
)
def test_a_wrong_line_is_named(line: str) -> None:
    """A line that isn't four words a member, all of one sample, is an error with its number."""
    with pytest.raises(FormatError, match=r"x\.idx line 2"):
        index.load(f"v1.2 1\n{line}\n".encode(), "x.idx")


@pytest.mark.parametrize("first", ["", "v1.1 2", "v1.2", "v1.2 -1", "v1.2 two", "<html>"])
def test_another_first_line_is_an_error(first: str) -> None:
    """Only DALI's version with names is read; the message shows what stands there."""
    with pytest.raises(FormatError, match="first line of an index"):
        index.count(first, "x.idx")


@pytest.mark.parametrize("name", ["a b.jpg", "a\tb.jpg", "a\u2028b.jpg", ""])
def test_blanks_are_refused(name: str) -> None:
    """A name that would make two words of one is refused when it is written."""
    with pytest.raises(FormatError, match="blank"):
        index.dump([SampleRecord("a", ("jpg",), (Member(name, 512, 1),))])
