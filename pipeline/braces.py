"""Expands brace patterns such as train-{000000..000009}.tar: the door to braceexpand."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import braceexpand

from pipeline.errors import SourceError

_EXPANSIONS = 10_000_000  # braceexpand makes all names at once: {0..99999999} takes a minute and gigabytes, and is a slip
_GROUP = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?([0-9]+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?[0-9]+)?")
_DIGITS = 18  # of a number; more is no count of shards


def expand(pattern: str, whole: str) -> Iterator[str]:
    """Yield the names of a pattern; raises SourceError, which begins with `whole`, for one that is none."""
    if math.prod(map(_size, _GROUP.findall(pattern))) > _EXPANSIONS:
        instead = "a manifest" if "://" in whole else "the folder or a glob"
        raise SourceError(f"{whole}: gives more than {_EXPANSIONS} names; name {instead} instead")
    try:
        yield from braceexpand.braceexpand(pattern, escape=False)
    except (ValueError, RecursionError):
        missing = "" if "://" in whole else "isn't there, and "
        # Not from braceexpand's own error: that shows the pattern, with all that signs a URL.
        raise SourceError(f"{whole}: {missing}as a pattern its braces don't pair; write {{000000..000009}}") from None


def _size(group: str) -> int:
    """Return how many texts stand in braces."""
    if match := _RANGE.fullmatch(group):
        if max(len(part or "") for part in match.groups()) > _DIGITS:
            return _EXPANSIONS + 1
        return abs(int(match[1]) - int(match[2])) // max(1, int(match[3] or 1)) + 1
    if match := _LETTERS.fullmatch(group):
        return abs(ord(match[1]) - ord(match[2])) + 1
    return group.count(",") + 1
