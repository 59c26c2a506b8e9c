"""The journal: what it says was so, whatever a crash tore or a restart forgot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shardify import journal
from shardify.errors import SettingsError
from shardify.journal import Journal, Record

HEADER = Record("build", {"n": 1}, b"head")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / journal.NAME


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that names this start of the machine."""
    file = tmp_path / "boot"
    file.write_text("one\n")
    monkeypatch.setattr(journal, "_BOOT", file)
    return file


def record(number: int) -> Record:
    return Record("put", {"number": number, "text": "é\ud800"}, bytes(range(number)))


def write(path: Path, *, vouching: int = 0, durable: tuple[int, ...] = ()) -> list[Record]:
    """Write a journal of five records."""
    records = [record(number) for number in range(5)]
    with closing(Journal.create(path, HEADER)) as log:
        for number, made in enumerate(records):
            log.append(made, durable=number in durable, vouches=vouching if number == 3 else 0)
    return records


def test_records_come_back(path: Path, boot: Path) -> None:
    """Kinds, facts and bytes are read as they were written, in their order, and writing goes on behind them."""
    records = write(path)
    assert journal.read(path) == (HEADER, *records)
    with closing(Journal.reopen(path)) as log:
        assert log.records == (HEADER, *records)
        log.append(record(9))
    assert journal.read(path) == (HEADER, *records, record(9))
    assert [file.name for file in path.parent.iterdir() if file != boot] == [path.name]


def test_a_torn_end_is_cut_off(path: Path, boot: Path) -> None:
    """Cut anywhere, what was written whole is read, and writing goes on from there."""
    records = write(path)
    whole = path.read_bytes()
    ends = [len(whole)]
    for cut in range(len(whole) - 1, 0, -1):
        path.write_bytes(whole[:cut])
        try:
            found = journal.read(path)
        except SettingsError:
            break
        assert found == (HEADER, *records)[: len(found)]
        ends.append(cut)
        if cut % 50 == 0:
            with closing(Journal.reopen(path)) as log:
                log.append(record(7), durable=True)
            assert journal.read(path) == (*found, record(7))
    assert len(ends) > 100


def test_a_flipped_bit_ends_what_is_believed(path: Path, boot: Path) -> None:
    """A frame that isn't what was written isn't believed, nor what follows."""
    records = write(path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b'"number": 2')] ^= 1
    path.write_bytes(raw)
    assert journal.read(path) == (HEADER, *records[:2])


def test_after_a_restart_only_what_was_on_the_medium_holds(path: Path, boot: Path) -> None:
    """Records that were not made sure are forgotten; those that were, or that a later one vouches for, hold."""
    records = write(path, vouching=3)
    assert journal.read(path) == (HEADER, *records)
    boot.write_text("another\n")
    assert journal.read(path) == (HEADER, *records[:2], records[3])
    records = write(path, durable=(3,))
    boot.write_text("a third\n")
    assert journal.read(path) == (HEADER, records[3])


def test_nothing_vouches_for_what_was_forgotten(path: Path, boot: Path) -> None:
    """What a restart made doubtful is never believed again, whatever is written after it; what was sure stays sure."""
    records = write(path, vouching=3)
    boot.write_text("another\n")
    with closing(Journal.reopen(path)) as log:
        log.append(record(6))
        log.append(record(7), vouches=log.count)
        log.append(record(8))
    sure = (HEADER, *records[:2], records[3], record(6), record(7))
    assert journal.read(path) == (*sure, record(8))
    boot.write_text("a third\n")
    assert journal.read(path) == sure


def test_what_is_no_journal(path: Path) -> None:
    """Another file, another version, an empty one: named, with the next step."""
    for data in (b"", b"shardify journal 2\n", b"{}", b"shardify journal 1\nxx"):
        path.write_bytes(data)
        with pytest.raises(SettingsError, match=r"no journal of this version.*--force"):
            journal.read(path)
