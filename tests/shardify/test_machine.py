"""The machine: limits are the least of the kernel's and the cgroups', disks are found behind partitions and volumes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardify import machine
from shardify.machine import Disk

GIB = 2**30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a machine with 8 GiB available, and no cgroup."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return folder


def mount(proc: Path, kind: str, controllers: str, group: str) -> Path:
    """Mount a cgroup hierarchy in which this process is in `group`; return that group's folder."""
    point = proc.parent / f"{kind} {controllers}"
    shown = str(point).replace(" ", "\\040")
    with (proc / "self" / "mountinfo").open("a") as file:
        file.write(f"31 23 0:27 / {shown} rw - {kind} cgroup rw,{controllers}\n")
    with (proc / "self" / "cgroup").open("a") as file:
        file.write(f"4:{controllers}:{group}\n" if kind == "cgroup" else f"0::{group}\n")
    folder = point / group.lstrip("/")
    folder.mkdir(parents=True)
    return folder


def test_here() -> None:
    """On this machine there are CPUs and memory."""
    assert 1 <= machine.cpus() <= len(os.sched_getaffinity(0))
    assert 2**20 < machine.available_memory() < 2**50


def test_without_limits_the_kernel_says(proc: Path) -> None:
    """Without cgroups it is what the kernel calls available; where nothing tells, a guess."""
    assert machine.available_memory(proc) == 8 * GIB
    assert machine.available_memory(proc / "none") == GIB


def test_a_cgroup_of_version_2(proc: Path) -> None:
    """limit - usage + inactive file pages, of the group or of one above; "max" is none."""
    folder = mount(proc, "cgroup2", "rw", "/a/b")
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text("5\n")
    assert machine.available_memory(proc) == 8 * GIB
    (folder.parent / "memory.max").write_text(f"{3 * GIB}\n")
    (folder.parent / "memory.current").write_text(f"{2 * GIB}\n")
    (folder.parent / "memory.stat").write_text(f"anon 7\ninactive_file {GIB // 2}\n")
    assert machine.available_memory(proc) == 3 * GIB // 2
    (folder / "cpu.max").write_text("150000 100000\n")
    assert machine.cpus(proc) == 1


def test_a_cgroup_of_version_1(proc: Path) -> None:
    """Version 1 has other names, and counts the groups below apart; a usage above the limit leaves nothing, not less."""
    folder = mount(proc, "cgroup", "memory", "/a")
    (folder / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n")
    assert machine.available_memory(proc) == GIB // 4
    (folder / "memory.usage_in_bytes").write_text(f"{2 * GIB}\n")
    assert machine.available_memory(proc) == 0


def test_disks(tmp_path: Path) -> None:
    """A partition is its disk at an offset, a volume the disk below it, a RAID itself; what no device stands behind is its number."""
    block, real = tmp_path / "block", tmp_path / "devices"
    (block).mkdir()

    def device(number: str, path: str, **files: str) -> None:
        folder = real / path
        (folder / "queue").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", "/")).write_text(text)
        (block / number).symlink_to(folder)

    device("8:0", "sda", queue__rotational="1\n")
    device("8:1", "sda/sda1", partition="1\n", start="2048\n")
    device("8:16", "sdb", queue__rotational="0\n")
    for number, name, slaves in (("253:0", "dm-0", ["sda/sda1"]), ("9:0", "md0", ["sda", "sdb"])):
        device(number, name, queue__rotational="1\n")
        (real / name / "slaves").mkdir()
        for slave in slaves:
            (real / name / "slaves" / Path(slave).name).symlink_to(real / slave)
    found = {
        number: machine.disk_of(os.makedev(*map(int, number.split(":"))), block)
        for number in ("8:0", "8:1", "8:16", "253:0", "9:0", "0:33")
    }
    assert found == {
        "8:0": Disk("sda", True),
        "8:1": Disk("sda", True, 2048 * 512),
        "8:16": Disk("sdb", False),
        "253:0": Disk("sda", True, 2048 * 512),
        "9:0": Disk("md0", True),
        "0:33": Disk("0:33", None),
    }
