"""Laws of reading: whatever the counts, lanes, ranks, workers and interruptions, the same batches and each sample once.

First of the plan (which sample stands where, and who reads it), then of the keys that `make_loader` hands out from real shards.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packing import pack_counts

from pipeline import LoaderOptions, OptionsError, make_loader
from pipeline.epoch import EpochOrder, Layout, OrderSettings, Steps

LAST = ("drop", "pad", "uneven")
SEEDS = st.integers(0, 2**64 - 1)
COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any)
ORDERS = st.builds(
    OrderSettings,
    seed=SEEDS,
    lanes=st.sampled_from([1, 2, 3, 4, 8, 64]),
    window=st.integers(1, 30),
    shuffle=st.sampled_from([True, True, True, False]),
)
EPOCHS = st.integers(0, 50)
TOTALS = st.sampled_from([1, 2, 4, 6, 12])

Sample = tuple[int, int, int]  # shard, index within it, which time it comes in the epoch


def divisors(number: int) -> list[int]:
    """Return the numbers of ranks that share a global batch of `number` evenly."""
    return [world for world in range(1, number + 1) if number % world == 0]


def samples_of(order: EpochOrder, steps: Steps, chosen: Sequence[int] | range) -> list[list[Sample]]:
    """Return the samples of some of a rank's batches, located one batch after the other, as a worker does."""
    made = []
    for step in chosen:
        positions, occurrences = steps.token(step).positions(steps.samples, steps.world_size)
        shard, index = order.locate(positions)
        made.append(list(zip(shard.tolist(), index.tolist(), occurrences.tolist(), strict=True)))
    return made


