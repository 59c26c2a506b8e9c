"""Space: what a build takes is known before, and a disk without the room is refused before hours of work."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardify import space
from shardify.space import DiskUse

SIZES = np.full(100, 10_000, np.int64)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB, where that may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_estimates() -> None:
    """What memory holds takes the set's bytes; a spool takes all pictures once more, less what is freed before the last is written."""
    written = SIZES + 1000
    output = 100 * (11_000 + space.SIDE_BYTES)

    def use(bounds: list[int], memory: int, limit: int) -> DiskUse:
        return space.estimate(SIZES, written, np.array(bounds), memory=memory, shard_limit=limit)

    assert use([0, 100], 10**6, 10**5) == DiskUse(output, 0, output)
    ten = list(range(0, 101, 10))
    assert use(ten, 10**5, 10**5) == DiskUse(output, 10**6, 10**6 + 10**5 + 2 * 10**5)
    assert use(ten, 10**5, 10**9).peak == 10**6 + output
    assert space.estimate(SIZES[:0], SIZES[:0], np.array([0, 0]), memory=1, shard_limit=1) == DiskUse(0, 0, 0)


@pytest.mark.parametrize(
    ("there", "apart", "together"),
    [
        ({}, (100, 60), 120),
        ({"in_spool": 50}, (100, 10), 70),  # the set's disk gains nothing by what lies in a spool elsewhere
        ({"in_set": 50}, (50, 60), 70),
        ({"replaced": 90}, (10, 60), 60),  # the old set goes when all is read: the spool has to fit beside it
        ({"replaced": 1000}, (-900, 60), 60),
    ],
)
def test_what_is_there_already(there: dict[str, int], apart: tuple[int, int], together: int) -> None:
    """What an earlier run wrote, and a set that will go, count where they lie and when they are gone."""
    needs = space.Needs(DiskUse(100, 60, 120), **there)
    assert needs.apart() == apart and needs.together() == together


def test_room(small_disk: Path, tmp_path: Path) -> None:
    """A disk that is too small is named with both numbers; folders that aren't there yet count as those above."""
    out = small_disk / "not" / "yet"
    assert space.shortage(space.Needs(DiskUse(10**6, 0, 10**6)), out, out) == ""
    for spool, use in ((out, DiskUse(10**6, 10**6, 2 * 10**6)), (tmp_path, DiskUse(2 * 10**6, 1, 1))):
        said = space.shortage(space.Needs(use), out, spool)
        assert "disk: 1,048,576 bytes are free there, and the build needs 2,000,000 " in said and "--out" in said
    assert space.shortage(space.Needs(DiskUse(10**6, 10**6, 2 * 10**6)), out, tmp_path) == ""


def test_room_where_shards_pass(small_disk: Path) -> None:
    """Of a set that goes elsewhere what is written is called by its shards, and the folder by the option that names it."""
    use = space.passing(DiskUse(10**9, 10**6, 10**9), shards=3, shard_limit=10**6)
    assert use == DiskUse(3 * 10**6, 10**6, 4 * 10**6, 3)
    said = space.shortage(space.Needs(use), small_disk, small_disk)
    assert "needs 4,000,000 (3,000,000 for the 3 shards that lie there at once, 1,000,000 for the spool" in said
    assert "(--work, --set spool=FOLDER)" in said and "--out" not in said


def test_used(tmp_path: Path) -> None:
    """A folder's own files count."""
    (tmp_path / "a").write_bytes(bytes(10))
    assert space.used(tmp_path) == 10 and space.used(tmp_path / "none") == 0
