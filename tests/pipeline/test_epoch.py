"""Promises of the order: each sample once, the same batches for any ranks and resumes, exact windows, good mixing."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.epoch import (
    BLOCKS_PER_LANE,
    ORDER_VERSION,
    EpochOrder,
    Layout,
    OrderSettings,
    Steps,
    Token,
    fold,
    mix,
    permutation,
    window_samples,
)
from pipeline.errors import OptionsError

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=30)
ORDERS = st.builds(
    OrderSettings,
    seed=st.integers(0, 2**64 - 1),
    lanes=st.sampled_from([1, 2, 3, 5, 8]),
    window=st.integers(1, 40),
    shuffle=st.sampled_from([True, True, True, False]),
)
EPOCHS = st.integers(0, 50)
LAST = st.sampled_from(["drop", "pad", "uneven"])
# fmt: off
PINNED_FEW = [
    12, 16, 11, 18, 17, 15, 1, 14, 10, 22, 4, 6, 7, 21, 2, 23, 20, 3, 8, 0, 5, 13, 19, 9,
]
PINNED_MANY = [
    3, 20, 11, 21, 12, 22, 45, 4, 48, 35, 47, 38, 10, 19, 46, 36, 26, 9, 25, 24, 27, 23, 6, 37, 8,
    42, 7, 41, 28, 40, 16, 39, 29, 13, 17, 49, 18, 2, 5, 14, 44, 0, 34, 1, 33, 31, 43, 30, 15, 32,
]
# fmt: on


def flat_order(counts: list[int], order: OrderSettings, epoch: int) -> list[int]:
    """The samples of an epoch as one number each, in the order of global positions."""
    shard, index = EpochOrder(Layout(counts, order), epoch).locate(np.arange(sum(counts)))
    starts = np.concatenate([[0], np.cumsum(counts)])
    return (starts[shard] + index).tolist()


def batches(steps: Steps) -> list[list[int]]:
    """The positions of each of a rank's batches, occurrences beyond the set counted on."""
    made = []
    for step in range(len(steps)):
        positions, occurrences = steps.token(step).positions(steps.samples, steps.world_size)
        made.append((positions + occurrences * steps.samples).tolist())
    return made


