"""Tells what is known of a set's shards before any is opened: how many samples each has, and its size.

A manifest knows both. Of a tar beside its index the index's first line says it. Any other is `UNCOUNTED`, and the set *arrives*:
its first epoch has the order of `arrival`, for which nothing need be counted. The user's cache folder may know the samples of
such a tar from an epoch before; that saves work and changes no order.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.arrival import ArrivalSettings
from pipeline.epoch import Layout, OrderSettings, window_samples
from pipeline.errors import ShardError, SourceError, UncountedError
from pipeline.indexing import UNCOUNTED, Stamp, cache, default_folder, scan
from pipeline.samples import ShardFile, stated_samples
from pipeline.shardset import Shard, ShardSet
from pipeline.stores.folders import some
from shardify.format import tar
from shardify.format.manifest import set_digest
from shardify.format.names import index_name

log = logging.getLogger("pipeline")


@dataclass(frozen=True, slots=True)
class Survey:
    """A set's shards as workers know them, and whether some of them have neither manifest nor index.

    `digest`: the set's identity in hex: its manifest's; where no hash is known, over names, samples and sizes.
    """

    files: tuple[ShardFile, ...]
    arrives: bool
    digest: str

    @property
    def counted(self) -> bool:
        """Whether the samples of all shards are known."""
        return all(file.samples != UNCOUNTED for file in self.files)


def survey(found: ShardSet) -> Survey:
    """Look at a set's shards without opening them; raises ShardError for one that can't be read, or holds nothing."""
    files = [_known(shard) for shard in found.shards]
    for file, shard in zip(files, found.shards, strict=True):
        if file.samples == 0 and (shard.samples is None or file.size > len(tar.END)):
            raise ShardError(
                f"{file.path}: holds no sample, and no manifest says so (an index of another tar?); copy or pack it again, or "
                "leave it out"
            )
        if file.size and not file.url and file.samples > file.size // tar.BLOCK:
            raise ShardError(
                f"{file.path}: has {file.size} bytes, too few for the {file.samples} samples that its manifest or index states; "
                "they don't belong together: copy or pack it again"
            )
    digest = set_digest(
        (shard.name, file.samples, shard.sha256 if shard.samples is not None else f"{file.size} bytes")
        for file, shard in zip(files, found.shards, strict=True)
    )
    arrives = any(file.samples == UNCOUNTED for file in files)
    if arrives and files[0].url and not cache().remembers:
        log.warning(
            "%s: can't be written to, so nobody will remember the samples of these tars, and a second epoch will be refused; set "
            "XDG_CACHE_HOME to a folder that can be, or run `python -m pipeline index` with their URLs once",
            default_folder() or "no home, and no XDG_CACHE_HOME",
        )
    if found.shards[0].samples is not None and not _has_index(files[0]):
        log.info(
            "%s: counted by a manifest, and without an index: each such tar is read through before the first of its samples; "
            "`shardify index` writes the indexes once for all",
            files[0].path,
        )
    return recount(Survey(tuple(files), arrives, digest))


def _has_index(file: ShardFile) -> bool:
    return bool(file.url) or os.path.exists(file.index or index_name(file.path))  # noqa: PTH110


def _known(shard: Shard) -> ShardFile:
    if shard.url:
        if shard.samples is None:
            return ShardFile(shard.path, UNCOUNTED, shard.bytes or 0, url=shard.url, version=shard.version)
        return ShardFile(shard.path, shard.samples, shard.bytes or 0, shard.index, shard.url, shard.index_url, shard.sha256)
    stated = stated_samples(shard.path) if shard.samples is None else shard.samples
    size = Stamp.of(shard.path).size if shard.bytes is None else shard.bytes
    if stated and not size:
        raise ShardError(f"{shard.path}: holds no bytes, and its index counts {stated} samples; copy or pack it again")
    return ShardFile(shard.path, UNCOUNTED if stated is None else stated, size, shard.index)


def recount(known: Survey) -> Survey:
    """Return the set with what the cache folder knows of the shards that aren't counted; `known` itself where that is nothing."""
    unknown = [at for at, file in enumerate(known.files) if file.samples == UNCOUNTED]
    if not unknown:
        return known
    if known.files[0].url:
        return _with_entries(known, unknown)
    counts = cache().count((known.files[at].path, Stamp.of(known.files[at].path)) for at in unknown)
    return _with_counts(known, {at: count for at, count in zip(unknown, counts, strict=True) if count is not None})


