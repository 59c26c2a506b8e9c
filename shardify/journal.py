"""Keeps account on the disk of how far a build is, so that one that was killed goes on: records, appended, each with a checksum.

    magic, then frames:  | length | crc32 | facts' length | facts (JSON) | blob |

A torn frame at the end is what a crash leaves; it is cut off. A record holds for ever where what it speaks of was on the medium
when it was written (`durable`), or was by the time of a later record that vouches for it. Any other is good for as long as the
machine stays up, since the page cache survives a process that is killed: after a restart it is forgotten.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardify.durable import sync_folder
from shardify.errors import SettingsError, naming

NAME = ".shardify-journal"
SPOOL = ".shardify-spool"  # the folder beside it for samples that don't fit in memory, where no other is named
_MAGIC = b"shardify journal 1\n"
_FRAME = struct.Struct("<QI")
_FACTS = struct.Struct("<I")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Record:
    """One entry: its kind, its facts (JSON), its bytes."""

    kind: str
    facts: Mapping[str, Any]
    blob: bytes = b""


class Journal:
    """The open journal of a build; `records` are those that were there when it was opened, as far as they can be trusted."""

    def __init__(self, path: Path, records: tuple[Record, ...] = ()) -> None:
        self.path = path
        self.records = records
        self.count = len(records)
        with naming(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o644)
            self._end = os.fstat(self._descriptor).st_size

    @classmethod
    def create(cls, path: Path, header: Record) -> Journal:
        """Begin a journal with one record: it appears under its name when that is on the medium."""
        return cls._begin(path, (header,), [_frame(header, None, 0)])

    @classmethod
    def reopen(cls, path: Path) -> Journal:
        """Open a journal to go on. Raises SettingsError where it is none of this version.

        It is written anew: what isn't trusted is dropped for good, else a record to come would vouch for it.
        """
        frames = _replay(path)
        return cls._begin(path, tuple(frame.record for frame in frames), [_frame(f.record, f.boot, 0) for f in frames])

    @classmethod
    def _begin(cls, path: Path, records: tuple[Record, ...], frames: Sequence[bytes]) -> Journal:
        partial = path.with_name(f"{path.name}.partial")
        with naming(partial):
            partial.unlink(missing_ok=True)
            journal = cls(partial, records)
            try:
                journal._write(b"".join((_MAGIC, *frames)), durable=True)
                journal.count = len(frames)
                partial.rename(path)
                journal.path = path
                sync_folder(path.parent)
            except BaseException:
                journal.close()
                raise
        return journal

    def append(self, record: Record, *, durable: bool = False, vouches: int = 0) -> None:
        """Write a record; `durable`: to the medium; `vouches`: what the first so many speak of is on the medium too."""
        durable = durable or vouches > 0
        self._write(_frame(record, None if durable else _boot(), vouches), durable=durable)
        self.count += 1

    def _write(self, data: bytes, *, durable: bool) -> None:
        rest = memoryview(data)
        with naming(self.path):
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                os.ftruncate(self._descriptor, self._end)  # behind a torn frame nothing would be read
                raise
            self._end += len(data)
            if durable:
                os.fsync(self._descriptor)

    def forget(self, kind: str) -> None:
        """Drop what was read of the records of a kind from memory."""
        self.records = tuple(record for record in self.records if record.kind != kind)

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._descriptor)


def read(path: Path) -> tuple[Record, ...]:
    """Return a journal's records as far as they can be trusted, and change nothing."""
    return tuple(frame.record for frame in _replay(path))


@dataclass(frozen=True, slots=True)
class _Frame:
    """A record as it lies in the file: the boot it is good for (None: for ever), and how many of the first ones it vouches for."""

    record: Record
    boot: str | None
    vouches: int


def _replay(path: Path) -> list[_Frame]:
    """Return the frames that can be trusted, those that are vouched for as good for ever."""
    with naming(path):
        data = path.read_bytes()
    frames = list(_frames(data)) if data.startswith(_MAGIC) else []
    if not frames:
        raise SettingsError(f"{path}: no journal of this version of shardify; begin anew with --force, or remove it yourself")
    boot = _boot()
    sure = max(frame.vouches for frame in frames)
    trusted = [replace(frame, boot=None) if i < sure else frame for i, frame in enumerate(frames)]
    return [frame for frame in trusted if frame.boot is None or (boot and frame.boot == boot)]


def _frame(record: Record, boot: str | None, vouches: int) -> bytes:
    facts = json.dumps({"kind": record.kind, "boot": boot, "vouches": vouches, "facts": record.facts}).encode()
    payload = b"".join((_FACTS.pack(len(facts)), facts, record.blob))
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _frames(data: bytes) -> Iterator[_Frame]:
    """Yield the frames up to the first torn one."""
    at = len(_MAGIC)
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < max(length, _FACTS.size) or zlib.crc32(payload) != checksum:
            return
        at += _FRAME.size + length
        (size,) = _FACTS.unpack_from(payload)
        try:
            told = json.loads(payload[_FACTS.size : _FACTS.size + size])
            yield _Frame(Record(told["kind"], told["facts"], payload[_FACTS.size + size :]), told["boot"], told["vouches"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""  # then nothing is trusted but what was on the medium
