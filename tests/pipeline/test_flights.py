"""Windows on their way from afar: runs that don't wait for each other, disks that are full before they say so."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from afar import QUICK
from faulty import Faulty
from prefetching import COUNT, SHARDS, SIZE, TOTAL, files_of, layout_of, packed
from residence import PackedSet

from pipeline.epoch import EpochOrder
from pipeline.errors import SourceError
from pipeline.prefetch import flights
from pipeline.prefetch.flights import Flight, Flights, Wanted
from pipeline.prefetch.plan import Fetching, Plan
from pipeline.prefetch.remote import RemoteReader
from pipeline.prefetch.walk import needs
from pipeline.progress import Block, Count
from pipeline.stores.cache import CHUNK, Cache, Entry

__all__ = ["packed"]

WINDOW, BATCH = 10 * SIZE, 16


@pytest.fixture
def block() -> Iterator[Block]:
    """What a trainer, its prefetcher and its workers share."""
    made = Block.make()
    yield made
    made.close()


def test_a_run_is_not_held_up_by_one_before_it(tmp_path: Path, block: Block) -> None:
    """Windows of a run that was left wait for a dead server: the next one's are fetched and said meanwhile, in the same lane too."""
    fetcher: Any = SimpleNamespace(cache=Cache(tmp_path, 10**6), alive=lambda: None, stop=lambda: None, close=lambda: None)
    answered = threading.Event()

    def silent(_flight: Flight, _wanted: Wanted) -> None:
        answered.wait()

    fleet = Flights(fetcher, block, 2)
    fleet.begin(1)
    for stop in (1, 2):
        fleet.send(Flight(1, 0, stop, stop, stop, 10), silent)
    assert fleet.full
    fleet.begin(2)
    assert not fleet.full
    fleet.send(Flight(2, 0, 1, 1, 1, 10), lambda _flight, _wanted: None)
    until = time.monotonic() + 10
    while not fleet.land() and time.monotonic() < until:
        time.sleep(0.005)
    assert block.resident(0, 2) == 1
    assert fleet.pending and fleet.held_bytes == 30
    answered.set()
    while fleet.pending and time.monotonic() < until:
        fleet.land()
    assert fleet.held_bytes == 10
    fleet.close()


