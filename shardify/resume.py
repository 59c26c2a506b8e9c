"""Begins a build's journal and spool, or takes up those of one that was cut off, where nothing changed that decides a byte."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardify import fingerprint, sinks, space
from shardify import job as jobs
from shardify.config.models import BuildConfig
from shardify.errors import SettingsError, StorageError
from shardify.format.manifest import ShardEntry
from shardify.items import Refused, Rows
from shardify.job import Job
from shardify.journal import SPOOL, Journal, Record
from shardify.sinks import FolderSink
from shardify.spool import Spool, refused_rows


@dataclass(frozen=True, slots=True)
class Work:
    """What is done of a job so far: its journal, its spool, the finished shards with their slots (first, end).

    `settled` are the slots of pictures that were refused before shards began to be written: where a shard ends is decided then, so
    they aren't tried again.
    """

    journal: Journal
    spool: Spool
    finished: Mapping[str, tuple[int, int, ShardEntry]]
    settled: Rows


def refuse_settings(old: Journal, config: BuildConfig, opencv: str | None) -> None:
    """Raise SettingsError where settings or versions aren't those of a journal's build; looks at no source."""
    header = old.records[0]
    changes = fingerprint.settings_changes(header, config, opencv)
    named = None if config.spool is None else str(config.spool.absolute())
    before = header.facts["spool"]
    if named != (None if before == SPOOL else str(Path(before).parent)):
        changes.append(f"spool is {named}, was {None if before == SPOOL else Path(before).parent}")
    _refuse(config, changes)


def spool_folder(config: BuildConfig) -> Path:
    """Return a folder for a new build's spool; several builds may share the folder `spool`."""
    return config.folder / SPOOL if config.spool is None else config.spool.absolute() / f"{SPOOL}-{secrets.token_hex(6)}"


@contextmanager
def begin(job: Job, sink: FolderSink, old: Journal | None, opencv: str | None) -> Generator[Work, None, None]:
    """Open the journal and the spool while the block runs; where it raises, note what is done.

    Raises SettingsError for a source that isn't the journal's, StorageError where the disks lack the room.
    """
    header = _header(job, opencv, sink, old)
    refused = [] if old is None else refused_rows(old.records)
    if old is not None:
        pending = np.array([row for row, _ in refused], np.int64)
        _refuse(job.config, fingerprint.source_changes(old.records[0], header, job.items.paths, pending))
    folder = sink.spool_of(header)
    finished = {} if old is None else _finished(old, sink)
    _check_space(job, sink, header, finished)
    sink.begin(folder)
    log = old if old is not None else Journal.create(sink.journal_path, header)
    spool = Spool(folder, np.array(header.facts["bounds"], np.int64), job.memory, log)
    try:
        spool.restore(log.records)
        settled = _take_over(job, spool, refused, writing=any(record.kind == "clear" for record in log.records))
        log.forget("put")
        yield Work(log, spool, finished, settled)
    except BaseException:
        sink.keeps = sink.keeps or spool.in_files
        if spool.in_files:
            with suppress(StorageError):
                spool.checkpoint()
        raise
    finally:
        spool.close()
        log.close()


def _header(job: Job, opencv: str | None, sink: FolderSink, old: Journal | None) -> Record:
    """Return what a journal of this build begins with; the buckets and the spool's place are the old one's."""
    config, survey = job.config, job.survey
    bounds = jobs.bounds(job) if old is None else np.array(old.records[0].facts["bounds"], np.int64)
    spool = SPOOL if config.spool is None else str(spool_folder(config))
    if old is not None:
        spool = old.records[0].facts["spool"]
        if spool != SPOOL and not sink.is_place_of(old.records[0]):  # the folder is a copy: that spool is the original's
            spool = f"{spool}-{sink.place}"
    replaces = sink.replaced(None if old is None else old.records[0])
    facts = {"bounds": bounds.tolist(), "spool": spool, "place": sink.place, "replaces": replaces}
    return fingerprint.header(config, job.items, survey.sizes, survey.mtimes, opencv, facts)


def _refuse(config: BuildConfig, changes: list[str]) -> None:
    if changes:
        raise SettingsError(
            f"the build in {config.shards.out} can't go on: {'; '.join(changes)} since it began; restore that and --resume, or "
            "begin anew with --force"
        )


def _check_space(job: Job, sink: FolderSink, header: Record, finished: Mapping[str, tuple[int, int, ShardEntry]]) -> None:
    folder = sink.spool_of(header)
    if job.config.encode.reencodes:  # what comes of that isn't known, and is less as a rule
        return
    written, replaced = sink.local_bytes(finished), sink.local_bytes(header.facts["replaces"])
    use = jobs.disk_use(job, job.sizes, sinks.held_shards(job.config))
    needs = space.Needs(use, in_spool=space.used(folder), in_set=written, replaced=replaced)
    problem = space.shortage(needs, sink.folder, folder)
    if problem:
        raise StorageError(problem)


def _take_over(job: Job, spool: Spool, refused: list[tuple[int, Refused]], *, writing: bool) -> Rows:
    """Tell the losses what an earlier run saw; return the slots that aren't to be tried again."""
    for slot in np.flatnonzero(spool.sizes >= 0).tolist():
        job.losses.see(int(job.rows[slot]), spool.describe(slot)[1])
    lost = {row: reason for row, reason in refused if spool.sizes[job.slot_of[row]] < 0} if writing else {}
    for row, reason in lost.items():
        job.losses.refuse(row, reason)
    return job.slot_of[np.array(list(lost), np.int64)]


def _finished(log: Journal, sink: FolderSink) -> dict[str, tuple[int, int, ShardEntry]]:
    """Return the shards that the journal names and that are there whole."""
    facts = [record.facts for record in log.records if record.kind == "shard"]
    noted = {entry.name: (fact["first"], fact["end"], entry) for fact in facts for entry in [ShardEntry(**fact["entry"])]}
    whole = sink.whole([entry for _, _, entry in noted.values()])
    return {name: found for name, found in noted.items() if name in whole}
