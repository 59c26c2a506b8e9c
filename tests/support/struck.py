"""Builds that are struck: each runs in a process of its own, which kills or interrupts itself, or fills its disk, at a chosen moment.

    Strikes (this process) --a job a line--> server, which has imported everything --fork--> one build

A build takes a tenth of a second so, and a moment is exact: before or after the n-th operation on the output folder (a rename, an
fsync, ...), or at the n-th picture of a phase. `lose_power` then takes from the disk what no fsync had put there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

CRASHED = 70  # exit code of a build that raised what it never should


@dataclass(frozen=True)
class Strike:
    """When a build is struck, and how.

    phase      at the `count`-th picture of this phase (0: as it begins); or, where `operation` is given, only within it
    operation  before (`after`: after) the `count`-th of these operations on a file whose name ends in `name`; "any": whichever
    how        "kill" (-9), "tear" (a write: half of it, then -9), "interrupt" (SIGINT), "fill" (the file system of `path`, by a file
               of that name), "remove" or "cut" (`path`, a file of the source)
    """

    phase: str = ""
    count: int = 0
    operation: str = ""
    name: str = ""
    after: bool = False
    how: str = "kill"
    path: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a build ended: its exit code (-9: killed), what it did, the error it raised, what it printed."""

    code: int
    events: tuple[Mapping[str, Any], ...]
    output: str

    @property
    def phase(self) -> str:
        """The last phase that it began."""
        return next((event["phase"] for event in reversed(self.events) if "phase" in event), "starting")

    @property
    def phases(self) -> dict[str, int]:
        """Each phase and how many pictures it counted."""
        return {event["ended"]: event["pictures"] for event in self.events if "ended" in event}

    def count(self, operation: str = "any", phase: str = "") -> int:
        """Return how often it did an operation on its folders, in a phase or at all."""
        done = [event for event in self.events if "operation" in event]
        return sum(operation in {"any", event["operation"]} and phase in {"", event["at"]} for event in done)

    @property
    def error(self) -> str:
        """Its error in full: message, problems, notes; empty where there was none."""
        return next((event["error"] for event in self.events if "error" in event), "")

    @property
    def seconds_after(self) -> float:
        """The seconds from the strike to the end."""
        moments = [event["time"] for event in self.events if "time" in event]
        return float(moments[-1] - moments[0])

    @property
    def struck(self) -> bool:
        """Whether the moment came."""
        return any("struck" in event for event in self.events)


@dataclass(frozen=True)
class Job:
    """One build to run: settings (or a command line), and what is done to it.

    ticking    modules whose clock advances a second each time they look at it: what is done every n seconds is done every n looks
    constants  module attributes to set, such as {"shardify.spool.LIMIT": 4}
    limits     resource limits, such as {"RLIMIT_NOFILE": 64}
    """

    log: str
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()
    watched: Sequence[str] = ()
    strike: Mapping[str, Any] = field(default_factory=dict)
    ticking: Sequence[str] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)


class Strikes:
    """The server: `run` has it fork a build and waits for its end."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._runs = 0
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("striker.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the server."""
        self._server.communicate()

    def run(self, *, strike: Strike | None = None, **job_fields: Any) -> Outcome:
        """Run a build (the fields of a Job) to its end, whichever that is."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._runs += 1
        job = Job(str(self._scratch / f"{self._runs}.log"), strike=asdict(strike) if strike else {}, **job_fields)
        self._server.stdin.write(json.dumps(asdict(job)) + "\n")
        self._server.stdin.flush()
        code = self._server.stdout.readline()
        assert code, "the server ended: its stderr says why"
        log = Path(job.log)
        events = [json.loads(line) for line in log.read_text().splitlines()]
        return Outcome(int(code), tuple(events), log.with_suffix(".txt").read_text())


def lose_power(outcomes: Sequence[Outcome], folders: Sequence[Path], tail: str) -> None:
    """Take from the files of builds, killed since the machine was started, what they hadn't put on the medium.

    What was written after a file's last fsync is gone (`tail` "cut") or reads as zeros ("zeros"), and renames whose folder wasn't
    synced since never happened ("cut"): what POSIX allows, and ext4 and XFS are seen to do.
    """
    synced: dict[str, int] = dict(outcomes[0].events[0]["there"])
    renames: list[Mapping[str, str]] = []
    for event in chain.from_iterable(outcome.events for outcome in outcomes):
        match event.get("operation"):
            case "fsync" | "fdatasync" if event["folder"]:
                renames = [rename for rename in renames if os.path.dirname(rename["to"]) != event["path"]]  # noqa: PTH120
            case "fsync" | "fdatasync":
                synced[event["path"]] = event["size"]
            case "rename" | "replace":
                renames.append(event)
                synced[event["to"]] = synced.pop(event["path"], 0)
            case "unlink" | "remove":
                synced.pop(event["path"], None)
    files = [path for folder in folders if folder.exists() for path in folder.rglob("*") if path.is_file()]
    for path in files:
        safe, size = synced.get(str(path), 0), path.stat().st_size
        if safe < size:
            os.truncate(path, safe)
            if tail == "zeros":
                os.truncate(path, size)
    for rename in reversed(renames if tail == "cut" else []):
        if os.path.exists(rename["to"]) and not os.path.exists(rename["path"]):  # noqa: PTH110
            os.rename(rename["to"], rename["path"])  # noqa: PTH104
            if rename["replaced"]:
                shutil.copyfile(rename["replaced"], rename["to"])
