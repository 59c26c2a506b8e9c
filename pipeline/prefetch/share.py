"""Decides what memory is used for: how much is read ahead, and which fixed share of the set stays from epoch to epoch.

A plain cache with room for a third of a set that is read round and round hits 6.6 % of it, a fixed share 33 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.epoch import Ints, Layout, Pieces, fold, permutation

READ_AHEAD = 2 * 2**30  # bytes that are enough on any machine: 15 s of a disk

_KEEP = 5  # what the draw is for; not keyed by the seed, so that jobs on one machine keep the same


def read_ahead(available: int, least: int, ranks: int = 1, sharers: int = 1) -> int:
    """Return how many bytes a loader may read ahead: its part of a quarter of what is available, and `least` in any case.

    `ranks` on this machine each read their part, and in each of them `sharers` loaders with an open epoch.
    """
    return max(least, min(available // 4, READ_AHEAD) // ranks // sharers)


def keep_limit(available: int, budget: int, ranks: int = 1, *, together: bool = False, claimed: int = 0, growth: int = 0) -> int:
    """Return how many bytes a rank may keep in memory by default: of what is available, less the machine's budget and a reserve.

    The reserve is for what still grows when this is asked: a quarter, for the trainer, or what a rank's workers will take if that
    is more (`growth`). `together`: the machine's ranks keep the same bytes, once; else each has its part. `claimed`: what other
    loaders keep.
    """
    room = available - max(available // 4, growth * ranks) - budget * ranks
    return max(0, (room if together else room // ranks) - claimed)


class Share:
    """The samples that stay, as ranges of the set's samples laid end to end, shard after shard."""

    def __init__(self, layout: Layout, sizes: Ints, lanes: Sequence[int], keep_bytes: int) -> None:
        """Choose of the blocks that `lanes` read those of the lowest hashes, until `keep_bytes` are full; of the last a part."""
        self._starts = np.concatenate([[0], np.cumsum(layout.counts)])
        pieces = layout.pieces(0)
        if layout.fixed and len(lanes) < layout.settings.lanes:
            pieces = pieces.take(np.flatnonzero(np.isin(pieces.lane, np.asarray(lanes))))
            self._shards: frozenset[int] | None = frozenset(np.unique(pieces.shard).tolist())
        else:
            self._shards = None
        each = _sample_bytes(layout, sizes)[pieces.shard]
        weight = each * pieces.size
        self.part_bytes = int(weight.sum())
        order = np.argsort(_draws(pieces, layout), kind="stable")
        left = keep_bytes - (np.cumsum(weight[order]) - weight[order])  # room before each
        whole = pieces.size[order].copy()
        if keep_bytes < self.part_bytes:
            whole = np.minimum(whole, np.maximum(0, left) // np.maximum(1e-9, each[order])).astype(np.int64)
        first = self._starts[pieces.shard[order]] + pieces.first[order]
        self.kept_bytes = int((whole * each[order]).sum())
        self._first, self._stop = _merged(first[whole > 0], (first + whole)[whole > 0])

    @property
    def whole(self) -> bool:
        """Whether all that is read stays."""
        return self.kept_bytes >= self.part_bytes

    def reads(self, shard: int) -> bool:
        """Tell whether the lanes read something of a shard; of others they can't say what stays."""
        return self._shards is None or shard in self._shards

    def unkept(self, shard: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of samples [first, stop) of a shard that don't stay."""
        base = int(self._starts[shard])
        begin, end, found = base + first, base + stop, list[tuple[int, int]]()
        at = int(np.searchsorted(self._stop, begin, side="right"))
        while begin < end and at < len(self._first) and self._first[at] < end:
            if begin < self._first[at]:
                found.append((begin - base, int(self._first[at]) - base))
            begin, at = int(self._stop[at]), at + 1
        if begin < end:
            found.append((begin - base, end - base))
        return found

    def bounds(self, shard: int, first: int, stop: int) -> tuple[int, int]:
        """Return where the kept samples nearest to unkept ones [first, stop) end and begin; a shard's ends where there are none."""
        base, end = int(self._starts[shard]), int(self._starts[shard + 1])
        at = int(np.searchsorted(self._stop, base + first, side="right"))
        below = int(self._stop[at - 1]) if at else base
        above = int(self._first[at]) if at < len(self._first) else end
        return max(0, below - base), min(end, above) - base


def _draws(pieces: Pieces, layout: Layout) -> Ints:
    """Return by what pieces are chosen: whole shards by a permutation of the shards, parts each by its own hash."""
    if layout.fixed:
        return np.argsort(permutation(len(layout.counts), fold(_KEEP)))[pieces.shard]
    draws = [fold(_KEEP, shard, first) >> 1 for shard, first in zip(pieces.shard.tolist(), pieces.first.tolist(), strict=True)]
    return np.array(draws, np.int64)


def _sample_bytes(layout: Layout, sizes: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the mean bytes of a sample for each shard; of shards of unknown size the set's mean."""
    known = (sizes > 0) & (layout.counts > 0)
    samples = int(layout.counts[known].sum())
    mean = float(sizes[known].sum()) / samples if samples else 0.0
    return np.where(known, sizes / np.maximum(1, layout.counts), mean)


def _merged(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Return disjoint ranges in order, those that touch as one."""
    order = np.argsort(first, kind="stable")
    first, stop = first[order], stop[order]
    alone = np.flatnonzero(np.concatenate([[True], first[1:] > stop[:-1]])) if len(first) else np.zeros(0, np.int64)
    return first[alone], stop[np.concatenate([alone[1:] - 1, [len(stop) - 1]])] if len(first) else stop
