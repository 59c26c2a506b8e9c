"""How bytes get to the workers: a prefetcher makes them resident, or without one each worker reads for itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.arrival import ArrivalSettings
from pipeline.epoch import Layout
from pipeline.errors import OptionsError
from pipeline.options import LoaderOptions
from pipeline.prefetch import Prefetcher, PrefetchStats
from pipeline.progress import Block
from pipeline.samples import ShardFile
from pipeline.shardset import ShardSet
from pipeline.stats import ReadingStats, StageStats
from pipeline.stores.cache import default_folder, folder_of
from pipeline.world import World

log = logging.getLogger("pipeline")

_WAYS = {
    "page cache": "read ahead into the page cache",
    "copies": "read ahead and copied into memory: on this file system another process's open throws pages away",
    "memory": "in memory already",
    "unknown": "read ahead",
    "fetched": "fetched over the network into the cache folder",
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """The order in which shards arrive that nobody counted, and how many workers read them."""

    order: ArrivalSettings
    workers: int


class Reading:
    """What stands before the workers of a loader; `block` is for them, None where nobody reads ahead."""

    def __init__(
        self,
        layout: Layout | None,
        shards: Sequence[ShardFile],
        options: LoaderOptions,
        world: World,
        growth: int = 0,
        name: str = "",
        arrival: Arrival | None = None,
    ) -> None:
        """Start a prefetcher where it is wanted, and a layout says what comes; raises OptionsError where memory is too small.

        `growth`: bytes that the workers will take; `name`: the set's. `arrival`: how remote shards arrive that nobody counted.
        """
        self._layout, self._run, self._before = layout, 0, ReadingStats()
        self.block = Block.make() if options.prefetch and (layout is not None or arrival is not None) else None
        self._prefetcher: Prefetcher | None = None
        if self.block is not None and layout is not None:
            self._prefetcher = Prefetcher.start(layout, shards, options, world, self.block, growth, name)
        elif self.block is not None and arrival is not None:
            start = Prefetcher.start_arriving
            self._prefetcher = start(arrival.order, shards, options, world, self.block, name, arrival.workers)
        self._last: ReadingStats | None = None

    def begin(self, run: int, epoch: int, position: int, wrapped: int = 0) -> None:
        """Begin a run at a global position of an epoch, before workers get its tokens; `wrapped` as `Steps` has it."""
        self._run, self._before = run, self._so_far()
        if self._prefetcher is not None:
            self._prefetcher.begin(run, epoch, position, wrapped)

    def hand_out(self, position: int) -> None:
        """Say that all samples before a global position were handed to the loop."""
        if self.block is not None:
            self.block.hand_out(self._run, position)
        if self._prefetcher is not None:
            self._prefetcher.look()

    def end(self) -> None:
        """Say that the run is over, or left."""
        if self._prefetcher is not None:
            self._prefetcher.end()

    def stats(self) -> ReadingStats:
        """Return what the run did so far."""
        return self._last or self._so_far().since(self._before)

    def _so_far(self) -> ReadingStats:
        if self._prefetcher is None:
            return ReadingStats()
        done = self._prefetcher.stats()
        return ReadingStats(
            way=self._way(done, self._prefetcher.remote),
            prefetch=StageStats(
                items=done.windows,
                bytes=done.medium_bytes + done.cached_bytes,
                busy_seconds=done.reading_seconds,
                waiting_seconds=done.turn_seconds + done.full_seconds,
                depth=self._windows_ahead(),
            ),
            medium_bytes=done.medium_bytes if done.alive else None,
            cache_bytes=done.cached_bytes if done.alive else None,
            unprefetched=done.unprefetched,
            left=done.unindexed + done.failed,
            kept_bytes=done.kept_bytes,
            kept_share=done.kept_share,
            retries=done.retries,
            paused_seconds=done.paused_seconds,
            skipped_bytes=done.skipped_bytes,
            replies=done.replies,
            remote=self._prefetcher.remote,
        )

    def _way(self, done: PrefetchStats, remote: bool) -> str:
        if done.alive:
            return _WAYS.get(done.way, done.way)
        return f"the prefetcher died: {'nothing is fetched' if remote else 'each worker reads for itself'}"

    def _windows_ahead(self) -> float:
        """Return how many windows are resident that the loop didn't get to yet."""
        if self.block is None or self._layout is None:
            return 0.0
        order, (_, handed) = self._layout.settings, self.block.handed
        places = ((lane, max(0, -(-(handed - lane) // order.lanes))) for lane in range(order.lanes))
        return sum(max(0, self.block.resident(lane, self._run) - place) for lane, place in places) / order.window

    def close(self) -> None:
        """End the prefetcher, and keep what it did for `stats`; a second call does nothing."""
        if self._last is None:
            self._last = self.stats()
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self.block is not None:
            self.block.close()
        self._prefetcher = self.block = None


def cache_of(found: ShardSet, options: LoaderOptions) -> str:
    """Return the folder that a remote set is fetched into, "" for a local set; raises OptionsError where nobody would fetch it."""
    if not found.shards[0].url:
        return ""
    if not options.prefetch:
        raise OptionsError("prefetch=False with remote shards: only the prefetcher fetches them; leave it out")
    folder = folder_of(options.cache_dir)
    size = "half of what is free at most" if options.cache_bytes is None else f"{options.cache_bytes / 2**20:.0f} MiB at most"
    log.info("remote shards are fetched into %s (%s)", folder, size)
    if options.cache_dir is None and folder != default_folder():
        log.warning(
            "%s: on a network's file system, which every machine fills for itself, up to its quota; give "
            "LoaderOptions(cache_dir=...) on this machine's own disk",
            folder,
        )
    return str(folder)
