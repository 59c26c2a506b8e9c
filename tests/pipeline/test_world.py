"""Promises of the world: ranks are found where launchers put them, half a setting is an error, quotas bound the CPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import OptionsError
from pipeline.world import World, find


def test_a_process_without_ranks_is_alone() -> None:
    """No variables and no torch.distributed: rank 0 of 1."""
    assert find({}) == World(rank=0, world_size=1, local_rank=0, local_world_size=1)


def test_ranks_come_from_the_environment() -> None:
    """The variables that torchrun sets are found."""
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert find(environ) == World(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_ranks_of_an_unknown_machine_share_this_one() -> None:
    """Without LOCAL_WORLD_SIZE all ranks count as this machine's, as a guess; without LOCAL_RANK it follows from the rank."""
    assert find({"RANK": "5", "WORLD_SIZE": "8"}) == World(5, 8, 5, 8, guessed=True)
    assert find({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == World(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "0"}, "RANK set, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE set, but not RANK"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE and LOCAL_RANK set, but not RANK and WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 with WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
    ],
    ids=str,
)
def test_half_or_malformed_settings_are_errors(environ: dict[str, str], says: str) -> None:
    """A rank that can't be right is an error that names its variable, never the whole set on each rank."""
    with pytest.raises(OptionsError) as caught:
        find(environ)
    assert says in str(caught.value)


def test_an_initialized_torch_distributed_wins(tmp_path: Path) -> None:
    """The process group's ranks count, whatever the environment says."""
    program = (
        "import torch.distributed as d; from pipeline.world import find;"
        "a = find({'RANK': '1', 'WORLD_SIZE': '3'});"
        f"d.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1);"
        "b = find({'RANK': '1', 'WORLD_SIZE': '3'}); d.destroy_process_group();"
        "print(a.rank, a.world_size, b.rank, b.world_size)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "3", "0", "1"]


def test_finding_the_world_loads_no_torch() -> None:
    """Asking for ranks doesn't import torch where the program hasn't."""
    program = "import sys; from pipeline.world import find; find({}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
