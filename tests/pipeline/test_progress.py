"""The shared block, and waits on it that always end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import residency
from pipeline.prefetch.shards import CopiedShards
from pipeline.progress import WORKERS, Block, Count
from pipeline.residency import GivenUp, Outcome, Residency

LANES = 4


@pytest.fixture
def block() -> Iterator[Block]:
    made = Block.make()
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waits end after 0.2 s without progress instead of 2."""
    monkeypatch.setattr(residency, "PATIENCE", 0.2)


def later(act: Callable[[], Any], seconds: float = 0.1) -> threading.Timer:
    """Do something a little later, as another process would."""
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


@given(st.integers(0, 2**22), st.integers(0, 2**40 - 1), st.integers(0, 63))
def test_what_belongs_to_a_run_is_nothing_to_another(run: int, position: int, lane: int) -> None:
    """Positions and places come back as they were said, and only for the run for which they were."""
    block = Block.make()
    block.begin(run, position)
    assert (block.run, block.handed) == (run, (run, position))
    block.reach(lane, run, position)
    block.want(lane, run, position)
    assert (block.resident(lane, run), block.wanted(run)) == (position, position)
    assert (block.resident(lane, run + 1), block.wanted(run + 1)) == (0, 0)
    block.close()


def test_words_are_nobody_elses(block: Block) -> None:
    """Each word is its own: counters, lanes, workers and devices don't touch each other; a few KB hold them all."""
    for count in Count:
        block.put(count, 1000 + count)
    for lane in range(64):
        block.reach(lane, 1, 2000 + lane)
    for worker in range(WORKERS):
        block.want(worker, 1, 3000 + worker)
        block.read_alone(worker)
        block.pass_by(worker, 1, 4000 + worker)
    assert all(block.copy_device(device) for device in (7, 0, 7, 9))
    block.begin(1, 5)
    block.share(3)
    assert [block.count(count) for count in Count] == [1000 + count for count in Count]
    assert [block.resident(lane, 1) for lane in range(64)] == [2000 + lane for lane in range(64)]
    assert block.wanted(1) == 3000 + WORKERS - 1
    assert block.unprefetched == WORKERS
    assert (block.passed(1, WORKERS), block.passed(2, 1), block.passed(1, WORKERS + 1)) == (4000, 0, 0)
    assert block.copied == {0, 7, 9}
    assert (block.run, block.handed, block.sharers) == (1, (1, 5), 3)
    assert os.fstat(block.fileno()).st_size < 12_000


def test_a_worker_beyond_the_rows_shares_one(block: Block) -> None:
    """More workers than rows are no error."""
    block.want(WORKERS + 3, 1, 10)
    assert block.wanted(1) == 10


def test_only_so_many_devices_are_copied(block: Block) -> None:
    """A device for which there is no word is said not to be copied, and its shards are read as they lie."""
    assert [block.copy_device(device) for device in range(6)] == [True] * 4 + [False] * 2
    assert block.copied == {0, 1, 2, 3}


