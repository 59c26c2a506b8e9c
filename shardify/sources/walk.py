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
_OUTSIDE, _NOWHERE = "link that leaves the root", "link to nothing"
# What systems and disk stations put beside files: resource forks, thumbnails, waste, what fsck found, compiled Python.
_OF_SYSTEMS = frozenset(
    ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found", "__pycache__")
)


@dataclass(slots=True)
class Walk:
    """A walk below `root` (a real path): class folders seen, entries left out by cause, and links that were to be pictures.

    `anywhere`: links are followed out of the root, and to folders, but not to one that they lie in.
    """

    root: str
    anywhere: bool = False
    classes: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    lost: dict[str, str] = field(default_factory=dict)  # path -> why: what others would have packed

    def pictures(self, folder: str) -> list[str]:
        """Return the pictures below the class folders of `folder`, which is "" or a path below root with a slash at its end.

        Paths are relative to root and in the order of their bytes. Raises StorageError for a folder that can't be listed.
        """
        found: list[str] = []
        level: list[tuple[int, str, tuple[str, ...]]] = []
        above = self._above(folder, ())
        for entry, kind in self._entries(folder, above):
            if kind == _FOLDER:
                self.classes.add(entry.name)
                level.append((entry.inode(), f"{folder}{entry.name}/", above))
            else:
                self.left_out["in no class folder"] += 1
        while level:
            below: list[tuple[int, str, tuple[str, ...]]] = []
            for _, listed, outer in sorted(level):
                above = self._above(listed, outer)
                for entry, kind in self._entries(listed, above):
                    if kind == _FOLDER:
                        below.append((entry.inode(), f"{listed}{entry.name}/", above))
                    else:
                        found.append(listed + entry.name)
            level = below
        return sorted(found, key=os.fsencode)

    def _above(self, folder: str, outer: tuple[str, ...]) -> tuple[str, ...]:
        """Return the real folders on the way down to what a folder holds, where links to folders are followed."""
        return (*outer, os.path.realpath(f"{self.root}/{folder}")) if self.anywhere else ()

    def _entries(self, folder: str, above: tuple[str, ...]) -> Iterator[tuple[os.DirEntry[str], str]]:
        """Yield the folders and pictures that a folder holds, and which of the two they are; what is neither is counted."""
        path = f"{self.root}/{folder}"
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    kind = self._kind(entry, above)
                    if kind in (_FOLDER, _PICTURE):
                        yield entry, kind
                    else:
                        self.left_out[kind] += 1
                        if kind in (_OUTSIDE, _NOWHERE) and (_ending(entry.name) in EXTENSIONS or os.path.isdir(entry.path)):  # noqa: PTH112
                            self.lost[folder + entry.name] = kind
        except OSError as error:
            raise StorageError(f"{path}: can't be listed ({error.strerror}); check the disk and the permissions") from error

    def _kind(self, entry: os.DirEntry[str], above: tuple[str, ...]) -> str:
        """Return folder, picture, or why the entry is left out."""
        if entry.name.startswith(".") or entry.name in _OF_SYSTEMS:
            return "hidden"
        if entry.is_dir(follow_symlinks=False):
            return _FOLDER
        if entry.is_symlink():
            kind = self._follow(entry, above)
            if kind:
                return kind
        elif not entry.is_file():
            return "no regular file"
        ending = _ending(entry.name)
        return _PICTURE if ending in EXTENSIONS else f".{ending}" if ending else "no extension"

    def _follow(self, entry: os.DirEntry[str], above: tuple[str, ...]) -> str:
        """Return what a link is: "" for a file to take, a folder to go into, or why neither; a loop can't hang."""
        target = os.path.realpath(entry.path)
        there = os.path.isdir(target)  # noqa: PTH112
        if not there and not os.path.isfile(target):  # noqa: PTH113
            return _NOWHERE
        if self.anywhere:
            return ("link to a folder around it" if target in above else _FOLDER) if there else ""
        if not target.startswith(self.root.rstrip("/") + "/"):
            return _OUTSIDE if target != self.root else "link to a folder"
        return "link to a folder" if there else ""


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()[1:]  # noqa: PTH122 - no Path object for each of millions of names
