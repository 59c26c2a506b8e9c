"""Manifests: valid wids indexes that say the same on every machine, and whose damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify.errors import FormatError
from shardify.format import manifest
from shardify.format.manifest import Manifest, ShardEntry, Skipped

TEXT = st.text(max_size=8)
ENTRIES = st.builds(
    ShardEntry,
    url=st.from_regex(r"[a-z]{1,5}-[0-9]{6}\.tar", fullmatch=True),
    nsamples=st.integers(0, 10**9),
    filesize=st.integers(0, 2**50),
    sha256=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    index=st.just("") | st.from_regex(r"[a-z]{1,5}/[a-z]{1,5}\.idx", fullmatch=True),
).map(lambda entry: replace(entry, filesize=entry.filesize and max(entry.filesize, 512 * entry.nsamples)))
MANIFESTS = st.builds(
    Manifest,
    name=TEXT,
    split=TEXT,
    shards=st.lists(ENTRIES, max_size=4).map(tuple),
    classes=st.none() | st.lists(TEXT, max_size=4).map(tuple),
    fields=st.lists(TEXT, max_size=3).map(tuple),
    settings=st.dictionaries(TEXT, st.none() | st.integers() | TEXT | st.lists(TEXT, max_size=2), max_size=3),
    opencv=st.none() | TEXT,
    skipped=st.dictionaries(
        TEXT, st.builds(Skipped, count=st.integers(0, 9), keys=st.lists(TEXT, max_size=2).map(tuple)), max_size=2
    ),
    indexed=st.booleans(),
)
ONE = Manifest("set", "train", (ShardEntry("train-000000.tar", 4, 20480, "ab" * 32),), classes=("a", "b"))


@given(MANIFESTS)
def test_what_is_written_is_read(made: Manifest) -> None:
    """load inverts dump for any manifest."""
    assert manifest.load(manifest.dump(made)) == made


@given(MANIFESTS)
def test_it_is_a_wids_index(made: Manifest) -> None:
    """The keys that wids reads are there, with wids' meaning, in JSON that any reader takes."""
    raw = json.loads(manifest.dump(made).decode("utf-8"))
    assert (raw["__kind__"], raw["wids_version"], raw["name"]) == ("wids-shard-index-v1", 1, made.name)
    assert [(s["url"], s["nsamples"], s["filesize"]) for s in raw["shardlist"]] == [
        (s.url, s.nsamples, s.filesize) for s in made.shards
    ]
    assert raw["samples"] == made.samples and raw["bytes"] == made.bytes and raw["digest"] == made.digest


def test_what_packing_writes_has_no_keys_of_indexing() -> None:
    """A packed set's manifest stays what it was: where its indexes lie and who packed it are said of others' tars alone."""
    raw = json.loads(manifest.dump(ONE))
    assert "indexed" not in raw and set(raw["shardlist"][0]) == {"url", "nsamples", "filesize", "sha256"}


def test_a_wids_index_of_others_is_read() -> None:
    """What others' indexes lack has defaults: no hash, no classes, no fields."""
    other = {"wids_version": 1, "shardlist": [{"url": "http://h/a/0.tar?sig=1", "nsamples": 3}]}
    made = manifest.load(json.dumps(other).encode())
    assert made == Manifest("", "", (ShardEntry("http://h/a/0.tar?sig=1", 3, 0, ""),), None, ())
    assert made.shards[0].name == "0.tar"


def test_the_digest_is_over_names_counts_and_hashes() -> None:
    """The same shards under another URL are the same set; another order, count or hash is another one (pinned)."""
    moved = replace(ONE, shards=(replace(ONE.shards[0], url="https://host/x/train-000000.tar?sig=1"),))
    assert moved.digest == ONE.digest == "8b2966156d01c312bdcb515875ec42b2e9afaef1aef89295c376fe941b8dd688"
    for other in ({"nsamples": 5}, {"sha256": "cd" * 32}, {"url": "train-000001.tar"}):
        assert replace(ONE, shards=(replace(ONE.shards[0], **other),)).digest != ONE.digest  # type: ignore[arg-type]


def test_texts_stay_readable_where_they_can() -> None:
    """Classes beyond ASCII stand as they are; half a character (an undecodable file name) is escaped, and comes back."""
    made = replace(ONE, classes=("été", "\udcff"))
    assert manifest.load(manifest.dump(made)) == made
    assert "été" in manifest.dump(replace(ONE, classes=("été",))).decode()
    manifest.dump(made).decode("utf-8")


def broken(**changes: Any) -> bytes:
    """Return ONE's JSON with keys replaced, or removed (None)."""
    raw = json.loads(manifest.dump(ONE)) | changes
    return json.dumps({key: value for key, value in raw.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (manifest.dump(ONE)[:-20], "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "wids_version"),
        (broken(wids_version=2), "wids_version"),
        (broken(format_version=2), "upgrade"),
        (broken(format_version="1"), "format_version"),
        (broken(shardlist=None), "'shardlist' is missing"),
        (broken(shardlist={}), "'shardlist' is dict"),
        (broken(shardlist=[{"nsamples": 1}]), r"shardlist\[0\]: 'url' is missing"),
        (broken(shardlist=[{"url": "a.tar"}]), r"shardlist\[0\]: 'nsamples' is missing"),
        (broken(shardlist=[{"url": "a.tar", "nsamples": True}]), "'nsamples' is bool"),
        (broken(shardlist=[{"url": "a.tar", "nsamples": -1}]), "negative"),
        (broken(shardlist=[{"url": "a.tar", "nsamples": 10**18}]), r"shardlist\[0\]: 10*0 samples in 0 bytes is more than a shard"),
        (broken(shardlist=[{"url": "a.tar", "nsamples": 1, "filesize": 2**63}]), "more than a shard holds"),
        (
            broken(shardlist=[{"url": "a.tar", "nsamples": 10**7, "filesize": 1535}]),
            "10000000 samples in 1535 bytes is more than a shard",
        ),
        (
            broken(shardlist=[{"url": "a.tar", "nsamples": 1, "sha256": "a" * 63}]),
            "a sha256 has 64 hexadecimal digits, and this one is",
        ),
        (broken(shardlist=[{"url": "\ud800.tar", "nsamples": 1}]), "half a character"),
        (broken(shardlist=["a.tar"]), r"shardlist\[0\]"),
        (broken(classes=[1]), "'classes'"),
        (broken(classes="ab"), "'classes'"),
        (broken(fields=[None]), "'fields'"),
        (broken(opencv=5), "'opencv'"),
        (broken(skipped={"missing": 3}), "'count'"),
        (broken(skipped={"missing": {"count": 1, "keys": [3]}}), "'keys'"),
    ],
)
def test_a_malformed_manifest_names_the_key(data: bytes, said: str) -> None:
    """Anything malformed is one FormatError that names the file and the key."""
    with pytest.raises(FormatError, match=rf"m\.json.*{said}"):
        manifest.load(data, "m.json")


def test_manifests_of_a_folder(tmp_path: Path) -> None:
    """find lists a folder's manifests by name, or takes the file itself; read loads one."""
    for name in ("val-shardindex.json", "train-shardindex.json", "other.json", "train-000000.tar"):
        (tmp_path / name).write_bytes(manifest.dump(ONE))
    assert [path.name for path in manifest.find(tmp_path)] == ["train-shardindex.json", "val-shardindex.json"]
    assert manifest.find(tmp_path / "other.json") == [tmp_path / "other.json"]
    assert manifest.read(tmp_path / "other.json") == ONE
