"""Writes indexes and manifests for tars behind URLs, which are read once, forward; nothing is kept of them and nothing uploaded.

    URLs -> what their servers say -> every sample of a tar -> its .idx, a line in the record -> the split's manifest, last

tars ── scan ── crew          files ── record          repeats, progress

A tar that can't be read rightly gets no index, and its split no manifest. Where samples differ or keys come twice, both are
written and it is said. A run that was cut off goes on where it was: what the record knows at its server's version isn't read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TextIO, cast

from pipeline.errors import MissingError, OptionsError
from pipeline.index import files, repeats
from pipeline.index.crew import in_order
from pipeline.index.progress import Progress
from pipeline.index.record import Line, Record, hash_of
from pipeline.index.scan import Store, scan
from pipeline.index.tars import RemoteTar, find
from pipeline.options import check_int
from pipeline.stores.forward import LeftError
from pipeline.stores.http import HttpOptions, Remote
from pipeline.stores.remote import kind_of, opened
from shardify.errors import FormatError
from shardify.format import index as layout
from shardify.format import manifest
from shardify.format.fields import FieldCensus
from shardify.format.manifest import Manifest, ShardEntry
from shardify.format.names import manifest_name
from shardify.format.tar import SampleRecord

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SplitSize:
    """What a split comes to; `read`: how many of its shards were read now, the others were indexed already."""

    shards: int
    samples: int
    bytes: int
    read: int


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
    out: Path,
    split: str | None = None,
    connections: int = 4,
    skip_bad: bool = False,
    force: bool = False,
    http: HttpOptions | None = None,
    stream: TextIO | None = None,
) -> Indexed:
    """Index the tars that `texts` name (URLs, patterns of them, lists as `@FILE` or `-`) into the folder `out`.

    Object stores are asked as the environment says, and only in a process that doesn't fork.

    `connections`: tars that are read at once. `skip_bad` leaves tars that can't be read rightly out of the manifest; what is there
    and says something else is replaced only with `force`; progress goes to `stream`. Raises OptionsError before anything is read
    where names or files that are there stand in the way, RemoteError for a tar that can't be read; what was indexed by
    then stays, and the next run goes on there.
    """
    check_int("connections", connections, 1, 64)
    splits = find(texts, split=split)
    files.prepare(out)
    tars = [tar for of in splits.values() for tar in of]
    with opened(kind_of(tars[0].url), http, None) as opened_store:
        store = cast("Store", opened_store)
        remotes = dict(zip((tar.name for tar in tars), _look(store, tars, connections), strict=True))
        run = _Run(store, out, Record(out), remotes, skip_bad=skip_bad, force=force)
        run.preflight(splits)
        progress = Progress(stream, len(tars), sum(remote.size or 0 for remote in remotes.values()))
        try:
            found = in_order([partial(run.read, tar, progress) for tar in tars], connections)
            for name, of in splits.items():
                run.finish(name, of, islice(found, len(of)))
        finally:
            run.stopped.set()
        run.compare_keys()
        if retries := store.counts.retries:
            run.notes.append(f"{retries:,} requests failed and were made again")
    return Indexed(run.splits, run.manifests, tuple(run.problems), tuple(run.notes))


def _look(store: Store, tars: Sequence[RemoteTar], connections: int) -> list[Remote]:
    """Return what servers say of all tars; raises SourceError with those that aren't there."""

    def look(tar: RemoteTar) -> Remote | MissingError:
        try:
            return store.look(tar.address)
        except MissingError as error:
            return error

    found = list(in_order([partial(look, tar) for tar in tars], connections))
    if missing := [str(error) for error in found if isinstance(error, MissingError)]:
        more = f"\nand {len(missing) - _SHOWN:,} more like these" if len(missing) > _SHOWN else ""
        raise MissingError(f"{len(missing)} of {len(tars)} tars aren't there:\n" + "\n".join(missing[:_SHOWN]) + more)
    return [remote for remote in found if isinstance(remote, Remote)]


