"""Turns the rows of one or more tables into checked items; all that is wrong with them is one error, by table and row.

A row is named by the line of the file in which it begins; the header's line counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shardify.config import BuildConfig, CsvSource
from shardify.config.explain import did_you_mean
from shardify.errors import DataError, SettingsError
from shardify.items import LEFT_OUT, Items
from shardify.sources import parquet, template
from shardify.sources.columns import factorize, repeats
from shardify.sources.groups import across_splits
from shardify.sources.identity import clashes, to_keys
from shardify.sources.labels import refuse, to_labels
from shardify.sources.table import Table, read_table
from shardify.sources.template import Paths, tells_apart
from shardify.sources.texts import Texts

Splits = npt.NDArray[np.int16]


class ExtraColumns(Sequence[Mapping[str, Any]]):
    """The extra columns as one mapping a row, made when it is asked for: a dict for each of 10 million rows takes gigabytes."""

    def __init__(self, columns: Mapping[str, Sequence[str]], rows: int) -> None:
        self._columns = columns
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, row: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, row: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(row, slice):
            return [self[r] for r in range(*row.indices(self._rows))]
        return {name: column[row] for name, column in self._columns.items()}


class Places:
    """Where the rows of all tables, laid end to end, stand in their files."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._starts = list(accumulate((len(table) for table in tables[:-1]), initial=0))

    def find(self, row: int) -> tuple[int, int]:
        """Return (table, line) of a row."""
        number = bisect_right(self._starts, row) - 1
        return number, self._tables[number].lines[row - self._starts[number]]

    def name(self, row: int) -> str:
        """Return a row's place as messages say it."""
        number, line = self.find(row)
        return f"{self._tables[number].name} row {line}"

    def report(self, problems: Iterable[tuple[int, str]]) -> list[str]:
        """Return a line for each problem (row, reason) and each that a table noted itself, in the order of the files."""
        found = [(*self.find(row), reason) for row, reason in problems]
        found += [(number, line, reason) for number, table in enumerate(self._tables) for line, reason in table.problems]
        return [f"{self._tables[number].name} row {line}: {reason}" for number, line, reason in sorted(found)]


def read_rows(config: BuildConfig, source: CsvSource) -> Items:
    """Read the tables of a build; raises DataError with every bad row, SettingsError for tables and columns that aren't there."""
    paths_of = template.parse(source.path)
    tables, splits, notes = _read_tables(config, source, paths_of)
    places = Places(tables)
    columns = {name: Texts.joined([table.columns[name] for table in tables]) for name in tables[0].columns}
    ids, rows = columns[source.id], len(splits)
    keys, differing = to_keys(ids)
    paths = Paths(paths_of, columns, rows)
    numbers, distinct = factorize(columns[source.label])
    groups = None if source.group is None else columns[source.group]
    problems = chain(
        ((row, "id is empty") for row in ids.blank()),
        ((row, reason) for row, reason in clashes(keys, differing, places.name) if ids[row].strip()),
        _bad_labels(numbers, distinct, source),
        paths.problems(),
        () if source.repeated == "keep" or tells_apart(paths_of, source.id) else _repeated(paths, ids, places),
        () if groups is None else ((row, f"group is empty (column {source.group!r})") for row in groups.blank()),
        () if groups is None else across_splits(groups, splits, tuple(config.splits), places.name),
    )
    if found := places.report(problems):
        where = ", ".join(table.name for table in tables)
        said = f"{len(found):,} problem{'s' if len(found) > 1 else ''}; correct the rows"
        raise DataError(f"{where}: {said} (a row is its line in the file, the header's line counts)", found)
    labels, classes = to_labels(numbers, distinct, source.labels)
    return Items(
        root=str(source.root.absolute()),
        keys=keys,
        ids=differing,
        paths=paths,
        labels=labels,
        classes=classes,
        split_names=tuple(config.splits),
        splits=splits,
        extra=ExtraColumns({name: columns[name] for name in source.extra}, rows) if source.extra else None,
        groups=groups,
        notes=notes,
    )


def _read_tables(
    config: BuildConfig, source: CsvSource, paths_of: template.Template
) -> tuple[list[Table], Splits, tuple[str, ...]]:
    """Read one table for each split that has its own, else the one; return tables, each row's split, notes."""
    named = [
        (source.id, "source.id"),
        (source.label, "source.label"),
        (source.split, "source.split"),
        (source.group, "source.group"),
    ]
    named += [(part.column, "source.path") for part in paths_of.parts] + [(column, "source.extra") for column in source.extra]
    uses: dict[str, str] = {}
    for column, setting in named:
        if column is not None:
            uses.setdefault(column, setting)

    def read(name: object) -> Table:
        path, text = source.root / str(name), str(name)
        if text.lower().endswith(parquet.END):
            return parquet.read_parquet(path, text, uses)
        return read_table(path, text, uses, delimiter=source.delimiter, encoding=source.encoding)

    if config.own_tables:
        tables = [read(name) for name in config.splits.values()]
        return tables, np.repeat(np.arange(len(tables), dtype=np.int16), [len(table) for table in tables]), ()
    table = read(source.table)
    if source.split is None:
        return [table], np.full(len(table), LEFT_OUT, dtype=np.int16), ()
    return _split_by_column(table, source.split, {str(value): name for name, value in config.splits.items()})


def _split_by_column(table: Table, column: str, names: Mapping[str, str]) -> tuple[list[Table], Splits, tuple[str, ...]]:
    """Keep the rows whose value in `column` the settings name (`names`: value -> split) and count the others."""
    rows, distinct = factorize(table.columns[column])
    counts = Counter(dict(zip(distinct, np.bincount(rows, minlength=len(distinct)).tolist(), strict=True)))
    for value, name in names.items():
        if value not in counts and len(table):
            hint = did_you_mean(value, dict(counts.most_common(1000)), otherwise=";")
            said = f"no row of {table.name} has {value!r} in column {column!r}{hint} It holds: {_listed(counts)}"
            raise SettingsError(f"splits.{name}: {said}")
    numbers = {value: number for number, value in enumerate(names)}
    drawn = np.array([numbers.get(value, LEFT_OUT) for value in distinct], dtype=np.int16)[rows]
    left = Counter({value: count for value, count in counts.items() if value not in numbers})
    if not left:
        return [table], drawn, ()
    note = f"{table.name}: {left.total():,} rows left out, as no split takes their {column} ({_listed(left)})"
    kept = drawn != LEFT_OUT
    return [table.only(kept)], drawn[kept], (note,)


def _listed(counts: Counter[str]) -> str:
    """Name the 20 most frequent values with their counts."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:20]
    rest = len(counts) - len(most)
    return ", ".join(f"{value!r}: {count:,}" for value, count in most) + (f" and {rest:,} others" if rest else "")


def _repeated(paths: Paths, ids: Sequence[str], places: Places) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for each row whose file an earlier row names, under another id."""
    for first, row in repeats(paths):
        if ids[first] != ids[row]:
            yield row, f"path {paths[row]!r} stands in {places.name(first)} too; source.repeated: keep packs a picture for each row"


def _bad_labels(numbers: npt.NDArray[np.int64], distinct: Sequence[str], source: CsvSource) -> Iterator[tuple[int, str]]:
    reasons = [refuse(label, source.labels) for label in distinct]
    bad = np.array([bool(reason) for reason in reasons], bool)
    for row in np.flatnonzero(bad[numbers]).tolist():
        yield row, f"{reasons[numbers[row]]} (column {source.label!r})"