def rank_steps(samples: int, total: int, world: int, last: str, start: int = 0) -> list[Steps]:
    """Return the steps of each of `world` ranks that make global batches of `total`."""
    common: dict[str, Any] = {"samples": samples, "batch_size": total // world, "last_batch": last, "start": start}
    return [Steps(**common, world_size=world, rank=rank) for rank in range(world)]


def merged(parts: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Return the global batches, sorted, of the ranks' batches."""
    return [sorted(itertools.chain(*batches)) for batches in itertools.zip_longest(*parts, fillvalue=())]


def enough(samples: int, total: int, last: str) -> bool:
    """Tell whether an epoch has a step on every rank."""
    return samples >= {"drop": total, "pad": 1, "uneven": total}[last]


@given(COUNTS, ORDERS, EPOCHS, TOTALS, st.sampled_from(LAST), st.integers(1, 7))
@settings(max_examples=60)
def test_samples_depend_on_neither_ranks_nor_workers(
    counts: list[int], order: OrderSettings, epoch: int, total: int, last: str, workers: int
) -> None:
    """For any ranks of equal total and any workers, each with caches of its own, the global batches hold the same samples."""
    samples = sum(counts)
    assume(enough(samples, total, last))
    layout = Layout(counts, order)
    (one,) = rank_steps(samples, total, 1, last)
    reference = merged([samples_of(EpochOrder(layout, epoch), one, range(len(one)))])
    for world in divisors(total):
        ranks = rank_steps(samples, total, world, last)
        if last != "uneven":
            assert len({len(steps) for steps in ranks}) == 1
        parts = []
        for steps in ranks:
            turns: dict[int, list[Sample]] = {}
            for worker in range(workers):
                mine = range(worker, len(steps), workers)
                turns.update(zip(mine, samples_of(EpochOrder(layout, epoch), steps, mine), strict=True))
            parts.append([turns[step] for step in range(len(steps))])
        assert merged(parts) == reference


@given(COUNTS, ORDERS, EPOCHS, TOTALS, st.sampled_from(LAST))
@settings(max_examples=60)
def test_each_sample_comes_as_often_as_the_end_rule_says(
    counts: list[int], order: OrderSettings, epoch: int, total: int, last: str
) -> None:
    """uneven: each sample once; drop: less than a global batch left out, none twice; pad: each once, then others once more."""
    samples = sum(counts)
    assume(enough(samples, total, last))
    layout = Layout(counts, order)
    everything = {(shard, index, 0) for shard, count in enumerate(counts) for index in range(count)}
    for world in divisors(total):
        parts = [samples_of(EpochOrder(layout, epoch), s, range(len(s))) for s in rank_steps(samples, total, world, last)]
        seen = list(itertools.chain(*merged(parts)))
        assert len(seen) == len(set(seen))
        once = {sample for sample in seen if sample[2] == 0}
        assert once == everything if last != "drop" else once < everything or samples % total == 0
        assert len(seen) == {"uneven": samples, "drop": samples // total * total, "pad": -(-samples // total) * total}[last]


@given(COUNTS, ORDERS, EPOCHS, TOTALS, st.sampled_from(LAST), st.data())
@settings(max_examples=60)
def test_a_chain_of_interruptions_changes_no_batch(
    counts: list[int], order: OrderSettings, epoch: int, total: int, last: str, data: st.DataObject
) -> None:
    """An epoch broken off again and again, each part read by another number of ranks, is the undisturbed epoch."""
    samples = sum(counts)
    assume(enough(samples, total, last))
    layout = Layout(counts, order)
    (one,) = rank_steps(samples, total, 1, last)
    reference = merged([samples_of(EpochOrder(layout, epoch), one, range(len(one)))])
    got: list[list[Sample]] = []
    position = 0
    while len(got) < len(reference):
        world = data.draw(st.sampled_from(divisors(total)))
        ranks = rank_steps(samples, total, world, last, position)
        taken = data.draw(st.integers(1, len(ranks[0])))
        parts = [samples_of(EpochOrder(layout, epoch), s, range(min(taken, len(s)))) for s in ranks]
        got += merged(parts)
        (position,) = {steps.position_after(taken - 1) for steps in ranks}
    assert got == reference


@given(COUNTS, ORDERS, EPOCHS, st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)), min_size=1))
@settings(max_examples=60)
def test_another_batch_size_after_a_break_loses_nothing(
    counts: list[int], order: OrderSettings, epoch: int, parts: list[tuple[int, int, int]]
) -> None:
    """Under "uneven" each sample comes once, also where ranks and batch size change at every interruption."""
    samples = sum(counts)
    layout = Layout(counts, order)
    seen: list[Sample] = []
    position = 0
    for world, batch_size, taken in itertools.cycle(parts):
        assume(samples >= world)
        ranks = rank_steps(samples, world * batch_size, world, "uneven", position)
        if not len(ranks[0]):
            break
        for steps in ranks:
            seen += itertools.chain(*samples_of(EpochOrder(layout, epoch), steps, range(min(taken, len(steps)))))
        position = ranks[0].position_after(taken - 1)
    assert sorted(seen) == [(shard, index, 0) for shard, count in enumerate(counts) for index in range(count)]


