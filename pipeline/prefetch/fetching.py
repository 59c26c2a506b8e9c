"""Fetches ranges of remote shards into the cache folder: each byte once, by whoever comes first among all that share the folder.

hold -> what is missing -> claim it, or wait for whoever has -> fetch -> all there: compare the hash
                           compressed: take its stream on, or wait for whoever does -> unpack
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.errors import ChangedError, MissingError, SourceError, said
from pipeline.indexing import is_entry, load
from pipeline.listing import Ints, offsets, span
from pipeline.prefetch.plan import Fetching, Plan
from pipeline.prefetch.settling import Settler
from pipeline.prefetch.share import Share
from pipeline.prefetch.streams import Packed, Streams
from pipeline.progress import Block, Count
from pipeline.stores import Place
from pipeline.stores.cache import CHUNK, Cache, Claim, Entry, Facts
from pipeline.stores.http import HttpOptions, Remote
from pipeline.stores.objects import ObjectOptions
from pipeline.stores.remote import addressing, kind_of, opened
from pipeline.stores.unpacking import coding_of, is_packed, kept_as

_PAUSE = 0.005  # seconds between two looks at what another process fetches
_INDEX_BYTES = 2**30
_LOOK_SECONDS = 1.0  # between two looks at all that the folder holds, 5 us an object, while a good part of it is free
_GOOD_PART = 4  # others fetch too, and would together take what each of them saw a second ago
_FULL_SECONDS = 0.05  # between two looks at a full one, of which nothing was let go: with what could go they cost 50 us an object


class Superseded(Exception):  # noqa: N818  (no error)
    """Another run has begun: nobody wants these bytes any more."""


class NoRoom(SourceError):  # noqa: N818  (who waits for room catches it)
    """The folder's disk is full, or its quota used up, whatever the disk said before."""


@dataclass(slots=True)
class FetchedPart:
    """What a window holds of a shard: bytes [start, stop) of its object, and those samples' bytes that go when it is used up."""

    entry: Entry
    start: int
    stop: int
    done: list[tuple[int, int]] = field(default_factory=list)


