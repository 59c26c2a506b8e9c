"""Has a worker read remote shards that nobody counted, while they arrive: it waits for a byte's piece, never for long in vain."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from pipeline.arrival import ArrivalOrder, ArrivalSettings, Pieces
from pipeline.progress import Block
from pipeline.residency import GivenUp, Outcome, Residency
from pipeline.samples import ShardReader
from pipeline.stores.cache import AbsentError


class Afar:
    """A worker's view of shards that arrive, in one run after the other."""

    def __init__(self, sizes: Sequence[int], settings: ArrivalSettings, reader: ShardReader, block: Block, worker: int) -> None:
        """Take the shards' sizes in bytes, and the order in which they arrive in the first epoch."""
        self._pieces, self._reader, self.block, self._worker = Pieces(sizes, settings, 0), reader, block, worker
        self._residency = Residency(block, settings.lanes, worker, patient=True)
        self._run = 0
        self._there: dict[int, int] = {}  # of a shard: the byte before which all came
        self.waited_seconds = 0.0

    def begin(self, run: int) -> None:
        """Begin to read for a run; what was there in another may be gone."""
        if run != self._run:
            self._run, self._there = run, {}

    def wait(self, shard: int, stop: int) -> None:
        """Wait until the bytes of a shard before `stop` came; raises GivenUp where nobody wants them any more.

        Where they can't come, it returns: who reads them finds that they aren't there.
        """
        before = self._there.get(shard, 0)
        if stop <= before:
            return
        number = self._pieces.number(shard, stop - 1)
        for outcome, _ in self._residency.wait(self._run, np.array([number], np.int64)):
            self.waited_seconds += self._residency.waited_seconds
            if outcome is Outcome.GIVEN_UP:
                raise GivenUp
        self._there[shard] = max(stop, self._end_of(number, shard))

    def _end_of(self, number: int, shard: int) -> int:
        return max(end for at, _, end in self._pieces.ranges(number) if at == shard)

    def open(self, shard: int) -> _Arriving:
        """Return a shard as a file to walk."""
        return _Arriving(self, shard)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Return bytes of a shard once they came; raises AbsentError where they can't come."""
        self.wait(shard, offset + size)
        try:
            return self._reader.source(shard).read(offset, size)
        except AbsentError:
            return self._reader.open_anew(shard).read(offset, size)

    def size(self, shard: int) -> int:
        """Return a shard's size in bytes."""
        return self._reader.size(shard)

    def pass_by(self, order: ArrivalOrder, position: int) -> None:
        """Say that all positions up to `position` were read, and what only they need may go."""
        floors = [self._pieces.number_in(lane, byte) for lane, byte in order.floors(position).items()]
        if floors:
            self.block.pass_by(self._worker, self._run, min(floors))


class _Arriving:
    """A shard that arrives, as a file that is read at any place."""

    def __init__(self, afar: Afar, shard: int) -> None:
        self._afar, self._shard, self._at = afar, shard, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte."""
        assert whence == os.SEEK_SET
        self._at = offset
        return offset

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer at the end."""
        size = min(size, self._afar.size(self._shard) - self._at)
        data = self._afar.read(self._shard, self._at, size) if size > 0 else b""
        self._at += len(data)
        return data
