"""A reader of a served set, driven as a trainer and its workers drive it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from afar import QUICK
from faulty import Faulty
from prefetching import COUNT, SHARDS, files_of, layout_of

from pipeline.epoch import EpochOrder
from pipeline.errors import SourceError
from pipeline.prefetch.plan import Fetching, Plan
from pipeline.prefetch.remote import RemoteReader
from pipeline.prefetch.walk import needs
from pipeline.progress import Block

BATCH = 16


def reader_of(folder: Path, server: Faulty, cache: Path, block: Block, limit: int = 10**9, **given: float) -> RemoteReader:
    """Return a reader of a served set, for windows of ten samples; `limit`: of the cache; `given`: settings of HTTP."""
    files = files_of(folder)
    urls = [server.url("/" + Path(file.path).name) for file in files]
    names = ("first_wait_seconds", "longest_wait_seconds", "attempts", "idle_seconds")
    http = {name: getattr(QUICK, name) for name in names} | given
    plan = Plan(
        layout_of(window=10),
        np.array([file.size for file in files], np.int64),
        urls,
        [url.replace(".tar", ".idx") for url in urls],
        hashes=[""] * SHARDS,
        fetching=Fetching(str(cache), limit, "a set", 4, http),
    )
    return RemoteReader(plan, plan.fetching, block)  # type: ignore[arg-type]


def read_epoch(
    reader: RemoteReader,
    block: Block,
    run: int,
    *,
    pause: float = 0.0,
    workers: int = 1,
    wrapped: int = 0,
    paused: Callable[[], None] = lambda: None,
) -> None:
    """Go through an epoch as workers do: each window is used once it is there; raises what is reported.

    `pause`: seconds that the trainer stands after the third batch, with the next one made; then `paused` is called. `workers`: how
    many make batches ahead, two each. `wrapped`: samples of its start that the last batch has once more.
    """
    block.begin(run, 0)
    reader.begin(run, run - 1, 0, 0, wrapped)
    wanted, until = list(needs(EpochOrder(layout_of(window=10), run - 1), [0, 1], 0)), time.monotonic() + 60

    def step() -> None:
        assert time.monotonic() < until, "it hangs"
        if not reader.step():
            time.sleep(0.002)
        if block.reported:
            raise SourceError(block.reported)

    def made(end: int) -> None:
        for worker in range(workers):
            block.want(worker, run, min(COUNT, end + worker * BATCH))
        while any(block.resident(need.window.lane, run) < need.window.stop for need in wanted if need.first < end):
            step()

    for end in range(BATCH, COUNT + 1, BATCH):
        made(end)
        block.hand_out(run, end)
        if pause and end == 3 * BATCH:
            made(end + BATCH)
            stands = time.monotonic() + pause
            while time.monotonic() < stands:
                step()
            paused()
    while wrapped and (reader._next is not None or reader.pending):
        step()
    reader.step()
