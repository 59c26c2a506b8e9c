"""Fetches ranges of remote shards into the cache folder: each byte once, by whoever comes first among all that share the folder.

hold -> what is missing -> claim it, or wait for whoever has -> fetch -> all there: compare the hash
                           compressed: take its stream on, or wait for whoever does -> unpack
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline.errors import ChangedError, SourceError, said
from pipeline.listing import Ints, span
from pipeline.prefetch.placing import Placing
from pipeline.prefetch.plan import Fetching, Plan
from pipeline.prefetch.settling import Settler
from pipeline.prefetch.share import Share
from pipeline.prefetch.streams import Packed, Streams
from pipeline.progress import Block, Count
from pipeline.stores.cache import CHUNK, Cache, Claim, Entry, Facts
from pipeline.stores.http import HttpOptions, Remote
from pipeline.stores.objects import ObjectOptions
from pipeline.stores.remote import addressing, kind_of, opened
from pipeline.stores.unpacking import coding_of, is_packed, kept_as

_log = logging.getLogger("pipeline")

_HASHED = "sha256:"  # begins what tells a version that a manifest gives the hash of
_PAUSE = 0.005  # seconds between two looks at what another process fetches
_LOOK_SECONDS = 1.0  # between two looks at all that the folder holds, 5 us an object, while a good part of it is free
_GOOD_PART = 4  # others fetch too, and would together take what each of them saw a second ago
_FULL_SECONDS = 0.05  # between two looks at a full one, of which nothing was let go: with what could go they cost 50 us an object


class Superseded(Exception):  # noqa: N818  (no error)
    """Another run has begun: nobody wants these bytes any more."""


class NoRoom(SourceError):  # noqa: N818  (who waits for room catches it)
    """The folder's disk is full, or its quota used up, whatever the disk said before."""


@dataclass(slots=True)
class FetchedPart:
    """What a window holds of a shard: bytes [start, stop) of its object, and those samples' bytes that go when it is used up.

    stays: whether all of the shard does.
    """

    entry: Entry
    start: int
    stop: int
    done: list[tuple[int, int]] = field(default_factory=list)
    stays: bool = False


