"""Reads one CSV table strictly, as text: the columns asked for, the line of every row, and all that is wrong with its shape.

Python's csv module does it, not pandas.read_csv: that fills a short row as if its cells were empty, takes the first column for an
index where every row is too long, cuts a text at a NUL, and can't say in which line a row stands. Blocks of rows in which there is
nothing to parse spare it the work (`plain`).
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from shardify.config.explain import did_you_mean
from shardify.errors import DataError, SettingsError, StorageError
from shardify.sources.blocks import Blocks, Lines
from shardify.sources.plain import split_plain
from shardify.sources.rowlines import RowLines
from shardify.sources.texts import Growing, Texts

_UTF8 = ("utf-8", "utf8", "utf_8", "u8")
# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = ((b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))
_PACKED = (
    (b"\x1f\x8b", "compressed by gzip"),
    (b"PK\x03\x04", "a zip archive or a workbook"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
)
_BATCH_ROWS = 128  # above a few hundred living lists the garbage collector starts to count: 1.6 M rows took 6.1 s instead of 3.4


class _Reader(Protocol):
    """What csv.reader returns, which typing has no public name for."""

    @property
    def line_num(self) -> int: ...
    def __iter__(self) -> _Reader: ...
    def __next__(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of n rows, the line where each row begins (the header's counts, from 1), and (line, reason) of the rows left out."""

    name: str
    columns: Mapping[str, Texts]
    lines: RowLines
    problems: list[tuple[int, str]]

    def __len__(self) -> int:
        return len(self.lines)

    def only(self, wanted: npt.NDArray[np.bool_]) -> Table:
        """Return the rows where `wanted`, bool (n,), is true."""
        columns = {name: column.only(wanted) for name, column in self.columns.items()}
        return Table(self.name, columns, self.lines.only(wanted), self.problems)


def read_table(path: Path, name: str, uses: Mapping[str, str], *, delimiter: str = ",", encoding: str = "utf-8") -> Table:
    """Read the columns of `uses` (column -> the setting that names it); rows of another length are left out and reported.

    So are rows in which a column asked for holds a NUL. `name` stands in messages.
    Raises SettingsError for a table or column that isn't there and for a wrong encoding, DataError for a table without a header.
    """
    encoding = "utf-8-sig" if encoding.lower() in _UTF8 else encoding
    try:
        with path.open(newline="", encoding=encoding) as file:
            return _read(Blocks(file), name, uses, delimiter)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise SettingsError(f"{path}: no such table; correct source.root, source.table or splits") from None
    except UnicodeError as error:
        raise SettingsError(_wrong_encoding(path, name, encoding, error)) from error
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror or error}); check the disk and the permissions") from error


def _read(text: Blocks, name: str, uses: Mapping[str, str], delimiter: str) -> Table:
    reading = _Reading(text, name, uses, delimiter)
    while block := text.take():
        reading.read(block)
    return reading.finish()


class _Reading:
    """A table that is being read: its header at once, then block after block."""

    def __init__(self, text: Blocks, name: str, uses: Mapping[str, str], delimiter: str) -> None:
        self._text, self._name, self._delimiter = text, name, delimiter
        self._line = 1  # of the file, where the next block begins
        self._lines = RowLines()
        self._problems: list[tuple[int, str]] = []
        header = self._header(uses)
        self._width = len(header)
        self._wanted = {column: header.index(column) for column in uses}
        self._columns = {column: Growing() for column in uses}

    def read(self, block: str) -> None:
        """Read a block of whole lines and, where a record goes on behind its end, the next ones with it."""
        plain = split_plain(block, self._width, self._delimiter, list(self._wanted.values()))
        if plain is None:
            self._parse(block)
            return
        rows, columns = plain
        for column, texts in zip(self._columns.values(), columns, strict=True):
            column.append(texts)
        self._lines.add(self._line, rows)
        self._line += rows

    def finish(self) -> Table:
        """Return the table."""
        if not len(self._lines) and not self._problems:
            self._problems.append((self._line - 1, "no row below the header"))
        columns = {name: column.finish() for name, column in self._columns.items()}
        return Table(self._name, columns, self._lines, self._problems)

    def _header(self, uses: Mapping[str, str]) -> list[str]:
        lines = Lines(self._text.take(), self._text)
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        try:
            header = next((row for row in reader if row), None)
        except csv.Error as error:
            raise DataError(
                f"{self._name} line 1: the header can't be read ({error}); correct the table or set source.delimiter"
            ) from error
        if header is None:
            raise DataError(f"{self._name}: empty; it needs a header line and rows")
        _check_header(header, self._name, uses, self._delimiter)
        self._line += reader.line_num
        self._text.give_back(lines.rest())
        return header

    def _parse(self, block: str) -> None:
        """Read a block with the csv module; note the rows of the header's width, and what is wrong with others."""
        lines = Lines(block, self._text)
        reader: _Reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        before, batch, begin = self._line - 1, [], []
        for row in _records(reader, lines):
            if isinstance(row, csv.Error):
                long = "; is a quote not closed?" if "field limit" in str(row) else ""
                self._problems.append((self._line, f"no valid CSV ({row}{long})"))
            elif len(row) == self._width:
                batch.append(row)
                begin.append(self._line)
                if len(batch) == _BATCH_ROWS:
                    self._keep(batch, begin)
                    batch, begin = [], []
            elif row:  # a blank line gives no field
                found = f"{len(row)} {'field' if len(row) == 1 else 'fields'}, the header has {self._width}"
                self._problems.append((self._line, found))
            self._line = before + reader.line_num + 1
        self._keep(batch, begin)

    def _keep(self, rows: list[list[str]], begin: list[int]) -> None:
        """Add rows, which begin in the lines `begin`, but for those with a NUL in a column asked for."""
        columns = [[row[at] for row in rows] for at in self._wanted.values()]
        if any("\0" in "".join(column) for column in columns):
            good = [not self._note_nul(row, line) for row, line in zip(rows, begin, strict=True)]
            columns = [list(compress(column, good)) for column in columns]
            begin = list(compress(begin, good))
        for growing, column in zip(self._columns.values(), columns, strict=True):
            growing.extend(column)
        for line in begin:
            self._lines.add(line)

    def _note_nul(self, row: list[str], line: int) -> bool:
        """Note which of a row's columns hold a NUL; returns whether any does."""
        holding = [(name, row[at]) for name, at in self._wanted.items() if "\0" in row[at]]
        self._problems.extend((line, f"{name} {text!r} holds a NUL") for name, text in holding)
        return bool(holding)


