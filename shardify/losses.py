"""Keeps account of what a build can't pack and of the pictures' types, and decides whether that is an error."""

from __future__ import annotations

import csv
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from shardify.config.models import BuildConfig
from shardify.errors import DataError, SettingsError, naming
from shardify.format.manifest import SKIPPED_KEYS, Skipped
from shardify.items import MENDED, Items, Refused

_COLUMNS = ("key", "path", "cause", "reason")
_OF_THE_SOURCE = ("missing", "unreadable", "changed", "outside")  # these fall under source.missing, all others under encode.refused


class Losses:
    """The refused pictures of a build, by row, and the rows of each type of picture."""

    def __init__(self, config: BuildConfig, items: Items) -> None:
        self._items = items
        self._types = config.encode.types
        self._skips = {True: config.source.missing == "skip", False: config.encode.refused == "skip"}
        self._refused: dict[int, Refused] = {}
        self._rows_of: dict[str, array[int]] = defaultdict(lambda: array("q"))
        self._mended = array("q")
        most = config.max_skipped
        self._most, self._allows = most, int(Fraction(str(most)) * len(items)) if isinstance(most, float) else most
        self._skipped = 0
        self.fatal = False

    def refuse(self, row: int, refused: Refused) -> None:
        """Note a picture that can't be packed."""
        skipped = self._is_skipped(refused)
        self._skipped += skipped and row not in self._refused
        self._refused[row] = refused
        self.fatal = self.fatal or not skipped or self._skipped > self._allows

    def see(self, row: int, kind: str) -> None:
        """Note a picture's type, and whether it was mended."""
        kind, mended, _ = kind.partition(MENDED)
        if mended:
            self._mended.append(row)
        self._rows_of[kind].append(row)
        self.fatal = self.fatal or (self._types == "error" and len(self._rows_of) > 1)

    @property
    def kinds(self) -> dict[str, int]:
        """How many pictures there are of each type, the commonest first."""
        return dict(sorted(((kind, len(rows)) for kind, rows in self._rows_of.items()), key=lambda pair: (-pair[1], pair[0])))

    @property
    def causes(self) -> dict[str, int]:
        """How many pictures are refused for each cause."""
        return dict(sorted(Counter(refused.cause for refused in self._refused.values()).items()))

    def skipped(self, split: int) -> dict[str, Skipped]:
        """Return what a split lacks, by cause, for its manifest."""
        keys: dict[str, list[str]] = defaultdict(list)
        for row, refused in self._refused.items():
            if self._items.splits[row] == split:
                keys[refused.cause].append(self._items.keys[row])
        return {cause: Skipped(len(found), tuple(sorted(found)[:SKIPPED_KEYS])) for cause, found in keys.items()}

    def repaired(self, split: int) -> Skipped:
        """Return which pictures of a split were mended, for its manifest."""
        keys = sorted(self._items.keys[row] for row in self._mended if self._items.splits[row] == split)
        return Skipped(len(keys), tuple(keys[:SKIPPED_KEYS]))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of what is packed."""
        count = len(self._mended)
        return (f"{count:,} JPEGs lacked their end mark and nothing else; it was put back",) if count else ()

    def write(self, path: Path) -> None:
        """Write all refused pictures to a CSV file, in the source's order.

        Raises SettingsError for a file that is there and no such list, StorageError where it can't be written.
        """
        _refuse_other(path)
        with naming(path), path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(_COLUMNS)
            table.writerows((self._items.keys[row], r.path, r.cause, r.reason) for row, r in self._in_order())

    def error(self) -> DataError | None:
        """Return what is wrong as one error that lists all of it, None where everything is fine or skipped as asked."""
        if not self.fatal:
            return None
        refused = [r for _, r in self._in_order() if not self._is_skipped(r)]
        problems = [f"{r.path}: {r.reason}" for r in refused]
        told = []
        if refused:
            counts = ", ".join(f"{n:,} {cause}" for cause, n in sorted(Counter(r.cause for r in refused).items()))
            remedy = _remedy(refused, len(self._items))
            told.append(f"{len(refused):,} of {len(self._items):,} pictures can't be packed ({counts}); {remedy}")
        if self._skipped > self._allows:
            left = [r for _, r in self._in_order() if self._is_skipped(r)]
            problems += [f"{r.path}: {r.reason}" for r in left]
            counts = ", ".join(f"{n:,} {cause}" for cause, n in sorted(Counter(r.cause for r in left).items()))
            told.append(
                f"{len(left):,} of {len(self._items):,} pictures would be left out ({counts}), and max_skipped: {self._most} "
                f"allows {self._allows:,}; correct the source, or allow more"
            )
        if self._types == "error" and len(self._rows_of) > 1:
            most, *others = self.kinds
            problems += [
                f"{self._items.paths[row]}: {kind}, where most are {most}" for kind in others for row in self._rows_of[kind]
            ]
            counts = ", ".join(f"{n:,} {kind}" for kind, n in self.kinds.items())
            told.append(f"pictures of several types ({counts}); set encode.types to convert (all become JPEGs) or keep")
        return DataError(". ".join(told), problems)

    def _is_skipped(self, refused: Refused) -> bool:
        return self._skips[refused.cause in _OF_THE_SOURCE]

    def _in_order(self) -> Iterable[tuple[int, Refused]]:
        return sorted(self._refused.items())


def _refuse_other(path: Path) -> None:
    """Refuse to overwrite what isn't a list that a former run wrote: a slip mustn't cost the source's table."""
    with naming(path):
        if not path.exists() or (path.stat().st_size == 0 and path.is_file()):
            return
        if path.is_file():
            with path.open("rb") as file:
                if file.readline(100).rstrip() == ",".join(_COLUMNS).encode():
                    return
    raise SettingsError(f"--skipped {path}: there, and no list of skipped pictures; name another file, or remove it yourself")


def _remedy(refused: Sequence[Refused], total: int) -> str:
    of_the_source = {r.cause in _OF_THE_SOURCE for r in refused}
    if all(r.cause == "missing" for r in refused) and len(refused) == total:
        return "not one is there: check source.root and source.path"
    settings = [name for name, at in (("source.missing", True), ("encode.refused", False)) if at in of_the_source]
    return f"correct the source, or leave them out and count them: {' and '.join(f'{name}: skip' for name in settings)}"
