"""Decides which split a sample belongs to, in which order samples are written, and where a shard ends.

Pure: data to data, the seed an argument. All chance comes from a keyed hash of (seed, key), so a sample's place never depends on
the order of the rows, and rows that are added move nothing from one split to another.

    draw_splits   hash in [0, 1):  |---- train ----|- val -|  left out  |
    arrange       rows in slot order: by hash, by hash with every class spread evenly, or as they come
    cut           sizes in slot order:  |s0 s1 s2|s3 s4|s5|...  each as many samples as fit the limit
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardify.items import LEFT_OUT

Mode = Literal["shuffle", "stratified", "source"]
Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

_CHUNK = 1 << 16
_TOLERANCE = 1e-9  # shares that sum up to 1 but for rounding leave nobody out


def draw_splits(keys: Sequence[str], shares: Sequence[float], seed: int) -> npt.NDArray[np.int16]:
    """Return for each key the index of the share that its hash falls into, LEFT_OUT (-1) beyond the last.

    Depends on nothing but (seed, key): int16 (n,).
    """
    edges = np.array(list(accumulate(shares)) if shares else [0.0])
    if abs(math.fsum(shares) - 1) <= _TOLERANCE:
        edges[-1] = 1
    points = (_hashes(keys, seed, b"shardify split") >> np.uint64(11)) * 2.0**-53
    drawn = np.searchsorted(edges, points, side="right")
    return np.where(drawn < len(shares), drawn, LEFT_OUT).astype(np.int16)


def arrange(keys: Sequence[str], labels: npt.NDArray[np.int64], *, mode: Mode, seed: int) -> Rows:
    """Return the rows in the order in which they are written: int64 (n,), a permutation.

    `shuffle` and `stratified` depend on (seed, key, label) only; `source` keeps the rows as they come. In a stratified order any
    run of m of the n samples holds m c / n of a class of c samples, give or take 1 + d c / n where d class sizes occur.
    """
    if mode == "source":
        return np.arange(len(keys), dtype=np.int64)
    hashes = _hashes(keys, seed, b"shardify order")
    shuffled = _by_hash(hashes, keys)
    return shuffled if mode == "shuffle" else shuffled[_spread(labels[shuffled], seed)]


def cut(sizes: npt.NDArray[np.int64], limit: int, end_bytes: int = 1024) -> Rows:
    """Return where shards begin and end: shard i holds the slots from cuts[i] up to cuts[i + 1]; int64 (shards + 1,).

    `sizes` are the samples' bytes as written, `end_bytes` what closes a tar. A shard ends before `limit` is passed, none is empty,
    and a sample that is larger by itself gets its own.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    cuts = [0]
    while cuts[-1] < len(sizes):
        start = cuts[-1]
        written = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, written + limit - end_bytes, side="right"))
        cuts.append(max(stop, start + 1))
    return np.array(cuts, dtype=np.int64)


def _hashes(keys: Sequence[str], seed: int, use: bytes) -> Hashes:
    """Hash each key under the seed, 64 bits; `use` keeps the draws for splits and order apart."""
    keyed = hashlib.blake2b(key=str(seed).encode(), person=use, digest_size=8)
    found = np.empty(len(keys), dtype=np.uint64)
    for start in range(0, len(keys), _CHUNK):
        digests = bytearray()
        for key in keys[start : start + _CHUNK]:
            state = keyed.copy()  # half the time of keying anew
            state.update(key.encode("utf-8", "surrogatepass"))
            digests += state.digest()
        found[start : start + _CHUNK] = np.frombuffer(digests, dtype="<u8")
    return found


def _by_hash(hashes: Hashes, keys: Sequence[str]) -> Rows:
    """Sort rows by hash, and those of equal hash by key: then the order of the rows can't matter."""
    rows = np.argsort(hashes, kind="stable")
    ordered = hashes[rows]
    ties = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(ties):
        tied = np.isin(ordered, ordered[ties])
        rows[tied] = sorted(rows[tied], key=lambda row: (hashes[row], keys[row]))
    return rows


def _spread(labels: npt.NDArray[np.int64], seed: int) -> Rows:
    """Spread each class evenly: its j-th of c samples goes to (j + phase) / c of the whole, j in the order given.

    The phases of the classes of one size are even steps (dealt by hash): 40,000 classes of one sample then lie evenly too, where
    random phases would bunch them and shift all others.
    """
    classes, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    dealt = np.lexsort((_hashes([str(label) for label in classes], seed, b"shardify phase"), counts))
    _, first, alike = np.unique(counts[dealt], return_index=True, return_counts=True)
    phases = np.empty(len(classes))
    phases[dealt] = (np.arange(len(classes)) - np.repeat(first, alike) + 0.5) / np.repeat(alike, alike)
    grouped = np.argsort(inverse, kind="stable")
    nth = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    ideal = (nth + np.repeat(phases, counts)) / np.repeat(counts, counts)
    return grouped[np.lexsort((grouped, ideal))]
