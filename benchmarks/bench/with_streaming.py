"""mosaicml-streaming: MDS shards of its MDSWriter, read by its StreamingDataset through a torch DataLoader."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jobs import Picture
from protocol import Options, Plan, main, rows
from torch.utils.data import DataLoader

# streaming imports torchvision. Where its build for the CPU can't be had, the one on PyPI is for CUDA and can't load its operators
# beside a torch for the CPU: they aren't used here, but the import wants to know of these two.
if "+" not in metadata.version("torchvision"):
    DECLARED = torch.library.Library("torchvision", "FRAGMENT")
    for declared in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        DECLARED.define(declared)

from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

SAMPLE_BYTES = 32  # beside its picture: two lengths, the label, an entry of the shard's table, rounded up


def write(photos: Path, out: Path, plan: Plan) -> None:
    """Write the JPEGs as they are."""
    pictures = rows(photos)
    size = plan.bytes(pictures) + SAMPLE_BYTES * plan.samples(len(pictures))
    with MDSWriter(out=str(out), columns={"image": "bytes", "label": "int"}, size_limit=size) as writer:
        for path, label in pictures:
            writer.write({"image": path.read_bytes(), "label": label})


class Pictures(StreamingDataset):
    """The shards' samples, decoded and transformed."""

    def __init__(self, *, job: str, **given: Any) -> None:
        super().__init__(**given)
        self._picture = Picture(job)

    def __getitem__(self, at: int) -> tuple[Any, int]:
        """Return a picture and its label."""
        sample = super().__getitem__(at)
        return self._picture(sample["image"]), sample["label"]


def read(options: Options) -> Iterator[DataLoader]:
    """Yield the loader for each epoch."""
    clean_stale_shared_memory()  # of a program that was killed
    dataset = Pictures(job=options.job, local=options.folder, shuffle=True, batch_size=options.batch)
    loader = DataLoader(dataset, batch_size=options.batch, num_workers=options.workers, persistent_workers=True)
    for _ in range(options.epochs):
        yield loader
    del loader


if __name__ == "__main__":
    main(write, read)
