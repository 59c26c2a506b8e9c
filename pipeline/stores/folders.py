"""Tells what lies in local folders, each listed once however many names are looked up in it."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pipeline.errors import SourceError

_TEXT = 2**62  # sorts behind a number of any length
_NAMED = 10  # file names in a message; the rest is a number
_NEAREST_OF = 1000  # names that a missing one is compared with: a million would take seconds


class Folders:
    """What lies in folders, each listed once."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[frozenset[str], frozenset[str]] | None] = {}

    def look(self, folder: str) -> tuple[frozenset[str], frozenset[str]] | None:
        """Return the names of (files, folders) in a folder, None where there is no such folder."""
        if folder not in self._seen:
            self._seen[folder] = _list(folder)
        return self._seen[folder]

    def kind(self, path: str) -> Literal["file", "folder"] | None:
        """Return what lies at a path; tars are looked up in the listing of their folder, not one by one."""
        folder, _, name = path.rpartition("/")
        if name.endswith(".tar") and (listing := self.look(folder or "/")) is not None:
            return "file" if name in listing[0] else "folder" if name in listing[1] else None
        try:
            return "folder" if Path(path).is_dir() else "file" if Path(path).is_file() else None
        except PermissionError as error:
            raise SourceError(f"{path}: can't be read ({error.strerror})") from error
        except (OSError, ValueError):
            return None  # longer than a name may be, as written-out patterns are; or not a name at all

    def around(self, folder: str, name: str) -> str:
        """Say what lies in a folder where `name` doesn't: the names most like it, else the first."""
        listing = self.look(folder)
        if listing is None:
            return f"there is no folder {folder}"
        names = sorted(listing[0] | listing[1], key=natural)
        near = difflib.get_close_matches(name, names[:_NEAREST_OF], n=3)
        return f"{folder} holds {some(near or names, 3, len(names))}" if names else f"{folder} is empty"


def _list(folder: str) -> tuple[frozenset[str], frozenset[str]] | None:
    files, folders = set[str](), set[str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                (folders if entry.is_dir(follow_symlinks=False) else files).add(entry.name)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise SourceError(f"{folder}: can't be listed ({error.strerror})") from error
    return frozenset(files), frozenset(folders)


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return the key that sorts numbers in names by value: 2.tar before 10.tar.

    A number goes by how many digits it has, then by these: Python makes no integer of very long ones.
    """
    parts = [(part, part.lstrip("0")) for part in re.split(r"([0-9]+)", name) if part]
    return [(len(digits), digits) if part.isdecimal() else (_TEXT, part) for part, digits in parts], name


def some(names: Sequence[str], most: int = _NAMED, total: int | None = None) -> str:
    """Return the first names as text, and how many more of `total` (None: of these) there are."""
    more = (len(names) if total is None else total) - min(len(names), most)
    return ", ".join(itertools.islice(names, most)) + (f" and {more} more" if more > 0 else "")
