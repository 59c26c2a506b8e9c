"""Finds where this process stands: its rank among how many, and the CPUs it may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline.errors import OptionsError

_PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class World:
    """A process among those that train together, and among those on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise OptionsError(f"RANK={self.rank} with WORLD_SIZE={self.world_size}: a rank is 0 to WORLD_SIZE - 1")
        if not 1 <= self.local_world_size <= self.world_size:
            raise OptionsError(f"LOCAL_WORLD_SIZE={self.local_world_size} with WORLD_SIZE={self.world_size}: 1 to WORLD_SIZE")
        if not 0 <= self.local_rank < self.local_world_size:
            raise OptionsError(
                f"LOCAL_RANK={self.local_rank} with LOCAL_WORLD_SIZE={self.local_world_size}: a rank is 0 to LOCAL_WORLD_SIZE - 1"
            )


def find(environ: Mapping[str, str] | None = None) -> World:
    """Return this process's place: by torch.distributed where it is initialized, else by RANK and WORLD_SIZE, else alone.

    LOCAL_RANK and LOCAL_WORLD_SIZE tell of the machine; without them all ranks are taken to share this one: too few workers are
    slow, too many run out of memory. Raises OptionsError that names the variable for values that are malformed or incomplete.
    """
    environ = os.environ if environ is None else environ
    ranks = _distributed() or _ranks(environ)
    if ranks is None:
        return World()
    rank, size = ranks
    local_size = _number(environ, "LOCAL_WORLD_SIZE")
    local_size = size if local_size is None else local_size
    local_rank = _number(environ, "LOCAL_RANK")
    return World(rank, size, rank % max(1, local_size) if local_rank is None else local_rank, local_size)


def _distributed() -> tuple[int, int] | None:
    """Ask torch.distributed, if the program has loaded it: importing torch only to ask would cost seconds."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _ranks(environ: Mapping[str, str]) -> tuple[int, int] | None:
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is not None and size is not None:
        return rank, size
    found = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK") if name in environ]
    if not found:
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environ]
    raise OptionsError(f"{' and '.join(found)} set, but not {' and '.join(missing)}: set RANK and WORLD_SIZE, or unset all of them")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise OptionsError(f"{name}={text!r} in the environment: a whole number, 0 or more; set it or unset it")
    return int(text)


def usable_cpus(proc: Path = _PROC) -> int:
    """Return how many CPUs this process may use, at least 1: the least of its affinity and the quotas of its cgroups.

    Quotas count in whole CPUs, rounded down: of 1.5 CPUs a second worker would get half.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([affinity, *_quotas(proc)])))


def _quotas(proc: Path) -> Iterator[float]:
    """Yield the CPU quotas of the process's cgroups and their ancestors, v1 and v2."""
    for folder in _cgroups(proc):
        words = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # "max" and -1: no quota
            yield int(words[0]) / int(words[1])


def _cgroups(proc: Path) -> Iterator[Path]:
    """Yield the folders of the process's cgroups that rule CPUs, each with its ancestors as far as they are mounted."""
    groups = {}
    for line in _lines(proc / "cgroup"):  # "0::/a/b" (v2), "4:cpu,cpuacct:/a/b" (v1)
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = path
    for line in _lines(proc / "mountinfo"):  # "31 23 0:27 <root> <mount point> rw - cgroup2 cgroup rw,cpu"
        left, _, right = line.partition(" - ")
        (_, _, _, root, point, *_), (kind, *_, options) = left.split(), right.split()
        if kind in groups and (kind == "cgroup2" or "cpu" in options.split(",")):
            mount, inner = Path(point.replace("\\040", " ")), _within(groups[kind], root)
            yield from (mount / part for part in (inner, *inner.parents))


def _within(path: str, root: str) -> PurePosixPath:
    """Return a cgroup's path below the mounted `root`; a container may see only its own group, as "/"."""
    inner, below = PurePosixPath(path.lstrip("/")), PurePosixPath(root.lstrip("/"))
    return inner.relative_to(below) if inner.is_relative_to(below) and ".." not in inner.parts else PurePosixPath()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []  # no cgroups here, or none that this process may see


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()
