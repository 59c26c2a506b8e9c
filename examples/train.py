"""Trains a small CNN from packed shards on the CPU, and says how much of the time it waited for data.

    make shards
    .venv/bin/python examples/train.py shards/sample [--epochs 14] [--target 0.9]

Prints a line for each epoch. Exits with 1 where the validation accuracy at the end isn't above the target.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator

import albumentations as A
import torch
from torch import nn

import pipeline

SIDE = 96  # pixels


class Waiting:
    """Iterates over a loader; `seconds` is how long it kept its user waiting."""

    def __init__(self, loader: Iterable[pipeline.Batch]) -> None:
        self.loader, self.seconds = loader, 0.0

    def __iter__(self) -> Iterator[pipeline.Batch]:
        start = time.perf_counter()
        for batch in self.loader:
            self.seconds += time.perf_counter() - start
            yield batch
            start = time.perf_counter()
        self.seconds += time.perf_counter() - start


def block(inputs: int, outputs: int, *, side: int = 3, stride: int = 1, pool: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        block(3, 32, side=5, stride=2),
        block(32, 64),
        block(64, 128),
        block(128, 128, pool=False),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * 128, classes),
    ).to(memory_format=torch.channels_last)


def accuracy(model: nn.Module, loader: Iterable[pipeline.Batch]) -> float:
    model.eval()
    hits = seen = 0
    with torch.inference_mode():
        for images, labels in loader:
            hits += int((model(images).argmax(1) == labels).sum())
            seen += len(labels)
    return hits / seen


def loaders(options: argparse.Namespace) -> tuple[pipeline.Loader, pipeline.Loader]:
    drawn = [A.HorizontalFlip(p=0.5), A.Rotate(limit=15), A.ChannelDropout(p=0.1)]
    train = pipeline.make_loader(
        options.shards,
        batch_size=options.batch_size,
        num_workers=options.workers,
        transform=A.Compose([A.Resize(SIDE, SIDE), *drawn, A.Normalize()]),
        seed=options.seed,
        options=pipeline.LoaderOptions(split="train", decode="auto"),
    )
    val = pipeline.make_loader(
        options.shards,
        batch_size=options.batch_size,
        num_workers=0,
        transform=A.Compose([A.Resize(SIDE, SIDE), A.Normalize()]),
        shuffle=False,
        options=pipeline.LoaderOptions(split="val", classes=train.classes, decode="auto"),
    )
    return train, val


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="a folder with the splits train and val")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1, help="processes that decode (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.9, help="validation accuracy that must be passed (default 0.9)")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.manual_seed(options.seed)
    # The network gets the CPUs that the workers leave: two threads that wait for each other on one CPU take four times as long.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - options.workers))
    train, val = loaders(options)
    assert train.num_classes is not None
    model = network(train.num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=options.epochs * len(train))
    reached, start = 0.0, time.perf_counter()
    for epoch in range(options.epochs):
        model.train()
        batches, seen, begin = Waiting(train), 0, time.perf_counter()
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels, label_smoothing=0.05).backward()
            optimizer.step()
            schedule.step()
            seen += len(labels)
        seconds = time.perf_counter() - begin
        reached = accuracy(model, val)
        print(
            f"epoch {epoch + 1:2d}/{options.epochs}: {seen / seconds:5.0f} img/s, waited {batches.seconds:.2f} of {seconds:.2f} s "
            f"for data, validation accuracy {reached:.1%}",
            flush=True,
        )
    train.close()
    print(f"{reached:.1%} after {time.perf_counter() - start:.0f} s (target: above {options.target:.0%})")
    return 0 if reached > options.target else 1


if __name__ == "__main__":
    raise SystemExit(main())
