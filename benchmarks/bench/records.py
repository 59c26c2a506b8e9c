"""What a benchmark writes down: epochs, runs, sets and the file that holds them, whole after each run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from processes import Memory


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What came in an epoch.

    seconds: from its beginning, of the first one from before the loader was made.
    arrivals, sizes: for each batch the seconds after which it came, and its pictures.
    missing, doubled: pictures that didn't come, that came more than once.
    in_order: share of pictures that came right behind the one that was written before them.
    repeated: share of pictures at the same place in the epoch before.
    black_corners, dropped_channels: share of pictures with them, which rotation and ChannelDropout make.
    cpu: seconds of all processes of the program.
    drive: what the emulated drive counted.
    """

    seconds: float
    arrivals: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    missing: int = 0
    doubled: int = 0
    in_order: float = 0.0
    repeated: float = 0.0
    black_corners: float = 0.5
    dropped_channels: float = 0.1
    cpu: float = 0.0
    drive: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Pictures that came."""
        return sum(self.sizes)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A program's run: where, what, with how many workers, and what came of it.

    round: counted from 0; None for the run whose memory was watched, which isn't timed.
    made: how the place was made warm or cold before it.
    """

    place: str
    job: str
    round: int | None
    program: str
    workers: int
    made: str = ""
    epochs: tuple[Epoch, ...] = ()
    error: str | None = None
    memory: Memory | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A set: what it was written from and by (`digest`), each time's seconds until it was on the disk, and what it takes there."""

    digest: str
    seconds: tuple[float, ...]
    bytes: int
    files: int
    date: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Images a second by numbers of workers, tried in a place before the first round."""

    place: str
    job: str
    program: str
    rates: Mapping[int, float]


@dataclass
class Results:
    """All that a benchmark found.

    machine, settings: where and how; absent: programs and places that weren't measured, with the reason; versions: of all that is
    installed in a program's environment, by environment.
    """

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    sets: dict[str, Written] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the file, a line for each set, trial and run."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(_text(asdict(self)))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def load(path: Path) -> Results:
    """Read a file of results."""
    data = json.loads(path.read_text())
    data["sets"] = {name: written_from(found) for name, found in data["sets"].items()}
    data["trials"] = [
        Trial(**{**trial, "rates": {int(count): rate for count, rate in trial["rates"].items()}}) for trial in data["trials"]
    ]
    data["runs"] = [run_from(found) for found in data["runs"]]
    return Results(**data)


def run_from(data: Mapping[str, Any]) -> Run:
    """Return a run as JSON holds it."""
    memory = Memory(**data["memory"]) if data.get("memory") else None
    return Run(**{**data, "epochs": tuple(map(epoch_from, data["epochs"])), "memory": memory})


def epoch_from(data: Mapping[str, Any]) -> Epoch:
    """Return an epoch as JSON holds it."""
    return Epoch(**{**data, "arrivals": tuple(data["arrivals"]), "sizes": tuple(data["sizes"])})


def written_from(data: Mapping[str, Any]) -> Written:
    """Return a set's record as JSON holds it."""
    return Written(**{**data, "seconds": tuple(data["seconds"])})


def _text(data: Mapping[str, Any]) -> str:
    parts = []
    for name, value in data.items():
        if isinstance(value, list):
            lines = ",\n  ".join(map(json.dumps, value))
            parts.append(f"{json.dumps(name)}: [\n  {lines}\n ]" if value else f"{json.dumps(name)}: []")
        else:
            lines = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
            parts.append(f"{json.dumps(name)}: {{\n  {lines}\n }}" if value else f"{json.dumps(name)}: {{}}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"
