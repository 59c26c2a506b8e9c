"""Where shards lie: each store opens a shard and reads bytes forward from an offset."""

from __future__ import annotations

from typing import Protocol


class Readable(Protocol):
    """Bytes of a shard, by their offsets in it."""

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`; raises ShardError where there are fewer."""
        ...


class Copied(Protocol):
    """Copies of shards that a prefetcher made."""

    def of(self, shard: int, source: Source) -> Readable | None:
        """Return a shard's copy, None where shards of its source's device aren't copied."""
        ...


class Source(Readable, Protocol):
    """An open shard."""

    @property
    def size(self) -> int:
        """Its size in bytes."""
        ...

    @property
    def device(self) -> int:
        """The device that it lies on (`stat.st_dev`)."""
        ...

    def hint(self, begin: int, end: int) -> None:
        """Have bytes [begin, end) read ahead, where the store can."""
        ...

    def close(self) -> None:
        """Give its resources back; a second call does nothing."""
        ...
