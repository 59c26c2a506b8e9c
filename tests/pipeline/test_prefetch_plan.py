"""What the prefetcher decides: which windows in which order, what stays, how much is read ahead, which bytes samples take."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.epoch import EpochOrder, Layout, OrderSettings, Steps
from pipeline.errors import ShardError
from pipeline.listing import offsets, span
from pipeline.prefetch import plan
from pipeline.prefetch.shards import Done, whole_pages
from pipeline.prefetch.share import READ_AHEAD, Share, keep_limit, read_ahead
from pipeline.prefetch.walk import lanes_of, needs, ranges
from pipeline.stores.copies import PAGE, Ranges
from pipeline.world import World
from shardify.format import index, tar

MIB = 2**20
counts = st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any)


def layout_of(sizes: list[int], lanes: int = 3, window: int = 5, shuffle: bool = True) -> Layout:
    return Layout(sizes, OrderSettings(seed=7, lanes=lanes, window=window, shuffle=shuffle))


@settings(max_examples=40)
@given(counts, st.integers(1, 5), st.integers(1, 9), st.integers(0, 3), st.data())
def test_windows_come_in_the_order_of_need(sizes: list[int], lanes: int, window: int, epoch: int, data: st.DataObject) -> None:
    """From any position on each sample is read once, in windows that are sorted by the first position that needs them."""
    order = EpochOrder(layout_of(sizes, lanes, window), epoch)
    position = data.draw(st.integers(0, order.samples - 1))
    found = list(needs(order, list(range(lanes)), position))
    assert [need.first for need in found] == sorted(need.first for need in found)
    read = [(shard, at) for need in found for shard, first, stop in ranges(need.window.reads) for at in range(first, stop)]
    assert len(read) == len(set(read))
    rest = zip(*(part.tolist() for part in order.locate(np.arange(position, order.samples))), strict=True)
    assert set(rest) <= set(read)
    for need in found:
        taken = np.arange(need.first, need.last + 1, lanes)
        taken = taken[taken >= position]
        places = set(zip(*(part.tolist() for part in order.locate(taken)), strict=True))
        assert places <= {(shard, at) for shard, first, stop in ranges(need.window.reads) for at in range(first, stop)}
        assert need.first == taken[0] and need.last == taken[-1]


@settings(max_examples=40)
@given(counts, st.integers(1, 9), st.integers(0, 3))
def test_a_window_reads_each_stretch_once(sizes: list[int], window: int, epoch: int) -> None:
    """What touches within a shard is one range, in storage order, and together they are what the window reads."""
    order = EpochOrder(layout_of(sizes, 3, window), epoch)
    for lane in range(3):
        for found in order.windows(lane):
            merged = ranges(found.reads)
            assert merged == sorted(merged)
            assert all(a[0] < b[0] or a[2] < b[1] for a, b in itertools.pairwise(merged))
            wanted = {(s, i) for s, first, stop in found.reads.tolist() for i in range(first, stop)}
            assert {(s, i) for s, first, stop in merged for i in range(first, stop)} == wanted


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 200), st.integers(1, 4), st.data())
def test_a_ranks_lanes_are_those_of_its_batches(lanes: int, ranks: int, start: int, batch: int, data: st.DataObject) -> None:
    """From any position on a rank's batches touch its lanes and no others."""
    rank = data.draw(st.integers(0, ranks - 1))
    samples = start + 400
    steps = Steps(samples=samples, batch_size=batch, last_batch="drop", world_size=ranks, rank=rank, start=start)
    touched = {int(g) % lanes for step in range(len(steps)) for g in steps.token(step).positions(samples, ranks)[0]}
    mine = set(lanes_of(World(rank, ranks, 0, 1), lanes, start))
    assert touched <= mine
    if lanes % ranks == 0:
        assert touched == mine and len(mine) == lanes // ranks


