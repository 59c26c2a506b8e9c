"""Times each stage of a loader from outside, and says who waits for whom.

    disk -> read -> decode -> augment -> gather ->|  deliver -> finish -> loop
            the workers, each on its own          |  the trainer's process

Seconds are summed over the workers. A stage waits for what stands beside it: "read" for bytes to be in memory, "gather" for the
trainer to ask for more, "deliver" and "loop" for batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pipeline.items import Batch, KeyedBatch, SkippedStats, Slot, Spent

T = TypeVar("T")

WORKER_STAGES = ("read", "decode", "augment", "gather")
READ, DECODE, AUGMENT, GATHER = range(4)
_NETWORK = "the network"
_LITTLE = 0.05  # a trainer that waits for less of its time has nothing to gain from a faster loader


def batch_bytes(batch: Batch | KeyedBatch) -> int:
    """Return the bytes of a batch's images."""
    images = batch.images
    if isinstance(images, Slot):
        return math.prod(images.shape) * images.dtype.itemsize
    return sum(map(len, images)) if isinstance(images, list) else int(images.nbytes)


class Meter:
    """Times the stages of one process; `take` says what they spent since it was last asked."""

    def __init__(self) -> None:
        self._run, self._last, self._began = -1, 0.0, 0.0
        self._clear()

    def _clear(self) -> None:
        self._within = [0.0] * len(WORKER_STAGES)  # seconds in a stage and those before it
        self._items, self._bytes = [0] * len(WORKER_STAGES), [0] * len(WORKER_STAGES)
        self._waited = 0.0

    def begin(self, run: int) -> None:
        """Note that a batch of a run is asked for."""
        self._clear()
        self._began = time.monotonic()
        if run != self._run:  # between epochs nobody waits
            self._run, self._last = run, self._began

    def watch(self, stage: int, items: Iterator[T], size: Callable[[Any], int]) -> Iterator[T]:
        """Yield a stage's items, and count them, their bytes and the time that they took."""
        clock = time.perf_counter
        while True:
            began = clock()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._within[stage] += clock() - began
            self._items[stage] += 1
            self._bytes[stage] += size(item)
            yield item

    def wait(self, seconds: float) -> None:
        """Count seconds that the reading stage waited for bytes."""
        self._waited += seconds

    def take(self, worker: int) -> Spent:
        """Return what the batch asked for last cost."""
        done, stages, before = time.monotonic(), [], 0.0
        for stage, within in enumerate(self._within):
            if not self._items[stage]:
                stages.append((0, 0, 0.0, 0.0))
                continue
            waited = self._waited if stage == READ else 0.0
            stages.append((self._items[stage], self._bytes[stage], max(0.0, within - before - waited), waited))
            before = within
        idle, self._last = self._began - self._last, done
        return Spent(worker, tuple(stages), idle, done)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStats:
    """What a stage did in an epoch: items, bytes, seconds summed over its processes, and how much lay ready in its queue.

    `depth`: batches ready for the trainer at "deliver" (their mean), windows in memory at "prefetch"; None without a queue.
    """

    items: int = 0
    bytes: int = 0
    busy_seconds: float = 0.0
    waiting_seconds: float = 0.0
    depth: float | None = None

    def since(self, before: StageStats) -> StageStats:
        """Return what was done since; the depth is that of now."""
        return replace(
            self,
            items=self.items - before.items,
            bytes=self.bytes - before.bytes,
            busy_seconds=self.busy_seconds - before.busy_seconds,
            waiting_seconds=self.waiting_seconds - before.waiting_seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingStats:
    """What stands before the workers: the prefetcher as a stage (None: there is none), and where bytes came from.

    `way`: how bytes get to the workers, in words. `medium_bytes`, `cache_bytes`: None where workers read, too, which nobody counts:
    `unprefetched` batches that waited in vain, or `left` reads of shards without an index or that failed. `kept_bytes`,
    `kept_share`: what stays in memory from epoch to epoch, and its share of the bytes that this rank reads.
    Of a `remote` set "medium" is the network, "cache" the cache folder. `retries`: requests beyond the first of each range;
    `paused_seconds` before them, summed over all that were on their way; `replies`: how many came by status, 0 for none;
    `skipped_bytes`: what servers sent beside, as they can't begin in the middle.
    """

    way: str = "each worker reads for itself"
    prefetch: StageStats | None = None
    medium_bytes: int | None = None
    cache_bytes: int | None = None
    unprefetched: int = 0
    left: int = 0
    kept_bytes: int = 0
    kept_share: float = 0.0
    remote: bool = False
    retries: int = 0
    paused_seconds: float = 0.0
    skipped_bytes: int = 0
    replies: dict[int, int] = field(default_factory=dict)

    def since(self, before: ReadingStats) -> ReadingStats:
        """Return what was done since."""
        if self.prefetch is None:
            return self
        unprefetched, left = self.unprefetched - before.unprefetched, self.left - before.left
        told = self.medium_bytes is not None and not unprefetched and not left
        return replace(
            self,
            prefetch=self.prefetch.since(before.prefetch or StageStats()),
            medium_bytes=(self.medium_bytes or 0) - (before.medium_bytes or 0) if told else None,
            cache_bytes=(self.cache_bytes or 0) - (before.cache_bytes or 0) if told else None,
            unprefetched=unprefetched,
            left=left,
            retries=self.retries - before.retries,
            paused_seconds=self.paused_seconds - before.paused_seconds,
            skipped_bytes=self.skipped_bytes - before.skipped_bytes,
            replies={status: count - before.replies.get(status, 0) for status, count in self.replies.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """What a loader did in the epoch that it reads, or read last.

    `stages`, by name: "prefetch" (where there is one), "read", "decode", "augment", "gather", "deliver", "finish", "loop".
    `steps`: batches that the iteration has, those to come included, None where nobody counted the samples. `bottleneck`: what
    limits the epoch, in words. `skipped`: samples that others stood in for.
    """

    epoch: int
    steps: int | None
    batches: int
    samples: int
    seconds: float
    workers: int
    stages: dict[str, StageStats]
    reading: ReadingStats
    bottleneck: str
    skipped: SkippedStats = field(default_factory=SkippedStats)

    @property
    def medium_bytes(self) -> int | None:
        """Bytes read from the disks; None where nothing tells."""
        return self.reading.medium_bytes

    @property
    def cache_bytes(self) -> int | None:
        """Bytes found in memory; None where nothing tells."""
        return self.reading.cache_bytes

    @property
    def unprefetched(self) -> int:
        """Batches for which a worker gave up waiting for the prefetcher, and read for itself."""
        return self.reading.unprefetched

    @property
    def network_bound(self) -> bool:
        """Whether the network is what limits the epoch."""
        return self.reading.remote and self.bottleneck.startswith(_NETWORK)

    @property
    def samples_per_second(self) -> float:
        """Samples handed over for each second of the epoch."""
        return self.samples / self.seconds if self.seconds else 0.0

    def summary(self) -> str:
        """Return the epoch in one line."""
        part = "" if self.steps in (self.batches, None) else f" of {self.steps}"
        read = _size(self.stages["read"].bytes)
        if self.medium_bytes is not None and self.cache_bytes is not None:
            places = ("network", "the cache folder") if self.reading.remote else ("disk", "memory")
            read = f"{_size(self.medium_bytes)} from the {places[0]} and {_size(self.cache_bytes)} from {places[1]}"
        if self.reading.retries:
            read += f" with {self.reading.retries} retries"
        if self.reading.skipped_bytes:
            read += f" and {_size(self.reading.skipped_bytes)} that nobody wanted"
        return (
            f"epoch {self.epoch}: {self.batches}{part} batches, {self.samples} samples in {self.seconds:.1f} s "
            f"({self.samples_per_second:.0f} a second), waited {self.stages['loop'].waiting_seconds:.1f} s for batches; "
            f"read {read}{f'; {self.skipped}' if self.skipped.samples else ''}; bottleneck: {self.bottleneck}"
        )

    def __str__(self) -> str:
        rows = [f"{'stage':<9}{'items':>10}{'bytes':>11}{'busy s':>9}{'waits s':>9}{'queue':>7}"]
        for name, stage in self.stages.items():
            depth = "" if stage.depth is None else f"{stage.depth:.1f}"
            rows.append(
                f"{name:<9}{stage.items:>10}{_size(stage.bytes):>11}{stage.busy_seconds:>9.2f}{stage.waiting_seconds:>9.2f}{depth:>7}"
            )
        told = ", ".join(f"{count} x {status or 'no reply'}" for status, count in sorted(self.reading.replies.items()) if count)
        waits = f"; {self.reading.paused_seconds:.1f} s between tries" if self.reading.retries else ""
        return "\n".join([self.summary(), *rows, *([f"requests: {told}{waits}"] if told else [])])


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@dataclass(slots=True)
class Ledger:
    """Adds up what an iteration spent, in the trainer's process."""

    workers: int
    batches: int = 0
    samples: int = 0
    waiting: float = 0.0  # the trainer, for batches
    finishing: float = 0.0
    looping: float = 0.0
    queued: float = 0.0  # seconds that batches lay ready, summed: over the epoch's seconds it is their mean number
    finished_bytes: int = 0
    idle: float = 0.0  # workers that nobody asked for more
    stages: list[list[float]] = field(default_factory=lambda: [[0, 0, 0.0, 0.0] for _ in WORKER_STAGES])

    def add(self, spent: Spent, came: float, unread: int = 0) -> None:
        """Count a batch that came at `came` by `time.monotonic`, with samples that others stand in for as they couldn't be read."""
        self.batches += 1
        self.samples += spent.stages[READ][0] + unread
        self.queued += max(0.0, came - spent.done)
        self.idle += spent.idle
        for total, part in zip(self.stages, spent.stages, strict=True):
            for at, value in enumerate(part):
                total[at] += value

    @property
    def seconds(self) -> float:
        """The epoch so far, the loop's own work included."""
        return self.waiting + self.finishing + self.looping

    def stats(self, epoch: int, steps: int | None, reading: ReadingStats, skipped: SkippedStats | None = None) -> LoaderStats:
        """Return what was added up, and what it means."""
        stages = self._stages()
        if reading.prefetch is not None:
            stages = {"prefetch": reading.prefetch, **stages}
        return LoaderStats(
            epoch=epoch,
            steps=steps,
            batches=self.batches,
            samples=self.samples,
            seconds=self.seconds,
            workers=self.workers,
            stages=stages,
            reading=reading,
            bottleneck=bottleneck(self.workers, stages, self.seconds, remote=reading.remote),
            skipped=skipped or SkippedStats(),
        )

    def _stages(self) -> dict[str, StageStats]:
        found = {
            name: StageStats(items=int(items), bytes=int(size), busy_seconds=busy, waiting_seconds=waited)
            for name, (items, size, busy, waited) in zip(WORKER_STAGES, self.stages, strict=True)
        }
        found["gather"] = replace(found["gather"], waiting_seconds=self.idle if self.workers else 0.0)
        sent = found["gather"].bytes
        found["deliver"] = StageStats(items=self.batches, bytes=sent)
        if self.workers:
            depth = self.queued / self.seconds if self.seconds else 0.0
            found["deliver"] = replace(found["deliver"], waiting_seconds=self.waiting, depth=depth)
        found["finish"] = StageStats(items=self.batches, bytes=self.finished_bytes, busy_seconds=self.finishing)
        found["loop"] = StageStats(items=self.batches, busy_seconds=self.looping, waiting_seconds=self.waiting)
        return found


def bottleneck(workers: int, stages: Mapping[str, StageStats], seconds: float, *, remote: bool = False) -> str:
    """Return in words what limits an epoch, from its stages; of a `remote` set what stands before all is the network."""
    if not seconds:
        return "nothing was read yet"
    waits = stages["loop"].waiting_seconds
    share = f"the loop waits for batches {waits / seconds:.0%} of the time"
    if waits < _LITTLE * seconds:
        return f"the training loop ({share})"
    if stages["finish"].busy_seconds > waits:
        return f"moving and normalizing batches, {stages['finish'].busy_seconds / seconds:.0%} of the trainer's time"
    return f"{_slow_stage(workers, stages, waits, _NETWORK if remote else 'the disk')} ({share})"


def _slow_stage(workers: int, stages: Mapping[str, StageStats], waits: float, source: str) -> str:
    """Return which of the stages that make batches keeps the loop waiting, for `waits` seconds."""
    made = {name: stages[name] for name in WORKER_STAGES}
    disk = made["read"].waiting_seconds
    whole = disk + sum(stage.busy_seconds for stage in made.values())
    if whole < waits * max(1, workers) / 4:
        return "starting the workers"
    of = "the workers' time" if workers else "the loader's time"
    if disk > whole / 2:
        ahead = stages.get("prefetch")
        if ahead is not None and ahead.busy_seconds + ahead.waiting_seconds < disk / max(1, workers) / 4:
            return "starting the prefetcher"
        return f"{source}, for which {disk / whole:.0%} of {of} is waiting"
    name, stage = max(made.items(), key=lambda entry: entry[1].busy_seconds)
    return f"{name}, {stage.busy_seconds / whole:.0%} of {of}"
