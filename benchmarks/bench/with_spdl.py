"""spdl: tars read whole, one after the other; its own decoder and resizing, in threads of one subprocess.

What its filters don't have (Rotate, ChannelDropout) is albumentations'; job "crop" is albumentations' too, behind its decoder.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import spdl.io
from jobs import Transform
from protocol import Options, main
from sides import SIDES
from spdl.pipeline import PipelineBuilder, run_pipeline_in_subprocess


class Shards:
    """Yields the samples of all tars, shards and samples shuffled, another order in each epoch."""

    def __init__(self, paths: list[str]) -> None:
        self._paths, self._random = paths, random.Random(0)

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        paths, buffer = self._random.sample(self._paths, len(self._paths)), []
        for path in paths:
            members = ((name, bytes(content)) for name, content in spdl.io.iter_tarfile(Path(path).read_bytes()))
            for pair in zip(members, members, strict=True):  # a picture's file and its label's, side by side
                files = {name.rpartition(".")[2]: content for name, content in pair}
                buffer.append((files["jpg"], int(files["cls"])))
                if len(buffer) > 1000:
                    yield buffer.pop(self._random.randrange(len(buffer)))
        self._random.shuffle(buffer)
        yield from buffer


class Decode:
    """Makes a float32 picture of a sample."""

    def __init__(self, job: str) -> None:
        side = SIDES[job]
        size = {"scale_width": side, "scale_height": side} if job == "problem" else {}
        self._filter = spdl.io.get_video_filter_desc(**size, pix_fmt="rgb24")
        self._transform = Transform(job, resized=True)  # of job "problem" the filter does that

    def __call__(self, sample: tuple[bytes, int]) -> tuple[np.ndarray, int]:
        """Decode, resize and transform."""
        frames = spdl.io.decode_packets(spdl.io.demux_image(sample[0]), filter_desc=self._filter)
        image = spdl.io.to_numpy(spdl.io.convert_frames(frames))
        return self._transform(image), sample[1]


def collate(samples: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Make a batch."""
    return np.stack([image for image, _ in samples]), np.array([label for _, label in samples])


def read(options: Options) -> Iterator[Iterator]:
    """Yield the pipeline for each epoch."""
    builder = (
        PipelineBuilder()
        .add_source(Shards(options.files(".tar")))
        .pipe(Decode(options.job), concurrency=options.workers, output_order="completion")
        .aggregate(options.batch)
        .pipe(collate)
        .add_sink(4)
    )
    pipeline = run_pipeline_in_subprocess(builder.get_config(), num_threads=options.workers)
    for _ in range(options.epochs):
        yield pipeline


if __name__ == "__main__":
    main(None, read, packages=["spdl", "spdl-core", "spdl-io"])
