"""Where shards lie: each store opens a shard and reads bytes forward from an offset; here is what is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from pipeline.stores.http import Counts, Remote


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


class Place(Protocol):
    """A URL; its text holds no secret."""

    @property
    def path(self) -> str:
        """What its store knows it by."""
        ...

    @property
    def host(self) -> str:
        """Whose it is, as far as the URL says."""
        ...

    @property
    def identity(self) -> str:
        """The name of what it leads to, however it is signed."""
        ...

    def check(self) -> None:
        """Raise RemoteError if it can't be asked for."""
        ...


class Findable(Protocol):
    """What finding shards needs of a store over the network."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...
    def close(self) -> None:
        """End what it does; a second call does nothing."""
        ...

    def look(self, url: str) -> Remote:
        """Return what lies at a URL; raises RemoteError."""
        ...

    def names(self, url: str) -> dict[str, Remote]:
        """Return what lies in a folder, by name; raises RemoteError, also where folders can't be listed."""
        ...

    def fetch(self, url: str, limit: int, *, expect: Callable[[bytes], bool] | None = None) -> bytes:
        """Return all of a small file, of at most `limit` bytes; raises RemoteError."""
        ...


class RemoteStore(Findable, Protocol):
    """A store over the network; for any number of threads at once."""

    @property
    def counts(self) -> Counts:
        """What the network was asked for, up to now."""
        ...

    def read(
        self,
        url: str,
        start: int,
        stop: int | None,
        known: Remote | None,
        take: Callable[[int, memoryview], None],
        *,
        expect: Callable[[bytes], bool] | None = None,
    ) -> Remote:
        """Give `take(offset, bytes)` the bytes [start, stop) forward, each exactly once; raises RemoteError.

        `known`: what `look` or another read returned; another version is a ChangedError. Returns what is known of the object.
        """
        ...
