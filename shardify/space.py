"""Says how many bytes a build takes on disks, and where they have no room for it, before hours of work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardify.errors import naming
from shardify.items import Rows

SIDE_BYTES = 128  # what a sample takes beside the tar: its line in the index, its entries in the journal


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes on disks: of the set, of the spool at its largest, and of both together at their peak (they overlap while written).

    `held_shards`: how many shards of the set lie there at once, as they are taken elsewhere: `output` is theirs; None: all of them.
    """

    output: int
    spool: int
    peak: int
    held_shards: int | None = None

    @property
    def written(self) -> str:
        """What `output` is of, in words."""
        return "the set" if self.held_shards is None else f"the {self.held_shards} shards that lie there at once"


NOTHING = DiskUse(0, 0, 0)


def estimate(sizes: Rows, written: Rows, bounds: Rows, *, memory: int, shard_limit: int) -> DiskUse:
    """Return what pictures of these sizes (bytes, in slot order) take, in tars `written`; `bounds` are the spool's buckets.

    A bucket's file goes when the shards that hold its samples are complete: beside the spool lie at most the shards of one bucket
    and one more, until the set is there and the spool is gone.
    """
    output, pictures = int(written.sum()) + SIDE_BYTES * len(sizes), int(sizes.sum())
    if len(bounds) <= 2 and pictures <= memory:
        return DiskUse(output, 0, output)
    largest = int(np.add.reduceat(sizes, bounds[:-1]).max()) if len(sizes) else 0
    return DiskUse(output, pictures, max(output, pictures + min(output, largest + 2 * shard_limit)))


def passing(use: DiskUse, *, shards: int, shard_limit: int) -> DiskUse:
    """Return what a build takes of which at most so many shards lie on the disk at once, as they are taken elsewhere."""
    held = min(use.output, shards * shard_limit)
    return DiskUse(held, use.spool, min(use.peak, use.spool + held), shards)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a build takes, less what is there already, in bytes: in the spool and of the set by an earlier run, and of a set to go.

    `replaced` goes when all is read: the spool has to lie beside it.
    """

    use: DiskUse
    in_spool: int = 0
    in_set: int = 0
    replaced: int = 0

    def apart(self) -> tuple[int, int]:
        """Return what the set and the spool need on two disks."""
        return self.use.output - self.in_set - self.replaced, self.use.spool - self.in_spool

    def together(self) -> int:
        """Return what both need on one disk."""
        return max(self.use.peak - self.in_spool - self.in_set - self.replaced, self.use.spool - self.in_spool)


def shortage(needs: Needs, out: Path, spool: Path) -> str:
    """Say which of the folders' file systems lacks the room, with the numbers; "" where there is enough.

    `out`: where shards are written, for an object store the work folder.
    """
    out, spool = _existing(out), _existing(spool)
    with naming(out):
        if out.stat().st_dev == spool.stat().st_dev:
            rooms = [(out, needs.together())]
        else:
            rooms = [(folder, need) for folder, need in zip((out, spool), needs.apart(), strict=True)]
        short = [(folder, need, free) for folder, need in rooms if need > (free := _free(folder))]
    option = "--out" if needs.use.held_shards is None else "--work"
    return "; ".join(
        f"{folder}: {free:,} bytes are free there, and the build needs {need:,} ({needs.use.output:,} for {needs.use.written}, "
        f"{needs.use.spool:,} for the spool; more memory means less of it); free some space, or choose another folder "
        f"({option}, --set spool=FOLDER)"
        for folder, need, free in short
    )


def used(folder: Path) -> int:
    """Return the bytes of the files in a folder; what vanishes meanwhile counts as nothing."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above that is there."""
    return next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
