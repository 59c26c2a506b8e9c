"""What a worker does: runs the stages over the samples of a token, as a webdataset pipeline, and keeps nothing else.

Token -> read_samples -> decode -> augment -> gather -> Batch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import Dataset, get_worker_info

from pipeline.arrival import Ended
from pipeline.augment import Augmenter, Prepared, augment
from pipeline.batch import Slots, gather
from pipeline.decode import decode, set_up_worker
from pipeline.epoch import EpochOrder, Ints, Layout, Token
from pipeline.errors import PipelineError, RemoteError, UncountedError, heard
from pipeline.faults import Faults
from pipeline.items import Batch, Delivery, Sample, Wanted, sample_bytes
from pipeline.lifeline import follow_trainer
from pipeline.machine import has_ended, keep_memory
from pipeline.options import LastBatch
from pipeline.progress import Block
from pipeline.residency import PATIENCE, GivenUp, Outcome, Residency
from pipeline.samples import ShardReader, read_samples
from pipeline.stats import AUGMENT, DECODE, GATHER, READ, Meter, batch_bytes
from pipeline.stores import Copied
from pipeline.stores.cache import AbsentError
from pipeline.walk import Arrivals, Arrived

# Private pages of a worker that was forked (19 to 32 MB), and what one that imports torch and cv2 anew may take (a guess).
_FORKED_BYTES, _STARTED_BYTES = 32 * 2**20, 300 * 2**20
_UNPACKED = 12  # bytes of a picture for each of its JPEG, about: 14 of 800x600 in 100 KB


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a worker makes batches: everything but the samples' order; the same in every worker."""

    wanted: Wanted
    prepared: Prepared
    target: tuple[int, int] | None
    crop: tuple[int, int] | None
    seed: int
    keys: bool
    ahead: int  # batches that a worker makes before the trainer asks for the first of them
    last_batch: LastBatch = "drop"  # where an epoch ends that nobody counted
    skip: bool = False  # samples that can't be used are left out, and others stand in for them


