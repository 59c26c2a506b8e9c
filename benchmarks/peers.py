"""The programs that reading.py compares: our loader, and stock webdataset as its documentation would have it; one run each.

    python benchmarks/peers.py {ours,stock} SHARDS [--workers 2] [--epochs 2] [--decode {full,none}] [--counters FILE]

SHARDS is a folder with one split. Prints one line of JSON: for each epoch its seconds (from the moment at which the last worker is
there; a second epoch's from its `iter`), samples and bytes, and what the drive counted; seconds from the first `iter` to the first
batch; for ours, what `stats()` says. Batches are of 64 and are delivered to a loop that counts. "full" is the problem's transform;
"none" gives the files' bytes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

BATCH = 64


class Starts:
    """When the last of this process's forked children began, by a clock that all processes share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)
        os.register_at_fork(after_in_child=self._stamp)

    def _stamp(self) -> None:
        self._memory[:8] = struct.pack("d", time.monotonic())

    def last(self) -> float:
        """Return that moment, 0.0 where there was no child."""
        return float(struct.unpack("d", self._memory[:8])[0])


def transform() -> Any:
    """Return the problem's transform."""
    import albumentations as A  # noqa: PLC0415

    return A.Compose([A.Resize(400, 400), A.Rotate(limit=15), A.ChannelDropout(p=0.1), A.Normalize()])


def ours(options: argparse.Namespace) -> tuple[Iterable[Any], Callable[[], dict[str, Any]]]:
    """Return our loader and what tells of its last epoch."""
    from pipeline import LoaderOptions, make_loader  # noqa: PLC0415

    chosen = LoaderOptions(
        decode=options.decode, last_batch="uneven", keep_bytes=options.keep_bytes, multiprocessing_context="fork"
    )
    loader = make_loader(
        options.shards,
        batch_size=BATCH,
        transform=transform() if options.decode == "full" else None,
        num_workers=options.workers,
        options=chosen,
    )
    return loader, lambda: asdict(loader.stats())


def stock(options: argparse.Namespace) -> tuple[Iterable[Any], Callable[[], dict[str, Any]]]:
    """Return webdataset's loader: shards and samples shuffled, decoded by cv2 as ours are, batched in the workers, which stay.

    Its workers hand over tensors: arrays would be copied through a pipe.
    """
    import cv2  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import webdataset as wds  # noqa: PLC0415

    cv2.setNumThreads(1)
    apply = transform()

    def picture(data: bytes) -> torch.Tensor:
        image = cv2.cvtColor(cv2.imdecode(memoryview_of(data), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        return torch.from_numpy(apply(image=image)["image"])

    urls = sorted(str(path) for path in options.shards.glob("*.tar"))
    dataset = wds.WebDataset(urls, shardshuffle=100, nodesplitter=wds.split_by_node).shuffle(1000).to_tuple("jpg", "cls")
    if options.decode == "full":
        dataset = dataset.map_tuple(picture, int)
    loader = wds.WebLoader(
        dataset.batched(BATCH),
        batch_size=None,
        num_workers=options.workers,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    return loader, dict


def memoryview_of(data: bytes) -> Any:
    """Return bytes as the array that cv2 takes."""
    import numpy as np  # noqa: PLC0415

    return np.frombuffer(data, np.uint8)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the epochs."""
    starts = Starts()
    loader, stats = {"ours": ours, "stock": stock}[options.program](options)
    if options.wait:
        print("ready", flush=True)
        sys.stdin.readline()
    epochs: list[dict[str, Any]] = []
    before, first = counted(options.counters), 0.0
    for _ in range(options.epochs):
        began, samples, size = time.monotonic(), 0, 0
        for batches, batch in enumerate(loader):
            first = first or time.monotonic() - began
            labels = batch[1]
            samples += len(labels)
            if options.decode == "none":
                size += sum(map(len, batch[0]))
            if batches + 1 == options.batches:
                break
        ended, now = time.monotonic(), counted(options.counters)
        drive = {name: round(value - before[name], 2) for name, value in now.items()}
        seconds = ended - (began if epochs else max(began, starts.last()))
        epochs.append({"seconds": seconds, "began": began, "ended": ended, "samples": samples, "bytes": size, "drive": drive})
        epochs[-1]["stats"] = stats()
        before = now
    return {"first_batch": first, "epochs": epochs}


def counted(file: Path | None) -> dict[str, float]:
    """Return the drive's counters."""
    found: dict[str, float] = json.loads(file.read_text()) if file else {}
    return found


def main() -> None:
    """Run one program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=["ours", "stock"])
    parser.add_argument("shards", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=0, help="end each epoch after so many")
    parser.add_argument("--decode", choices=["full", "none"], default="full")
    parser.add_argument("--keep-bytes", type=int, help="ours: LoaderOptions(keep_bytes=...)")
    parser.add_argument("--counters", type=Path, help="the drive's counters, read at the end of each epoch")
    parser.add_argument("--wait", action="store_true", help="say 'ready', and begin when a line comes on stdin")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
