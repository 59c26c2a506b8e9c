"""Finds which files are missing by listing each folder once: no stat for every file, which on a hard disk is a seek each."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

import numpy as np

from shardify.errors import StorageError

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def find_missing(root: str, paths: Sequence[str]) -> list[int]:
    """Return the rows, ascending, whose path below `root` is no file there, by the exact letters of its name.

    A link counts as what it leads to. Raises StorageError for a folder that is there and can't be listed.
    """
    missing: list[int] = []
    for folder, rows in _by_folder(paths):
        there = _files(os.path.join(root, folder))  # noqa: PTH118 - pathlib takes five times as long for a million folders
        missing += (row for row in rows if paths[row].rpartition("/")[2] not in there)
    return sorted(missing)


def _by_folder(paths: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield (folder, rows) in the order of the folders' names, which keeps neighbours of a tree together."""
    numbers: dict[str, int] = {}
    number_of = np.fromiter((numbers.setdefault(p.rpartition("/")[0], len(numbers)) for p in paths), np.int32, len(paths))
    rows = np.argsort(number_of, kind="stable")
    bounds = np.searchsorted(number_of[rows], np.arange(len(numbers) + 1))
    for folder, number in sorted(numbers.items()):
        yield folder, rows[bounds[number] : bounds[number + 1]].tolist()


def _files(folder: str) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if _is_file(entry)}
    except OSError as error:
        if error.errno in _NOT_THERE:
            return set()
        raise StorageError(f"{folder}: can't be listed ({error.strerror}); check the disk and the permissions") from error


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a file; a link that can't be followed is none, and says nothing of its neighbors."""
    try:
        return entry.is_file()
    except OSError:
        return False
