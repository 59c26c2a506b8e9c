"""A place in an object store that a set is built for: shards are made in a work folder, and go there as they are finished.

The work folder holds the lock, the journal and the spool as an output folder does. What is there of the set is known by the
journal, which names each finished shard, and by the store, which has an object of that size and sha256. The manifests come last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shardify.config.models import Store
from shardify.config.places import ObjectUrl
from shardify.errors import ShardifyError, StorageError
from shardify.format.manifest import ShardEntry
from shardify.format.names import index_name, manifest_name
from shardify.journal import Journal
from shardify.sinks import lease, objects
from shardify.sinks.folder import FolderSink, listed, names_of
from shardify.sinks.lease import Lease
from shardify.sinks.uploads import Uploads

_LEAVE_SECONDS = 10.0  # for the lease of a build that fails: the store may be what it failed by


class ObjectSink(FolderSink):
    """A place in an object store, kept to one build while the `with` block runs; see FolderSink."""

    def __init__(
        self, url: ObjectUrl, store: Store, work: Path, splits: Sequence[str], *, force: bool = False, resume: bool = False
    ) -> None:
        super().__init__(work, splits, force=force, resume=resume)
        self.target = url
        self._bucket = objects.connect(url, store)
        self._lease = Lease(self._bucket, work)
        self._uploads = Uploads(self._bucket, work)
        self._waiting: list[ShardEntry] = []  # of a build that goes on: finished, and not uploaded yet
        self._sent: dict[str, int] = {}  # shards that are in the store or on their way, with their sizes
        self._names: dict[str, int] | None = None  # of the objects, with their sizes; None: to be asked for

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._uploads.stop()
        if error is not None:
            self._leave(self._lease.rest if self.keeps else self._lease.give_back)
        super().__exit__(kind, error, trace)

    def whole(self, entries: Sequence[ShardEntry]) -> set[str]:
        """Return the names of those shards of a journal that are in the store, or whole in the work folder: those go there yet."""
        sizes = self._sizes()
        likely = [e for e in entries if sizes.get(e.name) == e.filesize and index_name(e.name) in sizes]
        found = self._bucket.find_all([entry.name for entry in likely])
        there = {e.name for e in likely if (f := found[e.name]) is not None and (f.size, f.sha256) == (e.filesize, e.sha256)}
        self._sent |= {entry.name: entry.filesize for entry in entries if entry.name in there}
        here = super().whole(entries)
        self._waiting = [entry for entry in entries if entry.name in here - there]
        for name in there:  # killed between its upload and its removal
            self._unlink(name)
            self._unlink(index_name(name))
        return here | there

    def begin(self, spool: Path) -> None:
        """Remove what a cut-off build left, where `force` allows it; from now on this build's files are in the folder."""
        if not self.resumes:
            self._remove(self._cut_off())
        super().begin(spool)
        self._lease.begun()

    def clear(self, log: Journal, shards: Mapping[str, int]) -> None:
        """Make the place empty, where `force` allows it; then what an earlier run finished is uploaded."""
        self._names = None  # the last look was before all was read
        self._lease.note(shards, self.replaced(log.records[0]))
        super().clear(log, shards)
        for entry in self._waiting:
            self.deliver(entry)

    def deliver(self, entry: ShardEntry) -> None:
        """Upload a shard that has just been written, while others are; waits while too many are on their way."""
        self._uploads.add(entry, self._lease.raise_lost)
        self._sent[entry.name] = entry.filesize

    def publish(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Put the files that tell of the set, in this order, once all shards are there and the place is still this build's."""
        self._uploads.finish(self._lease.raise_lost)
        self._lease.check()
        self._names = None
        sizes = self._sizes()
        missing = [n for n, size in self._sent.items() if sizes.get(n) != size or index_name(n) not in sizes]
        if missing:
            raise StorageError(f"{self.target}: {listed(missing)} were uploaded and are gone; who removes them? Then --resume")
        for name, data in files:
            self._bucket.put(name, data)

    def finish(self) -> None:
        """Give the place free, and remove the journal and the spool: the set is complete."""
        self._lease.give_back()
        super().finish()
        self._made = True  # so that the work folder goes

    def _check(self) -> None:
        try:
            if self._resume or self._force or not self.journal_path.exists():
                self._lease.take(force=self._force)
            super()._check()
        except BaseException:
            self._leave(self._lease.give_back)
            raise

    def _leave(self, action: Callable[[], None]) -> None:
        """Do what is done with the lease while an error is on its way, which is the one to report; not for long."""
        with suppress(ShardifyError, OSError):
            objects.interruptibly(action, seconds=_LEAVE_SECONDS)

    def _sizes(self) -> dict[str, int]:
        if self._names is None:
            self._names = {name: size for name, size in self._bucket.sizes().items() if name not in (lease.NAME, lease.PROBE)}
        return self._names

    def _there(self) -> list[str]:
        return sorted(self._sizes())

    def _read(self, name: str) -> bytes:
        return self._bucket.read(name)

    def _is_file(self, name: str) -> bool:
        return not name.endswith("/")

    def _remove(self, names: Sequence[str]) -> bool:
        there = self._sizes()
        gone = [name for name in dict.fromkeys(names) if name in there and not name.endswith("/")]
        manifests = [name for name in gone if name.endswith(manifest_name(""))]
        for some in (manifests, [name for name in gone if name not in manifests]):
            if some:
                self._bucket.delete(some)
        self._names = None
        return bool(gone)

    def _cut_off(self) -> list[str]:
        shards, remove = self._lease.left
        return [*super()._cut_off(), *(names_of(shards) if shards else ()), *remove]
