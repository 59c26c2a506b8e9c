"""megatron-energon: webdataset's tars with its index, a crude dataset whose task encoder decodes and transforms."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jobs import Picture
from megatron.energon import (
    Batch,
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.flavors import BaseWebdatasetFactory
from protocol import Options, Plan, main
from tars import write_tars
from torch.utils.data import default_collate

CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {}\n"


def write(photos: Path, out: Path, plan: Plan) -> None:
    """Write tars, and what `energon prepare` adds to them."""
    write_tars(photos, out, plan)
    tars, ratio = sorted(path.name for path in out.glob("*.tar")), [("train", 1.0), ("val", 0), ("test", 0)]
    BaseWebdatasetFactory.prepare_dataset(
        out, tars, split_parts_ratio=ratio, split_parts_patterns=None, tar_index_only=False, shuffle_seed=None, workers=2
    )
    (out / ".nv-meta" / "dataset.yaml").write_text(CRUDE)


@edataclass
class Raw(Sample):
    """A picture's bytes, and its label."""

    data: bytes
    label: int


@edataclass
class Pixels(Sample):
    """A picture, and its label."""

    image: torch.Tensor
    label: int


@edataclass
class PixelBatch(Batch):
    """Pictures (B, side, side, 3) and labels (B,)."""

    image: torch.Tensor
    label: torch.Tensor


@stateless
def cook(sample: dict[str, Any]) -> Raw:
    """Return a raw sample, which is a dict, as one of ours."""
    return Raw(**basic_sample_keys(sample), data=sample["jpg"], label=int(sample["cls"]))


class Encoder(DefaultTaskEncoder[Raw, Pixels, PixelBatch, PixelBatch]):
    """Cooks raw samples, and makes batches of them."""

    decoder = None  # the cooker takes the files' bytes

    cookers = (Cooker(cook),)

    def __init__(self, job: str) -> None:
        super().__init__()
        self._picture = Picture(job)

    @stateless
    def encode_sample(self, sample: Raw) -> Pixels:
        """Decode and transform: behind the shuffle buffer, which holds bytes."""
        return Pixels.derive_from(sample, image=torch.from_numpy(self._picture(sample.data)), label=sample.label)

    @stateless
    def batch(self, samples: list[Pixels]) -> PixelBatch:
        """Stack the pictures."""
        image, label = default_collate([(sample.image, sample.label) for sample in samples])  # into shared memory at once
        return PixelBatch.from_samples(samples, image=image, label=label)


def read(options: Options) -> Iterator[Any]:
    """Yield the loader for each epoch."""
    dataset = get_train_dataset(
        options.folder,
        batch_size=options.batch,
        shuffle_buffer_size=options.buffer,
        max_samples_per_sequence=100,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=options.workers),
        task_encoder=Encoder(options.job),
        repeat=False,
    )
    loader = get_loader(dataset)
    for _ in range(options.epochs):
        yield ((batch.image, batch.label) for batch in loader)


if __name__ == "__main__":
    main(write, read)
