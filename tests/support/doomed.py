"""A trainer to be ended in many ways: one loader for each of some start methods, all of them open at once.

    doomed.py FOLDER ENDING METHOD...

It says {"ready": ...} on stdout when each loader has given a batch, and does what ENDING says.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline import Loader, LoaderOptions, make_loader

MARK = "DOOMED_MARK"  # an environment variable that all its processes have
Picture = npt.NDArray[np.uint8]


def large(image: Picture) -> Picture:
    """Return a picture of 400x400."""
    return np.zeros((400, 400, 3), np.uint8)


def hang_later(image: Picture) -> Picture:
    """Give the first 24 pictures back, and wait for ever with the next."""
    hang_later.seen += 1  # type: ignore[attr-defined]
    if hang_later.seen > 24:  # type: ignore[attr-defined]
        time.sleep(600)
    return image


hang_later.seen = 0  # type: ignore[attr-defined]


def marked() -> dict[int, tuple[int, int]]:
    """Return (resident bytes, open files) of every process of this trainer."""
    mark, found = f"{MARK}={os.environ[MARK]}".encode(), {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark not in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                continue
            pages = int(Path("/proc", name, "statm").read_text().split()[1])
            found[int(name)] = pages * os.sysconf("SC_PAGESIZE"), len(os.listdir(f"/proc/{name}/fd"))
        except OSError:
            continue
    return found


def open_loaders(
    folder: str, methods: Sequence[str], transform: Callable[[Any], Any] | None
) -> tuple[list[Loader], list[Any], list[int]]:
    """Return a loader for each start method, its iterator after one batch, and its worker's process."""
    loaders, iterators, workers = [], [], []
    for method in methods:
        known = {child.pid for child in multiprocessing.active_children()}
        options = LoaderOptions(multiprocessing_context=method, prefetch_factor=1)  # type: ignore[arg-type]
        loaders.append(make_loader(folder, batch_size=8, num_workers=1, transform=transform, options=options))
        iterators.append(iter(loaders[-1]))
        workers += [child.pid for child in multiprocessing.active_children() if child.pid not in known]
    for iterator in iterators:
        next(iterator)
    return loaders, iterators, [pid for pid in workers if pid is not None]


def say(**facts: Any) -> None:
    """Print facts as a line of JSON."""
    print(json.dumps(facts), flush=True)


def lose_workers(methods: Sequence[str], iterators: list[Any], workers: list[int]) -> None:
    """Kill each loader's worker, and say what the loader raises and when."""
    for method, iterator, worker in zip(methods, iterators, workers, strict=True):
        began = time.monotonic()
        try:
            os.kill(worker, signal.SIGKILL)
            for _batch in iterator:
                pass
            say(method=method, worker=worker, error="none", text="")
        except Exception as error:
            say(method=method, worker=worker, error=type(error).__name__, text=str(error), seconds=time.monotonic() - began)


def many_epochs(folder: str, *, persistent: bool) -> None:
    """Begin 20 epochs, end each early, and say what the processes hold after each."""
    options = LoaderOptions(persistent_workers=persistent, multiprocessing_context="fork")
    with make_loader(folder, batch_size=8, num_workers=2, options=options) as loader:
        for epoch in range(20):
            for step, _batch in enumerate(loader):
                if step == 3:
                    break
            say(epoch=epoch, processes=marked())


def small_memory(folder: str) -> None:
    """Say what a loader says whose batches don't fit /dev/shm, and that a smaller one works."""
    for batch_size in (64, 4):
        try:
            with make_loader(folder, batch_size=batch_size, num_workers=2, transform=large) as loader:
                say(batch_size=batch_size, batches=sum(1 for _ in loader))
        except Exception as error:
            say(batch_size=batch_size, error=type(error).__name__, text=str(error))


def main() -> None:
    """Train, until the end."""
    folder, ending, *methods = sys.argv[1:]
    if ending in ("persistent", "fresh"):
        return many_epochs(folder, persistent=ending == "persistent")
    if ending == "small":
        return small_memory(folder)
    loaders, iterators, workers = open_loaders(folder, methods, hang_later if ending == "wait" else None)
    say(ready=workers, processes=len(marked()))
    if ending == "work":
        time.sleep(600)
    elif ending == "wait":
        for iterator in iterators:
            for _batch in iterator:
                pass
    elif ending == "lose workers":
        lose_workers(methods, iterators, workers)
    elif ending == "raise":
        for _batch in loaders[0]:
            raise RuntimeError("the trainer's own")
    elif ending == "break":
        for loader in loaders:
            for _batch in loader:
                break
    return None


if __name__ == "__main__":
    main()