@given(COUNTS, ORDERS, EPOCHS, st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(0, 200))
@settings(max_examples=60)
def test_a_nodes_windows_are_its_samples(
    counts: list[int], order: OrderSettings, epoch: int, world: int, batch_size: int, start: int
) -> None:
    """Where the ranks divide the lanes, each byte is read once an epoch on one node: a rank's lanes hold just its samples.

    From any position on: the windows that hold what is left are the only ones that are read.
    """
    samples = sum(counts)
    assume(order.lanes % world == 0 and samples >= world)
    start = min(start, samples) // world * world
    one = EpochOrder(Layout(counts, order), epoch)
    read: set[tuple[int, int]] = set()
    for steps in rank_steps(samples, world * batch_size, world, "uneven", start):
        wanted = {sample[:2] for batch in samples_of(one, steps, range(len(steps))) for sample in batch}
        mine: list[tuple[int, int]] = []
        for lane in range(steps.rank, order.lanes, world):
            place = max(0, -(-(start - lane) // order.lanes))
            windows = one.windows(lane, place) if place * order.lanes + lane < samples else ()
            mine += [(s, i) for w in windows for s, begin, end in w.reads.tolist() for i in range(begin, end)]
        assert len(mine) == len(set(mine))
        assert wanted <= set(mine)
        assert start > 0 or wanted == set(mine)
        assert not read & set(mine)
        read |= set(mine)


@contextmanager
def packed(counts: list[int]) -> Iterator[Path]:
    """Give a folder with shards of these counts; samples are keys with a few bytes."""
    with tempfile.TemporaryDirectory() as folder:
        pack_counts(Path(folder), counts)
        yield Path(folder)


def ranks_of(folder: Path, total: int, world: int, workers: int = 0, **given_: Any) -> Any:
    """Return a loader for each of `world` ranks; without a prefetcher, so that there can be hundreds of them."""
    seed = given_.pop("seed")
    shuffle = given_.pop("shuffle", True)
    return [
        make_loader(
            folder,
            batch_size=total // world,
            num_workers=workers,
            seed=seed,
            shuffle=shuffle,
            options=LoaderOptions(keys=True, decode="none", rank=rank, world_size=world, **{"prefetch": False, **given_}),
        )
        for rank in range(world)
    ]


def keys_of(loaders: Sequence[Any], most: int | None = None, state: Any = None, epoch: int | None = None) -> list[list[str]]:
    """Return the sorted keys of each global batch, at most `most`, of a set of ranks that are closed afterwards."""
    parts = []
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        if epoch is not None:
            loader.set_epoch(epoch)
        parts.append([batch.keys for batch in itertools.islice(loader, most)])
    return merged(parts)


def close(loaders: Sequence[Any]) -> None:
    """Close loaders."""
    for loader in loaders:
        loader.close()


SETS = st.lists(st.integers(0, 7), min_size=1, max_size=9).filter(any)
OPTIONS = st.fixed_dictionaries(
    {
        "seed": SEEDS,
        "lanes": st.sampled_from([1, 2, 3, 8]),
        "window_bytes": st.integers(1, 30_000),
        "last_batch": st.sampled_from(LAST),
        "shuffle": st.sampled_from([True, True, True, False]),
    }
)


@given(SETS, OPTIONS, EPOCHS, st.sampled_from([2, 4, 6]))
@settings(max_examples=25)
def test_a_loaders_keys_are_those_of_the_plan(counts: list[int], options: dict[str, Any], epoch: int, total: int) -> None:
    """Any ranks hand out the same global batches, by key; equal steps but for uneven; each sample as the end rule says."""
    samples, last = sum(counts), options["last_batch"]
    assume(enough(samples, total, last))
    with packed(counts) as folder:
        everything = [f"s{shard}-{i}" for shard, count in enumerate(counts) for i in range(count)]
        reference: list[list[str]] = []
        for world in divisors(total):
            loaders = ranks_of(folder, total, world, **options)
            got = keys_of(loaders, epoch=epoch)
            lengths = {len(loader) for loader in loaders}
            assert max(lengths) == len(got)
            assert len(lengths) == 1 or last == "uneven"
            close(loaders)
            reference = reference or got
            assert got == reference
        seen = list(itertools.chain(*reference))
        if last == "uneven":
            assert sorted(seen) == sorted(everything)
        elif last == "drop":
            assert len(seen) == len(set(seen)) == samples // total * total
        else:
            assert set(seen) == set(everything)
            assert len(seen) == -(-samples // total) * total


@given(SETS, OPTIONS, st.integers(0, 3), st.sampled_from([2, 4]), st.data())
@settings(max_examples=12)
@pytest.mark.case("R01", "R02")
def test_a_loader_resumes_after_every_step(
    counts: list[int], options: dict[str, Any], epoch: int, total: int, data: st.DataObject
) -> None:
    """The state after any step, loaded under any other ranks, gives the rest of the undisturbed epoch, and then the next one."""
    samples = sum(counts)
    assume(enough(samples, total, options["last_batch"]))
    with packed(counts) as folder:
        (one,) = ranks_of(folder, total, 1, **options)
        reference = keys_of([one], epoch=epoch)
        following = keys_of([one])
        for step in range(1, len(reference) + 1):
            saving = ranks_of(folder, total, data.draw(st.sampled_from(divisors(total))), **options)
            assert keys_of(saving, step, epoch=epoch) == reference[:step]
            states = [loader.state_dict() for loader in saving]
            assert all(state == states[0] for state in states)
            loading = ranks_of(folder, total, data.draw(st.sampled_from(divisors(total))), **options)
            rest = keys_of(loading, state=states[0])
            if step < len(reference):
                assert rest == reference[step:]
                rest = keys_of(loading)
            assert rest == following
            close([*saving, *loading])


@pytest.mark.parametrize("last", LAST)
def test_workers_and_the_prefetcher_change_no_batch(tmp_path: Path, last: str) -> None:
    """By key: any workers, with and without a prefetcher, and a state loaded under other workers and ranks at every step."""
    pack_counts(tmp_path, [9, 0, 5, 7, 2, 8, 6])
    options: dict[str, Any] = {"seed": 5, "lanes": 4, "window_bytes": 4000, "last_batch": last}
    with ExitStack() as stack:

        def loaders(world: int, workers: int, **more: Any) -> Any:
            made = ranks_of(tmp_path, 4, world, workers, **{**options, **more})
            return [stack.enter_context(loader) for loader in made]

        (one,) = loaders(1, 0)
        reference, following = keys_of([one]), keys_of([one])
        ways: list[tuple[int, dict[str, Any]]] = [(1, {"prefetch": True}), (3, {})]
        if last == "uneven":  # workers of this kind take seconds to start
            ways.append((2, {"multiprocessing_context": "forkserver"}))
        for workers, more in ways:
            (several,) = loaders(1, workers, **more)
            assert keys_of([several]) == reference
            assert keys_of([several]) == following
        saving, (loading,) = loaders(2, 2), loaders(1, 3)
        iterators = [iter(loader) for loader in saving]
        for step in range(1, len(reference)):
            for iterator in iterators:
                next(iterator, None)
            state = saving[0].state_dict()
            assert state == saving[1].state_dict()
            assert keys_of([loading], state=state) == reference[step:]


def test_an_order_setting_that_differs_is_refused(tmp_path: Path) -> None:
    """A state is loaded only where it means the same samples: another seed, lanes, window, shuffle or set is an error."""
    pack_counts(tmp_path / "a", [9, 5, 7])
    pack_counts(tmp_path / "b", [9, 7, 5])
    options: dict[str, Any] = {"seed": 5, "lanes": 4, "window_bytes": 4000}
    (saving,) = ranks_of(tmp_path / "a", 4, 1, **options)
    keys_of([saving], 2)
    state = saving.state_dict()
    for name, value in (("seed", 6), ("lanes", 3), ("window_bytes", 9000), ("shuffle", False)):
        (other,) = ranks_of(tmp_path / "a", 4, 1, **{**options, name: value})
        with pytest.raises(OptionsError, match=name.removesuffix("_bytes")):
            other.load_state_dict(state)
    (other,) = ranks_of(tmp_path / "b", 4, 1, **options)
    with pytest.raises(OptionsError, match="digest"):
        other.load_state_dict(state)
    (larger,) = ranks_of(tmp_path / "a", 6, 1, **options)
    assert sum(map(len, keys_of([larger], state=state))) == (21 - 8) // 6 * 6


def test_numbers_of_a_large_plan() -> None:
    """The laws hold where counts are large too: a set of 3 million samples under 64 lanes, at its end and at the ramp's."""
    layout = Layout(np.full(3000, 1000), OrderSettings(lanes=64, window=335, seed=1))
    order = EpochOrder(layout, 2)
    for begin in (0, 64 * 20, 1_234_567, layout.samples - 500):
        positions = np.arange(begin, begin + 500)
        shard, index = order.locate(positions)
        assert len(set(zip(shard.tolist(), index.tolist(), strict=True))) == 500
        again = EpochOrder(layout, 2).locate(positions[::-1])
        assert np.array_equal(again[0][::-1], shard)
        assert np.array_equal(again[1][::-1], index)
