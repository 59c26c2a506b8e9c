"""Prepares what a build is about: the source's rows, where their files lie, the order of both, and where shards end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardify import diskorder, encode, ingest, machine, order, sources, space
from shardify.config.models import BuildConfig, Encode
from shardify.diskorder import Survey, Unnamed
from shardify.engines import local
from shardify.errors import StorageError
from shardify.format import manifest, tar
from shardify.ingest import File
from shardify.items import LEFT_OUT, Items, Refused, Rows
from shardify.losses import Losses
from shardify.space import DiskUse
from shardify.spool import OVERHEAD_BYTES
from shardify.stopwatch import Stopwatch

R = TypeVar("R")

_CHUNK = 4096
_VANISHED = 10  # files that may go or change while a set is read, and one in a hundred
MOST_MEMORY = 4 * 2**30  # more makes no seek fewer: a piece of a bucket is tens of MiB by then


@dataclass(frozen=True, slots=True)
class Job:
    """One build: its settings, items, files, the rows in slot order (split after split), and what is lost on the way.

    `splits` are the slots where each split begins, and the end; `slot_of` is each row's slot, -1 for those that have none.
    """

    config: BuildConfig
    items: Items
    survey: Survey
    rows: Rows
    splits: tuple[int, ...]
    slot_of: Rows
    losses: Losses
    watch: Stopwatch
    memory: int
    vanished: list[int] = field(default_factory=list)

    def read(self, function: Callable[[str, Encode, File], R | Refused], rows: Rows) -> Iterator[tuple[int, R | Refused]]:
        """Yield (row, what `function` makes of its picture) for rows in the order in which they are to be read."""
        settings, items, survey = self.config.encode, self.items, self.survey
        files = (
            File(os.path.join(items.root, items.paths[row]), int(survey.sizes[row]), int(survey.mtimes[row]))  # noqa: PTH118
            for row in _one_by_one(rows)
        )
        run = partial(function, items.root, settings)
        made = local.map_ordered(run, ingest.ahead(files), workers=_workers(settings), count=len(rows), weigh=lambda f: f.size)
        with closing(made):
            yield from zip(_one_by_one(rows), made, strict=True)

    def refuse(self, row: int, refused: Refused) -> None:
        """Note that a picture can't be packed; raises StorageError where not the picture is the cause, but the disk or the machine.

        A disk that drops out in the night mustn't end as a complete set of half the pictures, whatever may be skipped.
        """
        self.losses.refuse(row, refused)
        if refused.cause == "environment":
            raise StorageError(f"{self.items.root}/{refused.path}: {refused.reason}; put that right and --resume")
        if refused.cause in ("missing", "changed"):  # they were there when they were looked up
            self.vanished.append(row)
            try:
                there = Path(self.items.root).stat().st_dev == self.survey.device
            except OSError:
                there = False
            if not there or len(self.vanished) > _VANISHED + len(self.rows) // 100:
                raise StorageError(
                    f"{self.items.root}: {len(self.vanished):,} files that were there when they were looked up are gone or "
                    f"changed, {refused.path} the last; is the disk still there? Put that right and --resume, or begin anew"
                )

    @property
    def sizes(self) -> Rows:
        """The files' bytes in slot order: int64 (slots,)."""
        return self.survey.sizes[self.rows]


def _one_by_one(rows: Rows) -> Iterator[int]:
    """Yield numbers of Python: as a list 1.6 million of them take 60 MB."""
    for start in range(0, len(rows), _CHUNK):
        yield from rows[start : start + _CHUNK].tolist()


