"""Builds a set: the composition root that leads a source's rows through order, encoding and writing to shards and manifests.

    sources -> splits -> slots -> encode (processes) -> write, shard by shard -> card -> manifests

`plan` takes the same way without writing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from shardify import encode, order, sources, writer
from shardify.config.models import BuildConfig, Encode
from shardify.encode import Forecast
from shardify.engines import local
from shardify.errors import DataError, FormatError, SettingsError
from shardify.format import card, manifest, tar
from shardify.format.manifest import Manifest, ShardEntry
from shardify.format.names import index_name, manifest_name
from shardify.items import LEFT_OUT, Encoded, Items, Progress, Refused, Sample, SplitSize
from shardify.losses import Losses
from shardify.sinks.folder import FolderSink

R = TypeVar("R")
Pictures: TypeAlias = Iterator[tuple[int, R | Refused]]


@dataclass(frozen=True, slots=True)
class Report:
    """What was built, or would be.

    `kinds` and `skipped` count pictures by type and by cause of what was left out; `exact` is False where sizes are estimated
    (what is re-encoded); `problems` are why a planned build would fail, all of them.
    """

    splits: Mapping[str, SplitSize]
    classes: int | None
    kinds: Mapping[str, int]
    skipped: Mapping[str, int]
    notes: tuple[str, ...]
    exact: bool = True
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Job:
    """One build: its settings, items, the rows of each split in slot order, and what is lost on the way."""

    config: BuildConfig
    items: Items
    slots: tuple[order.Rows, ...]
    losses: Losses
    progress: Progress

    def read(self, function: Callable[[str, Encode, str], R | Refused]) -> Generator[tuple[int, R | Refused], None, None]:
        """Yield (row, what `function` makes of its picture) for all slots in order, split after split."""
        rows = np.concatenate(self.slots).tolist()
        settings, paths = self.config.encode, self.items.paths
        run = partial(function, self.items.root, settings)
        with closing(local.map_ordered(run, [paths[row] for row in rows], workers=_workers(settings))) as made:
            yield from zip(rows, made, strict=True)


def build(config: BuildConfig, *, force: bool, skipped_to: Path | None, progress: Progress) -> Report:
    """Pack a source into the folder `shards.out`; with `force`, in place of the set that is there.

    `skipped_to` is a file for the list of all pictures left out. Raises SettingsError for a folder that can't be used, DataError
    that lists all that is wrong with the source, StorageError; nothing of the set is left then.
    """
    _refuse_inside(config.shards.out, skipped_to)
    with FolderSink(config.shards.out, tuple(config.splits), force=force) as sink:
        job = _prepare(config, progress)
        _settle(job.losses, skipped_to)
        sink.clear()
        progress.begin("packing", sum(map(len, job.slots)))
        with closing(job.read(encode.encode_file)) as pictures:
            written = [_write_split(job, split, pictures, sink.folder) for split in range(len(job.slots))]
        _settle(job.losses, skipped_to)
        manifests = [_manifest(job, split, shards, fields) for split, (shards, fields) in enumerate(written)]
        _check_any(job, sum(made.samples for made in manifests))
        writer.write_file(sink.folder / card.NAME, card.dump(manifests))
        for made in manifests:
            writer.write_file(sink.folder / manifest_name(made.split), manifest.dump(made))
    return _report(job, [_size(made) for made in manifests])


def _refuse_inside(out: Path, skipped_to: Path | None) -> None:
    if skipped_to is not None and skipped_to.resolve().is_relative_to(out.resolve()):
        raise SettingsError(f"--skipped {skipped_to} lies in {out}, which holds the set alone; write it elsewhere")


def plan(config: BuildConfig, *, skipped_to: Path | None, progress: Progress) -> Report:
    """Say what `build` would write, and what stands in its way, by checking every picture and writing nothing.

    Raises SettingsError and DataError for a source that can't be used at all.
    """
    job = _prepare(config, progress)
    progress.begin("checking", sum(map(len, job.slots)))
    with closing(job.read(encode.forecast_file)) as pictures:
        planned = [_measure_split(job, split, pictures) for split in range(len(job.slots))]
    if skipped_to is not None:
        job.losses.write(skipped_to)
    out = config.shards.out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        note = f"{out} isn't empty: `build` wants another folder (--out), or --force where it holds a set"
        job = replace(job, items=replace(job.items, notes=(*job.items.notes, note)))
    error = job.losses.error()
    report = _report(job, [size for size, _ in planned])
    exact = all(exact for _, exact in planned)
    if error is None:
        return replace(report, exact=exact)
    return replace(report, exact=exact, notes=(*report.notes, str(error)), problems=error.problems)


def find_built(config: BuildConfig) -> dict[str, SplitSize] | None:
    """Return what `shards.out` holds, where that is a complete set of these settings; the source isn't looked at."""
    folder, settings = config.shards.out, json.loads(json.dumps(config.byte_settings()))
    try:
        manifests = [manifest.read(folder / manifest_name(split)) for split in config.splits]
        sizes = [((folder / s.name).stat().st_size, s.filesize) for made in manifests for s in made.shards]
        beside = [folder / index_name(s.name) for made in manifests for s in made.shards] + [folder / card.NAME]
    except (OSError, FormatError):
        return None
    opencv = encode.opencv_version() if config.encode.reencodes else None
    if any((made.settings, made.opencv) != (settings, opencv) for made in manifests) or not all(path.is_file() for path in beside):
        return None
    if any(found != stated for found, stated in sizes):
        return None
    return {made.split: _size(made) for made in manifests}


