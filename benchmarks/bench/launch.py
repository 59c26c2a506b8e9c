"""Runs one program to its end, in folders of its own, and says what it answered or why it failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Memory
from scratch import Scratch

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "NO_ALBUMENTATIONS_UPDATE": "1",  # else its import asks the network
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the JSON that it printed, or why it failed; the memory of all its processes where that was watched."""

    answer: dict[str, Any] | None
    error: str | None = None
    memory: Memory | None = None


def launch(
    command: Sequence[str | Path], *, patience: float, watch: bool = False, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command whose last line that begins with a brace is JSON; one that takes longer than `patience` seconds has failed."""
    with Scratch() as scratch:
        report, output, errors = (scratch.disk / name for name in ("report", "output", "errors"))
        with output.open("wb") as to_output, errors.open("wb") as to_errors:
            process = subprocess.Popen(
                [sys.executable, HERE / "supervise.py", report, str(patience), str(int(watch)), *map(str, command)],
                stdin=subprocess.PIPE,  # nothing is written into it: it tells that this process is there
                stdout=to_output,
                stderr=to_errors,
                env=os.environ | ENVIRONMENT | scratch.environment | (environment or {}),
                start_new_session=True,  # Ctrl-C is for this process, which then ends the run in order
            )
            try:
                process.wait()
            finally:
                if process.stdin is not None:
                    process.stdin.close()
                process.wait()
        return _outcome(report, patience, *(file.read_text(errors="replace") for file in (output, errors)), watch=watch)


def _outcome(report: Path, patience: float, output: str, errors: str, *, watch: bool) -> Outcome:
    said = [line.strip() for line in (errors.strip() or output).splitlines() if line.strip()]
    last = said[-1][:300] if said else "it said nothing"
    if not report.exists():
        return Outcome(None, f"its supervisor failed: {last}")
    found = json.loads(report.read_text())
    if found["late"]:
        return Outcome(None, f"it took longer than {patience:,.3g} s")
    if found["code"] != 0:
        return Outcome(None, f"exit code {found['code']}: {last}")
    lines = [line for line in output.splitlines() if line.startswith("{")]
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return Outcome(None, f"it printed no JSON: {last}")
    return Outcome(answer, None, Memory(**found["memory"]) if watch else None)
