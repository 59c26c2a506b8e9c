"""NVIDIA DALI on the CPU: its webdataset reader and its own operators, in threads of one process.

(none)   tars are mapped, its default
read     tars are read
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from protocol import MEAN, STD, Options, Plan, main
from sides import SIDES
from tars import write_tars
from wds2idx import IndexCreator


def write(photos: Path, out: Path, plan: Plan) -> None:
    """Write tars, and DALI's index of each."""
    write_tars(photos, out, plan)
    for path in sorted(out.glob("*.tar")):
        with IndexCreator(str(path), str(path.with_suffix(".idx")), verbose=False) as index:
            index.create_index()


@pipeline_def
def pipeline(options: Options) -> Any:
    """Return the graph of a job."""
    side = SIDES[options.job]
    data, label = fn.readers.webdataset(
        paths=options.files(".tar"),
        index_paths=options.files(".idx"),
        ext=["jpg", "cls"],
        random_shuffle=True,
        initial_fill=options.buffer,
        dont_use_mmap=options.variant == "read",  # mapped, a cold disk is read page fault by page fault
        pad_last_batch=True,
        name="reader",
    )
    flip = 0
    if options.job == "problem":
        images = fn.resize(fn.decoders.image(data, device="cpu"), size=[side, side], antialias=False)
        angle = fn.random.uniform(range=[-15.0, 15.0]) * fn.random.coin_flip(probability=0.5)
        images = fn.rotate(images, angle=angle, keep_size=True, fill_value=0)
        channel = fn.cast(fn.random.uniform(values=[0.0, 1.0, 2.0]), dtype=types.FLOAT)
        dropped = fn.cast(fn.random.coin_flip(probability=0.1), dtype=types.FLOAT)
        images = fn.erase(images, anchor=channel, shape=dropped, axis_names="C", fill_value=0)
    else:
        images = fn.resize(fn.decoders.image_random_crop(data, device="cpu"), size=[side, side], antialias=False)
        flip = fn.random.coin_flip(probability=0.5)
    normal = {"mean": [255 * value for value in MEAN], "std": [255 * value for value in STD]}
    return fn.crop_mirror_normalize(images, mirror=flip, dtype=types.FLOAT, output_layout="HWC", **normal), label


class Epoch:
    """The batches of an epoch, the last one without what the reader filled it up with."""

    def __init__(self, built: Any, count: int) -> None:
        self._built, self._count = built, count

    def __iter__(self) -> Iterator[tuple[np.ndarray, list[int]]]:
        left = self._count
        while left > 0:
            images, labels = self._built.run()
            array = np.asarray(images.as_tensor())[:left]
            yield array, [int(bytes(np.asarray(labels.at(number)))) for number in range(len(array))]
            left -= len(array)


def read(options: Options) -> Iterator[Epoch]:
    """Yield the pipeline for each epoch; the reader pads an epoch's last batch, so that the next begins anew."""
    built = pipeline(options, batch_size=options.batch, num_threads=options.workers, device_id=None, prefetch_queue_depth=2)
    built.build()
    for _ in range(options.epochs):
        yield Epoch(built, options.count)


if __name__ == "__main__":
    main(write, read)