def prepare(config: BuildConfig, watch: Stopwatch) -> Job:
    """Read the source, draw splits, find the files, and put each split in order."""
    encode.check_able(config.encode)
    watch.begin("reading the source", 0)
    items = sources.read(config)
    if config.shares is not None:
        units = items.keys if items.groups is None else items.groups
        items = replace(items, splits=order.draw_splits(units, config.shares, config.splits_seed))
    losses = Losses(config, items)
    kept = np.flatnonzero(items.splits != LEFT_OUT)
    within = getattr(config.source, "links", "within") == "within"
    survey = diskorder.survey(items.root, items.paths, kept, watch, within=within)
    for row, refused in survey.refused.items():
        losses.refuse(row, refused)
    here = np.sort(survey.order)
    slots = [_arrange(config, items, here[items.splits[here] == split]) for split in range(len(items.split_names))]
    rows = np.concatenate([np.zeros(0, np.int64), *slots])
    slot_of = np.full(len(items), -1, np.int64)
    slot_of[rows] = np.arange(len(rows))
    left = len(items) - len(kept)
    beside = () if left or config.source.kind != "csv" else _beside(survey.unnamed)
    notes = (*items.notes, *sources.unseen_classes(items), *_left_out(len(items), left), *beside, *survey.notes)
    splits = tuple(np.cumsum([0, *map(len, slots)]).tolist())
    memory = config.memory or min(MOST_MEMORY, machine.available_memory() // 4)
    return Job(config, replace(items, notes=notes), survey, rows, splits, slot_of, losses, watch, memory)


def _arrange(config: BuildConfig, items: Items, rows: Rows) -> Rows:
    return order.arrange(items.keys, items.labels, mode=config.order.mode, seed=config.order.seed, rows=rows)


def _left_out(rows: int, left: int) -> tuple[str, ...]:
    return (f"{left:,} of {rows:,} rows left out: the splits' shares sum up to less than 1",) if left else ()


def _beside(unnamed: Unnamed) -> tuple[str, ...]:
    """Tell of files that a table doesn't have; where it leaves rows out, those may be theirs."""
    if not unnamed.count:
        return ()
    return (f"{unnamed.count:,} files beside those of the table, such as {unnamed.first!r}, are named by no row that is packed",)


def in_reading_order(job: Job, wanted: npt.NDArray[np.bool_]) -> Rows:
    """Return the rows of the wanted slots in the order in which a disk reads them best."""
    rows = job.survey.order
    return rows[wanted[job.slot_of[rows]]]


def _workers(settings: Encode) -> int:
    """Return how many processes read: to hand over a picture takes longer than to read it and check its header."""
    decodes = settings.reencodes or settings.check != "header"
    return settings.workers or (machine.cpus() if decodes else 1)


def bounds(job: Job) -> Rows:
    """Return the slots where the spool's buckets begin: one where all fits in memory."""
    held = job.sizes + OVERHEAD_BYTES
    return order.buckets(held, job.memory if int(held.sum()) <= job.memory else job.memory * 7 // 8)


def disk_use(job: Job, sizes: Rows, held: int | None) -> DiskUse:
    """Return what pictures of these sizes (bytes as packed, by slot) take on disks while they are packed, and then.

    `held`: how many shards lie there at once (None: all).
    """
    limit = job.config.shards.size
    use = space.estimate(sizes, written_bytes(job, sizes), bounds(job), memory=job.memory, shard_limit=limit)
    return use if held is None else space.passing(use, shards=held, shard_limit=limit)


def cut(job: Job, sizes: Rows, split: int) -> list[Rows]:
    """Return the slots of each of a split's shards, in order; `sizes` are the pictures' bytes by slot, -1 where there is none."""
    slots = np.arange(job.splits[split], job.splits[split + 1])
    slots = slots[sizes[slots] >= 0]
    cuts = order.cut(written_bytes(job, sizes)[slots], job.config.shards.size, len(tar.END))
    return np.split(slots, cuts[1:-1]) if len(slots) else []


def written_bytes(job: Job, sizes: Rows) -> Rows:
    """Return what each slot's sample takes in a tar, its picture having so many bytes: int64 (slots,)."""
    labels = job.items.labels[job.rows]
    total = _member_bytes(np.maximum(sizes, 0)) + _member_bytes(_digits(labels))
    if job.items.ids is not None or job.items.extra is not None:
        lengths = (len(_json(job.items, row)) for row in _one_by_one(job.rows))
        total += _member_bytes(np.fromiter(lengths, np.int64, len(job.rows)))
    return total


def _member_bytes(sizes: Rows) -> Rows:
    """Do what `tar.member_bytes` does, for many."""
    return tar.BLOCK + -(-sizes // tar.BLOCK) * tar.BLOCK


def _digits(labels: Rows) -> Rows:
    """Return how many characters each label (0 or more) has."""
    return np.searchsorted(10 ** np.arange(1, 19, dtype=np.int64), labels, side="right") + 1


def text_members(items: Items, row: int) -> list[tuple[str, bytes]]:
    """Return a sample's label and, where it has some, its metadata."""
    label = ("cls", b"%d" % items.labels[row])
    return [label] if items.ids is None and items.extra is None else [label, ("json", _json(items, row))]


def _json(items: Items, row: int) -> bytes:
    return manifest.to_json(items.metadata(row), sort_keys=True).encode()
