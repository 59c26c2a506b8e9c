"""Hugging Face datasets: webdataset's tars, streamed by load_dataset through a torch DataLoader."""

import os
import sys
from collections.abc import Iterator
from typing import Any

if not any("://" in argument for argument in sys.argv):  # offline it reads no URL at all
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
from jobs import Picture
from protocol import Options, main
from torch.utils.data import DataLoader


def read(options: Options) -> Iterator[DataLoader]:
    """Yield the loader for each epoch."""
    picture = Picture(options.job)

    def sample(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": picture(row["jpg"]["bytes"]), "label": int(row["cls"])}

    files = {"train": options.files(".tar")}
    stream = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
    stream = stream.cast_column("jpg", datasets.Image(decode=False)).shuffle(seed=0, buffer_size=options.buffer)
    stream = stream.map(sample, remove_columns=["jpg", "cls", "__key__", "__url__"])
    loader = DataLoader(stream, batch_size=options.batch, num_workers=options.workers, persistent_workers=True)
    for epoch in range(options.epochs):
        stream.set_epoch(epoch)
        yield (tuple(batch[name] for name in ("image", "label")) for batch in loader)


if __name__ == "__main__":
    main(None, read)
