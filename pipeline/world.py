"""Finds where this process stands: its rank among how many, on this machine and in all."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import OptionsError


@dataclass(frozen=True, slots=True)
class World:
    """A process among those that train together, and among those on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    guessed: bool = False  # nothing tells how many of them are on this machine

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise OptionsError(f"RANK={self.rank} with WORLD_SIZE={self.world_size}: a rank is 0 to WORLD_SIZE - 1")
        if not 0 <= self.local_rank < self.local_world_size:
            raise OptionsError(
                f"LOCAL_RANK={self.local_rank} with LOCAL_WORLD_SIZE={self.local_world_size}: a rank is 0 to LOCAL_WORLD_SIZE - 1"
            )


def find(environ: Mapping[str, str] | None = None, *, given: tuple[int, int] | None = None) -> World:
    """Return this process's place: as `given` (rank, world size), else as launchers say, else alone.

    They say it by torch.distributed where that is initialized, else by RANK and WORLD_SIZE. LOCAL_RANK and LOCAL_WORLD_SIZE tell of
    the machine, or what Open MPI and Slurm call these; without them all ranks are taken to share this one: too few workers are
    slow, too many run out of memory. Raises OptionsError that names the variable for values that are malformed or incomplete.
    """
    environ = os.environ if environ is None else environ
    ranks = given or _said(environ)
    if ranks is None:
        return World()
    rank, size = ranks
    local_size = _number(environ, "LOCAL_WORLD_SIZE")
    if local_size is not None and not 1 <= local_size <= size and given is None:
        raise OptionsError(f"LOCAL_WORLD_SIZE={local_size} with WORLD_SIZE={size}: 1 to WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK")
    if local_size is None and local_rank is None:
        local_rank, local_size = _launched(environ, size)
    guessed, local_size = local_size is None, max(1, size if local_size is None else local_size)
    return World(rank, size, rank % local_size if local_rank is None else local_rank, local_size, guessed)


def _launched(environ: Mapping[str, str], size: int) -> tuple[int | None, int | None]:
    """Return (local rank, local world size) as a launcher other than torchrun says them; what doesn't fit isn't of these ranks."""
    for names in _LAUNCHERS:
        found = [environ.get(name, "") for name in names]
        if all(text.isascii() and text.isdecimal() for text in found):
            local_rank, local_size = map(int, found)
            if local_rank < local_size <= size:
                return local_rank, local_size
    return None, None


_LAUNCHERS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def check_unchanged(world: World, environ: Mapping[str, str] | None = None) -> None:
    """Raise OptionsError where torch.distributed or the environment now says otherwise than when `world` was found."""
    said = _said(os.environ if environ is None else environ)
    if said is not None and said != (world.rank, world.world_size):
        raise OptionsError(
            f"this process is rank {said[0]} of {said[1]}, and was rank {world.rank} of {world.world_size} when the loader was "
            "first asked for len, iter or state_dict; call init_process_group before, or give LoaderOptions(rank=, world_size=)"
        )


def _said(environ: Mapping[str, str]) -> tuple[int, int] | None:
    return _distributed() or _ranks(environ)


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
