"""Reads the samples of tars that have no index, and remembers them in the user's cache folder, so that headers are read once.

    $XDG_CACHE_HOME/shardify/indexes/<xx>/<hash of the path>-<size>-<mtime>-<samples>.json.z

An entry's name says to which state of which tar it belongs and how many samples that has: names alone tell what is known of a
whole set. Entries appear by rename, any number of processes may read and write them, and one that can't be read is as
good as none.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pipeline.errors import ShardError
from pipeline.machine import make_folder, open_regular
from shardify.errors import FormatError
from shardify.format import tar
from shardify.format.names import split_field

log = logging.getLogger("pipeline")

UNCOUNTED = -1  # samples of a shard that no index and no manifest tells of
LIMIT_BYTES = 2**30  # 16 bytes a sample of two members (60,000 of 1,000 tars): the room for 60 million
_SETTLED_SECONDS = 2.0  # FAT counts time in steps of 2 s: a younger tar could still change and look the same
_DEBRIS_SECONDS = 3600.0  # temporary files that a killed process left
_PRUNE_EVERY = 64  # a look through the folder costs milliseconds: not at each entry
_END, _TEMPORARY = ".json.z", ".tmp"


@dataclass(frozen=True, slots=True)
class Stamp:
    """The state of a tar: its size in bytes, and when it was last changed in nanoseconds; of a remote one what its server says."""

    size: int
    mtime_ns: int = 0
    version: str = ""

    @classmethod
    def of(cls, path: str) -> Self:
        """Look at a file; raises ShardError where it can't be seen."""
        try:
            found = os.stat(path)  # noqa: PTH116
        except OSError as error:
            raise ShardError(f"{path}: can't be read ({error.strerror})") from error
        if not stat.S_ISREG(found.st_mode):
            raise ShardError(f"{path}: can't be read (not a regular file)")
        return cls(found.st_size, found.st_mtime_ns)


def default_folder() -> Path | None:
    """Return the user's cache folder for indexes: below XDG_CACHE_HOME where that is an absolute path, else below ~/.cache.

    None where neither is known: a user may have no home.
    """
    caches = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))  # noqa: PTH111  (Path's own raises without a home)
    # The specification: a relative one is ignored.
    return next((Path(base) / "shardify" / "indexes" for base in caches if os.path.isabs(base)), None)  # noqa: PTH117


