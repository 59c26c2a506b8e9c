"""Reads whole samples, their members' bytes as they were packed: (shard, index) -> {"__key__", "__url__", "jpg", "cls", ...}.

What stock webdataset gives for them: fields in lower case, "__local_path__" too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.epoch import EpochOrder
from pipeline.errors import ShardError
from pipeline.items import Sample, Wanted
from pipeline.samples import Recent, ShardFile, ShardReader
from pipeline.spans import Spans, read_members, said_of_another
from shardify.format.tar import BLOCK, Member, SampleRecord

# Samples whose indexes are held, of some 140 bytes. With 64 indexes, shards of 60 samples had theirs read anew for nearly each
# sample: 1.0 ms of CPU for one, instead of 0.07.
_INDEXED_SAMPLES = 2**18


@dataclass(frozen=True, slots=True)
class Members:
    """A shard's n samples: keys and fields of each; all members' offsets and sizes, int64 (members, 2), cut at n + 1 bounds."""

    keys: list[str]
    fields: list[tuple[str, ...]]
    spans: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]


class RawReader:
    """Reads whole samples of a set of shards, all members or those of `fields`; lives in one process, wherever it is sent."""

    def __init__(self, shards: Sequence[ShardFile], fields: tuple[str, ...] | None = None) -> None:
        self._shards, self._fields = shards, fields
        self._reader = ShardReader(shards, Wanted(()))
        self._start()

    def _start(self) -> None:
        self._indexes: Recent[Members] = Recent(_INDEXED_SAMPLES, self._index, weigh=lambda members: len(members.keys))
        self._owner = os.getpid()

    def __getstate__(self) -> tuple[Sequence[ShardFile], tuple[str, ...] | None]:
        return self._shards, self._fields

    def __setstate__(self, state: tuple[Sequence[ShardFile], tuple[str, ...] | None]) -> None:
        self._shards, self._fields = state
        self._reader = ShardReader(self._shards, Wanted(()))
        self._start()

    def read(self, shard: int, at: int) -> Sample:
        """Return a sample: "__key__", "__url__", "__local_path__", and bytes by field; raises ShardError with shard and key."""
        index = self.index(shard)
        begin, end = index.bounds[at : at + 2].tolist()
        return self._read(shard, index.keys[at], index.fields[at], list(index.spans[begin:end]), indexed=True)

    def read_record(self, shard: int, record: SampleRecord) -> Sample:
        """Return a sample of a shard whose index isn't known, as `read` does."""
        chosen = choose_fields(record, self._fields, self._shards[shard].path)
        spans = [(member.offset, member.size) for _, member in chosen]
        return self._read(shard, record.key, [field for field, _ in chosen], spans, indexed=self._reader.has_index(shard))

    def _read(self, shard: int, key: str, fields: Sequence[str], spans: Spans, *, indexed: bool = False) -> Sample:
        path = self._shards[shard].path
        try:
            paths = [f"{key}.{field}" for field in fields] if indexed else None
            parts = read_members(self._reader.source(shard), spans, paths) if fields else []
        except ShardError as error:
            raise ShardError(f"{error} (sample {key!r})") from error
        if parts is None:
            raise ShardError(said_of_another(path, key, int(spans[0][0])))
        return {"__key__": key, "__url__": path, "__local_path__": path, **dict(zip(fields, map(bytes, parts), strict=True))}

    def index(self, shard: int) -> Members:
        """Return where a shard's members lie; raises ShardError for a sample that lacks one of the `fields`."""
        if os.getpid() != self._owner:  # forked
            self._start()
        return self._indexes.get(shard)

    def extent(self, shard: int, first: int, stop: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of a shard in which samples [first, stop) lie."""
        index = self.index(shard)
        spans = index.spans[index.bounds[first] : index.bounds[stop]]
        return (int(spans[:, 0].min()) - BLOCK, int(spans.sum(axis=1).max())) if len(spans) else (0, 0)

    def hint(self, shard: int, begin: int, end: int) -> None:
        """Have bytes [begin, end) of a shard read ahead."""
        self._reader.source(shard).hint(begin, end)

    def close(self) -> None:
        """Close all files; reading opens them anew."""
        self._reader.close()
        self._indexes.clear()

    def _index(self, shard: int) -> Members:
        known: dict[tuple[str, ...], tuple[str, ...]] = {}
        keys, fields, spans, bounds = list[str](), list[tuple[str, ...]](), list[tuple[int, int]](), [0]
        for record in self._reader.records(shard):
            chosen = choose_fields(record, self._fields, self._shards[shard].path)
            keys.append(record.key)
            names = tuple(field for field, _ in chosen)
            fields.append(known.setdefault(names, names))  # one tuple for all samples that have the same
            spans += [(member.offset, member.size) for _, member in chosen]
            bounds.append(len(spans))
        return Members(keys, fields, np.array(spans, np.int64).reshape(-1, 2), np.array(bounds, np.int64))


def choose_fields(record: SampleRecord, wanted: tuple[str, ...] | None, path: str) -> list[tuple[str, Member]]:
    """Return a sample's members by field in lower case, all or the `wanted`; raises ShardError where it lacks one."""
    have = {field.lower(): member for field, member in zip(record.fields, record.members, strict=True)}
    if len(have) < len(record.fields):
        raise ShardError(
            f"{_place(path, record)} has fields that differ only by case: {', '.join(record.fields)}; write the tar again"
        )
    if wanted is None:
        return list(have.items())
    if lacks := [field for field in wanted if field not in have]:
        raise ShardError(f"{_place(path, record)} lacks {', '.join(lacks)}; it has {', '.join(have)}: name those by fields=...")
    return [(field, have[field]) for field in wanted]


def _place(path: str, record: SampleRecord) -> str:
    return f"{path}: sample {record.key!r} (at byte {record.members[0].offset - BLOCK})"


class ReadAhead:
    """Has each lane's next window read while the one before it is used; for readers that no prefetcher goes ahead of."""

    def __init__(self, order: EpochOrder, reader: RawReader, place: int) -> None:
        self._reader = reader
        lanes = order.layout.settings.lanes
        self._windows = [order.windows(lane, place) for lane in range(lanes)]
        self._due: list[float] = [place] * lanes

    def reach(self, place: int) -> None:
        """Say that samples at this place of their lanes are read next; places ascend."""
        for lane, windows in enumerate(self._windows):
            while place >= self._due[lane]:
                window = next(windows, None)
                self._due[lane] = float("inf") if window is None else window.start
                for shard, first, stop in [] if window is None else window.reads.tolist():
                    self._reader.hint(shard, *self._reader.extent(shard, first, stop))