def global_batches(samples: int, total: int, world: int, last: str, start: int = 0) -> list[list[int]]:
    """The sorted positions of each global batch of `total` samples, by `world` ranks."""
    parts = [
        batches(Steps(samples=samples, batch_size=total // world, last_batch=last, world_size=world, rank=rank, start=start))
        for rank in range(world)
    ]
    return [sorted(g for part in parts if b < len(part) for g in part[b]) for b in range(max(map(len, parts)))]


def divisors(number: int) -> list[int]:
    """The numbers of ranks that share a global batch of `number` evenly."""
    return [w for w in range(1, number + 1) if number % w == 0]


@given(COUNTS, ORDERS, EPOCHS)
@settings(max_examples=150, deadline=None)
def test_each_sample_stands_at_one_position(counts: list[int], order: OrderSettings, epoch: int) -> None:
    """Positions and samples are in one-to-one relation for any counts, empty shards too."""
    assert sorted(flat_order(counts, order, epoch)) == list(range(sum(counts)))


@given(COUNTS, ORDERS, EPOCHS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_positions_can_be_located_in_any_portions(counts: list[int], order: OrderSettings, epoch: int, random: object) -> None:
    """A position's sample doesn't depend on what was asked before or together with it."""
    whole = flat_order(counts, order, epoch)
    asked = list(range(sum(counts))) * 2
    random.shuffle(asked)  # type: ignore[attr-defined]
    one = EpochOrder(Layout(counts, order), epoch)
    starts = np.concatenate([[0], np.cumsum(counts)])
    for begin in range(0, len(asked), 5):
        shard, index = one.locate(np.array(asked[begin : begin + 5]))
        assert (starts[shard] + index).tolist() == [whole[g] for g in asked[begin : begin + 5]]


@given(COUNTS, ORDERS, EPOCHS)
@settings(max_examples=150, deadline=None)
def test_a_windows_reads_are_its_samples(counts: list[int], order: OrderSettings, epoch: int) -> None:
    """Each lane's windows follow each other without a gap, and each reads exactly the samples that stand in it."""
    layout = Layout(counts, order)
    one = EpochOrder(layout, epoch)
    for lane in range(order.lanes):
        place = 0
        for number, window in enumerate(one.windows(lane)):
            assert (window.lane, window.number, window.start) == (lane, number, place)
            assert place < window.stop <= place + order.window
            shard, index = one.locate(np.arange(window.start, window.stop) * order.lanes + lane)
            read = [(s, i) for s, begin, end in window.reads.tolist() for i in range(begin, end)]
            assert sorted(read) == sorted(zip(shard.tolist(), index.tolist(), strict=True))
            place = window.stop
        assert place == layout.lane_starts[lane + 1] - layout.lane_starts[lane] == -(-max(0, sum(counts) - lane) // order.lanes)


@given(COUNTS, ORDERS, EPOCHS)
@settings(max_examples=100, deadline=None)
def test_a_piece_is_read_forward_and_wraps_once(counts: list[int], order: OrderSettings, epoch: int) -> None:
    """Reads of a lane, end to end, are its pieces one after the other, each in at most two forward runs."""
    layout = Layout(counts, order)
    pieces = layout.pieces(epoch)
    one = EpochOrder(layout, epoch)
    for lane in range(order.lanes):
        chosen = pieces.take(np.flatnonzero(pieces.lane == lane))
        wanted = {
            (s, f + i): p for p, (s, f, n) in enumerate(zip(chosen.shard, chosen.first, chosen.size, strict=True)) for i in range(n)
        }
        read = [(s, i) for w in one.windows(lane) for s, begin, end in w.reads.tolist() for i in range(begin, end)]
        assert sorted(read) == sorted(wanted)
        owners = [wanted[sample] for sample in read]
        turns = sum(a != b for a, b in itertools.pairwise(owners))
        assert turns == max(0, len(chosen) - 1)
        jumps = [a for a, (x, y) in zip(owners, itertools.pairwise(read), strict=False) if wanted[y] == a and y[1] != x[1] + 1]
        assert len(jumps) == len(set(jumps))


@given(COUNTS, ORDERS, EPOCHS)
@settings(max_examples=60, deadline=None)
def test_reading_can_begin_at_any_place(counts: list[int], order: OrderSettings, epoch: int) -> None:
    """`windows(lane, place)` begins with the window that holds the place, and goes on as from the start."""
    one = EpochOrder(Layout(counts, order), epoch)
    for lane in range(order.lanes):
        whole = [(w.number, w.start, w.stop, w.reads.tolist()) for w in one.windows(lane)]
        for number, start, stop, _ in whole:
            for place in (start, stop - 1):
                assert [(w.number, w.start, w.stop, w.reads.tolist()) for w in one.windows(lane, place)] == whole[number:]


def test_windows_grow_and_lanes_turn_at_different_times() -> None:
    """The first window is 1/16 of a full one and doubles; the first full turn differs from lane to lane; then all are full."""
    one = EpochOrder(Layout([1000] * 64, OrderSettings(lanes=4, window=320)), 0)
    sizes = [[w.stop - w.start for w in one.windows(lane)] for lane in range(4)]
    assert [s[:5] for s in sizes] == [[20, 40, 80, 160, full] for full in (80, 160, 240, 320)]
    assert all(set(s[5:-1]) == {320} for s in sizes)


@given(st.lists(st.integers(1, 9), min_size=16, max_size=40), st.integers(0, 1000), EPOCHS)
@settings(max_examples=50, deadline=None)
def test_enough_shards_stay_in_their_lanes(counts: list[int], seed: int, epoch: int) -> None:
    """With 8 shards a lane or more, which samples a lane holds depends on the seed alone; their order on the epoch too."""
    layout = Layout(counts, OrderSettings(seed=seed, lanes=2, window=4))
    assert layout.fixed
    assert layout.pieces(epoch) is layout.pieces(epoch + 1)
    lanes = [[set(flat_order(counts, layout.settings, e)[lane::2]) for lane in range(2)] for e in (epoch, epoch + 1)]
    assert lanes[0] == lanes[1]


def test_few_shards_are_cut_and_dealt_anew() -> None:
    """Fewer shards than 8 a lane become at least that many parts, and another epoch has them in other lanes."""
    layout = Layout([100, 0, 50, 50], OrderSettings(lanes=2, window=4))
    assert not layout.fixed
    assert len(layout.pieces(0)) >= BLOCKS_PER_LANE * 2
    assert set(flat_order([100, 0, 50, 50], layout.settings, 0)[::2]) != set(flat_order([100, 0, 50, 50], layout.settings, 1)[::2])


def test_another_seed_is_another_deal() -> None:
    """Two seeds deal the same shards into lanes differently."""
    a, b = (Layout([10] * 64, OrderSettings(seed=seed, window=40)).pieces(0) for seed in (1, 2))
    assert a.shard.tolist() != b.shard.tolist()


def test_without_shuffling_the_order_is_the_storages() -> None:
    """shuffle=False gives the samples as they lie in the shards, whatever the lanes, the window and the epoch."""
    assert flat_order([3, 0, 5, 2], OrderSettings(seed=3, lanes=8, window=4, shuffle=False), 7) == list(range(10))


@given(st.integers(1, 60), st.sampled_from([1, 2, 4, 6, 12]), LAST)
@settings(max_examples=150, deadline=None)
def test_any_ranks_make_the_same_global_batches(samples: int, total: int, last: str) -> None:
    """The ranks' batches together depend on their total alone; each end rule uses exactly the samples that it promises."""
    if samples < (total if last != "pad" else 1):
        return
    reference = global_batches(samples, total, 1, last)
    assert all(global_batches(samples, total, world, last) == reference for world in divisors(total))
    seen = [g for batch in reference for g in batch]
    whole = samples // total * total
    assert sorted(seen) == list(range({"drop": whole, "uneven": samples, "pad": -(-samples // total) * total}[last]))


@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 6]), LAST)
@settings(max_examples=60, deadline=None)
def test_an_epoch_resumes_after_any_step_under_any_ranks(samples: int, total: int, last: str) -> None:
    """What follows a position is the same global batches as in the unbroken epoch, for every other number of ranks."""
    if samples < (total if last != "pad" else 1):
        return
    reference = global_batches(samples, total, 1, last)
    one = Steps(samples=samples, batch_size=total, last_batch=last)
    for step in range(len(one)):
        start = one.position_after(step)
        for world in divisors(total):
            assert global_batches(samples, total, world, last, start) == reference[step + 1 :]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 6), LAST, st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_len_and_sizes_are_exact(samples: int, batch_size: int, world: int, last: str, start: int) -> None:
    """Ranks have equal steps of full batches; under "uneven" steps differ by one at most, and only a last batch is short."""
    if samples < {"drop": batch_size * world, "pad": 1, "uneven": world}[last]:
        return
    ranks = [
        Steps(samples=samples, batch_size=batch_size, last_batch=last, world_size=world, rank=rank, start=min(start, samples))
        for rank in range(world)
    ]
    sizes = [[steps.token(step).size for step in range(len(steps))] for steps in ranks]
    if last == "uneven":
        assert max(map(len, sizes)) - min(map(len, sizes)) <= 1
        assert all(1 <= size <= batch_size for rank in sizes for size in rank)
        assert all(size == batch_size for rank in sizes for size in rank[:-1])
        assert sum(map(sum, sizes)) == samples - min(start, samples)
    else:
        assert len(set(map(len, sizes))) == 1
        assert all(size == batch_size for rank in sizes for size in rank)
    assert len({steps.position_after(0) for steps in ranks}) == 1


@given(
    st.integers(1, 300),
    st.sampled_from([(8, 1), (8, 2), (8, 4), (8, 8), (6, 3)]),
    st.integers(1, 5),
    st.sampled_from(["drop", "uneven"]),
)
@settings(max_examples=60, deadline=None)
def test_a_rank_touches_only_its_lanes(samples: int, lanes_world: tuple[int, int], batch_size: int, last: str) -> None:
    """When the ranks divide the lanes, rank r takes positions of lanes l with l mod W = r only."""
    lanes, world = lanes_world
    if samples < batch_size * world:
        return
    for rank in range(world):
        steps = Steps(samples=samples, batch_size=batch_size, last_batch=last, world_size=world, rank=rank)
        assert all((g % lanes) % world == rank for batch in batches(steps) for g in batch)


def test_padding_wraps_round_and_counts_occurrences() -> None:
    """Positions past the set begin again at 0 as a second occurrence, as often as a batch needs."""
    steps = Steps(samples=3, batch_size=8, last_batch="pad")
    assert len(steps) == 1
    positions, occurrences = steps.token(0).positions(3, 1)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert occurrences.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_tokens_carry_run_and_epoch() -> None:
    """A token says all that a worker needs: run, epoch, first position, size."""
    steps = Steps(samples=10, batch_size=2, last_batch="uneven", world_size=2, rank=1)
    assert [steps.token(b, run=4, epoch=5) for b in range(len(steps))] == [Token(4, 5, 1, 2), Token(4, 5, 5, 2), Token(4, 5, 9, 1)]
    with pytest.raises(IndexError, match="step 3 of 3"):
        steps.token(3)


def test_the_end_of_an_epoch_is_a_position_and_has_no_steps() -> None:
    """After the last step the position is the number of samples, left-out ones included; from there no step follows."""
    steps = Steps(samples=10, batch_size=4, last_batch="drop")
    assert [steps.position_after(step) for step in range(len(steps))] == [4, 10]
    assert len(Steps(samples=10, batch_size=4, last_batch="drop", start=10)) == 0
    assert len(Steps(samples=10, batch_size=8, last_batch="drop", start=4)) == 0


@pytest.mark.parametrize(
    ("samples", "last", "world", "says"),
    [
        (63, "drop", 1, r"63 samples, batch_size 64, last_batch='drop'; set last_batch='pad'"),
        (127, "drop", 2, r"together 128"),
        (3, "uneven", 4, r"last_batch='uneven'; set last_batch='pad', or use fewer ranks"),
        (0, "pad", 1, r"the shards hold no samples"),
    ],
)
def test_an_epoch_without_a_step_is_an_error(samples: int, last: str, world: int, says: str) -> None:
    """Zero steps on any rank is an error on all of them, with the numbers and the cure."""
    for rank in range(world):
        with pytest.raises(OptionsError, match=says):
            Steps(samples=samples, batch_size=64, last_batch=last, world_size=world, rank=rank)


@pytest.mark.parametrize(
    "given_", [{"lanes": 0}, {"lanes": 65}, {"window": 0}, {"seed": -1}, {"seed": 2**64}, {"seed": 1.5}], ids=str
)
def test_settings_are_checked(given_: dict[str, object]) -> None:
    """Seed, lanes and window out of range are errors that name them."""
    with pytest.raises(OptionsError, match=next(iter(given_))):
        OrderSettings(**given_)  # type: ignore[arg-type]


def test_arguments_out_of_range_are_errors() -> None:
    """Bad counts, epochs, ranks, starts and positions never give an order."""
    with pytest.raises(OptionsError, match="counts"):
        Layout([3, -1], OrderSettings())
    with pytest.raises(OptionsError, match="epoch"):
        EpochOrder(Layout([3], OrderSettings()), -1)
    with pytest.raises(OptionsError, match="rank"):
        Steps(samples=9, batch_size=1, last_batch="pad", world_size=2, rank=2)
    with pytest.raises(OptionsError, match="start"):
        Steps(samples=9, batch_size=1, last_batch="pad", start=10)
    for positions in ([3], [-1]):
        with pytest.raises(IndexError, match="an epoch of 3 samples"):
            EpochOrder(Layout([3], OrderSettings()), 0).locate(np.array(positions))


def test_window_samples_is_the_mean_window() -> None:
    """A window holds window_bytes over the mean sample, at least one sample; an unknown size is an error."""
    assert window_samples(32 * 2**20, 2000 * 100_000, 2000) == 335
    assert window_samples(10, 10**6, 3) == 1
    assert window_samples(10, 0, 0) == 1
    with pytest.raises(OptionsError, match="total_bytes=0"):
        window_samples(10, 0, 3)


def test_the_hash_is_splitmix64() -> None:
    """`mix` gives the first output of Vigna's splitmix64.c for seeds 0 and 1234567, and arrays hash as single numbers do."""
    assert (mix(0), mix(1234567)) == (0xE220A8397B1DCDAF, 6457827717110365317)
    key = fold(7, 8)
    assert permutation(50, key).tolist() == sorted(range(50), key=lambda i: mix(i ^ key))


def test_this_order_is_kept_by_every_release() -> None:
    """The order is pinned: a saved position must mean the same samples later, or ORDER_VERSION changes."""
    assert ORDER_VERSION == 1
    few = flat_order([7, 0, 5, 12], OrderSettings(seed=11, lanes=3, window=8), 4)
    many = flat_order([3, 2, 4, 1] * 5, OrderSettings(seed=2**63, lanes=2, window=5), 1)
    assert few == PINNED_FEW
    assert many == PINNED_MANY


def epochs_of(shards: int, samples: int = 2000, epochs: int = 21) -> list[np.ndarray]:
    """Orders of a set of 100 KB samples with windows of 32 MiB."""
    counts = np.diff(np.arange(shards + 1) * samples // shards).tolist()
    order = OrderSettings(seed=0, lanes=8, window=window_samples(32 * 2**20, samples * 100_000, samples))
    return [np.array(flat_order(counts, order, epoch)) for epoch in range(epochs)]


@pytest.mark.parametrize("shards", [1, 4, 20, 200])
def test_epochs_are_unlike_each_other(shards: int) -> None:
    """Over 20 pairs of epochs first batches share at most 1.5 times chance, and rms rank correlation is at most 0.15."""
    orders = epochs_of(shards)
    shared = [len(set(a[:64]) & set(b[:64])) for a, b in itertools.pairwise(orders)]
    assert np.mean(shared) <= 1.5 * 64 * 64 / 2000
    ranks = [np.argsort(order) for order in orders]
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in itertools.pairwise(ranks)]
    assert np.sqrt(np.mean(np.square(correlation))) <= 0.15


@pytest.mark.parametrize(("shards", "least"), [(1, 0.65), (4, 0.65), (20, 0.65), (200, 0.75)])
@pytest.mark.case("W15")
def test_batches_of_a_sorted_set_mix_classes(shards: int, least: float) -> None:
    """Batches of a set that is sorted by 50 classes hold most of the classes that batches of a full permutation would."""
    drawn = [np.random.default_rng(k).permutation(2000)[:64] for k in range(200)]
    full = np.mean([len(set(batch // 40)) for batch in drawn])
    mixed = np.mean([len(set(order[b : b + 64] // 40)) for order in epochs_of(shards, epochs=5) for b in range(0, 1984, 64)])
    assert mixed / full >= least


def test_a_million_shards_are_laid_out_in_seconds() -> None:
    """A layout of 1,000,000 shards and its first batch take at most 10 s, with no object for each shard."""
    began = time.perf_counter()
    layout = Layout(np.full(1_000_000, 1000), OrderSettings(window=300))
    shard, index = EpochOrder(layout, 0).locate(np.arange(64))
    assert time.perf_counter() - began < 10
    assert len(set(zip(shard.tolist(), index.tolist(), strict=True))) == 64
