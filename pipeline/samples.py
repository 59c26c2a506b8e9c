"""Reads raw samples by their place in the set: (shard, index) -> {"__key__", "__url__", "jpg", "cls", ...}.

A shard's index is loaded when the first of its samples is wanted; shards and indexes that weren't used lately are
closed, so that a process holds few of either however large the set is.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pipeline.errors import ShardError
from pipeline.indexing import UNCOUNTED, headers, is_entry, load, scan
from pipeline.items import OnFault, Sample, Wanted, sample_bytes
from pipeline.listing import Listing, Records
from pipeline.machine import open_regular
from pipeline.spans import read_members, said_of_another
from pipeline.stores import Copied, Source
from pipeline.stores.cache import AbsentError, CachedFile, object_path
from pipeline.stores.local import LocalFile
from pipeline.stores.unpacking import kept_as
from shardify.errors import FormatError
from shardify.format import index as index_format
from shardify.format import tar
from shardify.format.names import index_name

T = TypeVar("T")

# Samples whose indexes are held: 20 MB of text and numbers. By number of shards it was too few for windows that span hundreds of
# small ones, and too many for large ones.
_INDEXED_SAMPLES = 2**18
_OPEN_FILES = 64
# Samples that a worker reads at a time. One by one costs 0.15 ms of CPU a picture of 100 KB, eight 0.09, sixteen 0.08.
_TOGETHER, _TOGETHER_BYTES = 8, 2**20
_REPLACE = "upload the right one, and take away what was kept of it by `python -m pipeline cache clear`"


@dataclass(frozen=True, slots=True)
class ShardFile:
    """What a worker knows of a shard: where it is, its samples and its size in bytes (0: unknown).

    `index`: where its index is, "" for beside it.
    Of a remote one both are URLs without secrets, `url` and `index_url` what is asked for; `sha256` in hex, `version`: its ETag or
    date, "": unknown.
    """

    path: str
    samples: int
    size: int
    index: str = ""
    url: str = field(default="", repr=False)
    index_url: str = field(default="", repr=False)
    sha256: str = ""
    version: str = ""


class Recent(Generic[T]):
    """Keeps the values of the keys used last, as many as `limit` holds; `drop` is called on those that go, `weigh` on all."""

    def __init__(
        self,
        limit: int,
        make: Callable[[int], T],
        drop: Callable[[T], None] | None = None,
        weigh: Callable[[T], int] = lambda _: 1,
    ) -> None:
        self._limit, self._make, self._drop, self._weigh = limit, make, drop, weigh
        self._held: OrderedDict[int, T] = OrderedDict()
        self._weight = 0

    def get(self, key: int) -> T:
        """Return the value of `key`, made if it isn't held."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        value = self._make(key)
        self._held[key] = value
        self._weight += self._weigh(value)
        while self._weight > self._limit and len(self._held) > 1:
            self._let_go(self._held.popitem(last=False)[1])
        return value

    def forget(self, key: int) -> None:
        """Drop the value of a key, if it is held."""
        if key in self._held:
            self._let_go(self._held.pop(key))

    def clear(self) -> None:
        """Drop all."""
        while self._held:
            self._let_go(self._held.popitem()[1])

    def _let_go(self, old: T) -> None:
        self._weight -= self._weigh(old)
        if self._drop:
            self._drop(old)


