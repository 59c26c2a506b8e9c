"""webdataset: written by its ShardWriter; shards and samples shuffled, decoded and batched in workers that stay."""

import tempfile
from collections.abc import Iterator

import torch
import webdataset as wds
from jobs import Picture
from protocol import Options, main
from sides import BYTES
from tars import write_tars


def read(options: Options) -> Iterator[wds.WebLoader]:
    """Yield the loader for each epoch; what comes over the network is kept in a folder."""
    with tempfile.TemporaryDirectory() as cache:
        dataset = (
            wds.WebDataset(options.files(".tar"), shardshuffle=100, cache_dir=cache if options.remote else None)
            .shuffle(options.buffer)
            .to_tuple("jpg", "cls")
        )
        if options.job == BYTES:
            dataset = dataset.map_tuple(bytes, int)
        else:
            picture = Picture(options.job)
            # Tensors: arrays would be copied through a pipe.
            dataset = dataset.map_tuple(lambda data: torch.from_numpy(picture(data)), int)
        # Collated into shared memory at once.
        dataset = dataset.batched(options.batch, collation_fn=torch.utils.data.default_collate)
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=options.workers, persistent_workers=True)
        for _ in range(options.epochs):
            yield loader


if __name__ == "__main__":
    main(write_tars, read)
