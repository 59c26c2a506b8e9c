"""Unpacks compressed shards while they stream, into the plain tars of the cache folder: forward only, one stream a shard at a time.

    object   |######## fed ########|== came ==|            a range at a time, as long as what is wanted is likely to take
    plain    |- passed over -|####### written #######|rest|

What lies before the bytes that a window wants comes first. It stays where there is room, for the windows that want it later.
"""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeline.errors import ChangedError, ShardError
from pipeline.stores import RemoteStore
from pipeline.stores.cache import CHUNK, Entry
from pipeline.stores.http import Remote
from pipeline.stores.unpacking import Unpacking

_PAUSE = 0.005  # seconds between two looks at a stream that another window, or process, takes on
_CLAIM_PAUSE = 0.001  # whoever has a claim on unpacked bytes has it while it writes a piece of them
_LEAST_STEP = 256 * 1024
_MORE = 1.02  # than the mean: pictures are packed about evenly
_PILE_BYTES = 2 * 2**20  # that may come beyond what is wanted before the rest of a range is given up
_LOOKS = 3  # at an object that is another one as soon as it is read
_LOOK_SECONDS = 0.5  # between two looks at how much room there is, 5 us an object of the folder

Alive: TypeAlias = Callable[[int], None]
"""Is told how many bytes came; raises where nobody wants them."""
Put: TypeAlias = Callable[[int, memoryview], None]


class _Enough(Exception):  # noqa: N818  (no error)
    """What is wanted came sooner than a range's end."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A compressed shard: its URL, its name in messages, how it is compressed, and the plain tar's size in bytes and sha256."""

    url: str = field(repr=False)
    shown: str
    coding: str
    size: int
    sha256: str


