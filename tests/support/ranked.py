"""A trainer for torchrun: an epoch with a collective in each step, a part of the next one and its state, or the rest from a state."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import pipeline


def main(out: Path, folder: str, last: str, state: str = "") -> None:
    """Write what each epoch's batches held, and the state in the middle of the second one."""
    loader = pipeline.make_loader(
        folder,
        batch_size=48 // int(os.environ["WORLD_SIZE"]),
        num_workers=1,
        options=pipeline.LoaderOptions(decode="none", keys=True, last_batch=last, window_bytes=20_000),  # type: ignore[arg-type]
    )
    dist.init_process_group("gloo")  # after the loader was made
    rank, size = dist.get_rank(), dist.get_world_size()
    if state:
        loader.load_state_dict(json.loads(Path(state).read_text()))
    with loader:
        epochs = [read(loader, None, together=last != "uneven")]
        if not state:
            epochs.append(read(loader, 3, together=True))
            if rank == 0:
                (out / "state.json").write_text(json.dumps(loader.state_dict()))
        (out / f"{last}-{size}-{rank}.json").write_text(json.dumps({"epochs": epochs, "steps": len(loader)}))
    dist.destroy_process_group()


def read(loader: pipeline.Loader, steps: int | None, *, together: bool) -> list[list[str]]:
    """Return the keys of an epoch's batches; all ranks wait for each other in each step."""
    found = []
    for batch in itertools.islice(loader, steps):
        if together:
            dist.all_reduce(torch.ones(1))
        found.append(list(batch.keys))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
