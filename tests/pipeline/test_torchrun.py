"""Ranks as torchrun starts them: a set whose counts don't divide, read by two and by four, and a resume from four to two."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from packing import pack

RANKED = Path(__file__).parents[1] / "support" / "ranked.py"

pytestmark = pytest.mark.slow


def torchrun(size: int, *arguments: object) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), str(RANKED)]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def ranks(folder: Path, last: str, size: int) -> list[dict[str, list[list[list[str]]]]]:
    return [json.loads((folder / f"{last}-{size}-{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize("last", ["drop", "pad", "uneven"])
def test_two_and_four_ranks_read_each_sample(tmp_path: Path, last: str) -> None:
    """203 samples, 48 a step over all ranks: no hang, equal steps, and together what the set holds; the same for two and four."""
    packed = pack(tmp_path / "set", 203, 3)
    together = {}
    for size in (2, 4):
        torchrun(size, tmp_path, packed.folder, last)
        found = ranks(tmp_path, last, size)
        steps = [len(rank["epochs"][0]) for rank in found]
        assert steps == [rank["steps"] for rank in found]
        assert last == "uneven" or len(set(steps)) == 1
        seen = [key for rank in found for batch in rank["epochs"][0] for key in batch]
        assert len(seen) == {"drop": 192, "pad": 240, "uneven": 203}[last]
        assert len(set(seen)) == min(203, len(seen))
        together[size] = [
            sorted(itertools.chain(*batches))
            for epoch in (0, 1)
            for batches in itertools.zip_longest(*(rank["epochs"][epoch] for rank in found), fillvalue=[])
        ]
    assert together[2] == together[4]


def test_two_ranks_go_on_where_four_were(tmp_path: Path) -> None:
    """What four ranks saw of an epoch and what two saw from their state on is the epoch, each sample once."""
    packed = pack(tmp_path / "set", 203, 3)
    torchrun(4, tmp_path, packed.folder, "drop")
    torchrun(2, tmp_path, packed.folder, "drop", tmp_path / "state.json")
    before = [key for rank in ranks(tmp_path, "drop", 4) for batch in rank["epochs"][1] for key in batch]
    after = [key for rank in ranks(tmp_path, "drop", 2) for batch in rank["epochs"][0] for key in batch]
    assert (len(before), len(after)) == (3 * 48, 48)
    assert len({*before, *after}) == 192
