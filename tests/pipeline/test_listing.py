"""An index of which lines are parsed as they are asked for: the same samples, and no damage goes unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from residence import pack

from pipeline.errors import ShardError
from pipeline.items import Wanted
from pipeline.listing import Listing
from pipeline.samples import ShardFile, ShardReader, open_index
from shardify.format import index, tar


def records(sizes: list[int]) -> list[tar.SampleRecord]:
    """Return samples of two members, one behind the other, with names that aren't ASCII."""
    at, found = 0, []
    for number, size in enumerate(sizes):
        picture = tar.Member(f"ä/{number}.jpg", at + tar.BLOCK, size)
        label = tar.Member(f"ä/{number}.cls", picture.offset + tar.padded(size) + tar.BLOCK, 1)
        found.append(tar.SampleRecord(f"ä/{number}", ("jpg", "cls"), (picture, label)))
        at = label.offset + tar.BLOCK
    return found


@given(st.lists(st.integers(0, 10**7), max_size=30))
def test_it_lists_what_the_index_holds(sizes: list[int]) -> None:
    """Each sample by its number, all of them in order, and none beyond."""
    expected = records(sizes)
    listing = Listing.of(index.dump(expected), "x.idx")
    assert listing is not None and len(listing) == len(expected)
    assert list(listing) == expected == [listing[at] for at in range(len(listing))]
    for at in (-1, len(expected)):
        with pytest.raises(IndexError, match=r"x\.idx"):
            listing[at]


def test_a_line_is_parsed_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that wants one sample of a shard parses one line."""
    parsed: list[str] = []
    record = index.record
    monkeypatch.setattr(index, "record", lambda line, where: (parsed.append(where), record(line, where))[1])
    listing = Listing.of(index.dump(records([5] * 100)), "x.idx")
    assert listing is not None
    assert parsed == []
    assert listing[7].key == "ä/7"
    assert parsed == ["x.idx line 9"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    """A line that is damaged is an error of the sample that it tells of, with file and line; others are read."""
    pack(tmp_path, 10, 1)
    path = tmp_path / "train-000000.idx"
    lines = path.read_text().split("\n")
    lines[4] = lines[4].replace(" cls ", " clx ")
    path.write_text("\n".join(lines))
    tarred = tmp_path / "train-000000.tar"
    reader = ShardReader([ShardFile(str(tarred), 10, tarred.stat().st_size)], Wanted(("jpg",), "cls"))
    assert reader.read(0, 2)["__key__"]
    with pytest.raises(ShardError, match=r"train-000000\.idx line 5: clx .* is not"):
        reader.read(0, 3)
    assert reader.read(0, 4)["__key__"]


def test_an_index_in_another_order_is_parsed_whole(tmp_path: Path) -> None:
    """An index that lists samples in another order than its tar's is as good."""
    pack(tmp_path, 10, 1)
    path = tmp_path / "train-000000.idx"
    first, *lines = path.read_text().splitlines()
    assert isinstance(open_index(str(tmp_path / "train-000000.tar")), Listing)
    path.write_text("\n".join([first, *reversed(lines)]) + "\n")
    found = open_index(str(tmp_path / "train-000000.tar"))
    assert isinstance(found, list)
    assert [record.key for record in found] == [line.split()[3].removesuffix(".jpg") for line in reversed(lines)]
