"""An open object of the cache, for the process that fetches it: what is there, who reads it, what goes.

Two kinds of locks, both gone with their process: a read lock on bytes says that a window holds them, a write lock on a part of the
table that its holder fetches those bytes, or gives them back. Each window has an `Entry` of its own, so that windows of one process
see each other's locks as those of others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from pipeline.errors import ShardError
from pipeline.stores import locks
from pipeline.stores.cache import layout
from pipeline.stores.cache.layout import CHUNK, Facts, Head
from pipeline.stores.copies import PAGE, punch

_READ = 2**20
_HASHED = 2**21  # bytes at once: with less, threads take the interpreter from each other more often
_SWEPT = 64  # chunks that are given back at once, where nobody reads any of them
_ABSENT, _THERE = 0, 1
_MARKS = bytes([_ABSENT, _THERE]).ljust(256, bytes([_ABSENT]))  # whatever else stands there, by damage, isn't there


class Entry:
    """An object's file, mapped where it tells what is there."""

    def __init__(self, path: str, descriptor: int, head: Head) -> None:
        """Take over an open file whose head was read; raises OSError."""
        self.path, self.facts, self.size = path, head.facts, head.facts.size
        self._descriptor = descriptor
        at = layout.table_at(self.size)
        self._table_at = at
        self._map = mmap.mmap(descriptor, layout.file_size(self.size) - at, offset=at)
        self._head_at = len(self._map) - PAGE

    @classmethod
    def load(cls, path: str) -> Self | None:
        """Open the object at a path; None where the file is damaged. Raises OSError: FileNotFoundError where there is none."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for ever
        try:
            head = layout.read(descriptor)
            entry = None if head is None else cls(path, descriptor, head)
        except BaseException:
            os.close(descriptor)
            raise
        if entry is None:
            os.close(descriptor)
        return entry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and let go of all that it holds; a second call does nothing."""
        if self._descriptor >= 0:
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def vouched(self) -> bool:
        """Whether all that is marked was compared with a hash, and is on the medium."""
        return bool(self._map[self._head_at + layout.VOUCHED_AT])

    @property
    def removed(self) -> bool:
        """Whether the file has lost its name: another one took its room."""
        return os.fstat(self._descriptor).st_nlink == 0

    def begin(self, set_name: str) -> None:
        """Say that it is used now, in a set; what a former run of the machine left of it is there only if it was vouched for."""
        boot = layout.boot_id()
        while not self._claim(0, self.size):
            time.sleep(0.001)  # whoever has it looks at a few bytes, or fetches for long: then the boot is this one
            if self._boot() == boot:
                break
        else:
            try:
                if self._boot() != boot:
                    if not self.vouched:
                        self._mark(0, layout.chunks(self.size), _ABSENT)
                    self._map[self._head_at + layout.BOOT_AT : self._head_at + layout.BOOT_AT + 16] = boot
            finally:
                self._unclaim(0, self.size)
        at = self._head_at + layout.USED_AT
        self._map[at : at + 8] = struct.pack("<Q", time.time_ns())
        if set_name != self.facts.set:
            self._tell(lambda facts: dataclasses.replace(facts, set=set_name))

    def served(self) -> str:
        """Return under which ETag or date its bytes came, "" where none are there, or nobody said."""
        if self.facts.served and self._map.find(bytes([_THERE]), 0, layout.chunks(self.size)) < 0:
            self._tell(lambda facts: dataclasses.replace(facts, served=""))
        return self.facts.served

    def came(self, served: str) -> bool:
        """Say under which ETag or date bytes came; False where others of it came under another one."""
        if served and served != self.facts.served:
            self._tell(lambda facts: facts if facts.served else dataclasses.replace(facts, served=served))
        return not served or served == self.facts.served

    def _tell(self, change: Callable[[Facts], Facts]) -> None:
        """Change the head's text; what else the head says is another's to write, at any time."""
        at = self._head_at + layout.TEXT_AT
        lock = self._table_at + at
        while not locks.try_write(self._descriptor, lock, lock + 1):
            time.sleep(0.001)
        head = layout.load(self._map[self._head_at :], layout.file_size(self.size))
        self.facts = change(self.facts if head is None else head.facts)
        rest = layout.dump(Head(self.facts, 0, bytes(16), vouched=False))[layout.TEXT_AT :]
        self._map[at : at + len(rest)] = rest
        locks.let_go(self._descriptor, lock, lock + 1)

    def _boot(self) -> bytes:
        at = self._head_at + layout.BOOT_AT
        return self._map[at : at + 16]

    def there(self, start: int, stop: int) -> bool:
        """Tell whether all bytes [start, stop) are there."""
        first, last = start // CHUNK, -(-stop // CHUNK)
        return self._map[first:last] == bytes([_THERE]) * (last - first)

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges to fetch so that bytes [start, stop) are there: whole chunks, the last one up to the object's end."""
        first, last = start // CHUNK, -(-min(stop, self.size) // CHUNK)
        found, marks = list[tuple[int, int]](), self._map[first:last].translate(_MARKS)
        at = marks.find(_ABSENT)
        while at >= 0:
            end = marks.find(_THERE, at)
            end = len(marks) if end < 0 else end
            found.append(((first + at) * CHUNK, min((first + end) * CHUNK, self.size)))
            at = marks.find(_ABSENT, end)
        return found

    def hold(self, start: int, stop: int) -> None:
        """Say that bytes [start, stop) are read, until `let_go` or `close`."""
        if start < stop:  # of an empty object nothing is
            locks.hold(self._descriptor, start, stop)

    def let_go(self, start: int, stop: int) -> None:
        """Say that bytes [start, stop) are no longer read."""
        if start < stop:
            locks.let_go(self._descriptor, start, stop)

    def claim(self, start: int, stop: int) -> Claim | None:
        """Return the right to fetch bytes [start, stop), for as long as its block runs; None while another process has it."""
        return Claim(self, start, stop) if self._claim(start, stop) else None

    def begin_stream(self) -> bool:
        """Say that this process makes the object's bytes, from its first one on; False while another one does."""
        at = self._table_at + self._head_at
        return locks.try_write(self._descriptor, at, at + 1)

    def end_stream(self) -> None:
        """Say so no longer."""
        at = self._table_at + self._head_at
        locks.let_go(self._descriptor, at, at + 1)

    def forget(self) -> None:
        """Say that none of its bytes is there: they aren't the object's. What nobody else holds is given back. Raises OSError."""
        try:
            self._unvouch()
        finally:
            self._mark(0, layout.chunks(self.size), _ABSENT)
        if self.size and self._claim(0, self.size):
            try:
                if not locks.is_held(self._descriptor, 0, self.size):
                    with suppress(OSError):  # some file systems give nothing back
                        punch(self._descriptor, 0, -(-self.size // PAGE) * PAGE)
            finally:
                self._unclaim(0, self.size)

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes, which are marked by the claim that fetches them; raises OSError."""
        while len(data):
            done = os.pwrite(self._descriptor, data, offset)
            data, offset = data[done:], offset + done

    def drop(self, start: int, stop: int) -> int | None:
        """Give whole chunks within [start, stop) back; returns their bytes, None where another reads or fetches some of them."""
        first, last = -(-start // CHUNK), chunks_below(stop, self.size)
        if first >= last:
            return 0
        begin, end = first * CHUNK, min(last * CHUNK, self.size)
        if not self._claim(begin, end):
            return None
        try:
            if locks.is_held(self._descriptor, begin, end):
                return None
            before = self._map[first:last]
            if not (size := sum(before) * CHUNK):
                return 0
            self._unvouch()
            self._mark(first, last, _ABSENT)
            if locks.is_held(self._descriptor, begin, end):  # since the first look, and may have seen the marks
                self._map[first:last] = before
                return None
            punch(self._descriptor, begin, -(-end // PAGE) * PAGE - begin if end == self.size else end - begin)
            return min(size, end - begin)
        finally:
            self._unclaim(begin, end)

    def sweep(self, start: int, stop: int) -> int:
        """Give back what nobody reads or fetches of whole chunks within [start, stop); returns the bytes."""
        first, last, freed = -(-start // CHUNK), chunks_below(stop, self.size), 0
        while first < last and (first := self._map.find(bytes([_THERE]), first, last)) >= 0:
            step = min(_SWEPT, last - first)
            while (size := self.drop(first * CHUNK, (first + step) * CHUNK)) is None and step > 1:
                step = 1
            freed, first = freed + (size or 0), first + step
        return freed

    def check(self, sha256: str) -> bool:
        """Compare all bytes with their hash; False where some aren't there yet.

        They must be held, so that nobody gives some of them back meanwhile, until they are settled. Raises ShardError where they
        aren't those: then none of them is there any more.
        """
        if not self.there(0, self.size):
            return False
        if not self.vouched and sha256 and (found := self._sha256()) != sha256:
            self._mark(0, layout.chunks(self.size), _ABSENT)
            raise ShardError(
                f"{self.facts.url}: its bytes came to sha256 {found}, and its manifest says {sha256}; it was damaged "
                "on the way, and comes anew when it is read again, or it or its manifest was replaced: upload both again"
            )
        return True

    def settle(self) -> None:
        """Put all bytes on the medium, and vouch for them: after this run of the machine too they are there. Raises OSError."""
        if not self.vouched:
            os.fsync(self._descriptor)
            self._vouch(vouched=True)

    def _sha256(self) -> str:
        """Return the hash of all bytes, in hex."""
        digest, buffer, at = hashlib.sha256(), memoryview(bytearray(_HASHED)), 0
        while at < self.size and (size := os.preadv(self._descriptor, [buffer[: self.size - at]], at)):
            digest.update(buffer[:size])
            at += size
        return digest.hexdigest()

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes, one piece after the other."""
        for at in range(0, self.size, _READ):
            yield os.pread(self._descriptor, min(_READ, self.size - at), at)

    def _mark(self, first: int, last: int, how: int) -> None:
        self._map[first:last] = bytes([how]) * (last - first)

    def _unvouch(self) -> None:
        """Say that marks can't be trusted after this run of the machine, before the first of them goes."""
        if self.vouched:
            self._vouch(vouched=False)

    def _vouch(self, *, vouched: bool) -> None:
        self._map[self._head_at + layout.VOUCHED_AT] = vouched
        self._map.flush()

    def _claim(self, start: int, stop: int) -> bool:
        return locks.try_write(self._descriptor, *self._marks(start, stop))

    def _unclaim(self, start: int, stop: int) -> None:
        locks.let_go(self._descriptor, *self._marks(start, stop))

    def _marks(self, start: int, stop: int) -> tuple[int, int]:
        """Return where in the file the marks of bytes [start, stop) lie."""
        first = start // CHUNK
        return self._table_at + first, self._table_at + max(first + 1, -(-stop // CHUNK))


class Claim:
    """The right to fetch a range, and what came of it so far: `take` gets it forward, from its beginning on."""

    def __init__(self, entry: Entry, start: int, stop: int) -> None:
        self._entry, self._start, self._stop, self._at = entry, start, stop, start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entry._unclaim(self._start, self._stop)

    def missing(self) -> list[tuple[int, int]]:
        """Return what is still to fetch of the range, now that nobody else does."""
        return self._entry.missing(self._start, self._stop)

    def begin(self, start: int) -> None:
        """Say that what comes next begins at a chunk."""
        assert start % CHUNK == 0
        self._at = start

    def disown(self) -> None:
        """Say that none of the range is there: its bytes aren't the object's."""
        self._entry._unvouch()
        self._entry._mark(self._start // CHUNK, chunks_below(self._stop, self._entry.size), _ABSENT)

    def take(self, offset: int, data: memoryview) -> None:
        """Write the next bytes, and mark the chunks that are whole by them; raises OSError."""
        assert offset == self._at
        entry = self._entry
        entry.write(offset, data)
        self._at += len(data)
        first, last = offset // CHUNK, chunks_below(self._at, entry.size)
        if first < last:
            entry._mark(first, last, _THERE)


def chunks_below(stop: int, size: int) -> int:
    """Return how many chunks of an object of `size` bytes end at or below `stop`."""
    return layout.chunks(size) if stop >= size else stop // CHUNK
