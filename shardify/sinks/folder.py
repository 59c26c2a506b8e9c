"""The folder that a set is built in: one build at a time, nobody's files overwritten, what is done kept for a build that goes on.

new      wants an empty folder
force    wants a set as its manifests name it, or what a cut-off build's journal names; removed when the new one is ready to
         be written, not before
resume   wants a journal (or an empty folder)
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shardify import journal
from shardify.durable import PROBE, check_writable, make_folder, sync_folder, write_file
from shardify.errors import FormatError, SettingsError, naming
from shardify.format import card, manifest
from shardify.format.manifest import ShardEntry
from shardify.format.names import PARTIAL, index_name, manifest_name, parse_shard_name, shard_name
from shardify.journal import Journal, Record

_SHOWN = 10  # names a message lists


class FolderSink:
    """A folder, locked and checked while the `with` block runs.

    Entering raises SettingsError for a folder that can't be used as asked, or that another build writes to. A block that raises
    leaves nothing of what it wrote, nor a folder it made, unless `keeps` is set: then it leaves what `--resume` goes on from.
    """

    def __init__(self, folder: Path, splits: Sequence[str], *, force: bool = False, resume: bool = False) -> None:
        self.folder = folder
        self.target: object = folder  # where the finished set lies, as messages name it
        self.journal_path = folder / journal.NAME
        self.keeps = False
        self._splits = frozenset(splits)
        self._force, self._resume = force, resume
        self._made = False
        self._lock = -1
        self._spool: Path | None = None  # this build's, from `begin` on
        self._cleared = self._replaced = False

    def __enter__(self) -> FolderSink:
        with naming(self.folder):
            self._open()
            try:
                self._check()
                check_writable(self.folder)
                self.keeps = self.resumes
            except BaseException:
                self._close()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self.keeps:
            error.add_note(f"what is done is kept in {self.folder}: go on with --resume (or begin anew with --force)")
        elif error is not None and self._spool is not None:
            with suppress(OSError):  # the first error is the one to report
                self._remove_written(self._spool)
        if error is not None and self._replaced:
            gone = "--force removed it before this one was written"
            error.add_note(
                f"the set that was in {self.target} is gone: {gone}{'; --resume finishes this one' if self.keeps else ''}"
            )
        self._close()

    @property
    def resumes(self) -> bool:
        """Whether a build that was cut off is to go on here."""
        return self._resume and self.journal_path.exists()

    @property
    def place(self) -> int:
        """What tells this folder from a copy of it."""
        return self.folder.stat().st_ino

    def is_place_of(self, header: Record) -> bool:
        """Tell whether a journal was begun here, and not in a folder that this one is a copy of."""
        return bool(header.facts["place"] == self.place)

    def spool_of(self, header: Record) -> Path:
        """Return the folder of the spool that a journal's first record names; the one within moves with the output folder."""
        return self.folder / str(header.facts["spool"])

    def replaced(self, header: Record | None = None) -> list[str]:
        """Return the names of the set that `force` removes, now or (`header`) when a build that goes on was begun."""
        if header is not None:
            there = set(self._there())
            return [name for name in header.facts["replaces"] if name in there]
        return self._look()[2] if self._force else []

    def begin(self, spool: Path) -> None:
        """Remove what a cut-off build left, where `force` allows it; from now on this build's files are in the folder."""
        if not self.resumes:
            with naming(self.folder):
                records = self._records()
                for name in written_names(records):
                    self._unlink(name)
                for folder in (spool, *(self.spool_of(header) for header in records[:1] if self.is_place_of(header))):
                    if folder.name.startswith(journal.SPOOL):
                        shutil.rmtree(folder, ignore_errors=True)
                self._unlink(journal.NAME)
        self._spool = spool

    def clear(self, log: Journal, shards: Mapping[str, int]) -> None:
        """Make the folder empty, where `force` allows it: called when all is ready to be written, not before.

        The journal gets the names of what goes, and of what comes: `shards` for each split.
        """
        cleared = {record.kind: record for record in log.records if record.kind in ("clear", "cleared")}
        if "cleared" not in cleared:
            known = cleared.get("clear")
            old = self._replaceable(log.records[0], shards) if known is None else list(known.facts["remove"])
            self.keeps = True  # else what is left of the old set would have no name
            log.append(Record("clear", {"remove": old, "shards": dict(shards)}), durable=True)
            self._replaced = self._remove(old) or self._replaced
            log.append(Record("cleared", {}), durable=True)  # only now may files of these names be the new set's
        self._cleared = True

    def _replaceable(self, header: Record, shards: Mapping[str, int]) -> list[str]:
        """Return the names that go; raises SettingsError where a file that came meanwhile has a name that the new set needs."""
        old = self.replaced(header)
        needed = set(names_of(shards)) - set(old)
        taken = [name for name in self._there() if name in needed]
        if taken and not self._resume:  # there they are what a journal that was damaged has forgotten
            raise SettingsError(f"{self.target}: {listed(taken)} appeared there meanwhile; remove what isn't needed and --resume")
        return old

    def whole(self, entries: Sequence[ShardEntry]) -> set[str]:
        """Return the names of those shards of a journal that are there whole, with their indexes."""
        return {entry.name for entry in entries if self._is_whole(entry)}

    def local_bytes(self, names: Iterable[str]) -> int:
        """Return what files of the set take in the folder; those that aren't there take nothing."""
        return sum(path.stat().st_size for name in names if (path := self.folder / name).is_file())

    def deliver(self, entry: ShardEntry) -> None:
        """Take a shard that has just been written into the folder: here it lies where it belongs."""

    def publish(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Put the files that tell of the set, in this order, once all shards are there."""
        for name, data in files:
            write_file(self.folder / name, data)

    def finish(self) -> None:
        """Remove the journal and the spool: the set is complete."""
        with naming(self.folder):
            if self._spool is not None:
                shutil.rmtree(self._spool, ignore_errors=True)
            self.journal_path.unlink(missing_ok=True)
            sync_folder(self.folder)

    def _there(self) -> list[str]:
        """Return the names of what lies where the set belongs, sorted."""
        return sorted(path.name for path in self.folder.iterdir())

    def _read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def _remove(self, names: Sequence[str]) -> bool:
        """Remove files of a set, for good; tell whether one was there."""
        with naming(self.folder):
            removed = [self._unlink(name) for name in names]
            sync_folder(self.folder)
        return any(removed)

    def _is_whole(self, entry: ShardEntry) -> bool:
        path = self.folder / entry.name
        if path.with_name(path.name + PARTIAL).exists():  # noted, and killed before it got its name
            return False
        return path.is_file() and path.stat().st_size == entry.filesize and (self.folder / index_name(entry.name)).is_file()

    def _unlink(self, name: str) -> bool:
        if "/" in name or name in ("", ".", ".."):  # what a journal names may not lead out of its folder
            raise SettingsError(f"{self.journal_path}: names {name!r}, which isn't in its folder; remove it yourself")
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _open(self) -> None:
        try:
            self._made = make_folder(self.folder)
        except FileExistsError:
            raise SettingsError(f"{self.folder} is a file, not a folder; choose another one with --out") from None
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks on folders (NFS): two builds at once are then the user's to avoid
            self._made = False  # the other build's now, even if this one was first to make it
            self._close()
            raise SettingsError(f"another build writes to {self.target}; wait for it, or choose another folder (--out)") from None

    def _check(self) -> None:
        """Raise SettingsError where the folder holds what this build may not have there."""
        if self.resumes:
            return
        if self.journal_path.exists() and not self._force and self._spool is None:
            raise SettingsError(f"{self.target} holds a build that was cut off; go on with --resume, or begin anew with --force")
        present, written, ours = self._look()
        unknown = [name for name in present if name not in written and name not in ours]
        if unknown or (ours and not self._force):
            raise SettingsError(self._refusal(present, ours, unknown))

    def _look(self) -> tuple[list[str], set[str], list[str]]:
        """Return the names that are there, those that a cut-off build may have written, and those of a set.

        The set's manifests come first: what remains when their removal is cut short isn't taken for a set.
        """
        present = self._there()
        written = {*self._cut_off(), journal.NAME, f"{journal.NAME}.partial", journal.SPOOL, PROBE}
        return present, written, self._ours([name for name in present if name not in written])

    def _cut_off(self) -> list[str]:
        """Return the names that a cut-off build may have written."""
        return list(written_names(self._records()))

    def _records(self) -> tuple[Record, ...]:
        """Return what the journal there says; nothing where there is none that can be read."""
        try:
            return journal.read(self.journal_path) if self.journal_path.exists() else ()
        except SettingsError:
            return ()

    def _refusal(self, present: Sequence[str], ours: Sequence[str], unknown: Sequence[str]) -> str:
        if self._force:
            return (
                f"{self.target} holds files that no manifest or journal there names ({listed(unknown)}), and --force removes none "
                "of those; remove them yourself, or choose another folder (--out)"
            )
        what = "holds a set" if any(name.endswith(manifest_name("")) for name in ours) else "isn't empty"
        resume = "; there is no journal of a build to go on with" if self._resume else ""
        return f"{self.target} {what} ({listed(present)}){resume}; choose another folder (--out), or replace a set with --force"

    def _ours(self, present: Sequence[str]) -> list[str]:
        named: list[str] = []
        for name in present:
            if name.endswith(manifest_name("")):
                with suppress(FormatError):
                    shards = [shard.url for shard in manifest.load(self._read(name), name).shards if parse_shard_name(shard.url)]
                    named += [name, *shards, *(index_name(shard) for shard in shards)]
        if card.NAME in present and card.is_ours(self._read(card.NAME)):
            named.append(card.NAME)
        named.sort(key=lambda name: not name.endswith(manifest_name("")))
        allowed = dict.fromkeys([*named, *(name + PARTIAL for name in named)])
        here = set(present)
        return [name for name in allowed if name in here and self._is_file(name)]

    def _is_file(self, name: str) -> bool:
        path = self.folder / name
        return path.is_file() and not path.is_symlink()

    def _remove_written(self, spool: Path) -> None:
        """Remove this run's files: once cleared the folder is its own."""
        if self._cleared:
            for path in sorted(self.folder.iterdir(), key=lambda path: not path.name.endswith(manifest_name(""))):
                if self._is_written(path.name.removesuffix(PARTIAL)):
                    path.unlink()
        shutil.rmtree(spool, ignore_errors=True)
        self._unlink(journal.NAME)
        self._unlink(f"{journal.NAME}.partial")

    def _is_written(self, name: str) -> bool:
        shard = parse_shard_name(name.removesuffix(".idx") + ".tar" if name.endswith(".idx") else name)
        if shard is not None:
            return shard[0] in self._splits
        return name == card.NAME or name in {manifest_name(split) for split in self._splits}

    def _close(self) -> None:
        if self._made:
            with suppress(OSError):  # not empty: it stays
                self.folder.rmdir()
        os.close(self._lock)


class FolderView:
    """What lies in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sizes(self) -> dict[str, int]:
        """Return the files' bytes by name, folders with a slash; nothing where there is no folder. Raises OSError."""
        if not self._folder.exists():
            return {}
        return {path.name + "/" * path.is_dir(): path.stat().st_size if path.is_file() else 0 for path in self._folder.iterdir()}

    def read(self, name: str) -> bytes:
        """Return a file's bytes; raises OSError."""
        return (self._folder / name).read_bytes()


def written_names(records: Sequence[Record]) -> Iterator[str]:
    """Yield the names that a journal's build may have written, manifests first, and those that it was about to remove."""
    for record in records:
        if record.kind == "clear":
            yield from names_of(record.facts["shards"])
            yield from (name for file in record.facts["remove"] for name in (file, file + PARTIAL))


def names_of(shards: Mapping[str, int]) -> Iterator[str]:
    """Yield the names of a set of so many shards a split, and of its half-written files."""
    tars = [shard_name(split, number) for split, count in shards.items() for number in range(count)]
    for name in (*map(manifest_name, shards), card.NAME, *tars, *map(index_name, tars)):
        yield from (name, name + PARTIAL)


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