class Stream:
    """A compressed shard that is read from its start on, as far as it was wanted; for whoever holds `lock`."""

    def __init__(self, store: RemoteStore, packed: Packed) -> None:
        self.lock = threading.Lock()
        self._store, self._packed = store, packed
        self._known: Remote | None = None
        self._taken = False  # whether any byte of it was
        self._begin()

    def _begin(self) -> None:
        """Stand at the start."""
        self._unpacking = Unpacking(self._packed.coding, self._packed.shown)
        self._pieces: Iterator[bytes] = iter(())
        self._pile, self._came = deque[bytes](), 0  # compressed bytes that weren't fed yet, and where the last of them ends
        self._at, self._rest = 0, bytearray()  # where in the plain tar it stands, at a chunk, and what it knows from there on
        self._hash, self._ended = hashlib.sha256(), False

    def advance(self, entry: Entry, start: int, stop: int, put: Put, alive: Alive) -> None:
        """Unpack until what is missing of bytes [start, stop) of the plain tar was put; raises PipelineError, OSError.

        After a RemoteError it goes on where it was; after a ShardError nothing is left of the shard in the cache.
        """
        goal = min(self._packed.size, -(-stop // CHUNK) * CHUNK)
        looks = 0
        try:
            while missing := entry.missing(start, stop):
                if self._at > missing[0][0]:
                    self._begin()
                try:
                    self._reach(goal, put, alive)
                except ChangedError:
                    looks += 1
                    if self._taken or looks == _LOOKS:
                        raise
                    self._known = None  # a page in the object's place may have been looked at; no byte was taken of either
        except ShardError:
            entry.forget()
            self._begin()
            raise
        except ChangedError:  # what was packed anew may well unpack to the same bytes: from its start, it may be tried
            self._known = None
            self._begin()
            raise

    def _reach(self, goal: int, put: Put, alive: Alive) -> None:
        """Go on up to a byte; at the end of the tar, to the end of the object too, and compare it with what is known of it."""
        while True:
            if self._known is None:
                alive(0)
                self._known = self._store.look(self._packed.url)
            if self._known.size is None or not self._known.ranges:
                goal = self._packed.size  # to read on later would cost all that comes before, so all is unpacked at once
            self._work(goal, put)
            if self._at >= goal and (self._ended or goal < self._packed.size):
                return
            if self._came == self._known.size:
                self._finish()
            else:
                self._known = self._ask(goal, self._known, put, alive)

    def _work(self, goal: int, put: Put) -> None:
        """Unpack of what came as much as is wanted."""
        while self._at < goal or goal >= self._packed.size:
            if self._flush(goal, put):
                continue
            if (piece := next(self._pieces, None)) is not None:
                self._take(piece)
            elif self._pile:
                self._pieces = self._unpacking.feed(self._pile.popleft())
            else:
                return

    def _take(self, piece: bytes) -> None:
        packed = self._packed
        if self._at + len(self._rest) + len(piece) > packed.size:
            raise ShardError(
                f"{packed.shown}: unpacks to more than the {packed.size} bytes that its manifest says; it was replaced, or "
                "something else wrote the manifest, with the size of what is compressed: run `python -m pipeline index` with it"
            )
        if packed.sha256:
            self._hash.update(piece)
        self._rest += piece

    def _flush(self, goal: int, put: Put) -> bool:
        """Put the chunks that are whole, up to a byte; tells whether there was one."""
        have = self._at + len(self._rest)
        stop = min(goal, have if have == self._packed.size else have // CHUNK * CHUNK)
        if stop <= self._at:
            return False
        count = stop - self._at
        put(self._at, memoryview(self._rest[:count]))
        del self._rest[:count]
        self._at = stop
        return True

    def _finish(self) -> None:
        """Compare what all of the object came to with what is known of it."""
        packed, size = self._packed, self._at + len(self._rest)
        self._unpacking.end()
        if size != packed.size:
            raise ShardError(
                f"{packed.shown}: unpacks to {size} bytes, and its manifest says {packed.size}; it was replaced: run "
                "`python -m pipeline index` with its URL again"
            )
        if packed.sha256 and (found := self._hash.hexdigest()) != packed.sha256:
            raise ShardError(
                f"{packed.shown}: unpacks to bytes of sha256 {found}, and its manifest says {packed.sha256}; it was replaced: run "
                "`python -m pipeline index` with its URL again"
            )
        self._ended = True

    def _ask(self, goal: int, known: Remote, put: Put, alive: Alive) -> Remote:
        """Have the next range come, and unpack it; a little that comes beyond what is wanted waits. Returns what is known now."""
        whole = goal >= self._packed.size

        def take(_offset: int, data: memoryview) -> None:
            if not whole and self._at >= goal and sum(map(len, self._pile)) > _PILE_BYTES:
                raise _Enough
            alive(len(data))
            self._taken = True
            self._pile.append(bytes(data))
            self._came += len(data)
            self._work(goal, put)

        stop = known.size if whole or known.size is None else min(known.size, self._came + self._step(goal, known.size))
        try:
            return self._store.read(self._packed.url, self._came, stop, known, take)
        except _Enough:
            return known

    def _step(self, goal: int, size: int) -> int:
        """Return how many bytes of the object are likely to be needed."""
        wanted = goal - self._at - len(self._rest)
        return int(wanted * size / max(1, self._packed.size) * _MORE) + _LEAST_STEP


class Streams:
    """The streams of a set's shards, those that were used last; for any number of threads."""

    def __init__(self, store: RemoteStore, room: Callable[[], int], most: int) -> None:
        """Take the store, what tells how many bytes may be kept beyond what is wanted, and how many streams stay open."""
        self._store, self._room, self._most = store, room, most
        self._streams: OrderedDict[str, Stream] = OrderedDict()
        self._wants: dict[str, list[tuple[int, int]]] = {}
        self._lock = threading.Lock()
        self._spare, self._looked_at = 0, -_LOOK_SECONDS

    def fill(self, entry: Entry, packed: Packed, start: int, stop: int, alive: Alive) -> None:
        """Have what is missing of bytes [start, stop) of the plain tar there; raises PipelineError, OSError, what `alive` does."""
        with self._wanting(packed.url, (start, stop)):
            while entry.missing(start, stop):
                stream = self._stream(packed)
                if not stream.lock.acquire(timeout=_PAUSE):
                    alive(0)
                    continue
                try:
                    if entry.begin_stream():
                        try:
                            stream.advance(entry, start, stop, lambda at, data: self._put(entry, packed.url, at, data), alive)
                        finally:
                            entry.end_stream()
                        continue
                finally:
                    stream.lock.release()
                alive(0)  # another process unpacks it
                time.sleep(_PAUSE)

    @contextmanager
    def _wanting(self, url: str, part: tuple[int, int]) -> Iterator[None]:
        """Have a part kept by whoever takes the stream past it."""
        with self._lock:
            self._wants.setdefault(url, []).append(part)
        try:
            yield
        finally:
            with self._lock:
                self._wants[url].remove(part)
                if not self._wants[url]:
                    del self._wants[url]

    def _stream(self, packed: Packed) -> Stream:
        with self._lock:
            stream = self._streams.get(packed.url)
            if stream is None:
                stream = self._streams[packed.url] = Stream(self._store, packed)
            self._streams.move_to_end(packed.url)
            for url in [url for url in self._streams if url not in self._wants][: max(0, len(self._streams) - self._most)]:
                del self._streams[url]
            return stream

    def _put(self, entry: Entry, url: str, at: int, data: memoryview) -> None:
        """Write what is wanted of unpacked bytes that begin at a chunk, and the rest while there is room for it."""
        for start, stop in entry.missing(at, at + len(data)):
            for begin, end in [(start, stop)] if self._may_keep(stop - start) else self._wanted_of(url, start, stop):
                try:
                    _write(entry, at, data, begin, end)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    self._spare = 0  # what nobody waits for needn't be there
                    for first, last in self._wanted_of(url, begin, end):
                        _write(entry, at, data, first, last)

    def _wanted_of(self, url: str, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the chunks of a range that windows wait for."""
        with self._lock:
            wants = list(self._wants.get(url, ()))
        chunks = [(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]
        return [(at, end) for at, end in chunks if any(at < last and first < end for first, last in wants)]

    def _may_keep(self, size: int) -> bool:
        """Tell whether there is room for bytes that nobody waits for yet."""
        with self._lock:
            if (now := time.monotonic()) > self._looked_at + _LOOK_SECONDS:
                self._spare, self._looked_at = self._room(), now
            if self._spare < size:
                return False
            self._spare -= size
            return True


def _write(entry: Entry, at: int, data: memoryview, start: int, stop: int) -> None:
    """Write what is missing of bytes [start, stop), of data that lies at `at`; raises OSError."""
    while (claim := entry.claim(start, stop)) is None:
        time.sleep(_CLAIM_PAUSE)
    with claim:
        for first, last in claim.missing():
            claim.begin(first)
            claim.take(first, data[first - at : last - at])
