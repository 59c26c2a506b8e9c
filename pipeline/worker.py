"""What a worker does: runs the stages over the samples of a token, as a webdataset pipeline, and keeps nothing else.

Token -> read_samples -> decode -> augment -> gather -> Batch
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import webdataset as wds
from torch.utils.data import Dataset, get_worker_info

from pipeline.augment import Augmenter, Prepared, augment
from pipeline.batch import Slots, gather
from pipeline.decode import decode, use_one_thread
from pipeline.epoch import EpochOrder, Layout, Token
from pipeline.items import Batch, KeyedBatch, Wanted
from pipeline.samples import ShardReader, read_samples


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a worker makes batches: everything but the samples' order; the same in every worker."""

    wanted: Wanted
    prepared: Prepared
    target: tuple[int, int] | None
    seed: int
    keys: bool
    ahead: int  # batches that a worker makes before the trainer asks for the first of them


class Batches(Dataset[Batch | KeyedBatch]):
    """Makes the batch that a token describes; holds nothing between tokens but caches."""

    def __init__(self, layout: Layout, reader: ShardReader, recipe: Recipe) -> None:
        self._layout, self._reader, self._recipe = layout, reader, recipe
        self._order: EpochOrder | None = None
        self._augmenter: Augmenter | None = None
        self._slots: Slots | None = None

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self._layout.samples

    def __getitem__(self, token: Token) -> Batch | KeyedBatch:
        """Return a batch of `token.size` samples: images (B, H, W, C) in a slot of shared memory where this is a worker."""
        recipe, info = self._recipe, get_worker_info()
        if info is not None and self._slots is None:
            self._slots = Slots(info.id, recipe.ahead + 1)
        stages: list[Any] = [
            lambda: self._places(token),
            _stage(read_samples, reader=self._reader),
            _stage(decode, wanted=recipe.wanted, target=recipe.target),
            _stage(augment, augmenter=self._augment(isolated=info is None), seed=recipe.seed, epoch=token.epoch)
            if recipe.prepared.apply is not None
            else None,
            _stage(gather, size=token.size, keys=recipe.keys, pixels=recipe.wanted.pixels, slots=self._slots, run=token.run),
        ]
        batch: Batch | KeyedBatch = next(iter(wds.DataPipeline(*stages)))
        return batch

    def _places(self, token: Token) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, index, occurrence) of the token's samples."""
        if self._order is None or self._order.epoch != token.epoch:
            self._order = EpochOrder(self._layout, token.epoch)
        positions, occurrences = token.positions(self._layout.samples, world_size=1)
        shards, indices = self._order.locate(positions)
        return zip(shards.tolist(), indices.tolist(), occurrences.tolist(), strict=True)

    def _augment(self, *, isolated: bool) -> Augmenter:
        if self._augmenter is None:
            self._augmenter = Augmenter(self._recipe.prepared.apply, isolated=isolated)
        return self._augmenter

    def close(self) -> None:
        """Close the shards that this process holds open."""
        self._reader.close()


def _stage(function: Callable[..., Iterator[Any]], **options: Any) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a pipeline stage: `function` of an iterator, with its options."""
    return lambda items: function(items, **options)


def start_worker(_worker: int) -> None:
    """Set a worker up: one thread for cv2 and torch, and pictures from memory that is used again."""
    torch.set_num_threads(1)
    use_one_thread()
    keep_memory()


def keep_memory() -> None:
    """Let glibc keep freed pictures instead of giving their pages back (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD; elsewhere nothing).

    Above its mmap threshold glibc maps each picture anew: a worker's epoch took 8.2 ms of CPU and 420 page faults a picture without
    this, 6.9 ms and 120 with it (800x600 to 400x400, the problem's transform).
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD; glibc refuses more
        libc.mallopt(-1, 2_000_000_000)  # M_TRIM_THRESHOLD