class ShardReader:
    """Reads samples of a set of shards; lives in one process (it starts empty wherever it is sent)."""

    def __init__(self, shards: Sequence[ShardFile], fields: Wanted, cache: str = "") -> None:
        """Take the shards and the wanted fields; `cache`: the folder that remote ones are fetched into."""
        self._shards = shards
        self._wanted = fields
        self._cache = cache
        self._start()

    def _start(self) -> None:
        self._files: Recent[Source] = Recent(_open_files(), self._open, lambda file: file.close())
        self._indexes: Recent[Records] = Recent(_INDEXED_SAMPLES, self.records, weigh=len)
        self._owner = os.getpid()

    @property
    def remote(self) -> bool:
        """Whether the shards are fetched by another process, and read from a cache folder."""
        return bool(self._cache)

    def __getstate__(self) -> dict[str, Any]:
        return {"_shards": self._shards, "_wanted": self._wanted, "_cache": self._cache}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def close(self) -> None:
        """Close all files; reading opens them anew."""
        self._files.clear()
        self._indexes.clear()

    def read(self, shard: int, at: int, copied: Copied | None = None) -> Sample:
        """Return a raw sample: "__key__", "__url__", "__offset__" of the picture, and the bytes of picture and label by field.

        They are views where pixels are wanted, which are made of them at once, and else bytes; from the shard's copy, where
        `copied` has one. Raises ShardError with the shard, and the sample where it is known.
        """
        if os.getpid() != self._owner:  # forked: the parent's descriptors share nothing that matters, but its caches are its own
            self._start()
        return self.read_record(shard, self._indexes.get(shard)[at], copied, indexed=True)

    def read_record(self, shard: int, record: tar.SampleRecord, copied: Copied | None = None, *, indexed: bool = False) -> Sample:
        """Return the raw sample that a record tells of, as `read` does; the shard's index needn't be known.

        `indexed`: the record is an index's, which may belong to another tar, and no header that was read just now.
        """
        chosen = choose(record, self._wanted, self._shards[shard].path)
        try:
            return self._read(shard, record.key, chosen, copied, indexed)
        except AbsentError:
            self._files.forget(shard)  # it may have been taken away, and made anew
        return self._read(shard, record.key, chosen, copied, indexed)

    def _read(self, shard: int, key: str, chosen: Sequence[tuple[str, tar.Member]], copied: Copied | None, indexed: bool) -> Sample:
        try:
            file = self.source(shard)
            copy = copied.of(shard, file) if copied is not None else None
            spans = [(member.offset, member.size) for _, member in chosen]
            paths = [f"{key}.{field}" for field, _ in chosen] if indexed else None
            parts = read_members(file if copy is None else copy, spans, paths)
        except AbsentError:
            raise
        except ShardError as error:
            raise ShardError(f"{error} (sample {key!r})") from error
        if parts is None:
            raise ShardError(said_of_another(self._shards[shard].path, key, chosen[0][1].offset))
        return {
            "__key__": key,
            "__url__": self._shards[shard].path,
            "__offset__": chosen[0][1].offset,
            **{field: part if self._wanted.pixels else bytes(part) for (field, _), part in zip(chosen, parts, strict=True)},
        }

    def source(self, shard: int) -> Source:
        """Return an open shard; it is closed when others were used since."""
        if os.getpid() != self._owner:
            self._start()
        return self._files.get(shard)

    def has_index(self, shard: int) -> bool:
        """Tell whether a shard's samples are known from an index, and not from its headers as they come."""
        return self._shards[shard].samples != UNCOUNTED

    def size(self, shard: int) -> int:
        """Return a shard's size in bytes, as the set says it."""
        return self._shards[shard].size

    def open_anew(self, shard: int) -> Source:
        """Return an open shard, not as it was opened before: a file of the cache folder may have been taken away, and made anew."""
        self._files.forget(shard)
        return self.source(shard)

    def records(self, shard: int) -> Records:
        """Return a shard's samples by its index; raises ShardError where that doesn't belong to the tar, or to the set."""
        known = self._shards[shard]
        far = known.url and not os.path.isabs(known.index)  # noqa: PTH117  (a remote shard's index may lie on this machine)
        records = self._cached_index(known) if far else open_index(known.path, known.index)
        if len(records) != known.samples:
            raise ShardError(
                f"{known.path}: its index has {len(records)} samples, and the set counts {known.samples}; "
                "index and manifest don't belong together: copy or pack it again"
            )
        self._check_covered(records, shard)
        return records

    def _cached_index(self, known: ShardFile) -> Records:
        file = CachedFile(object_path(self._cache, known.index), known.index)
        try:
            return _parse(file.read(0, file.size), known.index)
        finally:
            file.close()

    def _open(self, shard: int) -> Source:
        known = self._shards[shard]
        if known.url:
            return CachedFile(object_path(self._cache, kept_as(known.path)), known.path)
        file = LocalFile(known.path)
        if known.size and file.size != known.size:
            file.close()
            raise ShardError(
                f"{known.path}: has {file.size} bytes, and its manifest says {known.size}; "
                "it was cut or replaced: copy or pack it again"
            )
        return file

    def _check_covered(self, records: Records, shard: int) -> None:
        """Raise ShardError where an index hides samples of its tar: one stands in it twice, or it ends long before the tar does.

        Something else may lie behind the last sample (a README, the padding of other tools): then the tar's own headers tell.
        """
        path, size = self._shards[shard].path, self.source(shard).size
        if isinstance(records, Listing) and len(records) and _fits([records[len(records) - 1]], size):
            return  # no sample begins where another does
        keys = [record.key for record in records]
        whole = _fits(records, size)
        if not whole:  # of a remote tar the headers aren't here to be walked
            whole = _end(records) <= size if self._shards[shard].url else keys == [r.key for r in headers(path)]
        if len(set(keys)) < len(keys) or not whole:
            raise ShardError(
                f"{path}: has {size} bytes, and its index lists {len(keys)} samples up to byte {_end(records)}, or one of them "
                f"twice; the index is of another tar: {_REPLACE if self._shards[shard].url else 'delete it, or pack again'}"
            )


def _end(records: Iterable[tar.SampleRecord]) -> int:
    return max((m.offset + tar.padded(m.size) for record in records for m in record.members), default=0)


