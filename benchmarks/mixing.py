"""Measure how well an epoch's order mixes a set: ours against a full permutation and against stock webdataset's shuffle(1000).

    python benchmarks/mixing.py [--samples 2000 10000] [--seeds 3] [--epochs 21]

Two sets of 50 classes: "sorted", as others' sets may be (class after class through the shards), and "packed", as `shardify build`
writes them (one keyed permutation of all samples, so that storage says nothing of the class). Each with 1, 4, 20 and 200 shards of
equal counts; samples of 100 KB, windows of 32 MiB, batches of 64, two workers for webdataset (its shards are split between them).

classes        distinct classes a batch, over those of a full permutation
blocks         distinct blocks a batch (the unit that a lane reads as a whole; the same blocks for all orders)
between        rank correlation of an epoch with the next, rms over all pairs of neighbors
storage        rank correlation of an epoch with storage order, rms
overlap        samples that the first batches of two epochs share, over what chance gives; mean over all pairs of epochs

No picture is read: an order is numbers. Webdataset's orders are made by its own filters.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import webdataset as wds
from runs import Results

from pipeline.epoch import EpochOrder, Layout, OrderSettings, window_samples

Order: TypeAlias = npt.NDArray[np.int64]  # (samples,): storage numbers of the samples, as an epoch hands them out

BATCH = 64
CLASSES = 50
SHARDS = (1, 4, 20, 200)
SAMPLE_BYTES = 100_000
WINDOW_BYTES = 32 * 2**20


def shard_counts(samples: int, shards: int) -> Order:
    """Return the samples of each shard, as equal as they can be."""
    return np.diff(np.arange(shards + 1) * samples // shards)


def ours(counts: Order, lanes: int, seed: int) -> tuple[Callable[[int], Order], Order]:
    """Return a function from an epoch to its order, and each sample's block by storage number."""
    samples = int(counts.sum())
    window = window_samples(WINDOW_BYTES, samples * SAMPLE_BYTES, samples)
    layout = Layout(counts, OrderSettings(seed=seed, lanes=lanes, window=window))
    starts = np.cumsum(counts) - counts

    def order(epoch: int) -> Order:
        shard, index = EpochOrder(layout, epoch).locate(np.arange(samples))
        return starts[shard] + index

    pieces = layout.pieces(0)
    begins = np.sort(starts[pieces.shard] + pieces.first)
    return order, np.searchsorted(begins, np.arange(samples), side="right")


def permutations(samples: int, seed: int) -> Callable[[int], Order]:
    """Return a function from an epoch to a full permutation."""
    return lambda epoch: np.random.default_rng((seed, epoch)).permutation(samples)


def stock(counts: Order, seed: int, workers: int = 2) -> Callable[[int], Order]:
    """Return a function from an epoch to what `WebDataset(urls, shardshuffle=100).shuffle(1000)` gives in two workers.

    Its filters in its order: shards are split between the workers, then shuffled (with one seed, so alike in every epoch), opened
    one after the other, and their samples go through the buffer; the DataLoader takes a batch from each worker in turn.
    """
    starts = np.cumsum(counts) - counts

    def stream(worker: int, epoch: int) -> Iterator[int]:
        shards = iter(range(worker, len(counts), workers))
        opened = wds.filters.shuffle(100, seed=seed)(shards)
        numbers = (int(starts[shard]) + i for shard in opened for i in range(counts[shard]))
        shuffled: Iterator[int] = wds.filters.shuffle(1000, rng=random.Random(f"{seed} {worker} {epoch}"))(numbers)
        return shuffled

    def batches(worker: int, epoch: int) -> Iterator[list[int]]:
        numbers = stream(worker, epoch)
        while batch := list(itertools.islice(numbers, BATCH)):
            yield batch

    def order(epoch: int) -> Order:
        turns = itertools.zip_longest(*(batches(worker, epoch) for worker in range(workers)), fillvalue=[])
        return np.array([number for turn in turns for batch in turn for number in batch], np.int64)

    return order


def distinct(values: Order) -> float:
    """Return the mean number of distinct values in a whole batch."""
    whole = values[: len(values) // BATCH * BATCH].reshape(-1, BATCH)
    return float(np.mean([len(np.unique(batch)) for batch in whole]))


def rms(values: list[float]) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def judge(epochs: list[Order], classes: Order, blocks: Order) -> dict[str, float]:
    """Return the measures of a few epochs of one order."""
    samples = len(classes)
    ranks = [np.argsort(order) for order in epochs]
    pairs = itertools.combinations((order[:BATCH] for order in epochs), 2)
    shared = [len(np.intersect1d(a, b)) for a, b in pairs]
    return {
        "classes": float(np.mean([distinct(classes[order]) for order in epochs])),
        "blocks": float(np.mean([distinct(blocks[order]) for order in epochs])),
        "between": rms([np.corrcoef(a, b)[0, 1] for a, b in itertools.pairwise(ranks)]),
        "storage": rms([np.corrcoef(rank, np.arange(samples))[0, 1] for rank in ranks]),
        "overlap": float(np.mean(shared)) / (BATCH * BATCH / samples),
    }


def measure(samples: int, shards: int, options: argparse.Namespace, results: Results) -> None:
    """Judge all orders of one set, sorted and packed."""
    counts = shard_counts(samples, shards)
    sorted_classes = np.arange(samples) * CLASSES // samples
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        kinds = {"sorted": sorted_classes, "packed": sorted_classes[np.random.default_rng((seed, samples)).permutation(samples)]}
        eight, blocks = ours(counts, 8, seed)
        orders = {
            "permutation": permutations(samples, seed),
            "ours, 8 lanes": eight,
            "ours, 64 lanes": ours(counts, 64, seed)[0],
            "webdataset": stock(counts, seed),
        }
        for name, order in orders.items():
            epochs = [order(epoch) for epoch in range(options.epochs)]
            for kind, classes in kinds.items():
                rows.setdefault((kind, name), []).append(judge(epochs, classes, blocks))
    for kind in ("sorted", "packed"):
        ideal = float(np.mean([row["classes"] for row in rows[kind, "permutation"]]))
        for name in ("permutation", "ours, 8 lanes", "ours, 64 lanes", "webdataset"):
            found = rows[kind, name]
            means = {key: float(np.mean([row[key] for row in found])) for key in found[0]} | {
                key: rms([row[key] for row in found]) for key in ("between", "storage")
            }
            means["classes"] /= ideal
            results.add(what=f"{kind}, {shards} shards, {name}", samples=samples, **means)


def expect(results: Results) -> None:
    """Compare all rows of ours with the goals."""
    for row in results.rows:
        if "ours" in row["what"]:
            name = f"{row['what']}, {row['samples']} samples"
            results.expect(f"{name}: rank correlation between epochs", row["between"], at_most=0.15)
            results.expect(f"{name}: first batches' overlap / chance", row["overlap"], at_most=1.5)
            if row["what"].startswith("packed"):
                results.expect(f"{name}: classes a batch / ideal", row["classes"], at_least=0.95)


def main() -> None:
    """Measure all sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[2000, 10_000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=21)
    options = parser.parse_args()
    results = Results("mixing")
    for samples in options.samples:
        for shards in SHARDS:
            measure(samples, shards, options, results)
    expect(results)
    results.show()


if __name__ == "__main__":
    main()
