"""Keeps a column of texts as one run of bytes and its bounds: 9 bytes a text beside the text itself, where a str takes 49."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import overload

import numpy as np
import numpy.typing as npt

Bounds = npt.NDArray[np.int64]

_BATCH = 1 << 12  # texts that are made or joined at once
_SPAN = 1 << 17  # bytes that are looked at at once: numpy makes 8 bytes of each, which then stay in the cache
# What a blank text may begin with: its end, white space, and what isn't ASCII.
_MAYBE_BLANK = np.array([byte == 0 or byte >= 128 or chr(byte).isspace() for byte in range(256)])


class Texts(Sequence[str]):
    """Texts of which none holds a NUL, as UTF-8 (lone surrogates as they are) with a NUL behind each.

    Text i is blob[bounds[i]:bounds[i + 1] - 1]. An index gives a str, a slice a list of them, which costs a quarter for each text.
    """

    __slots__ = ("_blob", "_bounds", "_seek")

    def __init__(self, blob: bytes | bytearray, bounds: Bounds) -> None:
        self._blob = blob
        self._bounds = bounds
        self._seek = bounds.data  # gives an int in a third of an array's time

    def __reduce__(self) -> tuple[type[Texts], tuple[bytes | bytearray, Bounds]]:
        return Texts, (self._blob, self._bounds)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Keep the texts given; raises ValueError where one holds a NUL."""
        growing = Growing()
        remaining = iter(texts)
        while batch := list(islice(remaining, _BATCH)):
            growing.extend(batch)
        return growing.finish()

    @classmethod
    def joined(cls, parts: Sequence[Texts]) -> Texts:
        """Lay columns end to end; the first one's bytes are taken over where it is the only one."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(len(part._blob) for part in parts)])
        bounds = [part._bounds[1:] + start for part, start in zip(parts, starts, strict=False)]
        return cls(b"".join(part._blob for part in parts), np.concatenate([np.zeros(1, np.int64), *bounds]))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            return self._decode(start, stop) if step == 1 else [self[r] for r in range(start, stop, step)]
        at = row if row >= 0 else row + len(self)
        if at < 0:
            raise IndexError(f"row {row} of {len(self)}")
        return self._blob[self._seek[at] : self._seek[at + 1] - 1].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _BATCH):
            yield from self._decode(start, min(start + _BATCH, len(self)))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of runs of rows, all of them in turn, each of up to 128 KiB of text or of a single row."""
        start = 0
        while start < len(self):
            stop = int(np.searchsorted(self._bounds, self._bounds[start] + _SPAN, side="right")) - 1
            yield start, (start := max(stop, start + 1))

    def raw(self, start: int, stop: int) -> tuple[bytes, Bounds]:
        """Return the bytes of some rows, a NUL behind each text, and their bounds in these bytes, int64 (stop - start + 1,)."""
        bounds = self._bounds[start : stop + 1]
        return bytes(memoryview(self._blob)[bounds[0] : bounds[-1]]), bounds - bounds[0]

    def blank(self) -> Iterator[int]:
        """Yield the rows whose text is empty or nothing but white space."""
        for start, stop in self.spans():
            data, bounds = self.raw(start, stop)
            first = np.frombuffer(data, np.uint8)[bounds[:-1]]
            for row in (start + np.flatnonzero(_MAYBE_BLANK[first])).tolist():
                text = self[row]
                if not text or text.isspace():
                    yield row

    def only(self, wanted: npt.NDArray[np.bool_]) -> Texts:
        """Return the texts of the rows where `wanted`, bool (n,), is true."""
        growing = Growing()
        for start, stop in self.spans():
            data, bounds = self.raw(start, stop)
            kept = np.repeat(wanted[start:stop], np.diff(bounds))
            growing.append(np.frombuffer(data, np.uint8)[kept])
        return growing.finish()

    def same(self, rows: slice, others: npt.NDArray[np.int64]) -> bool:
        """Tell whether each of a run of rows has the text of the row that stands for it in `others`, int64 (rows,)."""
        data, bounds = self.raw(rows.start, rows.stop)
        lengths, starts = np.diff(bounds), self._bounds[others]
        if not np.array_equal(lengths, self._bounds[others + 1] - starts):
            return False
        at = np.arange(len(data)) + np.repeat(starts - bounds[:-1], lengths)
        return np.array_equal(np.frombuffer(self._blob, np.uint8)[at], np.frombuffer(data, np.uint8))

    def _decode(self, start: int, stop: int) -> list[str]:
        if stop <= start:
            return []
        data = memoryview(self._blob)[self._bounds[start] : self._bounds[stop] - 1]
        return str(data, "utf-8", "surrogatepass").split("\0")


class Growing:
    """A column of texts that is being read."""

    def __init__(self) -> None:
        self._blob = bytearray()
        self._bounds: list[Bounds] = [np.zeros(1, np.int64)]

    def extend(self, texts: Sequence[str]) -> None:
        """Add texts; raises ValueError where one holds a NUL."""
        if not texts:
            return
        data = ("\0".join(texts) + "\0").encode("utf-8", "surrogatepass")
        if data.count(b"\0") != len(texts):
            raise ValueError("a text holds a NUL")
        self.append(np.frombuffer(data, np.uint8))

    def append(self, data: npt.NDArray[np.uint8]) -> None:
        """Add texts as the bytes of their UTF-8, a NUL behind each."""
        self._bounds.append(np.flatnonzero(data == 0) + (len(self._blob) + 1))
        self._blob += data.tobytes()

    def finish(self) -> Texts:
        """Return the texts; nothing can be added after that."""
        return Texts(self._blob, np.concatenate(self._bounds))