@settings(max_examples=40)
@given(counts, st.integers(1, 3), st.floats(0, 1.2), st.data())
def test_the_share_is_fixed_and_fits(sizes: list[int], lanes: int, part: float, data: st.DataObject) -> None:
    """What stays fits `keep_bytes` to within a sample, or is all; what doesn't stay is the rest; both without looking at an epoch."""
    layout = layout_of(sizes, lanes)
    weight = np.array(data.draw(st.lists(st.integers(1, 50), min_size=len(sizes), max_size=len(sizes)))) * layout.counts
    limit = int(part * weight.sum())
    share = Share(layout, weight, list(range(lanes)), limit)
    unkept = {(s, i) for s in range(len(sizes)) for a, b in share.unkept(s, 0, sizes[s]) for i in range(a, b)}
    each = weight / np.maximum(1, layout.counts)
    kept_bytes = sum(each[s] for s in range(len(sizes)) for i in range(sizes[s]) if (s, i) not in unkept)
    assert share.part_bytes == weight.sum()
    assert kept_bytes == pytest.approx(share.kept_bytes, abs=1)
    assert share.kept_bytes <= limit
    assert share.whole == (not unkept)
    if unkept:
        assert share.kept_bytes > limit - each.max() - 1
    shard, first = data.draw(st.sampled_from([(s, i) for s in range(len(sizes)) for i in range(sizes[s])]))
    stop = data.draw(st.integers(first, sizes[shard]))
    assert {i for a, b in share.unkept(shard, first, stop) for i in range(a, b)} == {
        i for i in range(first, stop) if (shard, i) in unkept
    }


