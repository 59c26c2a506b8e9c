"""Ray Data: webdataset's tars, mapped by its workers, as torch batches."""

import logging
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from jobs import Picture
from protocol import Options, main


def read(options: Options) -> Iterator[Iterator]:
    """Yield the batches of each epoch."""
    ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    picture = Picture(options.job)

    def sample(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": picture(row["jpg"]), "label": int(row["cls"])}

    try:
        for _ in range(options.epochs):
            samples = ray.data.read_webdataset(options.files(".tar"), decoder=None, shuffle="files").map(sample)
            batches = samples.iter_torch_batches(batch_size=options.batch, local_shuffle_buffer_size=4 * options.batch)
            yield ((batch["image"], batch["label"]) for batch in batches)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(None, read, packages=["ray", "pyarrow"])