class Quota:
    """Lets the objects of a folder take so many bytes, and no more, whatever the disk says is free."""

    def __init__(self, folder: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit, self.refused = limit, 0
        self._folder, self._write = folder, Entry.write
        quota = self

        def write(entry: Entry, offset: int, data: memoryview) -> None:
            if sum(path.stat().st_blocks for path in folder.glob("*.object")) * 512 + len(data) > quota.limit:
                quota.refused += 1
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            quota._write(entry, offset, data)

        monkeypatch.setattr(Entry, "write", write)


def reader_of(folder: Path, server: Faulty, cache: Path, block: Block) -> RemoteReader:
    """Return a reader of a served set, for windows of ten samples."""
    files = files_of(folder)
    urls = [server.url("/" + Path(file.path).name) for file in files]
    http = {name: getattr(QUICK, name) for name in ("first_wait_seconds", "longest_wait_seconds", "attempts", "idle_seconds")}
    plan = Plan(
        layout_of(window=10),
        np.array([file.size for file in files], np.int64),
        urls,
        [url.replace(".tar", ".idx") for url in urls],
        hashes=[""] * SHARDS,
        fetching=Fetching(str(cache), 10**9, "a set", 4, http),
    )
    return RemoteReader(plan, plan.fetching, block)  # type: ignore[arg-type]


def read_epoch(reader: RemoteReader, block: Block, run: int, pause: float = 0.0) -> None:
    """Go through an epoch as workers do: each window is used once it is there; raises what is reported.

    `pause`: seconds that the trainer stands after the third batch.
    """
    reader.begin(run, run - 1, 0)
    wanted, until = list(needs(EpochOrder(layout_of(window=10), run - 1), [0, 1], 0)), time.monotonic() + 60
    for end in range(BATCH, COUNT + 1, BATCH):
        block.want(0, run, end)
        while any(block.resident(need.window.lane, run) < need.window.stop for need in wanted if need.first < end):
            assert time.monotonic() < until, "it hangs"
            if not reader.step():
                time.sleep(0.002)
        if block.reported:
            raise SourceError(block.reported)
        block.hand_out(run, end)
        stands = time.monotonic() + (pause if end == 3 * BATCH else 0)
        while time.monotonic() < stands:
            if not reader.step():
                time.sleep(0.002)
    reader.step()


def test_a_quota_that_the_disk_does_not_tell(
    packed: PackedSet, tmp_path: Path, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where writes fail though there seems to be room, less stays and less is read ahead; every window comes all the same."""
    with Faulty(packed.folder) as server:
        quota = Quota(tmp_path / "cache", 6 * (WINDOW + 4 * CHUNK), monkeypatch)
        reader = reader_of(packed.folder, server, tmp_path / "cache", block)
        try:
            for run in (1, 2, 3):
                read_epoch(reader, block, run)
                assert quota.refused, "the quota was never met"
            assert block.count(Count.KEPT_BYTES) < TOTAL / 2
            assert block.count(Count.FAILED) == 0
            refused = quota.refused
            read_epoch(reader, block, 4)
            assert quota.refused <= refused + 4  # it was learned
        finally:
            reader.close()


@pytest.mark.parametrize("room", [CHUNK, 3 * CHUNK, WINDOW + CHUNK])
def test_too_small_a_quota_is_an_error(
    packed: PackedSet, tmp_path: Path, block: Block, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Where not even what one batch needs can be written, the folder is named after some tries: also where parts of it can."""
    monkeypatch.setattr(flights, "_TRY_SECONDS", 0.01)
    monkeypatch.setattr(flights, "_STUCK_SECONDS", 0.1)
    with Faulty(packed.folder) as server:
        Quota(tmp_path / "cache", room, monkeypatch)
        reader = reader_of(packed.folder, server, tmp_path / "cache", block)
        try:
            with pytest.raises(SourceError, match=r"cache: no room for http://.*Disk quota exceeded.*cache_dir"):
                read_epoch(reader, block, 1)
        finally:
            reader.close()


def test_a_trainer_that_pauses_meets_no_full_disk(
    packed: PackedSet, tmp_path: Path, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read ahead waits for room as long as nobody wants it, asks for nothing meanwhile, and comes when the trainer goes on."""
    monkeypatch.setattr(flights, "_TRY_SECONDS", 0.01)
    monkeypatch.setattr(flights, "_STUCK_SECONDS", 0.1)
    with Faulty(packed.folder) as server:
        quota = Quota(tmp_path / "cache", 6 * (WINDOW + 4 * CHUNK), monkeypatch)
        reader = reader_of(packed.folder, server, tmp_path / "cache", block)
        try:
            read_epoch(reader, block, 1, pause=1.0)
            assert quota.refused and not block.count(Count.FAILED)
        finally:
            reader.close()


def test_a_disk_that_has_recovered_is_used_again(
    packed: PackedSet, tmp_path: Path, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a disk wasn't full for a while, as much is taken of it as before."""
    with Faulty(packed.folder) as server:
        quota = Quota(tmp_path / "cache", 6 * (WINDOW + 4 * CHUNK), monkeypatch)
        reader = reader_of(packed.folder, server, tmp_path / "cache", block)
        try:
            read_epoch(reader, block, 1)
            cache = reader._fetcher.cache
            assert quota.refused and cache.limit < 10**9
            quota.limit = 10**9
            monkeypatch.setattr(flights, "_RECOVERY_SECONDS", 0.2)
            until = time.monotonic() + 5
            while cache.limit != 10**9 and time.monotonic() < until:
                reader.step()
            assert cache.limit == 10**9
        finally:
            reader.close()
