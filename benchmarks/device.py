"""Measure what the device stage costs a picture: bytes in a worker's slot to a normalized batch, for each dtype.

    python benchmarks/device.py [--batch 64] [--side 400] [--rounds 5] [--device cuda]

"torch" is `(images.float() / 255 - mean) / std`, cast for the 16-bit dtypes, with torch's threads as they are; "table" looks each
byte up in a table of its channel's 256 values by numpy. On a GPU, "pinned anew" is `pin_memory().to(device)` for each batch, then the
same normalization. All ways take turns in each round, and a batch is let go of before the next one. Printed are milliseconds a picture,
of the clock and of all threads' CPU: medians over the rounds, least and most. Equal bits are checked first (on the CPU).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from pipeline.device import Finisher
from pipeline.items import Batch, Normalization, Slot

MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
NORMAL = Normalization(1 / 255 / STD, -MEAN / STD)
DTYPES = ("float32", "float16", "bfloat16")


def by_torch(images: torch.Tensor, dtype: str, device: torch.device) -> torch.Tensor:
    """Return (B, C, H, W) as one writes it down."""
    mean, std = (torch.from_numpy(values).to(device) for values in (MEAN, STD))
    return ((images.to(device).float() / 255 - mean) / std).to(getattr(torch, dtype)).permute(0, 3, 1, 2)


class Table:
    """Looks 16-bit values up, tile by tile, in memory that is used again."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        values = Finisher(torch.device("cpu"), NORMAL, dtype)(
            Batch(torch.arange(256).byte().view(1, 256, 1, 1).repeat(1, 1, 1, 3), None)
        )
        self._table = values.images[0, :, :, 0].contiguous().view(torch.int16).numpy().ravel()
        self._offsets = np.tile(np.array([0, 256, 512]), shape[2])
        self._out = torch.empty(shape, dtype=getattr(torch, dtype))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return (B, C, H, W)."""
        rows, row = max(1, 32_767 // len(self._offsets)), len(self._offsets)
        source, target = images.view(-1, row).numpy(), self._out.view(torch.int16).view(-1, row).numpy()
        for top in range(0, len(source), rows):
            tile = source[top : top + rows] + self._offsets
            np.take(self._table, tile, out=target[top : top + rows], mode="clip")
        return self._out.permute(0, 3, 1, 2)


def pinned_anew(images: torch.Tensor, dtype: str, device: torch.device) -> torch.Tensor:
    """Return (B, C, H, W) on a GPU by memory that is pinned for this batch."""
    there = images.pin_memory().to(device, non_blocking=True)
    scale, bias = (torch.from_numpy(values).to(device) for values in (NORMAL.scale, NORMAL.bias))
    return torch.addcmul(bias, there.float(), scale).to(getattr(torch, dtype)).permute(0, 3, 1, 2)


def finished(finish: Finisher, memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return (B, C, H, W) as the loader gives them."""
    images: torch.Tensor = finish(Batch(Slot(0, 0, shape, torch.uint8, memory), None)).images
    return images


def ways(images: torch.Tensor, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the ways to finish a batch, by name."""
    shape, found = tuple(images.shape), dict[str, Callable[[], torch.Tensor]]()
    for dtype in DTYPES:
        found[dtype] = partial(finished, Finisher(device, NORMAL, dtype), images.view(-1), shape)
        found[f"{dtype}, torch"] = partial(by_torch, images, dtype, device)
        if device.type == "cuda":
            found[f"{dtype}, pinned anew"] = partial(pinned_anew, images, dtype, device)
        elif dtype != "float32":
            found[f"{dtype}, table"] = partial(Table(shape, dtype), images)
    return found


def check(found: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Compare the 16-bit ways with the float32 values rounded."""
    expected = found["float32"]()
    for name in ("float16", "bfloat16", "float16, table", "bfloat16, table"):
        assert torch.equal(found[name](), expected.to(getattr(torch, name.partition(",")[0]))), name


def measure(way: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Return seconds of the clock and of CPU that a batch takes, until the device has it."""
    clock, cpu = time.perf_counter(), time.process_time()
    batch = way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    spent = time.perf_counter() - clock, time.process_time() - cpu
    del batch
    return spent


def main() -> None:
    """Measure all ways, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (options.batch, options.side, options.side, 3), dtype=torch.uint8, generator=generator)
    found = ways(images, device)
    if device.type == "cpu":
        check(found)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for number in range(-2, options.rounds):
        for name, way in found.items():
            taken = measure(way, device)
            if number >= 0:  # the two rounds before are for memory
                spent[name].append(taken)
    print(
        f"{options.batch} x {options.side} x {options.side} x 3 to {device}, {torch.get_num_threads()} threads, {options.rounds} rounds"
    )
    for name, rounds in spent.items():
        cells = []
        for values in zip(*rounds, strict=True):
            each = [value / options.batch * 1e3 for value in values]
            cells.append(f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})")
        print(f"  {name:22} {cells[0]:>26} ms, CPU {cells[1]:>26} ms")


if __name__ == "__main__":
    main()
