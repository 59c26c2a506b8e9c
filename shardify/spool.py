"""The external shuffle's middle: takes samples as they are read, gives them back in slot order, in bounded memory.

    slots    |  bucket 0  |  bucket 1  |  bucket 2  |    runs of the permutation, each small enough to be held
    put      any order, appended to the bucket's file in large pieces; what fits the memory whole never leaves it
    take     bucket after bucket, by slot; a bucket's file goes when the shards that hold its samples are complete

What is in the files is in the journal: after a crash the samples before the last checkpoint are still there.
"""

from __future__ import annotations

import os
import time
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardify.durable import sync_folder
from shardify.errors import StorageError, naming
from shardify.items import Refused, Rows
from shardify.journal import Journal, Record
from shardify.machine import advise

NOTE_SECONDS = 10.0  # a killed build reads at most these again
SYNC_BYTES = 128 * 2**20  # what a power cut costs, about: a hard disk writes them in a second, so that Ctrl-C never waits for long
HELD_BYTES = 512 * 2**20  # where there are buckets: pieces are large enough by then, and all of it is flushed at the end
OVERHEAD_BYTES = 250  # what a held sample takes beside its bytes: two dict entries, the object, its place in a list
_ENTRY = np.dtype([("slot", "<i8"), ("offset", "<i8"), ("size", "<i8"), ("crc", "<u4"), ("field", "u1"), ("kind", "u1")])
_UNKNOWN, _HELD = -1, -2  # offsets of what has no bytes in a file
_PIECE = 4 * 2**20  # bytes a system call writes
_READ = 64 * 2**20  # bytes a system call reads


