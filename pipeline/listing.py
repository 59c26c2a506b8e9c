"""A shard's index of which a sample's line is parsed when that sample is asked for.

A worker reads one in so many of a shard's samples: to parse all lines took 7 us a sample, in each worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.errors import ShardError
from shardify.errors import FormatError
from shardify.format import index
from shardify.format.tar import BLOCK, SampleRecord

Ints: TypeAlias = npt.NDArray[np.int64]

_DIGITS = 19
_FIRST = 64  # bytes: the first line is shorter
_LINE_END, _BLANK = 10, 32


class Records(Protocol):
    """A shard's samples, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> SampleRecord: ...

    def __iter__(self) -> Iterator[SampleRecord]: ...


class Listing:
    """The samples that an index lists in the order of the tar; raises ShardError for a line that is damaged."""

    def __init__(self, data: bytes, name: str, ends: Ints) -> None:
        self._data, self._name, self._ends = data, name, ends

    @classmethod
    def of(cls, data: bytes, name: str) -> Self | None:
        """Take an index's bytes; None where they must be parsed whole, to be in another order or to say what is wrong."""
        try:
            samples = index.count(data[:_FIRST].partition(b"\n")[0].decode("ascii", "replace"), name)
            offsets(data, name, samples)
        except (FormatError, ShardError):
            return None
        return cls(data, name, np.flatnonzero(np.frombuffer(data, np.uint8) == _LINE_END))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, at: int, /) -> SampleRecord:
        if not 0 <= at < len(self):
            raise IndexError(f"{self._name}: sample {at} of {len(self)}")
        line = self._data[self._ends[at] + 1 : self._ends[at + 1]].decode("utf-8", "surrogateescape")
        try:
            return index.record(line, f"{self._name} line {at + 2}")
        except FormatError as error:
            raise ShardError(str(error)) from error

    def __iter__(self) -> Iterator[SampleRecord]:
        return (self[at] for at in range(len(self)))


def offsets(text: bytes, name: str, samples: int) -> Ints:
    """Return where the first member of each sample begins, int64 (samples,): the second word of each line of an index.

    A shard's index of 1,300 samples takes 0.3 ms, parsed as text 6. Raises ShardError with the index's name for what isn't one of
    `samples` samples in the order of the tar.
    """
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == _LINE_END)  # of the first line, then of each sample's
    blanks = np.flatnonzero(data == _BLANK)
    if len(ends) == samples + 1 and text.startswith(b"v1.2 %d\n" % samples) and text.endswith(b"\n"):
        before = np.searchsorted(blanks, ends[:-1])
        first = blanks[np.minimum(before, len(blanks) - 1)] + 1
        last = blanks[np.minimum(before + 1, len(blanks) - 1)]
        found = _numbers(data, first, last)
        if found is not None and (last < ends[1:]).all() and (np.diff(found) > 0).all():
            return found
    raise ShardError(f"{name}: not the index of {samples} samples in the order of the tar; delete the index or write it again")


def _numbers(data: npt.NDArray[np.uint8], first: Ints, last: Ints) -> Ints | None:
    """Return the decimal numbers at data[first:last], None where one isn't."""
    width = last - first
    if len(width) and not 0 < int(width.min()) <= int(width.max()) < _DIGITS:
        return None
    found = np.zeros(len(first), np.int64)
    for at in range(int(width.max(initial=0))):
        here = at < width
        digit = data[np.where(here, first + at, first)].astype(np.int64) - 48
        if ((digit < 0) | (digit > 9))[here].any():
            return None
        found = np.where(here, found * 10 + digit, found)
    return found


def span(starts: Ints, size: int, first: int, stop: int) -> tuple[int, int]:
    """Return the bytes [begin, end) of samples [first, stop) of a tar of `size` bytes: headers, and up to the sample behind them.

    `starts`: where the first member of each begins, behind its header. Samples lie one behind the other, the last one reaches to
    the end of the tar.
    """
    return max(0, int(starts[first]) - BLOCK), size if stop >= len(starts) else int(starts[stop]) - BLOCK
