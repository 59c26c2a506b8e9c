#!/usr/bin/env python3
"""The problem itself: a map-style torch loader over loose files, timed by epoch. The yardstick for "the question's loader".

    question.py ROOT [--workers 2] [--count 2000] [--epochs 3] [--persistent] [--malloc]

ROOT holds train/a/b/c/<id>.jpg and train.csv, as tools/photos.py makes it. Prints seconds and images/s for each epoch; the caller
decides what the page cache holds. "As written" is this program; "best settings" adds --persistent and --malloc.
The transform is albumentations' Resize(400, 400), Rotate(limit=15) (p is 0.5 by default), ChannelDropout(p=0.1), Normalize().
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import albumentations as A
import cv2
import numpy as np
import pandas as pd
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __init__(self, root: Path, count: int) -> None:
        table = pd.read_csv(root / "train.csv", dtype=str)
        table = table.sample(min(count, len(table)), random_state=1)
        self.paths = [str(root / "train" / i[0] / i[1] / i[2] / f"{i}.jpg") for i in table.id]
        self.labels = [int(x) for x in table.landmark_id]
        self.transform = A.Compose([A.Resize(400, 400), A.Rotate(limit=15), A.ChannelDropout(p=0.1), A.Normalize()])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.transform(image=np.array(cv2.imread(self.paths[index])))["image"], self.labels[index]


def keep_memory(_worker: int = 0) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, 2_000_000_000)  # M_TRIM_THRESHOLD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--malloc", action="store_true")
    o = parser.parse_args()
    loader = DataLoader(
        Files(o.root, o.count),
        batch_size=64,
        shuffle=True,
        num_workers=o.workers,
        persistent_workers=o.persistent and o.workers > 0,
        worker_init_fn=keep_memory if o.malloc else None,
    )
    for epoch in range(o.epochs):
        start, seen = time.perf_counter(), 0
        for _images, labels in loader:
            seen += len(labels)
        seconds = time.perf_counter() - start
        print(f"epoch {epoch}: {seconds:.2f} s, {seen / seconds:.1f} images/s", flush=True)


if __name__ == "__main__":
    main()