@settings(max_examples=40)
@given(counts, st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
def test_more_room_keeps_what_less_kept(sizes: list[int], one: float, other: float, seed: int) -> None:
    """Whatever the seed, jobs with more room keep what those with less do: on one machine they don't undo each other's share."""
    weight = np.array(sizes) * 10
    low, high = sorted((one, other))
    layout = layout_of(sizes)
    again = layout if layout.fixed is False else Layout(sizes, OrderSettings(seed=seed, lanes=3, window=5))
    less, more = (Share(where, weight, [0, 1, 2], int(part * weight.sum())) for where, part in ((layout, low), (again, high)))
    for shard, samples in enumerate(sizes):
        lost = {i for a, b in more.unkept(shard, 0, samples) for i in range(a, b)}
        assert lost <= {i for a, b in less.unkept(shard, 0, samples) for i in range(a, b)}


def test_a_rank_keeps_of_its_own_lanes() -> None:
    """Where lanes hold the same shards in each epoch, a rank's share is of what it reads, not of the whole set."""
    layout = layout_of([10] * 64, lanes=4)
    assert layout.fixed
    share = Share(layout, np.full(64, 1000), [1, 3], 8000)
    mine = layout.pieces(0)
    own = sum(int(size) for size, lane in zip(mine.size, mine.lane, strict=True) if lane in (1, 3))
    assert share.part_bytes == own * 100
    assert share.kept_bytes == 8000
    kept = {(s, i) for s in range(64) for i in range(10)} - {
        (s, i) for s in range(64) for a, b in share.unkept(s, 0, 10) for i in range(a, b)
    }
    for s, i in kept:
        assert any(
            s == shard and first <= i < first + size and lane in (1, 3)
            for shard, first, size, lane in zip(*(x.tolist() for x in (mine.shard, mine.first, mine.size, mine.lane)), strict=True)
        )


@settings(max_examples=40)
@given(counts, st.floats(0, 1), st.data())
def test_the_bounds_of_what_stays(sizes: list[int], part: float, data: st.DataObject) -> None:
    """Around samples that don't stay the nearest that do are found, and a shard's ends where there are none."""
    weight = np.array(sizes) * 10
    share = Share(layout_of(sizes), weight, [0, 1, 2], int(part * weight.sum()))
    ranges_ = [(s, a, b) for s in range(len(sizes)) for a, b in share.unkept(s, 0, sizes[s])]
    if not ranges_:
        return
    shard, first, stop = data.draw(st.sampled_from(ranges_))
    inner = data.draw(st.integers(first, stop - 1))
    assert share.bounds(shard, inner, inner + 1) == (first, stop)


@pytest.mark.parametrize(
    ("available", "least", "ranks", "sharers", "budget"),
    [
        (64 * 2**30, 9 * 32 * MIB, 1, 1, READ_AHEAD),  # at most 2 GiB
        (4 * 2**30, 9 * 32 * MIB, 1, 1, 2**30),  # a quarter of what is available
        (4 * 2**30, 3 * 32 * MIB, 4, 1, 2**28),  # divided by the ranks
        (4 * 2**30, 3 * 32 * MIB, 4, 2, 2**27),  # then by the loaders with an open epoch
        (2**30, 9 * 32 * MIB, 1, 1, 9 * 32 * MIB),  # never under a window a lane and one
        (2**30, 9 * 32 * MIB, 4, 4, 9 * 32 * MIB),
    ],
)
def test_the_budget(available: int, least: int, ranks: int, sharers: int, budget: int) -> None:
    """A quarter of what is available, at most 2 GiB, divided by ranks and loaders, and never under what must be resident."""
    assert read_ahead(available, least, ranks, sharers) == budget


@settings(max_examples=40)
@given(st.integers(0, 2**40), st.integers(1, 8), st.integers(0, 2**40))
def test_what_stays_by_default_leaves_room(available: int, ranks: int, claimed: int) -> None:
    """Budgets, shares and a quarter for the trainer fit what is available, for all ranks and loaders together."""
    budget = read_ahead(available, 0, ranks)
    kept = keep_limit(available, budget, ranks, claimed=claimed)
    assert kept >= 0
    assert ranks * (budget + kept) + available // 4 <= available or kept == 0
    if kept:
        assert keep_limit(available, budget, ranks) == kept + claimed
    together = keep_limit(available, budget, ranks, together=True, claimed=claimed)
    assert kept <= together <= max(0, available - available // 4 - ranks * budget)
    growth = available // 3
    growing = keep_limit(available, budget, ranks, claimed=claimed, growth=growth)
    assert growing <= kept and (not growing or ranks * (budget + growing + growth) <= available)


def members(number: int, sizes: list[int]) -> tuple[list[tar.SampleRecord], int]:
    """Return records of samples with two members each, one behind the other, and where the tar ends."""
    at, found = 0, []
    for i, size in enumerate(sizes):
        image = tar.Member(f"k{number}{i}.jpg", at + 512, size)
        label = tar.Member(f"k{number}{i}.cls", image.offset + tar.padded(size) + 512, 1)
        found.append(tar.SampleRecord(f"k{number}{i}", ("jpg", "cls"), (image, label)))
        at = label.offset + 512
    return found, at + 1024


@settings(max_examples=40)
@given(st.lists(st.integers(0, 10**7), max_size=30), st.data())
def test_places_are_those_of_the_index(sizes: list[int], data: st.DataObject) -> None:
    """The numbers of an index are found without parsing its texts, and a range's bytes hold all members of its samples."""
    records, end = members(1, sizes)
    places = offsets(index.dump(records), "x.idx", len(records))
    assert places.tolist() == [record.members[0].offset for record in records]
    if records:
        first = data.draw(st.integers(0, len(records) - 1))
        stop = data.draw(st.integers(first + 1, len(records)))
        begin, stops = span(places, end, first, stop)
        held = [member for record in records[first:stop] for member in record.members]
        assert begin == held[0].offset - tar.BLOCK and held[-1].offset + held[-1].size <= stops <= end


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"v1.2 2\njpg 512 1 a.jpg\n",
        b"v1.2 1\njpg x 1 a.jpg\n",
        b"v1.2 1\njpg 512 1 a.jpg\nhalf",
        b"v1.2 2\njpg 9 1 a.jpg\njpg 8 1 b.jpg\n",
        b"v1.2 1\njpg\n",
        b"v1.2 1\n\n",
        b"v1.2 1\njpg 99999999999999999999 1 a.jpg\n",
        bytes(100),
    ],
)
def test_what_is_no_index_is_said(text: bytes) -> None:
    """A damaged index, or one of another order than the tar's, is an error that names it; the workers then say what is wrong."""
    with pytest.raises(ShardError, match=r"x\.idx"):
        offsets(text, "x.idx", text.count(b"\n") - 1 if text.count(b"\n") > 1 else 1)


def test_an_index_of_another_count_is_no_index() -> None:
    """The set's count is the one that holds."""
    with pytest.raises(ShardError):
        offsets(index.dump(members(1, [5, 5])[0]), "x.idx", 3)


