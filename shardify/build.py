"""Builds a set: the composition root that leads a source's rows to shards and manifests.

    source -> splits -> where the files lie -> slots -> read in disk order, encode (processes) -> spool
           -> cut -> write, shard by shard -> card -> manifests

`plan` takes the same way up to the cut, and keeps nothing. A journal in the output folder says how far a build is: one that was cut
off goes on from there, to the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from shardify import encode, sinks, space, worker, writer
from shardify import job as jobs
from shardify import resume as resuming
from shardify.config.models import BuildConfig
from shardify.durable import check_writable
from shardify.errors import DataError, FormatError, SettingsError, ShardifyError
from shardify.format import card, manifest, tar
from shardify.format.manifest import Manifest, ShardEntry
from shardify.format.names import index_name, manifest_name, shard_name
from shardify.items import Progress, Refused, Rows, Sample, SplitSize
from shardify.job import Job
from shardify.journal import NAME, Journal, Record
from shardify.losses import Losses
from shardify.resume import Work
from shardify.sinks import FolderSink
from shardify.space import DiskUse
from shardify.spool import Spool
from shardify.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class Report:
    """What was built, or would be.

    `kinds` and `skipped` count pictures by type and by cause of what was left out; `exact` is False where sizes are estimated
    (what is re-encoded); `seconds` are the stages'; `disk` is what it takes; `problems` are why a planned build would fail, all.
    """

    splits: Mapping[str, SplitSize]
    classes: int | None
    kinds: Mapping[str, int]
    skipped: Mapping[str, int]
    notes: tuple[str, ...]
    exact: bool = True
    problems: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    disk: DiskUse = space.NOTHING


def build(config: BuildConfig, *, force: bool, resume: bool = False, skipped_to: Path | None, progress: Progress) -> Report:
    """Pack a source into `shards.out`, a folder or a place in an object store; with `force`, in place of the set that is there.

    With `resume` a build that was cut off there goes on, where nothing changed that decides a byte; without one it begins.
    `skipped_to` is a file for the list of all pictures left out. Raises SettingsError for a folder that can't be used, DataError
    that lists all that is wrong with the source, StorageError. What is done by then is kept where it spares work (the error's
    notes say so), else nothing is left.
    """
    if force and resume:
        raise SettingsError("--force begins anew and --resume goes on: give one of them")
    _check_places(config, skipped_to)
    watch, opencv = Stopwatch(progress), _opencv(config)
    with sinks.open_sink(config, force=force, resume=resume) as sink:
        old = Journal.reopen(sink.journal_path) if sink.resumes else None
        try:
            if old is not None:
                resuming.refuse_settings(old, config, opencv)
            elif config.spool is not None:
                check_writable(config.spool)
            job = jobs.prepare(config, watch)
            _settle(job.losses, skipped_to)
        except BaseException:
            if old is not None:
                old.close()
            raise
        with resuming.begin(job, sink, old, opencv) as work:
            _ingest(job, work, sink)
            _settle(job.losses, skipped_to)
            manifests = _write(job, work, sink)
        watch.begin("finishing", 0)
        told = [(manifest_name(made.split), manifest.dump(made)) for made in manifests]
        sink.publish([(card.NAME, card.dump(manifests)), *told])
        sink.finish()
    return _report(job, [_size(made) for made in manifests])


def plan(config: BuildConfig, *, skipped_to: Path | None, progress: Progress) -> Report:
    """Say what `build` would write, and what stands in its way, by checking every picture and writing nothing.

    Raises SettingsError and DataError for a source that can't be used at all.
    """
    job = jobs.prepare(config, Stopwatch(progress))
    rows = jobs.in_reading_order(job, np.ones(len(job.rows), bool))
    job.watch.begin("checking", len(rows))
    sizes, exact = np.full(len(job.rows), -1, np.int64), True
    for row, picture in job.read(worker.forecast_file, rows):
        job.watch.advance(0 if isinstance(picture, Refused) else picture.source_bytes)
        if isinstance(picture, Refused):
            job.refuse(row, picture)
            continue
        job.losses.see(row, picture.kind)
        exact = exact and picture.exact
        sizes[job.slot_of[row]] = picture.bytes
    if skipped_to is not None:
        job.losses.write(skipped_to)
    splits = [_planned(job, sizes, split) for split in range(len(job.items.split_names))]
    report = replace(_report(job, splits), exact=exact, disk=_disk(job, np.maximum(sizes, 0)))
    notes = (*report.notes, *_obstacles(config, report.disk))
    error = job.losses.error()
    if error is None:
        return replace(report, notes=notes)
    return replace(report, notes=(*notes, str(error)), problems=error.problems)


def find_built(config: BuildConfig) -> dict[str, SplitSize] | None:
    """Return what `shards.out` holds, where that is a complete set of these settings; the source isn't looked at."""
    settings, names = json.loads(json.dumps(config.byte_settings())), [manifest_name(split) for split in config.splits]
    view = sinks.view(config)
    try:
        sizes = view.sizes()
        if not sizes.keys() >= {*names, card.NAME} or NAME in sizes or sinks.LEASE in sizes or (config.folder / NAME).exists():
            return None
        manifests = [manifest.load(view.read(name), name) for name in names]
    except (OSError, FormatError):
        return None
    if any((made.settings, made.opencv) != (settings, _opencv(config)) for made in manifests):
        return None
    if any(sizes.get(s.name) != s.filesize or index_name(s.name) not in sizes for made in manifests for s in made.shards):
        return None
    return {made.split: _size(made) for made in manifests}


