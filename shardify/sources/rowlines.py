"""Keeps the line in which each row of a table begins, in a few bytes for a whole file instead of 8 for each row."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np
import numpy.typing as npt


class RowLines:
    """The line in which each row of a file begins, kept for the rows at which the counting jumps (16 bytes each)."""

    def __init__(self) -> None:
        self._rows, self._lines = array("q"), array("q")  # from row _rows[i] on, lines count up from _lines[i]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> int:
        run = bisect_right(self._rows, row) - 1
        return self._lines[run] + row - self._rows[run]

    def add(self, line: int, rows: int = 1) -> None:
        """Add rows that begin in `line` and those behind it."""
        if not self._rows or self._lines[-1] + self._count - self._rows[-1] != line:
            self._rows.append(self._count)
            self._lines.append(line)
        self._count += rows

    def only(self, wanted: npt.NDArray[np.bool_]) -> RowLines:
        """Return the lines of the rows where `wanted`, bool (n,), is true."""
        rows = np.flatnonzero(wanted)
        run = np.searchsorted(np.array(self._rows), rows, side="right") - 1
        lines = np.array(self._lines)[run] + rows - np.array(self._rows)[run]
        jumps = np.flatnonzero(np.diff(lines, prepend=-1) != 1)
        found = RowLines()
        found._rows, found._lines = array("q", jumps.tolist()), array("q", lines[jumps].tolist())
        found._count = len(rows)
        return found