@dataclass(frozen=True, slots=True)
class _Done:
    """What one tar came to: its line, its samples, the hashes of their keys; or all that is wrong with it."""

    tar: RemoteTar
    line: Line | None = None
    records: Sequence[SampleRecord] = ()
    keys: repeats.Hashes | None = None
    fresh: bool = False
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Run:
    """One run over all splits, and what it has to report."""

    store: Store
    out: Path
    record: Record
    remotes: dict[str, Remote]
    skip_bad: bool
    force: bool
    splits: dict[str, SplitSize] = field(default_factory=dict)
    manifests: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: Event = field(default_factory=Event)
    _keys: list[tuple[RemoteTar, repeats.Hashes]] = field(default_factory=list)

    def preflight(self, splits: dict[str, list[RemoteTar]]) -> None:
        """Raise OptionsError with the files that are there and would make the work useless."""
        if self.force:
            return
        wrong = []
        for name, of in splits.items():
            wrong.append(files.manifest_in_the_way(self.out / manifest_name(name), of, [self.remotes[tar.name] for tar in of]))
            wrong += [files.in_the_way(self.out / tar.index, tar, self.record.get(tar.name), self.remotes[tar.name]) for tar in of]
        if wrong := [reason for reason in wrong if reason]:
            more = f"; and {len(wrong) - _SHOWN:,} more like these" if len(wrong) > _SHOWN else ""
            raise OptionsError("; ".join(wrong[:_SHOWN]) + more)

    def read(self, tar: RemoteTar, progress: Progress) -> _Done:
        """Return what a tar holds, read unless the record knows it, its index written: in a thread."""
        known = self._known(tar)
        if known is None:
            known = self._read(tar, progress)
        elif known.line is not None:
            progress.passed(known.line.read_bytes)
        progress.done()
        return known

    def _known(self, tar: RemoteTar) -> _Done | None:
        """Return what a former run found, where the tar is the same and its index is still there."""
        line = self.record.get(tar.name)
        if line is None or line.index != tar.index or not line.is_of(self.remotes[tar.name]):
            return None
        data = files.read(self.out / tar.index)
        if data is None or hash_of(data) != line.index_sha256:
            return None
        records = layout.load(data, tar.index)
        return _Done(tar, line, records, repeats.hashes(record.key for record in records))

    def _read(self, tar: RemoteTar, progress: Progress) -> _Done:
        def passed(size: int) -> None:
            if self.stopped.is_set():
                raise LeftError
            progress.passed(size)

        path = self.out / tar.index
        try:
            found = scan(self.store, tar.address, self.remotes[tar.name], passed, tar.coding)
            data = layout.dump(found.records)
        except FormatError as error:
            text = str(error)
            if str(tar.address) not in text:
                text = f"{tar.address}: {text}, and without an index it can't be read over HTTP: write it again with other names"
            return _Done(tar, problems=error.problems or (text,))
        if not files.write(path, data, force=self.force):
            return _Done(tar, problems=(f"{path}: is there and says something else than {tar.address}; --force replaces it",))
        seen, hashed = found.remote, hash_of(data)
        count = len(found.records)
        line = Line(tar.name, found.size, seen.etag, seen.modified, count, found.sha256, path.name, hashed, found.packed)
        self.record.add(line)
        return _Done(tar, line, found.records, repeats.hashes(record.key for record in found.records), fresh=True)

    def finish(self, name: str, tars: Sequence[RemoteTar], found: Iterable[_Done]) -> None:
        """Take over what the tars of a split hold, as they come, and write its manifest where all went well."""
        fields, entries, left_out, read = FieldCensus(), list[ShardEntry](), 0, 0
        for done in found:
            line, shown = done.line, str(done.tar.address)
            if line is None or done.keys is None:
                left_out += self.skip_bad
                target = self.notes if self.skip_bad else self.problems
                target += [f"left out: {problem}" if self.skip_bad else problem for problem in done.problems]
                continue
            for record in done.records:
                fields.add(record, shown)
            self._keys.append((done.tar, done.keys))
            entries.append(ShardEntry(done.tar.url, line.samples, line.size, line.sha256, line.index))
            read += done.fresh
        made = Manifest(name, name, tuple(entries), fields=tuple(sorted(fields.all)), indexed=True)
        self.splits[name] = SplitSize(len(entries), made.samples, made.bytes, read)
        self.problems += fields.differences()
        self.notes += fields.notes(name)
        path = self.out / manifest_name(name)
        if not entries or len(entries) + left_out < len(tars):
            missing = f"{len(tars) - len(entries)} of {len(tars)} tars aren't indexed"
            self.problems.append(f"{path}: not written, as {missing}; repair them, or leave bad ones out by --skip-bad")
            return
        signed = any("?" in entry.url for entry in entries)
        # What was in its way was refused beforehand: it lists the same tars, or is to be replaced.
        files.write(path, manifest.dump(made), force=True, private=signed)
        self.manifests[name] = str(path)
        if signed:
            self.notes.append(f"{path}: holds URLs with queries: if these sign them, it is a secret, and runs out as they do")

    def compare_keys(self) -> None:
        """Report keys that stand in several tars, of whatever split."""
        tars = [(str(tar.address), keys) for tar, keys in self._keys]
        self.problems += repeats.lines(tars, [self._keys_of(tar) for tar, _ in self._keys])

    def _keys_of(self, tar: RemoteTar) -> Iterator[str]:
        data = files.read(self.out / tar.index) or b""
        return (record.key for record in layout.load(data, tar.index))
