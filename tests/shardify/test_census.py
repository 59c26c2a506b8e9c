"""Samples over many tars: fields that differ and keys that come again are found, with the place, in bounded memory."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify.census import KeyCensus
from shardify.format.fields import FieldCensus
from shardify.format.tar import Member, SampleRecord


def record(key: str, *fields: str) -> SampleRecord:
    """Return a sample of these fields."""
    return SampleRecord(key, fields, tuple(Member(f"{key}.{field}", 512, 1) for field in fields))


def repeats(tars: list[list[str]]) -> list[str]:
    """Return what a census says of the keys of tars."""
    census = KeyCensus()
    for keys in tars:
        census.add(keys)
    return list(census.repeats((f"{number}.tar", partial(iter, keys)) for number, keys in enumerate(tars)))


@given(st.lists(st.lists(st.text("ab/é", max_size=3), unique=True, max_size=8), max_size=6))
def test_exactly_the_repeated_keys(tars: list[list[str]]) -> None:
    """Each coming again of a key is one line, with both tars; nothing else is."""
    expected, first = [], dict[str, int]()
    for number, keys in enumerate(tars):
        for key in keys:
            if key in first:
                expected.append(f"{number}.tar: key {key!r} stands in {first[key]}.tar too; keys must be unique in the whole set")
            first.setdefault(key, number)
    assert Counter(repeats(tars)) == Counter(expected)


def test_many_repeats_are_a_number() -> None:
    """Of tars that all number their samples alike a hundred keys are named, and the rest counted."""
    keys = [f"{n:06d}" for n in range(250)]
    lines = repeats([keys, ["other"], keys])
    assert len(lines) == 101 and lines[-1].startswith("150 more keys stand in several tars")
    assert all(line.startswith("2.tar: key '000") and "stands in 0.tar too" in line for line in lines[:-1])


def test_keys_are_read_again_only_where_hashes_meet() -> None:
    """Without a repeat no tar is read a second time."""
    census = KeyCensus()
    census.add(["a", "b"])
    census.add(["c"])
    unread = (("x.tar", partial(pytest.fail, "was read again")) for _ in range(2))
    assert list(census.repeats(unread)) == []


def test_fields_that_differ() -> None:
    """Samples with other fields than most are counted by what they have, with the first of each; the commonest set isn't named."""
    fields = FieldCensus()
    for n in range(10):
        fields.add(record(f"good{n}", "jpg", "cls"), "0.tar")
    fields.add(record("bare", "jpg"), "1.tar")
    fields.add(record("more", "jpg", "cls", "json"), "1.tar")
    fields.add(record("more2", "jpg", "cls", "json"), "2.tar")
    assert list(fields.differences()) == [
        "1.tar: sample 'more' has jpg, cls, json, as 2 samples do; most have cls, picture",
        "1.tar: sample 'bare' has jpg, alone; most have cls, picture",
    ]
    assert fields.all == {"jpg", "cls", "json"}


def test_pictures_of_several_types_are_alike() -> None:
    """A png beside jpgs is no difference (a reader takes the first that a sample has); order in the tar isn't one either."""
    fields = FieldCensus()
    for names in (("jpg", "cls"), ("cls", "png"), ("JPG", "cls")):
        fields.add(record("a", *names), "0.tar")
    assert list(fields.differences()) == []
    assert fields.all == {"jpg", "png", "JPG", "cls"}


@pytest.mark.case("N01")
def test_dots_in_names() -> None:
    """Files whose names have dots make a field each (N01): it is said, and thousands of them stay few lines and little memory."""
    fields = FieldCensus()
    for n in range(3000):
        fields.add(record(f"IMG{n}", f"{n}.jpg"), "0.tar")
    lines = list(fields.differences())
    assert len(lines) == 1000 and len(fields.all) == 1000
    assert "a dot in a file's name ends its key" in lines[0] and "2,000 samples with still other fields" in lines[-1]


def test_nothing_counted() -> None:
    """A census of no sample says nothing."""
    assert list(FieldCensus().differences()) == [] and repeats([]) == []
