"""The order of an epoch over shards that nobody counted: each sample once, found out as far as it is asked for, by anyone alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from pipeline.arrival import ArrivalOrder, ArrivalSettings, deal
from shardify.format.tar import BLOCK, Member, SampleRecord, member_bytes

Sizes = list[list[int]]  # of each shard, its samples' sizes in bytes


class Tars:
    """Shards whose samples have given sizes; keeps count of what was read of them, and hinted at."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.bytes = [sum(map(member_bytes, shard)) + 2 * BLOCK for shard in sizes]
        self.read = [0] * len(sizes)
        self.hints: list[tuple[int, int, int]] = []

    def records(self, shard: int) -> Iterator[SampleRecord]:
        """Yield a shard's samples, and note how far it was read."""
        at = 0
        for number, size in enumerate(self.sizes[shard]):
            self.read[shard] = max(self.read[shard], number + 1)
            yield SampleRecord(f"{shard}-{number}", ("jpg",), (Member(f"{shard}-{number}.jpg", at + BLOCK, size),))
            at += member_bytes(size)

    def order(self, settings: ArrivalSettings, epoch: int = 0) -> ArrivalOrder:
        """Return an order of an epoch that nobody has asked for anything yet."""
        return ArrivalOrder(self.bytes, settings, epoch, records=self.records, hint=lambda *asked: self.hints.append(asked))


def keys(order: ArrivalOrder, positions: range) -> list[str]:
    """Return the keys at positions."""
    return [found.record.key for found in order.locate(positions)]


SHARDS = st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=12), min_size=1, max_size=9)
SETTINGS = st.builds(
    ArrivalSettings,
    seed=st.integers(0, 2**64 - 1),
    lanes=st.integers(1, 9),
    window_bytes=st.integers(1, 40_000),
    shuffle=st.booleans(),
)


@given(SHARDS, SETTINGS, st.integers(0, 3))
def test_each_sample_once(sizes: Sizes, settings: ArrivalSettings, epoch: int) -> None:
    """Every sample stands at one position, behind the last there is none, and then all are counted."""
    order = Tars(sizes).order(settings, epoch)
    count = sum(map(len, sizes))
    found = keys(order, range(count + 5))
    assert sorted(found) == sorted(f"{shard}-{n}" for shard, held in enumerate(sizes) for n in range(len(held)))
    assert order.locate([count]) == [] and order.samples == count
    assert order.counts == [len(held) for held in sizes]


@given(SHARDS, SETTINGS, st.integers(1, 5), st.data())
def test_anyone_finds_the_same(sizes: Sizes, settings: ArrivalSettings, size: int, data: st.DataObject) -> None:
    """What stands at a position depends on nothing that was asked before: workers that see each n-th batch, and a resume, find it."""
    tars = Tars(sizes)
    whole = keys(tars.order(settings), range(sum(map(len, sizes))))
    batches = [range(at, at + size) for at in range(0, len(whole), size)]
    worker = tars.order(settings)
    first, step = data.draw(st.integers(0, len(batches) - 1)), data.draw(st.integers(1, 4))
    for batch in [*batches[first::step], data.draw(st.sampled_from(batches)), batches[-1]]:
        assert keys(worker, batch) == whole[batch.start : batch.stop]


@given(SHARDS, SETTINGS, st.integers(1, 5), st.sets(st.integers(0, 40), max_size=6))
def test_what_failed_once_is_lost_to_nobody(sizes: Sizes, settings: ArrivalSettings, size: int, failing: set[int]) -> None:
    """A read that fails, or is given up, ends no lane: whoever asks again finds what it would have found, of samples and of floors."""
    tars, reads = Tars(sizes), itertools.count()
    whole = keys(tars.order(settings), range(sum(map(len, sizes))))

    def records(shard: int) -> Iterator[SampleRecord]:
        for record in tars.records(shard):
            if next(reads) in failing:
                raise OSError("the disk")
            yield record

    order = ArrivalOrder(tars.bytes, settings, 0, records=records)
    found = list[str]()
    for _ in range(len(whole) + 2 * len(failing) + 1):
        if order.closed:
            order = ArrivalOrder(tars.bytes, settings, 0, records=records)
        with suppress(OSError):
            found += keys(order, range(len(found), min(len(found) + size, len(whole))))
        with suppress(OSError):
            order.floors(len(found))
    assert found == whole


