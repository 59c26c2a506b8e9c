"""Sets on two disks: while one is read the other is asked for what comes next, within the budget, and all is counted once."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from packing import PackedSet
from prefetching import COUNT, SHARDS, TOTAL, keys, layout_of, options, prefetcher_of, tars
from residence import chill, other_disk, resident, until

import pipeline
from pipeline.epoch import EpochOrder
from pipeline.errors import ShardError
from pipeline.prefetch.plan import Plan
from pipeline.prefetch.reader import Reader
from pipeline.prefetch.resident import Part
from pipeline.prefetch.turn import Turn
from pipeline.prefetch.walk import needs
from pipeline.progress import Block, Count
from pipeline.world import World

GIB = 2**30


@dataclass
class Two:
    """The set's tars, the first and third on another disk than the second; a reader of them, and what was there before it read."""

    paths: list[Path]
    reader: Reader
    block: Block
    there: list[tuple[int, float]] = field(default_factory=list)  # (device, part of a read that was in the cache by then)

    def epoch(self, run: int) -> None:
        """Read an epoch; each window is handed out once it is there."""
        self.reader.begin(run, run - 1, 0)
        for need in needs(EpochOrder(layout_of(window=10), run - 1), [0, 1], 0):
            self.block.want(0, run, need.first + 1)
            while self.block.resident(need.window.lane, run) < need.window.stop:
                assert self.reader.step()
            self.block.hand_out(run, need.first)
        self.block.hand_out(run, COUNT)
        self.reader.step()


@pytest.fixture(scope="module")
def spread(packed: PackedSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """The tars of a set, on two disks by turns."""
    home = tmp_path_factory.mktemp("two")
    with other_disk(home) as disk:
        found = []
        for number, path in enumerate(tars(packed.folder)):
            folder = disk if number % 2 else home
            for name in (path.name, path.with_suffix(".idx").name):
                shutil.copyfile(path.with_name(name), folder / name)
            found.append(folder / path.name)
        yield found


@pytest.fixture
def two(spread: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """A reader in this process, of shards that are cold."""
    made = of(spread, monkeypatch, GIB)
    yield made
    made.block.close()


def of(spread: list[Path], monkeypatch: pytest.MonkeyPatch, available: int, keep_bytes: int | None = TOTAL) -> Two:
    chill(*spread)
    sizes = np.array([path.stat().st_size for path in spread])
    plan = Plan(layout_of(window=10), sizes, [str(path) for path in spread], [""] * SHARDS, World(), keep_bytes)
    block = Block.make()
    made = Two(spread, Reader(plan, block, lambda: None, available=available), block)
    read = made.reader._resident._read

    def noted(parts: list[Part]) -> None:
        for part in parts:
            if part.asked:
                until(lambda part=part: resident(spread[part.shard.number], part.start, part.stop) > 0)  # it was asked for
            held = resident(spread[part.shard.number], part.start, part.stop) / max(1, part.stop - part.start)
            made.there.append((part.shard.device, held if part.asked else 0.0))
        read(parts)

    monkeypatch.setattr(made.reader._resident, "_read", noted)
    return made


def test_the_other_disk_works_meanwhile(two: Two) -> None:
    """Windows that follow one of another disk have been asked for when their turn comes; nothing is counted twice or lost."""
    two.epoch(1)
    devices = {path.stat().st_dev for path in two.paths}
    assert {device for device, _ in two.there} == devices
    early = [part for _, part in two.there if part]
    assert len(early) > len(two.there) // 6 and sorted(early)[len(early) // 2] > 0.9
    assert {device for device, part in two.there if part} == devices
    count = two.block.count
    assert TOTAL <= count(Count.MEDIUM_BYTES) < 1.02 * sum(path.stat().st_size for path in two.paths)
    assert count(Count.CACHED_BYTES) < 1.6 * TOTAL  # ranges that share a page, and what was read beyond a window before
    assert (count(Count.FAILED), two.reader._read_bytes, two.reader._early) == (0, 0, {})


def test_within_the_budget(spread: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for more than what must be resident nothing is asked for early that wouldn't fit; what is used up goes."""
    made = of(spread, monkeypatch, 0, keep_bytes=0)
    reader, most = made.reader, 0
    step = reader._read

    def noted(need: object) -> None:
        nonlocal most
        step(need)  # type: ignore[arg-type]
        most = max(most, reader._read_bytes)

    monkeypatch.setattr(reader, "_read", noted)
    made.epoch(1)
    assert 0 < most <= reader._budget() and reader._read_bytes == 0
    assert sum(resident(path) for path in spread) < 0.1 * TOTAL
    made.block.close()


def test_a_run_that_ends_lets_go_of_what_came_early(spread: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that were asked for and never read are dropped with their run."""
    made = of(spread, monkeypatch, GIB, keep_bytes=0)
    made.reader.begin(1, 0, 0)
    while not made.reader._early:
        assert made.reader.step()
    made.reader.begin(2, 1, 0)
    assert not made.reader._early and made.reader._read_bytes == 0
    until(lambda: sum(resident(path) for path in spread) < 0.1 * TOTAL)
    made.epoch(3)
    made.block.close()


def test_what_cannot_be_opened_early_is_opened_in_its_turn(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that failed to open beside another is no window that was read: it is opened again when it is due."""
    opened, failed = two.reader._open, list[object]()

    def fails_early(read: object, reads: np.ndarray) -> None:
        if any(read is early for early in two.reader._early.values()) and not failed:
            failed.append(read)
            raise ShardError("an index that can't be read")
        opened(read, reads)  # type: ignore[arg-type]

    read, sizes = two.reader._read, list[int]()

    def noted(need: object) -> None:
        read(need)  # type: ignore[arg-type]
        sizes.append(len(two.reader._read_windows[-1].parts))

    monkeypatch.setattr(two.reader, "_open", fails_early)
    monkeypatch.setattr(two.reader, "_read", noted)
    two.epoch(1)
    assert failed and min(sizes) > 0
    assert (two.block.count(Count.FAILED), two.reader._read_bytes, two.reader._early) == (0, 0, {})


def test_anothers_turn_is_respected(two: Two) -> None:
    """A disk that another reader has its turn at is asked for nothing before it is read."""
    other = os.open(two.paths[1].parent, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        two.reader.begin(1, 0, 0)
        for _ in range(8):
            two.reader.step()
    finally:
        os.close(other)
    blocked = two.paths[1].stat().st_dev
    assert not any(part for device, part in two.there if device == blocked)


def test_a_turn_is_taken_where_it_is_free(tmp_path: Path) -> None:
    """Without waiting; not right after it was left, as those who wait come first; and it isn't counted."""
    mine, others = Turn(str(tmp_path)), Turn(str(tmp_path))
    assert mine.take_if_free() and mine.held and not mine.counts
    assert not others.take_if_free() and not others.held
    mine.leave()
    assert not mine.take_if_free()
    assert others.take_if_free()
    others.take()
    assert others.counts
    others.close()
    mine.close()


def test_batches_from_two_disks(packed: PackedSet, spread: list[Path]) -> None:
    """A loader over both reads each sample once, and nothing for itself."""
    chill(*spread)
    with pipeline.make_loader(list(map(str, spread)), batch_size=8, num_workers=1, options=options()) as loader:
        assert sorted(keys(loader)) == packed.keys
        done = prefetcher_of(loader).stats()
        assert sorted(keys(loader)) == packed.keys
    assert (done.unprefetched, done.failed, done.walked) == (0, 0, 0)
    assert TOTAL <= done.medium_bytes < 1.1 * TOTAL
