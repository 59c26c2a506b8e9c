"""Runs one program to its end in an environment that marks all its processes, so that their memory is counted and none is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MARK = "SHARDIFY_BENCH_RUN"
LOOK_SECONDS = 0.25  # between two looks at the memory: each walks the page tables of all processes
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the JSON that it printed, or why it failed; `peak` bytes of all its processes where that was watched."""

    answer: dict[str, Any] | None
    error: str | None = None
    peak: int = 0


def launch(command: Sequence[str | Path], *, patience: float, watch: bool = False) -> Outcome:
    """Run a command whose last line is JSON; one that takes longer than `patience` seconds has failed."""
    mark = uuid.uuid4().hex
    environment = os.environ | {MARK: mark, "NO_ALBUMENTATIONS_UPDATE": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        watcher = _Watcher(mark) if watch else None
        late = False
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            peak = watcher.stop() if watcher else 0
            _end(mark)
            process.wait()
        if late:
            return Outcome(None, f"it took longer than {patience:.0f} s")
        return _outcome(process.returncode, _read(output), _read(errors), peak)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _outcome(code: int, output: str, errors: str, peak: int) -> Outcome:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        return Outcome(json.loads(lines[-1]), None, peak)
    said = [line.strip() for line in (errors or output).splitlines() if line.strip()]
    return Outcome(None, f"exit code {code}: {said[-1][:300] if said else 'it said nothing'}")


def members(mark: str) -> list[int]:
    """Return the processes that carry a mark in their environment: daemons and grandchildren among them."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended, or is another user's
                if wanted in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def _end(mark: str) -> None:
    """End what a run left behind."""
    for _ in range(3):  # one may have just begun another
        for process in members(mark):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class _Watcher:
    """A thread that sums the PSS of the marked processes, again and again, and keeps the largest sum."""

    def __init__(self, mark: str) -> None:
        self._mark, self._peak = mark, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the thread; return the peak in bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._peak = max(self._peak, sum(map(pss, members(self._mark))))


def pss(process: int) -> int:
    """Return a process's proportional set size in bytes; 0 where it has just ended."""
    try:
        match = _PSS.search(Path("/proc", str(process), "smaps_rollup").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
