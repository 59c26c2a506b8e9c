"""Says in what the samples of many tars differ that should be alike, and in what they are alike that should differ.

Alike: the fields of samples. Different: their keys. Both in bounded memory: 8 bytes a key, and no more than 1,000 sets of fields.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardify.format.tar import SampleRecord

PICTURES = frozenset(("jpg", "jpeg", "png", "webp"))
_EXAMPLES = 100  # repeated keys that are named
_SETS = 1000  # more sets of fields than this come from dots in names, a field for each sample


@dataclass(slots=True)
class FieldCensus:
    """Counts the sets of fields that samples have; pictures of whatever type count as one field."""

    all: set[str] = field(default_factory=set)
    _counts: dict[tuple[str, ...], int] = field(default_factory=dict)
    _first: dict[tuple[str, ...], str] = field(default_factory=dict)
    _others: int = 0

    def add(self, record: SampleRecord, place: str) -> None:
        """Count a sample of the tar `place`."""
        alike = tuple(sorted("picture" if name.lower() in PICTURES else name for name in record.fields))
        if alike not in self._counts:
            if len(self._counts) >= _SETS:
                self._others += 1
                return
            self.all.update(record.fields)
            self._counts[alike] = 0
            self._first[alike] = f"{place}: sample {record.key!r} has {', '.join(record.fields)}"
        elif not self.all.issuperset(record.fields):
            self.all.update(record.fields)
        self._counts[alike] += 1

    def differences(self) -> Iterator[str]:
        """Yield a line for each set of fields but the commonest: how many samples have it, and the first of them."""
        ranked = sorted(self._counts, key=lambda alike: -self._counts[alike])
        for alike in ranked[1:]:
            count, cut = self._counts[alike], any("." in name for name in alike)
            hint = " (a dot in a file's name ends its key, and the rest is its field)" if cut else ""
            yield f"{self._first[alike]}{hint}, {_like_it(count)}; most have {', '.join(ranked[0])}"
        if self._others:
            yield f"and {self._others:,} samples with still other fields; does a dot in each file's name end its key?"


def _like_it(count: int) -> str:
    return "alone" if count == 1 else f"as {count:,} samples do"


class KeyCensus:
    """Finds keys that stand in several tars, by hashes of 64 bits."""

    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, keys: Iterable[str]) -> None:
        """Take in the keys of one tar, each once."""
        self._hashes.extend(map(_hash, keys))

    def repeats(self, tars: Iterable[tuple[str, Callable[[], Iterable[str]]]]) -> Iterator[str]:
        """Yield a line for each of the first 100 keys that come again, in no order, and one for the rest; ends the census.

        `tars`: (name, what reads its keys again) for each tar; none is read where no hash comes twice.
        """
        hashes: npt.NDArray[np.uint64] = np.frombuffer(self._hashes, np.uint64)
        hashes.sort()
        again = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        if not len(again):
            return
        shown = again[:_EXAMPLES]
        looked_for = set(shown.tolist())
        left = int((np.searchsorted(hashes, shown, "right") - np.searchsorted(hashes, shown, "left")).sum())
        first: dict[str, str] = {}
        for name, keys in tars:
            if not left:
                break
            for key in filter(lambda key: _hash(key) in looked_for, keys()):
                left -= 1
                if key in first:
                    yield f"{name}: key {key!r} stands in {first[key]} too; keys must be unique in the whole set"
                first.setdefault(key, name)
        if len(again) > _EXAMPLES:
            yield f"{len(again) - _EXAMPLES:,} more keys stand in several tars; keys must be unique in the whole set"


def _hash(key: str) -> int:
    """Return 64 bits of a key, the same in every run: Python's own hash would name other examples each time."""
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