def _reach(block: Block) -> None:
    block.reach(2, 1, 77)
    block.close()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_process_that_starts_gets_the_block(block: Block, method: str) -> None:
    """Workers share the block however they start, and it leaves no file."""
    process = multiprocessing.get_context(method).Process(target=_reach, args=(block,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert block.resident(2, 1) == 77
    assert str(Path(f"/proc/self/fd/{block.fileno()}").readlink()).endswith("(deleted)")


def test_pickled_elsewhere_there_is_none(block: Block) -> None:
    """Whoever unpickles a block outside a start has no prefetcher, and doesn't wait for one."""
    assert pickle.loads(pickle.dumps(block)) is None


def outcome_of(waiting: Residency, run: int, *positions: int) -> Outcome | None:
    """Wait for all; return how the last wait ended."""
    found = list(waiting.wait(run, np.array(positions, np.int64)))
    return found[-1][0] if found else None


def test_a_wait_ends_when_the_samples_are_resident(block: Block) -> None:
    """Each lane that a batch touches must have come past its last place, and no lane more than that."""
    block.begin(1, 0)
    waiting = Residency(block, LANES)
    block.reach(1, 1, 1)
    block.reach(0, 1, 2)
    later(lambda: block.reach(0, 1, 3))
    assert outcome_of(waiting, 1, 0, 4, 8, 1) is Outcome.RESIDENT  # lane 0 up to place 2, lane 1 place 0
    assert waiting.waited_seconds >= 0.05
    assert block.wanted(1) == 9
    assert outcome_of(waiting, 1) is None
    assert block.unprefetched == 0


def test_samples_come_as_they_are_there(block: Block) -> None:
    """Those of lanes that are there come at once, in their order; each comes once, and what never comes as unprefetched."""
    block.begin(1, 0)
    block.reach(1, 1, 5)
    block.reach(3, 1, 5)
    found = Residency(block, LANES).wait(1, np.array([0, 1, 2, 3, 4, 5]))
    assert [part.tolist() for part in next(found)[1:]] == [[1, 3, 5]]
    block.reach(0, 1, 1)  # not enough for place 1 of lane 0
    block.reach(2, 1, 1)
    assert next(found)[1].tolist() == [2]
    block.reach(0, 1, 2)
    assert [(outcome, part.tolist()) for outcome, part in found] == [(Outcome.RESIDENT, [0, 4])]


def test_a_wait_ends_when_another_run_begins(block: Block) -> None:
    """A batch that nobody wants any more is given up at once, and not counted."""
    block.begin(1, 0)
    later(lambda: block.begin(2, 0))
    assert outcome_of(Residency(block, LANES), 1, 0) is Outcome.GIVEN_UP
    assert block.unprefetched == 0


@pytest.mark.usefixtures("impatient")
def test_a_wait_ends_without_progress(block: Block) -> None:
    """Where nothing moves the worker reads for itself, counted; it waits again only once something has moved."""
    block.begin(1, 0)
    waiting = Residency(block, LANES, worker=3)
    assert outcome_of(waiting, 1, 0) is Outcome.UNPREFETCHED
    assert 0.2 <= waiting.waited_seconds < 2
    assert outcome_of(waiting, 1, 1) is Outcome.UNPREFETCHED
    assert waiting.waited_seconds < 0.1
    assert block.unprefetched == 2
    block.add(Count.PROGRESS, 1)
    assert outcome_of(waiting, 1, 2) is Outcome.UNPREFETCHED
    assert waiting.waited_seconds >= 0.2


@pytest.mark.usefixtures("impatient")
def test_a_byte_is_progress(block: Block) -> None:
    """A slow disk isn't a dead one: as long as bytes come, a worker waits for the window."""
    block.begin(1, 0)
    stop = threading.Event()

    def trickle() -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end and not stop.wait(0.05):
            block.add(Count.PROGRESS, 1)
        block.reach(0, 1, 1)

    thread = threading.Thread(target=trickle)
    thread.start()
    waiting = Residency(block, LANES)
    assert outcome_of(waiting, 1, 0) is Outcome.RESIDENT
    assert waiting.waited_seconds > 0.5
    stop.set()
    thread.join()


@pytest.mark.usefixtures("impatient")
def test_a_process_that_starts_is_waited_for(block: Block) -> None:
    """Until the prefetcher runs nothing moves, and that isn't in vain; a process that ended before is no prefetcher."""
    block.begin(1, 0)
    with subprocess.Popen(["sleep", "30"]) as process:
        block.started(process.pid)
        later(lambda: block.reach(0, 1, 1), 0.6)
        assert outcome_of(Residency(block, LANES), 1, 0) is Outcome.RESIDENT
        block.begin(2, 0)
        later(process.kill, 0.1)
        assert outcome_of(Residency(block, LANES), 2, 0) is Outcome.UNPREFETCHED
    assert block.unprefetched == 1


def test_patience_is_two_seconds() -> None:
    """What the other tests shorten."""
    assert residency.PATIENCE == 2.0


class Shard:
    """An open shard of three bytes, over and over."""

    size = 2**30

    def __init__(self, device: int = 77) -> None:
        self.device, self.asked = device, list[tuple[int, int]]()

    def read(self, offset: int, size: int) -> bytes:
        self.asked.append((offset, size))
        return b"xyz"

    def hint(self, begin: int, end: int) -> None:
        """Nothing is read ahead."""

    def close(self) -> None:
        """Nothing is open."""


def test_copies_are_those_of_a_run(block: Block) -> None:
    """Bytes are read from copies only of devices that are copied, and none once another run has begun: they may be gone."""
    block.begin(1, 0)
    waiting = Residency(block, LANES)
    assert waiting.copies(1) is None
    copied = CopiedShards()
    copied.add(5, 100, memoryview(b"abc"))
    block.put(Count.PID, os.getpid())
    block.put(Count.MEMORY, copied.copies.descriptor + 1)
    block.copy_device(77)
    found, shard = waiting.copies(1), Shard()
    assert found is not None and found.of(5, Shard(78)) is None
    copy = found.of(5, shard)
    assert copy is not None and copy.read(100, 3) == b"abc"
    assert copy.read(2**20, 3) == b"xyz" and shard.asked == [(2**20, 3)]  # never copied
    block.begin(2, 0)
    with pytest.raises(GivenUp):
        copy.read(100, 3)
    block.put(Count.MEMORY, 0)  # a copy failed: from now on the shards are read
    assert waiting.copies(2) is None
    copied.copies.close()
    block.put(Count.MEMORY, 999_999)
    assert waiting.copies(2) is None
