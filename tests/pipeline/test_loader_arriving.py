"""`make_loader` over tars that nobody counted: it begins at once, and keeps every law that needs no counts."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from opened import open_below
from packing import PackedSet, pack

import pipeline
from pipeline import LoaderOptions, make_loader, walk

OPTIONS = LoaderOptions(decode="none", keys=True, window_bytes=20_000, lanes=4, prefetch=False)


@pytest.fixture
def bare(small_set: PackedSet, tmp_path: Path) -> Path:
    """The small set's tars alone, last changed a minute ago."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for path in small_set.folder.glob("*.tar"):
        shutil.copy(path, folder / path.name)
        os.utime(folder / path.name, (time.time() - 60,) * 2)
    return folder


def made(folder: Path, workers: int = 0, last: Any = "uneven", **others: Any) -> pipeline.Loader:
    """Return a loader of batches of 16 with keys."""
    options = dataclasses.replace(OPTIONS, last_batch=last)
    return make_loader(folder, **{"batch_size": 16, "num_workers": workers, "options": options, **others})


def epoch_of(loader: pipeline.Loader) -> list[tuple[str, ...]]:
    """Return the keys of an epoch's batches."""
    return [tuple(batch.keys) for batch in loader]


def flat(batches: list[tuple[str, ...]]) -> list[str]:
    return [key for batch in batches for key in batch]


def forget() -> None:
    """Clear the cache folder, as on a machine that has never seen the set."""
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.mark.parametrize("last", ["drop", "pad", "uneven"])
def test_the_same_batches_for_any_workers(bare: Path, small_set: PackedSet, last: str) -> None:
    """Batches of the first epoch and of later ones are the same for 0, 1 and 2 workers, and the ends are those of any set."""
    seen = {}
    for workers in (0, 1, 2):
        forget()
        with made(bare, workers, last) as loader:
            seen[workers] = [epoch_of(loader) for _ in range(3)]
            assert len(loader) == len(seen[workers][0])
    assert seen[0] == seen[1] == seen[2]
    assert len({str(epoch) for epoch in seen[0]}) == 3
    for epoch in seen[0]:
        keys = flat(epoch)
        assert len(keys) == {"drop": 192, "pad": 208, "uneven": 200}[last]
        assert len(set(keys)) == min(200, len(keys))
        assert last != "pad" or keys[200:] == keys[:8]


def test_pictures_and_labels(bare: Path, small_set: PackedSet) -> None:
    """Each key comes with its own bytes and label, as they arrive and, from the second epoch on, behind a prefetcher."""
    with made(bare, 2, options=dataclasses.replace(OPTIONS, prefetch=True)) as loader:
        for _ in range(2):
            for images, labels, keys in loader:
                assert images == [small_set.pictures[key] for key in keys]
                assert labels.tolist() == [small_set.labels[key] for key in keys]


def test_it_begins_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 tars none is opened before the first batch is asked for, and for that one a lane."""
    packed = pack(tmp_path, 400, 40)
    for path in tmp_path.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    read: list[str] = []
    headers = walk.headers
    monkeypatch.setattr(walk, "headers", lambda path: (read.append(path), headers(path))[1])
    with made(packed.folder, batch_size=8, options=LoaderOptions(decode="none", window_bytes=1000)) as loader:
        assert read == []
        next(iter(loader))
        assert len(read) == 8


def test_nothing_depends_on_what_is_remembered(bare: Path) -> None:
    """A second run, which finds all tars in the cache folder, has the batches of the first one; so has one that can't write there."""
    runs = []
    for _ in range(2):
        with made(bare) as loader:
            runs.append([epoch_of(loader) for _ in range(2)])
    forget()
    Path(os.environ["XDG_CACHE_HOME"]).touch()
    for workers in (0, 1):
        with made(bare, workers) as loader:
            runs.append([epoch_of(loader) for _ in range(2)])
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_early_breaks_and_set_epoch(bare: Path) -> None:
    """After an early break the next epoch is the one that it always is; `set_epoch(0)` brings back the first one."""
    with made(bare) as loader:
        first, second = epoch_of(loader), epoch_of(loader)
    for workers in (0, 2):
        forget()
        with made(bare, workers) as loader:
            assert tuple(next(iter(loader)).keys) == first[0]
            loader.set_epoch(0)
            assert tuple(next(iter(loader)).keys) == first[0]
            assert epoch_of(loader) == second
            loader.set_epoch(0)
            assert epoch_of(loader) == first