class Batches(Dataset[Delivery]):
    """Makes the batch that a token describes; holds nothing between tokens but caches.

    `world_size`: the ranks that share the epoch; `block`: what a prefetcher says is resident, None where there is none. Both are
    set before workers start, and sent to them.
    """

    world_size = 1
    block: Block | None = None
    arrival_block: Block | None = None  # of the prefetcher of a remote set's first epoch, which nobody counted

    def __init__(self, layout: Layout | None, reader: ShardReader, recipe: Recipe, arrivals: Arrivals | None = None) -> None:
        """Take the layout, None where nobody counted the samples, and the orders of the first epoch of a set that arrives."""
        self._layout, self._reader, self._recipe, self._arrivals = layout, reader, recipe, arrivals
        self._order: EpochOrder | None = None
        self._augmenter: Augmenter | None = None
        self._slots: Slots | None = None
        self._meter: Meter | None = None
        self._residency: Residency | None = None
        self._copied: Copied | None = None
        self._last: Token | None = None  # of a first epoch that nobody counted

    def __len__(self) -> int:
        """Return the number of samples of an epoch; raises UncountedError where nobody counted them."""
        if self._layout is None:
            raise UncountedError("the samples of these shards aren't counted yet: an epoch, or `shardify index`, does that")
        return self._layout.samples

    def __getitem__(self, token: Token) -> Delivery:
        """Return a batch of `token.size` samples: images (B, H, W, C) in a slot of shared memory where this is a worker.

        In its place comes `Ended` for a token behind the end of an epoch that nobody counted.
        """
        recipe, info = self._recipe, get_worker_info()
        if info is not None and self._slots is None:
            self._slots = Slots(info.id, recipe.ahead + 1)
        if self._meter is None:
            self._meter = Meter()
        meter = self._meter
        meter.begin(token.run)
        places: Iterator[Any] = self._places(token)
        size, arrives = token.size, self._arrivals is not None and token.epoch == 0
        if self._arrivals is not None and arrives:
            try:
                found = self._found(self._arrivals, token)
            except GivenUp:
                return Delivery(Batch(None, None), meter.take(-1 if info is None else info.id))
            except AbsentError as error:
                raise self._explained(error, self.arrival_block) from None
            if isinstance(found, Ended):
                return Delivery(found, meter.take(-1 if info is None else info.id))
            places, size = self._arrived(self._arrivals, found), len(found)
        augmenter = None if recipe.prepared.apply is None else self._augment(isolated=info is None)
        crops = augmenter.crops(recipe.seed, token.epoch) if augmenter is not None and recipe.crop is not None else None
        faults = Faults(skip=recipe.skip)
        decoding: dict[str, Any] = {
            "wanted": recipe.wanted,
            "target": recipe.target or recipe.crop,
            "crops": crops,
            "fault": faults.take,
        }
        augmenting: dict[str, Any] = {"augmenter": augmenter, "seed": recipe.seed, "epoch": token.epoch, "fault": faults.take}

        def make(samples: Iterator[Sample]) -> Iterator[Sample]:
            decoded = decode(samples, **decoding)
            return decoded if augmenter is None else augment(decoded, **augmenting)

        stages: list[Any] = [
            lambda: places,
            _stage(meter, READ, read_samples, reader=self._reader, copied=lambda: self._copied, fault=faults.take),
            *((faults.keep,) if recipe.skip else ()),
            _stage(meter, DECODE, decode, **decoding),
        ]
        if augmenter is not None:
            stages.append(_stage(meter, AUGMENT, augment, **augmenting))
        if recipe.skip:
            stages.append(lambda samples: faults.refill(samples, make))
        made = {"size": size, "keys": recipe.keys, "pixels": recipe.wanted.pixels, "slots": self._slots, "run": token.run}
        stages.append(_stage(meter, GATHER, gather, **made))
        try:
            batch = next(iter(wds.DataPipeline(*stages)))
        except GivenUp:
            batch = Batch(None, None)  # torch drops what it gets for a run that is over
        except AbsentError as error:
            raise self._explained(error, self.arrival_block if arrives else self.block) from None
        return Delivery(batch, meter.take(-1 if info is None else info.id), tuple(faults.skips))

    def _places(self, token: Token) -> Iterator[tuple[int, int, int, int]]:
        """Yield (shard, index, occurrence, place in the batch) of the token's samples, each once it is resident.

        So a first batch is decoded while its last windows are read.
        """
        assert self._layout is not None  # before a later epoch than the first all samples are counted
        if self._order is None or self._order.epoch != token.epoch:
            self._order = EpochOrder(self._layout, token.epoch)
        positions, occurrences = token.positions(self._layout.samples, self.world_size)
        shards, indices = self._order.locate(positions)
        places = list(zip(shards.tolist(), indices.tolist(), occurrences.tolist(), range(token.size), strict=True))
        first = int(np.count_nonzero(occurrences == 0))
        for chosen in self._arriving(token, positions[:first]):
            yield from (places[at] for at in chosen.tolist())
        for place in places[first:]:  # they wrap round to samples that were there before
            if self._reader.remote:
                self._await(token, *place[:2])
            yield place

    def _arriving(self, token: Token, positions: Ints) -> Iterator[Ints]:
        """Yield the numbers of those samples that are resident by now, and note where copies of them are.

        Raises GivenUp where nobody wants them any more.
        """
        if self.block is None or self._meter is None or self._layout is None:
            yield np.arange(len(positions))
            return
        if self._residency is None:
            info = get_worker_info()
            worker, lanes = 0 if info is None else info.id, self._layout.settings.lanes
            self._residency = Residency(self.block, lanes, worker, patient=self._reader.remote)
        waited = 0.0
        for outcome, chosen in self._residency.wait(token.run, positions):
            self._meter.wait(self._residency.waited_seconds - waited)
            waited = self._residency.waited_seconds
            if outcome is Outcome.GIVEN_UP:
                raise GivenUp
            self._copied = self._residency.copies(token.run) if outcome is Outcome.RESIDENT else None
            yield chosen

    def _await(self, token: Token, shard: int, at: int) -> None:
        """Wait until a remote sample that comes once more is there again; raises as `_arriving` does, or AbsentError."""
        block, pause = self.block, 0.001
        while block is not None:
            try:
                self._reader.read(shard, at)
                return
            except AbsentError:
                if block.reported or has_ended(block.process):
                    raise
            if block.run != token.run:
                raise GivenUp
            time.sleep(pause)
            pause = min(0.05, 2 * pause)

    def _found(self, arrivals: Arrivals, token: Token) -> list[Arrived] | Ended:
        """Return the samples of a token of a first epoch that nobody counted; waits for the headers of remote shards."""
        samples = None if self._layout is None else self._layout.samples
        if self.arrival_block is not None:
            if arrivals.afar is None or arrivals.afar.block is not self.arrival_block:
                info = get_worker_info()
                arrivals.afar = arrivals.reach(self._reader, self.arrival_block, 0 if info is None else info.id)
            last = None if self._recipe.last_batch == "pad" else self._last  # those wrap round to what was read first
            arrivals.afar.begin(token.run)
            if last is not None and last.run == token.run and last.position < token.position:
                arrivals.afar.pass_by(arrivals.order(0), last.position + (last.size - 1) * self.world_size)
            elif token.position and self._layout is not None and self._recipe.last_batch != "pad":
                arrivals.afar.pass_by(arrivals.order(0), token.position - 1)  # a run that begins in the middle needs none of that
            self._last = token
        return arrivals.places(token, self._recipe.last_batch, samples, self.world_size)

    def _arrived(self, arrivals: Arrivals, found: list[Arrived]) -> Iterator[tuple[int, Any, int, int]]:
        """Yield (shard, record, occurrence, place in the batch), each once its bytes came."""
        for place, (shard, record, occurrence) in enumerate(found):
            if arrivals.afar is not None and self._meter is not None:
                waited = arrivals.afar.waited_seconds
                arrivals.afar.wait(shard, max(member.offset + member.size for member in record.members))
                self._meter.wait(arrivals.afar.waited_seconds - waited)
            yield shard, record, occurrence, place

    def _explained(self, error: AbsentError, block: Block | None) -> PipelineError:
        """Return why bytes of a remote shard aren't there: as the prefetcher says, or that it has ended."""
        until = time.monotonic() + PATIENCE
        while block is not None and not block.reported and not has_ended(block.process) and time.monotonic() < until:
            time.sleep(0.01)  # it takes bytes away before it says why
        if block is not None and block.reported:
            return heard(block.reported)
        if block is None or has_ended(block.process):
            return RemoteError(f"{error}: the process that fetches them has ended; iterate anew to start it again")
        return RemoteError(f"{error}: they were, and something took them away; does another program clear that folder?")

    def _augment(self, *, isolated: bool) -> Augmenter:
        if self._augmenter is None:
            self._augmenter = Augmenter(self._recipe.prepared.apply, isolated=isolated)
        return self._augmenter

    def worker_bytes(self, batch_size: int, sample_bytes: float, *, forked: bool) -> int:
        """Return about how much memory a worker takes that isn't there before it starts: its own, and its batches."""
        recipe = self._recipe
        picture = sample_bytes * (_UNPACKED if recipe.wanted.pixels else 1)
        if recipe.target is not None:
            picture = 3 * recipe.target[0] * recipe.target[1]
        return int((_FORKED_BYTES if forked else _STARTED_BYTES) + (recipe.ahead + 1) * batch_size * picture)

    def close(self) -> None:
        """Close the shards that this process holds open."""
        if self._arrivals is not None:
            self._arrivals.close()
        self._reader.close()


def _stage(
    meter: Meter, number: int, function: Callable[..., Iterator[Any]], **options: Any
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a pipeline stage: `function` of an iterator, with its options, timed from outside."""
    size = batch_bytes if number == GATHER else sample_bytes
    return lambda items: meter.watch(number, function(items, **options), size)


def start_worker(_worker: int) -> None:
    """Set a worker up: one thread for cv2 and torch, and pictures from memory that is used again."""
    follow_trainer()
    torch.set_num_threads(1)
    set_up_worker()
    keep_memory()
