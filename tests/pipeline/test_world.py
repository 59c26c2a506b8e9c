"""Promises of the world: ranks are found where launchers put them, half a setting is an error, quotas bound the CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import OptionsError
from pipeline.world import World, find, usable_cpus


def test_a_process_without_ranks_is_alone() -> None:
    """No variables and no torch.distributed: rank 0 of 1."""
    assert find({}) == World(rank=0, world_size=1, local_rank=0, local_world_size=1)


def test_ranks_come_from_the_environment() -> None:
    """The variables that torchrun sets are found."""
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert find(environ) == World(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_ranks_of_an_unknown_machine_share_this_one() -> None:
    """Without LOCAL_WORLD_SIZE all ranks count as this machine's; without LOCAL_RANK it follows from the rank."""
    assert find({"RANK": "5", "WORLD_SIZE": "8"}) == World(5, 8, 5, 8)
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


def fake_proc(tmp_path: Path, cgroup: str, mounts: list[str], files: dict[str, str]) -> Path:
    """A /proc/self whose cgroup mounts lie under tmp_path; `files` are written below it."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    return proc


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process run on 16 CPUs, so that quotas below that show."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", 16), ("350000 100000", 3), ("50000 100000", 1), ("6400000 100000", 16), ("damaged", 16)]
)
def test_a_v2_quota_bounds_the_cpus(tmp_path: Path, quota: str, cpus: int) -> None:
    """cpu.max counts in whole CPUs, at least one; "max" and what can't be read are no bound."""
    mount = f"31 23 0:27 / {tmp_path}/cg rw,nosuid - cgroup2 cgroup2 rw"
    assert usable_cpus(fake_proc(tmp_path, "0::/a/b\n", [mount], {"cg/a/b/cpu.max": quota + "\n"})) == cpus


@pytest.mark.usefixtures("sixteen")
def test_an_ancestors_quota_counts(tmp_path: Path) -> None:
    """The tightest quota on the way up to the mount is the one that holds."""
    mount = f"31 23 0:27 / {tmp_path}/cg rw - cgroup2 cgroup2 rw"
    files = {"cg/a/b/cpu.max": "800000 100000", "cg/a/cpu.max": "200000 100000", "cg/cpu.max": "400000 100000"}
    assert usable_cpus(fake_proc(tmp_path, "0::/a/b\n", [mount], files)) == 2


@pytest.mark.usefixtures("sixteen")
def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """Where a container's mount shows only its group, the path of the outside doesn't hide the quota."""
    mount = f"31 23 0:27 /docker/abc {tmp_path}/cg rw - cgroup cgroup rw,cpu,cpuacct"
    files = {"cg/cpu.cfs_quota_us": "400000\n", "cg/cpu.cfs_period_us": "100000\n"}
    assert usable_cpus(fake_proc(tmp_path, "4:cpu,cpuacct:/docker/abc\n3:memory:/x\n", [mount], files)) == 4


@pytest.mark.usefixtures("sixteen")
def test_a_v1_quota_bounds_the_cpus_and_minus_one_does_not(tmp_path: Path) -> None:
    """v1 quotas hold, ancestors' too; -1 is none; controllers other than cpu are left alone."""
    mounts = [
        f"31 23 0:27 / {tmp_path}/mem rw - cgroup cgroup rw,memory",
        f"32 23 0:28 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct",
        f"33 23 0:29 / {tmp_path}/u rw - cgroup2 cgroup2 rw",
    ]
    files = {
        "cpu/job/cpu.cfs_quota_us": "-1",
        "cpu/job/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "600000",
        "cpu/cpu.cfs_period_us": "100000",
        "mem/job/cpu.cfs_quota_us": "100000",
        "mem/job/cpu.cfs_period_us": "100000",
    }
    assert usable_cpus(fake_proc(tmp_path, "5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n", mounts, files)) == 6


def test_affinity_bounds_the_cpus(tmp_path: Path) -> None:
    """Without cgroups the CPUs are those this process may run on; here it is at least one."""
    assert usable_cpus(tmp_path / "nothing") == len(os.sched_getaffinity(0))
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
