"""webdataset: written by its ShardWriter; shards and samples shuffled, decoded and batched in workers that stay."""

from collections.abc import Iterator
from pathlib import Path

import torch
import webdataset as wds
from jobs import Picture
from protocol import Options, main, rows


def write(photos: Path, out: Path, shard_bytes: int) -> None:
    """Write the pictures in the table's shuffled order."""
    out.mkdir()
    with wds.ShardWriter(f"{out}/shard-%06d.tar", maxsize=shard_bytes, verbose=0) as writer:
        for path, label in rows(photos):
            writer.write({"__key__": path.stem, "jpg": path.read_bytes(), "cls": label})


def read(options: Options) -> Iterator[wds.WebLoader]:
    """Yield the loader for each epoch."""
    picture = Picture(options.job)
    dataset = (
        wds.WebDataset(options.files(".tar"), shardshuffle=100)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(lambda data: torch.from_numpy(picture(data)), int)  # tensors: arrays would be copied through a pipe
        .batched(options.batch, collation_fn=torch.utils.data.default_collate)  # into shared memory at once
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=options.workers, persistent_workers=True)
    for _ in range(options.epochs):
        yield loader


if __name__ == "__main__":
    main(write, read, packages=["webdataset"])