def _prepare(config: BuildConfig, progress: Progress) -> _Job:
    """Read the source, draw splits, find missing files, and put each split in order."""
    progress.begin("reading the source", 0)
    items = sources.read(config)
    if config.shares is not None:
        items = replace(items, splits=order.draw_splits(items.keys, config.shares, config.splits_seed))
    losses = Losses(config, items)
    kept = np.flatnonzero(items.splits != LEFT_OUT)
    missing = kept[sources.find_missing(items.root, [items.paths[row] for row in kept.tolist()])]
    for row in missing.tolist():
        losses.refuse(row, Refused(items.paths[row], "missing", "no such file"))
    here = np.setdiff1d(kept, missing, assume_unique=True)
    slots = tuple(_arrange(config, items, here[items.splits[here] == split]) for split in range(len(items.split_names)))
    notes = (*items.notes, *sources.unseen_classes(items), *_left_out(len(items), len(items) - len(kept)))
    return _Job(config, replace(items, notes=notes), slots, losses, progress)


def _arrange(config: BuildConfig, items: Items, rows: order.Rows) -> order.Rows:
    keys = [items.keys[row] for row in rows]
    return rows[order.arrange(keys, items.labels[rows], mode=config.order.mode, seed=config.order.seed)]


def _left_out(rows: int, left: int) -> tuple[str, ...]:
    return (f"{left:,} of {rows:,} rows left out: the splits' shares sum up to less than 1",) if left else ()


def _workers(settings: Encode) -> int:
    """Return how many processes read: to hand over a picture takes longer than to read it and check its header (5 times)."""
    decodes = settings.reencodes or settings.check == "decode"
    return settings.workers or (local.cpus() if decodes else 1)


def _settle(losses: Losses, skipped_to: Path | None) -> None:
    """Write the list of what is lost; raise where that is an error."""
    if skipped_to is not None:
        losses.write(skipped_to)
    error = losses.error()
    if error is not None:
        raise error


def _check_any(job: _Job, samples: int) -> None:
    if not samples:
        raise DataError(f"{job.config.name}: no picture to pack; all {len(job.items):,} rows were left out")


def _write_split(job: _Job, split: int, pictures: Pictures[Encoded], folder: Path) -> tuple[tuple[ShardEntry, ...], set[str]]:
    """Write a split's shards; returns them and the fields that its samples have."""
    fields: set[str] = set()
    samples = _samples(job, islice(pictures, len(job.slots[split])), fields)
    with closing(writer.write_shards(samples, folder, job.items.split_names[split], job.config.shards.size)) as shards:
        return tuple(shards), fields


def _samples(job: _Job, pictures: Pictures[Encoded], fields: set[str]) -> Iterator[Sample]:
    """Yield what is to be written; after an error nothing more, while the rest is read so that all errors are known."""
    for row, picture in pictures:
        job.progress.advance(0 if isinstance(picture, Refused) else len(picture.data))
        if isinstance(picture, Refused):
            job.losses.refuse(row, picture)
            continue
        job.losses.see(row, picture.kind)
        if job.losses.fatal:
            continue
        members = ((picture.field, picture.data), *_text_members(job.items, row))
        fields.update(field for field, _ in members)
        yield Sample(job.items.keys[row], members)


def _text_members(items: Items, row: int) -> list[tuple[str, bytes]]:
    """Return a sample's label and, where it has some, its metadata."""
    metadata = items.metadata(row)
    label = ("cls", b"%d" % items.labels[row])
    return [label] if metadata is None else [label, ("json", manifest.to_json(metadata, sort_keys=True).encode())]


def _measure_split(job: _Job, split: int, pictures: Pictures[Forecast]) -> tuple[SplitSize, bool]:
    """Return what a split will come to, and whether that is exact."""
    sizes: list[int] = []
    exact = True
    for row, picture in islice(pictures, len(job.slots[split])):
        job.progress.advance(0 if isinstance(picture, Refused) else picture.source_bytes)
        if isinstance(picture, Refused):
            job.losses.refuse(row, picture)
            continue
        job.losses.see(row, picture.kind)
        exact = exact and picture.exact
        texts = (len(data) for _, data in _text_members(job.items, row))
        sizes.append(sum(map(tar.member_bytes, (picture.bytes, *texts))))
    shards = len(order.cut(np.array(sizes, np.int64), job.config.shards.size, len(tar.END))) - 1
    return SplitSize(shards, len(sizes), sum(sizes) + shards * len(tar.END)), exact


def _manifest(job: _Job, split: int, shards: tuple[ShardEntry, ...], fields: set[str]) -> Manifest:
    return Manifest(
        name=job.config.name,
        split=job.items.split_names[split],
        shards=shards,
        classes=job.items.classes,
        fields=tuple(sorted(fields)),
        settings=job.config.byte_settings(),
        opencv=encode.opencv_version() if job.config.encode.reencodes else None,
        skipped=job.losses.skipped(split),
    )


def _size(made: Manifest) -> SplitSize:
    return SplitSize(len(made.shards), made.samples, made.bytes)


def _report(job: _Job, sizes: list[SplitSize]) -> Report:
    return Report(
        splits=dict(zip(job.items.split_names, sizes, strict=True)),
        classes=None if job.items.classes is None else len(job.items.classes),
        kinds=job.losses.kinds,
        skipped=job.losses.causes,
        notes=job.items.notes,
    )
