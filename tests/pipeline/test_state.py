"""Promises of epochs and states: what each iter begins, and that a state saved at any step goes on exactly there."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import PackedSet, pack

import pipeline
from pipeline import Loader, LoaderOptions, make_loader

Keys = tuple[str, ...]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """24 samples in 3 shards, of bytes that nobody decodes."""
    return pack(tmp_path_factory.mktemp("tiny"), 24, 3, make=lambda n: b"\xff\xd8" + n.to_bytes(4, "big") * 8)


def load(packed: PackedSet, batch: int = 4, workers: int = 0, seed: int = 0, shuffle: bool = True, **options: Any) -> Loader:
    """A loader of keys and bytes."""
    given_ = LoaderOptions(**{"keys": True, "decode": "none", "lanes": 4, "window_bytes": 3000, "prefetch": workers > 0, **options})
    return make_loader(packed.folder, batch_size=batch, num_workers=workers, seed=seed, shuffle=shuffle, options=given_)


def rest_of(loader: Loader) -> list[Keys]:
    """The keys of the batches of the next iteration."""
    return [tuple(batch.keys) for batch in loader]


def take(loader: Loader, count: int) -> list[Keys]:
    """The keys of the first batches of the next iteration, which is then left."""
    return [tuple(batch.keys) for batch in itertools.islice(loader, count)]


def reference(packed: PackedSet, epochs: int, **given_: Any) -> list[list[Keys]]:
    """The epochs from the first on, undisturbed."""
    with load(packed, **given_) as loader:
        return [rest_of(loader) for _ in range(epochs)]


OPS = st.lists(
    st.one_of(st.sampled_from(["iter", "next", "next", "next", "all", "reload", "fresh"]), st.integers(0, 3)), max_size=12
)


@pytest.mark.parametrize("last", ["drop", "pad", "uneven"])
def test_any_script_of_iter_break_next_set_state_and_load(tiny: PackedSet, last: Any) -> None:
    """Whatever was done before, an iteration gives the epoch that it should, and a state the rest of its epoch."""
    epochs = reference(tiny, 20, batch=5, last_batch=last)
    twin = load(tiny, batch=5, last_batch=last)

    @given(OPS)
    @settings(max_examples=40)
    def law(ops: Sequence[str | int]) -> None:
        loader, running = load(tiny, batch=5, last_batch=last), iter(())
        following = (0, 0)  # (epoch, step) that the next iter begins
        epoch = step = 0  # of the iteration that goes on
        begun = False  # it wasn't asked for a batch yet
        follows = False  # its epoch decides the next one's: set_epoch wasn't called since
        loaded: tuple[int, int] | None = None  # where set_epoch of the same epoch goes on, until an iteration is asked
        for op in ops:
            if op == "iter":
                running, (epoch, step), begun, follows = iter(loader), following, True, True
            elif op in ("next", "all"):
                if begun:
                    following = (following[0], 0) if following == loaded else following
                    following = (epoch + 1, 0) if follows else following
                    begun, loaded = False, None
                for batch in itertools.islice(running, 1 if op == "next" else None):
                    assert tuple(batch.keys) == epochs[epoch][step]
                    step += 1
            elif op in ("reload", "fresh"):
                state = loader.state_dict()
                loader = load(tiny, batch=5, last_batch=last) if op == "fresh" else loader
                loader.load_state_dict(state)
                running, begun = iter(()), False
                following = loaded = (state["epoch"], state["position"] // 5)
                if state["position"] == 24:
                    following, loaded = (state["epoch"] + 1, 0), (state["epoch"], len(epochs[0]))
            else:
                loader.set_epoch(op)
                following = loaded if loaded is not None and loaded[0] == op else (op, 0)
                follows = False
            state = loader.state_dict()
            left = epochs[state["epoch"]][state["position"] // 5 :]
            twin.load_state_dict(state)
            assert rest_of(twin) == (left if state["position"] < 24 else epochs[state["epoch"] + 1])

    law()


WORKERS = pytest.mark.parametrize(("workers", "persistent"), [(0, True), (1, True), (2, True), (2, False)])


@WORKERS
@pytest.mark.case("R01", "R05")
def test_a_state_of_any_step_goes_on_with_the_next_batch(tiny: PackedSet, workers: int, persistent: bool) -> None:
    """Saved in the body of batch k, loaded into a running loader: batch k + 1 follows, and the epochs behind are whole."""
    epochs = reference(tiny, 4)
    options = {"persistent_workers": persistent, "prefetch_factor": 4}
    with load(tiny, workers=workers, **options) as loader, load(tiny, workers=workers, **options) as other:
        for step, batch in enumerate(loader, 1):
            assert tuple(batch.keys) == epochs[0][step - 1]
            other.load_state_dict(loader.state_dict())
            expected = epochs[0][step:] if step < 6 else epochs[1]
            assert rest_of(other) == expected
            assert len(other) == 6
            if step in (2, 6):
                assert [rest_of(other) for _ in range(2)] == (epochs[1:3] if step < 6 else epochs[2:4])


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_states_need_nothing_of_how_workers_start(tiny: PackedSet, method: Any) -> None:
    """Under fork, forkserver and spawn: an early break, a resume and the epoch behind it, by the same workers."""
    epochs = reference(tiny, 3)
    with load(tiny, workers=1, multiprocessing_context=method) as loader:
        assert take(loader, 2) == epochs[0][:2]
        state = loader.state_dict()
        assert take(loader, 1) == epochs[1][:1]
        loader.load_state_dict(state)
        assert rest_of(loader) == epochs[0][2:]
        assert rest_of(loader) == epochs[1]


@pytest.mark.case("R09")
def test_a_state_counts_what_the_loop_got(tiny: PackedSet) -> None:
    """Batches that workers made ahead don't count: before the first batch the state is the epoch's start."""
    with load(tiny, workers=2, prefetch_factor=3) as loader:
        running = iter(loader)
        assert loader.state_dict()["position"] == 0
        for step in range(1, 7):
            next(running)
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 4 * step)


@pytest.mark.case("R03")
def test_a_state_goes_on_under_any_workers(tiny: PackedSet) -> None:
    """Saved with 0, 1 or 2 workers, the state is the same, and with 0, 1 and 2 workers it goes on with the next batch (R03)."""
    (whole,) = reference(tiny, 1)
    states = []
    for workers in (0, 1, 2):
        with load(tiny, workers=workers) as loader:
            assert take(loader, 2) == whole[:2]
            states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    for workers in (0, 1, 2):
        with load(tiny, workers=workers) as loader:
            loader.load_state_dict(states[0])
            assert rest_of(loader) == whole[2:]


def test_the_end_of_an_epoch(tiny: PackedSet) -> None:
    """In the body of the last batch the state is the end: the next iter begins the next epoch, or is empty for the same one."""
    epochs = reference(tiny, 2)
    loader = load(tiny)
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 24)
    other = load(tiny)
    other.load_state_dict(state)
    assert rest_of(other) == epochs[1]
    other.load_state_dict(state)
    other.set_epoch(0)
    assert rest_of(other) == []
    assert rest_of(other) == epochs[1]


def test_set_epoch_keeps_the_place_in_the_loaded_epoch_alone(tiny: PackedSet) -> None:
    """After a load set_epoch of the same epoch changes nothing, that of another begins it; gone on from, the place is forgotten."""
    epochs = reference(tiny, 3)
    loader = load(tiny)
    take(loader, 2)
    state = loader.state_dict()
    for picked, first in (((0,), 2), ((1,), 0), ((1, 0), 2)):
        loader.load_state_dict(state)
        for epoch in picked:
            loader.set_epoch(epoch)
        assert rest_of(loader) == epochs[picked[-1]][first:]
    loader.set_epoch(0)
    assert rest_of(loader) == epochs[0]


def test_an_iter_that_nobody_asks_uses_no_epoch_up(tiny: PackedSet) -> None:
    """`iter` alone, as frameworks call it to see that it works, neither skips an epoch nor loses a loaded place, or work done."""
    epochs = reference(tiny, 2)
    with load(tiny, workers=1) as loader:
        iter(loader)
        running = iter(loader)
        assert loader._tokens.run == 1  # the second goes on with what workers made for the first
        assert [tuple(batch.keys) for batch in running] == epochs[0]
        state = {**loader.state_dict(), "epoch": 1, "position": 8}
        loader.load_state_dict(state)
        iter(loader)
        assert loader.state_dict() == state
        loader.set_epoch(1)
        assert rest_of(loader) == epochs[1][2:]


def test_a_load_ends_the_iteration_that_goes_on(tiny: PackedSet) -> None:
    """A loop in whose body a state is loaded ends; the place is where the next one begins."""
    epochs = reference(tiny, 1)
    loader = load(tiny)
    steps = 0
    for _ in loader:
        steps += 1
        loader.load_state_dict({**loader.state_dict(), "position": 12})
    assert steps == 1
    assert rest_of(loader) == epochs[0][3:]


def test_ahead_leaves_out_what_was_fetched_only(tiny: PackedSet) -> None:
    """With ahead=1 the state is that of the batch that the trainer works on, while it holds the next one; at the end it is the end."""
    loader = load(tiny, ahead=1)
    running, positions = iter(loader), []
    held = next(running)
    while held is not None:  # as accelerate's and others' loops do
        following = next(running, None)
        positions.append(loader.state_dict()["position"])
        held = following
    assert positions == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize("last", ["drop", "pad", "uneven"])
@pytest.mark.case("R02")
def test_another_batch_size_goes_on_at_the_same_sample(tiny: PackedSet, last: Any) -> None:
    """A state may be loaded under any batch size: no sample is lost or comes twice; one that leaves no step is the end."""
    whole = [key for batch in reference(tiny, 1)[0] for key in batch]
    loader = load(tiny, last_batch=last)
    take(loader, 2)
    for batch in (1, 2, 8, 16):
        other = load(tiny, batch=batch, last_batch=last)
        other.load_state_dict(loader.state_dict())
        assert [key for keys in rest_of(other) for key in keys] == whole[8:]
    big = load(tiny, batch=20, last_batch=last)
    big.load_state_dict(loader.state_dict())
    got = [key for keys in rest_of(big) for key in keys]
    if last == "drop":
        assert big.state_dict()["epoch"] == 1
        assert len(got) == 20
    else:
        assert got[:16] == whole[8:]


@given(
    st.integers(0, 2),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.sampled_from(["drop", "pad", "uneven"]),
    st.integers(0, 12),
)
@settings(max_examples=25)
def test_a_state_goes_on_under_any_ranks(tiny: PackedSet, epoch: int, before: int, after: int, last: Any, step: int) -> None:
    """W ranks save at a step, W' ranks of the same global batch go on: the rest is the same global batches, whatever the end."""

    def world(size: int) -> list[Loader]:
        return [load(tiny, batch=12 // size, last_batch=last, rank=rank, world_size=size) for rank in range(size)]

    def together(loaders: list[Loader]) -> list[list[str]]:
        parts = [rest_of(loader) for loader in loaders]
        return [sorted(key for part in steps for key in part) for steps in itertools.zip_longest(*parts, fillvalue=())]

    saving, whole = world(before), world(1)
    for loader in (*saving, *whole):
        loader.set_epoch(epoch)
    states = []
    for loader in saving:
        take(loader, step)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    going_on = world(after)
    for loader in going_on:
        loader.load_state_dict(states[0])
    expected = together(whole)
    if step >= len(expected):  # the end: the next epoch
        whole[0].set_epoch(epoch + 1)
        expected = together(whole)
        step = 0
    assert together(going_on) == expected[step:]


def test_a_state_is_plain(tiny: PackedSet) -> None:
    """A state survives JSON and torch.save with weights_only: it holds numbers and texts alone."""
    loader = load(tiny)
    take(loader, 3)
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"seed": 7}, "seed is 0 in the state and 7 here"),
        ({"lanes": 2}, r"lanes \(LoaderOptions\) is 4 in the state and 2 here"),
        ({"window_bytes": 30_000}, r"window .*window_bytes.* is \d+ in the state and \d+ here"),
        ({"shuffle": False}, "shuffle is True in the state and False here"),
    ],
    ids=str,
)
def test_a_state_of_another_order_is_refused(tiny: PackedSet, other: dict[str, Any], says: str) -> None:
    """Another seed or setting of the order is an error that names both, and the loader goes on as if nothing had been loaded."""
    loader = load(tiny, **other)
    with pytest.raises(pipeline.OptionsError, match=says):
        loader.load_state_dict(load(tiny).state_dict())
    assert loader.state_dict()["position"] == 0


