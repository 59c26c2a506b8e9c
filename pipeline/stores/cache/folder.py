"""The folder of objects that were fetched: bounded, shared by any number of processes, nothing in it that a kill can spoil.

    <hash of the URL less its secrets>.object    one object each (layout.py)
    <hash of a set>.set                          held open by each process that reads the set; its name and URLs' place within

Within a set its readers decide what stays. Between sets the one that was used longest ago goes first, and none that is being read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pipeline.errors import ChangedError, SourceError
from pipeline.machine import available_memory, file_system, machine_id, make_folder
from pipeline.stores import locks
from pipeline.stores.cache import layout
from pipeline.stores.cache.entry import Entry
from pipeline.stores.cache.layout import Facts, Head
from pipeline.stores.cache.naming import publish, remove
from pipeline.stores.copies import PAGE, punch

# File systems that other machines see too: neither maps nor the marks of a boot are of this machine alone there.
_NETWORKS: Final = re.compile(
    r"nfs4?|cifs|smb3|smbfs|lustre|ceph|gpfs|beegfs|afs|glusterfs|ocfs2|gfs2|fuse\..+|9p|virtiofs|panfs|wekafs|pvfs2|orangefs"
)
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_OBJECT, _SET, _TEMPORARY = ".object", ".set", ".tmp"
_LEFT_BYTES = 256 * 2**20  # of the disk, for others
_DEBRIS_SECONDS = 60.0  # a file that is made has its name within milliseconds
_LOOKS = 5  # at a head before it is called damaged
_REMOVED_SECONDS, _REMOVED_PAUSE = 1.0, 0.005  # until what another window removes has gone
_OPENINGS = 1000  # how often an object may be taken away while it is opened
DEFAULT_MOST = 64 * 2**30


def default_folder() -> Path:
    """Return the user's cache folder for objects; raises SourceError where there is neither XDG_CACHE_HOME nor a home."""
    caches = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))  # noqa: PTH111  (Path's own raises without a home)
    for base in caches:
        if os.path.isabs(base):  # noqa: PTH117  (the specification: a relative one is ignored)
            return Path(base) / "shardify" / "shards"
    raise SourceError(
        "no cache folder for remote shards, as there is no home and no XDG_CACHE_HOME: give LoaderOptions(cache_dir=...)"
    )


def folder_of(given: str | os.PathLike[str] | None) -> Path:
    """Return where this machine keeps what it fetches: the folder that is named, or the default one.

    Where other machines see that folder too, it is one of this machine's own within. Raises SourceError where there is neither.
    """
    folder = default_folder() if given is None else Path(given).absolute()
    if not _NETWORKS.fullmatch(file_system(str(folder))):
        return folder
    name = "-".join(filter(None, (socket.gethostname(), machine_id()[:8])))
    return folder if folder.name == name else folder / name


def object_path(folder: str, url: str) -> str:
    """Return where an object lies in a cache folder, or would; `url` without its secrets."""
    return os.path.join(folder, f"{_hashed(url)}{_OBJECT}")  # noqa: PTH118  (a worker asks for one a shard)


@dataclass(frozen=True, slots=True)
class Held:
    """What the cache holds of a set: objects, bytes on the disk, when it was used last, and whether a living process reads it.

    `where`: the folder of one of its objects' URLs, without secrets, "" where none can be told.
    """

    set: str
    objects: int
    bytes: int
    used_ns: int
    reading: bool
    where: str = ""


