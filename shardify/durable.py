"""Puts files on the medium so that what has its name is whole: data first, then the name, then the folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shardify.errors import naming
from shardify.format.names import PARTIAL

PROBE = ".shardify-probe"
SHARED_MODE = 0o664  # of what a set consists of: whatever the umask, nobody else writes to it
_SHARED_FOLDER = 0o775


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file: under a temporary name, to the medium, then renamed. Raises StorageError, and leaves nothing then."""
    partial = path.with_name(path.name + PARTIAL)
    with naming(path):
        try:
            with open(partial, "wb", opener=_create) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, SHARED_MODE)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the medium: a rename is safe only then."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> bool:
    """Make a folder, and those above it that aren't there, for others to read whatever the umask; tell whether it was made.

    Raises OSError, FileExistsError where it is a file. `Path.mkdir(mode, parents=True)` makes those above as the umask has it.
    """
    for path in reversed(folder.parents):
        if not path.exists():
            path.mkdir(mode=_SHARED_FOLDER, exist_ok=True)
    try:
        folder.mkdir(mode=_SHARED_FOLDER)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


def check_writable(folder: Path) -> None:
    """Make a folder, and a file in it that goes again: raises StorageError where that can't be done, before hours of work.

    The file's name is always the same, so that one which a killed process left goes too.
    """
    with naming(folder):
        make_folder(folder)
        probe = folder / PROBE
        try:
            probe.touch()
        finally:
            probe.unlink(missing_ok=True)
