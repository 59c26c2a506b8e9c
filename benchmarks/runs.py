"""Run a command and measure it: seconds until its bytes are on the disk, peak memory of all its processes; print what was measured."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.05  # between two looks at the memory
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """A command that ended well: how long it took, what it printed, and (where asked) its processes' peak memory in bytes."""

    seconds: float
    output: str
    peak: int = 0

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON that the command printed."""
        found: dict[str, Any] = json.loads(self.output)
        return found


def run(
    command: Sequence[str | Path],
    *,
    sync: Path | None = None,
    watch: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run a command to its end and, with `sync`, until that folder's file system holds all its bytes on the disk.

    With `watch`, its memory is looked at every 50 ms (which slows it down). `environment` is set beside this process's. A command that fails ends the benchmark with its stderr.
    """
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=os.environ | (environment or {}),
        )
        watcher = _Watcher(process.pid) if watch else None
        try:
            output, _ = process.communicate()
        except BaseException:
            process.terminate()  # it is in a session of its own: Ctrl-C reaches only us
            raise
        if sync is not None:
            subprocess.run(["sync", "-f", str(sync)], check=True)
        seconds = time.perf_counter() - start
        peak = watcher.stop() if watcher else 0
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(map(str, command))}: exit code {process.returncode}\n{errors.read()}")
    return Run(seconds, output, peak)


def print_medians(commands: Mapping[str, Sequence[str | Path]], rounds: int, environments: Mapping[str, Mapping[str, str]]) -> None:
    """Run commands that print numbers as JSON, in turn, and print each one's medians; a round before the first warms the page cache."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(-1, rounds):
        for name, command in commands.items():
            answer = run(command, environment=environments.get(name)).answer
            if number >= 0:
                found[name].append(answer)
    for name, answers in found.items():
        print(f"{name}: " + ", ".join(f"{key} {statistics.median(one[key] for one in answers):.2f}" for key in answers[0]))


class _Watcher:
    """A thread that sums the PSS of a session's processes, again and again, and keeps the largest sum."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the thread; return the peak in bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, sum(map(_pss, _members(self._session))))


def _members(session: int) -> list[int]:
    found = []
    for name in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            if os.getsid(int(name)) == session:
                found.append(int(name))
        except ProcessLookupError:
            continue  # it ended meanwhile
    return found


def _pss(process: int) -> int:
    """Return a process's proportional set size in bytes; 0 where it has just ended."""
    try:
        match = _PSS.search(Path("/proc", str(process), "smaps_rollup").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


@dataclass
class Results:
    """What a benchmark found: a table of runs, and goals that it was measured against."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Keep a run, and say on stderr what it came to."""
        self.rows.append(row)
        print(", ".join(f"{key} {_cell(value)}" for key, value in row.items() if value is not None), file=sys.stderr, flush=True)

    def median(self, what: str, key: str) -> float:
        """Return the median of a column over the runs of one kind."""
        return float(statistics.median(row[key] for row in self.rows if row["what"] == what and key in row))

    def expect(self, name: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Compare a number with its goal."""
        met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        self.goals.append({"goal": name, "value": value, "at_most": at_most, "at_least": at_least, "met": met})

    def show(self) -> None:
        """Print the tables, then all of it as one line of JSON."""
        print(f"\n{self.name}\n")
        print(_table(self.rows))
        print(f"\n{_table(self.goals)}\n")
        print(json.dumps({"benchmark": self.name, "runs": self.rows, "goals": self.goals}))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    titles = list(dict.fromkeys(key for row in rows for key in row))
    cells = [titles, *([_cell(row.get(title)) for title in titles] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "NO"
        case float():
            return f"{value:,.2f}"
        case int():
            return f"{value:,}"
        case dict():
            return " ".join(f"{key}={_cell(item)}" for key, item in value.items())
    return str(value)
