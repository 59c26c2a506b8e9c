"""What is read with a window beyond it: the rest of its last piece, so that a piece is one seek and not three."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from packing import PackedSet
from prefetching import COUNT, SHARDS, TOTAL, files_of, layout_of, tars
from residence import chill, resident

from pipeline.epoch import EpochOrder
from pipeline.prefetch import pages
from pipeline.prefetch.__main__ import _Interrupted, serve
from pipeline.prefetch.plan import Plan
from pipeline.prefetch.reader import Reader
from pipeline.prefetch.turn import Turn
from pipeline.prefetch.walk import Need, needs
from pipeline.progress import Block, Count
from pipeline.world import World

GIB = 2**30


class Recorded(pages.Forward):
    """Reads as ever, and notes the ranges of the shards."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    def read(self, ranges: Sequence[pages.Range], turn: Turn, tell: object) -> None:
        self.ranges += [(str(found.file.number), found.start, found.stop) for found in ranges if hasattr(found.file, "number")]
        super().read(ranges, turn, tell)  # type: ignore[arg-type]


def reader_of(
    packed: PackedSet,
    block: Block,
    available: int,
    keep_bytes: int | None = TOTAL,
    world: World | None = None,
    turn_bytes: int = 100_000_000,
) -> tuple[Reader, Recorded]:
    """A reader in this process, and what it reads."""
    files = files_of(packed.folder)
    layout = layout_of(window=10)
    sizes, paths = np.array([file.size for file in files]), [file.path for file in files]
    plan = Plan(layout, sizes, paths, [""] * SHARDS, world or World(), keep_bytes)
    reader = Reader(plan, block, lambda: None, available=available)
    reader._turn_bytes = turn_bytes
    recorded = reader._resident._forward = Recorded()
    return reader, recorded


def epoch_of(reader: Reader, block: Block, run: int) -> list[Need]:
    """Read an epoch as workers would need it, each window handed out once it is there."""
    reader.begin(run, run - 1, 0)
    read = []
    for need in needs(EpochOrder(layout_of(window=10), run - 1), [0, 1], 0):
        block.want(0, run, need.first + 1)
        while block.resident(need.window.lane, run) < need.window.stop:
            assert reader.step()
        block.hand_out(run, need.first)
        read.append(need)
    block.hand_out(run, COUNT)
    reader.step()
    return read


def seeks(ranges: list[tuple[str, int, int]]) -> int:
    """How often a range doesn't go on where the one before it ended."""
    return 1 + sum(a[0] != b[0] or a[2] != b[1] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("way", ["room", "no room"])
def test_a_piece_is_read_in_one_go_where_there_is_room(packed: PackedSet, way: str) -> None:
    """Of a set cut into 18 parts of 13 samples, read in windows of 10, the parts behind the first windows are one range each."""
    block = Block.make()
    reader, recorded = reader_of(packed, block, available=GIB if way == "room" else 0)
    epoch_of(reader, block, 1)
    bytes_read = np.zeros((SHARDS, max(path.stat().st_size for path in tars(packed.folder))), np.uint8)
    for shard, start, stop in recorded.ranges:
        bytes_read[int(shard), start:stop] = 1
    assert bytes_read.sum() > 0.99 * TOTAL
    pieces = len(layout_of(window=10).pieces(0))
    if way == "room":
        assert seeks(fresh(recorded.ranges)) <= 1.5 * pieces
    else:
        assert seeks(fresh(recorded.ranges)) > 2 * pieces
        assert not reader._rests
    block.close()


def fresh(ranges: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The ranges that go to the disk: those that weren't read before."""
    seen: dict[str, list[tuple[int, int]]] = {}
    found = []
    for shard, start, stop in ranges:
        known = seen.setdefault(shard, [])
        if not any(first <= start and stop <= end for first, end in known):
            found.append((shard, start, stop))
        known.append((start, stop))
    return found


def test_a_rest_counts_in_the_budget_and_goes_with_its_run(packed: PackedSet) -> None:
    """What is read beyond windows is part of what is held, and is dropped with a run that ends early; a used epoch holds nothing."""
    chill(*tars(packed.folder))
    block = Block.make()
    reader, _ = reader_of(packed, block, available=GIB, keep_bytes=0)
    reader.begin(1, 0, 0)
    for _ in range(12):
        assert reader.step()
    held = [*reader._read_windows, *reader._rests.values()]
    assert reader._rests
    assert reader._read_bytes == sum(read.bytes for read in held)
    assert sum(resident(path) for path in tars(packed.folder)) >= 0.9 * reader._read_bytes
    reader.begin(2, 1, 0)
    assert not reader._rests and reader._read_bytes == 0
    assert sum(resident(path) for path in tars(packed.folder)) < 0.1 * TOTAL
    epoch_of(reader, block, 3)
    assert reader._read_bytes == 0
    assert sum(resident(path) for path in tars(packed.folder)) < 0.1 * TOTAL
    block.close()


def test_first_windows_are_read_alone_and_turns_are_short(packed: PackedSet) -> None:
    """A resume's first batch waits for no bytes of others; where several ranks want the disk no turn takes them a second."""
    for world, turn_bytes, expected in ((World(), 100_000_000, True), (World(0, 2, 0, 2), 300_000, False)):
        block = Block.make()
        reader, _ = reader_of(packed, block, available=GIB, world=world, turn_bytes=turn_bytes)
        reader.begin(1, 0, 120)
        for _ in reader._lanes:
            assert reader.step()
        assert not reader._rests
        while not reader._rests and reader.step():
            pass
        assert bool(reader._rests) == expected
        block.close()


def test_a_run_that_begins_in_the_first_trial_is_served(packed: PackedSet) -> None:
    """Whatever the trainer says while the prefetcher finds out how the folder is read, the process lives, and reads for the last run."""
    block, said = Block.make(), [(1, 0, 0, 0), (2, 1, 0, 0)]
    reader, _ = reader_of(packed, block, available=GIB, keep_bytes=None)

    class Trainer:
        def spoke(self, _seconds: float = 0.0, _landing: object = None) -> bool:
            return bool(said) or block.resident(0, 2) > 0

        def said(self) -> tuple[int, ...] | None:
            return said.pop(0) if said else None

        def check(self) -> None:
            if said:
                raise _Interrupted

    trainer = Trainer()
    reader._resident._alive = trainer.check
    serve(trainer, reader, block)  # type: ignore[arg-type]
    assert block.resident(0, 1) == 0 < block.resident(0, 2)
    block.close()


def test_what_one_that_died_kept_stays_kept(packed: PackedSet) -> None:
    """The pages of a process that died aren't available, but there: the next one keeps them, not what is left beside them."""
    block = Block.make()
    block.put(Count.KEPT_BYTES, TOTAL // 2)
    reader, _ = reader_of(packed, block, available=0, keep_bytes=None)
    reader.begin(1, 0, 0)
    assert reader._share is not None and reader._share.kept_bytes == pytest.approx(TOTAL // 2, rel=0.1)
    block.close()


def test_few_indexes_are_asked_for_at_once(packed: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first shard is read the indexes of all are in the cache; of a large set only those that are needed."""
    indexes = sorted(packed.folder.glob("*.idx"))
    for few, expected in ((SHARDS, SHARDS), (SHARDS - 1, 1)):
        monkeypatch.setattr("pipeline.prefetch.resident._FEW", few)
        chill(*indexes, *tars(packed.folder))
        block = Block.make()
        reader, _ = reader_of(packed, block, available=GIB)
        reader.begin(1, 0, 0)
        assert reader.step()
        assert sum(resident(path) > 0 for path in indexes) == expected
        block.close()
