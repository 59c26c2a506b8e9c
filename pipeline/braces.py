"""Expands brace patterns such as train-{000000..000009}.tar: the door to braceexpand."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import braceexpand

from pipeline.errors import SourceError

_EXPANSIONS = 10_000_000  # braceexpand makes all names at once: {0..99999999} takes a minute and gigabytes, and is a slip
_RANGE = re.compile(r"\{(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?([0-9]+))?\}")


def expand(pattern: str, whole: str) -> Iterator[str]:
    """Yield the names of a pattern; raises SourceError, which begins with `whole`, for one that is none."""
    ranges = [abs(int(first) - int(last)) // max(1, int(step or 1)) + 1 for first, last, step in _RANGE.findall(pattern)]
    if math.prod(ranges) > _EXPANSIONS:
        instead = "a manifest" if "://" in whole else "the folder or a glob"
        raise SourceError(f"{whole}: gives {math.prod(ranges)} names, more than {_EXPANSIONS}; name {instead} instead")
    try:
        yield from braceexpand.braceexpand(pattern, escape=False)
    except ValueError as error:
        missing = "" if "://" in whole else "isn't there, and "
        raise SourceError(f"{whole}: {missing}as a pattern its braces don't pair; write {{000000..000009}}") from error
