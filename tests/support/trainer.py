"""A trainer of several processes: ranks read epochs in step with each other, save a state, and other ranks go on from it.

python trainer.py OUT SHARDS: four ranks, then two, each of them forked here, as what they import takes seconds. What they saw is written
to OUT/<number of ranks>-<rank>.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pipeline
from pipeline import Loader, LoaderOptions, make_loader

GLOBAL_BATCH = 24
HANGS_SECONDS = 45


def read(loader: Loader, stop: int | None = None) -> list[list[str]]:
    """An epoch's keys, or those of its first steps; each step waits for all ranks."""
    steps: list[list[str]] = []
    for batch in loader:
        steps.append(list(batch.keys))
        dist.all_reduce(torch.tensor(len(steps)))
        if len(steps) == stop:
            break
    return steps


def first(loader: Loader, shards: str) -> dict[str, Any]:
    """Read epoch 0, leave epoch 1 after three steps to save a state, read epochs 1 and 2; then let the last rank differ."""
    saw: dict[str, Any] = {"epochs": [read(loader)]}
    read(loader, 3)
    saw["state"] = loader.state_dict()
    loader.set_epoch(1)
    saw["epochs"] += [read(loader), read(loader)]
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        iter(make_loader(shards, batch_size=1, num_workers=0, seed=int(last)))
    except pipeline.OptionsError as error:
        saw["refused"] = str(error)
    return saw


def second(loader: Loader, state: dict[str, Any]) -> dict[str, Any]:
    """Go on from a state for two epochs."""
    loader.load_state_dict(state)
    return {"epochs": [read(loader), read(loader)]}


def rank(number: int, size: int, out: Path, shards: str, train: Callable[..., dict[str, Any]], given: Any) -> None:
    """Be a rank, as torchrun makes one."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    loader = make_loader(
        shards, batch_size=GLOBAL_BATCH // size, num_workers=1, options=LoaderOptions(keys=True)
    )  # before the group
    dist.init_process_group("gloo", init_method=f"file://{out}/store{size}", rank=number, world_size=size)
    with loader:
        saw = train(loader, given)
    dist.destroy_process_group()
    (out / f"{size}-{number}.json").write_text(json.dumps(saw))


def ranks(size: int, *arguments: Any) -> None:
    """Run all ranks; where one fails or hangs, end the others, which wait for it."""
    running = [multiprocessing.get_context("fork").Process(target=rank, args=(number, size, *arguments)) for number in range(size)]
    for process in running:
        process.start()
    deadline, going = time.monotonic() + HANGS_SECONDS, {process.sentinel: process for process in running}
    while going and not any(process.exitcode for process in running):
        ended = wait(list(going), timeout=max(0.0, deadline - time.monotonic()))
        for sentinel in ended:
            going.pop(sentinel).join()  # type: ignore[call-overload]
        if not ended:
            break
    for process in running:
        process.kill()
        process.join()
    if any(process.exitcode for process in running):
        sys.exit(f"exit codes of {size} ranks: {[process.exitcode for process in running]}")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ranks(4, folder, sys.argv[2], first, sys.argv[2])
    ranks(2, folder, sys.argv[2], second, json.loads((folder / "4-0.json").read_text())["state"])
