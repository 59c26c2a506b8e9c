"""A small set whose samples can't be compressed, and a prefetcher, or a loader, that reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packing import PackedSet
from residence import big_set, chill

import pipeline
from pipeline.epoch import Layout, OrderSettings
from pipeline.options import LoaderOptions
from pipeline.prefetch import Prefetcher
from pipeline.progress import Block
from pipeline.samples import ShardFile
from pipeline.world import World

COUNT, SHARDS, SIZE = 240, 3, 40_000
TOTAL = COUNT * SIZE


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """A set of 9.6 MB in 3 shards, safely on the disk: what isn't can't be dropped."""
    packed = big_set(tmp_path_factory.mktemp("big"), COUNT, SHARDS, SIZE)
    chill(*tars(packed.folder))
    return packed


def tars(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def files_of(folder: Path) -> list[ShardFile]:
    return [ShardFile(str(path), COUNT // SHARDS, path.stat().st_size) for path in tars(folder)]


def layout_of(window: int = 10, lanes: int = 2) -> Layout:
    return Layout([COUNT // SHARDS] * SHARDS, OrderSettings(seed=1, lanes=lanes, window=window))


@contextlib.contextmanager
def started(
    files: list[ShardFile], layout: Layout, world: World | None = None, **options: object
) -> Iterator[tuple[Prefetcher, Block]]:
    """A prefetcher and its block; ended afterwards."""
    block = Block.make()
    prefetcher = Prefetcher.start(layout, files, LoaderOptions(**options), world or World(), block)
    try:
        yield prefetcher, block
    finally:
        prefetcher.close()
        block.close()


def places(layout: Layout, lane: int) -> int:
    return int(layout.lane_starts[lane + 1] - layout.lane_starts[lane])


def finished(block: Block, layout: Layout, run: int = 1) -> bool:
    return all(block.resident(lane, run) == places(layout, lane) for lane in range(layout.settings.lanes))


def keys(loader: pipeline.Loader) -> list[str]:
    return [key for batch in loader for key in batch.keys]


def options(**more: object) -> LoaderOptions:
    return LoaderOptions(**{"decode": "none", "keys": True, "last_batch": "uneven", "window_bytes": 10 * SIZE, "lanes": 2, **more})


def prefetcher_of(loader: pipeline.Loader) -> Prefetcher:
    found = loader._reading._prefetcher  # type: ignore[union-attr]
    assert found is not None
    return found


def process_of(prefetcher: Prefetcher) -> int:
    return prefetcher._process[0].pid


def gone(process: int) -> bool:
    """Tell whether a process has ended (one that nobody waited for is a zombie)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the memory among so many loaders that no more than what must be resident is read ahead."""
    share = Block.share
    monkeypatch.setattr(Block, "share", lambda block, sharers: share(block, sharers * 10_000))
