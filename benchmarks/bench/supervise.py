"""Runs one command and ends all that it started when it ends, takes too long, or the caller is gone; writes down what that came to.

    python supervise.py REPORT PATIENCE_SECONDS WATCH COMMAND ...

The caller holds the other end of stdin: where that closes, nobody waits for the command any more. REPORT becomes a line of JSON:
the exit code (null where the command was ended), whether it was late, and with WATCH=1 the most memory that its processes held
(looked at each 0.25 s: that walks the page tables of all of them, so such a run isn't timed).

Daemons stay below this process, as it adopts orphans: Ray's processes write over the environment that could have marked them.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from processes import Memory, below, memory, shmem
from scratch import clear

ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
TICK_SECONDS, LOOK_SECONDS = 0.05, 0.25
ASKED_SECONDS = 3.0  # to end after SIGTERM: Python's tracker of shared memory removes what is left of it, Ray ends its processes
KILLED_SECONDS = 30.0  # one that waits for a disk ends only then


class Family:
    """The command and all processes below this one."""

    def __init__(self, command: list[str]) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
        self.code: int | None = None
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def members(self) -> list[int]:
        """Return those that haven't ended."""
        return below(os.getpid())[1:]

    def reap(self) -> None:
        """Take note of those that have ended."""
        with suppress(ChildProcessError):  # there is none
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._child.pid:
                    self.code = self._child.returncode = os.waitstatus_to_exitcode(found[1])

    def end(self) -> None:
        """Ask all to end, and kill what doesn't."""
        asked = set[int]()
        for sign, seconds in ((signal.SIGTERM, ASKED_SECONDS), (signal.SIGKILL, KILLED_SECONDS)):
            deadline = time.monotonic() + seconds
            while (left := self.members()) and time.monotonic() < deadline:
                for process in left:
                    if sign == signal.SIGKILL or process not in asked:
                        with suppress(ProcessLookupError):
                            os.kill(process, sign)
                        asked.add(process)
                time.sleep(TICK_SECONDS)
                self.reap()
        self.reap()


def main() -> None:
    """Run the command."""
    report, patience, watch, *command = sys.argv[1:]
    before, most = shmem(), Memory()
    family = Family(command)
    deadline, look, gone = time.monotonic() + float(patience), 0.0, False
    while family.code is None and not gone and time.monotonic() < deadline:
        gone = bool(select.select([0], [], [], TICK_SECONDS)[0])
        if watch == "1" and time.monotonic() >= look:
            most = max(most, memory(family.members(), before), key=lambda found: found.held)
            look = time.monotonic() + LOOK_SECONDS
        family.reap()
    code = family.code
    family.end()
    answer = {"code": code, "late": code is None and not gone, "memory": asdict(most)}
    Path(report).write_text(json.dumps(answer))
    if gone:  # nobody else does it where the caller was killed
        clear(Path(os.environ["TMPDIR"]), Path(os.environ["BENCH_MEMORY"]))


if __name__ == "__main__":
    main()