def _fits(records: Iterable[tar.SampleRecord], size: int) -> bool:
    """Tell whether a tar of so many bytes ends behind these samples."""
    end = _end(records)
    return end <= size <= end + len(tar.END)


def _open_files() -> int:
    """Return how many shards a process may hold open: a quarter of its limit, at most 64."""
    try:
        import resource  # noqa: PLC0415  (not on Windows)
    except ImportError:
        return _OPEN_FILES
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _OPEN_FILES if soft < 0 else max(2, min(_OPEN_FILES, soft // 4))


def read_index(path: str, index: str = "") -> list[tar.SampleRecord]:
    """Return the samples of a local tar, from its `index` ("": the one beside it) or, where there is none, as `scan` does.

    Raises ShardError for a damaged index or tar.
    """
    return list(open_index(path, index))


def open_index(path: str, index: str = "") -> Records:
    """Do what `read_index` does, but parse the lines of an index in the order of its tar when they are asked for."""
    if is_entry(index):
        return load(index)
    beside = index or index_name(path)
    try:
        try:
            with open(open_regular(beside), "rb") as file:  # noqa: PTH123
                data = file.read()
        except FileNotFoundError:
            return scan(path)
        return _parse(data, beside)
    except FormatError as error:
        raise ShardError(str(error)) from error
    except OSError as error:
        raise ShardError(f"{error.filename or path}: can't be read ({error.strerror})") from error


def _parse(data: bytes, name: str) -> Records:
    """Return the samples of an index; raises ShardError for a damaged one."""
    try:
        listing = Listing.of(data, name)
        return index_format.load(data, name) if listing is None else listing
    except FormatError as error:
        raise ShardError(str(error)) from error


def count_samples(path: str) -> int:
    """Return the number of samples of a local tar: as its index states, else as `scan` finds them; raises as `read_index` does."""
    stated = stated_samples(path)
    return len(read_index(path)) if stated is None else stated


def stated_samples(path: str) -> int | None:
    """Return the number of samples that the index beside a local tar states in its first line, None where there is no index.

    Raises ShardError for a damaged index.
    """
    beside = index_name(path)
    try:
        with open(open_regular(beside), "rb") as file:  # noqa: PTH123
            return index_format.count(file.readline(64).decode("ascii", "replace"), beside)
    except FileNotFoundError:
        return None
    except FormatError as error:
        raise ShardError(str(error)) from error
    except OSError as error:
        raise ShardError(f"{beside}: can't be read ({error.strerror})") from error


def choose(record: tar.SampleRecord, wanted: Wanted, path: str) -> list[tuple[str, tar.Member]]:
    """Return the wanted members of a sample by field, the picture first; raises ShardError where it lacks one."""
    have = dict(zip(record.fields, record.members, strict=True))
    field = next((f for f in wanted.image if f in have), None)
    if field is None:
        raise ShardError(_lacks(path, record, f"a picture ({', '.join(wanted.image)})", "image"))
    if wanted.label is None:
        return [(field, have[field])]
    if wanted.label not in have:
        raise ShardError(_lacks(path, record, f"a label ({wanted.label})", "label"))
    return [(field, have[field]), (wanted.label, have[wanted.label])]


def _lacks(path: str, record: tar.SampleRecord, what: str, option: str) -> str:
    return (
        f"{path}: sample {record.key!r} (at byte {record.members[0].offset - tar.BLOCK}) lacks {what}; "
        f"its fields are {', '.join(record.fields)}: name one by LoaderOptions({option}=...)"
    )


def read_samples(
    places: Iterable[tuple[int, int | tar.SampleRecord, int, int]],
    *,
    reader: ShardReader,
    fault: OnFault,
    copied: Callable[[], Copied | None] = lambda: None,
) -> Iterator[Sample]:
    """Yield the raw sample of each (shard, index, occurrence, place in the batch); where no index is known, its record is given.

    `copied` is asked for copies once the places come; a second occurrence wraps round to samples whose copies may be gone.
    A few samples are read at a time: between two pictures, each of which takes the CPU's caches for itself, reading costs twice.
    `fault` is given the ShardError of a sample that can't be read.
    """
    read, size = list[Sample](), 0
    for shard, at, occurrence, place in places:
        try:
            if isinstance(at, tar.SampleRecord):
                sample = reader.read_record(shard, at, indexed=reader.has_index(shard))
            else:
                sample = reader.read(shard, at, None if occurrence else copied())
        except AbsentError:
            raise
        except ShardError as error:
            fault(error, place, "shard")
            continue
        sample["__occurrence__"], sample["__place__"] = occurrence, place
        read.append(sample)
        size += sample_bytes(sample)
        if len(read) == _TOGETHER or size >= _TOGETHER_BYTES:
            yield from read
            read, size = [], 0
    yield from read
