"""Writes samples into shards: one deterministic tar, its index and its hash in one pass, cut by the bytes as written.

A shard appears under its name by rename, after its data and its index are on the disk: exists means complete.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shardify.errors import naming
from shardify.format import index, tar
from shardify.format.manifest import ShardEntry
from shardify.format.names import PARTIAL, index_name, shard_name
from shardify.items import Sample

BUFFER_BYTES = 4 * 2**20  # a disk's head that reads elsewhere comes back once for each of these


def write_shards(samples: Iterable[Sample], folder: Path, split: str, limit: int) -> Generator[ShardEntry, None, None]:
    """Write samples, in their order, into as few shards of at most `limit` bytes as that allows; yield each when it is complete.

    The law is order.cut's: a shard ends before the limit is passed, none is empty, and a sample that is larger by itself gets
    its own. Raises StorageError where the folder fails; then, and when closed early, the unfinished shard is removed.
    """
    shard: _Shard | None = None
    number = 0
    try:
        for sample in samples:
            size = sum(tar.member_bytes(len(data)) for _, data in sample.members)
            if shard is not None and shard.size + size + len(tar.END) > limit:
                entry, shard = shard.finish(), None
                yield entry
            if shard is None:
                shard = _Shard(folder, shard_name(split, number))
                number += 1
            shard.add(sample)
        if shard is not None:
            entry, shard = shard.finish(), None
            yield entry
    finally:
        if shard is not None:
            shard.discard()


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file: under a temporary name, to the disk, then renamed. Raises StorageError, and leaves nothing then."""
    partial = path.with_name(path.name + PARTIAL)
    with naming(path):
        try:
            with partial.open("wb") as file:
                file.write(data)
                _sync(file)
            partial.rename(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


class _Shard:
    """One shard that is being written, under its temporary name; `size` is in bytes, without the end."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._partial = self._path.with_name(name + PARTIAL)
        self._hash = hashlib.sha256()
        self._records: list[tar.SampleRecord] = []
        self.size = 0
        with naming(self._partial):
            self._file = self._partial.open("wb", buffering=BUFFER_BYTES)

    def add(self, sample: Sample) -> None:
        """Append a sample's members."""
        members = tuple(self._append(f"{sample.key}.{field}", data) for field, data in sample.members)
        self._records.append(tar.SampleRecord(sample.key, tuple(field for field, _ in sample.members), members))

    def finish(self) -> ShardEntry:
        """End the tar, put it and its index on the disk, and give both their names."""
        with naming(self._partial):
            self._write(tar.END)
            self.size += len(tar.END)
            _sync(self._file)
            self._file.close()
        write_file(self._path.with_name(index_name(self._path.name)), index.dump(self._records))
        with naming(self._path):
            self._partial.rename(self._path)
            _sync_folder(self._path.parent)
        return ShardEntry(self._path.name, len(self._records), self.size, self._hash.hexdigest())

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):  # a full disk fails again while the buffer is flushed
            self._file.close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _append(self, name: str, data: bytes) -> tar.Member:
        member = tar.Member(name, self.size + tar.BLOCK, len(data))
        with naming(self._partial):
            self._write(tar.header(name, len(data)))
            self._write(data)
            self._write(bytes(-len(data) % tar.BLOCK))
        self.size += tar.member_bytes(len(data))
        return member

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk: a rename is safe only then."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
