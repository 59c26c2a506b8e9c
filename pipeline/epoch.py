"""Decides the order of an epoch: which sample stands at each global position, which positions make up each rank's batches.

A pure function of (sample counts, seed, epoch, lanes, window, order version); it knows no file, worker or clock.

    shards    | 0   | 1   | 2   | 3   | ...        sample counts, in the order of the set
    blocks    |0a|0b|1a|1b|2a|2b|3a|3b| ...        whole shards, or parts of them where there are few
    deal      |2b|0a|3a|1b|...                     a permutation by the seed, laid end to end ...
    lanes     |---- 0 ----|---- 1 ----| ...        ... over the lanes; a lane's edge cuts a block into two pieces
    epoch     the pieces are permuted within each lane; each is entered at an offset, and wraps
    windows   |w|-w-|---w---|---w---|              a lane is read window by window, its samples permuted within each
    position  g is lane g mod L, place g // L      so a batch takes from all lanes

All draws come from splitmix64 and a sort: numpy doesn't promise its permutations across versions.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.errors import OptionsError
from pipeline.options import MAX_LANES, LastBatch, check_int

Ints: TypeAlias = npt.NDArray[np.int64]
Hashes: TypeAlias = npt.NDArray[np.uint64]

ORDER_VERSION = 1
BLOCKS_PER_LANE = 8  # with fewer, epochs resemble each other: 4 whole shards in 8 lanes began with the same 64 of 2000 each time
RAMP = 16  # the first window is this part of a full one, so that the first batch doesn't wait for 8 x 32 MiB

_WORD = 2**64 - 1
_DEAL, _PIECES, _ENTRY, _WINDOW = 1, 2, 3, 4  # what a draw is for: no two share a stream


def mix(value: int) -> int:
    """Return splitmix64's output for a 64-bit state (Steele, Lea, Flood 2014; constants of Vigna's splitmix64.c)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _mix_all(values: Hashes) -> Hashes:
    """Apply `mix` to each element; arrays wrap in silence where numpy's scalars warn."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def fold(*parts: int, key: int = 0) -> int:
    """Return the key of a stream of draws: `parts` folded into `key`, one after the other."""
    for part in parts:
        key = mix(key ^ mix(part))
    return key


def _hashes(count: int, key: int) -> Hashes:
    """Return `count` distinct hashes, (count,)."""
    return _mix_all(np.arange(count, dtype=np.uint64) ^ np.uint64(key))


def permutation(count: int, key: int) -> Ints:
    """Return the permutation of 0 .. count - 1 that belongs to `key`, (count,); the same in every release of this order version."""
    return np.argsort(_hashes(count, key), kind="stable").astype(np.int64, copy=False)


def window_samples(window_bytes: int, total_bytes: int, samples: int) -> int:
    """Return how many samples of the set's mean size fill a window of `window_bytes`, at least 1."""
    if samples and total_bytes < 1:
        raise OptionsError(f"total_bytes={total_bytes} for {samples} samples: the set's size in bytes must be known")
    return max(1, window_bytes * samples // total_bytes) if samples else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings:
    """What decides the order besides the counts and the epoch: `window` is in samples; unshuffled is one lane, in storage order."""

    seed: int = 0
    lanes: int = 8
    window: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_int("seed", self.seed, 0, _WORD)
        check_int("lanes", self.lanes, 1, MAX_LANES)
        check_int("window", self.window, 1)
        if not self.shuffle:
            object.__setattr__(self, "lanes", 1)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of shards that a lane reads as wholes: samples [first, first + size) of `shard`; int64 (pieces,), by lane."""

    shard: Ints
    first: Ints
    size: Ints
    lane: Ints

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, order: Ints) -> Pieces:
        """Return the pieces in another order."""
        return Pieces(self.shard[order], self.first[order], self.size[order], self.lane[order])


class Layout:
    """The set's blocks dealt over the lanes: what of the order outlives an epoch.

    `counts` are the samples of each shard, (shards,). `lane_starts` are int64 (lanes + 1,): where each lane begins when they lie
    end to end, and at last the number of samples; lane l holds ceil((samples - l) / lanes).
    """

    def __init__(self, counts: npt.ArrayLike, settings: OrderSettings) -> None:
        self.settings = settings
        self.counts = np.asarray(counts, dtype=np.int64)
        if self.counts.ndim != 1 or (self.counts < 0).any():
            raise OptionsError(f"counts must be one number of samples a shard, 0 or more; they have shape {self.counts.shape}")
        self.samples = int(self.counts.sum())
        lanes = settings.lanes
        sizes = (np.maximum(self.samples - np.arange(lanes), 0) + lanes - 1) // lanes
        self.lane_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        # Empty shards don't count: they would only take the place of blocks.
        self.fixed = not settings.shuffle or int(np.count_nonzero(self.counts)) >= BLOCKS_PER_LANE * lanes
        self._pieces = self._deal(0) if self.fixed else None

    def pieces(self, epoch: int) -> Pieces:
        """Return the pieces, lane after lane; the same for every epoch where the set has enough shards (`fixed`)."""
        return self._deal(epoch) if self._pieces is None else self._pieces

    def _blocks(self) -> tuple[Ints, Ints, Ints]:
        """Return (shard, first, size) of the blocks, (blocks,) each: k equal parts a shard, empty ones left out."""
        shard = np.flatnonzero(self.counts)
        parts = 1 if self.fixed or not len(shard) else -(-BLOCKS_PER_LANE * self.settings.lanes // len(shard))
        shard, part = np.repeat(shard, parts), np.tile(np.arange(parts), len(shard))
        first, stop = part * self.counts[shard] // parts, (part + 1) * self.counts[shard] // parts
        whole = stop > first
        return shard[whole], first[whole], (stop - first)[whole]

    def _deal(self, epoch: int) -> Pieces:
        shard, first, size = self._blocks()
        if self.settings.shuffle:
            order = permutation(len(shard), fold(_DEAL, self.settings.seed, *(() if self.fixed else (epoch,))))
            shard, first, size = shard[order], first[order], size[order]
        starts = np.cumsum(size) - size
        cuts = np.union1d(starts, self.lane_starts[self.lane_starts < self.samples])
        block = np.searchsorted(starts, cuts, side="right") - 1
        lane = np.searchsorted(self.lane_starts, cuts, side="right") - 1
        return Pieces(shard[block], first[block] + cuts - starts[block], np.diff(cuts, append=self.samples), lane)


class Window(NamedTuple):
    """A lane's unit of reading: its places [start, stop) and what they read, int64 (reads, 3): shard, first sample, end."""

    lane: int
    number: int
    start: int
    stop: int
    reads: Ints


class EpochOrder:
    """The order of one epoch; computed window by window, of which it keeps two a lane."""

    def __init__(self, layout: Layout, epoch: int) -> None:
        check_int("epoch", epoch, 0, _WORD)
        self.layout, self.epoch, self.samples = layout, epoch, layout.samples
        settings = layout.settings
        self._lanes, self._window, self._shuffle = settings.lanes, settings.window, settings.shuffle
        self._pieces, self._entry = self._enter(layout.pieces(epoch))
        self._begins = np.cumsum(self._pieces.size) - self._pieces.size
        self._ramp = _ramp(self._window)
        # After the ramp each lane's next window has another size, so that the lanes don't all turn at once.
        self._shift = -(-self._window * np.arange(1, self._lanes + 1) // self._lanes)
        self._window_key = fold(_WINDOW, settings.seed, epoch)
        self._cache: OrderedDict[tuple[int, int], tuple[int, Ints, Ints]] = OrderedDict()

    def _enter(self, pieces: Pieces) -> tuple[Pieces, Ints]:
        """Permute the pieces within their lanes, and draw where each is entered."""
        if not self._shuffle:
            return pieces, np.zeros(len(pieces), np.int64)
        seed = self.layout.settings.seed
        order = np.lexsort((_hashes(len(pieces), fold(_PIECES, seed, self.epoch)), pieces.lane))
        entry = _hashes(len(pieces), fold(_ENTRY, seed, self.epoch)) % pieces.size.astype(np.uint64)
        return pieces.take(order), entry.astype(np.int64)[order]

    def locate(self, positions: npt.ArrayLike) -> tuple[Ints, Ints]:
        """Return (shard, index within the shard), int64 (n,) each, of the samples at global positions 0 .. samples - 1, (n,)."""
        positions = np.asarray(positions, dtype=np.int64)
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.samples:
            raise IndexError(f"positions {positions.min()} to {positions.max()} of an epoch of {self.samples} samples")
        place, lane = np.divmod(positions, self._lanes)
        window = self._number(lane, place) * self._lanes + lane
        shard, index = np.empty_like(positions), np.empty_like(positions)
        order = np.argsort(window, kind="stable")
        edges = np.flatnonzero(np.diff(window[order], prepend=-1, append=-1)).tolist()
        for begin, end in itertools.pairwise(edges):
            chosen = order[begin:end]
            number, of_lane = divmod(int(window[chosen[0]]), self._lanes)
            start, shards, indices = self._samples(of_lane, number)
            at = place[chosen] - start
            shard[chosen], index[chosen] = shards[at], indices[at]
        return shard, index

    def windows(self, lane: int, place: int = 0) -> Iterator[Window]:
        """Yield a lane's windows in the order of reading, from the one that holds `place` on."""
        size = int(self.layout.lane_starts[lane + 1] - self.layout.lane_starts[lane])
        number = int(self._number(np.array([lane]), np.array([place]))[0])
        while (start := self._start(lane, number)) < size:
            stop = min(size, self._start(lane, number + 1))
            yield Window(lane, number, start, stop, self._reads(lane, start, stop))
            number += 1

    def rest(self, window: Window) -> Ints:
        """Return the ranges that the lane's next windows read of the piece that a window ends in, int64 (reads, 3)."""
        start = int(self.layout.lane_starts[window.lane])
        piece = int(np.searchsorted(self._begins, start + window.stop - 1, "right")) - 1
        return self._reads(window.lane, window.stop, int(self._begins[piece] + self._pieces.size[piece]) - start)

    def _number(self, lane: Ints, place: Ints) -> Ints:
        """Return the numbers of the windows that hold places of lanes."""
        rest = (place - self._ramp[-1] - self._shift[lane]) // self._window
        numbers: Ints = np.where(
            place < self._ramp[-1], np.searchsorted(self._ramp, place, side="right") - 1, len(self._ramp) + rest
        )
        return numbers

    def _start(self, lane: int, number: int) -> int:
        if number < len(self._ramp):
            return int(self._ramp[number])
        return int(self._ramp[-1] + self._shift[lane]) + (number - len(self._ramp)) * self._window

    def _reads(self, lane: int, start: int, stop: int) -> Ints:
        """Return the ranges that places [start, stop) of a lane read, (reads, 3): a piece gives two where it wraps."""
        start, stop = (int(self.layout.lane_starts[lane]) + place for place in (start, stop))
        touched = slice(int(np.searchsorted(self._begins, start, "right")) - 1, int(np.searchsorted(self._begins, stop, "left")))
        begins, first, size = self._begins[touched], self._pieces.first[touched], self._pieces.size[touched]
        shift = self._entry[touched] - begins
        begin, end = np.maximum(start, begins) + shift, np.minimum(stop, begins + size) + shift
        reads = np.empty((len(begins), 2, 3), np.int64)  # of each piece: before it wraps, after
        reads[:, :, 0] = self._pieces.shard[touched, None]
        reads[:, 0, 1], reads[:, 0, 2] = first + np.minimum(begin, size), first + np.minimum(end, size)
        reads[:, 1, 1], reads[:, 1, 2] = first + np.maximum(begin - size, 0), first + np.maximum(end - size, 0)
        return reads[reads[:, :, 1] < reads[:, :, 2]]

    def _samples(self, lane: int, number: int) -> tuple[int, Ints, Ints]:
        """Return a window's first place, and (shard, index) of its samples in their order."""
        found = self._cache.get((lane, number))
        if found is None:
            found = self._cache[lane, number] = self._make_samples(lane, number)
            if len(self._cache) > 2 * self._lanes:  # a batch may end one window of each lane and begin the next
                self._cache.popitem(last=False)
        self._cache.move_to_end((lane, number))
        return found

    def _make_samples(self, lane: int, number: int) -> tuple[int, Ints, Ints]:
        size = int(self.layout.lane_starts[lane + 1] - self.layout.lane_starts[lane])
        start, stop = self._start(lane, number), min(size, self._start(lane, number + 1))
        reads = self._reads(lane, start, stop)
        lengths = reads[:, 2] - reads[:, 1]
        shard = np.repeat(reads[:, 0], lengths)
        index = np.repeat(reads[:, 1] - (np.cumsum(lengths) - lengths), lengths) + np.arange(stop - start)
        if not self._shuffle:
            return start, shard, index
        order = permutation(stop - start, fold(lane, number, key=self._window_key))
        return start, shard[order], index[order]


def _ramp(window: int) -> Ints:
    """Return where the growing windows begin, and at last where they end: 1/16 of a window, doubled while under a whole one."""
    starts, size = [0], max(1, window // RAMP)
    while size < window:
        starts.append(starts[-1] + size)
        size *= 2
    return np.array(starts, np.int64)


class Token(NamedTuple):
    """A batch to make: `size` samples of the epoch's order, the first at global `position`, then every `world_size`-th."""

    run: int
    epoch: int
    position: int
    size: int

    def positions(self, samples: int, world_size: int) -> tuple[Ints, Ints]:
        """Return (global positions, occurrences), int64 (size,) each: past `samples` they wrap round, counted from 0."""
        occurrences, positions = np.divmod(self.position + world_size * np.arange(self.size, dtype=np.int64), samples)
        return positions, occurrences


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """A rank's batches of an epoch, from global position `start` on.

    Step b takes the positions g from start + bG to start + (b + 1)G - 1 with (g - start) mod world_size = rank, G being
    `batch_size` (a rank's) times `world_size`: together the ranks' batches are the same for every `world_size` of equal G.

    "drop" leaves out the samples that don't fill a last G, "pad" takes more from the epoch's start, "uneven" makes short batches,
    and none of no samples: ranks may differ by one. Raises OptionsError where a whole epoch has no step, on every rank alike.
    """

    samples: int
    batch_size: int
    last_batch: LastBatch
    world_size: int = 1
    rank: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        check_int("batch_size", self.batch_size, 1)
        check_int("world_size", self.world_size, 1)
        check_int("rank", self.rank, 0, self.world_size - 1)
        check_int("start", self.start, 0, self.samples)
        least = {"drop": self.global_batch, "pad": 1, "uneven": self.world_size}[self.last_batch]
        if self.samples < least:
            ranks = f" on each of {self.world_size} ranks (together {self.global_batch})" if self.world_size > 1 else ""
            raise OptionsError(
                f"no step in an epoch: {self.samples} samples, batch_size {self.batch_size}{ranks}, "
                f"last_batch={self.last_batch!r}; {self._cure()}"
            )

    def _cure(self) -> str:
        if not self.samples:
            return "the shards hold no samples: point at others"
        return (
            "set last_batch='pad', or a smaller batch_size"
            if self.last_batch == "drop"
            else "set last_batch='pad', or use fewer ranks"
        )

    @property
    def global_batch(self) -> int:
        """The ranks' batch sizes together."""
        return self.batch_size * self.world_size

    def _count(self, rank: int) -> int:
        left = self.samples - self.start
        if self.last_batch == "drop":
            return left // self.global_batch
        if self.last_batch == "uneven":
            left = max(0, left - rank)
        return -(-left // self.global_batch)

    def __len__(self) -> int:
        return self._count(self.rank)

    def token(self, step: int, *, run: int = 0, epoch: int = 0) -> Token:
        """Return what step `step`, 0 .. len - 1, has to make."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        position = self.start + step * self.global_batch + self.rank
        size = -(-(self.samples - position) // self.world_size) if self.last_batch == "uneven" else self.batch_size
        return Token(run, epoch, position, min(size, self.batch_size))

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the steps."""
        return iter(range(len(self)))

    @property
    def total(self) -> int:
        """How many steps there are."""
        return len(self)

    @property
    def wrapped(self) -> int:
        """Of how many positions, from the epoch's start on, the last batches of all ranks take samples once more, at most all."""
        taken = self.start + self._count(0) * self.global_batch
        return min(self.samples, max(0, taken - self.samples)) if self.last_batch == "pad" else 0

    @property
    def ended(self) -> bool:
        """Whether no rank has a step left."""
        return self._count(0) == 0

    def position_after(self, step: int) -> int:
        """Return where the epoch goes on after `step`: the same on every rank, and `samples` after the last one of any."""
        return self.samples if step + 1 >= self._count(0) else self.start + (step + 1) * self.global_batch
