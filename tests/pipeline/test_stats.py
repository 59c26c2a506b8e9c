"""Promises of the statistics: what each stage did, who is the bottleneck, one line an epoch."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import numpy as np
import pytest
from packing import PackedSet

import pipeline
from pipeline import LoaderOptions, make_loader
from pipeline.items import Spent
from pipeline.run import slow_network
from pipeline.stats import GATHER, READ, WORKER_STAGES, Ledger, Meter, ReadingStats, StageStats, bottleneck

STAGES = [*WORKER_STAGES, "deliver", "finish", "loop"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [True, False])
def test_each_stage_counts_what_it_did(small_set: PackedSet, workers: int, prefetch: bool) -> None:
    """Items and bytes of an epoch are exact at each stage; seconds are above zero where there was work."""
    options = LoaderOptions(last_batch="uneven", prefetch=prefetch, dtype="uint8")
    with make_loader(small_set.folder, batch_size=32, num_workers=workers, transform=halved, options=options) as loader:
        for _ in range(2):
            list(loader)
        stats = loader.stats()
    assert (stats.epoch, stats.steps, stats.batches, stats.samples, stats.workers) == (1, 7, 7, 200, workers)
    assert list(stats.stages) == ["prefetch"] * prefetch + STAGES
    picture = 48 * 64 * 3
    expected = {
        "read": (200, sum(map(len, small_set.pictures.values())) + 200),  # a label of one digit each
        "decode": (200, 200 * picture),
        "augment": (200, 200 * picture // 4),
        "gather": (7, 200 * picture // 4),
        "deliver": (7, 200 * picture // 4),
        "finish": (7, 200 * picture // 4),
    }
    assert {name: (stats.stages[name].items, stats.stages[name].bytes) for name in expected} == expected
    assert all(stats.stages[name].busy_seconds > 0 for name in ("read", "decode", "augment", "gather", "finish"))
    assert stats.seconds > 0
    assert (stats.stages["deliver"].depth is not None) == (workers > 0)
    if prefetch:
        whole = sum(path.stat().st_size for path in small_set.folder.glob("*.tar"))
        assert stats.medium_bytes is not None
        assert stats.cache_bytes is not None
        assert sum(map(len, small_set.pictures.values())) < stats.medium_bytes + stats.cache_bytes <= 2 * whole
        assert stats.stages["prefetch"].bytes == stats.medium_bytes + stats.cache_bytes
    else:
        assert (stats.medium_bytes, stats.cache_bytes) == (None, None)
        assert stats.reading.way == "each worker reads for itself"


def test_bytes_that_workers_read_alone_are_not_hidden() -> None:
    """Where some reads were left to the workers nobody knows how many bytes came from where, for that epoch."""
    before = ReadingStats(prefetch=StageStats(), medium_bytes=100, cache_bytes=10, unprefetched=1, left=2)
    for more, told in (({}, True), ({"unprefetched": 2}, False), ({"left": 3}, False), ({"medium_bytes": None}, False)):
        counts = {"medium_bytes": 150, "cache_bytes": 30, "unprefetched": 1, "left": 2, **more}
        after = ReadingStats(prefetch=StageStats(), **counts).since(before)  # type: ignore[arg-type]
        assert (after.medium_bytes, after.cache_bytes) == ((50, 20) if told else (None, None))


def halved(image: np.ndarray) -> np.ndarray:
    return image[::2, ::2]


def test_before_anything_was_read(small_set: PackedSet) -> None:
    """Asked too early, stats say so; after an iter without a batch they are zero."""
    loader = make_loader(small_set.folder, batch_size=32, num_workers=0)
    with pytest.raises(pipeline.PipelineError, match="nothing was read yet"):
        loader.stats()
    iter(loader)
    assert (loader.stats().batches, loader.stats().bottleneck) == (0, "nothing was read yet")
    loader.close()


def test_stats_outlive_close(small_set: PackedSet) -> None:
    """What the last epoch did can be asked after `close`, when the prefetcher has ended."""
    with make_loader(small_set.folder, batch_size=50, num_workers=0) as loader:
        list(loader)
        before = loader.stats()
    after = loader.stats()
    assert (after.batches, after.reading.prefetch is None) == (4, False)
    assert after.medium_bytes == before.medium_bytes


def test_one_line_an_epoch(small_set: PackedSet, caplog: pytest.LogCaptureFixture) -> None:
    """Each epoch is one line on the logger "pipeline": whole ones when they end, a left one when the next begins or at close."""
    with caplog.at_level(logging.INFO, logger="pipeline"):
        with make_loader(small_set.folder, batch_size=50, num_workers=0) as loader:
            list(loader)
            assert len(lines(caplog)) == 1
            iter(loader)
            next(iter(loader))
            assert len(lines(caplog)) == 1
            list(loader)
            next(iter(loader))
        loader.close()
    assert [line.partition(" samples")[0] for line in lines(caplog)] == [
        "epoch 0: 4 batches, 200",
        "epoch 1: 1 of 4 batches, 50",
        "epoch 2: 4 batches, 200",
        "epoch 3: 1 of 4 batches, 50",
    ]
    assert all("bottleneck: " in line and " a second)" in line for line in lines(caplog))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch ")]


def test_as_text_it_is_a_table(small_set: PackedSet) -> None:
    """Printed, the statistics are the summary and a row for each stage."""
    with make_loader(small_set.folder, batch_size=50, num_workers=0) as loader:
        list(loader)
        rows = str(loader.stats()).splitlines()
    assert rows[0] == loader.stats().summary()
    assert [row.split()[0] for row in rows[1:]] == ["stage", "prefetch", *STAGES]


def dawdle(image: np.ndarray) -> np.ndarray:
    time.sleep(0.004)
    return image


def test_the_slow_one_is_named(small_set: PackedSet) -> None:
    """A slow transform is named as the bottleneck, with and without workers; the loop's own time is counted as such."""
    for workers in (0, 1):
        with make_loader(small_set.folder, batch_size=20, num_workers=workers, transform=dawdle) as loader:
            list(loader)
            for _ in loader:
                time.sleep(0.002)
            assert loader.stats().bottleneck.startswith("augment, ")
            assert loader.stats().stages["loop"].busy_seconds > 10 * 0.002