class Spool:
    """The samples of a build between reading and writing.

    `bounds` are the slots where buckets begin, and the end: int64 (buckets + 1,). `memory` is the limit in bytes of what is held.
    """

    def __init__(self, folder: Path, bounds: Rows, memory: int, journal: Journal) -> None:
        self._folder = folder
        self._bounds: list[int] = bounds.tolist()
        self._memory = memory
        self._limit = memory if len(bounds) <= 2 else min(memory // 2, HELD_BYTES)
        self._held_bytes = 0
        self._journal = journal
        self._entries = np.zeros(self._bounds[-1], _ENTRY)
        self._entries["offset"], self._entries["size"] = _UNKNOWN, -1
        self._names: list[str] = []  # of fields and kinds, by their codes
        self._held: dict[int, bytes] = {}
        self._held_of: dict[int, list[int]] = defaultdict(list)  # bucket -> its held slots
        self._bytes_of: dict[int, int] = defaultdict(int)
        self._ends: dict[int, int] = defaultdict(int)  # bucket -> bytes in its file
        self._unnoted: list[int] = []
        self._refused: list[tuple[int, str, str, str]] = []
        self._unsynced: set[int] = set()
        self._unsynced_bytes = 0
        self._syncer = ThreadPoolExecutor(1)  # starts no thread before it is used
        self._syncing: tuple[Future[None], int] | None = None  # a write to the medium, and how much of the journal it vouches for
        self._noted_at = time.monotonic()
        self._run = _Run(0, 0)

    @property
    def sizes(self) -> Rows:
        """The bytes of each slot's picture, -1 where none was put: int64 (n,)."""
        sizes: Rows = self._entries["size"]
        return sizes

    @property
    def in_files(self) -> bool:
        """Whether anything has left the memory."""
        return bool(self._ends)

    def describe(self, slot: int) -> tuple[str, str]:
        """Return the field and the true type of a slot's picture."""
        entry = self._entries[slot]
        return self._names[entry["field"]], self._names[entry["kind"]]

    def fields(self, first: int, end: int) -> set[str]:
        """Return the fields of the pictures in a range of slots."""
        entries = self._entries[first:end]
        return {self._names[code] for code in np.unique(entries["field"][entries["size"] >= 0]).tolist()}

    def missing(self) -> npt.NDArray[np.bool_]:
        """Tell for each slot whether its bytes aren't here."""
        return np.asarray(self._entries["offset"] == _UNKNOWN)

    def put(self, slot: int, field: str, kind: str, data: bytes) -> None:
        """Take a sample's picture; raises StorageError where the folder fails."""
        entry = self._entries[slot]
        if entry["size"] not in (-1, len(data)):
            raise StorageError(f"slot {slot}: {len(data)} bytes where a former run had {entry['size']}; begin anew with --force")
        bucket = self._bucket(slot)
        self._entries[slot] = (slot, _HELD, len(data), 0, self._code(field), self._code(kind))
        self._held[slot] = data
        self._held_of[bucket].append(slot)
        self._bytes_of[bucket] += len(data)
        self._held_bytes += len(data) + OVERHEAD_BYTES
        while self._held and self._held_bytes > self._limit:
            self._flush(max(self._bytes_of, key=self._bytes_of.__getitem__))
        if self._unsynced_bytes > SYNC_BYTES:
            self.checkpoint()
            self._sync()
        elif self.in_files and time.monotonic() - self._noted_at > NOTE_SECONDS:
            self.checkpoint()

    def refuse(self, row: int, slot: int, refused: Refused) -> None:
        """Note with the next checkpoint that a slot's picture, of this row of the source, can't be packed."""
        self._entries[slot] = (slot, _UNKNOWN, -1, 0, 0, 0)
        self._refused.append((row, refused.path, refused.cause, refused.reason))

    def end(self) -> None:
        """Note that all is put: where buckets are in files, what is held goes there too."""
        if self.in_files:
            for bucket in list(self._bytes_of):
                self._flush(bucket)
            self.checkpoint()
            self._sync()
        else:
            self._unnoted += self._held
            self.checkpoint()

    def checkpoint(self) -> None:
        """Write to the journal what the files hold."""
        entries = self._entries[np.array(self._unnoted, np.int64)]
        if len(entries) or self._refused:
            facts = {"names": self._names, "refused": self._refused}
            self._journal.append(Record("put", facts, entries.tobytes()))
        self._unnoted, self._refused = [], []
        self._noted_at = time.monotonic()

    def restore(self, records: Sequence[Record]) -> None:
        """Take over what a journal says of an earlier run: the samples in files, and the sizes of those that were held."""
        for record in records:
            if record.kind == "put":
                entries = np.frombuffer(record.blob, _ENTRY).copy()
                self._names = list(record.facts["names"])
                entries["offset"][entries["offset"] == _HELD] = _UNKNOWN  # was in memory: its size is known, its bytes are gone
                self._entries[entries["slot"]] = entries
        self._trim()

    def take(self, slots: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (slot, its picture) for ascending slots."""
        for slot in slots:
            if slot in self._held:
                yield slot, self._held.pop(slot)
                continue
            if slot not in self._run:
                self._load(slot)
            data = bytes(self._run.of(slot))  # a view would keep a whole run in memory beside the next
            if zlib.crc32(data) != self._entries["crc"][slot]:
                path = self._path(self._bucket(slot))
                path.unlink(missing_ok=True)
                raise StorageError(
                    f"{path}: damaged since it was written (check the disk); it is gone now, and --resume makes it anew"
                )
            yield slot, data

    def free(self, slot: int) -> None:
        """Remove the files of the buckets whose slots are all below `slot`."""
        for bucket in [b for b in self._ends if self._bounds[b + 1] <= slot]:
            with naming(self._path(bucket)):
                self._path(bucket).unlink(missing_ok=True)
            del self._ends[bucket]
            self._unsynced.discard(bucket)

    def close(self) -> None:
        """Wait for what is on its way to the medium, and vouch for it; the files stay."""
        self._syncer.shutdown()
        with suppress(StorageError):  # the files may be gone by now, and then nothing is to be vouched for
            self._vouch()

    def _code(self, name: str) -> int:
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    def _bucket(self, slot: int) -> int:
        return bisect_right(self._bounds, slot) - 1

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:06d}"

    def _flush(self, bucket: int) -> None:
        """Append what is held of a bucket to its file, in one piece."""
        self._folder.mkdir(mode=0o700, exist_ok=True)  # not those above: they may lie on a disk that isn't mounted now
        slots = self._held_of.pop(bucket)
        end = self._ends[bucket]
        sizes = self._entries["size"][slots]
        with naming(self._path(bucket)):
            make = 0 if end else os.O_CREAT  # a file that was removed meanwhile mustn't come back with a hole
            descriptor = os.open(self._path(bucket), os.O_WRONLY | make | os.O_CLOEXEC, 0o600)
            try:
                _write(descriptor, (self._held[slot] for slot in slots), end)
            finally:
                os.close(descriptor)
        self._entries["crc"][slots] = [zlib.crc32(self._held[slot]) for slot in slots]
        self._entries["offset"][slots] = end + np.cumsum(sizes) - sizes
        self._ends[bucket] = end + int(sizes.sum())
        self._held_bytes -= self._bytes_of.pop(bucket) + OVERHEAD_BYTES * len(slots)
        for slot in slots:
            del self._held[slot]
        self._unnoted += slots
        self._unsynced.add(bucket)
        self._unsynced_bytes += self._ends[bucket] - end

    def _sync(self) -> None:
        """Begin to put on the medium what the journal says so far; when the last such write is done, vouch for it there."""
        self._vouch()
        paths = [self._path(bucket) for bucket in sorted(self._unsynced)]
        self._syncing = self._syncer.submit(_sync_files, paths), self._journal.count
        self._unsynced.clear()
        self._unsynced_bytes = 0

    def _vouch(self) -> None:
        if self._syncing is not None:
            (done, records), self._syncing = self._syncing, None
            done.result()
            self._journal.append(Record("synced", {}), vouches=records)

    def _trim(self) -> None:
        """Cut the files to what the journal knows; what lies beyond was never noted. A file that is too short is forgotten."""
        stored = self._entries[self._entries["offset"] >= 0]
        buckets = np.searchsorted(self._bounds, stored["slot"], side="right") - 1
        for bucket in range(len(self._bounds) - 1):
            mine = stored[buckets == bucket]
            if not len(mine):
                continue
            end = int((mine["offset"] + mine["size"]).max())
            try:
                if self._path(bucket).stat().st_size < end:
                    raise FileNotFoundError
                os.truncate(self._path(bucket), end)
                self._ends[bucket] = end
                self._unsynced.add(bucket)  # who wrote it may have been killed before it was on the medium
                self._unsynced_bytes += end
            except FileNotFoundError:
                self._entries["offset"][mine["slot"]] = _UNKNOWN

    def _load(self, slot: int) -> None:
        """Read the run of slots that begins with `slot`, stays in its bucket and fits the memory; the files are read forward."""
        bucket = self._bucket(slot)
        self._run = _Run(0, 0)  # two at once would be twice the memory
        entries = self._entries[slot : self._bounds[bucket + 1]]
        entries = entries[entries["offset"] >= 0]
        fit = max(1, int(np.searchsorted(np.cumsum(entries["size"]), self._memory, side="right")))
        self._run = _Run.read(self._path(bucket), entries[:fit])


def refused_rows(records: Sequence[Record]) -> list[tuple[int, Refused]]:
    """Return the rows that a journal's build refused, and why; the last word on each."""
    found = {}
    for record in records:
        if record.kind == "put":
            found.update({row: Refused(path, cause, reason) for row, path, cause, reason in record.facts["refused"]})
    return list(found.items())


class _Run:
    """Samples of one bucket in memory: slots first to last, where each lies in the buffer."""

    def __init__(self, first: int, stop: int) -> None:
        self._first, self._stop = first, stop
        self._buffer = memoryview(b"")
        self._at: dict[int, tuple[int, int]] = {}

    @classmethod
    def read(cls, path: Path, entries: npt.NDArray[np.void]) -> _Run:
        """Read the entries of a file, in the order in which they lie in it."""
        run = cls(int(entries["slot"][0]), int(entries["slot"][-1]) + 1)
        ordered = entries[np.argsort(entries["offset"], kind="stable")]
        buffer = memoryview(bytearray(int(ordered["size"].sum())))
        run._buffer, at = buffer, 0
        starts = np.cumsum(ordered["size"]) - ordered["size"]
        run._at = {int(e["slot"]): (int(a), int(e["size"])) for e, a in zip(ordered, starts, strict=True)}
        gaps = np.flatnonzero(ordered["offset"][1:] != ordered["offset"][:-1] + ordered["size"][:-1]) + 1
        with naming(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for piece in np.split(ordered, gaps):
                    length = int(piece["size"].sum())
                    _read(descriptor, buffer[at : at + length], int(piece["offset"][0]))
                    at += length
                advise(descriptor, 0, 0, "DONTNEED")
            finally:
                os.close(descriptor)
        return run

    def __contains__(self, slot: int) -> bool:
        return self._first <= slot < self._stop

    def of(self, slot: int) -> memoryview:
        """Return a slot's bytes."""
        at, size = self._at[slot]
        return self._buffer[at : at + size]


def _sync_files(paths: Sequence[Path]) -> None:
    for path in paths:
        with naming(path), suppress(FileNotFoundError):  # its shards are complete
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)


def _write(descriptor: int, parts: Iterable[bytes], offset: int) -> None:
    """Write many parts in pieces of a few MiB."""
    waiting: list[bytes] = []
    size = 0
    for part in chain(parts, [b""]):
        waiting.append(part)
        size += len(part)
        if size < _PIECE and part:
            continue
        rest = memoryview(b"".join(waiting))
        while rest:
            done = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[done:], offset + done
        waiting, size = [], 0


def _read(descriptor: int, into: memoryview, offset: int) -> None:
    while into:
        done = os.preadv(descriptor, [into[:_READ]], offset)
        if not done:
            raise OSError("shorter than the journal says; begin anew with --force")
        into, offset = into[done:], offset + done
