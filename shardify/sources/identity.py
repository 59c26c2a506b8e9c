"""Gives every sample its key, from its id, and finds what would give two samples one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shardify.format.names import KEY_LIMIT, is_key, make_key
from shardify.sources.columns import repeats
from shardify.sources.texts import Texts

# The grammar as a key's own check tells it, byte by byte: a column of keys is then found to be one without a call for each.
_FIRST = np.array([is_key(chr(byte)) for byte in range(128)] + [False] * 128)
_REST = bytes(byte for byte in range(128) if is_key(f"a{chr(byte)}"))


def to_keys(ids: Texts) -> tuple[Texts, Texts | None]:
    """Return the keys, and the ids where one of them differs from its key, else None (the keys are the ids then)."""
    if all(_are_keys(ids, start, stop) for start, stop in ids.spans()):
        return ids, None
    return Texts.of(map(make_key, ids)), ids


def clashes(keys: Sequence[str], ids: Sequence[str] | None, place: Callable[[int], str]) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for each row whose key an earlier row has; `place` says where a row stands."""
    for first, row in repeats(keys):
        mine, other = (keys[row], keys[first]) if ids is None else (ids[row], ids[first])
        if mine == other:
            yield row, f"id {mine!r} stands in {place(first)} too"
        else:
            yield row, f"id {mine!r} has the same key ({keys[row]}) as id {other!r} in {place(first)}"


def _are_keys(ids: Texts, start: int, stop: int) -> bool:
    data, bounds = ids.raw(start, stop)
    fitting = not data.translate(None, _REST + b"\0") and bool(_FIRST[np.frombuffer(data, np.uint8)[bounds[:-1]]].all())
    return fitting and int(np.diff(bounds).max()) <= KEY_LIMIT + 1