class Fetcher:
    """Makes ranges of a remote set's samples resident; for any number of threads."""

    def __init__(self, plan: Plan, fetching: Fetching, block: Block) -> None:
        """Open the cache folder; raises SourceError where it can't be used."""
        self._plan, self._block = plan, block
        self.cache = Cache(Path(fetching.folder), fetching.limit)
        self._set = fetching.set
        self._lease = self.cache.lease(fetching.set)
        kind, objects = kind_of(plan.paths[0]), ObjectOptions(**fetching.objects)
        self._made = partial(opened, kind, HttpOptions(**fetching.http), objects)
        self._store, self._address = self._made(), addressing(kind, objects)
        self._known: dict[str, Remote] = {}  # by the object's name: what its server said of it
        self._lock = threading.Lock()
        self._room = 0
        # What one that died has counted.
        self._before = block.count(Count.RETRIES), block.count(Count.PAUSED_NS), block.count(Count.SKIPPED_BYTES), block.replies
        self._looked_at = self._full_until = 0.0
        self.reserve = 0  # bytes of the folder that nothing takes which isn't wanted yet
        self._full, self._told = threading.Event(), False
        self._settler = Settler(self._unsettled)
        self._placing = Placing(
            plan, self.cache, fetching.set, self._address, lambda url, most, expect: self._store.fetch(url, most, expect=expect)
        )
        self._streams = Streams(self._store, lambda: self.cache.room() - self.reserve, plan.layout.settings.lanes + 1)

    def begin(self) -> None:
        """Begin a run; raises SourceError where the folder was removed and can't be made again."""
        if self._lease.lost:  # the folder was emptied, or removed
            self._lease.close()
            self.cache.make()
            self._lease = self.cache.lease(self._set)
        self._placing.begin()

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
            places = self._placing.of(number, partial(self._alive, wanted=wanted))
            entry = self._entry(self._plan.paths[number], int(self._plan.sizes[number]), self._plan.hashes[number])
        start, end = span(places, entry.size, first, stop)
        entry.hold(start, end)
        stays = not share.unkept(number, 0, len(places))
        return FetchedPart(entry, start, end, _unkept(places, entry.size, number, (first, stop), share), stays)

    def open_bytes(self, number: int, start: int, stop: int, *, keep: bool) -> FetchedPart:
        """Hold bytes [start, stop) of a shard, which go when they are used up unless `keep`; raises as `open` does."""
        self._learn(number)
        with self._asking(self._plan.paths[number]):
            entry = self._entry(self._plan.paths[number], int(self._plan.sizes[number]), self._plan.hashes[number])
        entry.hold(start, stop)
        return FetchedPart(entry, start, stop, [] if keep else [(start, stop)], keep)

    def _learn(self, number: int) -> None:
        """Take over which version of a shard the trainer saw, or ask for it where no hash tells versions apart.

        Another one is an error; without this, what an earlier one left in the folder would be taken for this one's.
        """
        version, name = self._plan.versions[number] if self._plan.versions else "", self._address(self._plan.paths[number]).identity
        if version and name not in self._known:
            self._known[name] = Remote.known_by(version, int(self._plan.sizes[number]))
        elif not self._plan.hashes[number] and name not in self._known:
            self._known[name] = self._store.look(self._plan.paths[number])
            self._tell_of_requests()

    def fill(self, number: int, part: FetchedPart, wanted: Callable[[], bool]) -> None:
        """Fetch what is missing of a part; raises as `open` does."""
        missing = sum(stop - start for start, stop in part.entry.missing(part.start, part.stop))
        self._block_add(Count.CACHED_BYTES, max(0, part.stop - part.start - missing))  # chunks reach beyond the part
        self._fetch(number, part, wanted)

    def compare(self, number: int, part: FetchedPart, wanted: Callable[[], bool]) -> None:
        """Compare the object that a filled part is of with its hash, once it is whole; raises as `open` does."""
        while not self._compared(number, part):  # by another window, which may find that it isn't what it should be
            self._alive(0, wanted)
            time.sleep(_PAUSE)
            self._fetch(number, part, wanted)

    def _compared(self, number: int, part: FetchedPart) -> bool:
        """Compare an object with its hash, where that can be and wasn't done yet; False while another window does."""
        url, sha256 = self._plan.paths[number], self._plan.hashes[number]
        if not sha256 or part.entry.vouched or not part.entry.there(0, part.entry.size):
            return True
        opened = partial(self._entry, url, part.entry.size, sha256)
        return self._settler.verify(opened, part.entry.path, sha256, stays=part.stays)

    def _fetch(self, number: int, part: FetchedPart, wanted: Callable[[], bool]) -> None:
        url, sha256 = self._plan.paths[number], self._plan.hashes[number]
        address = self._address(url)
        if coding := coding_of(address.path):
            packed = Packed(url, str(address), coding, part.entry.size, sha256)
            with self._asking(url):
                self._streams.fill(part.entry, packed, part.start, part.stop, partial(self._alive, wanted=wanted))
        else:
            self._fill(url, part.entry, part.start, part.stop, wanted)
            known = self._known.get(address.identity)
            if not part.stays and known is not None and not known.validator and not self._told:
                self._told = True
                _log.warning(
                    "%s: its server tells versions neither by ETag nor by date, and not all of the set stays in %s: a tar that is "
                    "replaced by one as long would only be noticed where its samples begin elsewhere",
                    address,
                    self.cache.folder,
                )

    def _unsettled(self, url: str, path: str, error: OSError) -> None:
        """Say that an object can't be put on the medium."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._full.set()
        what = f"{path}: can't be written to its disk ({error.strerror}); it held {url}"
        with self._lock:
            self._block.add(Count.FAILED, 1)
            self._block.report(said(SourceError(f"{what}: run again, or give LoaderOptions(cache_dir=...) on another disk")))

    def was_full(self) -> bool:
        """Tell whether what had been written found no room on the disk after all, since this was asked last."""
        was = self._full.is_set()
        self._full.clear()
        return was

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
            known = share.reads(number) and self._placing.knows(number)
            if known and Path(self.cache.path(self._kept_as(path))).exists():
                places = self._placing.of(number, lambda _size: None)
                with suppress(OSError), self._entry(path, int(self._plan.sizes[number]), self._plan.hashes[number]) as entry:
                    for start, stop in _unkept(places, entry.size, number, (0, len(places)), share):
                        freed += entry.sweep(start, stop)
        return freed

    def reclaim_shards(self, kept: Container[int]) -> int:
        """Give back what earlier runs left of all shards but those that stay, and nobody reads; returns how many bytes."""
        freed = 0
        for number, path in enumerate(self._plan.paths):
            if number not in kept and Path(self.cache.path(self._kept_as(path))).exists():
                with suppress(OSError), self._entry(path, int(self._plan.sizes[number]), self._plan.hashes[number]) as entry:
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

    def has_room_for_all(self, whole: int) -> bool:
        """Tell whether there is room for what isn't there of a set that takes `whole` bytes."""
        return self.cache.make_room(max(0, whole - self.own_bytes()))

    def alive(self) -> None:
        """Say that something has been done."""
        with self._lock:
            self._block.add(Count.PROGRESS, 1)

    def interrupt(self) -> None:
        """End what is being fetched now; what is asked for from now on comes over new connections.

        Of compressed shards it ends by itself: their streams go on where they stand.
        """
        if self.unpacks:
            return
        with self._lock:
            self._before, old = self._counted(), self._store
            self._store = self._made()
        old.close()

    def stop(self) -> None:
        """End what is being fetched."""
        self._store.close()

    def close(self) -> None:
        """Let others have the set's room, now that nothing is fetched any more."""
        self._settler.close()
        self._lease.close()

    def _entry(self, url: str, size: int, sha256: str) -> Entry:
        known = self._known.get(self._address(url).identity)
        etag, modified = (f"{_HASHED}{sha256}", "") if sha256 else (known.etag, known.modified) if known else ("", "")
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
                    if not self._read(url, entry, (begin, end), partial(self._take, claim, wanted)):
                        claim.disown()  # whose bytes are there by now, nobody knows
                        raise ChangedError(
                            f"{self._address(url)}: changed while several parts of it were read; old and new bytes can't be "
                            "mixed: read it again from its start, and give a new version a new name"
                        )

    def _take(self, claim: Claim, wanted: Callable[[], bool], offset: int, data: memoryview) -> None:
        claim.take(offset, data)
        self._alive(len(data), wanted)

    def _read(self, url: str, entry: Entry, part: tuple[int, int], take: Callable[[int, memoryview], None]) -> bool:
        """Read a part; tells whether it is of the version that others have read of meanwhile."""
        name = self._address(url).identity
        known = self._known.get(name)
        served = "" if known else entry.served()
        with self._asking(url):
            try:
                seen = self._store.read(url, *part, known or Remote.known_by(served, entry.size), take, expect=_is_binary)
            except ChangedError:
                if not served:
                    raise
                raise ChangedError(
                    f"{self._address(url)}: was replaced since parts of it were fetched into {self.cache.folder}, though its "
                    "manifest gives the same hash: if the same bytes were uploaded again, clear that folder (`python -m pipeline "
                    "cache clear`), else index the new ones"
                ) from None
        with self._lock:
            before = self._known.get(name, seen)
            self._known[name] = before.joined(seen)
        hashed = entry.facts.etag.startswith(_HASHED)
        return not before.change(seen) and (not hashed or entry.came(seen.validator))

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
            retries, paused, skipped, replies = self._counted()
            self._block.put(Count.RETRIES, retries)
            self._block.put(Count.PAUSED_NS, paused)
            self._block.put(Count.SKIPPED_BYTES, skipped)
            self._block.replied(replies)

    def _counted(self) -> tuple[int, int, int, dict[int, int]]:
        """Return retries, ns between tries, bytes that nobody wanted and replies by status, of all stores up to now."""
        counts, (retries, paused, skipped, replies) = self._store.counts, self._before
        kinds = sorted({*replies, *counts.requests})
        return (
            retries + counts.retries,
            paused + int(counts.waited_seconds * 1e9),
            skipped + counts.skipped_bytes,
            {kind: replies.get(kind, 0) + counts.requests.get(kind, 0) for kind in kinds},
        )

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


def _is_binary(head: bytes) -> bool:
    """Tell whether a tar may begin so: its first header has zero bytes, and pages of HTML, XML or JSON have none."""
    return not head.strip() or b"\0" in head


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
