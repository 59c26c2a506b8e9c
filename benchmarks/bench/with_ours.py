"""Ours: `shardify build`, and `make_loader` as its documentation would have it. The variant "auto" may decode at a smaller scale."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jobs import transform
from protocol import HERE, Options, main

from pipeline import Loader, LoaderOptions, make_loader

CONFIG = HERE.parent.parent / "configs" / "glr2020.yaml"


def write(photos: Path, out: Path, shard_bytes: int) -> None:
    """Pack the table's pictures."""
    given = ["--source", str(photos), "--out", str(out), "--set", f"shards.size={shard_bytes}", "--set", "splits={train: 1.0}"]
    subprocess.run([sys.executable, "-m", "shardify", "build", str(CONFIG), *given], check=True, stdout=subprocess.DEVNULL)


def read(options: Options) -> Iterator[Loader]:
    """Yield the loader for each epoch."""
    with tempfile.TemporaryDirectory() as cache:  # for shards that come over the network
        chosen = LoaderOptions(last_batch="uneven", decode="auto" if options.variant == "auto" else "full", cache_dir=cache)
        shards, apply = f"{options.folder}/train-shardindex.json", transform(options.job)
        with make_loader(shards, batch_size=options.batch, transform=apply, num_workers=options.workers, options=chosen) as loader:
            for _ in range(options.epochs):
                yield loader


if __name__ == "__main__":
    main(write, read, packages=["shardify"])
