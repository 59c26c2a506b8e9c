"""Turns labels from texts into the integers that are written: class indices, one mapping for the whole set, or themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardify.items import Items

Mode = Literal["index", "as_is"]

_INTEGER = re.compile(r"-?[0-9]+")
_LIMIT = 2**63


def order_classes(labels: Sequence[str]) -> tuple[str, ...]:
    """Return distinct labels in the order of their indices: integers by value (7 and 007 by text), then the rest by text."""
    return tuple(sorted(labels, key=_rank))


def _rank(label: str) -> tuple[bool, Decimal, str]:
    # Decimal is exact and, unlike int, reads any number of digits.
    return (False, Decimal(label), label) if _INTEGER.fullmatch(label) else (True, Decimal(0), label)


def refuse(label: str, mode: Mode) -> str:
    """Say why a text can't be a label, or nothing where it can."""
    if not label or label.isspace():
        return "label is empty"
    if mode == "as_is" and as_integer(label) is None:
        return f"label {label!r} is no integer from 0 to 2^63 - 1, as labels: as_is needs; labels: index takes any text"
    return ""


def to_labels(
    numbers: npt.NDArray[np.int64], distinct: Sequence[str], mode: Mode
) -> tuple[npt.NDArray[np.int64], tuple[str, ...] | None]:
    """Return (labels int64 (n,), classes by index or None under as_is) for n rows whose texts are `distinct[numbers]`."""
    if mode == "as_is":
        return np.array([as_integer(label) for label in distinct], dtype=np.int64)[numbers], None
    classes = order_classes(distinct)
    index = {label: i for i, label in enumerate(classes)}
    return np.array([index[label] for label in distinct], dtype=np.int64)[numbers], classes


def as_integer(label: str) -> int | None:
    """Return the label as it is used under `labels: as_is`, an ASCII integer from 0 to 2^63 - 1, or None where it is none."""
    if not label.isascii() or not label.isdigit() or len(label.lstrip("0")) > 19:
        return None
    value = int(label.lstrip("0") or "0")
    return value if value < _LIMIT else None


def unseen_classes(items: Items) -> tuple[str, ...]:
    """Say for each split after the first which of its classes the first one lacks; needs the splits as they are packed."""
    if not items.split_names:
        return ()
    first, *others = items.split_names
    known = np.unique(items.labels[items.splits == 0])
    notes = []
    for number, name in enumerate(others, 1):
        labels = items.labels[items.splits == number]
        unseen = labels[~np.isin(labels, known)]
        if len(unseen):
            classes = len(np.unique(unseen))
            notes.append(f"split {name}: {classes:,} of its classes ({len(unseen):,} samples) have no sample in {first}")
    return tuple(notes)
