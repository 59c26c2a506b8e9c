"""spdl: tars read whole, one after the other; decoded in threads of one subprocess, batches handed over in its arena.

(none)   its own decoder and resizing (FFmpeg's); what its filters don't have, Rotate and ChannelDropout, is albumentations', and so
         is job "crop" behind its decoder
cv2      decoded by cv2 and transformed by albumentations alone, as the others do it
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import spdl.io
from jobs import Picture, Transform
from protocol import Options, main
from sides import SIDES
from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess

QUEUED = 2  # batches that wait in the subprocess, and as many between the processes
SEGMENTS = QUEUED + 2  # one is written, one is held by the loop


class Shards:
    """Yields the samples of all tars, shards and samples shuffled, another order in each epoch."""

    def __init__(self, paths: list[str], buffer: int) -> None:
        self._paths, self._buffer, self._random = paths, buffer, random.Random(0)

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        paths, buffer = self._random.sample(self._paths, len(self._paths)), []
        for path in paths:
            members = ((name, bytes(content)) for name, content in spdl.io.iter_tarfile(Path(path).read_bytes()))
            for pair in zip(members, members, strict=True):  # a picture's file and its label's, side by side
                files = {name.rpartition(".")[2]: content for name, content in pair}
                buffer.append((files["jpg"], int(files["cls"])))
                if len(buffer) > self._buffer:
                    at = self._random.randrange(len(buffer))
                    buffer[at], buffer[-1] = buffer[-1], buffer[at]
                    yield buffer.pop()
        self._random.shuffle(buffer)
        yield from buffer


class Decode:
    """Makes a float32 picture of a JPEG's bytes by spdl's decoder."""

    def __init__(self, job: str) -> None:
        side = SIDES[job]
        # As cv2 resizes: bilinear, both sides to the job's, without bars (the defaults: bicubic, padded to keep the ratio).
        size = {"scale_width": side, "scale_height": side, "scale_algo": "bilinear", "scale_mode": None}
        self._filter = spdl.io.get_video_filter_desc(**(size if job == "problem" else {}), pix_fmt="rgb24")
        self._transform = Transform(job, resized=True)  # of job "problem" the filter does that

    def __call__(self, data: bytes) -> np.ndarray:
        """Decode, resize and transform."""
        frames = spdl.io.decode_packets(spdl.io.demux_image(data), filter_desc=self._filter)
        return self._transform(spdl.io.to_numpy(spdl.io.convert_frames(frames)))


class Sample:
    """Makes a picture of a sample, and leaves its label."""

    def __init__(self, picture: Callable[[bytes], np.ndarray]) -> None:
        self._picture = picture

    def __call__(self, sample: tuple[bytes, int]) -> tuple[np.ndarray, int]:
        """Return the picture and the label."""
        return self._picture(sample[0]), sample[1]


def collate(samples: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Make a batch."""
    return np.stack([image for image, _ in samples]), np.array([label for _, label in samples])


def read(options: Options) -> Iterator[Iterator]:
    """Yield the pipeline for each epoch."""
    picture = Picture(options.job) if options.variant == "cv2" else Decode(options.job)
    builder = (
        PipelineBuilder()
        .add_source(Shards(options.files(".tar"), options.buffer), continuous=True)
        .pipe(Sample(picture), concurrency=options.workers, output_order="completion")
        .aggregate(options.batch)
        .pipe(collate)
        .add_sink(QUEUED)
    )
    batch_bytes = options.batch * SIDES[options.job] ** 2 * 3 * 4
    arena = SharedMemorySegmentPool(batch_bytes + 2**20, SEGMENTS)
    pipeline = run_pipeline_in_subprocess(builder.get_config(), num_threads=options.workers, buffer_size=QUEUED, arena=arena)
    for _ in range(options.epochs):
        yield pipeline


if __name__ == "__main__":
    main(None, read)
