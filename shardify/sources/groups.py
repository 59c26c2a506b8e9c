"""Finds the groups that lie in more than one split, where a table or its columns say which split a row is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shardify.items import LEFT_OUT
from shardify.sources.columns import factorize


def across_splits(
    groups: Sequence[str], splits: npt.NDArray[np.int16], names: Sequence[str], place: Callable[[int], str]
) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for each further split that a group lies in, at its first row there; `place` says where a row stands."""
    numbers, distinct = factorize(groups)
    rows = np.flatnonzero(splits != LEFT_OUT)
    _, found = np.unique(numbers[rows] * len(names) + splits[rows], return_index=True)
    firsts: dict[int, int] = {}
    for row in np.sort(rows[found]).tolist():
        first = firsts.setdefault(numbers[row], row)
        group = distinct[numbers[row]]
        if first != row and not (not group or group.isspace()):
            here, there = names[splits[row]], names[splits[first]]
            yield row, f"group {group!r} is in split {here} here, in split {there} in {place(first)}; a group stays in one split"
