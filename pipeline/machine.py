"""Says what this process may use of its machine (CPUs, memory) and on what file system a path lies; has freed memory kept.

Limits are the least of what the kernel and the process's cgroups (v1 and v2, each with its ancestors) allow: a container sees its
machine's figures, and is killed by its own.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")
_UNKNOWN = 2**30  # bytes taken to be free where nothing tells


def usable_cpus(proc: Path = _PROC) -> int:
    """Return how many CPUs this process may use, at least 1: the least of its affinity and the quotas of its cgroups.

    Quotas count in whole CPUs, rounded down: of 1.5 CPUs a second worker would get half.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([affinity, *_quotas(proc)])))


def available_memory(proc: Path = _PROC, *, in_all: bool = False) -> int:
    """Return how many bytes of memory this process may still take without others being swapped out.

    A cgroup's is limit - usage + inactive file pages: what was read once goes first. `in_all`: with the active ones, which the
    kernel takes last.
    """
    found = [int(words[1]) * 1024 for line in _lines(proc / "meminfo") if (words := line.split())[:1] == ["MemAvailable:"]]
    return max(0, min([*found, *_rooms(proc, in_all)], default=_UNKNOWN))


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Make a folder, and those above it that aren't there, for this user alone, or as `mode` says; raises OSError.

    `Path.mkdir(mode, parents=True)` makes those above for all to write where the umask lets it.
    """
    missing = [folder, *folder.parents]
    for path in reversed(missing):
        if not path.is_dir():
            path.mkdir(mode=mode, exist_ok=True)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from looking at millions of new objects again and again: half of the time of a million shards."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def advise(descriptor: int, start: int, length: int, advice: str) -> None:
    """Tell the kernel what becomes of a range of a file: "WILLNEED", "DONTNEED" or "RANDOM"; does nothing where it takes no advice.

    macOS has no posix_fadvise, and some file systems refuse it: what isn't read ahead is read when it is wanted.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, length, getattr(os, f"POSIX_FADV_{advice}"))


def open_regular(path: str) -> int:
    """Return a descriptor to read from; raises OSError for what is no file: a FIFO waits for ever for somebody who writes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def unnamed(name: str) -> int:
    """Return a descriptor of an empty file that no folder lists: in memory under Linux (memfd), elsewhere a temporary one."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def has_ended(process: int, proc: Path = _PROC) -> bool:
    """Tell whether a process is gone, or only waited for (which isn't told without a /proc); if nothing tells, that it is."""
    if not (proc / "self").exists():
        try:
            os.kill(process, 0)
        except PermissionError:  # another user's
            return False
        except (OverflowError, OSError):
            return True
        return False
    try:
        with open(proc / str(process) / "stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b") ")[2].startswith((b"Z", b"X"))
    except OSError:
        return True


def _quotas(proc: Path) -> Iterator[float]:
    """Yield the CPU quotas of the process's cgroups and their ancestors, v1 and v2."""
    for folder in _cgroups(proc, "cpu"):
        words = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # "max" and -1: no quota
            yield int(words[0]) / int(words[1])


def _rooms(proc: Path, in_all: bool) -> Iterator[int]:
    """Yield what each memory cgroup of the process, and of their ancestors, has left."""
    for folder in _cgroups(proc, "memory"):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        usage = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if not (limit and usage and limit[0].isdecimal() and usage[0].isdecimal()):  # "max": no limit
            continue
        stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
        # v1's own counters leave out the groups below, which its usage counts.
        kinds = ("inactive_file", "active_file") if in_all else ("inactive_file",)
        files = (stat.get(f"total_{kind}") or stat.get(kind) or "0" for kind in kinds)
        yield int(limit[0]) - int(usage[0]) + sum(map(int, files))


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
            mount, inner = Path(unescaped(point)), _within(groups[kind], root)
            yield from (mount / part for part in (inner, *inner.parents))


def unescaped(text: str) -> str:
    """Return a path as it is, of one in a table of /proc: blanks stand there as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def keep_memory() -> None:
    """Let glibc keep freed pictures instead of giving their pages back (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD; elsewhere nothing).

    Above its mmap threshold glibc maps each picture anew: a worker's epoch took 8.2 ms of CPU and 420 page faults a picture without
    this, 6.9 ms and 120 with it (800x600 to 400x400, the problem's transform).
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD; glibc refuses more
        libc.mallopt(-1, 2_000_000_000)  # M_TRIM_THRESHOLD


def machine_id(path: Path = Path("/etc/machine-id")) -> str:
    """Return what tells this machine from others of its name, "" where that isn't known."""
    return next(iter(_lines(path)), "").strip()


def file_system(path: str, proc: Path = _PROC) -> str:
    """Return the type of the file system that a path lies on, or its next folder that is there; "" where that isn't known."""
    path = os.path.realpath(path)
    while not os.path.lexists(path):
        path = str(Path(path).parent)
    device = Path(path).stat().st_dev
    best, kind, number = "", "", f"{os.major(device)}:{os.minor(device)}"
    for line in _lines(proc / "self" / "mountinfo"):
        left, _, right = line.partition(" - ")
        fields, point = left.split(), unescaped(left.split()[4])
        if fields[2] == number:
            return right.split()[0]
        # Overlayfs and btrfs give files other device numbers than their mount.
        if len(point) >= len(best) and (path + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, right.split()[0]
    return kind


def _within(path: str, root: str) -> PurePosixPath:
    """Return a cgroup's path below the mounted `root`; a container may see only its own group, as "/"."""
    inner, below = PurePosixPath(path.lstrip("/")), PurePosixPath(root.lstrip("/"))
    return inner.relative_to(below) if inner.is_relative_to(below) and ".." not in inner.parts else PurePosixPath()


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []  # no cgroups here, or none that this process may see
