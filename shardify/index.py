"""Writes indexes and manifests for tars that others packed; the tars are read from end to end and never changed.

    every sample of a tar -> its .idx -> the next tar -> what samples differ in -> the split's manifest, last

A tar that can't be read rightly gets no index, and its split no manifest. Where samples differ or keys come twice, both are
written and it is said: such a set can be trained from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shardify import tars
from shardify.census import KeyCensus
from shardify.durable import make_folder, write_file
from shardify.errors import FormatError, SettingsError, naming
from shardify.format import index as layout
from shardify.format import manifest, tar
from shardify.format.fields import FieldCensus
from shardify.format.manifest import Manifest, ShardEntry
from shardify.items import Progress, SplitSize
from shardify.scan import scan
from shardify.tars import Tar, Target

_SHOWN = 5  # what stands in the way, in one message


@dataclass(frozen=True, slots=True)
class Indexed:
    """What was found: splits by what their tars hold, the manifests that now stand, all problems, and what else to know."""

    splits: dict[str, SplitSize]
    manifests: dict[str, str]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def index(
    texts: Sequence[str],
    *,
    split: str | None = None,
    out: Path | None = None,
    headers_only: bool = False,
    skip_bad: bool = False,
    force: bool = False,
    progress: Progress,
) -> Indexed:
    """Index the tars that `texts` name, beside them or in `out`, with a manifest for each split.

    `headers_only` reads no pictures, and leaves sha256 out. `skip_bad` leaves tars that can't be read rightly out of the manifest.
    What is there and says something else is replaced only with `force`. Raises SettingsError before anything is read where names,
    folders or files that are there stand in the way, StorageError where a disk fails; what was written by then is complete.
    """
    with naming("the tars"):
        targets = tars.arrange(tars.find(texts), split=split, out=out)
        _preflight(targets, force)
    run = _Run(headers_only=headers_only, skip_bad=skip_bad, force=force, progress=progress)
    progress.begin("indexing", sum(len(target.tars) for target in targets), "tars")
    for target in targets:
        run.do(target)
    run.compare_keys()
    return Indexed(run.splits, run.manifests, tuple(run.problems), tuple(run.notes))


def _preflight(targets: Sequence[Target], force: bool) -> None:
    """Raise SettingsError with all that would make the work useless: folders that can't be written, files that mustn't be."""
    folders = {target.manifest.parent for target in targets} | {t.index.parent for target in targets for t in target.tars}
    closed = [folder for folder in sorted(folders) if not _is_writable(folder)]
    _refuse([f"{folder}: can't be written to; name another folder by --out" for folder in closed])
    wrong = [
        f"{t.path}: can't be read; see its permissions" for target in targets for t in target.tars if not os.access(t.path, os.R_OK)
    ]
    wrong += [reason for target in targets for reason in _in_the_way(target, force)]
    if not force:
        wrong += [reason for target in targets for t in target.tars if (reason := _no_index(t.index))]
    _refuse(wrong)


def _refuse(wrong: Sequence[str]) -> None:
    more = len(wrong) - _SHOWN
    if wrong:
        raise SettingsError("; ".join(wrong[:_SHOWN]) + (f"; and {more:,} more like these" if more > 0 else ""))


def _is_writable(folder: Path) -> bool:
    """Tell whether files can be made in a folder, or the folder itself where it isn't there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _in_the_way(target: Target, force: bool) -> list[str]:
    """Say why a manifest that is there can't be written anew."""
    path = target.manifest
    try:
        old = manifest.read(path)
    except FileNotFoundError:
        return []
    except FormatError as error:
        return [] if force else [f"{error}; --force replaces it"]
    if old.settings and not old.indexed:
        return [f"{path}: this set was packed by shardify; it has its indexes, and its manifest says more than an index can"]
    now = [(t.url, t.path.stat().st_size) for t in target.tars]
    if force or (old.indexed and now == [(entry.url, entry.filesize) for entry in old.shards]):
        return []
    what = f"lists {len(old.shards):,} tars, and not these {len(now):,} with their sizes" if old.indexed else "is another tool's"
    return [f"{path}: {what}; --force replaces it"]


def _no_index(path: Path) -> str | None:
    """Say why a file that is there is no index that could stay."""
    try:
        with path.open("rb") as file:
            layout.count(file.readline(64).decode("ascii", "replace"), str(path))
    except FileNotFoundError:
        return None
    except FormatError as error:
        return f"{error}; --force replaces it"
    return None


