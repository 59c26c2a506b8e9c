"""Gives every sample its key, from its id, and finds what would give two samples one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_

from shardify.format.names import make_key
from shardify.sources.columns import repeats


def to_keys(ids: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the keys, and the ids where one of them differs from its key, else None."""
    keys = [make_key(identifier) for identifier in ids]
    return keys, None if all(map(is_, keys, ids)) else list(ids)


def clashes(keys: Sequence[str], ids: Sequence[str] | None, place: Callable[[int], str]) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for each row whose key an earlier row has; `place` says where a row stands."""
    for first, row in repeats(keys):
        mine, other = (keys[row], keys[first]) if ids is None else (ids[row], ids[first])
        if mine == other:
            yield row, f"id {mine!r} stands in {place(first)} too"
        else:
            yield row, f"id {mine!r} has the same key ({keys[row]}) as id {other!r} in {place(first)}"
