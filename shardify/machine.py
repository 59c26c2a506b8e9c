"""Says what a process may use of its machine: CPUs, memory, and the disk that a file lies on.

Limits are the least of what the kernel and the process's cgroups (v1 and v2, each with its ancestors) allow: a container sees its
machine's figures, and is killed by its own.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")
_DEVICES = Path("/sys/dev/block")
_SECTOR = 512  # bytes; sysfs counts in these, whatever the disk does
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)  # no file of that name can be


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk: its name ("sda"), whether it rotates (None: not known), and where on it a file system begins, in bytes.

    What no block device stands behind (a network, memory, several disks at once) has the name of its device number.
    """

    name: str
    rotational: bool | None
    start: int = 0


def cpus(proc: Path = _PROC) -> int:
    """Return how many CPUs this process may use, at least 1; a quota counts in whole CPUs, rounded down."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([affinity, *_quotas(proc)])))


def available_memory(proc: Path = _PROC) -> int:
    """Return how many bytes of memory this process may still take without others being swapped out.

    A cgroup's is limit - usage + inactive file pages: what was read once goes first.
    """
    found = [int(words[1]) * 1024 for line in _lines(proc / "meminfo") if (words := line.split())[0] == "MemAvailable:"]
    return max(0, min([*found, *_rooms(proc)], default=2**30))


def disk_of(device: int, devices: Path = _DEVICES) -> Disk:
    """Return the disk behind a device number (`stat.st_dev`): of a partition the whole disk, of a mapped volume the one below."""
    number = f"{os.major(device)}:{os.minor(device)}"
    start, folder = 0, devices / number
    while folder.exists():
        real = folder.resolve()
        if (real / "partition").exists():
            start += _number(real / "start") * _SECTOR
            folder = real.parent
            continue
        below = sorted((real / "slaves").iterdir()) if (real / "slaves").is_dir() else []
        if len(below) != 1:
            flag = _lines(real / "queue" / "rotational")
            return Disk(real.name, flag[0].strip() == "1" if flag else None, start)
        folder = below[0]
    return Disk(number, None)


def advise(descriptor: int, start: int, length: int, advice: str) -> None:
    """Tell the kernel what becomes of a range of a file: "WILLNEED", "DONTNEED" or "RANDOM"; does nothing where it takes no advice.

    macOS has no posix_fadvise, and some file systems refuse it: what isn't read ahead is read when it is wanted.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, length, getattr(os, f"POSIX_FADV_{advice}"))


def _quotas(proc: Path) -> Iterator[float]:
    for folder in _cgroups(proc, "cpu"):
        words = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # "max" and -1: no quota
            yield int(words[0]) / int(words[1])


def _rooms(proc: Path) -> Iterator[int]:
    """Yield what each memory cgroup has left."""
    for folder in _cgroups(proc, "memory"):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        usage = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if not (limit and usage and limit[0].isdecimal() and usage[0].isdecimal()):
            continue
        stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
        # v1's own counters leave out the groups below, which its usage counts.
        inactive = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
        yield int(limit[0]) - int(usage[0]) + int(inactive)


def _cgroups(proc: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's cgroups of a controller, each with its ancestors as far as they are mounted."""
    groups = {}
    for line in _lines(proc / "self" / "cgroup"):  # "0::/a/b" (v2), "4:cpu,cpuacct:/a/b" (v1)
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = path
    for line in _lines(proc / "self" / "mountinfo"):  # "31 23 0:27 <root> <mount point> rw - cgroup2 cgroup rw,cpu"
        left, _, right = line.partition(" - ")
        (_, _, _, root, point, *_), (kind, *_, options) = left.split(), right.split()
        if kind in groups and (kind == "cgroup2" or controller in options.split(",")):
            mount, inner = Path(_unescaped(point)), _within(groups[kind], root)
            yield from (mount / part for part in (inner, *inner.parents))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def _within(path: str, root: str) -> PurePosixPath:
    """Return a cgroup's path below the mounted `root`; a container may see only its own group, as "/"."""
    inner, below = PurePosixPath(path.lstrip("/")), PurePosixPath(root.lstrip("/"))
    return inner.relative_to(below) if inner.is_relative_to(below) and ".." not in inner.parts else PurePosixPath()


def _number(path: Path) -> int:
    words = _words(path)
    return int(words[0]) if words and words[0].isdecimal() else 0


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []  # not there, or nothing that this process may see
