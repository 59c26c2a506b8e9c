"""Starts the prefetcher, a process of its own that makes shards resident ahead of the workers, and speaks with it.

trainer     begin(run, epoch, position) -> pipe; batches handed out -> block
prefetcher  windows read, in turns of the disk -> block
workers     wait until their batch is resident <- block
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.arrival import ArrivalSettings
from pipeline.epoch import Layout, OrderSettings
from pipeline.errors import OptionsError
from pipeline.machine import available_memory, unnamed
from pipeline.options import LoaderOptions
from pipeline.prefetch import plan
from pipeline.prefetch.walk import lanes_of
from pipeline.progress import Block, Count, Way
from pipeline.stores.cache import folder_of
from pipeline.world import World

if TYPE_CHECKING:
    from pipeline.samples import ShardFile

log = logging.getLogger("pipeline")

RUN = struct.Struct("<5Q")  # run, epoch, position, bytes that other loaders keep in memory, positions that come once more

_END_SECONDS = 2.0  # for a killed process to be gone; it may be in a read


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """What a prefetcher did so far: bytes, seconds, counts.

    `way`: "page cache", "copies" (in memory, where an open of another process throws pages away), "memory" (the shards lie in it)
    or "unknown". `turns`: windows read in the disk's turn; `without_turn`: after a second without it. `refused`: drops that
    waited for another reader of the shard. `walked`: shards without an index that were read through for their headers, `unindexed`:
    ranges of those that couldn't be. `unprefetched`: batches that workers read for themselves. `kept_share`: of the bytes
    that this rank reads, those that stay in memory. Of a remote set, `retries`: requests beyond the first of each range,
    `paused_seconds` before them, summed over all that were on their way, `replies` by status, 0 for none that came, and
    `skipped_bytes`, which servers sent that can't begin in the middle.
    """

    way: str
    alive: bool
    windows: int
    medium_bytes: int
    cached_bytes: int
    dropped_bytes: int
    reading_seconds: float
    turn_seconds: float
    full_seconds: float
    turns: int
    without_turn: int
    refused: int
    failed: int
    unindexed: int
    walked: int
    unprefetched: int
    budget_bytes: int
    kept_bytes: int
    kept_share: float
    retries: int
    paused_seconds: float
    skipped_bytes: int
    replies: dict[int, int]


class Prefetcher:
    """The trainer's side of a prefetcher."""

    def __init__(self, described: plan.Plan, block: Block) -> None:
        self._block, self._open, self._closed = block, False, False
        self._remote = described.fetching is not None
        self._looked = math.inf  # when the process was looked after last; no more once it was said that it died
        self._plan = unnamed("pipeline-plan")
        self._process: list[subprocess.Popen[bytes]] = []  # the one that runs
        self._finalizer = weakref.finalize(self, _finish, self._process, self._plan, os.getpid())
        plan.write(self._plan, described)
        self._start()
        _all.add(self)

    @classmethod
    def start(
        cls,
        layout: Layout,
        shards: Sequence[ShardFile],
        options: LoaderOptions,
        world: World,
        block: Block,
        growth: int = 0,
        name: str = "",
    ) -> Prefetcher:
        """Start a prefetcher for a set's shards, in the order of the layout; `block` is shared with it.

        `growth`: bytes that the workers, who don't run yet, will take of the memory. `name`: the set's, in the cache folder of
        remote shards.

        Raises OptionsError where the windows that must be resident at once don't fit the memory. Where the process can't be
        started a warning says so, and workers read for themselves.
        """
        sizes = np.fromiter((shard.size for shard in shards), np.int64, len(shards))
        remote = bool(shards) and bool(shards[0].url)
        described = plan.Plan(
            layout,
            sizes,
            [shard.url if remote else shard.path for shard in shards],
            [shard.index_url if remote else shard.index for shard in shards],
            world,
            options.keep_bytes,
            growth,
            [shard.sha256 for shard in shards],
            _fetching(options, name) if remote else None,
            [shard.version for shard in shards] if remote else (),
        )
        _check_memory(described, available_memory(in_all=True))
        return cls(described, block)

    @classmethod
    def start_arriving(
        cls,
        order: ArrivalSettings,
        shards: Sequence[ShardFile],
        options: LoaderOptions,
        world: World,
        block: Block,
        name: str,
        workers: int,
    ) -> Prefetcher:
        """Start a prefetcher for the first epoch of remote shards that nobody counted, for so many workers."""
        sizes = np.fromiter((shard.size for shard in shards), np.int64, len(shards))
        fetching = replace(_fetching(options, name), arrival=asdict(order), workers=workers)
        described = plan.Plan(
            Layout([1] * len(shards), OrderSettings(lanes=order.lanes, window=1)),  # nobody counted
            sizes,
            [shard.url for shard in shards],
            [],
            world,
            fetching=fetching,
            versions=[shard.version for shard in shards],
        )
        return cls(described, block)

    def begin(self, run: int, epoch: int, position: int, wrapped: int = 0) -> None:
        """Begin to read ahead for a run (numbered from 1, growing) from a global position of an epoch on.

        `wrapped`: of how many positions from the epoch's start on samples come once more, at its end.

        A process that died is started anew, and a warning says so.
        """
        self._open = True
        self._block.begin(run, position)
        _share()
        if not self.alive:
            meanwhile = "" if self._remote else ": workers read for themselves meanwhile"
            log.warning("the prefetcher died (%s)%s; it is started again", self._exit(), meanwhile)
            self._start()
        self._looked = time.monotonic()
        claimed = sum(
            other._block.count(Count.KEPT_BYTES) for other in _all if not (other is self or other._closed or other._remote)
        )
        self._say(run, epoch, position, claimed, wrapped)

    def look(self) -> None:
        """Warn where the process has died in the middle of an epoch; looks once a second, however often it is called."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return
        self._looked = now
        if self._process and not self.alive:
            instead = "nothing more is fetched" if self._remote else "workers read for themselves"
            log.warning("the prefetcher died (%s): %s until the next epoch starts it again", self._exit(), instead)
            self._looked = math.inf

    def end(self) -> None:
        """Say that the epoch is over, or left: its part of the memory to read ahead is others'."""
        self._open = False
        _share()

    @property
    def remote(self) -> bool:
        """Whether it fetches shards over the network."""
        return self._remote

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return bool(self._process) and self._process[0].poll() is None

    def stats(self) -> PrefetchStats:
        """Return what was done so far."""
        count = self._block.count
        part = count(Count.PART_BYTES)
        return PrefetchStats(
            way=_WAYS[Way(count(Count.WAY))],
            alive=self.alive,
            windows=count(Count.WINDOWS),
            medium_bytes=count(Count.MEDIUM_BYTES),
            cached_bytes=count(Count.CACHED_BYTES),
            dropped_bytes=count(Count.DROPPED_BYTES),
            reading_seconds=count(Count.READING_NS) / 1e9,
            turn_seconds=count(Count.TURN_NS) / 1e9,
            full_seconds=count(Count.FULL_NS) / 1e9,
            turns=count(Count.TURNS),
            without_turn=count(Count.WITHOUT_TURN),
            refused=count(Count.REFUSED),
            failed=count(Count.FAILED),
            unindexed=count(Count.UNINDEXED),
            walked=count(Count.WALKED),
            unprefetched=self._block.unprefetched,
            budget_bytes=count(Count.BUDGET_BYTES),
            kept_bytes=count(Count.KEPT_BYTES),
            kept_share=count(Count.KEPT_BYTES) / part if part else 0.0,
            retries=count(Count.RETRIES),
            paused_seconds=count(Count.PAUSED_NS) / 1e9,
            skipped_bytes=count(Count.SKIPPED_BYTES),
            replies=self._block.replies,
        )

    def close(self) -> None:
        """End the process; a second call does nothing. The block is its maker's to close."""
        self._closed = True
        self.end()
        self._finalizer()

    def _start(self) -> None:
        _stop(self._process)
        try:
            self._process.append(_spawn(self._plan, self._block))
            self._block.started(self._process[0].pid)
        except (OSError, TypeError) as error:  # no executable, no processes left
            log.warning("the prefetcher can't be started (%s); workers read for themselves, where their samples lie", error)

    def _say(self, *numbers: int) -> None:
        """Write to the process, never waiting for it."""
        with contextlib.suppress(OSError, IndexError):  # it has gone, and is started again at the next run
            os.write(self._process[0].stdin.fileno(), RUN.pack(*numbers))  # type: ignore[union-attr]

    def _exit(self) -> str:
        reason = self._block.reported if self._remote else ""
        return reason or (f"exit code {self._process[0].returncode}" if self._process else "it never ran")