def _check_places(config: BuildConfig, skipped_to: Path | None) -> None:
    """Refuse other files in the output folder, which holds the set alone, and a spool that is no folder."""
    out = config.folder.resolve()
    if skipped_to is not None and skipped_to.resolve().is_relative_to(out):
        raise SettingsError(f"--skipped {skipped_to} lies in {out}, which holds the set alone; write it elsewhere")
    if config.spool is not None and config.spool.exists() and not config.spool.is_dir():
        raise SettingsError(f"spool {config.spool} is no folder; name one")
    if config.spool is not None and config.spool.resolve().is_relative_to(out):
        raise SettingsError(f"spool {config.spool} lies in {out}, which holds the set alone; name another folder, or none")


def _obstacles(config: BuildConfig, use: DiskUse) -> Iterator[str]:
    """Say what of the output and its disk stands in a build's way."""
    out, folder = config.shards.out, config.folder
    try:
        there: Mapping[str, int] = sinks.view(config).sizes()
    except NotADirectoryError:
        there = {folder.name: 0}
    except ShardifyError as error:
        yield str(error)
        there = {}
    if (folder / NAME).exists() or sinks.LEASE in there:
        state = "was cut off" if (folder / NAME).exists() else "is running elsewhere, or was cut off there"
        yield f"{out} holds a build that {state}: `build --resume` goes on with it, `build --force` begins anew"
    elif there:
        yield f"{out} isn't empty: `build` wants another folder (--out), or --force where it holds a set"
    if not os.access(nearest := _nearest(folder), os.W_OK | os.X_OK):
        yield f"{nearest}: can't be written to; choose another folder (--out), or change its permissions"
    short = space.shortage(space.Needs(use), folder, resuming.spool_folder(config))
    if short:
        yield short


def _nearest(folder: Path) -> Path:
    """Return a folder, or of those above it the lowest that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _disk(job: Job, sizes: Rows) -> DiskUse:
    return jobs.disk_use(job, sizes, sinks.held_shards(job.config))


def _opencv(config: BuildConfig) -> str | None:
    return encode.opencv_version() if config.encode.reencodes else None


def _settle(losses: Losses, skipped_to: Path | None) -> None:
    """Write the list of what is lost; raise where that is an error."""
    if skipped_to is not None:
        losses.write(skipped_to)
    error = losses.error()
    if error is not None:
        raise error


def _ingest(job: Job, work: Work, sink: FolderSink) -> None:
    """Read what isn't here yet, in disk order, and hand it to the spool."""
    spool = work.spool
    wanted = spool.missing()
    wanted[work.settled] = False
    for first, end, _ in work.finished.values():
        wanted[first:end] &= spool.sizes[first:end] < 0
    rows = jobs.in_reading_order(job, wanted)
    job.watch.begin("reading", len(rows))
    for row, picture in job.read(worker.encode_file, rows):
        job.watch.advance(0 if isinstance(picture, Refused) else len(picture.data))
        slot = int(job.slot_of[row])
        if isinstance(picture, Refused):
            job.refuse(row, picture)
            spool.refuse(row, slot, picture)
            continue
        if spool.sizes[slot] < 0:
            job.losses.see(row, picture.kind)
        spool.put(slot, picture.field, picture.kind, picture.data)
    spool.end()
    sink.keeps = sink.keeps or spool.in_files


