"""Writes a shard: one deterministic tar, its index and its hash in one pass.

A shard appears under its name by rename, after its data and its index are on the disk: exists means complete. Its pages don't stay
in the page cache: others' do, and memory that is used again needn't be taken from the kernel, or a hypervisor, anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from shardify.durable import SHARED_MODE, sync_folder, write_file
from shardify.errors import naming
from shardify.format import index, tar
from shardify.format.manifest import ShardEntry
from shardify.format.names import PARTIAL, index_name
from shardify.items import Sample
from shardify.machine import advise

BUFFER_BYTES = 4 * 2**20  # a disk's head that reads elsewhere comes back once for each of these
TRAIL_BYTES = 64 * 2**20  # behind what is being written: a disk has most of it by then


def write_shard(samples: Iterable[Sample], folder: Path, name: str, *, note: Callable[[ShardEntry], object]) -> ShardEntry:
    """Write samples, in their order, into one shard; return what it came to.

    `note` is told of it when all of it is on the medium, before it gets its name. Raises StorageError where the folder fails; then
    the unfinished shard is removed.
    """
    shard = _Shard(folder, name)
    try:
        for sample in samples:
            shard.add(sample)
        return shard.finish(note)
    except BaseException:
        shard.discard()
        raise


class _Shard:
    """One shard that is being written, under its temporary name."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._partial = self._path.with_name(name + PARTIAL)
        self._hash = hashlib.sha256()
        self._records: list[tar.SampleRecord] = []
        self._size = 0
        # One is filled and written while the other is hashed, in a thread: that takes a millisecond a megabyte.
        self._buffer, self._other = bytearray(BUFFER_BYTES), bytearray(BUFFER_BYTES)
        self._filled = 0
        self._hasher = ThreadPoolExecutor(1, "hash")
        self._hashing: Future[None] | None = None
        with naming(self._partial):
            self._descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, SHARED_MODE)

    def add(self, sample: Sample) -> None:
        """Append a sample's members."""
        members = tuple(self._append(f"{sample.key}.{field}", data) for field, data in sample.members)
        self._records.append(tar.SampleRecord(sample.key, tuple(field for field, _ in sample.members), members))

    def finish(self, note: Callable[[ShardEntry], object]) -> ShardEntry:
        """End the tar, put it and its index on the disk, and give both their names."""
        with naming(self._partial):
            self._write(tar.END)
            self._flush()
            self._hashed()
            os.fsync(self._descriptor)
            self._let_go(0)
            self._close()
        write_file(self._path.with_name(index_name(self._path.name)), index.dump(self._records))
        entry = ShardEntry(self._path.name, len(self._records), self._size, self._hash.hexdigest())
        note(entry)
        with naming(self._path):
            self._partial.rename(self._path)
            sync_folder(self._path.parent)
        return entry

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _append(self, name: str, data: bytes) -> tar.Member:
        with naming(self._partial):
            self._write(tar.header(name, len(data)))
            member = tar.Member(name, self._size + self._filled, len(data))
            self._write(data)
            self._write(bytes(-len(data) % tar.BLOCK))
        return member

    def _write(self, data: bytes) -> None:
        if self._filled + len(data) > BUFFER_BYTES:
            self._flush()
        if len(data) > BUFFER_BYTES:
            self._put(memoryview(data))
            return
        self._buffer[self._filled : self._filled + len(data)] = data
        self._filled += len(data)

    def _flush(self) -> None:
        self._put(memoryview(self._buffer)[: self._filled])
        self._buffer, self._other, self._filled = self._other, self._buffer, 0

    def _put(self, data: memoryview) -> None:
        """Hash and write, and let the disk begin: else it idles until a whole shard waits for it."""
        self._hashed()
        self._hashing = self._hasher.submit(self._hash.update, data)
        start, rest = self._size, data
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._size += len(data)
        self._let_go(max(0, start - TRAIL_BYTES))

    def _let_go(self, start: int) -> None:
        """Have the kernel write what is dirty from `start` on, without waiting, and drop what isn't."""
        advise(self._descriptor, start, self._size - start, "DONTNEED")

    def _hashed(self) -> None:
        """Wait until what was put is hashed, and its buffer free."""
        if self._hashing is not None:
            self._hashing.result()

    def _close(self) -> None:
        self._hasher.shutdown()
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