class Lease:
    """Says that this process reads a set, for as long as it lives or until `close`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def lost(self) -> bool:
        """Whether the file that says so has been removed, so that nobody sees it."""
        return self._descriptor >= 0 and os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Say so no longer; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Cache:
    """A cache folder; `limit`: bytes on its disk, None for half of what is free (with what it holds), at most 64 GiB."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        """Make the folder where there is none; raises SourceError where it can't be used."""
        self.folder = folder_of(None) if folder is None else folder.absolute()
        with _using(self.folder):
            self.make()
            if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self.limit = self._default_limit() if limit is None else limit

    def _default_limit(self) -> int:
        """Return half of what is free, at most 64 GiB; of a folder in memory, half of what this job may take of it."""
        free, used = self._free(), self.used_bytes()
        if file_system(str(self.folder)) in _IN_MEMORY:
            free = min(free, available_memory())
        return min(DEFAULT_MOST, (free + used) // 2)

    def path(self, url: str) -> str:
        """Return where an object lies, or would; `url` without its secrets."""
        return object_path(str(self.folder), url)

    def make(self) -> None:
        """Make the folder again if it was removed; raises SourceError where it can't be."""
        with _using(self.folder):
            make_folder(self.folder)

    def lease(self, set_name: str) -> Lease:
        """Say that this process reads a set; raises SourceError where the folder can't be written to."""
        path = self.folder / f"{_hashed(set_name)}{_SET}"
        while True:
            with _using(self.folder):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                with _using(self.folder):
                    locks.hold(descriptor, 0, 1)
                    if os.fstat(descriptor).st_nlink:
                        return Lease(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def open(self, facts: Facts) -> Entry:
        """Open an object, made where there is none; raises ChangedError where another process reads another version, OSError."""
        path, until = self.path(facts.url), time.monotonic() + _REMOVED_SECONDS
        for _ in range(_OPENINGS):
            entry = self._load(path, facts, until)
            if entry is not None:
                entry.begin(facts.set)
                if not entry.removed:
                    return entry
                entry.close()
        raise OSError(errno.EBUSY, f"{path}: is taken away again and again; is the cache folder cleared by something else?")

    def find(self, url: str) -> Facts | None:
        """Return what the folder says of an object, None where it has none; asks nobody else."""
        with suppress(OSError):
            descriptor = os.open(self.path(url), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                head = layout.read(descriptor)
                return head.facts if head else None
            finally:
                os.close(descriptor)
        return None

    def _load(self, path: str, facts: Facts, until: float) -> Entry | None:
        try:
            for _ in range(_LOOKS):
                with _own(Path(path)):
                    entry = Entry.load(path)
                if entry is not None:
                    break
                time.sleep(0.001)  # another process may be writing its head
        except FileNotFoundError:
            self._make(path, facts)
            return None
        if entry is None or not facts.is_version_of(entry.facts):
            if entry is not None:
                entry.close()
            if remove(Path(path)) is None:
                if time.monotonic() < until:  # another window removes it, or looks at it
                    time.sleep(_REMOVED_PAUSE)
                    return None
                raise ChangedError(
                    f"{facts.url}: is another version than the one that a running job reads from the cache {self.folder}; end that "
                    "job, or give the new version a new name"
                )
            return None
        return entry

    def _make(self, path: str, facts: Facts) -> None:
        """Make an object's file, whole at once: whoever sees it sees its head."""
        temporary = self.folder / f".{secrets.token_hex(8)}{_TEMPORARY}"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            length = layout.file_size(facts.size)
            os.ftruncate(descriptor, length)
            at = layout.table_at(facts.size)
            _reserve(descriptor, at, length - at)  # it is written through a map: a hole on a full disk would be a bus error
            os.pwrite(descriptor, layout.dump(Head(facts, time.time_ns(), layout.boot_id(), vouched=False)), length - PAGE)
            publish(temporary, path)
        finally:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)

    def gives_back(self) -> bool:
        """Tell whether the file system gives parts of files back; without that only a set that fits whole can be read.

        Raises SourceError where the folder can't be written to.
        """
        temporary = self.folder / f".{secrets.token_hex(8)}{_TEMPORARY}"
        with _using(self.folder):
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, bytes(2 * layout.CHUNK), 0)
                return _can_punch(descriptor)
            finally:
                os.close(descriptor)
                temporary.unlink(missing_ok=True)

    def used_bytes(self) -> int:
        """Return what all objects take on the disk."""
        return sum(size for _, size, _ in self._objects())

    def room(self) -> int:
        """Return how many bytes more may be fetched now: of the limit, and of what is free on the disk; below 0 for too much."""
        return min(self.limit - self.used_bytes(), self._free() - _LEFT_BYTES)

    def said_of(self, room: int) -> str:
        """Say how much room there is, and what takes the rest."""
        read = sum(held.bytes for held in self.sets() if held.reading)
        return (
            f"{max(0, room) / 2**20:.0f} MiB of room ({self.limit / 2**20:.0f} MiB are allowed, jobs read {read / 2**20:.0f}; "
            f"{self._free() / 2**20:.0f} MiB are free on the disk, of which {_LEFT_BYTES / 2**20:.0f} are left to others)"
        )

    def make_room(self, wanted: int) -> bool:
        """Remove sets that nobody reads, used longest ago first, until so many bytes may be fetched; tell if they may."""
        room = self.room()
        if room >= wanted:
            return True
        for held in self.sets():
            if held.reading:
                continue
            self._remove_set(held.set)
            room = self.room()
            if room >= wanted:
                return True
        return False

    def sets(self) -> list[Held]:
        """Return what the cache holds, the set that was used longest ago first."""
        found: dict[str, Held] = {}
        for path, size, head in self._heads():
            name = head.facts.set if head else ""
            before = found.get(name, Held(name, 0, 0, 0, reading=False))
            used = max(before.used_ns, head.used_ns if head else 0)
            where = before.where or (head.facts.url.rpartition("/")[0] if head else "")
            found[name] = Held(name, before.objects + 1, before.bytes + size, used, before.reading, where)
            del path
        held = [replace(h, reading=self._is_read(h.set)) for h in found.values()]
        return sorted(held, key=lambda h: h.used_ns)

    def bytes_of(self, set_name: str) -> int:
        """Return what a set's objects take on the disk."""
        return sum(held.bytes for held in self.sets() if held.set == set_name)

    def clear(self) -> int:
        """Remove all that no living process reads; returns how many bytes that were."""
        freed = sum(self._remove_set(held.set) for held in self.sets() if not held.reading)
        for path in self.folder.glob(f"*{_SET}"):  # of processes that ended before they had fetched anything
            with suppress(OSError):
                remove(path)
        return freed

    def _remove_set(self, name: str) -> int:
        """Remove a set's objects, unless someone reads them; returns their bytes."""
        freed = 0
        for path, size, head in self._heads():
            if (head.facts.set if head else "") == name and not self._is_read(name):
                freed += size if remove(path) else 0
        with suppress(OSError):
            remove(self.folder / f"{_hashed(name)}{_SET}")
        return freed

    def _is_read(self, name: str) -> bool:
        try:
            descriptor = os.open(self.folder / f"{_hashed(name)}{_SET}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return locks.is_held(descriptor, 0, 1)
        finally:
            os.close(descriptor)

    def _objects(self) -> Iterator[tuple[Path, int, float]]:
        """Yield the objects' files, what each takes on the disk, and when it was changed; removes what killed processes left."""
        with os.scandir(self.folder) as found:
            for item in found:
                with suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
                        continue
                    if item.name.endswith(_OBJECT):
                        yield Path(item.path), status.st_blocks * 512, status.st_mtime
                    elif item.name.endswith(_TEMPORARY) and time.time() - status.st_mtime > _DEBRIS_SECONDS:
                        Path(item.path).unlink(missing_ok=True)

    def _heads(self) -> Iterator[tuple[Path, int, Head | None]]:
        for path, size, _ in list(self._objects()):
            with suppress(FileNotFoundError), _own(path), path.open("rb") as file:
                yield path, size, layout.read(file.fileno())

    def _free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


@contextmanager
def _using(folder: Path) -> Iterator[None]:
    """Raise SourceError for an OSError, a full disk or quota among them."""
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"{folder}: can't be used as the cache of remote shards ({error.strerror}); give LoaderOptions(cache_dir=...) on "
            "another disk, or make this one usable"
        ) from error


@contextmanager
def _own(path: Path) -> Iterator[None]:
    """Raise SourceError where a file of the folder may not be opened."""
    try:
        yield
    except PermissionError as error:
        raise SourceError(
            f"{path}: can't be opened ({error.strerror}); a cache folder is one user's: give LoaderOptions(cache_dir=...), "
            "a folder of your own"
        ) from error


def _reserve(descriptor: int, start: int, length: int) -> None:
    """Have blocks for a range of a file that has none yet; raises OSError on a full disk."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, length)
    else:  # macOS
        os.pwrite(descriptor, bytes(length), start)


def _can_punch(descriptor: int) -> bool:
    try:
        punch(descriptor, 0, layout.CHUNK)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        return False
    return True


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
