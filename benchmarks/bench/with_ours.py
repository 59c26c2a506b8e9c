"""Ours: packed as `shardify build` does it, read by `make_loader` as its documentation has it."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jobs import transform
from protocol import HERE, Options, Plan, main, rows
from sides import BYTES

from pipeline import Loader, LoaderOptions, make_loader

if sys.argv[1:2] == ["write"]:  # who trains needs nothing of it
    from shardify.build import build
    from shardify.config import load

CONFIG = HERE.parent.parent / "configs" / "glr2020.yaml"
TAR_BYTES = 2048  # of a sample beside its picture: two headers, the label's block, half a block of padding


class Silence:
    """Tells nobody how far a build is."""

    def begin(self, doing: str, total: int, unit: str = "images") -> None:
        """Begin a stage."""

    def advance(self, size: int) -> None:
        """Count a picture."""


def write(photos: Path, out: Path, plan: Plan) -> None:
    """Pack the table's pictures."""
    pictures = rows(photos)
    size = plan.bytes(pictures) + TAR_BYTES * plan.samples(len(pictures))
    sets = [f"shards.size={size}", "splits={train: 1.0}"]
    if plan.short_side:
        sets += [f"encode.resize={{short_side: {plan.short_side}}}", "encode.quality=90"]
    build(load(CONFIG, source=str(photos), out=str(out), sets=sets), force=False, skipped_to=None, progress=Silence())


def read(options: Options) -> Iterator[Loader]:
    """Yield the loader for each epoch."""
    with tempfile.TemporaryDirectory() as cache:  # for shards that come over the network
        decode = "none" if options.job == BYTES else "auto" if options.variant == "scaled" else "full"
        chosen = LoaderOptions(last_batch="uneven", decode=decode, cache_dir=cache)
        shards, apply = f"{options.folder}/train-shardindex.json", None if options.job == BYTES else transform(options.job)
        with make_loader(shards, batch_size=options.batch, transform=apply, num_workers=options.workers, options=chosen) as loader:
            for _ in range(options.epochs):
                yield loader


if __name__ == "__main__":
    main(write, read)
