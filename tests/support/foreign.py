"""Tars as others write them, and what lies in them by their indexes and by the standard library."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gallery import Silent

from shardify.format import index as layout
from shardify.index import Indexed, index


def mk(path: Path, members: Sequence[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT, **attributes: Any) -> Path:
    """Write a tar as the standard library does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for attribute, value in attributes.items():
                setattr(info, attribute, value)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples(first: int, count: int = 4, fields: Sequence[str] = ("jpg", "cls")) -> list[tuple[str, bytes]]:
    """Return members of well-formed samples, each of other bytes."""
    return [(f"k{n:04d}.{field}", f"{field} {n} ".encode() * (n + 1)) for n in range(first, first + count) for field in fields]


def run(*texts: object, **options: Any) -> Indexed:
    """Index without showing progress."""
    return index([str(text) for text in texts], progress=Silent(), **options)


def looked_up(path: Path, beside: Path | None = None) -> list[tuple[str, bytes]]:
    """Return (name, bytes) of every member that a tar's index lists, read by its offsets."""
    data = path.read_bytes()
    records = layout.load((beside or path.with_suffix(".idx")).read_bytes())
    return [(m.name, data[m.offset : m.offset + m.size]) for record in records for m in record.members]


def streamed(path: Path) -> list[tuple[str, bytes]]:
    """Return (name, bytes) of every regular file with an extension, by the standard library."""
    with tarfile.open(path) as archive:
        files = [member for member in archive if member.isreg() and "." in member.name.rpartition("/")[2]]
        return [(member.name, archive.extractfile(member).read()) for member in files]  # type: ignore[union-attr]
