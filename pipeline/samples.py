"""Reads raw samples by their place in the set: (shard, index) -> {"__key__", "__url__", "jpg", "cls", ...}.

A shard's index is loaded when the first of its samples is wanted, into arrays; shards and indexes that weren't used lately are
closed, so that a process holds few of either however large the set is.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.errors import ShardError
from pipeline.items import Sample, Wanted
from pipeline.stores import Source
from pipeline.stores.local import LocalFile
from shardify.errors import FormatError
from shardify.format import index as index_format
from shardify.format import tar
from shardify.format.names import index_name

T = TypeVar("T")

_OPEN_INDEXES = 256  # some 100 KB each for a shard of 1,300 samples
_OPEN_FILES = 64
_GAP = 64 * 1024  # bytes between two members that are cheaper read through than asked for apart


@dataclass(frozen=True, slots=True)
class ShardFile:
    """What a worker knows of a shard: where it is, its samples and its size in bytes (0: unknown).

    `index`: where its index is, "" for beside it.
    """

    path: str
    samples: int
    size: int
    index: str = ""


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Where the wanted members of a shard's n samples lie, in bytes.

    keys n texts; image fields n texts; image int64 (n, 2): offset and size; label int64 (n, 2), or None.
    """

    keys: list[str]
    fields: list[str]
    image: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64] | None


class Recent(Generic[T]):
    """Keeps the values of the keys used last; `drop` is called on those that go."""

    def __init__(self, limit: int, make: Callable[[int], T], drop: Callable[[T], None] | None = None) -> None:
        self._limit, self._make, self._drop = limit, make, drop
        self._held: OrderedDict[int, T] = OrderedDict()

    def get(self, key: int) -> T:
        """Return the value of `key`, made if it isn't held."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        value = self._make(key)
        self._held[key] = value
        if len(self._held) > self._limit:
            _, old = self._held.popitem(last=False)
            if self._drop:
                self._drop(old)
        return value

    def clear(self) -> None:
        """Drop all."""
        while self._held:
            _, old = self._held.popitem()
            if self._drop:
                self._drop(old)


class ShardReader:
    """Reads samples of a set of shards; lives in one process (it starts empty wherever it is sent)."""

    def __init__(self, shards: Sequence[ShardFile], fields: Wanted) -> None:
        self._shards = shards
        self._wanted = fields
        self._start()

    def _start(self) -> None:
        self._files: Recent[Source] = Recent(_open_files(), self._open, lambda file: file.close())
        self._indexes: Recent[ShardIndex] = Recent(_OPEN_INDEXES, self._index)
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"_shards": self._shards, "_wanted": self._wanted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def close(self) -> None:
        """Close all files; reading opens them anew."""
        self._files.clear()
        self._indexes.clear()

    def read(self, shard: int, at: int) -> Sample:
        """Return a raw sample: "__key__", "__url__", "__offset__" of the picture, and the bytes of picture and label by field.

        Raises ShardError with the shard, and the sample where it is known.
        """
        if os.getpid() != self._owner:  # forked: the parent's descriptors share nothing that matters, but its caches are its own
            self._start()
        index = self._indexes.get(shard)
        spans = [index.image[at]] if index.label is None else [index.image[at], index.label[at]]
        try:
            parts = _read_spans(self._files.get(shard), spans)
        except ShardError as error:
            raise ShardError(f"{error} (sample {index.keys[at]!r})") from error
        sample = {
            "__key__": index.keys[at],
            "__url__": self._shards[shard].path,
            "__offset__": int(index.image[at, 0]),
            index.fields[at]: parts[0],
        }
        if self._wanted.label is not None:
            sample[self._wanted.label] = parts[1]
        return sample

    def _open(self, shard: int) -> Source:
        known = self._shards[shard]
        file = LocalFile(known.path)
        if known.size and file.size != known.size:
            file.close()
            raise ShardError(
                f"{known.path}: has {file.size} bytes, and its manifest says {known.size}; "
                "it was cut or replaced: copy or pack it again"
            )
        return file

    def _index(self, shard: int) -> ShardIndex:
        known = self._shards[shard]
        records = read_index(known.path, known.index)
        if len(records) != known.samples:
            raise ShardError(
                f"{known.path}: its index has {len(records)} samples, and the set counts {known.samples}; "
                "index and manifest don't belong together: copy or pack it again"
            )
        self._check_covered(records, shard)
        return _resolve(records, self._wanted, known.path)

    def _check_covered(self, records: Sequence[tar.SampleRecord], shard: int) -> None:
        """Raise ShardError where an index hides samples of its tar: one stands in it twice, or it ends long before the tar does.

        Something else may lie behind the last sample (a README, the padding of other tools): then the tar's own headers tell.
        """
        path, size = self._shards[shard].path, self._files.get(shard).size
        end = max((m.offset + tar.padded(m.size) for record in records for m in record.members), default=0)
        keys = [record.key for record in records]
        if len(set(keys)) < len(keys) or not (end <= size <= end + len(tar.END) or keys == [r.key for r in _scan(path)]):
            raise ShardError(
                f"{path}: has {size} bytes, and its index lists {len(keys)} samples up to byte {end}, or one of them twice; "
                "the index is of another tar: delete it, or pack again"
            )


def _open_files() -> int:
    """Return how many shards a process may hold open: a quarter of its limit, at most 64."""
    try:
        import resource  # noqa: PLC0415  (not on Windows)
    except ImportError:
        return _OPEN_FILES
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _OPEN_FILES if soft < 0 else max(2, min(_OPEN_FILES, soft // 4))


def read_index(path: str, index: str = "") -> list[tar.SampleRecord]:
    """Return the samples of a local tar, from its `index` ("": the one beside it) or, where there is none, from its headers.

    Raises ShardError for a damaged index or tar.
    """
    beside = index or index_name(path)
    try:
        try:
            with open(beside, "rb") as file:  # noqa: PTH123
                return index_format.load(file.read(), beside)
        except FileNotFoundError:
            return _scan(path)
    except FormatError as error:
        raise ShardError(str(error)) from error
    except OSError as error:
        raise ShardError(f"{error.filename or path}: can't be read ({error.strerror})") from error


def _scan(path: str) -> list[tar.SampleRecord]:
    """Return the samples of a local tar by its headers."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return list(tar.samples(file, os.fstat(file.fileno()).st_size, path))
    except FormatError as error:
        raise ShardError(str(error)) from error