class IndexCache:
    """The remembered indexes of tars; without a folder, or where it can't be written, it remembers nothing, and says so once."""

    def __init__(self, folder: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder, self._limit = folder or default_folder(), limit_bytes
        self._puts, self._told = 0, False

    @property
    def remembers(self) -> bool:
        """Whether its folder can be written to."""
        if self._folder is None:
            return False
        with suppress(OSError):
            make_folder(self._folder)
        return os.access(self._folder, os.W_OK | os.X_OK)

    def count(self, tars: Iterable[tuple[str, Stamp]]) -> list[int | None]:
        """Return the samples of each tar, None where they aren't known; opens no file."""
        names = itertools.chain.from_iterable(map(_listing, _paths(self._folder)))
        known = {entry[:3]: int(entry[3]) for entry in map(_parse, names) if entry}
        return [known.get(_key(path, stamp)) for path, stamp in tars]

    def find(self, path: str, stamp: Stamp) -> tuple[int, str] | None:
        """Return the samples of a tar and the file that holds them, for `load`; None where they aren't known."""
        if self._folder is None:
            return None
        key = _key(path, stamp)
        shelf = _shelf(self._folder, key[0])
        return next(((int(e[3]), str(shelf / n)) for n in _listing(shelf) if (e := _parse(n)) and e[:3] == key), None)

    def get(self, path: str, stamp: Stamp) -> list[tar.SampleRecord] | None:
        """Return the samples of a tar, None where no readable entry has them."""
        if self._folder is None:
            return None
        key = _key(path, stamp)
        shelf = _shelf(self._folder, key[0])
        for name in _listing(shelf):
            if (entry := _parse(name)) and entry[:3] == key and (records := _load(shelf / name)) and len(records) == int(entry[3]):
                with suppress(OSError):
                    os.utime(shelf / name)  # what was used last is kept longest
                return records
        return None

    def put(self, path: str, stamp: Stamp, records: Sequence[tar.SampleRecord]) -> None:
        """Remember a tar's samples, unless the tar has changed since `stamp` or may still do so unseen."""
        if self._folder is None:
            self._tell("no cache folder, as XDG_CACHE_HOME isn't set and there is no home")
            return
        if not records or not (_is_url(path) or (time.time() - stamp.mtime_ns / 1e9 >= _SETTLED_SECONDS and _now(path) == stamp)):
            return
        key = _key(path, stamp)
        shelf, name = _shelf(self._folder, key[0]), "-".join((*key, str(len(records)))) + _END
        try:
            make_folder(shelf)
            _write(shelf / name, _dump(records))
            for other in _listing(shelf):  # of earlier states of this tar
                if other.startswith(f"{key[0]}-") and other != name:
                    (shelf / other).unlink(missing_ok=True)
        except OSError as error:
            self._tell(f"{self._folder}: can't be written ({error.strerror})")
            return
        if self._puts % _PRUNE_EVERY == 0:
            self.prune()
        self._puts += 1

    def prune(self) -> None:
        """Remove what was used longest ago where all entries together exceed the limit, and what killed processes left."""
        held: list[tuple[float, int, Path]] = []
        for path in itertools.chain.from_iterable(map(_paths, _paths(self._folder))):
            with suppress(OSError):
                found = path.stat()
                if path.suffix == _TEMPORARY and time.time() - found.st_mtime > _DEBRIS_SECONDS:
                    path.unlink()
                held.append((found.st_mtime, found.st_size, path))
        over = sum(size for _, size, _ in held) - self._limit
        for _, size, path in sorted(held):
            if over <= 0:
                return
            with suppress(OSError):
                path.unlink()
            over -= size

    def _tell(self, why: str) -> None:
        if not self._told:
            log.info("%s: tars without an index are scanned each time", why)
        self._told = True


def _shelf(folder: Path, hashed: str) -> Path:
    """Return the folder of an entry: of 256, so that none has many names to look through."""
    return folder / hashed[:2]


def _now(path: str) -> Stamp | None:
    with suppress(ShardError):
        return Stamp.of(path)
    return None


def _key(path: str, stamp: Stamp) -> tuple[str, str, str]:
    name = f"{path}\0{stamp.version}" if _is_url(path) else os.path.abspath(path)  # noqa: PTH100
    hashed = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return hashed, f"{stamp.size:x}", f"{stamp.mtime_ns & 2**64 - 1:x}"


def _is_url(path: str) -> bool:
    return "://" in path


def _parse(name: str) -> tuple[str, str, str, str] | None:
    """Return (hash, size, mtime, samples) of an entry's name, None for any other."""
    match name.removesuffix(_END).split("-"):
        case [hashed, size, mtime, samples] if name.endswith(_END) and samples.isascii() and samples.isdecimal():
            return hashed, size, mtime, samples
    return None


def _listing(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  (names alone, not a Path for each)
    except OSError:
        return []


def _paths(folder: Path | None) -> list[Path]:
    return [] if folder is None else [folder / name for name in _listing(folder)]


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{secrets.token_hex(8)}{_TEMPORARY}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _dump(records: Iterable[tar.SampleRecord]) -> bytes:
    """Return samples as compressed JSON: DALI's layout can't hold names with blanks; zlib's checksum finds damage."""
    return zlib.compress(json.dumps([[(m.name, m.offset, m.size) for m in r.members] for r in records]).encode(), 1)


def _load(path: Path) -> list[tar.SampleRecord] | None:
    """Return an entry's samples, None for one that can't be read."""
    try:
        return [_record([tar.Member(*member) for member in members]) for members in json.loads(zlib.decompress(path.read_bytes()))]
    except (OSError, ValueError, TypeError, zlib.error):
        return None


def is_entry(path: str) -> bool:
    """Tell whether a path is that of a remembered index."""
    return path.endswith(_END)


def load(path: str) -> list[tar.SampleRecord]:
    """Return the samples that a file of the cache folder holds; raises ShardError where it can't be read (any more)."""
    records = _load(Path(path))
    if records is None:
        raise ShardError(f"{path}: what was remembered of a tar can't be read, or was removed to make room; make the loader anew")
    with suppress(OSError):
        os.utime(path)
    return records


def _record(members: Sequence[tar.Member]) -> tar.SampleRecord:
    named = [split_field(member.name) for member in members]
    fields = tuple(name[1] for name in named if name)
    if not named or named[0] is None or len(fields) < len(named):
        raise ValueError("no sample")
    return tar.SampleRecord(named[0][0], fields, tuple(members))


def cache() -> IndexCache:
    """Return this process's cache of indexes."""
    return _cache_in(default_folder())


@functools.lru_cache
def _cache_in(folder: Path | None) -> IndexCache:
    return IndexCache(folder)


def headers(path: str) -> Iterator[tar.SampleRecord]:
    """Yield the samples of a local tar by its headers, as they are read; raises ShardError for a damaged tar."""
    try:
        with open(open_regular(path), "rb", buffering=0) as file:  # noqa: PTH123  (unbuffered: a buffer would be read anew for each header)
            yield from tar.samples(file, os.fstat(file.fileno()).st_size, path)
    except FormatError as error:
        raise ShardError(str(error)) from error
    except OSError as error:
        raise ShardError(f"{path}: can't be read ({error.strerror})") from error


def scan(path: str) -> list[tar.SampleRecord]:
    """Return the samples of a local tar that has no index: remembered, or by its headers; raises ShardError as `headers` does."""
    stamp = Stamp.of(path)
    known = cache().get(path, stamp)
    if known is None:
        known = list(headers(path))
        cache().put(path, stamp, known)
    return known
