"""Reads one tar over the network, once and forward: its samples, its size and its hash, or all that is wrong with it.

A thread takes the bytes from the store, unpacks those of a compressed tar and hashes them; headers are walked beside it, and what
lies between them is let pass. What is found is of the plain tar.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

from pipeline.errors import ShardError
from pipeline.stores import Place
from pipeline.stores.forward import Forward
from pipeline.stores.http import Counts, Remote
from pipeline.stores.unpacking import Unpacking
from shardify.errors import FormatError
from shardify.format import tar

# A bomb costs time, never memory. Pictures unpack to about their own size, raw masks to a hundred times; gzip's most is a thousand.
_MOST_TIMES, _ANY_TIMES_BYTES = 500, 256 * 2**20  # the former counts once so much was unpacked
_MOST_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class Scan:
    """A tar's samples in order, its sha256 in hex, and what its server said of it; `size` in bytes.

    `packed`: the size of what is compressed, 0 of a plain tar.
    """

    records: list[tar.SampleRecord]
    size: int
    sha256: str
    remote: Remote
    packed: int


class Store(Protocol):
    """What is needed of a store over the network: its URLs taken apart by its own kind of address."""

    @property
    def counts(self) -> Counts:
        """What the network was asked for, up to now."""
        ...

    def look(self, url: Any) -> Remote:
        """Return what lies at a URL; raises RemoteError."""
        ...

    def read(self, url: Any, start: int, stop: int | None, known: Remote | None, take: Callable[[int, memoryview], None]) -> Remote:
        """Give `take` the bytes [start, stop) forward, each exactly once; raises RemoteError."""
        ...


def scan(store: Store, address: Place, known: Remote, passed: Callable[[int], None], coding: str = "") -> Scan:
    """Read a tar; `passed` is told how many bytes came, and ends the scan by what it raises. `coding`: how it is compressed.

    Raises FormatError with its problems where a reader would miss samples or mix them up, or where it can't be unpacked,
    RemoteError where it can't be read, ChangedError among them where it isn't what `known` says.
    """
    file, hashed, seen = Forward(), hashlib.sha256(), [known]
    unpacked = _Unpacked(coding, str(address)) if coding else None

    def take(_offset: int, data: memoryview) -> None:
        for piece in (data,) if unpacked is None else unpacked.feed(data):
            file.feed(piece)
            hashed.update(piece)
        passed(len(data))

    def bring() -> None:
        try:
            seen[0] = store.read(address, 0, None, known, take)
            if unpacked is not None:
                unpacked.end()
        except BaseException as error:  # whatever it is, whoever waits must hear of it
            file.end(error)
        else:
            file.end()

    threading.Thread(target=bring, daemon=True, name=f"bring {address}").start()
    try:
        records = tar.all_samples(cast("BinaryIO", file), None if coding else known.size, str(address))
        size = file.drain()
    except ShardError as error:
        raise FormatError(str(error), [str(error)]) from error
    finally:
        file.leave()
    return Scan(records, size, hashed.hexdigest(), seen[0], 0 if unpacked is None else unpacked.packed)


class _Unpacked:
    """What a compressed tar unpacks to, within bounds."""

    def __init__(self, coding: str, shown: str) -> None:
        self._unpacking, self._shown, self._size = Unpacking(coding, shown), shown, 0
        self.packed = 0
        self.end = self._unpacking.end

    def feed(self, data: memoryview) -> Iterator[memoryview]:
        """Yield what comes of the next bytes; raises ShardError for more than a tar has."""
        self.packed += len(data)
        for piece in self._unpacking.feed(data):
            self._size += len(piece)
            if self._size > _MOST_BYTES or self._size > max(_ANY_TIMES_BYTES, _MOST_TIMES * self.packed):
                raise ShardError(
                    f"{self._shown}: unpacks to {self._size} bytes and more, of {self.packed} that were read by then: no tar of "
                    "samples does; if it is one, upload it as a plain tar"
                )
            yield memoryview(piece)
