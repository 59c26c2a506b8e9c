"""Keeps other disks busy while one is read: has the kernel read what the next windows on them need, as many bytes as of this one.

    this disk   |--- window 1, read and waited for ---|
    another     |=== window 2, asked for ===          | then what of it isn't there yet is read

One reader waits at one disk at a time, so a set on two disks would come at the speed of one. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.machine import advise
from pipeline.prefetch import pages
from pipeline.prefetch.turn import Turn
from pipeline.progress import Block, Count
from pipeline.stores.copies import PAGE


class Part(Protocol):
    """Bytes [start, stop) of an open shard; those before `asked` were asked for, of which `fetched` came from the medium."""

    start: int
    stop: int
    asked: int
    fetched: int

    @property
    def shard(self) -> pages.File:
        """The open shard."""
        ...


@dataclass(frozen=True, slots=True)
class Disk:
    """Parts that lie on one disk, in the order in which they are wanted, and its turn."""

    turn: Turn
    parts: Sequence[Part]


class Beside:
    """What other disks do meanwhile; `medium_bytes` tells what this process had read from all of them."""

    def __init__(self, disks: Sequence[Disk], block: Block, medium_bytes: Callable[[], int]) -> None:
        self._disks, self._block, self._medium_bytes = disks, block, medium_bytes
        self.fetched = 0  # bytes from other disks

    def advance(self, size: int) -> None:
        """Ask each disk whose turn is free for as many bytes as were read of this one."""
        for disk in self._disks:
            if disk.turn.held or disk.turn.take_if_free():
                self._ask(disk, size)

    def _ask(self, disk: Disk, size: int) -> None:
        before = self._medium_bytes()
        for part in disk.parts:
            if size <= 0:
                return
            part.asked = max(part.asked, part.start)
            while size > 0 and part.asked < part.stop:
                step = min(pages.CHUNK - part.asked % PAGE, part.stop - part.asked)
                advise(part.shard.descriptor, part.asked, step, "WILLNEED")
                part.asked += step
                size -= step
                fetched = self._medium_bytes() - before
                part.fetched += fetched
                self.fetched += fetched
                self._block.add(Count.MEDIUM_BYTES, fetched)
                before += fetched
