"""Finds keys that stand in several tars, by hashes of 64 bits: 8 bytes a key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_EXAMPLES = 100  # that are looked for


def hashes(keys: Iterable[str]) -> Hashes:
    """Return 64 bits of each key, uint64 (keys,): the same in every run, as Python's own aren't."""
    found = b"".join(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys)
    return np.frombuffer(found, "<u8")


def repeated(tars: Sequence[Hashes]) -> tuple[int, dict[int, list[int]]]:
    """Return how many hashes come again, and of the first 100 of them the tars (by number) that they stand in, in order.

    `tars`: the hashes of each tar's keys, each key once.
    """
    if not tars:
        return 0, {}
    every = np.sort(np.concatenate(tars))
    again = np.unique(every[1:][every[1:] == every[:-1]])
    shown: dict[int, list[int]] = {int(value): [] for value in again[:_EXAMPLES]}
    for number, found in enumerate(tars) if shown else ():
        for value in np.intersect1d(found, again[:_EXAMPLES]).tolist():
            shown[value].append(number)
    return len(again), shown


def lines(tars: Sequence[tuple[str, Hashes]], keys: Sequence[Iterable[str]]) -> Iterator[str]:
    """Yield a line for each of the first 100 keys that stand in several tars, and one for the rest.

    `tars`: name and hashes of each; `keys`: what reads the keys of each again, which is done for those that have an example.
    """
    count, shown = repeated([found for _, found in tars])
    names: dict[int, str] = {}
    for number in sorted({numbers[0] for numbers in shown.values()}):
        for key in keys[number]:
            value = int(hashes([key])[0])
            if value in shown:
                names.setdefault(value, key)
    for value, numbers in shown.items():
        for number in numbers[1:]:
            other = tars[numbers[0]][0]
            yield f"{tars[number][0]}: key {names[value]!r} stands in {other} too; keys must be unique in the whole set"
    if count > len(shown):
        yield f"{count - len(shown):,} more keys stand in several tars; keys must be unique in the whole set"
