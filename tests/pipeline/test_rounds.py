"""Workers of one iteration agree on its epoch, whoever comes first, and no two iterations are taken for one."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.rounds import Beginning, Rounds


@given(st.permutations([(seed, worker) for seed in range(4) for worker in range(4)]))
def test_workers_of_an_iteration_agree(beginnings: list[tuple[int, int]]) -> None:
    """In whatever order the workers of several iterations begin, each iteration has one epoch of its own."""
    rounds = Rounds()
    epochs: dict[int, set[int]] = {}
    for seed, worker in beginnings:
        epochs.setdefault(seed, set()).add(rounds.take(None, Beginning(seed, worker, 0, 0)))
    assert sorted(epoch for found in epochs.values() for epoch in found) == [0, 1, 2, 3]
    assert [epochs[seed] for seed in dict.fromkeys(seed for seed, _ in beginnings)] == [{0}, {1}, {2}, {3}]


def test_iterations_of_persistent_workers() -> None:
    """Workers that persist have one base seed: how often they began and repeated tells their iterations apart."""
    rounds = Rounds()
    for expected, (iteration, repetition) in enumerate([(1, 0), (1, 1), (2, 0), (3, 0)]):
        assert {rounds.take(None, Beginning(7, worker, iteration, repetition)) for worker in range(3)} == {expected}


def test_outside_of_workers_each_call_is_an_epoch() -> None:
    """A process that reads alone gets the next epoch, and `set_next` chooses it, for workers too."""
    rounds = Rounds()
    assert [rounds.take(None, None) for _ in range(3)] == [0, 1, 2]
    rounds.set_next(None, 2**63)
    assert rounds.take(None, Beginning(1, 0, 0, 0)) == 2**63 and rounds.next(None) == 2**63 + 1


def test_the_same_base_seed_again() -> None:
    """A worker that begins again under the base seed of an iteration before begins another one, and the others follow it."""
    rounds = Rounds()
    found = [[rounds.take(None, Beginning(0, worker, 0, 0)) for worker in range(2)] for _ in range(3)]
    assert found == [[0, 0], [1, 1], [2, 2]]


def _take(rounds: Rounds, results: Any, worker: int) -> None:
    results.put([rounds.take(None, Beginning(seed, worker, 0, 0)) for seed in range(12)])


def test_processes_at_once() -> None:
    """Processes that begin at the same moment agree: what is shared is locked."""
    context = multiprocessing.get_context("fork")
    rounds, results = Rounds(), context.SimpleQueue()
    workers = [context.Process(target=_take, args=(rounds, results, worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    assert found == [list(range(12))] * 4


def test_each_rank_has_epochs_of_its_own() -> None:
    """Ranks that share the memory begin at the epoch that was set before they were ranks, and none moves another's."""
    rounds = Rounds()
    rounds.set_next(None, 5)
    assert [rounds.take(rank, None) for rank in (0, 0, 1, 0, 1)] == [5, 6, 5, 7, 6]
    rounds.set_next(1, 2)
    same = [Beginning(3, 0, 1, 0), Beginning(3, 1, 1, 0)]  # two ranks that seed torch alike
    assert [[rounds.take(rank, beginning) for rank in (0, 1)] for beginning in same] == [[8, 2], [8, 2]]
    other = pickle.loads(pickle.dumps(rounds))
    assert [other.take(rank, None) for rank in (None, 0, 1, 2)] == [5, 9, 3, 6]


def test_a_pickle_is_a_copy() -> None:
    """What is pickled other than for a process that starts goes on from the same epoch, by itself."""
    rounds = Rounds()
    rounds.take(None, None)
    copy = pickle.loads(pickle.dumps(rounds))
    assert [copy.take(None, None), copy.take(None, None), rounds.take(None, None)] == [1, 2, 1]
