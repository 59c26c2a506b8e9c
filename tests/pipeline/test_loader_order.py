"""The order that a loader gives: each key once, the same for any workers, another each epoch; what each iter begins."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import KEYED, batches_of, draw_all
from packing import PackedSet, pack

import pipeline
from pipeline import LoaderOptions, make_loader


@pytest.mark.parametrize("shards", [1, 4, 20])
@pytest.mark.case("W03")
def test_every_key_once_and_the_same_batches_for_any_workers(tmp_path: Path, shards: int) -> None:
    """Every key comes exactly once an epoch, `len` is exact, and the number of workers changes nothing."""
    packed = pack(tmp_path, 300, shards)
    seen = {}
    for workers in (0, 1, 2, 5):
        with make_loader(tmp_path, batch_size=64, num_workers=workers, options=KEYED) as loader:
            epochs = [batches_of(loader), batches_of(loader)]
            assert [len(epoch) for epoch in epochs] == [len(loader)] * 2 == [5, 5]
        for epoch in epochs:
            assert sorted(key for batch in epoch for key in batch) == sorted(packed.keys)
        seen[workers] = epochs
        assert epochs[0] != epochs[1]
    assert all(epochs == seen[0] for epochs in seen.values())


def test_each_iter_is_the_next_epoch_even_after_a_break(small_set: PackedSet) -> None:
    """An early break ends the epoch; the next iter begins the next one; set_epoch picks; a peek uses one up."""
    for workers, persistent in ((0, True), (2, True), (2, False)):
        options = LoaderOptions(keys=True, last_batch="uneven", persistent_workers=persistent)
        with make_loader(small_set.folder, batch_size=16, num_workers=workers, options=options) as loader:
            epochs = [batches_of(loader) for _ in range(4)]
            loader.set_epoch(1)
            for batch in loader:
                assert tuple(batch.keys) == epochs[1][0]
                break
            assert batches_of(loader) == epochs[2]
            assert tuple(next(iter(loader)).keys) == epochs[3][0]
            loader.set_epoch(0)
            assert batches_of(loader) == epochs[0]


def test_a_second_iter_ends_the_first(small_set: PackedSet, caplog: pytest.LogCaptureFixture) -> None:
    """Two iterations over one loader never mix: the first one ends when the second begins, and asked again says why."""
    for workers in (0, 2):
        with make_loader(small_set.folder, batch_size=16, num_workers=workers, options=KEYED) as loader:
            first = iter(loader)
            next(first)
            second = batches_of(loader)
            with caplog.at_level(logging.WARNING, logger="pipeline"):
                assert list(first) == []
            assert "ended by a newer iter" in caplog.text
            caplog.clear()
            assert sorted(k for b in second for k in b) == sorted(small_set.keys)


def test_an_iteration_that_was_ended_says_by_what(small_set: PackedSet, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that asks on after `load_state_dict` or `close` is told that, once it is over."""
    with make_loader(small_set.folder, batch_size=16, num_workers=0, options=KEYED) as loader:
        first = iter(loader)
        next(first)
        loader.load_state_dict(loader.state_dict())
        assert list(first) == []
        assert "epoch 0: this iteration was ended by load_state_dict()" in caplog.text
        second = iter(loader)
        next(second)
    assert list(second) == []
    assert "epoch 0: this iteration was ended by close()" in caplog.text


@pytest.mark.parametrize(("last", "size"), [("uneven", 3), ("drop", 3), ("pad", 3)])
def test_at_the_end_all_is_handed_out(small_set: PackedSet, last: Any, size: int) -> None:
    """At an epoch's end each rank has said that all samples are handed out, one with a batch fewer too: nothing stays locked."""
    for rank in range(size):
        options = LoaderOptions(decode="none", rank=rank, world_size=size, last_batch=last, lanes=3)
        with make_loader(small_set.folder, batch_size=33, num_workers=0, options=options) as loader:
            list(loader)
            assert loader._reading is not None and loader._reading.block is not None
            assert loader._reading.block.handed[1] == 200


@pytest.mark.parametrize(("last", "steps", "sizes"), [("drop", 6, {30}), ("pad", 7, {30}), ("uneven", 7, {30, 20})])
def test_last_batch(small_set: PackedSet, last: Any, steps: int, sizes: set[int]) -> None:
    """Drop leaves 200 mod 30 out, pad repeats under other draws, uneven ends short; `len` is exact."""
    options = LoaderOptions(keys=True, last_batch=last)
    with make_loader(small_set.folder, batch_size=30, num_workers=2, options=options, transform=draw_all) as loader:
        batches = list(loader)
        assert len(loader) == len(batches) == steps
    assert {len(b.keys) for b in batches} == sizes
    keys = [key for batch in batches for key in batch.keys]
    assert len(set(keys)) == (180 if last == "drop" else 200)
    if last == "pad":
        drawn = torch.cat([batch.images[:, :, 0, 0] for batch in batches])
        assert len(torch.unique(drawn, dim=0)) == 210


