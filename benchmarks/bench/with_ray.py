"""Ray Data: webdataset's tars, shuffled as bytes (files, and samples within a block), mapped by its workers, as torch batches."""

import logging
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from jobs import Picture
from protocol import Options, main


def shuffled(block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a block's samples in another order: pictures' bytes, before they are decoded."""
    order = np.random.default_rng().permutation(len(block["cls"]))
    return {name: block[name][order] for name in ("jpg", "cls")}


def read(options: Options) -> Iterator[Iterator]:
    """Yield the batches of each epoch."""
    ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    picture = Picture(options.job)

    def sample(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": picture(row["jpg"]), "label": int(row["cls"])}

    try:
        for _ in range(options.epochs):
            files = ray.data.read_webdataset(options.files(".tar"), decoder=None, shuffle="files")
            samples = files.map_batches(shuffled, batch_size=None, batch_format="numpy").map(sample)
            batches = samples.iter_torch_batches(batch_size=options.batch)
            yield ((batch["image"], batch["label"]) for batch in batches)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(None, read)
