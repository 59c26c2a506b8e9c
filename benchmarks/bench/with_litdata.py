"""litdata: chunks of its `optimize`, streamed by its StreamingDataset and StreamingDataLoader."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")  # else the import asks the network

import litdata
from jobs import Picture, shrink
from protocol import Options, Plan, main, rows


def sample(row: tuple[Path, int], short_side: int | None) -> dict[str, Any]:
    """Return what a chunk holds of a picture."""
    data = row[0].read_bytes()
    return {"image": shrink(data, short_side) if short_side else data, "label": row[1]}


def write(photos: Path, out: Path, plan: Plan) -> None:
    """Write chunks with one process a core."""
    pictures = rows(photos)
    litdata.optimize(
        fn=partial(sample, short_side=plan.short_side),
        inputs=pictures,
        output_dir=str(out),
        chunk_size=plan.samples(len(pictures)),
        num_workers=len(os.sched_getaffinity(0)),
        verbose=False,
    )


class Pictures(litdata.StreamingDataset):
    """The chunks' samples, decoded and transformed."""

    def __init__(self, folder: str, job: str) -> None:
        super().__init__(folder, shuffle=True)
        self._picture = Picture(job)

    def __getitem__(self, index: Any) -> tuple[Any, int]:
        """Return a picture and its label."""
        found = super().__getitem__(index)
        return self._picture(found["image"]), found["label"]


def read(options: Options) -> Iterator[litdata.StreamingDataLoader]:
    """Yield the loader for each epoch."""
    dataset = Pictures(options.folder, options.job)
    loader = litdata.StreamingDataLoader(dataset, batch_size=options.batch, num_workers=options.workers, persistent_workers=True)
    for _ in range(options.epochs):
        yield loader


if __name__ == "__main__":
    main(write, read)
