"""The prefetcher's process: what it makes resident and when, what it keeps and drops, and that it never hangs anyone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import fusefolder
import pytest
from packing import PackedSet, pack
from prefetching import (
    COUNT,
    SHARDS,
    SIZE,
    TOTAL,
    files_of,
    finished,
    keys,
    layout_of,
    options,
    places,
    prefetcher_of,
    started,
    tars,
)
from residence import PAGE, chill, is_read, lock_range, memory_cgroup, mounted, resident, until

import pipeline
from pipeline import indexing
from pipeline.errors import OptionsError, ShardError
from pipeline.machine import available_memory
from pipeline.options import LoaderOptions
from pipeline.prefetch import Prefetcher, ahead, pages
from pipeline.progress import Block, Count
from pipeline.samples import ShardFile
from pipeline.world import World
from shardify.format import tar


def test_an_epoch_is_resident_before_it_is_used(packed: PackedSet) -> None:
    """Each byte of a cold set is read once, ahead of the trainer, in turns of the disk, and lies in the cache for other processes."""
    chill(*tars(packed.folder))
    layout = layout_of()
    with started(files_of(packed.folder), layout) as (prefetcher, block):
        prefetcher.begin(1, 0, 0)
        until(lambda: finished(block, layout))
        done = prefetcher.stats()
        assert all(resident(path) >= path.stat().st_size for path in tars(packed.folder))
    assert done.way == "page cache"
    assert TOTAL <= done.medium_bytes <= 1.1 * TOTAL
    assert 0 < done.turns <= done.windows + 1
    assert (done.without_turn, done.failed, done.unindexed, done.unprefetched, done.dropped_bytes) == (0, 0, 0, 0, 0)
    assert (done.kept_share, done.kept_bytes) == (1.0, pytest.approx(done.kept_bytes))


def test_a_warm_epoch_takes_no_turn(packed: PackedSet) -> None:
    """What stayed is found again without the disk."""
    layout = layout_of()
    with started(files_of(packed.folder), layout) as (prefetcher, block):
        prefetcher.begin(1, 0, 0)
        until(lambda: finished(block, layout))
        first = prefetcher.stats()
        prefetcher.begin(2, 1, 0)
        until(lambda: finished(block, layout, 2))
        second = prefetcher.stats()
    assert (second.turns, second.medium_bytes) == (first.turns, first.medium_bytes)
    assert second.cached_bytes - first.cached_bytes >= TOTAL


def test_nothing_is_read_before_the_first_iter(packed: PackedSet) -> None:
    """Starting opens no shard: sets of a million, or of shards that aren't there, cost nothing until they are iterated."""
    files = [ShardFile(f"/nowhere/{number}.tar", 80, 3_300_000) for number in range(SHARDS)]
    with started(files, layout_of()) as (prefetcher, block):
        until(lambda: block.count(Count.PID) != 0)
        time.sleep(0.1)
        assert (prefetcher.stats().windows, block.count(Count.PROGRESS)) == (0, 0)


@pytest.mark.usefixtures("scarce")
def test_reading_ahead_stays_within_the_budget(packed: PackedSet) -> None:
    """No more is read ahead than there is room for; batches handed out, or a worker that waits, make room."""
    layout = layout_of(window=8)
    with started(files_of(packed.folder), layout) as (prefetcher, block):
        prefetcher.begin(1, 0, 0)
        until(lambda: prefetcher.stats().full_seconds > 0.1)
        read = sum(block.resident(lane, 1) for lane in range(2)) * SIZE
        assert 2 * 8 * SIZE <= read <= prefetcher.stats().budget_bytes <= 1.1 * 3 * 8 * SIZE
        block.hand_out(1, 30)
        until(lambda: sum(block.resident(lane, 1) for lane in range(2)) * SIZE > read)
        block.want(0, 1, 200)
        until(lambda: all(block.resident(lane, 1) >= 100 for lane in range(2)))
        prefetcher.begin(2, 1, 0)  # what the run before holds takes no room of the next
        until(lambda: all(block.resident(lane, 2) >= 4 for lane in range(2)))


