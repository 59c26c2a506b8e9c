"""Walks shards that nobody counted: their samples, header by header, for the order of an epoch in which they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from pipeline.afar import Afar
from pipeline.arrival import ArrivalOrder, ArrivalSettings, Ended
from pipeline.epoch import Token
from pipeline.errors import ShardError
from pipeline.indexing import UNCOUNTED, Stamp, cache, headers
from pipeline.options import LastBatch
from pipeline.progress import Block
from pipeline.samples import ShardFile, ShardReader, read_index
from pipeline.stores.local import LocalFile
from shardify.errors import FormatError
from shardify.format import tar
from shardify.format.tar import SampleRecord

Arrived: TypeAlias = tuple[int, SampleRecord, int]


class Arrivals:
    """The orders of a set whose shards aren't all counted, by their files; lives in one process, wherever it is sent."""

    def __init__(self, shards: Sequence[ShardFile], settings: ArrivalSettings) -> None:
        self._shards, self._settings = shards, settings
        self._order: ArrivalOrder | None = None
        self.afar: Afar | None = None  # where the shards are remote: how their bytes come

    def __getstate__(self) -> dict[str, Any]:
        return {"_shards": self._shards, "_settings": self._settings, "_order": None, "afar": None}

    def reach(self, reader: ShardReader, block: Block, worker: int) -> Afar:
        """Return how the bytes of remote shards come to a worker."""
        return Afar([shard.size for shard in self._shards], self._settings, reader, block, worker)

    def order(self, epoch: int) -> ArrivalOrder:
        """Return the order of an epoch; the one asked for last is kept."""
        if self._order is None or self._order.closed or self._order.epoch != epoch:
            self.close()
            sizes = [shard.size for shard in self._shards]
            self._order = ArrivalOrder(sizes, self._settings, epoch, records=self._records, hint=self._hint)
        return self._order

    def places(self, token: Token, last_batch: LastBatch, samples: int | None = None, world_size: int = 1) -> list[Arrived] | Ended:
        """Return the samples of a token: (shard, record, occurrence) each.

        `samples`: of the epoch, None where they aren't known, and the token may lie behind its end.
        """
        order = self.order(token.epoch)
        if samples is None:
            end = token.position + token.size
            found = order.locate(range(token.position, end))
            if len(found) == token.size or (found and last_batch == "uneven"):
                return [(at.shard, at.record, 0) for at in found]
            samples = sum(count or 0 for count in order.counts)
            if not found or last_batch == "drop":
                return Ended(tuple(count or 0 for count in order.counts))
        positions, occurrences = (array.tolist() for array in token.positions(samples, world_size))
        found = order.locate(positions)
        return [(at.shard, at.record, occurrence) for at, occurrence in zip(found, occurrences, strict=True)]

    def close(self) -> None:
        """Leave the shards that are being read; the next order begins anew."""
        if self._order is not None:
            self._order.close()
        self._order = None

    def _records(self, shard: int) -> Iterator[SampleRecord]:
        """Yield a shard's samples: by its index where it has one, else by its headers, which are remembered at its end."""
        known = self._shards[shard]
        path = known.path
        if known.samples != UNCOUNTED:
            yield from read_index(path, known.index)
            return
        stamp = Stamp(known.size, version=known.version) if self.afar else Stamp.of(path)
        records = list[SampleRecord]()
        for record in headers(path) if self.afar is None else _arriving(self.afar, shard, path):
            records.append(record)
            yield record
        if not records:
            raise ShardError(f"{path}: holds no sample (a file of zeros?); copy or pack it again, or leave it out")
        cache().put(path, stamp, records)

    def _hint(self, shard: int, begin: int, end: int) -> None:
        if self.afar is not None:
            return
        file = LocalFile(self._shards[shard].path)
        try:
            file.hint(begin, end)
        finally:
            file.close()


def _arriving(afar: Afar, shard: int, path: str) -> Iterator[SampleRecord]:
    """Yield the samples of a remote tar by its headers, as they come; raises ShardError for a damaged tar."""
    try:
        yield from tar.samples(afar.open(shard), afar.size(shard), path)
    except FormatError as error:
        raise ShardError(str(error)) from error
