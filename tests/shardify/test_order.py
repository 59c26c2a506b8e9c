"""Order: laws of splits, permutations and cuts, and one pinned sequence of each."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify import order
from shardify.items import LEFT_OUT

KEYS = [f"{n:04x}" for n in range(4000)]
keys_lists = st.lists(st.text("abc01-", min_size=1, max_size=6), unique=True, max_size=60)
seeds = st.integers(0, 2**63 - 1)


def labels_of(keys: list[str]) -> npt.NDArray[np.int64]:
    """Give each key a label that depends on nothing else."""
    return np.array([len(key) % 3 for key in keys], dtype=np.int64)


@given(keys_lists, seeds, st.sampled_from(["shuffle", "stratified", "source"]))
def test_an_arrangement_is_a_permutation(keys: list[str], seed: int, mode: order.Mode) -> None:
    """Every mode writes each row exactly once."""
    rows = order.arrange(keys, labels_of(keys), mode=mode, seed=seed)
    assert rows.dtype == np.int64
    assert sorted(rows.tolist()) == list(range(len(keys)))


@given(keys_lists, seeds, st.sampled_from(["shuffle", "stratified"]), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(keys: list[str], seed: int, mode: order.Mode, random: object) -> None:
    """A table sorted another way gives the same sequence of keys."""
    other = list(keys)
    random.shuffle(other)  # type: ignore[attr-defined]
    first = [keys[r] for r in order.arrange(keys, labels_of(keys), mode=mode, seed=seed)]
    assert first == [other[r] for r in order.arrange(other, labels_of(other), mode=mode, seed=seed)]


def test_source_order_keeps_the_rows_as_they_are() -> None:
    """`source` is the identity."""
    assert order.arrange(KEYS, np.zeros(4000, np.int64), mode="source", seed=3).tolist() == list(range(4000))


def test_seeds_give_unlike_orders() -> None:
    """Another seed gives an order that is uncorrelated with the first, and neither is the source's."""
    labels = np.zeros(4000, np.int64)
    places = [np.argsort(order.arrange(KEYS, labels, mode="shuffle", seed=seed)) for seed in (0, 1, 2)]
    places.append(np.arange(4000))
    for i, first in enumerate(places):
        for second in places[:i]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.06


def test_rows_of_equal_hash_stand_in_the_order_of_their_keys() -> None:
    """Even a collision of hashes leaves no choice to the order of the rows."""
    hashes = np.array([5, 1, 5, 0, 5, 1], dtype=np.uint64)
    keys = ["c", "z", "a", "m", "b", "y"]
    assert order._by_hash(hashes, keys.__getitem__).tolist() == [3, 5, 1, 2, 4, 0]


def test_pinned_order() -> None:
    """The sequences of release 0.1: a change would reshuffle every set that is built again."""
    keys = [f"k{n}" for n in range(10)]
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    assert order.arrange(keys, labels, mode="shuffle", seed=0).tolist() == [7, 4, 1, 0, 3, 6, 8, 2, 5, 9]
    assert order.arrange(keys, labels, mode="stratified", seed=0).tolist() == [7, 1, 8, 4, 0, 6, 3, 9, 5, 2]
    assert order.draw_splits(keys, [0.5, 0.3], 0).tolist() == [0, 0, 1, 0, 0, 0, 1, 1, 0, 0]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=80), seeds)
def test_every_run_of_a_stratified_order_holds_its_share_of_each_class(labels: list[int], seed: int) -> None:
    """Wherever a shard begins and ends, each class has its share, give or take 1 + (class sizes) * share."""
    n, counts = len(labels), Counter(labels)
    rows = order.arrange([str(i) for i in range(n)], np.array(labels), mode="stratified", seed=seed)
    arranged = np.array(labels)[rows]
    for label, count in counts.items():
        prefix = np.concatenate([[0], np.cumsum(arranged == label)]) - np.arange(n + 1) * (count / n)
        assert prefix.max() - prefix.min() <= 1 + len(set(counts.values())) * count / n + 1e-9


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=80),
    st.lists(st.integers(1, 99), min_size=80, max_size=80),
    st.integers(1, 900),
)
def test_every_shard_holds_its_share_of_each_class(labels: list[int], sizes: list[int], limit: int) -> None:
    """Cut at any limit, a shard of m of n samples holds m c / n of a class of c, give or take 1 + (class sizes) c / n."""
    n, counts = len(labels), Counter(labels)
    rows = order.arrange([str(i) for i in range(n)], np.array(labels), mode="stratified", seed=0)
    cuts = order.cut(np.array(sizes[:n]), limit, 10).tolist()
    for start, stop in zip(cuts, cuts[1:], strict=False):
        held = Counter(labels[row] for row in rows[start:stop])
        for label, count in counts.items():
            bound = 1 + len(set(counts.values())) * count / n
            assert abs(held[label] - (stop - start) * count / n) <= bound + 1e-9


def test_shards_of_80000_unequal_classes_hold_their_share() -> None:
    """Few large and many small classes, as in Google Landmarks: each shard's count of each class keeps the bound, and is near 1."""
    classes = 80_000
    counts = np.maximum(1, 1500 / np.arange(1, classes + 1) ** 0.6).astype(np.int64)
    labels = np.repeat(np.arange(classes), counts)
    n, kinds = len(labels), len(np.unique(counts))
    assert kinds > 150
    rows = order.arrange([str(i) for i in range(n)], labels, mode="stratified", seed=0)
    cuts = order.cut(np.random.default_rng(0).integers(60_000, 160_000, n), 128 * 2**20)
    assert len(cuts) > 100
    for start, stop in zip(cuts, cuts[1:], strict=False):
        off = np.abs(np.bincount(labels[rows[start:stop]], minlength=classes) - (stop - start) * counts / n)
        assert (off <= 1 + kinds * counts / n).all()
        assert off.max() < 1.2


