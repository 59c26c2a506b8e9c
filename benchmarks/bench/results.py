"""What a benchmark found: raw runs in one JSON file, and the medians and tables that are made of it alone."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from programs import LIMIT, PROGRAMS

PLACES = {
    "warm": "page cache warm",
    "drive": "hard disk in software (drive.py), cold",
    "disk": "a disk of this machine, cold",
    "http": "nginx on this machine",
}


class Results:
    """A file of results that is whole after each run."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"machine": machine(), "settings": settings, "sets": {}, "absent": {}, "tuning": [], "runs": []}

    def save(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.path)


def machine() -> dict[str, Any]:
    """Say what this machine is."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    total = next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    cores = len(os.sched_getaffinity(0))
    return {"cpu": models[0] if models else platform.machine(), "cores": cores, "memory": total, "kernel": platform.release()}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


@dataclass(frozen=True)
class Line:
    """A program in one place and job: medians over its rounds, None where there is nothing to show and `why` says the cause."""

    program: str
    workers: int
    why: str | None = None
    rate: float | None = None  # images a second of the last epoch
    share: float | None = None  # of the limit program's, in the same round
    first: float | None = None  # seconds of the first epoch, from before the loader is made
    second: float | None = None
    first_batch: float | None = None  # seconds from before the loader is made
    from_start: float | None = None  # seconds from the start of the process to the first batch
    peak: int | None = None  # bytes of memory of all processes


def lines(data: dict[str, Any], place: str, job: str) -> list[Line]:
    """Return a line for each program that ran in a place, fastest first, what failed last."""
    runs = [run for run in data["runs"] if run["place"] == place and run["job"] == job]
    names = dict.fromkeys(run["program"] for run in runs)
    limits = {run["round"]: rate(run) for run in runs if run["program"] == LIMIT and not fault(run)}
    found = [_line(name, [run for run in runs if run["program"] == name], limits) for name in names]
    return sorted(found, key=lambda line: (line.program != LIMIT, line.rate is None, -(line.rate or 0)))


def _line(name: str, runs: Sequence[dict[str, Any]], limits: dict[int, float]) -> Line:
    timed = [run for run in runs if not run.get("watched")]
    why = next((cause for run in runs if (cause := fault(run))), None)
    if why is not None or not timed:
        return Line(name, runs[0]["workers"], why or "it wasn't timed")
    shares = [rate(run) / limits[run["round"]] for run in timed if run["round"] in limits]
    two = all(len(run["epochs"]) > 1 for run in timed)
    peaks = [run["peak"] for run in runs if run.get("watched")]
    return Line(
        name,
        runs[0]["workers"],
        rate=statistics.median(map(rate, timed)),
        share=statistics.median(shares) if shares else None,
        first=statistics.median(run["epochs"][0]["seconds"] for run in timed),
        second=statistics.median(run["epochs"][-1]["seconds"] for run in timed) if two else None,
        first_batch=statistics.median(run["epochs"][0]["first_batch"] for run in timed),
        from_start=statistics.median(run["from_start"] for run in timed),
        peak=max(peaks) if peaks else None,
    )


def fault(run: dict[str, Any]) -> str | None:
    """Say why a run has no number: it failed, or didn't deliver each picture once an epoch."""
    if run.get("error"):
        return str(run["error"])
    for number, epoch in enumerate(run["epochs"]):
        if epoch["missing"] or epoch["doubled"]:
            return f"epoch {number}: {epoch['missing']} pictures didn't come, {epoch['doubled']} came more than once"
    return None


def rate(run: dict[str, Any]) -> float:
    """Return images a second of the last epoch, from its start on: what is decoded into a buffer before the first batch counts."""
    epoch = run["epochs"][-1]
    return float(epoch["samples"] / epoch["seconds"])


def tables(data: dict[str, Any]) -> Iterator[str]:
    """Yield Markdown: what was measured where, a table for each place and job, what was written, what is absent."""
    here, settings = data["machine"], data["settings"]
    yield (
        f"{settings['count']:,} photographs of 800x600, batches of {settings['batch']}, {settings['rounds']} interleaved rounds, medians; "
        f"{here['cpu']}, {here['cores']} cores, {here['memory'] / 2**30:.0f} GiB, Linux {here['kernel']}."
    )
    for place, job in dict.fromkeys((run["place"], run["job"]) for run in data["runs"]):
        yield f'**{PLACES[place]}, job "{job}"**'
        yield _table(data, lines(data, place, job))
    if data["sets"]:
        yield "**Writing the sets**"
        rows = [
            [name, f"{found['seconds']:.1f}", f"{found['bytes'] / 1e6:.1f}"]
            for name, found in data["sets"].items()
            if "bytes" in found
        ]
        yield markdown(["set", "written in s", "MB on disk"], rows)
    if data["absent"]:
        yield "Not measured: " + "; ".join(f"{name} ({why})" for name, why in data["absent"].items()) + "."


def _table(data: dict[str, Any], found: Sequence[Line]) -> str:
    titles = [
        "program",
        "workers",
        "images/s",
        "of the limit",
        "first epoch s",
        "second",
        "first / second",
        "first batch s",
        "memory MB",
        "",
    ]
    rows = []
    for line in found:
        note = line.why or PROGRAMS[line.program].note
        ratio = line.first / line.second if line.first and line.second else None
        peak = line.peak / 1e6 if line.peak else None
        cells = [_cell(line.rate, 0), _cell(line.share, 2), _cell(line.first, 1), _cell(line.second, 1), _cell(ratio, 2)]
        rows.append([line.program, str(line.workers), *cells, _cell(line.first_batch, 1), _cell(peak, 0), note])
    kept = [n for n, title in enumerate(titles) if n in (0, len(titles) - 1) or any(row[n] != "-" for row in rows)]
    return markdown([titles[n] for n in kept], [[row[n] for n in kept] for row in rows])


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; all columns but the first and an untitled last one are numbers."""
    marks = ["---" if n == 0 or not title else "--:" for n, title in enumerate(titles)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, marks, *rows))
