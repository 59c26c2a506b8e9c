"""Finds what claims to be a picture below class folders, in the order of the paths' bytes, and counts what it leaves out.

Folders are listed level by level, each level in the order of the inodes: the head of a hard disk goes forward once a level, where
a walk that goes down into each folder jumps between them. What an entry is the listing tells (no stat but for links).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardify.errors import StorageError

# All that claims to be a picture: whether it is one that can be packed is for `encode` to say, by its first bytes.
EXTENSIONS = frozenset(
    ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "tif", "tiff", "gif", "avif", "heic", "heif", "jxl", "jp2", "ppm")
)
_FOLDER, _PICTURE = "folder", "picture"


@dataclass(slots=True)
class Walk:
    """A walk below `root` (a real path): class folders seen, and how many entries were left out by cause."""

    root: str
    classes: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)

    def pictures(self, folder: str) -> list[str]:
        """Return the pictures below the class folders of `folder`, which is "" or a path below root with a slash at its end.

        Paths are relative to root and in the order of their bytes. Raises StorageError for a folder that can't be listed.
        """
        found: list[str] = []
        level: list[tuple[int, str]] = []
        for entry, kind in self._entries(folder):
            if kind == _FOLDER:
                self.classes.add(entry.name)
                level.append((entry.inode(), f"{folder}{entry.name}/"))
            else:
                self.left_out["in no class folder"] += 1
        while level:
            below: list[tuple[int, str]] = []
            for _, listed in sorted(level):
                for entry, kind in self._entries(listed):
                    if kind == _FOLDER:
                        below.append((entry.inode(), f"{listed}{entry.name}/"))
                    else:
                        found.append(listed + entry.name)
            level = below
        return sorted(found, key=os.fsencode)

    def _entries(self, folder: str) -> Iterator[tuple[os.DirEntry[str], str]]:
        """Yield the folders and pictures that a folder holds, and which of the two they are; what is neither is counted."""
        path = f"{self.root}/{folder}"
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    kind = self._kind(entry)
                    if kind in (_FOLDER, _PICTURE):
                        yield entry, kind
                    else:
                        self.left_out[kind] += 1
        except OSError as error:
            raise StorageError(f"{path}: can't be listed ({error.strerror}); check the disk and the permissions") from error

    def _kind(self, entry: os.DirEntry[str]) -> str:
        """Return folder, picture, or why the entry is left out."""
        if entry.name.startswith(".") or entry.name == "__MACOSX":
            return "hidden"
        if entry.is_dir(follow_symlinks=False):
            return _FOLDER
        refused = self._refuse_link(entry) if entry.is_symlink() else "" if entry.is_file() else "no regular file"
        if refused:
            return refused
        extension = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 - no Path object for each of millions of names
        return _PICTURE if extension[1:] in EXTENSIONS else extension or "no extension"

    def _refuse_link(self, entry: os.DirEntry[str]) -> str:
        """Say why a link isn't followed, or nothing: only files below root are, so that a loop can't hang."""
        target = os.path.realpath(entry.path)
        if not target.startswith(self.root.rstrip("/") + "/"):
            return "link that leaves the root"
        if os.path.isfile(target):  # noqa: PTH113
            return ""
        return "link to a folder" if os.path.isdir(target) else "link to nothing"  # noqa: PTH112
