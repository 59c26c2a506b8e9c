"""Raw samples by place: index and tar agree, and what is wrong is named."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from foreign import mk
from opened import open_below
from packing import PackedSet, jpeg, pack, write_tar

from pipeline.errors import ShardError
from pipeline.items import Wanted
from pipeline.raw import RawReader
from pipeline.samples import Recent, ShardFile, ShardReader, count_samples, read_index
from pipeline.stores.local import LocalFile
from shardify.format import index
from shardify.format.names import index_name

WANTED = Wanted(("jpg", "png"), "cls")


def reader_of(folder: Path, wanted: Wanted = WANTED) -> ShardReader:
    paths = sorted(folder.glob("*.tar"))
    return ShardReader([ShardFile(str(p), count_samples(str(p)), p.stat().st_size) for p in paths], wanted)


def test_index_and_tar_agree(small_set: PackedSet, tmp_path: Path) -> None:
    """Each sample read by the index, or by the tar's headers where there is none, is the one that was packed."""
    for path in small_set.folder.glob("*.tar"):
        os.link(path, tmp_path / path.name)
    for folder in (small_set.folder, tmp_path):
        reader = reader_of(folder)
        got = [reader.read(shard, at) for shard in range(4) for at in range(50)]
        assert [sample["__key__"] for sample in got] == small_set.keys
        assert all(sample["jpg"] == small_set.pictures[sample["__key__"]] for sample in got)
        assert all(int(sample["cls"]) == small_set.labels[sample["__key__"]] for sample in got)


def test_the_first_field_that_a_sample_has(tmp_path: Path) -> None:
    """The picture's field is the first of the wanted ones that the sample has; far members are read apart."""
    write_tar(
        tmp_path / "a.tar",
        [("a", [("png", b"p"), ("jpg", b"j"), ("cls", b"1")]), ("b", [("png", b"q"), ("bin", bytes(200_000)), ("cls", b"2")])],
    )
    reader = reader_of(tmp_path)
    assert {k: v for k, v in reader.read(0, 0).items() if k in ("jpg", "png", "cls")} == {"jpg": b"j", "cls": b"1"}
    assert reader.read(0, 1)["png"] == b"q"
    assert reader.read(0, 1)["cls"] == b"2"


@pytest.mark.parametrize(("fields", "message"), [([("cls", b"1")], "lacks a picture"), ([("jpg", b"j")], r"lacks a label \(cls\)")])
def test_a_sample_that_lacks_a_field(tmp_path: Path, fields: list[tuple[str, bytes]], message: str) -> None:
    """A sample without the wanted fields is an error with its key, what it has, and the option to set."""
    write_tar(tmp_path / "a.tar", [("good", [("jpg", b"j"), ("cls", b"1")]), ("bad", fields)])
    reader = reader_of(tmp_path)
    assert reader.read(0, 0)["__key__"] == "good"
    with pytest.raises(ShardError, match=message) as caught:
        reader.read(0, 1)
    assert "'bad'" in str(caught.value)
    assert "LoaderOptions" in str(caught.value)


@pytest.mark.case("N01")
def test_a_key_that_a_dot_cut(tmp_path: Path) -> None:
    """Names with dots leave fields that nobody asks for: the error names tar, key and what is there, and is no KeyError."""
    mk(tmp_path / "a.tar", [("IMG.2020.01.jpg", b"j"), ("IMG.2020.01.cls", b"1")])
    said = r"a\.tar: sample 'IMG' \(at byte 0\) lacks a picture \(jpg, png\); its fields are 2020\.01\.jpg, 2020\.01\.cls: "
    with pytest.raises(ShardError, match=said):
        reader_of(tmp_path).read(0, 0)