class Fetcher:
    """Makes ranges of a remote set's samples resident; for any number of threads."""

    def __init__(self, plan: Plan, fetching: Fetching, block: Block) -> None:
        """Open the cache folder; raises SourceError where it can't be used."""
        self._plan, self._block = plan, block
        self.cache = Cache(Path(fetching.folder), fetching.limit)
        self._set = fetching.set
        self._lease = self.cache.lease(fetching.set)
        kind, objects = kind_of(plan.paths[0]), ObjectOptions(**fetching.objects)
        self._store, self._address = opened(kind, HttpOptions(**fetching.http), objects), addressing(kind, objects)
        self._known: dict[str, Remote] = {}  # by the object's name: what its server said of it
        self._places: dict[int, Ints] = {}
        self._lock = threading.Lock()
        self._placing: dict[int, threading.Lock] = {}  # by the shard: whoever learns where its samples begin
        self._room = 0
        # What one that died has counted.
        self._before = block.count(Count.RETRIES), block.count(Count.PAUSED_NS), block.count(Count.SKIPPED_BYTES), block.replies
        self._looked_at = self._full_until = 0.0
        self.reserve = 0  # bytes of the folder that nothing takes which isn't wanted yet
        self._settler = Settler(self._report)
        self._streams = Streams(self._store, lambda: self.cache.room() - self.reserve, plan.layout.settings.lanes + 1)

    @property
    def unpacks(self) -> bool:
        """Whether some shards are compressed."""
        return any(map(is_packed, self._plan.paths))

    def open(self, number: int, first: int, stop: int, share: Share, wanted: Callable[[], bool]) -> FetchedPart:
        """Find the bytes of samples [first, stop) of a shard, and hold them; the part is the caller's to release.

        Raises PipelineError, OSError, and Superseded once they aren't `wanted` any more.
        """
        self._learn(number)
        with self._asking(self._plan.paths[number]):
            places = self._places_of(number, wanted)
            entry = self._entry(self._plan.paths[number], int(self._plan.sizes[number]), self._plan.hashes[number])
        start, end = span(places, entry.size, first, stop)
        entry.hold(start, end)
        return FetchedPart(entry, start, end, _unkept(places, entry.size, number, (first, stop), share))

    def open_bytes(self, number: int, start: int, stop: int, *, keep: bool) -> FetchedPart:
        """Hold bytes [start, stop) of a shard, which go when they are used up unless `keep`; raises as `open` does."""
        self._learn(number)
        with self._asking(self._plan.paths[number]):
            entry = self._entry(self._plan.paths[number], int(self._plan.sizes[number]), self._plan.hashes[number])
        entry.hold(start, stop)
        return FetchedPart(entry, start, stop, [] if keep else [(start, stop)])

    def _learn(self, number: int) -> None:
        """Take over which version of a shard the trainer saw, or ask for it where no hash tells versions apart.

        Another one is an error; without this, what an earlier one left in the folder would be taken for this one's.
        """
        version, name = self._plan.versions[number] if self._plan.versions else "", self._address(self._plan.paths[number]).identity
        if version and name not in self._known:
            etag, date = (version, "") if version.startswith('"') else ("", version)
            self._known[name] = Remote(int(self._plan.sizes[number]), etag, date)
        elif not self._plan.hashes[number] and name not in self._known:
            self._known[name] = self._store.look(self._plan.paths[number])
            self._tell_of_requests()

    def fill(self, number: int, part: FetchedPart, wanted: Callable[[], bool]) -> None:
        """Fetch what is missing of a part; raises as `open` does."""
        url, sha256 = self._plan.paths[number], self._plan.hashes[number]
        address = self._address(url)
        missing = sum(stop - start for start, stop in part.entry.missing(part.start, part.stop))
        self._block_add(Count.CACHED_BYTES, max(0, part.stop - part.start - missing))  # chunks reach beyond the part
        if coding := coding_of(address.path):
            packed = Packed(url, str(address), coding, part.entry.size, sha256)
            with self._asking(url):
                self._streams.fill(part.entry, packed, part.start, part.stop, partial(self._alive, wanted=wanted))
        else:
            self._fill(url, part.entry, part.start, part.stop, wanted)
        if sha256 and not part.entry.vouched and part.entry.there(0, part.entry.size):
            self._settler.verify(partial(self._entry, url, part.entry.size, sha256), part.entry.path, sha256, stays=not part.done)

    def _report(self, error: SourceError) -> None:
        with self._lock:
            self._block.add(Count.FAILED, 1)
            self._block.report(said(error))

    def release(self, part: FetchedPart) -> None:
        """Let go of a part, and give back what of it doesn't stay and nobody else reads."""
        try:
            part.entry.let_go(part.start, part.stop)
            for start, stop in part.done:
                self._block.add(Count.DROPPED_BYTES, part.entry.sweep(start, stop))
        finally:
            part.entry.close()
            self._full_until = 0.0

    def reclaim(self, share: Share) -> int:
        """Give back what earlier runs left of this set, and doesn't stay; returns how many bytes."""
        freed = 0
        for number, path in enumerate(self._plan.paths):
            known = share.reads(number) and (number in self._places or _is_here(self._plan.indexes[number]))
            if known and Path(self.cache.path(self._kept_as(path))).exists():
                places = self._places_of(number, lambda: True)
                with self._entry(path, int(self._plan.sizes[number]), self._plan.hashes[number]) as entry:
                    for start, stop in _unkept(places, entry.size, number, (0, len(places)), share):
                        freed += entry.sweep(start, stop)
        return freed

    def reclaim_shards(self, kept: Container[int]) -> int:
        """Give back what earlier runs left of all shards but those that stay, and nobody reads; returns how many bytes."""
        freed = 0
        for number, path in enumerate(self._plan.paths):
            if number not in kept and Path(self.cache.path(self._kept_as(path))).exists():
                with self._entry(path, int(self._plan.sizes[number]), self._plan.hashes[number]) as entry:
                    freed += entry.sweep(0, entry.size)
        return freed

    def own_bytes(self) -> int:
        """Return what this set takes of the folder."""
        return self.cache.bytes_of(self._set)

    def look_again(self) -> None:
        """Forget what room there was: something has changed."""
        self._looked_at = self._full_until = 0.0

    def has_room(self, size: int, beside: int, reclaim: Callable[[], int]) -> bool:
        """Tell whether so many bytes may be fetched where others need room `beside` them, having made room for all.

        Room is made of other sets first, then of what this one left.
        """
        now = time.monotonic()
        if now < self._looked_at + _LOOK_SECONDS and self._room - size >= self.cache.limit // _GOOD_PART:
            self._room -= size
            return True
        if now < self._full_until:
            return False
        wanted = size + beside
        found = self.cache.make_room(wanted) or (reclaim() > 0 and self.cache.make_room(wanted))
        self._looked_at, self._room = now, self.cache.room() - wanted
        self._full_until = 0.0 if found else now + _FULL_SECONDS
        return found

    def alive(self) -> None:
        """Say that something has been done."""
        with self._lock:
            self._block.add(Count.PROGRESS, 1)

    def stop(self) -> None:
        """End what is being fetched."""
        self._store.close()

    def close(self) -> None:
        """Let others have the set's room, now that nothing is fetched any more."""
        self._settler.close()
        self._lease.close()

    def _entry(self, url: str, size: int, sha256: str) -> Entry:
        known = self._known.get(self._address(url).identity)
        etag, modified = (f"sha256:{sha256}", "") if sha256 else (known.etag, known.modified) if known else ("", "")
        return self.cache.open(Facts(self._kept_as(url), size, etag, modified, self._set))

    def _kept_as(self, url: str) -> str:
        return kept_as(self._address(url).identity)

    def _fill(self, url: str, entry: Entry, start: int, stop: int, wanted: Callable[[], bool]) -> None:
        while missing := entry.missing(start, stop):
            claim = entry.claim(*missing[0])
            if claim is None:  # another process, or another window, fetches a part of it
                self._alive(0, wanted)
                time.sleep(_PAUSE)
                continue
            with claim:
                for begin, end in claim.missing():
                    claim.begin(begin)
                    if not self._read(url, entry.size, (begin, end), partial(self._take, claim, wanted)):
                        claim.disown()  # whose bytes are there by now, nobody knows
                        raise ChangedError(
                            f"{self._address(url)}: changed while several parts of it were read; old and new bytes can't be "
                            "mixed: read it again from its start, and give a new version a new name"
                        )

    def _take(self, claim: Claim, wanted: Callable[[], bool], offset: int, data: memoryview) -> None:
        claim.take(offset, data)
        self._alive(len(data), wanted)

    def _read(self, url: str, size: int, part: tuple[int, int], take: Callable[[int, memoryview], None]) -> bool:
        """Read a part; tells whether it is of the version that others have read of meanwhile."""
        name = self._address(url).identity
        with self._asking(url):
            seen = self._store.read(url, *part, self._known.get(name) or Remote(size), take)
        with self._lock:
            before = self._known.get(name, seen)
            self._known[name] = before.joined(seen)
        return not before.change(seen)

    @contextmanager
    def _asking(self, url: str) -> Iterator[None]:
        """Count what the network is asked for; raises SourceError where the folder can't be used, NoRoom where its disk is full."""
        try:
            yield
        except OSError as error:
            where, what = self.cache.folder, error.strerror or str(error)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise SourceError(
                    f"{where}: can't hold {self._address(url)} ({what}); is its disk well? Give LoaderOptions(cache_dir=...) on "
                    "another one"
                ) from error
            raise NoRoom(
                f"{where}: no room for {self._address(url)} ({what}): {self.cache.used_bytes() / 2**20:.0f} of "
                f"{self.cache.limit / 2**20:.0f} MiB are taken; free some, or give LoaderOptions(cache_dir=...) on another disk"
            ) from error
        finally:
            self._tell_of_requests()

    def _tell_of_requests(self) -> None:
        with self._lock:
            counts, (retries, paused, skipped, replies) = self._store.counts, self._before
            self._block.put(Count.RETRIES, retries + counts.retries)
            self._block.put(Count.PAUSED_NS, paused + int(counts.waited_seconds * 1e9))
            self._block.put(Count.SKIPPED_BYTES, skipped + counts.skipped_bytes)
            kinds = sorted({*replies, *counts.requests})
            self._block.replied({kind: replies.get(kind, 0) + counts.requests.get(kind, 0) for kind in kinds})

    def _block_add(self, which: Count, number: int) -> None:
        with self._lock:
            self._block.add(which, number)

    def _alive(self, size: int, wanted: Callable[[], bool]) -> None:
        """Count bytes as they come, and stop where nobody wants them."""
        with self._lock:
            self._block.add(Count.PROGRESS, 1 + size)
            self._block.add(Count.MEDIUM_BYTES, size)
        if not wanted():
            raise Superseded

    def _places_of(self, number: int, wanted: Callable[[], bool]) -> Ints:
        """Return where a shard's samples begin, from its index, which is put into the folder for the workers."""
        with self._lock:
            placing = self._placing.setdefault(number, threading.Lock())
        while not placing.acquire(timeout=_PAUSE):
            self._alive(0, wanted)
        try:
            return self._places_known(number, wanted)
        finally:
            placing.release()

    def _places_known(self, number: int, wanted: Callable[[], bool]) -> Ints:
        places = self._places.get(number)
        if places is None:
            where, sha256, samples = self._plan.indexes[number], self._plan.hashes[number], int(self._plan.layout.counts[number])
            if is_entry(where):
                self._places[number] = np.array([record.members[0].offset for record in load(where)], np.int64)
                return self._places[number]
            if _is_here(where):
                self._places[number] = offsets(_local(where), where, samples)
                return self._places[number]
            address = self._address(where)
            etag = f"of sha256:{sha256}" if sha256 else ""
            text = self._kept_index(address, etag)
            if text is None:
                text = self._fetched(where)
                places = offsets(text, str(address), samples)
                self._keep_index(Facts(address.identity, len(text), etag, "", self._set), text, wanted)
            else:
                places = offsets(text, str(address), samples)
            self._places[number] = places
        return places

    def _kept_index(self, address: Place, etag: str) -> bytes | None:
        """Return an index that the folder has, where the shard's hash says that it is of this version."""
        found = self.cache.find(address.identity)
        if not etag or found is None or found.etag != etag:
            return None
        with self.cache.open(replace(found, set=self._set)) as entry:
            entry.hold(0, entry.size)
            return b"".join(entry.pieces()) if entry.there(0, entry.size) else None

    def _fetched(self, index: str) -> bytes:
        try:
            return self._store.fetch(index, _INDEX_BYTES, expect=lambda head: head.startswith(b"v1.2 "))
        except MissingError as error:
            raise MissingError(
                f"{error}; a manifest counts the set's samples, and of a remote tar only an index tells where they lie: upload it "
                "beside the tar, or run `python -m pipeline index` with the tars' URLs and point at the manifest that it writes"
            ) from None

    def _keep_index(self, facts: Facts, text: bytes, wanted: Callable[[], bool]) -> None:
        with self.cache.open(facts) as entry:
            entry.hold(0, entry.size)
            while not entry.there(0, entry.size):
                claim = entry.claim(0, entry.size)
                if claim is None:
                    self._alive(0, wanted)
                    time.sleep(_PAUSE)
                    continue
                with claim:
                    claim.begin(0)
                    self._take(claim, wanted, 0, memoryview(text))


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


def _unkept(places: Ints, size: int, number: int, samples: tuple[int, int], share: Share) -> list[tuple[int, int]]:
    """Return the bytes of those samples [first, stop) of a shard that don't stay.

    They begin with the chunk that the window before them has cut through, unless something in it stays.
    """
    found = []
    for part in share.unkept(number, *samples):
        start, stop = span(places, size, *part)
        below = share.bounds(number, *part)[0]
        least = span(places, size, below - 1, below)[1] if below else 0
        found.append((max(least, start // CHUNK * CHUNK), stop))
    return found