def _records(reader: _Reader, lines: Lines) -> Iterator[list[str] | csv.Error]:
    """Yield each record that begins in the block, or what is wrong with it; the reader goes on behind a wrong one."""
    while not lines.at_end:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield error


def wrong_columns(there: list[str], uses: Mapping[str, str]) -> Iterator[str]:
    """Say of each column of `uses` that a table hasn't, or has twice, which setting names it."""
    for column, setting in uses.items():
        if column not in there:
            yield f"{setting} names {column!r}{did_you_mean(column, there)}"
        elif there.count(column) > 1:
            yield f"{setting} names {column!r}, which stands there {there.count(column)} times"


def _check_header(header: list[str], name: str, uses: Mapping[str, str], delimiter: str) -> None:
    if any("\0" in column for column in header):
        raise SettingsError(
            f"{name}: its header holds NUL characters, as UTF-16 or UTF-32 read as another encoding does; set source.encoding"
        )
    found = ", ".join(repr(column) for column in header)
    if wrong := list(wrong_columns(header, uses)):
        other = next((d for d in (";", "\t", "|", ",") if len(header) == 1 and d in header[0]), None)
        cure = f"; it seems to be separated by {other!r}: set source.delimiter" if other else ""
        raise SettingsError(f"{name} has the columns {found} (separated by {delimiter!r}), but {'; '.join(wrong)}{cure}")


def _wrong_encoding(path: Path, name: str, encoding: str, error: UnicodeError) -> str:
    """Say which encoding was tried, where it failed, and which one it may be."""
    tried = encoding.removesuffix("-sig")
    with path.open("rb") as file:
        begin = file.peek(4)
        other = next((named for mark, named in _MARKS if begin.startswith(mark)), None)
        if packed := next((what for magic, what in _PACKED if begin.startswith(magic)), None):
            return f"{name}: {packed}, not a table of text; unpack it, or export it as CSV"
        if other is not None and other.lower() != codecs.lookup(tried).name:
            return f"{name}: not {tried}, but {other} (it begins with its mark); set source.encoding: {other.lower()}"
        line = _first_wrong(file, tried)
    place = f"{name} line {line}" if line else name
    wide = codecs.lookup(tried).name.startswith(("utf-16", "utf-32"))
    return f"{place}: not {tried} ({error.args[-1]}); set source.encoding{'' if wide else ', for example to latin-1 or cp1252'}"


def _first_wrong(file: BinaryIO, encoding: str) -> int | None:
    """Return the number of the first line that isn't in an encoding, in which a line may end by more than one byte."""
    decoder, line = codecs.getincrementaldecoder(encoding)(), 1
    for raw in chain(file, [b""]):
        before = decoder.getstate()
        try:
            line += decoder.decode(raw, not raw).count("\n")
        except UnicodeError:
            decoder.setstate(before)
            with suppress(UnicodeError):
                for at in range(len(raw)):
                    line += decoder.decode(raw[at : at + 1]).count("\n")
            return line
    return None
