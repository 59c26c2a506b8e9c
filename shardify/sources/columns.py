"""What is asked of a whole column of texts: its distinct values, and which rows repeat (pandas' only door).

Both go by a 64-bit hash of each text, made for a whole column at once; texts that share one are then looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from shardify.sources.texts import Texts

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


def factorize(column: Sequence[str]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return each row's number among the distinct texts, int64 (n,), and these texts in the order of their first row."""
    texts = _texts(column)
    numbers, distinct = pd.factorize(_hashes(texts))
    first = np.empty(len(distinct), dtype=np.int64)
    first[numbers[::-1]] = np.arange(len(texts) - 1, -1, -1)
    if not all(texts.same(slice(start, stop), first[numbers[start:stop]]) for start, stop in texts.spans()):
        return _factorize_one_by_one(texts)
    return numbers.astype(np.int64, copy=False), [texts[row] for row in first.tolist()]


def repeats(column: Sequence[str]) -> list[tuple[int, int]]:
    """Return (first row, row) for each row whose text an earlier row has."""
    texts = _texts(column)
    hashes = _hashes(texts)
    ordered = np.sort(hashes)
    again = np.flatnonzero(np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]]))
    first: dict[str, int] = {}
    pairs = ((first.setdefault(texts[row], row), row) for row in again.tolist())
    return [(earlier, row) for earlier, row in pairs if earlier != row]


def _texts(column: Sequence[str]) -> Texts:
    return column if isinstance(column, Texts) else Texts.of(column)


def _hashes(texts: Texts) -> npt.NDArray[np.uint64]:
    """Hash each text: the sum of its bytes times the powers of a constant, modulo 2^64.

    Equal texts have equal hashes; of millions of ids hardly two share one by chance (made for it, some of 1,024 characters do).
    0.03 us a text of 16 characters, where a dict takes 0.35 and the texts as objects.
    """
    found = np.empty(len(texts), dtype=np.uint64)
    powers = inverse = np.ones(1, np.uint64)
    for start, stop in texts.spans():
        data, bounds = texts.raw(start, stop)
        if len(data) > len(powers):
            powers, inverse = _powers(_BASE, len(data)), _powers(pow(_BASE, -1, 2**64), len(data))
        terms = np.frombuffer(data, np.uint8) * powers[: len(data)]
        found[start:stop] = np.add.reduceat(terms, bounds[:-1]) * inverse[bounds[:-1]]
    return found


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


def _factorize_one_by_one(column: Sequence[str]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Do it without hashes of our own, for a column in which two texts share one."""
    numbers: dict[str, int] = {}
    counted: Iterator[int] = (numbers.setdefault(text, len(numbers)) for text in column)
    return np.fromiter(counted, np.int64, len(column)), list(numbers)