def test_used_windows_are_dropped_and_a_fixed_share_stays(packed: PackedSet) -> None:
    """With room for a third, what is used goes at once, and each later epoch reads two thirds from the disk."""
    chill(*tars(packed.folder))
    layout = layout_of()
    with started(files_of(packed.folder), layout, keep_bytes=TOTAL // 3) as (prefetcher, block):
        medium = [0]
        for run in (1, 2, 3):
            prefetcher.begin(run, run - 1, 0)
            until(lambda run=run: finished(block, layout, run))  # type: ignore[misc]
            block.hand_out(run, COUNT)
            until(lambda: sum(resident(path) for path in tars(packed.folder)) < 0.45 * TOTAL)
            medium.append(prefetcher.stats().medium_bytes)
        assert prefetcher.stats().kept_share == pytest.approx(1 / 3, abs=0.03)
    epochs = [b - a for a, b in zip(medium, medium[1:], strict=False)]
    assert epochs[0] >= TOTAL
    assert all(0.6 * epochs[0] <= later <= 0.72 * epochs[0] for later in epochs[1:])


_IN_A_CGROUP = """
import os, sys
from types import SimpleNamespace
open(sys.argv[1], "w").write(str(os.getpid()))
from pipeline.epoch import EpochOrder, Layout, OrderSettings
from pipeline.options import LoaderOptions
from pipeline.prefetch import Prefetcher, ahead, pages
from pipeline.prefetch.trial import medium_bytes
from pipeline.prefetch.walk import needs, ranges
from pipeline.progress import Block
from pipeline.world import World
import time
paths, counts = sys.argv[3:], [int(sys.argv[2])] * len(sys.argv[3:])
files = [SimpleNamespace(path=path, samples=n, size=os.path.getsize(path), index="", url="", sha256="") for path, n in zip(paths, counts)]
layout = Layout(counts, OrderSettings(seed=1, lanes=4, window=20))
block = Block.make()
prefetcher = Prefetcher.start(layout, files, LoaderOptions(), World(), block)
opened, medium = [os.open(path, os.O_RDONLY) for path in paths], []
for descriptor in opened:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
for run in (1, 2, 3):
    prefetcher.begin(run, run, 0)
    for need in needs(EpochOrder(layout, run), range(4), 0):
        while block.resident(need.window.lane, run) < need.window.stop:
            time.sleep(0.001)
        before = medium_bytes()
        for shard, first, stop in ranges(need.window.reads):
            each = files[shard].size // counts[shard]
            for at in range(first, stop - 1):
                os.pread(opened[shard], each, at * each + 1024)
        medium.append(medium_bytes() - before)
        block.hand_out(run, need.first)
    block.hand_out(run, sum(counts))
    stats = prefetcher.stats()
    print(run, stats.medium_bytes, stats.kept_share, stats.budget_bytes, sum(medium), flush=True)
prefetcher.close()
"""


def test_in_a_small_cgroup_nothing_is_evicted_unused(tmp_path: Path) -> None:
    """In a group with less memory than the set, by default as much stays as is reported, and no window goes before it is used."""
    size, count = 100_000, 1500
    data = os.urandom(size)
    big = pack(tmp_path, count, 5, make=lambda number: number.to_bytes(4, "big") + data)
    chill(*tars(big.folder))
    with memory_cgroup(192 * 2**20) as procs:
        command = [sys.executable, "-c", _IN_A_CGROUP, procs, str(count // 5), *map(str, tars(big.folder))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    epochs = [int(b[1]) - int(a[1]) for a, b in zip([["0", "0"], *lines], lines, strict=False)]
    share, budget, alone = float(lines[-1][2]), int(lines[-1][3]), int(lines[-1][4])
    assert 0.1 < share < 0.8
    assert budget < 64 * 2**20
    assert epochs[1] <= 1.08 * (1 - share) * epochs[0] and epochs[2] <= 1.08 * (1 - share) * epochs[0]
    assert alone < 0.01 * epochs[0]


def test_pages_of_another_reader_stay(packed: PackedSet) -> None:
    """A shard that another process reads is left alone, and its pages are dropped once it doesn't any more."""
    layout = layout_of()
    held = tars(packed.folder)[1]
    with started(files_of(packed.folder), layout, keep_bytes=0) as (prefetcher, block), held.open("rb") as other:
        lock_range(other.fileno())
        prefetcher.begin(1, 0, 0)
        until(lambda: finished(block, layout))
        block.hand_out(1, COUNT)
        until(lambda: prefetcher.stats().refused > 0 and resident(tars(packed.folder)[0]) < SIZE)
        assert resident(held) >= held.stat().st_size
        lock_range(other.fileno(), free=True)
        prefetcher.begin(2, 0, 0)
        until(lambda: finished(block, layout, 2))
        block.hand_out(2, COUNT)
        until(lambda: resident(held) < SIZE)


def test_shards_are_locked_while_their_windows_are_resident(packed: PackedSet) -> None:
    """Other readers' drops spare what this one has read and not used; afterwards no lock is left."""
    layout = layout_of()
    with started(files_of(packed.folder), layout) as (prefetcher, block):
        prefetcher.begin(1, 0, 0)
        until(lambda: finished(block, layout))
        assert all(is_read(path) for path in tars(packed.folder))
        block.hand_out(1, COUNT)
        until(lambda: not any(is_read(path) for path in tars(packed.folder)))


def test_a_rank_reads_its_part(packed: PackedSet) -> None:
    """Where ranks divide the lanes each one's prefetcher reads the lanes of its batches, and together each byte once."""
    layout = layout_of(lanes=4)
    read = []
    for rank in range(2):
        with started(files_of(packed.folder), layout, World(rank, 2, rank, 2)) as (prefetcher, block):
            prefetcher.begin(1, 0, 0)
            mine = [lane for lane in range(4) if lane % 2 == rank]
            until(lambda mine=mine, block=block: all(block.resident(lane, 1) == places(layout, lane) for lane in mine))  # type: ignore[misc]
            time.sleep(0.05)
            assert all(block.resident(lane, 1) == 0 for lane in range(4) if lane not in mine)
            done = prefetcher.stats()
            read.append(done.medium_bytes + done.cached_bytes)
    assert sum(read) < 1.4 * TOTAL  # with the indexes, and what the folder test read


def test_what_must_be_resident_has_to_fit(packed: PackedSet) -> None:
    """Only where a window a lane and one more exceed the memory is that an error, with both numbers and the cure."""
    huge = [ShardFile(file.path, file.samples, 2**45) for file in files_of(packed.folder)]
    with pytest.raises(OptionsError, match=r"\d+ MiB are needed .* \d+ MiB are available: lower LoaderOptions\(window_bytes=\)"):
        Prefetcher.start(layout_of(), huge, LoaderOptions(), World(), Block.make())


def test_little_room_beside_the_workers_is_a_warning(packed: PackedSet, caplog: pytest.LogCaptureFixture) -> None:
    """Where the workers will take the memory that windows fit into now, a warning says both numbers and the cure."""
    files = files_of(packed.folder)
    for growth in (0, available_memory(in_all=True)):
        caplog.clear()
        Prefetcher.start(layout_of(), files, LoaderOptions(), World(), Block.make(), growth).close()
        said = [record.getMessage() for record in caplog.records]
        assert [
            bool(re.search(r"tight: \d+ MiB .* about \d+, of \d+ .* lower LoaderOptions\(window_bytes=\)", text)) for text in said
        ] == ([True] if growth else [])


def test_loaders_share_the_budget(packed: PackedSet) -> None:
    """The memory is divided among the loaders that have an open epoch, and is the other's again when one ends."""
    with (
        started(files_of(packed.folder), layout_of()) as (one, first),
        started(files_of(packed.folder), layout_of()) as (two, second),
    ):
        one.begin(1, 0, 0)
        assert (first.sharers, second.sharers) == (1, 1)
        two.begin(1, 0, 0)
        assert (first.sharers, second.sharers) == (2, 2)
        two.end()
        assert first.sharers == 1


def test_loaders_leave_each_other_what_they_keep(packed: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one loader keeps isn't available to the next one's share."""
    said: list[tuple[int, ...]] = []
    say = Prefetcher._say
    monkeypatch.setattr(Prefetcher, "_say", lambda prefetcher, *numbers: (said.append(numbers), say(prefetcher, *numbers)))
    with started(files_of(packed.folder), layout_of()) as (one, first), started(files_of(packed.folder), layout_of()) as (two, _):
        one.begin(1, 0, 0)
        until(lambda: finished(first, layout_of()))
        two.begin(1, 0, 0)
        assert said[0][3] == 0 and said[1][3] == one.stats().kept_bytes > TOTAL


def test_what_workers_will_take_is_left_to_them(packed: PackedSet) -> None:
    """Before they run it is known about how much memory workers will take: their own, more where they import anew, and batches."""
    for method, own in (("fork", 2**24), ("spawn", 2**28)):
        given = options(multiprocessing_context=method)
        with pipeline.make_loader(packed.folder, batch_size=8, num_workers=2, options=given) as loader:
            growth = loader._growth(World())
            assert 2 * own < growth - 2 * 2 * 8 * SIZE < 2.5 * 2 * own
    with pipeline.make_loader(packed.folder, batch_size=8, num_workers=0, options=options()) as loader:
        assert loader._growth(World()) == 0


def test_a_run_that_is_left_is_left_at_once(packed: PackedSet) -> None:
    """After an early break the next run's windows come, from its own position, and those of the old run go."""
    layout = layout_of()
    chill(*tars(packed.folder))
    with started(files_of(packed.folder), layout, keep_bytes=0) as (prefetcher, block):
        prefetcher.begin(1, 0, 0)
        until(lambda: block.resident(0, 1) > 0)
        prefetcher.begin(2, 5, 200)
        until(lambda: finished(block, layout, 2))
        assert block.resident(0, 1) == 0
        until(lambda: sum(resident(path) for path in tars(packed.folder)) < 70 * SIZE)
        assert prefetcher.stats().windows < 40
        block.hand_out(2, COUNT)
        until(lambda: sum(resident(path) for path in tars(packed.folder)) < 4 * SIZE)


def test_a_window_isnt_read_to_its_end_for_nobody(packed: PackedSet, tmp_path: Path) -> None:
    """A run that begins ends the reading of a window that the old one wanted, however slow the disk is."""
    slow = fusefolder.mounted(packed.folder, tmp_path / "m", rate=2_000_000.0)
    with slow as folder, started(files_of(folder), layout_of(window=120)) as (prefetcher, block):
        prefetcher.begin(1, 0, 150)  # in the middle of a window of 4.8 MB
        until(lambda: prefetcher.stats().medium_bytes > 500_000)
        prefetcher.begin(2, 0, 0)
        until(lambda: block.resident(0, 2) > 0)
        assert prefetcher.stats().windows < 3


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_with_and_without(packed: PackedSet, workers: int) -> None:
    """Reading ahead changes no batch, cold or warm, kept or dropped."""
    chill(*tars(packed.folder))
    with pipeline.make_loader(packed.folder, batch_size=8, num_workers=0, options=options(prefetch=False)) as plain:
        wanted = [
            [(key, bytes(image)) for batch in plain for key, image in zip(batch.keys, batch.images, strict=True)] for _ in range(2)
        ]
    with pipeline.make_loader(packed.folder, batch_size=8, num_workers=workers, options=options(keep_bytes=TOTAL // 4)) as loader:
        found = [
            [(key, bytes(image)) for batch in loader for key, image in zip(batch.keys, batch.images, strict=True)] for _ in range(2)
        ]
        done = prefetcher_of(loader).stats()
    assert found == wanted
    assert dict(found[0]) == packed.pictures
    assert (done.unprefetched, done.failed) == (0, 0)


def test_on_fuse_shards_are_copied(packed: PackedSet, tmp_path: Path) -> None:
    """Where opens throw pages away, workers read copies: the same bytes, in bounded memory, read from the medium once."""
    with fusefolder.mounted(packed.folder, tmp_path / "m") as folder:
        with pipeline.make_loader(folder, batch_size=8, num_workers=2, options=options(keep_bytes=TOTAL // 3)) as loader:
            held, copied = [], list[int]()
            for _ in range(2):
                for batch in loader:
                    held += list(zip(batch.keys, map(bytes, batch.images), strict=True))
                    copied.append(_memory_of_copies(loader))
                until(lambda: _memory_of_copies(loader) < 0.45 * TOTAL)
            done = prefetcher_of(loader).stats()
        assert all(data == packed.pictures[key] for key, data in held)
        assert len(held) == 2 * COUNT
        assert (done.way, done.unprefetched, done.failed) == ("copies", 0, 0)
        assert done.medium_bytes < 1.85 * TOTAL  # a third stays
        assert max(copied) > 0


def test_on_fuse_what_was_not_copied_comes_from_the_shard(packed: PackedSet, tmp_path: Path) -> None:
    """A shard without an index isn't copied, while others are: its samples are its own bytes, not the copies' zeros."""
    for path in packed.folder.iterdir():
        os.link(path, tmp_path / path.name)
    tars(tmp_path)[1].with_suffix(".idx").unlink()
    with (
        fusefolder.mounted(tmp_path, tmp_path.with_name("m")) as folder,
        pipeline.make_loader(folder, batch_size=8, num_workers=1, options=options()) as loader,
    ):
        held = {key: bytes(image) for batch in loader for key, image in zip(batch.keys, batch.images, strict=True)}
        done = prefetcher_of(loader).stats()
    assert held == packed.pictures
    assert (done.way, done.walked, done.unindexed, done.unprefetched) == ("copies", 1, 0, 0)


def test_tars_that_were_scanned_before_are_read_ahead(packed: PackedSet, tmp_path: Path) -> None:
    """Without an index beside it a tar is read ahead by what the cache folder remembers of it."""
    for path in tars(packed.folder):
        (tmp_path / path.name).write_bytes(path.read_bytes())
        os.utime(tmp_path / path.name, (1_700_000_000, 1_700_000_000))  # what was changed just now isn't remembered
    with pipeline.make_loader(tmp_path, batch_size=8, num_workers=0, options=options()) as loader:
        assert sorted(keys(loader)) == packed.keys
        assert sorted(keys(loader)) == packed.keys
        done = prefetcher_of(loader).stats()
    assert (done.unindexed, done.failed, done.unprefetched) == (0, 0, 0)
    assert done.medium_bytes + done.cached_bytes >= TOTAL


def test_samples_that_wrap_round_are_read_as_they_lie(packed: PackedSet, tmp_path: Path) -> None:
    """A batch that is filled up from the epoch's start doesn't take samples whose copies are gone."""
    with fusefolder.mounted(packed.folder, tmp_path / "m") as folder:
        given = options(keep_bytes=0, last_batch="pad")
        with pipeline.make_loader(folder, batch_size=50, num_workers=0, options=given) as loader:
            for at, batch in enumerate(loader):
                until(lambda at=at: at < 3 or _memory_of_copies(loader) < 0.75 * TOTAL)  # type: ignore[misc]
                assert [bytes(image) for image in batch.images] == [packed.pictures[key] for key in batch.keys]
            assert prefetcher_of(loader).stats().way == "copies"


def _memory_of_copies(loader: pipeline.Loader) -> int:
    block = loader._reading.block  # type: ignore[union-attr]
    assert block is not None
    pid, descriptor = block.count(Count.PID), block.count(Count.MEMORY) - 1
    return os.stat(f"/proc/{pid}/fd/{descriptor}").st_blocks * 512 if descriptor >= 0 else 0  # noqa: PTH116


def test_in_memory_nothing_is_read_ahead(packed: PackedSet, tmp_path: Path) -> None:
    """Shards on tmpfs are resident as they are."""
    with mounted("tmpfs", tmp_path / "m", "size=32m") as point:
        for path in packed.folder.iterdir():
            (point / path.name).write_bytes(path.read_bytes())
        with pipeline.make_loader(point, batch_size=8, num_workers=0, options=options()) as loader:
            assert sorted(keys(loader)) == packed.keys
            done = prefetcher_of(loader).stats()
    assert (done.way, done.unprefetched, done.turns) == ("memory", 0, done.turns)
    assert done.medium_bytes + done.cached_bytes < TOTAL // 10  # the indexes


def test_a_counted_tar_without_index_is_walked_once(packed: PackedSet, tmp_path: Path) -> None:
    """What a manifest counts and no index tells of: the prefetcher reads it forward, and workers find its samples remembered."""
    for path in tars(packed.folder):
        (tmp_path / path.name).write_bytes(path.read_bytes())
        os.utime(tmp_path / path.name, (1_700_000_000, 1_700_000_000))  # what was changed just now isn't remembered
    chill(*tars(tmp_path))
    layout = layout_of()
    with started(files_of(tmp_path), layout) as (prefetcher, block):
        prefetcher.begin(1, 0, 0)
        until(lambda: finished(block, layout))
        done = prefetcher.stats()
        prefetcher.begin(2, 1, 0)
        until(lambda: finished(block, layout, 2))
        assert prefetcher.stats().walked == SHARDS
    assert (done.walked, done.unindexed, done.failed) == (SHARDS, 0, 0)
    assert done.medium_bytes < 1.1 * TOTAL  # once, and not again for the windows
    known = indexing.cache().count((str(path), indexing.Stamp.of(str(path))) for path in tars(tmp_path))
    assert known == [COUNT // SHARDS] * SHARDS


@pytest.mark.parametrize("drop", [False, True])
def test_a_walk_reads_ahead_and_drops_what_is_behind(
    packed: PackedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop: bool
) -> None:
    """A walk's bytes are read in steps, each before it is walked; where there is no room, those behind go."""
    monkeypatch.setattr(ahead, "_STEP", 2**20)
    path = tars(packed.folder)[0]
    chill(path)
    steps, size = list[tuple[int, int]](), path.stat().st_size

    def read(file: pages.File, start: int, stop: int) -> None:
        assert os.pread(file.descriptor, stop - start, start)
        assert not drop or resident(path) <= 2**20 + PAGE
        steps.append((start, stop))

    with ahead.AheadFile(str(path), read, drop=drop) as file:
        found = list(tar.samples(file, size, str(path)))
    assert [record.key for record in found] == [record.key for record in indexing.headers(str(path))]
    assert steps[0][0] == 0 and steps[-1][1] == size and all(a[1] == b[0] for a, b in zip(steps, steps[1:], strict=False))


@pytest.mark.parametrize("damage", ["missing", "cut", "cut without index", "index"])
def test_what_cannot_be_read_hangs_nobody(packed: PackedSet, tmp_path: Path, damage: str) -> None:
    """A shard that is gone, cut or badly indexed is an error of the worker that needs it, with the shard's name; within seconds."""
    for path in packed.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pipeline.make_loader(tmp_path, batch_size=8, num_workers=1, options=options()) as loader:
        spoiled = tars(tmp_path)[1]
        if damage == "missing":
            spoiled.unlink()
        elif damage.startswith("cut"):
            os.truncate(spoiled, 100_000)
            if damage != "cut":
                spoiled.with_suffix(".idx").unlink()
        else:
            spoiled.with_suffix(".idx").write_bytes(b"v1.2 80\nnonsense\n")
        with pytest.raises(ShardError, match=r"train-000001\.(tar|idx)"):
            keys(loader)
        assert prefetcher_of(loader).alive
