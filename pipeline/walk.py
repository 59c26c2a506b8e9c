"""Walks shards that nobody counted: their samples, header by header, for the order of an epoch in which they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from pipeline.arrival import ArrivalOrder, ArrivalSettings, Ended
from pipeline.epoch import Token
from pipeline.errors import ShardError
from pipeline.indexing import UNCOUNTED, Stamp, cache, headers
from pipeline.options import LastBatch
from pipeline.samples import ShardFile, read_index
from pipeline.stores.local import LocalFile
from shardify.format.tar import SampleRecord

Arrived: TypeAlias = tuple[int, SampleRecord, int]


class Arrivals:
    """The orders of a set whose shards aren't all counted, by their files; lives in one process, wherever it is sent."""

    def __init__(self, shards: Sequence[ShardFile], settings: ArrivalSettings) -> None:
        self._shards, self._settings = shards, settings
        self._order: ArrivalOrder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_shards": self._shards, "_settings": self._settings, "_order": None}

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
        path = self._shards[shard].path
        if self._shards[shard].samples != UNCOUNTED:
            yield from read_index(path, self._shards[shard].index)
            return
        stamp, records = Stamp.of(path), list[SampleRecord]()
        for record in headers(path):
            records.append(record)
            yield record
        if not records:
            raise ShardError(f"{path}: holds no sample (a file of zeros?); copy or pack it again, or leave it out")
        cache().put(path, stamp, records)

    def _hint(self, shard: int, begin: int, end: int) -> None:
        file = LocalFile(self._shards[shard].path)
        try:
            file.hint(begin, end)
        finally:
            file.close()
