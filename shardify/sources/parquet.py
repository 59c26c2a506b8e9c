"""Reads one Parquet table as text: the columns asked for, and what is wrong with rows (pyarrow's only door).

Rows count from 1, as there is no header's line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from shardify.errors import DataError, SettingsError, StorageError
from shardify.sources.rowlines import RowLines
from shardify.sources.table import Table, wrong_columns
from shardify.sources.texts import Growing

END = ".parquet"
_BATCH_ROWS = 1 << 14


def read_parquet(path: Path, name: str, uses: Mapping[str, str]) -> Table:
    """Read the columns of `uses` (column -> the setting that names it), texts and integers; `name` stands in messages.

    Raises SettingsError for a table or column that isn't there, a column of another type, and where pyarrow isn't installed;
    DataError for what is no Parquet file, or a damaged one.
    """
    try:
        import pyarrow  # noqa: PLC0415  an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise SettingsError(f"{name}: Parquet tables need pyarrow: pip install 'shardify[parquet]'") from None
    try:
        with path.open("rb") as file, parquet.ParquetFile(file) as opened:
            _check_columns(opened.schema_arrow, name, uses, pyarrow)
            return _read(opened, name, uses)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise SettingsError(f"{path}: no such table; correct source.root, source.table or splits") from None
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise StorageError(f"{path}: can't be read ({error.strerror}); check the disk and the permissions") from error
        said = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{name}: can't be read as Parquet ({said}); write or copy it again") from error


def _check_columns(schema: Any, name: str, uses: Mapping[str, str], pyarrow: Any) -> None:
    there = list(schema.names)
    kinds = {column: schema.field(column).type for column in uses if there.count(column) == 1}
    wrong = list(wrong_columns(there, uses))
    wrong += [
        f"{uses[column]} names {column!r}, whose type is {kind}: write it as text or integers"
        for column, kind in kinds.items()
        if not _is_text(kind, pyarrow.types)
    ]
    if wrong:
        raise SettingsError(f"{name} has the columns {', '.join(map(repr, there))}, but {'; '.join(wrong)}")


def _is_text(kind: Any, types: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind))


def _read(opened: Any, name: str, uses: Mapping[str, str]) -> Table:
    columns, lines = {column: Growing() for column in uses}, RowLines()
    problems: list[tuple[int, str]] = []
    row = 1
    for batch in opened.iter_batches(_BATCH_ROWS, columns=list(uses)):
        cells = [[None if cell is None else str(cell) for cell in batch.column(column).to_pylist()] for column in uses]
        bad = {row + at: list(reasons) for at, *reasons in _bad(cells, list(uses))}
        problems += [(number, reason) for number, reasons in bad.items() for reason in reasons]
        good = [row + at not in bad for at in range(batch.num_rows)]
        for growing, column in zip(columns.values(), cells, strict=True):
            growing.extend([cell for cell in compress(column, good) if cell is not None])
        for number in compress(range(row, row + batch.num_rows), good):
            lines.add(number)
        row += batch.num_rows
    if row == 1:
        problems.append((0, "no row"))
    return Table(name, {column: growing.finish() for column, growing in columns.items()}, lines, problems)


def _bad(cells: list[list[str | None]], names: list[str]) -> Iterator[tuple[Any, ...]]:
    """Yield (row, reason, ...) for each row with a cell that can't be used."""
    for at, row in enumerate(zip(*cells, strict=True)):
        if None in row or any("\0" in cell for cell in row if cell):
            pairs = list(zip(names, row, strict=True))
            nulls = [f"{column} is null" for column, cell in pairs if cell is None]
            yield at, *nulls, *(f"{column} {cell!r} holds a NUL" for column, cell in pairs if cell and "\0" in cell)
