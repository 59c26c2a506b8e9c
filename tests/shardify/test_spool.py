"""The spool: what is put comes back by slot, in bounded memory, and survives what it says it survives."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify import journal, spool
from shardify.errors import StorageError
from shardify.items import Refused
from shardify.journal import Journal, Record
from shardify.spool import Spool


@contextmanager
def opened(folder: Path, bounds: list[int], memory: int) -> Iterator[tuple[Spool, Journal]]:
    """Open a spool, new or as its journal says."""
    path = folder / "journal"
    with closing(Journal.reopen(path) if path.exists() else Journal.create(path, Record("build", {}))) as log:
        made = Spool(folder / "spool", np.array(bounds, np.int64), memory, log)
        made.restore(log.records)
        yield made, log


def data(slot: int, size: int) -> bytes:
    """Return a picture that follows from its slot."""
    return (b"%d:" % slot * (size // 2 + 1))[:size]


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    order=st.randoms(use_true_random=False),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    memory=st.integers(1, 3000),
    refused=st.sets(st.integers(0, 39)),
)
def test_what_is_put_comes_back(sizes: list[int], order: object, cuts: list[int], memory: int, refused: set[int]) -> None:
    """For any sizes, order, buckets and memory: every slot's bytes, field and kind, in slot order; those refused don't."""
    bounds = sorted({0, len(sizes), *(min(cut, len(sizes)) for cut in cuts)})
    slots = list(range(len(sizes)))
    order.shuffle(slots)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name, opened(Path(name), bounds, memory) as (made, _):
        for slot in slots:
            if slot in refused:
                made.refuse(slot, slot, Refused("path", "cut", "half"))
            else:
                made.put(slot, ("jpg", "png")[slot % 2], "jpeg", data(slot, sizes[slot]))
        made.end()
        wanted = [slot for slot in range(len(sizes)) if slot not in refused]
        assert made.sizes.tolist() == [-1 if slot in refused else sizes[slot] for slot in range(len(sizes))]
        assert [(slot, bytes(found)) for slot, found in made.take(wanted)] == [(slot, data(slot, sizes[slot])) for slot in wanted]
        assert all(made.describe(slot) == (("jpg", "png")[slot % 2], "jpeg") for slot in wanted)
        assert made.fields(0, len(sizes)) == {("jpg", "png")[slot % 2] for slot in wanted}
        made.free(len(sizes))
        assert not (Path(name) / "spool").exists() or not list((Path(name) / "spool").iterdir())


def fill(made: Spool, slots: range | list[int], size: int = 1000) -> None:
    for slot in slots:
        made.put(slot, "jpg", "jpeg", data(slot, size))


def test_what_fits_the_memory_writes_nothing(tmp_path: Path) -> None:
    """Within the memory no file is made."""
    with opened(tmp_path, [0, 100], 200_000) as (made, _):
        fill(made, range(100))
        made.end()
        assert not made.in_files and not (tmp_path / "spool").exists()


def test_memory_is_bounded(tmp_path: Path) -> None:
    """What is held while samples are put, and while they are taken, stays near the memory; no file stays open."""
    memory, count, size = 2_000_000, 1000, 20_000
    before = len(os.listdir("/proc/self/fd"))
    with opened(tmp_path, [count * part // 16 for part in range(17)], memory) as (made, _):
        tracemalloc.start()
        fill(made, [slot * 7 % count for slot in range(count)], size)
        made.end()
        sum(len(found) for _, found in made.take(range(count)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert peak < 1.5 * memory < count * size / 6


def test_a_bucket_above_the_memory_comes_back_in_parts(tmp_path: Path) -> None:
    """Pictures that grew by re-encoding make a bucket larger than planned: it is read in parts that fit."""
    with opened(tmp_path, [0, 100], 20_000) as (made, _):
        fill(made, [slot * 7 % 100 for slot in range(100)])
        made.end()
        tracemalloc.start()
        for slot, found in made.take(range(100)):
            assert bytes(found) == data(slot, 1000)
        assert tracemalloc.get_traced_memory()[1] < 60_000
        tracemalloc.stop()


def test_files_go_bucket_by_bucket(tmp_path: Path) -> None:
    """A bucket's file goes when the slots below its end are done, not before."""
    with opened(tmp_path, [0, 10, 20, 30], 1) as (made, _):
        fill(made, range(30))
        made.end()
        left = []
        for done in (9, 10, 25, 30):
            made.free(done)
            left.append(len(list((tmp_path / "spool").iterdir())))
        assert left == [3, 2, 1, 0]


