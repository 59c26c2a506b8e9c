"""Reads one CSV table strictly, as text: the columns asked for, the line of every row, and all that is wrong with its shape.

Python's csv module does it, not pandas.read_csv: that fills a short row as if its cells were empty, takes the first column for an
index where every row is too long, cuts a text at a NUL, and can't say in which line a row stands.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Protocol, TextIO

from shardify.config.explain import did_you_mean
from shardify.errors import DataError, SettingsError, StorageError

_UTF8 = ("utf-8", "utf8", "utf_8", "u8")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_BLOCK_ROWS = 128  # above a few hundred living lists the garbage collector starts to count: 1.6 M rows took 6.1 s instead of 3.4
_POOL_LIMIT = 1 << 17


class _Reader(Protocol):
    """What csv.reader returns, which typing has no public name for."""

    @property
    def line_num(self) -> int: ...
    def __iter__(self) -> Iterator[list[str]]: ...
    def __next__(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of n rows, the line where each row begins (the header's counts, from 1), and (line, reason) of the rows left out."""

    name: str
    columns: Mapping[str, list[str]]
    lines: array[int]
    problems: list[tuple[int, str]]

    def __len__(self) -> int:
        return len(self.lines)

    def only(self, wanted: Sequence[bool]) -> Table:
        """Return the rows where `wanted` is true."""
        columns = {name: list(compress(column, wanted)) for name, column in self.columns.items()}
        return Table(self.name, columns, array("q", compress(self.lines, wanted)), self.problems)


def read_table(
    path: Path, name: str, uses: Mapping[str, str], *, unique: str | None = None, delimiter: str = ",", encoding: str = "utf-8"
) -> Table:
    """Read the columns of `uses` (column -> the setting that names it); rows of another length are left out and reported.

    `name` stands in messages; `unique` is the column whose texts differ from row to row.
    Raises SettingsError for a table or column that isn't there and for a wrong encoding, DataError for a table without a header.
    """
    encoding = "utf-8-sig" if encoding.lower() in _UTF8 else encoding
    try:
        with path.open(newline="", encoding=encoding) as file:
            return _read(file, name, uses, unique, delimiter)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise SettingsError(f"{path}: no such table; correct source.root, source.table or splits") from None
    except UnicodeError as error:
        raise SettingsError(_wrong_encoding(path, name, encoding, error)) from error
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror or error}); check the disk and the permissions") from error


def _read(file: TextIO, name: str, uses: Mapping[str, str], unique: str | None, delimiter: str) -> Table:
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        header = next((row for row in reader if row), None)
    except csv.Error as error:
        raise DataError(f"{name} line 1: the header can't be read ({error}); correct the table or set source.delimiter") from error
    if header is None:
        raise DataError(f"{name}: empty; it needs a header line and rows")
    _check_header(header, name, uses, delimiter)
    table = Table(name, {column: [] for column in uses}, array("q"), [])
    wanted = [header.index(column) for column in uses]
    pool: dict[str, str] = {}
    share = pool.setdefault  # equal texts (labels) become one object: 8 bytes a row instead of 60
    for block in _blocks(reader, len(header), table):
        transposed = list(zip(*block, strict=True))
        for (column, texts), at in zip(table.columns.items(), wanted, strict=True):
            texts.extend(transposed[at] if column == unique else map(share, transposed[at], transposed[at]))
        if len(pool) > _POOL_LIMIT:
            pool.clear()
    if not table.lines and not table.problems:
        table.problems.append((reader.line_num, "no row below the header"))
    return table


def _blocks(reader: _Reader, width: int, table: Table) -> Iterator[list[list[str]]]:
    """Yield the rows of the header's width in blocks, and note in `table` their lines and what is wrong with other rows."""
    block: list[list[str]] = []
    note, line = table.lines.append, reader.line_num + 1
    while True:
        try:
            for row in reader:
                if len(row) == width:
                    block.append(row)
                    note(line)
                    if len(block) == _BLOCK_ROWS:
                        yield block
                        block = []
                elif row:  # a blank line gives no field
                    table.problems.append((line, f"{len(row)} {'field' if len(row) == 1 else 'fields'}, the header has {width}"))
                line = reader.line_num + 1
            break
        except csv.Error as error:
            table.problems.append((line, f"no valid CSV ({error})"))
            line = reader.line_num + 1
    if block:
        yield block


def _check_header(header: list[str], name: str, uses: Mapping[str, str], delimiter: str) -> None:
    if any("\0" in column for column in header):
        raise SettingsError(
            f"{name}: its header holds NUL characters, as UTF-16 read as another encoding does; set source.encoding"
        )
    found = ", ".join(repr(column) for column in header)
    wrong = []
    for column, setting in uses.items():
        if column not in header:
            wrong.append(f"{setting} names {column!r}{did_you_mean(column, header)}")
        elif header.count(column) > 1:
            wrong.append(f"{setting} names {column!r}, which stands there {header.count(column)} times")
    if wrong:
        other = next((d for d in (";", "\t", "|", ",") if len(header) == 1 and d in header[0]), None)
        cure = f"; it seems to be separated by {other!r}: set source.delimiter" if other else ""
        raise SettingsError(f"{name} has the columns {found} (separated by {delimiter!r}), but {'; '.join(wrong)}{cure}")


def _wrong_encoding(path: Path, name: str, encoding: str, error: UnicodeError) -> str:
    """Say which encoding was tried, where it failed, and which one it may be."""
    tried = encoding.removesuffix("-sig")
    with path.open("rb") as file:
        if file.peek(2)[:2] in _UTF16_MARKS:
            return f"{name}: not {tried}, but UTF-16 (it begins with its mark); set source.encoding: utf-16"
        line = next((number for number, raw in enumerate(file, 1) if not _decodes(raw, tried)), None)
    place = f"{name} line {line}" if line else name
    return f"{place}: not {tried} ({error.args[-1]}); set source.encoding, for example to latin-1 or cp1252"


def _decodes(raw: bytes, encoding: str) -> bool:
    try:
        raw.decode(encoding)
    except UnicodeError:
        return False
    return True
