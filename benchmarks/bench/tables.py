"""Prints what a file of results says as Markdown, from that file alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from programs import DATASETS, FIRST, PROGRAMS
from records import Results, Run
from summary import Line, fault, lines

PLACES = {
    "warm": "page cache warm",
    "drive": "hard disk in software (drive.py), cold",
    "disk": "a disk of this machine, cold",
    "http": "nginx on this machine",
}
LEFT = ("program", "set", "")  # titles of columns of words

Value = Callable[[Line], float | None]


def _ratio(line: Line) -> float | None:
    return line.first / line.second if line.first and line.second else None


def _megabytes(kind: Callable[[Line], int | None]) -> Value:
    def value(line: Line) -> float | None:
        found = kind(line)
        return None if found is None else found / 1e6

    return value


_SHARE: tuple[str, int, Value] = ("of the limit", 2, lambda line: line.share)
_LEAD: tuple[str, int, Value] = ("ours / it", 2, lambda line: line.lead)
_BATCH: tuple[str, int, Value] = ("first batch s", 1, lambda line: line.first_batch)
_CPU: tuple[str, int, Value] = ("CPU ms a picture", 2, lambda line: line.cpu)
_MEMORY: tuple[tuple[str, int, Value], ...] = (
    ("memory MB", 0, _megabytes(lambda line: line.memory.held if line.memory else None)),
    ("of it shared", 0, _megabytes(lambda line: line.memory.shared if line.memory else None)),
    ("mapped files MB", 0, _megabytes(lambda line: line.memory.files if line.memory else None)),
)
_WARM: tuple[tuple[str, int, Value], ...] = (
    ("images/s", 0, lambda line: line.rate),
    ("steady", 0, lambda line: line.steady),
    _SHARE,
    _LEAD,
    _BATCH,
    _CPU,
    *_MEMORY,
)
_FRESH: tuple[tuple[str, int, Value], ...] = (
    ("first epoch images/s", 0, lambda line: line.rate),
    ("steady", 0, lambda line: line.steady),
    _SHARE,
    _LEAD,
    ("first epoch s", 1, lambda line: line.first),
    ("last", 1, lambda line: line.second),
    ("first / last", 2, _ratio),
    _BATCH,
    _CPU,
    ("seeks", 0, lambda line: line.seeks),
    ("drive busy s", 1, lambda line: line.busy),
    *_MEMORY,
)


def tables(results: Results) -> Iterator[str]:
    """Yield what was measured where, a table for each place and job, what was written, what is absent."""
    here, settings = results.machine, results.settings
    yield (
        f"{settings['count']:,} photographs of 800x600, batches of {settings['batch']}, {settings['rounds']} interleaved rounds, medians; "
        f"{here['cpu']}, {here['cores']} cores, {here['memory'] / 2**30:.0f} GiB, {here['system']}, commit {here['commit']}."
    )
    for place, job in dict.fromkeys((run.place, run.job) for run in results.runs):
        yield f'**{PLACES[place]}, job "{job}"**'
        yield _table(lines(results.runs, place, job), _FRESH if place in FIRST else _WARM)
    if results.sets:
        yield "**Writing the sets**"
        yield _sets(results)
    if results.absent:
        yield "Not measured: " + "; ".join(f"{name} ({why})" for name, why in results.absent.items()) + "."


def _table(found: Sequence[Line], columns: Sequence[tuple[str, int, Value]]) -> str:
    titles = ["program", "workers", *(title for title, _, _ in columns), ""]
    rows = []
    for line in found:
        known = PROGRAMS.get(line.program)
        notes = [line.why or (known.note if known else ""), "" if line.why else line.made]
        values = [cell(value(line), digits) for _, digits, value in columns]
        rows.append([line.program, str(line.workers), *values, "; ".join(filter(None, notes))])
    kept = [n for n, title in enumerate(titles) if n in (0, len(titles) - 1) or any(row[n] != "-" for row in rows)]
    return markdown([titles[n] for n in kept], [[row[n] for n in kept] for row in rows])


def _sets(results: Results) -> str:
    rows = []
    for name, found in results.sets.items():
        note = DATASETS[name].note if name in DATASETS else ""
        times = f"{len(found.seconds)} times" if len(found.seconds) > 1 else "once"
        row = [
            f"{statistics.median(found.seconds):.1f}",
            f"{found.bytes / 1e6:.1f}",
            f"{found.files:,}",
            f"{note}; {times}, {found.date}",
        ]
        rows.append([name, *row])
    return markdown(["set", "written in s", "MB on disk", "files", ""], rows)


def failures(runs: Sequence[Run]) -> dict[str, str]:
    """Return for each program that has no number somewhere the place, the job and the reason."""
    found = {}
    for place, job in dict.fromkeys((run.place, run.job) for run in runs):
        for line in lines(runs, place, job):
            if line.why:
                found[f"{line.program} ({place}, {job})"] = line.why
    return found | {f"{run.program} (its memory)": why for run in runs if run.round is None and (why := fault(run))}


def cell(value: float | None, digits: int) -> str:
    """Return a number for a table."""
    return "-" if value is None else f"{value:,.{digits}f}"


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; columns of numbers are set right."""
    marks = ["---" if title in LEFT else "--:" for title in titles]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, marks, *rows))
