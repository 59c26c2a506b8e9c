"""Decides in which order programs run, with which numbers of workers each is tried, and into how many shards a set is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

LIMIT_EVERY = 3  # programs: minutes apart, a machine's drift is part of their numbers, not of their shares
QUICK_LIMIT_EVERY = 100  # all: ten minutes hold a limit run before the programs and one behind them, not more
LEAST_SHARDS = 16

T = TypeVar("T")


def order(programs: Sequence[T], limit: T | None, number: int, every: int = LIMIT_EVERY) -> list[T]:
    """Return a round's runs: each program once, each round beginning with another, the limit before `every` of them and at the end."""
    turn = number % len(programs) if programs else 0
    turned = [*programs[turn:], *programs[:turn]]
    if limit is None:
        return turned
    runs = list[T]()
    for first in range(0, len(turned), every):
        runs += [limit, *turned[first : first + every]]
    return [*runs, limit]


def tried(cores: int, named: int | None) -> list[int]:
    """Return the numbers of workers that a program is tried with: one, half the cores, all, twice as many, what its authors name."""
    return sorted({1, max(1, cores // 2), cores, 2 * cores} | ({named} if named else set()))


def shards(cores: int) -> int:
    """Return a number of shards, 16 or somewhat more, that each number of workers divides: who deals whole shards deals equal shares."""
    step = 2 * cores
    return -(-LEAST_SHARDS // step) * step
