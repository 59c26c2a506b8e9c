"""Puts files into the folder of indexes, whole or not at all, and says of those that are there whether they may stay."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import OptionsError
from pipeline.index.record import Line
from pipeline.index.tars import RemoteTar, taking
from pipeline.machine import make_folder
from pipeline.stores.http import Remote
from pipeline.stores.remote import kind_of
from shardify.errors import FormatError
from shardify.format import index as layout
from shardify.format import manifest
from shardify.format.names import PARTIAL

_PRIVATE, _PUBLIC, _FOLDER = 0o600, 0o664, 0o775


def write(path: Path, data: bytes, *, force: bool, private: bool = False) -> bool:
    """Write a file, where none is there or with `force`; tell whether the file now says `data`. Raises OSError.

    `private`: for nobody else to read, as it holds signatures.
    """
    there = read(path)
    if there is not None and (there == data or not force):
        return there == data
    temporary = path.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE if private else _PUBLIC)
        with open(descriptor, "wb") as file:  # noqa: PTH123
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)
    return True


def read(path: Path) -> bytes | None:
    """Return what a file says, None where there is none; raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _sync(folder: Path) -> None:
    """Put a folder's entries on the medium: a rename is safe only then."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prepare(folder: Path) -> None:
    """Make the folder, and try that files can be made in it, before hours of reading; raises OptionsError."""
    try:
        make_folder(folder, _FOLDER)
        probe = folder / f".{secrets.token_hex(8)}{PARTIAL}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OptionsError(f"{folder}: can't be written to ({error.strerror}); name another folder by --out") from error


def in_the_way(path: Path, tar: RemoteTar, line: Line | None, remote: Remote) -> str:
    """Say why a tar can't be indexed where a former run left something else, "" where it can."""
    if line is not None and (change := line.differs(remote)):
        return f"{tar.address}: changed since it was indexed ({change}); --force indexes it anew"
    try:
        with path.open("rb") as file:
            layout.count(file.readline(64).decode("ascii", "replace"), str(path))
    except FileNotFoundError:
        return ""
    except FormatError as error:
        return f"{error}; --force replaces it"
    return ""


def manifest_in_the_way(path: Path, tars: Sequence[RemoteTar], remotes: Sequence[Remote]) -> str:
    """Say why a manifest that is there can't be written anew, "" where it can."""
    try:
        old = manifest.read(path)
    except FileNotFoundError:
        return ""
    except FormatError as error:
        return f"{error}; --force replaces it"
    if not old.indexed:
        return f"{path}: wasn't written by this command; name another folder by --out, or --force replaces it"
    kind = kind_of(tars[0].url)
    take = taking(kind)
    was = [take(entry.url).identity if kind_of(entry.url) == kind else entry.url for entry in old.shards]
    if was != [tar.name for tar in tars]:
        return f"{path}: lists {len(was):,} tars, and not these {len(tars):,}; --force replaces it"
    sizes = zip(tars, old.shards, remotes, strict=True)
    if any(not tar.coding and remote.size not in (None, entry.filesize) for tar, entry, remote in sizes):
        return f"{path}: lists other sizes than these tars have now; --force replaces it"
    return ""
