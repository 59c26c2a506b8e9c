"""Sets that are served over HTTP, and what a loader makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faulty import Request

from pipeline import HttpOptions, LoaderOptions, make_loader

QUICK = HttpOptions(first_wait_seconds=0.002, longest_wait_seconds=0.02, attempts=6, idle_seconds=5)
WINDOW = 256 * 1024


def options(cache: Path, **given: Any) -> LoaderOptions:
    """Return options for raw bytes by key, small windows and little patience."""
    return LoaderOptions(**{"decode": "none", "keys": True, "window_bytes": WINDOW, "cache_dir": cache, "http": QUICK, **given})


def loader_of(where: str | list[str], cache: Path, *, workers: int = 0, seed: int = 3, **given: Any) -> Any:
    """Return a loader of batches of 16."""
    return make_loader(where, batch_size=16, num_workers=workers, seed=seed, options=options(cache, **given))


def read(loader: Any) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]]:
    """Yield the batches of an epoch as keys, hashes of bytes, and labels."""
    for images, labels, keys in loader:
        yield tuple(keys), tuple(hashlib.blake2b(image, digest_size=8).hexdigest() for image in images), tuple(labels.tolist())


def epochs(where: str | list[str], cache: Path, count: int, **given: Any) -> list[list[Any]]:
    """Return the batches of so many epochs."""
    with loader_of(where, cache, **given) as loader:
        return [list(read(loader)) for _ in range(count)]


def bytes_asked(log: list[Request], ending: str = ".tar") -> int:
    """Return how many bytes were asked for in ranges, of files whose names end so."""
    asked = 0
    for request in log:
        first, _, last = request.headers.get("range", "").removeprefix("bytes=").partition("-")
        if request.method == "GET" and request.target.partition("?")[0].endswith(ending) and last:
            asked += int(last) + 1 - int(first)
    return asked
