"""The limit: our decoding, transform and normalization on pictures that are in memory, in processes that hand nothing over."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from jobs import transform
from protocol import Options, main, rows
from sides import SIDES

from pipeline.augment import Augmenter, prepare
from pipeline.decode import decode_image, set_up_worker
from pipeline.device import Finisher
from pipeline.items import Batch
from pipeline.worker import keep_memory


def work(job: str, batch: int, pictures: list[tuple[bytes, int]], pipe: Connection, taken: Any) -> None:
    """Make batches in memory of one's own, whichever is next, until all are; answer each start with a few pictures and the labels."""
    keep_memory()
    set_up_worker()
    torch.set_num_threads(1)
    prepared, side = prepare(transform(job)), SIDES[job]
    augmenter = Augmenter(prepared.apply, isolated=False)
    finish = Finisher(torch.device("cpu"), prepared.normalization, "float32")
    memory = torch.empty(batch, side, side, 3, dtype=torch.uint8)
    places, done = memory.numpy(), None
    while pipe.recv():
        labels = list[int]()
        while (first := take(taken, batch)) < len(pictures):
            chosen = pictures[first : first + batch]
            labels += [label for _, label in chosen]
            for place, (data, label) in zip(places, chosen, strict=False):
                place[...] = augmenter(decode_image(data), label)
            del done  # its memory is used again
            done = finish(Batch(memory[: len(chosen)], np.array([label for _, label in chosen])))
        pipe.send((None if done is None else np.asarray(done.images[:4]), labels))


def take(taken: Any, batch: int) -> int:
    """Return where the next batch begins, for one of the processes."""
    with taken.get_lock():
        first: int = taken.value
        taken.value = first + batch
    return first


class Processes:
    """An epoch of all processes, as one batch that has the labels of all pictures and a few of the pictures."""

    def __init__(self, options: Options) -> None:
        pictures = [(path.read_bytes(), label) for path, label in rows(options.local)]
        context = multiprocessing.get_context("fork")
        self._pipes = []
        self._taken = context.Value("q", 0)
        for _ in range(options.workers):
            here, there = context.Pipe()
            given = (options.job, options.batch, pictures, there, self._taken)
            context.Process(target=work, args=given, daemon=True).start()
            self._pipes.append(here)

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        self._taken.value = 0
        for pipe in self._pipes:
            pipe.send(True)
        for images, labels in [pipe.recv() for pipe in self._pipes]:
            if labels:
                yield np.broadcast_to(images[:1], (len(labels), *images.shape[1:])), labels

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(False)


def read(options: Options) -> Iterator[Processes]:
    """Yield the same processes for each epoch."""
    processes = Processes(options)
    for _ in range(options.epochs):
        yield processes
    processes.close()


if __name__ == "__main__":
    main(None, read)
