"""Says what this machine is, and which commit of the project runs on it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def machine(work: Path) -> dict[str, Any]:
    """Return CPU, cores, memory, system, libc, the disk that `work` lies on, and the commit."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    total = next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": total,
        "system": f"Linux {platform.release()}, {distribution()}, {' '.join(platform.libc_ver())}",
        "disk": _said("findmnt", "-no", "SOURCE,FSTYPE", "-T", str(work)) or "unknown",
        "commit": commit(),
    }


def distribution() -> str:
    """Return the name of the Linux distribution."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "unknown distribution"


def commit() -> str:
    """Return the commit's short hash, with a "+" where files of it were changed."""
    found = _said("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    changed = _said("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return (found or "unknown") + ("+" if found and changed else "")


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
