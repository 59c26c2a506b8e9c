"""What /proc says of a process and all that it started: which there are, the CPU that they took, the memory that they hold, by kind."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICK = os.sysconf("SC_CLK_TCK")
# Of what follows a process's name in its `stat`.
STATE, PARENT, CPU, START = 0, 1, slice(11, 15), 19
_KINDS = re.compile(r"^Pss_(Anon|Shmem|File): +(\d+) kB", re.MULTILINE)
_SHMEM = re.compile(r"^Shmem: +(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Memory:
    """Bytes by kind: of the processes' own, of shared memory, and of files that they have mapped, each page counted once.

    shared: what the machine's shared memory grew by, or what the processes map of it, whichever is more: a copy in /dev/shm or in a
    memory file that nobody maps is held all the same.
    files: libraries, and data that is read by mapping it; the kernel can take it back.
    """

    own: int = 0
    shared: int = 0
    files: int = 0

    @property
    def held(self) -> int:
        """What nothing but the end of the processes gives back."""
        return self.own + self.shared


def words(process: int) -> list[str]:
    """Return what follows the name in a process's `stat`; raises OSError where it has ended."""
    return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()


def below(root: int) -> list[int]:
    """Return a process and all below it that haven't ended, in the order of generations."""
    children = defaultdict(list)
    for process in (int(path.name) for path in PROC.iterdir() if path.name.isdigit()):
        with suppress(OSError):  # it has ended
            found = words(process)
            if found[STATE] not in "ZX":
                children[int(found[PARENT])].append(process)
    known = [root]
    for process in known:
        known += children[process]
    return known


def cpu_seconds(root: int) -> float:
    """Return what a process, all below it and all that ended there and were waited for took of the CPU so far."""
    ticks = 0
    for process in below(root):
        with suppress(OSError):
            ticks += sum(map(int, words(process)[CPU]))
    return ticks / TICK


def memory(processes: Iterable[int], shmem_before: int) -> Memory:
    """Return what processes hold; `shmem_before` is what `shmem` said before they began."""
    kinds = dict.fromkeys(("Anon", "Shmem", "File"), 0)
    for process in processes:
        with suppress(OSError):  # it has ended
            for kind, size in _KINDS.findall((PROC / str(process) / "smaps_rollup").read_text()):
                kinds[kind] += int(size) * 1024
    return Memory(kinds["Anon"], max(kinds["Shmem"], shmem() - shmem_before), kinds["File"])


def shmem() -> int:
    """Return the bytes of all shared memory of this machine: /dev/shm and other tmpfs, memory files, shared mappings."""
    match = _SHMEM.search((PROC / "meminfo").read_text())
    return int(match[1]) * 1024 if match else 0
