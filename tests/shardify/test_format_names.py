"""Names: keys, shards and fields follow one grammar, whatever the source calls its files."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify.format import names

ANY_TEXT = st.text(st.characters(), max_size=200)
WEBDATASET = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # the rule of FORMATS.md


@given(ANY_TEXT)
def test_any_id_becomes_a_key(identifier: str) -> None:
    """make_key returns a key for every text, leaves keys as they are, and so is idempotent."""
    key = names.make_key(identifier)
    assert names.is_key(key)
    assert names.make_key(key) == key
    assert (key == identifier) == names.is_key(identifier)


@given(ANY_TEXT, ANY_TEXT)
def test_different_ids_have_different_keys(first: str, second: str) -> None:
    """Two ids never share a key, even if their slugs are equal."""
    if first != second:
        assert names.make_key(first) != names.make_key(second)


@pytest.mark.parametrize(
    ("identifier", "key"),
    [
        ("0000059611143525", "0000059611143525"),
        ("IMG.2020.01", "IMG_2020_01-8b7f81cac76dd00a"),
        ("a/b c", "a_b_c-ec3aa749a081644c"),
        ("été", "t_-bc5121b7615020d8"),
        ("_x", "x-2c5e3391d97cad5c"),
        ("", "e4a6a0577479b2b4"),
        ("x" * 91, "x" * 60 + "-93a130063471a708"),
    ],
)
def test_keys_stay_what_they_are(identifier: str, key: str) -> None:
    """Keys are pinned: another release gives the same ones."""
    assert names.make_key(identifier) == key


@pytest.mark.parametrize("text", ["", "a.b", "_a", "a b", "a/b", "é", "a\n", "x" * 91])
def test_what_is_no_key(text: str) -> None:
    """A key has no dot, blank, slash or letter beyond ASCII, doesn't begin with _, and fits in 90 characters."""
    assert not names.is_key(text)


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True), st.integers(0, 10**9))
def test_shard_names_are_read_back(split: str, number: int) -> None:
    """parse_shard_name inverts shard_name, and an index stands beside its shard."""
    name = names.shard_name(split, number)
    assert names.parse_shard_name(name) == (split, number)
    assert names.index_name(name) == name.removesuffix("tar") + "idx"


@pytest.mark.parametrize("name", ["train-00001.tar", "train.tar", "-000001.tar", "train-000001.tar.partial", "train-000001.idx"])
def test_other_names_are_no_shards(name: str) -> None:
    """parse_shard_name knows a shard from its index, its temporary name and other tars."""
    assert names.parse_shard_name(name) is None


@given(st.text(st.sampled_from("ab./_-"), max_size=12))
def test_fields_begin_at_the_first_dot_of_the_basename(member: str) -> None:
    """split_field follows webdataset's own expression, but for names that begin with the dot: they have no key."""
    match = None if member.rpartition("/")[2].startswith(".") else WEBDATASET.match(member)
    assert names.split_field(member) == ((match[1], match[2]) if match else None)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("http://user:word@host/a.tar", "http://...@host/a.tar"),
        ("http://u:p@ss@host/x", "http://...@host/x"),
        ("http://user:pa/ss@host/x", "http://...@host/x"),
        ("s3://k:se/cret@b/x?sig=1", "s3://...@b/x?..."),
        ("https://host:8080/a@b/c.tar", "https://host:8080/a@b/c.tar"),
        ("s3://bucket/a@b.tar", "s3://bucket/a@b.tar"),
        ("--set shards.out=https://host/x?sig=1 --split a", "--set shards.out=https://host/x?... --split a"),
        ("no URL: a@b?c", "no URL: a@b?c"),
    ],
)
def test_no_secret_of_a_url_is_shown(text: str, left: str) -> None:
    """Whatever a password holds, and an "@" in a path stays."""
    assert names.without_secrets(text) == left
