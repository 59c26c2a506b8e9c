"""CPUs and memory, as far as this process may use them: the least of what machine and cgroups allow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.machine import available_memory, file_system, usable_cpus


def fake_proc(tmp_path: Path, cgroup: str, mounts: list[str], files: dict[str, str]) -> Path:
    """A /proc whose cgroup mounts lie under tmp_path; `files` are written below it."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
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


MEMINFO = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"}


def test_a_v2_group_bounds_the_memory(tmp_path: Path) -> None:
    """The tightest group on the way up counts, as limit - usage + inactive file pages; "max" is no limit."""
    mount = f"31 23 0:27 / {tmp_path}/cg rw - cgroup2 cgroup2 rw"
    files = {
        "cg/a/b/memory.max": "max",
        "cg/a/b/memory.current": "1",
        "cg/a/memory.max": "5000000",
        "cg/a/memory.current": "3000000",
        "cg/a/memory.stat": "anon 1\nactive_file 700000\ninactive_file 400000\n",
        "cg/memory.max": "900000000",
        "cg/memory.current": "0",
    }
    proc = fake_proc(tmp_path, "0::/a/b\n", [mount], files | MEMINFO)
    assert available_memory(proc) == 2_400_000
    assert available_memory(proc, in_all=True) == 3_100_000


def test_a_v1_group_bounds_the_memory(tmp_path: Path) -> None:
    """v1's usage counts the groups below, and so must its inactive file pages."""
    mounts = [f"31 23 0:27 / {tmp_path}/mem rw - cgroup cgroup rw,memory", f"33 23 0:29 / {tmp_path}/u rw - cgroup2 cgroup2 rw"]
    files = {
        "mem/job/memory.limit_in_bytes": "6000000",
        "mem/job/memory.usage_in_bytes": "5000000",
        "mem/job/memory.stat": "inactive_file 1\ntotal_inactive_file 2000000\n",
    }
    assert available_memory(fake_proc(tmp_path, "4:memory:/job\n0::/\n", mounts, files | MEMINFO)) == 3_000_000


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    """What the kernel calls available is the bound where no group has one, and 1 GiB is taken where nothing tells."""
    assert available_memory(fake_proc(tmp_path, "", [], MEMINFO)) == 8_000_000 * 1024
    assert available_memory(tmp_path / "nothing") == 2**30
    assert 0 < available_memory() < 2**50


def test_the_file_system_is_that_of_the_next_folder_that_is_there(tmp_path: Path) -> None:
    """By the device's number, else by the longest mount point; blanks in it are written as octal numbers."""
    (tmp_path / "my home" / "deep").mkdir(parents=True)
    device = tmp_path.stat().st_dev
    near, home = str(tmp_path), str(tmp_path / "my home").replace(" ", r"\040")
    mounts = ["31 23 0:9991 / / rw - overlay overlay rw", f"31 23 0:9992 / {home} rw,relatime - nfs4 nas:/home rw,vers=4.2"]
    proc = fake_proc(tmp_path, "", mounts, {})
    assert file_system(str(tmp_path / "my home" / "deep" / "not" / "yet"), proc) == "nfs4"
    assert file_system(near, proc) == file_system(str(tmp_path / "my home2"), proc) == "overlay"
    number = f"31 23 {os.major(device)}:{os.minor(device)} / /somewhere rw - ext4 /dev/sda1 rw\n"
    (proc / "self" / "mountinfo").write_text(number)
    assert file_system(near, proc) == "ext4"
    (proc / "self" / "mountinfo").unlink()
    assert file_system(near, proc) == ""