def _with_entries(known: Survey, unknown: Sequence[int]) -> Survey:
    """Return a remote set with the samples of the shards that the cache folder knows, and where it holds them."""
    files = list(known.files)
    for at in unknown:
        file = files[at]
        if found := cache().find(file.path, Stamp(file.size, version=file.version)):
            files[at] = dataclasses.replace(file, samples=found[0], index=found[1], index_url=found[1])
    return known if files == list(known.files) else dataclasses.replace(known, files=tuple(files))


def count_all(known: Survey, part: int = 0, parts: int = 1) -> Survey:
    """Return the set with all shards counted: those that nobody knows by their headers.

    Each of `parts` processes begins elsewhere and goes round, so that they share the work by the cache folder.
    """
    known = recount(known)
    unknown = [at for at, file in enumerate(known.files) if file.samples == UNCOUNTED]
    if not unknown:
        return known
    if known.files[0].url:
        check_counted(
            known,
            "an epoch after the first one, and going on in the middle of one,",
            "; a state of their first epoch can be loaded once another loader has read one epoch of them here to its end: an index "
            "makes another order",
        )
    log.info(
        "counting the samples of %d tars that weren't read to their ends yet; `shardify index` does that once for all", len(unknown)
    )
    begin = len(unknown) * part // parts
    counts = {at: len(scan(known.files[at].path)) for at in unknown[begin:] + unknown[:begin]}
    if empty := [known.files[at].path for at, count in counts.items() if not count]:
        raise ShardError(f"{some(empty)}: holds no sample (a file of zeros?); copy or pack it again, or leave it out")
    return _with_counts(known, counts)


def with_counts(known: Survey, counts: Sequence[int]) -> Survey:
    """Return the set with all its shards' samples, (shards,), now that they were read to their ends.

    Raises SourceError where those of remote ones couldn't be remembered.
    """
    if known.files[0].url:
        known = recount(known)
        if not known.counted:
            raise SourceError(
                f"{default_folder() or 'no cache folder'}: the samples of remote tars are remembered there, and can't be; set "
                "XDG_CACHE_HOME to a folder that can be written to, or run `python -m pipeline index` with their URLs once"
            )
        return known
    return _with_counts(known, dict(enumerate(counts)))


def layout_of(known: Survey, settings: ArrivalSettings) -> Layout:
    """Return the layout of a set that is counted."""
    counts = [file.samples for file in known.files]
    window = window_samples(settings.window_bytes, sum(file.size for file in known.files), sum(counts))
    return Layout(counts, OrderSettings(seed=settings.seed, lanes=settings.lanes, window=window, shuffle=settings.shuffle))


def _with_counts(known: Survey, counts: dict[int, int]) -> Survey:
    if not counts:
        return known
    files = [dataclasses.replace(f, samples=counts[at]) if at in counts else f for at, f in enumerate(known.files)]
    return dataclasses.replace(known, files=tuple(files))


def check_counted(known: Survey, what: str, note: str = "") -> None:
    """Raise UncountedError, which says how to have them counted, where a shard's samples aren't known and `what` needs them.

    `note` ends the message.
    """
    paths = [file.path for file in known.files if file.samples == UNCOUNTED]
    if paths:
        far = bool(known.files[0].url)
        command = "python -m pipeline index` with their URLs" if far else f"shardify index {paths[0].rpartition('/')[0]}`"
        raise UncountedError(
            f"{what} needs the number of samples, and {len(paths)} of {len(known.files)} tars have neither manifest nor index: "
            f"{some(paths, 3)}; run `{command} once and point at the manifest that it writes{note}"
        )
