"""Builds each row's path from a template over the row's columns: `{column}` and `{column[2]}`, one character of it, and no more.

`{{` and `}}` stand for braces. Nothing of Python's format language is understood, so a template can't reach into objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from shardify.errors import SettingsError

_TOKEN = re.compile(r"(?P<brace>\{\{|\}\})|\{(?P<column>[^{}\[\]]+)(?:\[(?P<index>-?[0-9]{1,4})\])?\}|(?P<stray>[{}])")
# What leaves the root, here or on another system: absolute, a drive, or a step up between slashes of either kind.
_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:[/\\]")
_STEP_UP = re.compile(r"(?:^|[/\\])\.\.(?:[/\\]|$)")
_WHAT_TO_WRITE = "write {column} or {column[2]} (one character), {{ and }} for braces"


@dataclass(frozen=True, slots=True)
class Part:
    """A place in the template that a column fills, by all its text or by its character at `index`."""

    column: str
    index: int | None

    def needed(self) -> int:
        """Return how many characters the column's text must have."""
        if self.index is None:
            return 0
        return self.index + 1 if self.index >= 0 else -self.index

    def __str__(self) -> str:
        return f"{{{self.column}}}" if self.index is None else f"{{{self.column}[{self.index}]}}"


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template; `pattern` is its text with %s for each part."""

    pattern: str
    parts: tuple[Part, ...]

    def expand(self, columns: Mapping[str, Sequence[str]], rows: int) -> list[str]:
        """Return the paths of all rows; a text too short for its index gives nothing there (see `too_short`)."""
        if not self.parts:
            return [self.pattern % ()] * rows
        filled = (columns[p.column] if p.index is None else map(_character(p.index), columns[p.column]) for p in self.parts)
        return list(map(self.pattern.__mod__, zip(*filled, strict=True)))

    def too_short(self, columns: Mapping[str, Sequence[str]]) -> Iterator[tuple[int, str]]:
        """Yield (row, reason) for each text that is too short for an index."""
        longest: dict[str, Part] = {}
        for part in sorted(self.parts, key=Part.needed):
            longest[part.column] = part
        for column, part in longest.items():
            needed = part.needed()
            short = ((row, text) for row, text in enumerate(columns[column]) if len(text) < needed)
            yield from ((row, f"{column} {text!r} is too short for {part} in source.path") for row, text in short)


def parse(text: str) -> Template:
    """Parse `source.path`; raises SettingsError with the character where it isn't understood."""
    pattern, parts, at = [], [], 0
    for token in _TOKEN.finditer(text):
        pattern.append(text[at : token.start()].replace("%", "%%"))
        if token["stray"]:
            raise SettingsError(f"source.path {text!r}: {token[0]!r} at character {token.start() + 1}; {_WHAT_TO_WRITE}")
        if token["brace"]:
            pattern.append(token[0][0])
        else:
            pattern.append("%s")
            parts.append(Part(token["column"], None if token["index"] is None else int(token["index"])))
        at = token.end()
    pattern.append(text[at:].replace("%", "%%"))
    return Template("".join(pattern), tuple(parts))


def unsafe(paths: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for each path that can't name a file below the root."""
    for row, path in enumerate(paths):
        if _ABSOLUTE.match(path):
            yield row, f"path {path!r} is absolute; source.path is relative to source.root"
        elif ".." in path and _STEP_UP.search(path):
            yield row, f"path {path!r} leaves source.root"
        elif not path or path.endswith("/"):
            yield row, f"path {path!r} names no file"


def _character(index: int) -> itemgetter[slice]:
    """Return a getter of one character that gives an empty text, not an error, where there is none."""
    return itemgetter(slice(index, index + 1 or None))
