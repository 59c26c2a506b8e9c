"""Reads one tar over the network, once and forward: its samples, its size and its hash, or all that is wrong with it.

A thread takes the bytes from the store and hashes them; headers are walked beside it, and what lies between them is let pass.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, cast

from pipeline.stores.forward import Forward, LeftError
from pipeline.stores.http import Address, HttpStore, Remote
from shardify.format import tar


@dataclass(frozen=True, slots=True)
class Scan:
    """A tar's samples in order, its sha256 in hex, and what its server said of it; `size` in bytes."""

    records: list[tar.SampleRecord]
    size: int
    sha256: str
    remote: Remote


def scan(store: HttpStore, address: Address, known: Remote, passed: Callable[[int], None]) -> Scan:
    """Read a tar; `passed` is told how many bytes came, and ends the scan by what it raises.

    Raises FormatError with its problems where a reader would miss samples or mix them up, RemoteError where it can't be read,
    ChangedError among them where it isn't what `known` says.
    """
    file, hashed, seen = Forward(), hashlib.sha256(), [known]

    def take(_offset: int, data: memoryview) -> None:
        file.feed(data)
        hashed.update(data)
        passed(len(data))

    def bring() -> None:
        try:
            seen[0] = store.read(address, 0, None, known, take)
        except LeftError:
            pass
        except BaseException as error:  # whatever it is, whoever waits must hear of it
            file.end(error)
        else:
            file.end()

    threading.Thread(target=bring, daemon=True, name=f"bring {address}").start()
    try:
        records = tar.all_samples(cast("BinaryIO", file), known.size, str(address))
        size = file.drain()
    finally:
        file.leave()
    return Scan(records, size, hashed.hexdigest(), seen[0])
