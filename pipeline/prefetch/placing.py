"""Tells where a remote shard's samples begin, by its index, which it puts into the cache folder for the workers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from pipeline.errors import MissingError, ShardError, SourceError
from pipeline.indexing import is_entry, load
from pipeline.listing import Ints, offsets
from pipeline.prefetch.plan import Plan
from pipeline.stores import Place
from pipeline.stores.cache import Cache, Facts
from pipeline.stores.http.reading import Expect

_PAUSE = 0.005  # seconds between two looks at what another thread, or process, fetches
_INDEX_BYTES = 2**30

Fetch: TypeAlias = Callable[[str, int, Expect], bytes]
"""Returns a small file behind a URL, of so many bytes at the most, whose beginning is as expected."""


class Placing:
    """Where the samples of a set's shards begin; for any number of threads."""

    def __init__(self, plan: Plan, cache: Cache, set_name: str, address: Callable[[str], Place], fetch: Fetch) -> None:
        self._plan, self._cache, self._set, self._address, self._fetch = plan, cache, set_name, address, fetch
        self._places: dict[int, Ints] = {}
        self._found = set[int]()  # whose index was in the folder, in this run
        self._lock = threading.Lock()
        self._learning: dict[int, threading.Lock] = {}  # by the shard

    def knows(self, number: int) -> bool:
        """Tell whether a shard's places can be told without the network."""
        return number in self._places or _is_here(self._plan.indexes[number])

    def begin(self) -> None:
        """Begin a run: it is looked whether the folder still has the indexes, as each is needed."""
        self._found.clear()

    def of(self, number: int, alive: Callable[[int], None]) -> Ints:
        """Return where a shard's samples begin, int64 (samples,); `alive` is told of bytes as they come, and raises to end it.

        Raises PipelineError, OSError, and what `alive` does.
        """
        with self._lock:
            learning = self._learning.setdefault(number, threading.Lock())
        while not learning.acquire(timeout=_PAUSE):
            alive(0)
        try:
            if number not in self._places or not self._has(number):
                self._places[number] = self._learn(number, alive)
                self._found.add(number)
            return self._places[number]
        finally:
            learning.release()

    def _has(self, number: int) -> bool:
        """Tell whether workers find a shard's index."""
        if number not in self._found:
            where = self._plan.indexes[number]
            if not is_entry(where) and not _is_here(where) and self._cache.find(self._address(where).identity) is None:
                return False
            self._found.add(number)
        return True

    def _learn(self, number: int, alive: Callable[[int], None]) -> Ints:
        where, sha256, samples = self._plan.indexes[number], self._plan.hashes[number], int(self._plan.layout.counts[number])
        if is_entry(where):
            return np.array([record.members[0].offset for record in load(where)], np.int64)
        if _is_here(where):
            return offsets(_local(where), where, samples)
        address = self._address(where)
        etag = f"of sha256:{sha256}" if sha256 else ""
        kept = self._kept(address, etag)
        if kept is not None:
            with suppress(ShardError):  # a wrong one that was uploaded before
                return self._fitting(offsets(kept, str(address), samples), number)
        text = self._fetched(where)
        places = self._fitting(offsets(text, str(address), samples), number)
        self._keep(Facts(address.identity, len(text), etag, "", self._set), text, alive)
        return places

    def _fitting(self, places: Ints, number: int) -> Ints:
        """Return places; raises ShardError where they can't be those of a shard of its size."""
        size = int(self._plan.sizes[number])
        if len(places) and places[-1] >= size:
            raise ShardError(
                f"{self._address(self._plan.indexes[number])}: has a sample at byte {places[-1]}, and its tar {size} bytes; it is "
                "another tar's index: upload the right one"
            )
        return places

    def _kept(self, address: Place, etag: str) -> bytes | None:
        """Return an index that the folder has, where the shard's hash says that it is of this version."""
        found = self._cache.find(address.identity)
        if not etag or found is None or found.etag != etag:
            return None
        with self._cache.open(replace(found, set=self._set)) as entry:
            entry.hold(0, entry.size)
            return b"".join(entry.pieces()) if entry.there(0, entry.size) else None

    def _fetched(self, index: str) -> bytes:
        try:
            return self._fetch(index, _INDEX_BYTES, lambda head: head.startswith(b"v1.2 "))
        except MissingError as error:
            raise MissingError(
                f"{error}; a manifest counts the set's samples, and of a remote tar only an index tells where they lie: upload it "
                "beside the tar, or run `python -m pipeline index` with the tars' URLs and point at the manifest that it writes"
            ) from None

    def _keep(self, facts: Facts, text: bytes, alive: Callable[[int], None]) -> None:
        with self._cache.open(facts) as entry:
            entry.hold(0, entry.size)
            if entry.there(0, entry.size) and b"".join(entry.pieces()) != text:
                entry.forget()  # of a set that was uploaded anew: workers read what is here
            while not entry.there(0, entry.size):
                claim = entry.claim(0, entry.size)
                if claim is None:
                    alive(0)
                    time.sleep(_PAUSE)
                    continue
                with claim:
                    claim.begin(0)
                    claim.take(0, memoryview(text))
                    alive(len(text))


def _local(index: str) -> bytes:
    try:
        return Path(index).read_bytes()
    except OSError as error:
        raise SourceError(
            f"{index}: can't be read ({error.strerror}); it is the index that a manifest here names for a remote tar: put it "
            "there, or run `python -m pipeline index` again"
        ) from error


def _is_here(index: str) -> bool:
    """Tell whether an index lies on this machine."""
    return os.path.isabs(index)  # noqa: PTH117