@given(keys_lists, seeds, st.sampled_from(["shuffle", "stratified", "source"]), st.data())
def test_some_rows_are_arranged_as_if_they_were_all(keys: list[str], seed: int, mode: order.Mode, data: st.DataObject) -> None:
    """A split's order depends on its own rows alone."""
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, len(keys) - 1)))) if keys else [], dtype=np.int64)
    own = [keys[row] for row in rows]
    arranged = order.arrange(keys, labels_of(keys), mode=mode, seed=seed, rows=rows)
    assert arranged.tolist() == rows[order.arrange(own, labels_of(own), mode=mode, seed=seed)].tolist()
    assert arranged.dtype == np.int64


def test_long_columns_are_arranged_like_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are hashed in runs, and where one ends changes nothing."""
    labels, rows = np.arange(4000) % 7, np.flatnonzero(np.arange(4000) % 3)
    whole = order.arrange(KEYS, labels, mode="stratified", seed=1, rows=rows)
    drawn = order.draw_splits(KEYS, [0.5, 0.2], 1)
    monkeypatch.setattr(order, "_CHUNK", 97)
    assert np.array_equal(order.arrange(KEYS, labels, mode="stratified", seed=1, rows=rows), whole)
    assert np.array_equal(order.draw_splits(KEYS, [0.5, 0.2], 1), drawn)


def test_rare_classes_are_spread_too() -> None:
    """Classes of one sample lie evenly among the others: no shard collects them, none drifts."""
    labels = np.concatenate([np.zeros(2000, np.int64), np.arange(1, 2001)])
    rare = labels[order.arrange(KEYS, labels, mode="stratified", seed=1)] > 0
    assert all(99 <= rare[start : start + 200].sum() <= 101 for start in range(0, 4000, 200))


@given(keys_lists, st.lists(st.floats(0.01, 0.3), min_size=1, max_size=3), seeds, st.integers(0, 60))
def test_rows_that_are_added_move_nothing(keys: list[str], shares: list[float], seed: int, known: int) -> None:
    """A key's split depends on the seed and the key alone."""
    drawn = order.draw_splits(keys, shares, seed)
    assert drawn.dtype == np.int16
    assert order.draw_splits(keys[:known], shares, seed).tolist() == drawn[:known].tolist()
    assert order.draw_splits(keys[::-1], shares, seed).tolist() == drawn[::-1].tolist()


@pytest.mark.parametrize("shares", [[0.9, 0.1], [0.7, 0.2, 0.1], [0.1] * 10, [0.5, 0.2], [1.0]])
def test_shares_are_met(shares: list[float]) -> None:
    """Each split gets about its share; a sum of 1 leaves nobody out, a smaller one the rest."""
    drawn = order.draw_splits(KEYS, shares, 0)
    for split, share in enumerate(shares):
        assert abs((drawn == split).mean() - share) < 4 * (share * (1 - share) / 4000) ** 0.5 + 1e-9
    assert ((drawn == LEFT_OUT).sum() == 0) == (sum(shares) > 0.99)


def test_a_smaller_share_keeps_a_part_of_the_same_rows() -> None:
    """Intervals stand in the order of the file: cutting val leaves train as it is."""
    wide, narrow = order.draw_splits(KEYS, [0.8, 0.2], 5), order.draw_splits(KEYS, [0.8, 0.1], 5)
    assert np.array_equal(wide == 0, narrow == 0)
    assert set(np.flatnonzero(narrow == 1)) < set(np.flatnonzero(wide == 1))


def test_splits_and_order_are_independent() -> None:
    """With one seed for both, val isn't the end of the shuffle."""
    drawn = order.draw_splits(KEYS, [0.5, 0.5], 0)
    place = np.argsort(order.arrange(KEYS, np.zeros(4000, np.int64), mode="shuffle", seed=0))
    assert abs(np.corrcoef(drawn, place)[0, 1]) < 0.06


def cut_by_hand(sizes: list[int], limit: int, end_bytes: int) -> list[int]:
    """Cut one sample at a time: the plain rule."""
    cuts, written = [0], 0
    for slot, size in enumerate(sizes):
        if slot > cuts[-1] and written + size + end_bytes > limit:
            cuts.append(slot)
            written = 0
        written += size
    return [*cuts, len(sizes)] if sizes else [0]


@given(st.lists(st.integers(0, 300), max_size=50), st.integers(1, 1000), st.integers(0, 100))
def test_cuts_follow_the_plain_rule(sizes: list[int], limit: int, end_bytes: int) -> None:
    """Shards end before the limit is passed, none is empty, a sample above the limit stands alone."""
    cuts = order.cut(np.array(sizes, np.int64), limit, end_bytes).tolist()
    assert cuts == cut_by_hand(sizes, limit, end_bytes)
    for start, stop in zip(cuts, cuts[1:], strict=False):
        assert start < stop
        assert stop - start == 1 or sum(sizes[start:stop]) + end_bytes <= limit


def test_a_shard_of_exactly_the_limit() -> None:
    """The end's two blocks count, and the limit itself may be reached."""
    assert order.cut(np.array([1024] * 4), 3 * 1024).tolist() == [0, 2, 4]
    assert order.cut(np.array([1024] * 4), 3 * 1024 - 1).tolist() == [0, 1, 2, 3, 4]
    assert order.cut(np.array([2**40] * 3), 2**62).tolist() == [0, 3]
