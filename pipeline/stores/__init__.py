"""Where shards lie: each store opens a shard and reads bytes forward from an offset."""

from __future__ import annotations

from typing import Protocol


class Source(Protocol):
    """An open shard."""

    @property
    def size(self) -> int:
        """Its size in bytes."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`; raises ShardError where there are fewer."""
        ...

    def close(self) -> None:
        """Give its resources back; a second call does nothing."""
        ...
