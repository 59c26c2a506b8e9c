"""Remembers which tars were indexed into a folder, and at which version: a line each, so that nothing is read twice.

    .shardify-indexed.jsonl    {"tar": URL less its secrets, "size", "etag", "modified", "samples", "sha256", "index", ...}

A line is appended once its tar's index has its name. Half a line, which a killed process left, is as good as none; so is the whole
file: without it tars are read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.stores.http import Remote

NAME = ".shardify-indexed.jsonl"


@dataclass(frozen=True, slots=True)
class Line:
    """What is known of a tar that was read to its end; `index` is a file's name, and hashes are in hex.

    `packed`: of a compressed tar its own size in bytes; `size` and `sha256` are of the plain one.
    """

    tar: str
    size: int
    etag: str
    modified: str
    samples: int
    sha256: str
    index: str
    index_sha256: str
    packed: int = 0

    @property
    def read_bytes(self) -> int:
        """How many bytes its server has."""
        return self.packed or self.size

    def is_of(self, remote: Remote) -> bool:
        """Tell whether this is surely of the version that a server has now."""
        known = (self.etag and remote.etag) or (self.modified and remote.modified)
        return bool(known) and not self.differs(remote)

    def differs(self, remote: Remote) -> str:
        """Say how a server's version is another one, "" where nothing tells so."""
        return Remote(self.read_bytes, self.etag, self.modified).change(remote)


class Record:
    """The lines of a folder, the last one of each tar."""

    def __init__(self, folder: Path) -> None:
        """Read what is there; raises OSError."""
        self._path = folder / NAME
        self._lines: dict[str, Line] = {}
        self._cut, self._lock = False, threading.Lock()
        with suppress(FileNotFoundError):
            data = self._path.read_bytes()
            self._cut = bool(data) and not data.endswith(b"\n")
            for text in data.splitlines():
                with suppress(ValueError, TypeError, RecursionError):
                    line = _parse(json.loads(text))
                    self._lines[line.tar] = line

    def get(self, tar: str) -> Line | None:
        """Return what is known of a tar."""
        return self._lines.get(tar)

    def add(self, line: Line) -> None:
        """Remember a tar, from any thread; raises OSError."""
        with self._lock:
            if self._lines.get(line.tar) != line:
                text, self._cut = ("\n" if self._cut else "") + json.dumps(asdict(line)) + "\n", True
                self._append(text.encode())
                self._lines[line.tar], self._cut = line, False

    def _append(self, data: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o664)
        try:
            while data:
                try:
                    data = data[os.write(descriptor, data) :]
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(self._path)) from error
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _parse(found: Any) -> Line:
    """Return a line's values; raises TypeError for others than ours."""
    line = Line(**found)
    numbers = (line.size, line.samples, line.packed)
    texts = (line.tar, line.etag, line.modified, line.sha256, line.index, line.index_sha256)
    if not all(type(number) is int for number in numbers) or not all(type(text) is str for text in texts):
        raise TypeError("not a line of ours")
    return line


def hash_of(data: bytes) -> str:
    """Return the sha256 of an index."""
    return hashlib.sha256(data).hexdigest()
