"""Says in what the samples of many tars are alike that should differ: their keys, in 8 bytes a key."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

_EXAMPLES = 100  # repeated keys that are named


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
