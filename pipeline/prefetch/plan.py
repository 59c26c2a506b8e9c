"""Lays down what the prefetcher must know of a set, as arrays and texts in one piece of memory: never the manifest.

    numbers of settings, lengths of the texts | samples | bytes | paths | indexes | hashes | versions | what is remote, as JSON

A million shards are some 80 MB, written in a third of a second; the parsed manifest would be 400 MB in each process.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pipeline.epoch import Layout, OrderSettings
from pipeline.errors import SourceError
from pipeline.world import World

_HEAD = 16


class Texts(Sequence[str]):
    """Texts that lie one behind the other; each is decoded when it is asked for. No bytes stand for texts that are all empty."""

    def __init__(self, blob: memoryview, count: int) -> None:
        self._blob, self._count = blob, count
        self._ends = np.flatnonzero(np.frombuffer(blob, np.uint8) == 0) if blob else np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self._count))]
        if not 0 <= at < self._count:
            raise IndexError(at)
        if not self._blob:
            return ""
        return os.fsdecode(bytes(self._blob[self._ends[at - 1] + 1 if at else 0 : self._ends[at]]))


def joined(texts: Sequence[str]) -> bytes:
    """Return texts as `Texts` takes them; raises SourceError for one with a zero byte, or half a character."""
    if not any(texts):
        return b""
    try:
        data = os.fsencode("".join([f"{text}\0" for text in texts]))
    except UnicodeEncodeError:
        data = b""
    if data.count(b"\0") != len(texts):
        raise SourceError("a path, URL or hash of the set holds a zero byte, or half a character: correct its manifest")
    return data


@dataclass(frozen=True, slots=True)
class Fetching:
    """How a remote set is fetched: into which folder, of how many bytes (None: chosen), under which name, how servers are asked.

    `http`, `objects`: HttpOptions' and ObjectOptions' fields; secrets among them, so that it is written nowhere but into memory.
    `arrival`: ArrivalSettings' fields where shards are fetched as they arrive, for so many `workers`; the layout says nothing then.
    """

    folder: str
    limit: int | None
    set: str
    connections: int
    http: dict[str, Any] = field(default_factory=dict, repr=False)
    objects: dict[str, Any] = field(default_factory=dict, repr=False)
    arrival: dict[str, Any] = field(default_factory=dict)
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A set as the prefetcher knows it: the order's layout, bytes of each shard (0: unknown), where shards and indexes are.

    `keep_bytes`: how much stays in memory from epoch to epoch, None for what is available; `growth`: bytes that this rank's workers
    will take. Of a remote set (`fetching`) paths and indexes are URLs, and `hashes` the shards' sha256 in hex, `versions` their
    ETags or dates ("": unknown).
    """

    layout: Layout
    sizes: npt.NDArray[np.int64]
    paths: Sequence[str] = field(repr=False)
    indexes: Sequence[str] = field(repr=False)
    world: World = field(default_factory=World)
    keep_bytes: int | None = None
    growth: int = 0
    hashes: Sequence[str] = ()
    fetching: Fetching | None = None
    versions: Sequence[str] = ()

    def mean_bytes(self) -> float:
        """Return the mean size of a sample, 0 where no size is known."""
        known = self.sizes > 0
        samples = int(self.layout.counts[known].sum())
        return float(self.sizes[known].sum()) / samples if samples else 0.0

    def window_bytes(self) -> int:
        """Return the size of a full window; for sets of unknown size what is usual."""
        mean = self.mean_bytes()
        return int(min(self.layout.settings.window, self.layout.samples) * mean) + 1 if mean else 32 * 2**20


def write(descriptor: int, plan: Plan) -> None:
    """Write a plan into an empty file."""
    settings, world = plan.layout.settings, plan.world
    paths, indexes, hashes, versions = joined(plan.paths), joined(plan.indexes), joined(plan.hashes), joined(plan.versions)
    fetching = b"" if plan.fetching is None else json.dumps(asdict(plan.fetching)).encode()
    numbers = [
        settings.seed,
        settings.lanes,
        settings.window,
        settings.shuffle,
        world.rank,
        world.world_size,
        world.local_rank,
        world.local_world_size,
        0 if plan.keep_bytes is None else plan.keep_bytes + 1,
        len(plan.layout.counts),
        len(paths),
        len(indexes),
        plan.growth,
        len(hashes),
        len(versions),
        len(fetching),
    ]
    with open(descriptor, "wb", closefd=False) as file:
        for part in (np.array(numbers, np.uint64).data, plan.layout.counts.data, plan.sizes.data):
            file.write(part)
        file.write(b"".join((paths, indexes, hashes, versions, fetching)))


def read(descriptor: int) -> Plan:
    """Return the plan that another process wrote."""
    whole = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    head = [int(number) for number in np.frombuffer(whole, np.uint64, _HEAD)]
    seed, lanes, window, shuffle, rank, size, local_rank, local_size, keep, shards, *lengths = head
    path_bytes, index_bytes, growth, hash_bytes, version_bytes, fetching_bytes = lengths
    numbers = np.frombuffer(whole, np.int64, 2 * shards, _HEAD * 8)
    layout = Layout(numbers[:shards], OrderSettings(seed=seed, lanes=lanes, window=window, shuffle=bool(shuffle)))
    at, texts = _HEAD * 8 + 2 * shards * 8, list[memoryview]()
    for length in (path_bytes, index_bytes, hash_bytes, version_bytes, fetching_bytes):
        texts.append(memoryview(whole)[at : at + length])
        at += length
    return Plan(
        layout,
        numbers[shards:],
        Texts(texts[0], shards),
        Texts(texts[1], shards),
        World(rank, size, local_rank, local_size),
        keep - 1 if keep else None,
        growth,
        Texts(texts[2], shards),
        Fetching(**json.loads(bytes(texts[4]))) if fetching_bytes else None,
        Texts(texts[3], shards),
    )
