"""What a command shows: progress on stderr while it works, tables and problems when it is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from shardify.interrupts import INTERRUPTS
from shardify.items import Progress, SplitSize

_BAR_SECONDS = 0.1  # a bar that is told of each of 5,000 pictures a second costs a tenth of a core
_LINE_SECONDS = 5.0
_WIDE = 1000  # no number is cut: a narrow terminal breaks the line


class _Rate:
    """Counts a stage: pictures, bytes, seconds."""

    def __init__(self, doing: str, total: int, unit: str = "images") -> None:
        self.doing, self.total, self.unit = doing, total, unit
        self.done = self.bytes = 0
        self.start = self.shown = time.monotonic()

    def count(self, size: int, every: float) -> bool:
        """Count a picture; says whether it is time to show. Raises KeyboardInterrupt where an interrupt was lost."""
        INTERRUPTS.check()
        self.done += 1
        self.bytes += size
        now = time.monotonic()
        due = now - self.shown >= every or self.done == self.total
        self.shown = now if due else self.shown
        return due

    @property
    def speed(self) -> str:
        """Pictures and megabytes a second so far."""
        seconds = max(self.shown - self.start, 1e-3)
        megabytes = f", {self.bytes / seconds / 1e6:,.1f} MB/s" if self.bytes else ""
        return f"{self.done / seconds:,.0f} {self.unit}/s{megabytes}"

    @property
    def remaining(self) -> str:
        """The time that is left at this speed."""
        seconds = round((self.shown - self.start) / max(self.done, 1) * (self.total - self.done))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class LineProgress:
    """Progress as plain lines, one every few seconds: for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rate = _Rate("", 0)

    def begin(self, doing: str, total: int, unit: str = "images") -> None:
        """Start a stage."""
        self._rate = _Rate(doing, total, unit)
        self._say(f"{doing}: {total:,} {unit}" if total else doing)

    def advance(self, size: int) -> None:
        """Count a picture."""
        rate = self._rate
        if rate.count(size, _LINE_SECONDS):
            line = f"{rate.doing}: {rate.done:,} of {rate.total:,} {rate.unit}, {rate.speed}, ETA {rate.remaining}"
            self._say(line)

    def _say(self, line: str) -> None:
        with suppress(OSError, ValueError):  # a log that is full or gone never costs the work
            print(line, file=self._stream, flush=True)


class BarProgress:
    """Progress as a bar: for terminals."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._rate = _Rate("", 0)
        self._task: TaskID | None = None

    def begin(self, doing: str, total: int, unit: str = "images") -> None:
        """Start a stage."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._rate = _Rate(doing, total, unit)
        self._task = self._bars.add_task(doing, total=total or None, speed="")

    def advance(self, size: int) -> None:
        """Count a picture."""
        if self._rate.count(size, _BAR_SECONDS) and self._task is not None:
            self._bars.update(self._task, completed=self._rate.done, speed=self._rate.speed)


@contextmanager
def progress() -> Iterator[Progress]:
    """Show progress on stderr: a bar where that is a terminal, else lines."""
    if not sys.stderr.isatty():
        yield LineProgress(sys.stderr)
        return
    eta = TextColumn("ETA"), TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), *eta)
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield BarProgress(bars)


def show_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout: texts to the left, numbers to the right with separators, None as a dash."""
    table = Table(box=None, pad_edge=False)
    made = [list(row) for row in rows]
    for column, title in enumerate(titles):
        is_text = any(isinstance(row[column], str) for row in made)
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    for row in made:
        table.add_row(*("-" if cell is None else escape(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    Console(width=_WIDE).print(table)


def show_splits(splits: Mapping[str, SplitSize]) -> None:
    """Print what each split comes to."""
    show_table(("split", "shards", "samples", "bytes"), [(name, s.shards, s.samples, s.bytes) for name, s in splits.items()])
