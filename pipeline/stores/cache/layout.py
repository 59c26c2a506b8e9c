"""How an object lies in the cache: one sparse file that holds its bytes at their own offsets, and says itself which are there.

    [0, size)     the object's bytes, as far as they are there
    table         a byte for each 64 KiB of them: 1 where all are there; begins at the next page
    last page     head: magic, size, chunk, when it was used last, boot, vouched, then JSON: url, etag, modified, set, served

A byte of the table is written whole, so that any number of processes may read it while one writes. It is set after the bytes are
written, which survives the death of a process; what a machine's end leaves of them is trusted only where it was vouched for.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.stores.copies import PAGE

CHUNK: Final = 64 * 1024  # what is fetched or given back at least
_MAGIC: Final = b"pipeline cache 1"
_HEAD: Final = struct.Struct("<16sQQQ16sBxH")
USED_AT, BOOT_AT, VOUCHED_AT, TEXT_AT = 32, 40, 56, 58  # where these lie in the head; the last with its length
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Facts:
    """What an object is: its URL less its secrets, its size in bytes, what tells its version from another, its set.

    served: the ETag or date under which its bytes came, where a hash stands for the version.
    """

    url: str
    size: int
    etag: str = ""
    modified: str = ""
    set: str = ""
    served: str = ""

    def is_version_of(self, other: Facts) -> bool:
        """Tell whether both may be the same bytes: nothing that both know differs."""
        pairs = [(self.etag, other.etag)]
        if not all(pairs[0]):  # servers of one name may differ in the date, but not in the ETag too
            pairs.append((self.modified, other.modified))
        return self.size == other.size and all(mine == its or not mine or not its for mine, its in pairs)


@dataclass(frozen=True, slots=True)
class Head:
    """The last page of an object's file."""

    facts: Facts
    used_ns: int
    boot: bytes
    vouched: bool


def table_at(size: int) -> int:
    """Return where the table of an object of so many bytes begins."""
    return -(-size // PAGE) * PAGE


def chunks(size: int) -> int:
    """Return how many chunks an object has."""
    return -(-size // CHUNK)


def file_size(size: int) -> int:
    """Return the length of an object's file."""
    return table_at(size) + -(-chunks(size) // PAGE) * PAGE + PAGE


def dump(head: Head) -> bytes:
    """Return the last page."""
    facts = head.facts
    told = {"url": facts.url, "etag": facts.etag, "modified": facts.modified, "set": facts.set, "served": facts.served}
    text = json.dumps(told).encode()
    if len(text) > PAGE - _HEAD.size:  # a URL of thousands of signs: the file's name tells it from others
        text = json.dumps({**told, "url": facts.url[:500], "set": facts.set[:500]}).encode()
    packed = _HEAD.pack(_MAGIC, facts.size, CHUNK, head.used_ns, head.boot, head.vouched, len(text))
    return (packed + text).ljust(PAGE, b"\0")


def load(page: bytes, length: int) -> Head | None:
    """Return what the last page of a file of `length` bytes says, None where it is no object of this version."""
    try:
        magic, size, chunk, used, boot, vouched, count = _HEAD.unpack_from(page)
        told: Mapping[str, str] = json.loads(page[_HEAD.size : _HEAD.size + count])
        facts = Facts(told["url"], size, told["etag"], told["modified"], told["set"], told.get("served", ""))
    except (struct.error, ValueError, KeyError, TypeError, RecursionError):
        return None
    if magic != _MAGIC or chunk != CHUNK or length != file_size(size):
        return None
    return Head(facts, used, boot, bool(vouched))


def read(descriptor: int) -> Head | None:
    """Return what an open file's last page says, None where it is no object of this version, or no file. Raises OSError."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size < PAGE:
        return None
    return load(os.pread(descriptor, PAGE, status.st_size - PAGE), status.st_size)


def boot_id() -> bytes:
    """Return what tells this run of the machine from others: 16 bytes, zeros where that isn't known."""
    try:
        return bytes.fromhex(_BOOT.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
