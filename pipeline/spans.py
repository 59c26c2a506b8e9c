"""Reads members of a tar by offset and size, those alone that its index tells of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.stores import Readable
from shardify.format import tar

Spans: TypeAlias = Sequence[tuple[int, int] | npt.NDArray[np.int64]]

_GAP = 64 * 1024  # bytes between two members that are cheaper read through than asked for apart


def read_members(file: Readable, spans: Spans, paths: Sequence[str] | None) -> list[memoryview] | None:
    """Return the bytes of each (offset, size); None where another header than that of its path stands before one of them.

    They are views of what was read in one piece: to copy a picture of 100 KB out of it costs some 0.01 ms.
    An index tells where a sample lies; after its tar was replaced by one of the same length other bytes lie there. Without `paths`
    nothing is compared.
    """
    if paths is None:
        return _read_spans(file, spans)
    starts, sizes = [int(span[0]) for span in spans], [int(span[1]) for span in spans]
    first, last = min(starts) - tar.BLOCK, max(start + size for start, size in zip(starts, sizes, strict=True))
    if first < 0:
        return None
    near, parts = last - first <= sum(sizes) + _GAP, list[memoryview]()
    whole = file.read(first, last - first) if near else b""
    for start, size, path in zip(starts, sizes, paths, strict=True):
        data, at = (whole, start - first) if near else (file.read(start - tar.BLOCK, tar.BLOCK + size), tar.BLOCK)
        if not tar.is_header(data[at - tar.BLOCK : at], path, size):
            return None
        parts.append(memoryview(data)[at : at + size])
    return parts


def said_of_another(path: str, key: str, offset: int) -> str:
    """Say that a tar isn't the one that its index was made of."""
    return (
        f"{path}: its members aren't those of sample {key!r}, which its index says begins at byte {offset - tar.BLOCK}; "
        "the tar was replaced or damaged after it was indexed: copy both again, or index it again"
        + ("; what was fetched of either goes by `python -m pipeline cache clear`" if "://" in path else "")
    )


def _read_spans(file: Readable, spans: Spans) -> list[memoryview]:
    """Read each (offset, size), in one request where they lie close together."""
    starts = [int(span[0]) for span in spans]
    sizes = [int(span[1]) for span in spans]
    first, last = min(starts), max(start + size for start, size in zip(starts, sizes, strict=True))
    if last - first > sum(sizes) + _GAP:
        return [memoryview(file.read(start, size)) for start, size in zip(starts, sizes, strict=True)]
    data = memoryview(file.read(first, last - first))
    return [data[start - first : start - first + size] for start, size in zip(starts, sizes, strict=True)]
