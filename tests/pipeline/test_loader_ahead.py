"""Where the device finishes batches beside the trainer, the next one is begun early, and nothing else changes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from packing import PackedSet
from standin import StandInStreams, let_overlap

import pipeline
from pipeline import Loader, LoaderOptions, make_loader
from pipeline.run import Run
from pipeline.torchloader import lies_ready

BYTES = LoaderOptions(keys=True, dtype="uint8", last_batch="uneven", prefetch_factor=1, prefetch=False)


def made(packed: PackedSet, workers: int, *, streams: StandInStreams | None, options: LoaderOptions = BYTES, **more: Any) -> Loader:
    """Return a loader of batches of 30, seven an epoch, which overlaps where there are streams."""
    loader = make_loader(packed.folder, **{"batch_size": 30, "num_workers": workers, "options": options, **more})
    return loader if streams is None else let_overlap(loader, streams)


def settle(loader: Loader) -> Run:
    """Wait until the workers have sent all that they were asked for; return the iteration."""
    run, until = loader._current, time.monotonic() + 10
    assert run is not None
    batches: Any = run._batches
    while time.monotonic() < until:
        asked = [entry for entry in getattr(batches, "_task_info", {}).values() if len(entry) == 1]
        if not asked or (batches._data_queue.qsize() >= len(asked) and lies_ready(batches)):
            break
        time.sleep(0.001)
    return run


def same(one: Any, other: Any) -> bool:
    """Tell whether two batches are equal."""
    return one.keys == other.keys and torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)


@pytest.mark.parametrize(("workers", "factor"), [(0, 1), (1, 2), (2, 1), (3, 1)])
@pytest.mark.parametrize("persistent", [True, False])
def test_the_same_batches_and_states(small_set: PackedSet, workers: int, factor: int, persistent: bool) -> None:
    """Pictures, labels, keys and the state in each batch's body are those of a loader that begins none early."""
    options = dataclasses.replace(BYTES, persistent_workers=persistent, prefetch_factor=factor)
    streams = StandInStreams()
    with made(small_set, workers, streams=None, options=options) as plain:
        expected = [[(batch, plain.state_dict()) for batch in plain] for _ in range(2)]
        end = plain.state_dict()
    with made(small_set, workers, streams=streams, options=options) as loader:
        for epoch in expected:
            ahead = 0
            for seen, (batch, (other, state)) in enumerate(zip(loader, epoch, strict=True), 1):
                assert same(batch, other)
                assert loader.state_dict() == state
                assert loader.stats().batches == seen
                ahead += settle(loader)._next is not None
            assert (ahead > 0) == (workers > 0)
            assert loader.stats().samples == 200
        assert loader.state_dict() == end
    assert len(streams.pinned) == 2


def test_a_batch_lies_ready_only_where_one_does(small_set: PackedSet) -> None:
    """Never without workers, not before one is made and not at an epoch's end; else soon."""
    with made(small_set, 0, streams=None) as loader:
        running = iter(loader)
        next(running)
        assert not lies_ready(running._batches)  # type: ignore[attr-defined]
    with made(small_set, 1, streams=None, transform=slow) as loader:
        running = iter(loader)
        assert not lies_ready(running._batches)  # type: ignore[attr-defined]
        for _ in range(7):
            assert lies_ready(settle(loader)._batches)
            next(running)
        assert not lies_ready(settle(loader)._batches)
        assert list(running) == []


def slow(image: np.ndarray) -> np.ndarray:
    time.sleep(0.005)
    return image


@pytest.mark.parametrize("workers", [1, 2])
def test_an_early_break_loses_nothing(small_set: PackedSet, workers: int) -> None:
    """Left at any step with a batch taken ahead, the next epoch is whole; a state of that step goes on with that batch."""
    with made(small_set, workers, streams=None) as plain:
        epochs = [list(plain) for _ in range(8)]
    with made(small_set, workers, streams=StandInStreams()) as loader:
        for stop in range(1, 8):
            for step, batch in enumerate(loader, 1):
                assert same(batch, epochs[stop - 1][step - 1])
                settle(loader)
                if step == stop:
                    break
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (6, 200)
        for step in (2, 5):
            loader.load_state_dict({**state, "position": 30 * step})
            for batch, other in zip(loader, epochs[6][step:], strict=True):
                assert same(batch, other)
                settle(loader)


def test_one_is_ahead_of_what_is_given(small_set: PackedSet) -> None:
    """While the trainer works on a batch the next one is uploaded, and no more; it isn't counted."""
    streams = StandInStreams()
    with made(small_set, 2, streams=streams) as loader:
        running = iter(loader)
        aheads = 0
        for number in range(1, 7):
            settle(loader)
            next(running)
            assert loader._current is not None
            ahead = loader._current._next is not None
            aheads += ahead
            assert len(streams.there) == 2 * (number + ahead)  # images and labels
            assert loader.stats().batches == loader.stats().stages["finish"].items == number
            assert loader.stats().stages["finish"].bytes == number * 30 * 48 * 64 * 3
        assert aheads


def test_an_iteration_that_ended_holds_no_batch(small_set: PackedSet) -> None:
    """What was taken ahead is let go of where another iteration begins, a state is loaded or the loader is closed."""
    with made(small_set, 2, streams=StandInStreams()) as loader:
        for end in (lambda: iter(loader), lambda: loader.load_state_dict(loader.state_dict()), loader.close):
            running = iter(loader)
            for _ in range(5):
                run = settle(loader)
                next(running)
                if run._next is not None:
                    break
            assert run._next is not None
            end()
            assert run._next is None