@dataclass(slots=True)
class _Split:
    """What is known of a split so far; `left_out` counts the bad tars that its manifest may go without."""

    target: Target
    fields: FieldCensus = field(default_factory=FieldCensus)
    entries: list[ShardEntry] = field(default_factory=list)
    left_out: int = 0

    @property
    def manifest(self) -> Manifest:
        """The manifest of the tars that were indexed."""
        name, fields = self.target.split, tuple(sorted(self.fields.all))
        return Manifest(name, name, tuple(self.entries), fields=fields, indexed=True)


@dataclass(slots=True)
class _Run:
    """One run over all splits, and what it has to report."""

    headers_only: bool
    skip_bad: bool
    force: bool
    progress: Progress
    splits: dict[str, SplitSize] = field(default_factory=dict)
    manifests: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _keys: KeyCensus = field(default_factory=KeyCensus)
    _done: list[tuple[Tar, bool]] = field(default_factory=list)  # and whether it has an index

    def do(self, target: Target) -> None:
        """Index the tars of a split, and write its manifest where all went well."""
        split = _Split(target)
        for one in target.tars:
            before = len(split.entries)
            self._index(one, split)
            self.progress.advance(sum(entry.filesize for entry in split.entries[before:]))
        made, wanted = split.manifest, len(target.tars) - split.left_out
        self.splits[target.split] = SplitSize(len(made.shards), made.samples, made.bytes)
        self.problems += split.fields.differences()
        self.notes += split.fields.notes(target.split)
        if not made.shards or len(made.shards) < wanted:
            missing = f"{len(target.tars) - len(made.shards)} of {len(target.tars)} tars aren't indexed"
            self.problems.append(f"{target.manifest}: not written, as {missing}; repair them, or leave bad ones out by --skip-bad")
        elif self._write(target.manifest, manifest.dump(made)):
            self.manifests[target.split] = str(target.manifest)
        else:
            self.problems.append(_differs(target.manifest))

    def compare_keys(self) -> None:
        """Report keys that stand in several tars, of whatever split."""
        self.problems += self._keys.repeats((one.url, partial(_keys, one, has_index)) for one, has_index in self._done)

    def _index(self, one: Tar, split: _Split) -> None:
        """Look at a tar and write its index; report what is wrong where there can't be one to go by."""
        try:
            looked = scan(one.path, hashing=not self.headers_only)
        except FormatError as error:
            lines = error.problems or (str(error),)
            split.left_out += self.skip_bad
            if self.skip_bad:
                self.notes += [f"left out: {line}" for line in lines]
            else:
                self.problems += lines
            return
        has_index = self._write_index(one, looked.records)
        if has_index is None:
            return
        self._keys.add(record.key for record in looked.records)
        for record in looked.records:
            split.fields.add(record, one.url)
        self._done.append((one, has_index))
        where = one.index_url if has_index else ""
        split.entries.append(ShardEntry(one.url, len(looked.records), looked.size, looked.sha256, where))

    def _write_index(self, one: Tar, records: Sequence[tar.SampleRecord]) -> bool | None:
        """Write a tar's index; False where its layout can't hold the names, None where another file is in the way."""
        try:
            data = layout.dump(records)
        except FormatError as error:
            if one.index.exists():
                self.problems.append(f"{one.path}: {error}, and {one.index} is there; it can't be right: remove it")
                return None
            self.problems.append(
                f"{one.path}: {error}; it gets none, and a loader reads through all its headers first: write it again with "
                "other names"
            )
            return False
        if self._write(one.index, data):
            return True
        self.problems.append(_differs(one.index))
        return None

    def _write(self, path: Path, data: bytes) -> bool:
        """Write a file, where none is there or with `force`; tell whether the file now says `data`."""
        with naming(path):
            there = None
            with suppress(FileNotFoundError):
                there = path.read_bytes()
            if there is not None and (there == data or not self.force):
                return there == data
            make_folder(path.parent)
            write_file(path, data)
        return True


def _differs(path: Path) -> str:
    return f"{path}: is there and says something else than the tars hold; --force replaces it"


def _keys(one: Tar, has_index: bool) -> Iterable[str]:
    """Return the keys of a tar that was read before, from its index where it has one."""
    if not has_index:
        return [record.key for record in scan(one.path, hashing=False).records]
    with naming(one.index):
        return [record.key for record in layout.load(one.index.read_bytes(), str(one.index))]
