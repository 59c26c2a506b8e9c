"""What can go wrong while packing, as one tree of types that carry their exit code.

    ShardifyError
    ├── SettingsError     exit 2: a setting, an argument or a target folder that can't be used
    ├── DataError         exit 1: the source (rows, pictures) or a packed set is wrong
    │   └── FormatError   exit 1: bytes that aren't in the format (tar, index, manifest)
    └── StorageError      exit 3: a disk, a folder or the environment failed

A message names the place, the cause and the next step.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class ShardifyError(Exception):
    """Base of all errors that shardify raises on purpose."""

    exit_code = 1


class SettingsError(ShardifyError):
    """A setting, an argument or a target folder that can't be used."""

    exit_code = 2


class DataError(ShardifyError):
    """The source or a packed set is wrong; `problems` lists everything found, one line each."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class FormatError(DataError):
    """Bytes that aren't in the format: a tar, an index or a manifest."""


class StorageError(ShardifyError):
    """A disk, a folder or the environment failed."""

    exit_code = 3


@contextmanager
def naming(place: object) -> Iterator[None]:
    """Turn an OSError raised inside into a StorageError that names `place` (or the file, where the error knows it)."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, place) from error


def storage_error(error: OSError, place: object) -> StorageError:
    """Return a StorageError with the file or `place`, the cause, and for a full disk what to do."""
    cause = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cause += "; free some space there, or choose another folder (--out; --work for an object store)"
    return StorageError(f"{error.filename or place}: {cause}")