_all: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _share() -> None:
    """Tell each prefetcher among how many open epochs the memory to read ahead is divided."""
    opened = [prefetcher for prefetcher in _all if prefetcher._open]
    for prefetcher in opened:
        prefetcher._block.share(len(opened))


def _spawn(described: int, block: Block) -> subprocess.Popen[bytes]:
    """Start the process: this interpreter, this package (a module of the user's can't shadow it), no thread of any BLAS."""
    root = str(Path(__file__).parent.parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeline.prefetch", str(described), str(block.fileno()), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        env=environ,
        pass_fds=(described, block.fileno()),
        process_group=0,  # Ctrl-C is for the trainer
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _fetching(options: LoaderOptions, name: str) -> plan.Fetching:
    http = {} if options.http is None else asdict(options.http)
    objects = {} if options.objects is None else asdict(options.objects)
    return plan.Fetching(str(folder_of(options.cache_dir)), options.cache_bytes, name, options.connections, http, objects)


def _finish(processes: list[subprocess.Popen[bytes]], described: int, owner: int) -> None:
    """End the process: all that it holds is gone with it. Nothing in a forked child, whose descriptors are copies."""
    if os.getpid() != owner:
        return
    os.close(described)
    _stop(processes)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill a process, if there is one, and give its pipe back."""
    while processes:
        process = processes.pop()
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a dead disk
            process.wait(_END_SECONDS)
        if process.stdin is not None:
            process.stdin.close()


def _check_memory(described: plan.Plan, available: int) -> None:
    """Raise OptionsError unless this machine's ranks can hold a window a lane and one more; warn where workers leave too little.

    A tenth is for the pages of programs and libraries, which the kernel evicts last.
    """
    world = described.world
    lanes = len(lanes_of(world, described.layout.settings.lanes, 0))
    if world.guessed:
        world = replace(world, local_rank=0, local_world_size=1)
    need = (lanes + 1) * described.window_bytes() * world.local_world_size
    if need > available:
        raise OptionsError(
            f"{need / 2**20:.0f} MiB are needed to read ahead ({lanes} lanes and one more, a window of "
            f"{described.window_bytes() / 2**20:.1f} MiB each, {world.local_world_size} ranks), and {available / 2**20:.0f} MiB "
            "are available: lower LoaderOptions(window_bytes=) or lanes=, or set prefetch=False"
        )
    if need + described.growth * world.local_world_size > available - available // 10:
        log.warning(
            "memory is tight: %.0f MiB are read ahead and the workers will take about %.0f, of %.0f that are available; what "
            "is read ahead may be evicted unused, and read again: lower LoaderOptions(window_bytes=), or take fewer workers",
            need / 2**20,
            described.growth * world.local_world_size / 2**20,
            available / 2**20,
        )


_WAYS = {Way.FETCHED: "fetched", Way.UNKNOWN: "unknown", Way.PAGE_CACHE: "page cache", Way.MEMORY: "memory", Way.COPIES: "copies"}