@pytest.mark.parametrize("last", ["drop", "pad", "uneven"])
def test_resume_at_every_step(bare: Path, last: str) -> None:
    """A state of any step of the first epoch goes on exactly, elsewhere too, where the tars were never seen."""
    with made(bare, last=last) as loader:
        first, second = epoch_of(loader), epoch_of(loader)
    for step in range(len(first) + 1):
        forget()
        with made(bare, last=last) as loader:
            for _batch in zip(range(step), loader, strict=False):
                pass
            state = loader.state_dict()
        forget()
        with made(bare, step % 2, last=last) as loader:
            loader.load_state_dict(state)
            rest = epoch_of(loader)
            assert rest == (first[step:] if step < len(first) else second)
            if step < len(first):
                assert epoch_of(loader) == second


def test_a_state_of_another_set_is_refused(bare: Path, tmp_path: Path) -> None:
    """A state is refused by tars of other sizes under the same names, and by another window; it fits before and after counting."""
    with made(bare) as loader:
        before = loader.state_dict()
        epoch_of(loader)
        after = loader.state_dict()
        loader.load_state_dict(before)
        loader.load_state_dict(after)
    assert before.keys() == after.keys() and before["digest"] == after["digest"]
    with made(bare, options=LoaderOptions(window_bytes=1)) as other, pytest.raises(pipeline.OptionsError, match="window"):
        other.load_state_dict(before)
    (bare / "train-000003.tar").unlink()
    with made(bare) as other, pytest.raises(pipeline.OptionsError, match="digest"):
        other.load_state_dict(before)


def test_what_needs_counts_says_so(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`len` and several ranks name `shardify index`; `list` works without; after an epoch, or an index, all do."""
    with made(bare) as loader:
        for sized in (loader, loader.dataset):
            with pytest.raises(TypeError, match="`shardify index"):
                len(sized)
        assert len(list(loader)) == len(loader) == 13
        assert len(loader.dataset) == 200
    first = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with made(bare, batch_size=8) as loader:
            first[rank] = epoch_of(loader)
    monkeypatch.delenv("RANK"), monkeypatch.delenv("WORLD_SIZE")
    with made(bare) as loader:
        assert [sorted(a + b) for a, b in zip(first["0"], first["1"], strict=True)] == [sorted(batch) for batch in epoch_of(loader)]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    forget()
    with made(bare) as loader, pytest.raises(pipeline.UncountedError, match=r"several ranks needs .*`shardify index"):
        iter(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_len_in_the_first_epoch_leaves_it_as_it_is(bare: Path, workers: int) -> None:
    """`len` in the first epoch's loop counts what is known by then, and the epoch goes on to its end."""
    with made(bare) as loader:
        first, second = epoch_of(loader), epoch_of(loader)
    forget()
    with made(bare, workers) as loader:
        running = iter(loader)
        found = [tuple(next(running).keys)]
        with pytest.raises(pipeline.UncountedError):
            len(loader)
        with made(bare) as other:
            epoch_of(other)  # now the cache folder knows them all
        assert len(loader) == 13
        assert found + [tuple(batch.keys) for batch in running] == first
        assert len(loader) == 13
        assert epoch_of(loader) == second


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_ends_the_epoch_with_an_error(bare: Path, workers: int) -> None:
    """A tar that is cut at a member's edge, and one of zeros, is an error that names it."""
    path = bare / "train-000002.tar"
    whole = path.read_bytes()
    for data in (whole[:-1024], bytes(10240)):
        path.write_bytes(data)
        with made(bare, workers) as loader:
            for _ in range(2):  # again too: a lane that failed isn't one at its end
                loader.set_epoch(0)
                with pytest.raises(pipeline.ShardError, match=r"train-000002\.tar"):
                    epoch_of(loader)


def test_no_step_is_an_error(bare: Path) -> None:
    """Fewer samples than a batch holds is an error with the numbers, as soon as they are known."""
    for workers in (0, 1):
        forget()
        with made(bare, workers, "drop", batch_size=300) as loader, pytest.raises(pipeline.OptionsError, match="200 samples"):
            list(loader)


def test_storage_order(bare: Path, small_set: PackedSet) -> None:
    """Unshuffled, every epoch is in storage order."""
    with made(bare, shuffle=False) as loader:
        assert [flat(epoch_of(loader)) for _ in range(2)] == [small_set.keys] * 2


def test_stats_and_closing(bare: Path) -> None:
    """`stats` tells of an epoch whose steps nobody knows; workers end, and files are closed."""
    with made(bare, 0) as loader:
        assert next(iter(loader))
        assert loader.stats().steps is None and "epoch 0" in str(loader.stats())
        epoch_of(loader)
    assert open_below(bare) == 0
