"""Promises of ranks: found when they are needed, compared before they read, equal steps, together exactly the set."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from packing import PackedSet, pack

import pipeline
from pipeline import Loader, LoaderOptions, make_loader
from pipeline.ranks import compare, name_of_caller

TRAINER = Path(__file__).parent.parent / "support" / "trainer.py"


def of_rank(packed: PackedSet, rank: int, size: int, batch: int = 4, **options: Any) -> Loader:
    """The loader of a rank, without a process for it."""
    given = LoaderOptions(keys=True, decode="none", prefetch=False, rank=rank, world_size=size, **options)
    return make_loader(packed.folder, batch_size=batch, num_workers=0, options=given)


@pytest.mark.parametrize("last", ["drop", "pad", "uneven"])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.case("W04")
def test_ranks_share_an_epoch(small_set: PackedSet, size: int, last: Any) -> None:
    """Ranks read disjoint parts of the set, whole together but for what `last_batch` says, in the steps that `len` says."""
    loaders = [of_rank(small_set, rank, size, batch=7, last_batch=last) for rank in range(size)]
    parts = [[tuple(batch.keys) for batch in loader] for loader in loaders]
    assert [len(part) for part in parts] == [len(loader) for loader in loaders]
    assert max(map(len, parts)) - min(map(len, parts)) <= (last == "uneven")
    keys = [key for part in parts for batch in part for key in batch]
    total = size * 7
    assert len(keys) == {"drop": 200 // total * total, "pad": -(-200 // total) * total, "uneven": 200}[last]
    assert len(set(keys)) == min(200, len(keys))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_know_their_ranks_part(small_set: PackedSet, workers: int) -> None:
    """The number of ranks reaches the workers: with and without them a rank's batches are the same."""
    options = LoaderOptions(keys=True, rank=1, world_size=3)
    with make_loader(small_set.folder, batch_size=8, num_workers=workers, options=options) as loader:
        got = [tuple(batch.keys) for batch in loader]
    assert got == [tuple(batch.keys) for batch in of_rank(small_set, 1, 3, batch=8)]


