"""Disks and quotas that are full before they say so: what is fetched again, what stays, and when it is an error."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import Fault, Faulty
from prefetching import SIZE, TOTAL, packed
from residence import PackedSet
from walking import BATCH, read_epoch, reader_of

from pipeline.errors import SourceError
from pipeline.prefetch import shortage
from pipeline.prefetch.remote import RemoteReader
from pipeline.progress import Block, Count
from pipeline.stores.cache import CHUNK, Entry

__all__ = ["packed"]

WINDOW = 10 * SIZE + 4 * CHUNK  # bytes of the folder


@pytest.fixture
def block() -> Iterator[Block]:
    """What a trainer, its prefetcher and its workers share."""
    made = Block.make()
    yield made
    made.close()


class Quota:
    """Lets the objects of a folder take so many bytes, and no more, whatever the disk says is free."""

    def __init__(self, folder: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit, self.refused = limit, 0
        self._folder, self._write = folder, Entry.write
        quota = self

        def write(entry: Entry, offset: int, data: memoryview) -> None:
            if quota.used + len(data) > quota.limit:
                quota.refused += 1
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            quota._write(entry, offset, data)

        monkeypatch.setattr(Entry, "write", write)

    @property
    def used(self) -> int:
        return sum(path.stat().st_blocks for path in self._folder.glob("*.object")) * 512


class Case:
    """A reader within a quota, and its server; ended afterwards."""

    def __init__(self, folder: Path, cache: Path, block: Block, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.quota = Quota(cache, limit, monkeypatch)
        self.server = Faulty(folder)
        self.server.__enter__()
        self.reader: RemoteReader = reader_of(folder, self.server, cache, block)

    def close(self) -> None:
        self.reader.close()
        self.server.__exit__(None, None, None)


@pytest.fixture
def case(
    packed: PackedSet, tmp_path: Path, block: Block, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Case]:
    """A reader within a quota of six windows, or of as many bytes as the test says."""
    made = Case(packed.folder, tmp_path / "cache", block, getattr(request, "param", 6 * WINDOW), monkeypatch)
    yield made
    made.close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are hundredths."""
    monkeypatch.setattr(shortage, "_TRY_SECONDS", 0.01)
    monkeypatch.setattr(shortage, "_STUCK_SECONDS", 0.1)


def test_a_quota_that_the_disk_does_not_tell(case: Case, block: Block) -> None:
    """Where writes fail though there seems to be room, less stays and less is read ahead; every window comes all the same."""
    for run in (1, 2, 3):
        read_epoch(case.reader, block, run)
        assert case.quota.refused, "the quota was never met"
    assert block.count(Count.KEPT_BYTES) < TOTAL / 2
    assert block.count(Count.FAILED) == 0
    refused = case.quota.refused
    read_epoch(case.reader, block, 4)
    assert case.quota.refused <= refused + 4  # it was learned


@pytest.mark.parametrize("told", [True, False])
def test_versions_that_nobody_tells_apart_are_told_of(
    packed: PackedSet, tmp_path: Path, block: Block, caplog: pytest.LogCaptureFixture, *, told: bool
) -> None:
    """Where not all of a set stays and its server says neither ETag nor date: once."""
    fault = Fault() if told else Fault(etag="", modified="")
    with Faulty(packed.folder, lambda _request: fault) as server:
        reader = reader_of(packed.folder, server, tmp_path / "cache", block, limit=12 * WINDOW)
        read_epoch(reader, block, 1)
        reader.close()
    assert block.count(Count.KEPT_BYTES) < TOTAL
    assert caplog.text.count("neither by ETag nor by date") == (0 if told else 1)


@pytest.mark.parametrize("case", [TOTAL * 9 // 10], indirect=True)
def test_no_more_goes_than_is_in_the_way(case: Case, block: Block) -> None:
    """What stays is halved once for one shortage, and once more where the lanes' windows need it: not as often as there are windows."""
    for run in (1, 2):
        read_epoch(case.reader, block, run, workers=4)
    assert case.quota.refused
    assert block.count(Count.KEPT_BYTES) >= TOTAL * 0.2
    assert block.count(Count.FAILED) == 0


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("case", [CHUNK, 3 * CHUNK, WINDOW - 2 * CHUNK], indirect=True)
def test_too_small_a_quota_is_an_error(case: Case, block: Block) -> None:
    """Where not even what one batch needs can be written, the folder is named after some tries: also where parts of it can."""
    with pytest.raises(SourceError, match=r"cache: no room for http://.*Disk quota exceeded.*cache_dir"):
        read_epoch(case.reader, block, 1)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("case", [5 * WINDOW], indirect=True)
def test_workers_far_ahead_starve_nobody(case: Case, block: Block) -> None:
    """Many workers wait for later batches: the next one's windows come first, and none of them is given up."""
    for run in (1, 2):
        read_epoch(case.reader, block, run, workers=8)
    assert case.quota.refused and not block.count(Count.FAILED)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("workers", [1, 8])
def test_a_trainer_that_pauses_meets_no_full_disk(case: Case, block: Block, workers: int) -> None:
    """What is read ahead waits for room as long as the next batch is there, and comes when the trainer goes on."""
    kept = list[int]()
    read_epoch(case.reader, block, 1, pause=1.0, workers=workers, paused=lambda: kept.append(block.count(Count.KEPT_BYTES)))
    assert case.quota.refused and not block.count(Count.FAILED)
    assert kept[0] >= TOTAL // 8  # nothing that stays went for it


def test_what_waits_asks_for_little(case: Case, block: Block) -> None:
    """While the trainer stands, the server isn't asked for the same bytes again and again."""
    asked = list[int]()
    read_epoch(case.reader, block, 1, pause=2.0, workers=8, paused=lambda: asked.append(len(case.server.log)))
    assert case.quota.refused
    assert asked[0] < 100


@pytest.mark.usefixtures("hurried")
def test_what_comes_once_more_meets_a_full_disk(case: Case, block: Block) -> None:
    """At an epoch's end the first samples are wanted once more: they come once there is room, and else there is an error."""
    case.quota.limit = 10**9
    read_epoch(case.reader, block, 1, wrapped=BATCH)
    case.quota.limit = 6 * WINDOW
    read_epoch(case.reader, block, 2, wrapped=BATCH)
    assert not block.count(Count.FAILED)


@pytest.fixture
def recovering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk is looked at again soon after it was full."""
    monkeypatch.setattr(shortage, "_RECOVERY_SECONDS", 0.5)


@pytest.mark.usefixtures("recovering")
def test_a_disk_that_has_recovered_is_used_again(case: Case, block: Block, caplog: pytest.LogCaptureFixture) -> None:
    """Some time after a disk was full as much is taken of it as before, and as much stays."""
    whole = block.count(Count.KEPT_BYTES)
    read_epoch(case.reader, block, 1)
    assert case.quota.refused and block.count(Count.KEPT_BYTES) < TOTAL <= (whole or TOTAL)
    assert "its disk is full, or a quota used up" in caplog.text
    case.quota.limit = 10**9
    cache, until = case.reader._fetcher.cache, time.monotonic() + 20
    while cache.limit != 10**9 and time.monotonic() < until:
        read_epoch(case.reader, block, block.run + 1)
    assert cache.limit == 10**9
    assert block.count(Count.KEPT_BYTES) >= TOTAL