def test_what_is_noted_is_there_again(tmp_path: Path) -> None:
    """A run that ends without a word leaves what it noted; what lies beyond in the files is cut off, and put again."""
    with opened(tmp_path, [0, 50, 100], 30_000) as (made, _):
        fill(made, range(0, 100, 2))
        made.refuse(1, 1, Refused("one.jpg", "cut", "half"))
        made.checkpoint()
        noted = ~made.missing() & (np.arange(100) % 2 == 0)
        fill(made, range(3, 100, 2))
    with opened(tmp_path, [0, 50, 100], 30_000) as (made, log):
        kept = ~made.missing()
        assert 20 < kept.sum() < 50 and not (kept & ~noted).any()
        assert spool.refused_rows(log.records) == [(1, Refused("one.jpg", "cut", "half"))]
        fill(made, np.flatnonzero(~kept).tolist())
        made.end()
        assert [bytes(found) for _, found in made.take(range(100))] == [data(slot, 1000) for slot in range(100)]


def test_a_file_that_is_gone_or_short_is_put_again(tmp_path: Path) -> None:
    """Files that don't hold what was noted count as missing, not as there."""
    with opened(tmp_path, [0, 50, 100], 1) as (made, _):
        fill(made, range(100))
        made.end()
    (tmp_path / "spool" / "000000").unlink()
    os.truncate(tmp_path / "spool" / "000001", 49_999)
    with opened(tmp_path, [0, 50, 100], 1) as (made, _):
        assert made.missing().all() and (made.sizes == 1000).all()


def test_what_was_held_is_known_by_its_size(tmp_path: Path) -> None:
    """Where nothing was in files, a later run knows every size and has to read the bytes again; other bytes are refused."""
    with opened(tmp_path, [0, 10], 10**6) as (made, _):
        fill(made, range(10))
        made.end()
    with opened(tmp_path, [0, 10], 10**6) as (made, _):
        assert made.missing().all() and (made.sizes == 1000).all() and made.describe(3) == ("jpg", "jpeg")
        fill(made, range(9))
        with pytest.raises(StorageError, match=r"slot 9: 999 bytes where a former run had 1000; begin anew with --force"):
            made.put(9, "jpg", "jpeg", bytes(999))


def test_damage_is_found(tmp_path: Path) -> None:
    """Bytes that aren't those that were put are an error, never packed; a later run makes them anew."""
    with opened(tmp_path, [0, 10], 1) as (made, _):
        fill(made, range(10))
        made.end()
        raw = bytearray((tmp_path / "spool" / "000000").read_bytes())
        raw[5500] ^= 1
        (tmp_path / "spool" / "000000").write_bytes(raw)
        with pytest.raises(StorageError, match=r"damaged since it was written.*--resume"):
            list(made.take(range(10)))
    with opened(tmp_path, [0, 10], 1) as (made, _):
        assert made.missing().all()


def test_checkpoints_come_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few seconds what is in files is noted."""
    now = 0.0
    monkeypatch.setattr(spool.time, "monotonic", lambda: now)
    with opened(tmp_path, [0, 500, 1000], 1) as (made, _):
        lengths = []
        for slot in range(1000):
            now += 0.2
            fill(made, [slot], 10)
            lengths.append((tmp_path / "journal").stat().st_size)
    assert len(set(lengths)) - 1 == pytest.approx(200 / spool.NOTE_SECONDS, abs=2)


def test_what_is_vouched_for_is_on_the_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are on the medium, and their names, before the journal vouches for what it says of them, and for no more."""
    events: list[str] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(spool, "SYNC_BYTES", 10_000)
    (tmp_path / "boot").write_text("one")
    monkeypatch.setattr(journal, "_BOOT", tmp_path / "boot")
    with opened(tmp_path, [0, 50, 100], 1) as (made, _):
        events.clear()
        fill(made, range(10, 32))
        before = (~made.missing()).nonzero()[0].tolist()
        fill(made, range(60, 72))
        made.close()
        assert events == ["000000", "spool", "journal", "000000", "spool", "journal", "000001", "spool", "journal"]
    (tmp_path / "boot").write_text("another")
    with opened(tmp_path, [0, 50, 100], 1) as (made, _):
        assert (~made.missing()).nonzero()[0].tolist() == [*before, *range(60, 71)]


def test_a_resumed_run_vouches_for_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a killed run left unsynced are put on the medium before anything vouches for them."""
    synced: list[str] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with opened(tmp_path, [0, 50, 100], 1) as (made, _):
        fill(made, range(60, 80))
        made.checkpoint()
    monkeypatch.setattr(spool, "SYNC_BYTES", 1000)
    with opened(tmp_path, [0, 50, 100], 1) as (made, _):
        synced.clear()
        fill(made, range(10, 12))
        made.close()
        assert synced.index("000001") < synced.index("journal")