def test_the_same_global_batches_for_any_ranks(small_set: PackedSet) -> None:
    """A global batch of 12 is the same samples for 1, 2, 3, 4 and 6 ranks, augmented alike."""
    seen = []
    for size in (1, 2, 3, 4, 6):
        parts = [[tuple(batch.keys) for batch in of_rank(small_set, rank, size, batch=12 // size)] for rank in range(size)]
        seen.append([sorted(itertools.chain(*batches)) for batches in zip(*parts, strict=True)])
    assert all(batches == seen[0] for batches in seen)


@pytest.mark.case("W05")
def test_ranks_are_found_when_they_are_needed(small_set: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader made before its launcher's variables are set is right: the world is found at the first len or iter."""
    loader = make_loader(small_set.folder, batch_size=8, num_workers=0, options=LoaderOptions(keys=True))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(loader) == 200 // 16
    assert [tuple(b.keys) for b in loader] == [tuple(b.keys) for b in of_rank(small_set, 1, 2, batch=8)]


@pytest.mark.parametrize("ask", [len, iter, Loader.state_dict])
def test_a_world_that_changes_later_is_an_error(
    small_set: PackedSet, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Loader], Any]
) -> None:
    """Once found, another world at a later iter is an error that names both: never the whole set on each rank."""
    loader = make_loader(small_set.folder, batch_size=8, num_workers=0)
    ask(loader)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pipeline.OptionsError, match=r"is rank 1 of 2, and was rank 0 of 1 .* init_process_group before"):
        iter(loader)


def test_given_ranks_win(small_set: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """rank and world_size of the options win over the environment, which may name processes that share a part."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    loader = of_rank(small_set, 1, 2, batch=8)
    assert [len(list(loader)) for _ in range(2)] == [12, 12]


def test_workers_are_divided_over_the_ranks_of_the_machine(small_set: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default number of workers is that of the usable CPUs over the ranks here, at least one."""
    monkeypatch.setattr("pipeline.loader.usable_cpus", lambda: 9)
    for local, workers in (("1", 9), ("4", 2), ("16", 1)):
        for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local}.items():
            monkeypatch.setenv(name, value)
        with make_loader(small_set.folder, batch_size=1) as loader:
            assert loader._start(loader._join()).num_workers == workers


def test_a_step_that_no_rank_has_is_an_error(small_set: PackedSet) -> None:
    """A global batch above the set is an error with the numbers, on each rank."""
    with pytest.raises(pipeline.OptionsError, match=r"200 samples, batch_size 64 on each of 4 ranks \(together 256\)"):
        len(of_rank(small_set, 3, 4, batch=64))


@pytest.mark.parametrize(
    ("size", "lanes", "says"), [(2, 8, ""), (3, 8, "LoaderOptions(lanes=9)"), (6, 8, "lanes=12"), (65, 8, "no number up to 64")]
)
def test_lanes_that_ranks_do_not_divide_are_told(
    small_set: PackedSet, caplog: pytest.LogCaptureFixture, size: int, lanes: int, says: str
) -> None:
    """Where ranks read of all lanes, rank 0 says so, and which number of lanes would keep a node to its part."""
    with caplog.at_level(logging.INFO, logger="pipeline"):
        for rank in (0, 1):
            len(of_rank(small_set, rank, size, batch=1, lanes=lanes))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (says != "")
    assert all(says in message for message in told)


CLAIM = {"digest": "d", "seed": 0, "batch_size": 64}


def compared(claims: dict[int, dict[str, Any]], size: int, wait_seconds: float = 20.0, last: int | None = None) -> dict[int, str]:
    """What comparing says on each rank, "" for nothing; each in a thread, `last` once the others are through."""
    store, says = dist.HashStore(), {}

    def one(rank: int) -> None:
        says[rank] = ""
        try:
            compare(store, "loader", claims[rank], rank=rank, world_size=size, wait_seconds=wait_seconds)
        except pipeline.OptionsError as error:
            says[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in claims if rank != last]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if last is not None:
        one(last)
    return says


def test_ranks_that_agree_go_on() -> None:
    """Ranks with one claim hear nothing."""
    assert compared(dict.fromkeys(range(5), CLAIM), 5) == dict.fromkeys(range(5), "")


@pytest.mark.parametrize("odd", [0, 2, 3])
def test_the_rank_that_differs_is_named_on_all(odd: int) -> None:
    """All ranks stop, and each names the one that differs from the others, rank 0 too, in what, and what to do."""
    says = compared({rank: {**CLAIM, "seed": 7} if rank == odd else CLAIM for rank in range(4)}, 4)
    assert set(says.values()) == {
        f"rank {odd} of 4 would read otherwise than the others: seed is 7, elsewhere 0; give all ranks the same set, the same "
        "arguments and the same epochs (each iter uses one up, a peek too; set_epoch picks one)"
    }


def test_of_two_ranks_the_second_is_named() -> None:
    """Between two there is no majority: rank 0 counts."""
    assert all(
        "rank 1 of 2" in text and "digest is 'e'" in text for text in compared({0: CLAIM, 1: {**CLAIM, "digest": "e"}}, 2).values()
    )


def test_a_rank_that_does_not_come_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Evaluation on rank 0 alone goes on after a while, with a warning that names who didn't come."""
    assert compared({0: CLAIM, 2: CLAIM}, 4, wait_seconds=0.3) == {0: "", 2: ""}
    assert "ranks 1, 3 didn't begin to read within" in caplog.text


def test_without_rank_0_the_others_go_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that hears nothing of rank 0 goes on, and says so."""
    assert compared({1: CLAIM, 2: CLAIM}, 3, wait_seconds=0.3) == {1: "", 2: ""}
    assert "rank 1 heard nothing of rank 0" in caplog.text


def test_a_rank_that_comes_late_compares_itself() -> None:
    """One that comes after the verdict is still told that it differs."""
    says = compared({0: CLAIM, 1: CLAIM, 2: {**CLAIM, "seed": 7}}, 3, wait_seconds=0.3, last=2)
    assert (says[0], says[1]) == ("", "")
    assert "rank 2 of 3" in says[2]


def together_of(store: dist.Store, claims: dict[int, tuple[int, dict[str, Any]]], wait_seconds: float = 20.0) -> dict[int, Any]:
    """What `compare` returns or says on each of two ranks that come at once, given (attempt, claim) of each."""
    says: dict[int, Any] = {}

    def one(rank: int, attempt: int, claim: dict[str, Any]) -> None:
        try:
            says[rank] = compare(store, "loader", claim, rank=rank, world_size=2, attempt=attempt, wait_seconds=wait_seconds)
        except pipeline.OptionsError as error:
            says[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank, *claim)) for rank, claim in claims.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return says


def at(epoch: int) -> dict[str, Any]:
    return {**CLAIM, "epoch": epoch}


@pytest.mark.parametrize("first", [0, 1])
def test_a_peek_on_one_rank_alone_is_found_out(first: int) -> None:
    """A rank that used an epoch up alone compares again when the others come, and both stop and name the epochs."""
    store = dist.HashStore()
    assert together_of(store, {first: (1, at(0))}, 0.1) == {first: False}
    says = together_of(store, {first: (2, at(1)), 1 - first: (1, at(0))})
    assert all("rank 1 of 2" in text and f"epoch is {first}, elsewhere {1 - first}" in text for text in says.values())


def test_ranks_that_did_not_all_come_compare_again() -> None:
    """Neither a verdict nor a claim of an attempt before is taken for one of now; once all came, no more is compared."""
    store = dist.HashStore()
    assert together_of(store, {0: (1, at(0))}, 0.1) == {0: False}
    assert together_of(store, {1: (1, at(0))}, 0.1) == {1: False}  # came too late, and agrees
    assert together_of(store, {1: (2, at(1))}, 0.1)[1].startswith("rank 1 of 2")  # and now it doesn't
    assert together_of(store, {0: (2, at(3)), 1: (3, at(3))}) == {0: True, 1: True}


def test_a_load_on_one_rank_alone_pairs_no_names_wrongly(
    small_set: PackedSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that loads a state alone compares in vain; when all load, they are compared with one another all the same."""
    store = dist.HashStore()
    monkeypatch.setattr("pipeline.loader.default_store", lambda: store)
    monkeypatch.setattr(compare, "__kwdefaults__", {**(compare.__kwdefaults__ or {}), "wait_seconds": 0.2})
    monkeypatch.setenv("WORLD_SIZE", "2")
    loaders = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        loaders.append(make_loader(small_set.folder, batch_size=4, num_workers=0, options=LoaderOptions(prefetch=False)))
        loaders[-1]._parts = dataclasses.replace(loaders[-1]._parts, name="one")
        loaders[-1].state_dict()

    def begin(*ranks: int) -> list[str]:
        says = [""] * 2

        def one(rank: int) -> None:
            try:
                iter(loaders[rank])
            except pipeline.OptionsError as error:
                says[rank] = str(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return says

    monkeypatch.setattr("pipeline.loader.check_unchanged", lambda world: None)  # this process is both ranks
    assert begin(0, 1) == ["", ""]
    state = loaders[0].state_dict()
    loaders[0].load_state_dict(state)
    assert begin(0) == ["", ""] and "ranks 1 didn't begin" in caplog.text
    loaders[0].load_state_dict({**state, "epoch": 3})
    loaders[1].load_state_dict({**state, "epoch": 4})
    assert all("epoch is 4, elsewhere 3" in text for text in begin(0, 1))
    loaders[1].load_state_dict({**state, "epoch": 3})
    assert begin(0, 1) == ["", ""]
    assert all(loader._compared for loader in loaders)


@pytest.mark.parametrize(
    ("last", "size", "warned"), [("uneven", 3, True), ("uneven", 2, False), ("pad", 3, False), (None, 3, True)]
)
def test_unequal_steps_are_warned_of(
    small_set: PackedSet, caplog: pytest.LogCaptureFixture, last: Any, size: int, warned: bool
) -> None:
    """Ranks of unequal steps, which would wait for each other at the epoch's end, are told the number and the cure, once."""
    given = LoaderOptions(decode="none", prefetch=False, rank=0, world_size=size, last_batch=last)
    loader = make_loader(small_set.folder, batch_size=50 if size == 2 else 33, num_workers=0, shuffle=False, options=given)
    for _ in range(2):
        list(loader)
    told = [record.getMessage() for record in caplog.records if "steps" in record.getMessage() and record.levelname == "WARNING"]
    assert len(told) == warned
    assert all("rank 0 has 3 steps and rank 2 has 2" in text and "last_batch='pad'" in text for text in told)


def test_loaders_are_named_by_the_place_that_made_them() -> None:
    """A loader that only one rank makes doesn't shift the names of those that all make."""

    def train() -> str:
        return name_of_caller()

    def val() -> str:
        return name_of_caller()

    first = train()
    second = val()
    third = train()
    sites = {name.partition("-")[0] for name in (first, second, third)}
    assert len(sites) == 3  # other lines led there
    again = [train() for _ in range(2)]  # the same ones
    assert [name.partition("-")[0] for name in again] == [again[0].partition("-")[0]] * 2
    assert len(set(again)) == 2


@pytest.mark.case("W04")
def test_four_ranks_of_an_uneven_set_and_a_resume_by_two(tmp_path: Path) -> None:
    """Processes of a gloo group: equal steps without a hang, union exact, a differing rank is named, two go on where four were."""
    packed = pack(tmp_path / "set", 203, 3)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(TRAINER), str(tmp_path), str(packed.folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    four, two = ([json.loads((tmp_path / f"{size}-{rank}.json").read_text()) for rank in range(size)] for size in (4, 2))
    assert {len(rank["epochs"][0]) for rank in four} == {203 // 24}
    seen = [key for rank in four for batch in rank["epochs"][0] for key in batch]
    assert len(seen) == len(set(seen)) == 203 // 24 * 24
    assert all("rank 3 of 4 would read otherwise than the others: seed is 1, elsewhere 0" in rank["refused"] for rank in four)
    assert len({json.dumps(rank["state"]) for rank in four}) == 1
    assert together(two, 0) == together(four, 1)[3:]  # the second epoch, which the four left after 3 steps
    assert together(two, 1) == together(four, 2)


def together(ranks: list[dict[str, Any]], epoch: int) -> list[list[str]]:
    """The global batches of an epoch."""
    parts: Iterator[Any] = zip(*(rank["epochs"][epoch] for rank in ranks), strict=True)
    return [sorted(itertools.chain(*batches)) for batches in parts]