def test_a_state_of_another_set_is_refused(tiny: PackedSet, tmp_path: Path) -> None:
    """Other pictures under the same names, and another number of them, are other sets; the same set elsewhere is not."""
    pack(tmp_path / "other", 24, 3)
    pack(tmp_path / "more", 25, 3)
    same = pack(tmp_path / "same", 24, 3, make=lambda n: b"\xff\xd8" + n.to_bytes(4, "big") * 8)
    state = load(tiny).state_dict()
    for name in ("other", "more"):
        with pytest.raises(pipeline.OptionsError, match=r"the digest of the set is \w{16}\.\.\. in the state and \w{16}"):
            load(PackedSet(tmp_path / name)).load_state_dict(state)
    load(same).load_state_dict(state)


def test_a_state_of_other_shards_without_a_manifest_is_refused(tmp_path: Path) -> None:
    """Where no manifest tells, names and counts of samples do."""
    for name, count in (("a", 24), ("b", 27)):
        pack(tmp_path / name, count, 3, make=lambda n: b"\xff\xd8" + n.to_bytes(4, "big") * 8)
        (tmp_path / name / "train-shardindex.json").unlink()
    a, b = load(PackedSet(tmp_path / "a"), window_bytes=1), load(PackedSet(tmp_path / "b"), window_bytes=1)
    with pytest.raises(pipeline.OptionsError, match="the digest of the set"):
        b.load_state_dict(a.state_dict())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: [], "of type list"),
        (lambda state: {}, "lacks order_version, digest"),
        (lambda state: {**state, "order_version": 2}, "the version of the order is 2 in the state and 1 here"),
        (lambda state: {**state, "position": 25}, "position=25"),
        (lambda state: {**state, "position": 1.0}, "position=1.0"),
        (lambda state: {**state, "epoch": -1}, "epoch=-1"),
    ],
)
def test_what_is_no_state_is_refused(tiny: PackedSet, change: Any, says: str) -> None:
    """A state that is cut, of another release or out of range is an OptionsError that says what is wrong with it."""
    loader = load(tiny)
    with pytest.raises(pipeline.OptionsError, match=says):
        loader.load_state_dict(change(loader.state_dict()))


@pytest.mark.case("R07")
def test_a_resume_reads_nothing_of_what_was_seen(tiny: PackedSet, tmp_path: Path) -> None:
    """A resume costs nothing: shards whose samples were all seen may be gone."""
    packed = pack(tmp_path, 24, 3, make=lambda n: b"\xff\xd8" + n.to_bytes(4, "big") * 8)
    loader = load(packed, shuffle=False)
    take(loader, 4)  # shards 0 and 1
    other = load(packed, shuffle=False)
    (tmp_path / "train-000000.tar").unlink()
    other.load_state_dict(loader.state_dict())
    assert [key for keys in rest_of(other) for key in keys] == packed.keys[16:]
