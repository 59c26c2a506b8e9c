"""Counts this process's open files, those of a folder alone: whatever else a process has open comes and goes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_below(folder: Path) -> int:
    """Return how many descriptors of this process are files below a folder."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(folder.resolve())
    return found