def _write(job: Job, work: Work, sink: FolderSink) -> list[Manifest]:
    """Cut the slots into shards by what they came to, and write those that aren't there."""
    cuts = [jobs.cut(job, work.spool.sizes, split) for split in range(len(job.items.split_names))]
    if not sum(map(len, cuts)):
        raise DataError(f"{job.config.name}: no picture to pack; all {len(job.items):,} rows were left out")
    splits = job.items.split_names
    names = [[shard_name(split, number) for number in range(len(cut))] for split, cut in zip(splits, cuts, strict=True)]
    shards = {name: slots for made, cut in zip(names, cuts, strict=True) for name, slots in zip(made, cut, strict=True)}
    done = {name: entry for name, (_, _, entry) in work.finished.items()}
    for name, (first, end, entry) in work.finished.items():
        if name not in shards or (*_span(shards[name]), len(shards[name])) != (first, end, entry.nsamples):
            raise DataError(
                f"{sink.target}/{name}: the pictures that belong in it aren't those of the build that was cut off; "
                "begin anew with --force"
            )
    job.watch.begin("writing", sum(len(slots) for name, slots in shards.items() if name not in done))
    sink.clear(work.journal, dict(zip(splits, map(len, cuts), strict=True)))
    for name, slots in shards.items():
        if name not in done:
            done[name] = _write_shard(job, work, sink, name, slots)
        work.spool.free(int(slots[-1]) + 1)
    return [_manifest(job, work, split, tuple(done[name] for name in made)) for split, made in enumerate(names)]


def _span(slots: Rows) -> tuple[int, int]:
    return int(slots[0]), int(slots[-1]) + 1


def _write_shard(job: Job, work: Work, sink: FolderSink, name: str, slots: Rows) -> ShardEntry:
    def note(entry: ShardEntry) -> None:
        first, end = _span(slots)
        work.journal.append(Record("shard", {"first": first, "end": end, "entry": asdict(entry)}), durable=True)
        sink.keeps = True

    entry = writer.write_shard(_samples(job, work.spool, slots), sink.folder, name, note=note)
    sink.deliver(entry)
    return entry


def _samples(job: Job, spool: Spool, slots: Rows) -> Iterator[Sample]:
    """Yield what is to be written, in slot order."""
    for slot, data in spool.take(slots.tolist()):
        job.watch.advance(len(data))
        row = int(job.rows[slot])
        picture = (spool.describe(slot)[0], data)
        yield Sample(job.items.keys[row], (picture, *jobs.text_members(job.items, row)))


def _planned(job: Job, sizes: Rows, split: int) -> SplitSize:
    """Return what a split will come to."""
    cut = jobs.cut(job, sizes, split)
    samples = np.concatenate([np.zeros(0, np.int64), *cut])
    return SplitSize(len(cut), len(samples), int(jobs.written_bytes(job, sizes)[samples].sum()) + len(cut) * len(tar.END))


def _manifest(job: Job, work: Work, split: int, shards: tuple[ShardEntry, ...]) -> Manifest:
    items = job.items
    texts = () if items.ids is None and items.extra is None else ("json",)
    return Manifest(
        name=job.config.name,
        split=items.split_names[split],
        shards=shards,
        classes=items.classes,
        fields=tuple(sorted({*work.spool.fields(*job.splits[split : split + 2]), "cls", *texts})) if shards else (),
        settings=job.config.byte_settings(),
        opencv=_opencv(job.config),
        skipped=job.losses.skipped(split),
        repaired=job.losses.repaired(split),
    )


def _size(made: Manifest) -> SplitSize:
    return SplitSize(len(made.shards), made.samples, made.bytes)


def _report(job: Job, sizes: list[SplitSize]) -> Report:
    return Report(
        splits=dict(zip(job.items.split_names, sizes, strict=True)),
        classes=None if job.items.classes is None else len(job.items.classes),
        kinds=job.losses.kinds,
        skipped=job.losses.causes,
        notes=(*job.items.notes, *job.losses.notes),
        seconds=job.watch.stop(),
        disk=_disk(job, np.maximum(job.sizes, 0)),
    )