@settings(max_examples=40)
@given(
    st.integers(0, 100 * PAGE),
    st.integers(1, 100 * PAGE),
    *[st.none() | st.integers(0, 50 * PAGE)] * 4,  # type: ignore[arg-type]
)
def test_only_pages_that_nobody_shares_go(
    start: int, size: int, below: int | None, above: int | None, kept_below: int | None, kept_above: int | None
) -> None:
    """Whole pages only, and none that holds a byte of what is kept or resident around; those of the part itself all go."""
    stop = start + size
    bounds = [None if gap is None else max(0, start - gap) for gap in (below, kept_below)]
    ceilings = [None if gap is None else stop + gap for gap in (above, kept_above)]
    low, high = whole_pages(Done(start, stop, bounds[1], ceilings[1]), bounds[0], ceilings[0])
    assert low % PAGE == 0 == high % PAGE
    assert all(low >= bound for bound in bounds if bound is not None)
    assert all(high <= bound for bound in ceilings if bound is not None)
    assert high <= -(-stop // PAGE) * PAGE
    assert (low <= -(-start // PAGE) * PAGE and high >= stop // PAGE * PAGE) or low >= high


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 20)), max_size=25), st.integers(0, 60), st.integers(1, 30)
)
def test_ranges_are_sets_of_bytes(changes: list[tuple[bool, int, int]], at: int, size: int) -> None:
    """Ranges added and removed leave the bytes that a set would, in order, none touching the next."""
    found, model = Ranges(), set[int]()
    for adds, start, length in changes:
        (found.add if adds else found.remove)(start, start + length)
        (model.update if adds else model.difference_update)(range(start, start + length))
    held = list(found)
    assert {i for start, stop in held for i in range(start, stop)} == model
    assert all(a[1] < b[0] for a, b in itertools.pairwise(held))
    missing = {i for start, stop in found.missing(at, at + size) for i in range(start, stop)}
    assert missing == set(range(at, at + size)) - model
    if missing == set(range(at, at + size)):
        below, above = found.around(at, at + size)
        assert below == max((i + 1 for i in model if i < at), default=None)
        assert above == min((i for i in model if i >= at + size), default=None)


def test_a_plan_comes_over_as_it_was(tmp_path: Path) -> None:
    """Counts, sizes, names of any bytes, settings and ranks: the prefetcher gets what the trainer has."""
    paths = [f"{tmp_path}/a b.tar", os.fsdecode(b"/x/\xff\xe9.tar"), "/ü.tar"]
    given_ = plan.Plan(
        Layout([3, 0, 5], OrderSettings(seed=2**64 - 1, lanes=5, window=9)),
        np.array([100, 0, 300]),
        paths,
        ["", "/i/b.idx", ""],
        World(3, 8, 1, 2),
        0,
        77,
    )
    descriptor = os.memfd_create("plan")
    plan.write(descriptor, given_)
    found = plan.read(descriptor)
    assert found.growth == 77
    os.close(descriptor)
    assert found.layout.settings == given_.layout.settings
    assert found.layout.counts.tolist() == [3, 0, 5] and found.sizes.tolist() == [100, 0, 300]
    assert list(found.paths) == paths and list(found.indexes) == ["", "/i/b.idx", ""]
    assert (found.world, found.keep_bytes) == (given_.world, 0)
    assert found.mean_bytes() == 50  # of the shards whose size is known


def test_a_plan_is_arrays_and_names(tmp_path: Path) -> None:
    """A shard costs its name and two numbers, so a million are some 80 MB, and nothing of them is parsed."""
    shards = 20_000
    paths = [f"/data/sets/landmarks/train-{number:06d}.tar" for number in range(shards)]
    given_ = plan.Plan(layout_of([1300] * shards, 8, 300), np.full(shards, 10**8), paths, [""] * shards)
    file = (tmp_path / "plan").open("w+b")
    plan.write(file.fileno(), given_)
    assert (tmp_path / "plan").stat().st_size < shards * (len(paths[0]) + 1 + 16) + 200
    found = plan.read(file.fileno())
    file.close()
    assert (found.paths[0], found.paths[12_345], found.paths[-1 + shards]) == (paths[0], paths[12_345], paths[-1])
    assert found.keep_bytes is None and found.indexes[7] == ""