@pytest.mark.case("W09")
def test_a_batch_above_a_workers_share(tmp_path: Path) -> None:
    """Four workers of 10 samples each make two batches of 16: less than one is dropped, by nobody else, and `len` knows (W09)."""
    pack(tmp_path, 40, 4, make=lambda n: b"\xff\xd8" + n.to_bytes(4, "big"))
    options = LoaderOptions(keys=True, decode="none", last_batch="drop")
    with make_loader(tmp_path, batch_size=16, num_workers=4, options=options) as loader:
        batches = batches_of(loader)
        assert len(loader) == len(batches) == 2
    assert len({key for batch in batches for key in batch}) == 32


@pytest.mark.case("W15")
def test_shards_of_one_class_each_give_mixed_batches(tmp_path: Path) -> None:
    """Ten shards, one class each: batches of 8 hold about as many classes as batches of a full permutation, 5.7 of them (W15)."""
    packed = pack(tmp_path, 200, 10, make=lambda n: b"\xff\xd8" + n.to_bytes(4, "big"))
    shard_of = {key: number // 20 for number, key in enumerate(packed.keys)}
    with make_loader(tmp_path, batch_size=8, num_workers=2, options=LoaderOptions(keys=True, decode="none")) as loader:
        classes = [len({shard_of[key] for key in batch}) for _epoch in range(3) for batch in batches_of(loader)]
    assert len(classes) == 75
    assert min(classes) >= 2
    assert np.mean(classes) >= 5


def test_defaults_of_last_batch(small_set: PackedSet) -> None:
    """The default is drop when shuffling, uneven otherwise."""
    assert len(make_loader(small_set.folder, batch_size=30, num_workers=0)) == 6
    assert len(make_loader(small_set.folder, batch_size=30, num_workers=0, shuffle=False)) == 7


@pytest.mark.case("W09")
def test_zero_steps_is_an_error_with_the_numbers(small_set: PackedSet) -> None:
    """A batch larger than the set leaves no step: an error at once, not an empty epoch."""
    with pytest.raises(pipeline.OptionsError, match=r"200.*256"):
        make_loader(small_set.folder, batch_size=256)


def test_unshuffled_is_storage_order(small_set: PackedSet) -> None:
    """shuffle=False gives the samples as they are stored, each epoch."""
    with make_loader(small_set.folder, batch_size=64, num_workers=2, shuffle=False, options=LoaderOptions(keys=True)) as loader:
        for _epoch in range(2):
            assert [key for batch in loader for key in batch.keys] == small_set.keys


def test_seeds_give_other_orders(small_set: PackedSet) -> None:
    """Another seed is another order, the same seed the same one."""
    one, same, other = (
        batches_of(make_loader(small_set.folder, batch_size=20, num_workers=0, seed=s, options=KEYED)) for s in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize("shards", [1, 4, 20])
def test_epochs_are_unlike_each_other(tmp_path: Path, shards: int) -> None:
    """Over 20 pairs of epochs first batches overlap at most 1.5 times chance, and rank correlation is at most 0.15 (rms)."""
    packed = pack(tmp_path, 640, shards, make=lambda n: b"\xff\xd8" + n.to_bytes(4, "big") * 64)
    options = LoaderOptions(keys=True, decode="none", last_batch="uneven", window_bytes=32 * 1024)
    loader = make_loader(tmp_path, batch_size=64, num_workers=0, options=options)
    place = {key: i for i, key in enumerate(packed.keys)}
    epochs = [np.array([place[key] for batch in loader for key in batch.keys]) for _ in range(21)]
    pairs = list(zip(epochs, epochs[1:], strict=False))
    overlap = np.mean([len(set(a[:64]) & set(b[:64])) for a, b in pairs])
    assert overlap <= 1.5 * 64 * 64 / 640
    correlation = [np.corrcoef(np.argsort(a), np.argsort(b))[0, 1] for a, b in pairs]
    assert math.sqrt(np.mean(np.square(correlation))) <= 0.15


@pytest.mark.parametrize("given", [{"lanes": 1}, {"lanes": 3}, {"window_bytes": 1}, {"window_bytes": 20_000}])
def test_lanes_and_window_decide_the_order(small_set: PackedSet, given: dict[str, int]) -> None:
    """The order that a loader gives is that of `epoch.py` for its lanes and window, by the set's mean sample."""
    from pipeline.epoch import EpochOrder, Layout, OrderSettings, window_samples

    options = LoaderOptions(keys=True, last_batch="uneven", decode="none", **given)  # type: ignore[arg-type]
    got = [
        key for batch in make_loader(small_set.folder, batch_size=64, num_workers=0, seed=3, options=options) for key in batch.keys
    ]
    window = window_samples(options.window_bytes, sum(p.stat().st_size for p in small_set.folder.glob("*.tar")), 200)
    settings = OrderSettings(seed=3, lanes=options.lanes, window=window)
    shard, index = EpochOrder(Layout([50] * 4, settings), 0).locate(np.arange(200))
    assert got == [small_set.keys[s * 50 + i] for s, i in zip(shard.tolist(), index.tolist(), strict=True)]
