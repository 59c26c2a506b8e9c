"""Builds each row's path from a template over the row's columns: `{column}` and `{column[2]}`, one character of it, and no more.

`{{` and `}}` stand for braces. Nothing of Python's format language is understood, so a template can't reach into objects.
Paths are made when they are asked for: 10 million of them take a gigabyte, their columns a fifth of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import overload

import numpy as np

from shardify.errors import SettingsError
from shardify.sources.texts import Texts

_TOKEN = re.compile(r"(?P<brace>\{\{|\}\})|\{(?P<column>[^{}\[\]]+)(?:\[(?P<index>-?[0-9]{1,4})\])?\}|(?P<stray>[{}])")
# What leaves the root, here or on another system: absolute, a drive, or a step up between slashes of either kind.
_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:[/\\]")
_STEP_UP = re.compile(r"(?:^|[/\\])\.\.(?:[/\\]|$)")
_BATCH = 1 << 12
_NO_EDGE = np.array([chr(byte) in "./" for byte in range(256)])
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
        """Return the paths of `rows` rows; a text too short for its index gives nothing there (see `too_short`)."""
        if not self.parts:
            return [self.pattern % ()] * rows
        filled = (
            columns[p.column] if p.index is None else map(itemgetter(_character(p.index)), columns[p.column]) for p in self.parts
        )
        return list(map(self.pattern.__mod__, zip(*filled, strict=True)))

    def too_short(self, columns: Mapping[str, Sequence[str]]) -> Iterator[tuple[int, str]]:
        """Yield (row, reason) for each text that is too short for an index."""
        longest = {part.column: part for part in sorted(self.parts, key=Part.needed)}
        for column, part in longest.items():
            needed = part.needed()
            short = ((row, text) for row, text in enumerate(columns[column]) if len(text) < needed)
            yield from ((row, f"{column} {text!r} is too short for {part} in source.path") for row, text in short)


class Paths(Sequence[str]):
    """The paths that a template makes of columns; a slice gives a list, which costs a quarter for each path."""

    def __init__(self, template: Template, columns: Mapping[str, Texts], rows: int) -> None:
        self._template = template
        self._columns = {part.column: columns[part.column] for part in template.parts}
        self._picked = [(part.column, slice(None) if part.index is None else _character(part.index)) for part in template.parts]
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            rows = range(self._rows)[row]
            return self._template.expand(self._slices(row), len(rows))
        if not -self._rows <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        texts = {name: column[row] for name, column in self._columns.items()}
        return self._template.pattern % tuple([texts[name][at] for name, at in self._picked])

    def __iter__(self) -> Iterator[str]:
        for start in range(0, self._rows, _BATCH):
            yield from self[start : start + _BATCH]

    def problems(self) -> Iterator[tuple[int, str]]:
        """Yield (row, reason) for each path that can't name a file below the root or lacks a character that the template names.

        Most paths aren't even made for that: where the columns hold nothing that could be wrong, their bytes tell.
        """
        sound = not any(unsafe([self._template.pattern % (("x",) * len(self._template.parts))]))
        for start in range(0, self._rows, _BATCH):
            rows = slice(start, min(start + _BATCH, self._rows))
            if sound and all(self._harmless(column, rows) for column in self._columns):
                continue
            slices = self._slices(rows)
            found = (*self._template.too_short(slices), *unsafe(self._template.expand(slices, rows.stop - start)))
            yield from ((start + row, reason) for row, reason in found)

    def _slices(self, rows: slice) -> dict[str, list[str]]:
        return {name: column[rows] for name, column in self._columns.items()}

    def _harmless(self, name: str, rows: slice) -> bool:
        """Tell whether, for certain, a column's texts make no path wrong in a template that is sound with an "x" in all places.

        They are ASCII, long enough, hold neither backslash, colon nor two dots, and no dot or slash stands where a part begins or
        ends: then a step up or a slash at an end could be of the template's own characters alone, and an "x" would show it.
        """
        data, bounds = self._columns[name].raw(rows.start, rows.stop)
        if not data.isascii() or b"\\" in data or b":" in data or b".." in data:
            return False
        parts = [part for part in self._template.parts if part.column == name]
        starts, stops = bounds[:-1], bounds[1:] - 1
        if int((stops - starts).min()) < max(1, *(part.needed() for part in parts)):
            return False
        offsets = {offset for part in parts for offset in ((0, -1) if part.index is None else (part.index,))}
        texts = np.frombuffer(data, np.uint8)
        return not any(_NO_EDGE[texts[(starts if offset >= 0 else stops) + offset]].any() for offset in offsets)


def tells_apart(template: Template, column: str) -> bool:
    """Tell whether rows that differ in `column` can't have one path: the rest is single characters, at the same place in each."""
    return [part.column for part in template.parts if part.index is None] == [column]


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


def _character(index: int) -> slice:
    """Return the slice of one character, which gives an empty text, not an error, where there is none."""
    return slice(index, index + 1 or None)
