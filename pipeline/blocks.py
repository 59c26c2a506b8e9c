"""Yields an epoch's raw samples block by block, each worker and rank its own: the source of a `WebDataset`.

    block      | 0 | 1 | 2 | 3 | 4 | ...      of `block` samples of this rank, in the order of the epoch
    worker 0   | 0 |       | 2 |       ...    of two
    worker 1       | 1 |       | 3 |

The first epoch of a set that arrives has the order of `arrival`, others that of `epoch`: which samples a block holds depends on
nothing but the set, the seed and the epoch.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing.context
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch.utils.data import get_worker_info

from pipeline.arrival import ArrivalOrder, ArrivalSettings
from pipeline.epoch import EpochOrder, Ints, Layout, Steps
from pipeline.errors import OptionsError
from pipeline.items import Sample
from pipeline.raw import RawReader, ReadAhead
from pipeline.rounds import Beginning, Rounds
from pipeline.survey import Survey, check_counted, count_all, layout_of, recount
from pipeline.walk import Arrivals
from pipeline.world import World, find

_CHUNK = 256  # samples that are located at a time: one by one, each took as long as reading it


@dataclass(frozen=True, slots=True)
class Part:
    """Which worker of how many this process is, in which rank; and the epoch."""

    worker: int
    workers: int
    world: World
    epoch: int


class Blocks:
    """A webdataset source: each call begins an epoch. Copies of it share their epochs, in workers too.

    `length`: samples of an epoch on this rank, None for what the set gives; other lengths go on where the epoch before ended.
    """

    def __init__(self, known: Survey, settings: ArrivalSettings, *, block: int, fields: tuple[str, ...] | None = None) -> None:
        self._known, self.settings, self.block = known, settings, block
        self.length: int | None = None
        self.part: Part | None = None
        self._fields = fields
        self._rounds = Rounds()
        self._sent: tuple[int, World] | None = None  # to which process, as what
        self._iteration = self._repetition = 0
        self._fresh()

    def _fresh(self) -> None:
        self._reader = RawReader(self._known.files, self._fields)
        self._going: set[Arrivals] = set()  # of iterations that go on
        self._idle: list[Arrivals] = []  # of those that ended within the first epoch, where others go on
        self._layout: Layout | None = None
        self._order: EpochOrder | None = None
        self._ahead: ReadAhead | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is started anew knows nothing of the trainer's torch.distributed; any other copy finds out for itself.
        made = ("_reader", "_going", "_idle", "_layout", "_order", "_ahead")
        world = self._find_world() if multiprocessing.context.get_spawning_popen() is not None else None
        return {key: value for key, value in self.__dict__.items() if key not in made} | {"_sent": world}

    def __setstate__(self, state: dict[str, Any]) -> None:
        world = state["_sent"]
        self.__dict__.update(state | {"_sent": None if world is None else (os.getpid(), world)})
        self._fresh()

    def of_length(self, samples: int) -> Self:
        """Return a source whose epochs have `samples` samples on this rank, and go on where the one before ended."""
        made = copy.copy(self)
        made.length = samples
        return made

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that begins next on this rank."""
        self._rounds.set_next(_rank(self._find_world()), epoch)

    def begin(self) -> None:
        """Say that an iteration begins, of as many epochs as are asked for."""
        self._iteration, self._repetition = self._iteration + 1, 0

    def __call__(self) -> Iterator[Sample]:
        """Begin an epoch, and return this worker's samples of it."""
        info, world = get_worker_info(), self._find_world()
        beginning = None if info is None else Beginning(info.seed - info.id, info.id, self._iteration, self._repetition)
        self._repetition += 1
        if world.world_size > 1 or self.length is not None:
            self._check_counted("reading in several ranks" if world.world_size > 1 else "with_epoch")
        part = self.part = Part(
            *((0, 1) if info is None else (info.id, info.num_workers)), world, epoch=self._rounds.take(_rank(world), beginning)
        )
        if self._arrives(part.epoch) and not self._known.counted:
            return self._arriving(part)
        self._learn(count_all(self._known, part.worker, part.workers))
        return self._counted(part)

    def __len__(self) -> int:
        """Return the samples of an epoch on this rank; raises UncountedError where they aren't counted."""
        if self.length is not None:
            return self.length
        self._check_counted("len")
        return self._of_rank(self._steps(self._find_world()))

    def close(self) -> None:
        """Close the files that this process holds open, and end the iterations that go on."""
        for arrivals in (*self._going, *self._idle):
            arrivals.close()
        self._reader.close()

    def _find_world(self) -> World:
        """Return what the trainer said to a worker that it started anew, else find the world: one that was forked can."""
        if self._sent is not None and self._sent[0] == os.getpid() and get_worker_info() is not None:
            return self._sent[1]
        return find()

    def _arrives(self, epoch: int) -> bool:
        return self._known.arrives and epoch == 0

    def _learn(self, known: Survey) -> None:
        """Take over what is newly known of the set; iterations that go on keep the order that they have."""
        if known is not self._known:
            self._reader.close()
            self._known, self._layout = known, None
            self._reader = RawReader(known.files, self._fields)

    def _check_counted(self, what: str) -> None:
        self._learn(recount(self._known))
        check_counted(self._known, what)

    def _set_layout(self) -> Layout:
        if self._layout is None:
            self._layout = layout_of(self._known, self.settings)
        return self._layout

    def _steps(self, world: World) -> Steps:
        samples, together = self._set_layout().samples, self.block * world.world_size
        if world.world_size > 1 and 0 < samples < together:
            raise OptionsError(
                f"no block for each rank: {samples} samples, and blocks of {self.block} on {world.world_size} ranks "
                f"(together {together}); give WebDataset a smaller block, or use fewer ranks"
            )
        return Steps(
            samples=samples,
            batch_size=self.block,
            last_batch="uneven" if world.world_size == 1 else "drop",
            world_size=world.world_size,
            rank=world.rank,
        )

    @contextmanager
    def _arrival(self) -> Iterator[ArrivalOrder]:
        """Give an iteration an order of its own, in which nothing that is asked of the dataset meanwhile can take part."""
        arrivals, ended = self._idle.pop() if self._idle else Arrivals(self._known.files, self.settings), False
        self._going.add(arrivals)
        try:
            yield arrivals.order(0)
            ended = True
        finally:
            self._going.discard(arrivals)
            if ended and self.length is not None:
                self._idle.append(arrivals)
            else:
                arrivals.close()

    def _of_rank(self, steps: Steps) -> int:
        return steps.samples if steps.world_size == 1 else len(steps) * self.block

    def _counted(self, part: Part) -> Iterator[Sample]:
        """Yield a worker's samples where all are counted."""
        steps = self._steps(part.world)
        whole = self._of_rank(steps)
        length = whole if self.length is None else self.length
        begin, end = part.epoch * length, (part.epoch + 1) * length  # of this rank's samples, over all epochs
        starts = range(begin + part.worker * self.block, end, part.workers * self.block)
        many = max(1, _CHUNK // self.block)
        with self._arrival() if self._known.arrives and begin < whole else nullcontext() as arriving:
            for some in (starts[at : at + many] for at in range(0, len(starts), many)):
                places = np.concatenate([np.arange(start, min(start + self.block, end)) for start in some])
                epochs, places = np.divmod(places, whole)
                for epoch in dict.fromkeys(epochs.tolist()):
                    positions = self._positions(places[epochs == epoch], steps)
                    yield from (
                        self._arrived(arriving, positions.tolist()) if arriving and not epoch else self._read(epoch, positions)
                    )

    def _positions(self, places: Ints, steps: Steps) -> Ints:
        """Return the global positions of samples of this rank: of its step, its block's n-th is every world_size-th."""
        step, within = np.divmod(places, self.block)
        positions: Ints = step * steps.global_batch + steps.rank + within * steps.world_size
        return positions

    def _read(self, epoch: int, positions: Ints) -> Iterator[Sample]:
        place = int(positions[0]) // self.settings.lanes
        if self._order is None or self._ahead is None or self._order.epoch != epoch:
            self._order = EpochOrder(self._set_layout(), epoch)
            self._ahead = ReadAhead(self._order, self._reader, place)
        self._ahead.reach(place)
        shards, indices = self._order.locate(positions)
        for shard, at in zip(shards.tolist(), indices.tolist(), strict=True):
            yield self._reader.read(shard, at)

    def _arriving(self, part: Part) -> Iterator[Sample]:
        """Yield a worker's samples where nobody counted all."""
        with self._arrival() as order:
            for block in itertools.count(part.worker, part.workers):
                count = yield from self._arrived(order, range(block * self.block, (block + 1) * self.block))
                if count < self.block:
                    return

    def _arrived(self, order: ArrivalOrder, positions: Sequence[int]) -> Generator[Sample, None, int]:
        """Yield the samples at global positions that the epoch has, and return how many those are."""
        found = order.locate(positions)
        for shard, _, record in found:
            yield self._reader.read_record(shard, record)
        return len(found)


def _rank(world: World) -> int | None:
    """Return the rank among several, None where there is but one."""
    return world.rank if world.world_size > 1 else None
