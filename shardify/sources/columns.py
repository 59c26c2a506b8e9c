"""What is asked of a whole column of texts: its distinct values, and which rows repeat (pandas' only door)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd


def factorize(column: Sequence[str]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return each row's number among the distinct texts, int64 (n,), and these texts in the order of their first row."""
    numbers, distinct = pd.factorize(_objects(column), use_na_sentinel=False)
    return numbers.astype(np.int64, copy=False), [str(text) for text in distinct]


def repeats(column: Sequence[str]) -> list[tuple[int, int]]:
    """Return (first row, row) for each row whose text an earlier row has."""
    again = np.flatnonzero(pd.Index(_objects(column), dtype=object).duplicated(keep=False))
    first: dict[str, int] = {}
    pairs = ((first.setdefault(column[row], row), row) for row in again.tolist())
    return [(earlier, row) for earlier, row in pairs if earlier != row]


def _objects(column: Sequence[str]) -> npt.NDArray[np.object_]:
    """Hold the texts as they are: pandas' own text type would copy them all."""
    found = np.empty(len(column), dtype=object)
    found[:] = column
    return found
