"""A transform that spawned workers can import."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import numpy as np
import numpy.typing as npt


def process(image: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return this process's number, times 4, plus how it was started (0 fork, 1 forkserver, 2 spawn), as a picture of one pixel."""
    start = {"ForkProcess": 0, "ForkServerProcess": 1, "SpawnProcess": 2}[type(multiprocessing.current_process()).__name__]
    return np.full((1, 1, 1), os.getpid() * 4 + start, np.float32)
