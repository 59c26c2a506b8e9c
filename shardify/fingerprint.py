"""Says of what a build is made (settings, source, versions), and what of it changed since one that was cut off began."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardify.config import BuildConfig
from shardify.format.manifest import FORMAT_VERSION
from shardify.items import Items, Rows
from shardify.journal import Record

_SHOWN = 5
# What a loss costs, and no byte of what is packed.
_POLICIES = (("source", "missing"), ("source", "repeated"), ("source", "links"), ("encode", "refused"))


def header(config: BuildConfig, items: Items, sizes: Rows, mtimes: Rows, opencv: str | None, more: Mapping[str, Any]) -> Record:
    """Return a journal's first record: all that decides the bytes of a set, and `more` (where its samples lie meanwhile)."""
    facts = {
        "format": FORMAT_VERSION,
        "opencv": opencv,
        "settings": _flat(json.loads(json.dumps(config.byte_settings()))),
        "rows": len(items),
        "columns": dict(_columns(items)),
        **more,
    }
    return Record("build", facts, np.concatenate([sizes, mtimes]).astype("<i8").tobytes())


def settings_changes(old: Record, config: BuildConfig, opencv: str | None) -> list[str]:
    """Say which settings or versions differ from a journal's; needs no look at the source."""
    was, now = old.facts["settings"], _flat(json.loads(json.dumps(config.byte_settings())))
    changes = [f"{key} is {now.get(key)!r}, was {was.get(key)!r}" for key in sorted({*was, *now}) if was.get(key) != now.get(key)]
    versions = (("the format's version", FORMAT_VERSION, old.facts["format"]), ("OpenCV", opencv, old.facts["opencv"]))
    return changes + [f"{name} is {mine}, was {theirs}" for name, mine, theirs in versions if mine != theirs]


def source_changes(old: Record, new: Record, paths: Sequence[str], pending: Rows) -> list[str]:
    """Say what of the source differs from a journal's; files of the rows `pending` may change, but not come or go.

    Nothing is made of those yet, and every row that is there has its slot.
    """
    if new.facts["rows"] != old.facts["rows"]:
        return [f"the source has {new.facts['rows']:,} rows, had {old.facts['rows']:,}"]
    was, now = old.facts["columns"], new.facts["columns"]
    changes = [f"the source's {name} changed" for name in now if now[name] != was.get(name)]
    if changes:
        return changes
    before, after = (np.frombuffer(record.blob, "<i8").reshape(2, -1) for record in (old, new))
    differ = np.any(before != after, axis=0)
    differ[pending] = (before[0, pending] < 0) != (after[0, pending] < 0)
    rows = np.flatnonzero(differ).tolist()
    if rows:
        more = f" and {len(rows) - _SHOWN:,} more" if len(rows) > _SHOWN else ""
        changes.append(f"{len(rows):,} files changed: {', '.join(paths[row] for row in rows[:_SHOWN])}{more}")
    return changes


def _columns(items: Items) -> Iterator[tuple[str, str]]:
    yield "keys", _digest(items.keys)
    yield "paths", _digest(items.paths)
    yield "labels", hashlib.blake2b(items.labels.astype("<i8").tobytes(), digest_size=16).hexdigest()
    yield "classes", _digest(items.classes or ())
    yield "splits", hashlib.blake2b(items.splits.astype("<i2").tobytes(), digest_size=16).hexdigest()
    if items.ids is not None or items.extra is not None:
        rows = range(len(items))
        yield "metadata", _digest(json.dumps(items.metadata(row), sort_keys=True, default=str) for row in rows)


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _flat(settings: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return settings by dotted key, without those that a build may change while it is cut off."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and key != "splits":
            found |= _flat(value, (*above, key))
        elif (*above, key) not in _POLICIES:
            found[".".join((*above, key))] = value
    return found
