"""The nouns that the stages of a build hand to each other: items as columns, encoded samples, sizes, progress.

Items are columns, not objects: 1.6 million rows stay in a few hundred MB.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.int64]  # numbers of rows (or of slots), or a number for each

LEFT_OUT = -1
MENDED = "+end"  # stands behind the type of a JPEG whose lost end mark was put back


@dataclass(frozen=True, slots=True)
class Items:
    """What a source holds, n rows in the source's order, all checked.

    root        folder that the paths are relative to (absolute)
    keys        n sample keys, unique in the whole set (format.names grammar)
    ids         n ids as the source has them where any differs from its key, else None
    paths       n paths relative to root
    labels      int64 (n,): class indices, or the labels as they are
    classes     class names by index, None where labels are used as they are
    split_names the splits in the settings' order
    splits      int16 (n,): index into split_names, LEFT_OUT (-1) for rows that no split takes
    extra       n dicts for the samples' json, None where no column was asked for
    groups      n texts; samples of equal ones stay in one split (shares are drawn by them), None where no column was asked for
    notes       what the user should know and nothing that is wrong (rows left out, val classes that train lacks), a line each
    """

    root: str
    keys: Sequence[str]
    ids: Sequence[str] | None
    paths: Sequence[str]
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...] | None
    split_names: tuple[str, ...]
    splits: npt.NDArray[np.int16]
    extra: Sequence[Mapping[str, Any]] | None = None
    groups: Sequence[str] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def metadata(self, row: int) -> dict[str, Any] | None:
        """Return a sample's json: its extra columns and, where a set's ids aren't its keys, its id; None where there is none."""
        found: dict[str, Any] = {}
        if self.ids is not None:
            found["id"] = self.ids[row]
        if self.extra is not None:
            found.update(self.extra[row])
        return found or None


@dataclass(frozen=True, slots=True)
class Encoded:
    """One picture ready to be written: its field ("jpg"), its bytes, its true type as found ("jpeg", "png", ..., "jpeg+end")."""

    field: str
    data: bytes
    kind: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A picture that can't be packed: `cause` is a short fixed word to count by ("missing", ...), `reason` says it in full."""

    path: str
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as it is written: key and members (field, bytes) in their order, the picture first."""

    key: str
    members: tuple[tuple[str, bytes], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class SplitSize:
    """What a split comes to: shards, samples, and the shards' bytes."""

    shards: int
    samples: int
    bytes: int


def modified(status: os.stat_result) -> int:
    """Return when a file was changed, in nanoseconds, as 63 bits hold it: after the year 2262 it wraps."""
    return status.st_mtime_ns & (2**63 - 1)


class Progress(Protocol):
    """Who is told how far a command is."""

    def begin(self, doing: str, total: int, unit: str = "images") -> None:
        """Start a stage of `total` pictures, or what `unit` says (0: not known)."""

    def advance(self, size: int) -> None:
        """Count one, of `size` bytes."""