def stages(loop: float = 8.0, finish: float = 0.1, disk: float = 0.0, **busy: float) -> dict[str, StageStats]:
    found = {name: StageStats(items=1, busy_seconds=busy.get(name, 0.0)) for name in WORKER_STAGES}
    found["read"] = StageStats(items=1, busy_seconds=busy.get("read", 0.0), waiting_seconds=disk)
    return {**found, "finish": StageStats(busy_seconds=finish), "loop": StageStats(waiting_seconds=loop)}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (stages(loop=0.1, decode=9), "the training loop"),
        (stages(loop=1, finish=6, decode=9), "moving and normalizing batches, 60% of the trainer's time"),
        (stages(disk=12, decode=6), "the disk, for which 67% of the workers' time is waiting"),
        ({**stages(disk=12, decode=6), "prefetch": StageStats(busy_seconds=5)}, "the disk, for which 67%"),
        ({**stages(disk=12, decode=6), "prefetch": StageStats(busy_seconds=0.5)}, "starting the prefetcher"),
        (stages(disk=5, decode=9, augment=2), "decode, 56% of the workers' time"),
        (stages(read=9, decode=3), "read, 75% of the workers' time"),
        (stages(decode=0.1), "starting the workers"),
    ],
)
def test_who_waits_for_whom(given: dict[str, StageStats], says: str) -> None:
    """What stands in front of a stage that waits is named, in words."""
    assert bottleneck(2, given, 10.0).startswith(says)


def test_the_network_is_named_and_warned_of() -> None:
    """Of a remote set what stands before the workers is the network: the summary says so, with retries and replies by status."""
    ledger = Ledger(2)
    spent = Spent(0, ((64, 6_400_000, 0.2, 15.0), (64, 1, 2.0, 0.0), (64, 1, 1.0, 0.0), (1, 1, 0.1, 0.0)), 0.0, 1.0)
    ledger.add(spent, 1.0)
    ledger.waiting, ledger.looping = 18.0, 2.0
    before = ReadingStats(prefetch=StageStats(), medium_bytes=0, cache_bytes=0, remote=True, retries=1, replies={206: 5, 503: 1})
    now = ReadingStats(
        prefetch=StageStats(busy_seconds=30.0),
        medium_bytes=6_000_000,
        cache_bytes=400_000,
        remote=True,
        retries=4,
        paused_seconds=1.5,
        replies={0: 1, 206: 25, 503: 3},
        kept_share=0.25,
    )
    stats = ledger.stats(3, 1, now.since(before))
    assert stats.network_bound and stats.bottleneck.startswith("the network, for which")
    assert "read 6.0 MB from the network and 400.0 kB from the cache folder with 3 retries" in stats.summary()
    assert str(stats).splitlines()[-1] == "requests: 1 x no reply, 20 x 206, 2 x 503; 1.5 s between tries"
    said = slow_network(stats)
    for part in (
        "epoch 3 waited for the network 90% of its time",
        "0 MB/s came, 3 requests",
        "25% of the set",
        "cache_bytes",
        "connections",
    ):
        assert part in said
    local = dataclasses.replace(now, remote=False)
    assert not ledger.stats(3, 1, local).network_bound


def test_batches_that_lie_ready_are_the_queue() -> None:
    """The depth at "deliver" is the mean number of batches that lay ready, by how long each of them did."""
    ledger = Ledger(2)
    stage = (1, 10, 0.5, 0.0)
    for number in range(4):
        ledger.add(Spent(0, (stage,) * 4, 0.25, done=number), came=number + 2.0)
    ledger.looping = 4.0
    done = ledger.stats(0, 4, pipeline_reading())
    assert done.stages["deliver"].depth == 2.0
    assert done.stages["gather"].waiting_seconds == 1.0
    assert done.samples == 4


def pipeline_reading() -> Any:
    from pipeline.stats import ReadingStats

    return ReadingStats()


def test_a_meter_takes_a_stages_own_time() -> None:
    """A stage's busy time leaves out the stages before it, and what reading waited for; between runs nobody is idle."""
    meter = Meter()

    def slow(items: Any) -> Any:
        for item in items:
            time.sleep(0.02)
            yield item

    def none(_item: Any) -> int:
        return 3

    for run in (1, 1, 2):
        meter.begin(run)
        meter.wait(0.015)
        batch = meter.watch(GATHER, slow(meter.watch(READ, slow(iter([1, 2])), none)), none)
        assert list(batch) == [1, 2]
        spent = meter.take(0)
        items, size, busy, waited = spent.stages[READ]
        assert (items, size, waited) == (2, 6, 0.015)
        assert busy > 0.02
        assert spent.stages[GATHER][2] > 0.035
        assert sum(stage[2] for stage in spent.stages) < spent.done - meter._began
    assert spent.idle == 0.0