@pytest.mark.parametrize(
    ("others", "label"),
    [
        ([("b", 3), ("a", 1000)], b"2"),
        ([("a", 1000), ("b", 3)], b"2"),
        ([("c", 3), ("d", 1000)], b"2"),
        ([("a", 3), ("b", 1000)], b"12"),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_a_tar_of_the_same_length_that_was_replaced(tmp_path: Path, others: list[tuple[str, int]], label: bytes, raw: bool) -> None:
    """A sample whose header isn't what the index says is an error with the place: no other sample's bytes in its stead."""
    path = tmp_path / "a.tar"
    records = write_tar(path, [(key, [("jpg", bytes(size)), ("cls", b"1")]) for key, size in (("a", 3), ("b", 1000))])
    Path(index_name(str(path))).write_bytes(index.dump(records))
    shards = [ShardFile(str(path), 2, path.stat().st_size)]
    reader = RawReader(shards) if raw else ShardReader(shards, WANTED)
    assert [reader.read(0, at)["__key__"] for at in range(2)] == ["a", "b"]
    reader.close()
    write_tar(path, [(key, [("jpg", bytes(size)), ("cls", label)]) for key, size in others])
    with pytest.raises(ShardError, match=r"a\.tar: its members aren't those of sample '[ab]'.* begins at byte \d+.*index it again"):
        [reader.read(0, at) for at in range(2)]


def test_an_index_of_another_tar(small_set: PackedSet, tmp_path: Path) -> None:
    """An index that doesn't count what the set counts is an error."""
    pack(tmp_path, 10, 1)
    reader = ShardReader([ShardFile(str(tmp_path / "train-000000.tar"), 11, 0)], WANTED)
    with pytest.raises(ShardError, match=r"10 samples.*11"):
        reader.read(0, 0)


@pytest.mark.parametrize("text", ["", "v1.2 3\n", "nonsense\n", "v1.2 1\njpg x 3 a.jpg\n", "v1.2 1\njpg 512\n"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    """A damaged index is a ShardError that names it, never a crash."""
    pack(tmp_path, 10, 1)
    (tmp_path / "train-000000.idx").write_text(text)
    with pytest.raises(ShardError, match=r"train-000000\.idx"):
        read_index(str(tmp_path / "train-000000.tar"))


def test_short_reads(tmp_path: Path) -> None:
    """A file that ends early, isn't there, or is a folder is a ShardError with its path."""
    path = tmp_path / "a.tar"
    path.write_bytes(b"abc")
    file = LocalFile(str(path))
    assert file.size == 3
    assert file.read(1, 2) == b"bc"
    with pytest.raises(ShardError, match=r"ends at byte 3"):
        file.read(2, 2)
    file.close()
    file.close()
    with pytest.raises(ShardError, match="can't be opened"):
        LocalFile(str(tmp_path / "b.tar"))


def test_few_files_stay_open(tmp_path: Path) -> None:
    """However many shards are read, few stay open, and none after `close`."""
    pack(tmp_path, 300, 100, make=lambda n: jpeg(0))
    reader = reader_of(tmp_path)
    for shard in range(100):
        reader.read(shard, 0)
    assert 0 < open_below(tmp_path) <= 64
    reader.close()
    assert open_below(tmp_path) == 0
    assert reader.read(3, 0)["__key__"] == "train000009"


def test_a_pickled_reader_starts_empty(small_set: PackedSet) -> None:
    """What is sent to a worker holds no open file and no index."""
    reader = reader_of(small_set.folder)
    fresh = len(pickle.dumps(reader))
    reader.read(0, 0)
    assert len(pickle.dumps(reader)) == fresh
    assert pickle.loads(pickle.dumps(reader)).read(0, 0) == reader.read(0, 0)


def test_recent_keeps_what_was_used_last() -> None:
    """The least recently used value goes, and is told so."""
    dropped: list[int] = []
    recent = Recent(2, lambda key: key * 10, dropped.append)
    assert [recent.get(k) for k in (1, 2, 1, 3)] == [10, 20, 10, 30]
    assert dropped == [20]
    recent.clear()
    assert sorted(dropped) == [10, 20, 30]


def test_recent_keeps_what_its_limit_holds() -> None:
    """Values that weigh more than one go sooner; the one asked for last stays, whatever it weighs."""
    dropped: list[int] = []
    recent = Recent(10, lambda key: key, dropped.append, weigh=lambda value: value)
    for key, gone in ((4, []), (5, []), (1, []), (3, [4]), (20, [4, 5, 1, 3]), (2, [4, 5, 1, 3, 20])):
        assert recent.get(key) == key and dropped == gone


def test_what_lies_behind_the_last_sample_is_no_error(tmp_path: Path) -> None:
    """A README behind the samples, or other tools' padding, doesn't make an index wrong."""
    records = write_tar(tmp_path / "a.tar", [("a", [("jpg", b"j"), ("cls", b"1")]), ("README", [("", bytes(50_000))])])
    raw = (tmp_path / "a.tar").read_bytes().replace(b"README.", b"README\0")
    head = raw.index(b"README")
    block = bytearray(raw[head : head + 512])
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    (tmp_path / "a.tar").write_bytes(raw[:head] + bytes(block) + raw[head + 512 :] + bytes(1_000_000))
    (tmp_path / "a.idx").write_bytes(index.dump(records[:1]))
    assert reader_of(tmp_path).read(0, 0)["__key__"] == "a"