@given(SHARDS, SETTINGS)
def test_rounds_pass_over_lanes_that_ran_out(sizes: Sizes, settings: ArrivalSettings) -> None:
    """Round k takes one sample of each lane that has more than k, in the order of the lanes."""
    tars = Tars(sizes)
    lanes = deal(tars.bytes, settings, 0)
    lengths = [sum(len(sizes[shard]) for shard in shards) for shards in lanes]
    lane_of = {shard: lane for lane, shards in enumerate(lanes) for shard in shards}
    expected = [lane for k in range(max(lengths)) for lane, length in enumerate(lengths) if length > k]
    assert [lane_of[found.shard] for found in tars.order(settings).locate(range(sum(lengths)))] == expected


@given(SHARDS, SETTINGS)
def test_storage_order(sizes: Sizes, settings: ArrivalSettings) -> None:
    """Unshuffled, samples come as they are stored."""
    settings = ArrivalSettings(seed=settings.seed, window_bytes=settings.window_bytes, shuffle=False)
    found = [(f.shard, f.at) for f in Tars(sizes).order(settings).locate(range(sum(map(len, sizes))))]
    assert found == [(shard, n) for shard, held in enumerate(sizes) for n in range(len(held))]


def test_epochs_and_seeds_differ() -> None:
    """Another epoch, and another seed, has another order."""
    tars = Tars([[500] * 10 for _ in range(12)])
    settings = [ArrivalSettings(seed=seed, lanes=4, window_bytes=4096) for seed in (0, 1)]
    found = {tuple(keys(tars.order(setting, epoch), range(120))) for setting in settings for epoch in (0, 1)}
    assert len(found) == 4


def test_a_pinned_order() -> None:
    """This order stays: a release that changes it would break resumes."""
    tars = Tars([[700] * 6, [300] * 4, [1500] * 3, [100] * 5])
    order = tars.order(ArrivalSettings(seed=7, lanes=2, window_bytes=6000), epoch=0)
    pinned = "1-0 3-0 1-1 3-1 1-2 3-3 1-3 3-2 0-0 3-4 0-1 2-0 0-3 2-2 0-2 2-1 0-4 0-5"
    assert keys(order, range(18)) == pinned.split()


def test_batches_mix_lanes_of_like_length() -> None:
    """Shards are dealt by their bytes, so that lanes run out at about the same time; each batch takes from all."""
    settings = ArrivalSettings(lanes=8)
    sizes = [1000 * (1 + n % 7) for n in range(200)]
    held = [sum(sizes[shard] for shard in shards) for shards in deal(sizes, settings, 0)]
    assert sorted(shard for shards in deal(sizes, settings, 0) for shard in shards) == list(range(200))
    assert max(held) - min(held) <= max(sizes)


def test_only_what_is_asked_for_is_read() -> None:
    """The first batch of a thousand shards reads the first windows of eight, and hints at little more."""
    tars = Tars([[10_000] * 100 for _ in range(1000)])
    order = tars.order(ArrivalSettings(window_bytes=320_000))
    assert len(order.locate(range(64))) == 64
    assert sum(1 for count in tars.read if count) == 8
    assert sum(tars.read) <= 8 * 16
    assert sum(end - begin for _, begin, end in tars.hints) <= 8 * 320_000
    assert order.samples is None


def test_hints_cover_what_is_read_before_it_is() -> None:
    """All bytes of an epoch are hinted at once, forward in each shard, each before its samples are asked for."""
    tars = Tars([[n * 100 for n in range(30)] for _ in range(20)])
    order = tars.order(ArrivalSettings(lanes=3, window_bytes=30_000))
    for position in itertools.count():
        found = order.locate([position])
        if not found:
            break
        member = found[0].record.members[0]
        assert any(
            s == found[0].shard and b <= member.offset and member.offset + member.size <= e for s, b, e in _joined(tars.hints)
        )
    total = sum(end - begin for _, begin, end in tars.hints)
    assert total == sum(end - begin for _, begin, end in _joined(tars.hints)) <= sum(tars.bytes)


def _joined(hints: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return ranges of bytes by shard, neighbors joined."""
    joined: list[tuple[int, int, int]] = []
    for shard, begin, end in sorted(hints):
        if joined and joined[-1][0] == shard and begin <= joined[-1][2]:
            joined[-1] = shard, joined[-1][1], max(end, joined[-1][2])
        else:
            joined.append((shard, begin, end))
    return joined


def test_windows_grow() -> None:
    """The first windows are a sixteenth of a full one and double; behind them each lane has another size once, then all are full."""
    settings = ArrivalSettings(lanes=4, window_bytes=4096)
    assert [[settings.window(lane, number) for number in range(7)] for lane in range(4)] == [
        [256, 512, 1024, 2048, fifth, 4096, 4096] for fifth in (1024, 2048, 3072, 4096)
    ]
    assert [ArrivalSettings(lanes=4, window_bytes=1).window(lane, 0) for lane in range(4)] == [1] * 4