def count_samples(path: str) -> int:
    """Return the number of samples of a local tar: its index's first line, else by its headers.

    Raises ShardError as `read_index` does.
    """
    beside = index_name(path)
    try:
        with open(beside, "rb") as file:  # noqa: PTH123
            return index_format.count(file.readline(64).decode("ascii", "replace"), beside)
    except FileNotFoundError:
        return len(read_index(path))
    except FormatError as error:
        raise ShardError(str(error)) from error
    except OSError as error:
        raise ShardError(f"{beside}: can't be read ({error.strerror})") from error


def _resolve(records: Sequence[tar.SampleRecord], wanted: Wanted, path: str) -> ShardIndex:
    """Pick the wanted members of each sample; raises ShardError for a sample that lacks one, with what it has."""
    keys, fields, image, label = list[str](), list[str](), list[tuple[int, int]](), list[tuple[int, int]]()
    for record in records:
        have = dict(zip(record.fields, record.members, strict=True))
        field = next((f for f in wanted.image if f in have), None)
        if field is None:
            raise ShardError(_lacks(path, record, f"a picture ({', '.join(wanted.image)})", "image"))
        if wanted.label is not None and wanted.label not in have:
            raise ShardError(_lacks(path, record, f"a label ({wanted.label})", "label"))
        keys.append(record.key)
        fields.append(field)
        image.append((have[field].offset, have[field].size))
        if wanted.label is not None:
            label.append((have[wanted.label].offset, have[wanted.label].size))
    shape = (len(records), 2)
    return ShardIndex(
        keys,
        fields,
        np.array(image, np.int64).reshape(shape),
        None if wanted.label is None else np.array(label, np.int64).reshape(shape),
    )


def _lacks(path: str, record: tar.SampleRecord, what: str, option: str) -> str:
    return (
        f"{path}: sample {record.key!r} (at byte {record.members[0].offset - tar.BLOCK}) lacks {what}; "
        f"its fields are {', '.join(record.fields)}: name one by LoaderOptions({option}=...)"
    )


def _read_spans(file: Source, spans: Sequence[npt.NDArray[np.int64]]) -> list[bytes]:
    """Read each (offset, size), in one request where they lie close together."""
    starts = [int(span[0]) for span in spans]
    sizes = [int(span[1]) for span in spans]
    first, last = min(starts), max(start + size for start, size in zip(starts, sizes, strict=True))
    if last - first > sum(sizes) + _GAP:
        return [file.read(start, size) for start, size in zip(starts, sizes, strict=True)]
    data = file.read(first, last - first)
    return [data[start - first : start - first + size] for start, size in zip(starts, sizes, strict=True)]


def read_samples(places: Iterable[tuple[int, int, int]], *, reader: ShardReader) -> Iterator[Sample]:
    """Yield the raw sample of each (shard, index, occurrence)."""
    for shard, at, occurrence in places:
        sample = reader.read(shard, at)
        sample["__occurrence__"] = occurrence
        yield sample