def test_a_trainer_that_looks_ahead_itself(small_set: PackedSet) -> None:
    """With `ahead=1` the state is that of the batch before, and the one taken ahead changes nothing about that."""
    options = dataclasses.replace(BYTES, ahead=1)
    with made(small_set, 2, streams=StandInStreams(), options=options) as loader:
        for given_, _batch in enumerate(loader, 1):
            settle(loader)
            assert loader.state_dict()["position"] == 30 * (given_ - 1)


class FailsAt:
    """A transform that fails at its `count`th picture; of one worker."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Count a picture."""
        self.left -= 1
        if not self.left:
            raise ValueError("no more")
        return image


TWO = dataclasses.replace(BYTES, prefetch_factor=2)


def test_a_failure_comes_at_its_own_turn(small_set: PackedSet) -> None:
    """A batch that fails when it is taken ahead takes nothing from the one before it: that is given, and counts."""
    for _ in range(20):
        with made(small_set, 1, streams=StandInStreams(), transform=FailsAt(100), options=TWO) as loader:
            running = iter(loader)
            for _batch in range(3):
                settle(loader)
                next(running)
            assert loader._current is not None
            ahead = loader._current._next
            assert loader.state_dict()["position"] == 90
            with pytest.raises(pipeline.TransformError, match="no more"):
                next(running)
            assert loader.state_dict()["position"] == 90
            assert multiprocessing.active_children() == []
            assert next(running, None) is None
            next(iter(loader))
        if ahead is not None:
            break
    assert isinstance(ahead, pipeline.TransformError)


def test_a_failure_that_nobody_asks_for(small_set: PackedSet) -> None:
    """A trainer that leaves before the batch that failed hears nothing of it; no worker is left, and new ones come."""
    ahead = 0
    with made(small_set, 1, streams=StandInStreams(), transform=FailsAt(35), options=TWO) as loader:
        for epoch in range(40):
            running = iter(loader)
            assert len(multiprocessing.active_children()) == 1
            settle(loader)
            next(running)
            assert loader.state_dict()["epoch"] == epoch
            assert loader.state_dict()["position"] == 30
            assert loader._current is not None
            if isinstance(loader._current._next, pipeline.TransformError):
                assert multiprocessing.active_children() == []
                ahead += 1
            else:  # it came a moment too late
                with pytest.raises(pipeline.TransformError, match="no more"):
                    next(running)
            if ahead == 2:
                break
    assert ahead == 2


def test_a_device_that_fails(small_set: PackedSet) -> None:
    """What the device raises for a batch that is begun early comes at that batch's turn; Ctrl-C comes at once, uncounted."""
    for error, least in ((torch.OutOfMemoryError("full"), 2), (KeyboardInterrupt(), 1)):
        seen = 2
        for _ in range(20):
            streams = StandInStreams()

            def fail(streams: StandInStreams = streams, error: BaseException = error) -> None:
                if len(streams.there) == 4:
                    raise error

            streams.before_upload = fail
            with made(small_set, 2, streams=streams) as loader:
                running, given_ = iter(loader), 0
                with pytest.raises(type(error)):
                    while True:
                        settle(loader)
                        next(running)
                        given_ += 1
                assert loader.state_dict()["position"] == 30 * given_
                assert multiprocessing.active_children() == []
            seen = min(seen, given_)
            if seen == least:
                break
        assert seen == least


def test_a_killed_worker(small_set: PackedSet) -> None:
    """A worker that dies is an error that says where, after the batches that came."""
    with made(small_set, 2, streams=StandInStreams(), options=TWO) as loader:
        running = iter(loader)
        next(running)
        settle(loader)
        second = max(multiprocessing.active_children(), key=lambda worker: worker.pid or 0)
        second.kill()
        second.join()
        with pytest.raises(pipeline.WorkerError, match=r"epoch 0, after batch.*, worker 1: .*fewer workers"):
            list(running)
        assert len(list(loader)) == 7


@pytest.mark.parametrize("last", ["drop", "pad", "uneven"])
def test_tars_that_nobody_counted(small_set: PackedSet, tmp_path: Path, last: Any) -> None:
    """Where an epoch's end is found out by reading, it is told once all batches were given."""
    options = dataclasses.replace(BYTES, last_batch=last)
    seen = []
    for streams in (None, StandInStreams()):
        bare = PackedSet(tmp_path / str(len(seen)))
        bare.folder.mkdir()
        for path in small_set.folder.glob("*.tar"):
            shutil.copy(path, bare.folder / path.name)
            os.utime(bare.folder / path.name, (time.time() - 60,) * 2)
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
        with made(bare, 2, streams=streams, options=options) as loader:
            epochs = []
            for _ in range(2):
                epochs.append([])
                for batch in loader:
                    epochs[-1].append((batch.keys, loader.state_dict()["position"]))
                    if streams is not None:
                        settle(loader)
            seen.append((epochs, len(loader), loader.state_dict()["position"]))
    assert seen[0] == seen[1]


def test_normalized_sixteen_bits_from_end_to_end(small_set: PackedSet) -> None:
    """The problem's transform in float16, on streams and on the CPU, is float32 rounded."""
    transform = A.Compose([A.Resize(32, 32), A.Rotate(limit=15), A.ChannelDropout(p=0.5), A.Normalize()])
    got = {}
    for dtype, streams in (("float32", None), ("float16", None), ("bfloat16", None), ("float16", StandInStreams(at_once=True))):
        options = dataclasses.replace(BYTES, dtype=dtype)  # type: ignore[arg-type]
        with made(small_set, 2, streams=streams, options=options, transform=transform) as loader:
            got[dtype, streams is None] = [batch.images for batch in loader]
    for (dtype, _), epoch in got.items():
        expected = [images.to(getattr(torch, dtype)) for images in got["float32", True]]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(epoch, expected, strict=True))
