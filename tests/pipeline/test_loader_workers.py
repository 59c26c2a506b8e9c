"""A loader's processes: how they start, what they may use, and that none of them is left."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from packing import PackedSet, pack
from spawned import process
from torch.utils.data import get_worker_info

import pipeline
from pipeline import LoaderOptions, make_loader


def test_a_killed_worker_is_an_error_not_a_hang(small_set: PackedSet) -> None:
    """A worker that dies in an epoch raises WorkerError with its number and what to do; new ones come then."""
    with make_loader(small_set.folder, batch_size=8, num_workers=2, options=LoaderOptions(decode="none")) as loader:
        running = iter(loader)
        for _ in range(2):
            next(running)
        first, second = sorted(multiprocessing.active_children(), key=lambda worker: worker.pid or 0)
        second.kill()
        second.join()
        with pytest.raises(pipeline.WorkerError, match=r"epoch 0, after batch.*, worker 1: .*fewer workers"):
            list(running)
        assert multiprocessing.active_children() == []
        assert not first.is_alive()
        assert len(list(loader)) == 25


@pytest.mark.parametrize("when", ["in the loop's body", "between two epochs"])
def test_a_worker_killed_while_nobody_waits_for_it(small_set: PackedSet, caplog: pytest.LogCaptureFixture, when: str) -> None:
    """A worker that died while the trainer did something else costs one error at most, torch's: the next iter works at once."""
    with make_loader(small_set.folder, batch_size=8, num_workers=2, options=LoaderOptions(decode="none")) as loader:
        running = iter(loader)
        for _ in range(2 if when == "in the loop's body" else 25):
            next(running)
        first, second = sorted(multiprocessing.active_children(), key=lambda worker: worker.pid or 0)
        second.kill()
        second.join()
        began = time.monotonic()
        assert len(list(loader)) == 25
        assert time.monotonic() - began < 4  # torch would wait 5 s for it
        assert not first.is_alive()
        assert "worker 1 (exit code -9) ended since" in caplog.text


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow), "spawn"])
@pytest.mark.case("V02")
def test_start_methods_give_the_same_batches(small_set: PackedSet, method: Any) -> None:
    """fork, forkserver and spawn give the same batches: nothing works by fork alone."""
    transform = A.Compose([A.Resize(16, 16), A.HorizontalFlip(p=0.5), A.Normalize()])
    expected = list(make_loader(small_set.folder, batch_size=50, num_workers=0, transform=transform))
    options = LoaderOptions(multiprocessing_context=method)
    with make_loader(small_set.folder, batch_size=50, num_workers=1, transform=transform, options=options) as loader:
        got = list(loader)
    assert all(torch.equal(a.images, b.images) for a, b in zip(expected, got, strict=True))


@pytest.mark.case("V01")
def test_the_dataset_can_be_pickled(small_set: PackedSet) -> None:
    """What goes to workers needs no lambda pickled, after use in this process too."""
    loader = make_loader(small_set.folder, batch_size=50, num_workers=0, transform=A.Compose([A.Resize(8, 8), A.Normalize()]))
    list(loader)
    assert len(pickle.loads(pickle.dumps(loader.dataset))) == 200


@pytest.mark.parametrize(("method", "number"), [("fork", 0), pytest.param("forkserver", 1, marks=pytest.mark.slow), ("spawn", 2)])
@pytest.mark.case("V02")
def test_workers_start_as_asked_and_stay(small_set: PackedSet, method: Any, number: int) -> None:
    """`multiprocessing_context` decides how workers start; persistent ones are the same in each epoch, others are not."""
    for persistent in (True, False):
        options = LoaderOptions(multiprocessing_context=method, persistent_workers=persistent)
        with make_loader(small_set.folder, batch_size=100, num_workers=1, transform=process, options=options) as loader:
            seen = [{int(v) for images, _ in loader for v in images.double().unique().tolist()} for _epoch in range(2)]
        assert {value % 4 for epoch in seen for value in epoch} == {number}
        assert (seen[0] == seen[1]) == persistent


def slow(image: np.ndarray) -> np.ndarray:
    import time

    time.sleep(30)
    return image


@pytest.mark.case("P04")
def test_timeout(small_set: PackedSet) -> None:
    """`timeout` ends a wait for workers with a WorkerError that names the option."""
    options = LoaderOptions(timeout=1)
    with (
        make_loader(small_set.folder, batch_size=8, num_workers=1, transform=slow, options=options) as loader,
        pytest.raises(pipeline.WorkerError, match=r"timed out after 1.*LoaderOptions\(timeout"),
    ):
        next(iter(loader))


def test_prefetch_factor(small_set: PackedSet) -> None:
    """A worker makes `prefetch_factor` batches ahead of the one that is asked for, and no more."""
    for ahead in (1, 3):
        options = LoaderOptions(prefetch_factor=ahead)
        with make_loader(small_set.folder, batch_size=8, num_workers=1, options=options) as loader:
            next(iter(loader))
            assert loader._loader is not None
            assert loader._loader.prefetch_factor == ahead


def test_a_lambda_needs_fork_and_says_so(small_set: PackedSet) -> None:
    """A transform that can't be pickled is an OptionsError under spawn, with the cures."""
    options = LoaderOptions(multiprocessing_context="spawn")
    with pytest.raises(pipeline.OptionsError, match=r"num_workers=0"):
        make_loader(small_set.folder, batch_size=8, num_workers=1, transform=lambda image: image, options=options)


def open_in(folder: Path) -> list[str]:
    """Return the files below a folder that this process holds open."""
    import contextlib
    import os

    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return [path for path in found if path.startswith(str(folder))]


def test_close_closes_the_shards(tmp_path: Path) -> None:
    """`close` leaves no shard open."""
    pack(tmp_path, 40, 2)
    with make_loader(tmp_path, batch_size=20, num_workers=0) as loader:
        next(iter(loader))
        assert open_in(tmp_path)
    assert open_in(tmp_path) == []


FEW = """
import gc, os, resource, sys
import pipeline
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
options = pipeline.LoaderOptions(keys=True, decode="none", last_batch="uneven")
with pipeline.make_loader(sys.argv[1], batch_size=16, num_workers=int(sys.argv[2]), options=options) as loader:
    for _ in range(10):
        assert len({key for batch in loader for key in batch.keys}) == 200
        gc.collect()
        held.append(len(os.listdir("/proc/self/fd")))
with pipeline.WebDataset(sys.argv[1]) as dataset:
    for _ in range(2):
        assert len({sample["__key__"] for sample in dataset}) == 200
print(*held)
"""


@pytest.mark.case("P06")
@pytest.mark.parametrize("workers", [0, 1])
def test_64_open_files_are_enough(tmp_path: Path, workers: int) -> None:
    """Ten epochs of 200 shards with 64 descriptors: each sample, no more files than after the second, nothing left to a collector (P06)."""
    pack(tmp_path, 200, 200, make=lambda n: b"\xff\xd8" + n.to_bytes(4, "big"))
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", FEW, str(tmp_path), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and "ResourceWarning" not in done.stderr, done.stderr
    held = [int(count) for count in done.stdout.split()]
    assert max(held[2:]) <= held[1] + 1, held


def test_a_failed_epoch_leaves_no_worker(small_set: PackedSet) -> None:
    """After an exception of a worker none is left, even while the exception is held; the next iter starts anew."""
    loader = make_loader(small_set.folder, batch_size=8, num_workers=2, transform=fail_once)
    with pytest.raises(pipeline.TransformError) as caught:
        list(loader)
    assert multiprocessing.active_children() == []
    assert caught.value is not None
    with pytest.raises(pipeline.TransformError):
        next(iter(loader))
    loader.close()


def fail_once(image: np.ndarray) -> np.ndarray:
    raise ValueError("no")


def threads(image: np.ndarray) -> np.ndarray:
    cv2.resize(image, (2000, 2000))
    return np.full((1, 1, 1), cv2.getNumThreads() * 100 + torch.get_num_threads(), np.float32)


@pytest.mark.case("A05")
def test_workers_use_one_thread(small_set: PackedSet) -> None:
    """cv2 and torch use one thread in each worker, and the trainer's settings stay."""
    restored = cv2.getNumThreads()
    cv2.setNumThreads(2)
    cv2.resize(np.zeros((3000, 3000, 3), np.uint8), (2000, 2000))  # its threads run when the worker is forked
    before = cv2.getNumThreads(), torch.get_num_threads()
    with make_loader(small_set.folder, batch_size=8, num_workers=1, transform=threads) as loader:
        assert next(iter(loader)).images.unique().tolist() == [101]
    assert (cv2.getNumThreads(), torch.get_num_threads()) == before
    cv2.setNumThreads(restored)


def in_worker(image: np.ndarray) -> np.ndarray:
    info = get_worker_info()
    return np.full((1, 1, 1), -1 if info is None else info.num_workers, np.float32)


def test_num_workers_default_and_above_cores(small_set: PackedSet, caplog: pytest.LogCaptureFixture) -> None:
    """The default is the usable CPUs; more than that is a log line of ours, not torch's warning (warnings are errors here)."""
    from pipeline.machine import usable_cpus

    with make_loader(small_set.folder, batch_size=8, transform=in_worker) as loader:
        assert next(iter(loader)).images.unique().tolist() == [usable_cpus()]
    with caplog.at_level(logging.INFO, logger="pipeline"):
        many = make_loader(small_set.folder, batch_size=8, num_workers=usable_cpus() + 1)
    assert "usable CPUs" in caplog.text
    with many:
        next(iter(many))  # torch would warn now


def test_close_and_with(small_set: PackedSet) -> None:
    """After `close` no worker is left, and a further iter says that the loader is closed; a second close does nothing."""
    with make_loader(small_set.folder, batch_size=8, num_workers=2) as loader:
        next(iter(loader))
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []
    loader.close()
    with pytest.raises(pipeline.PipelineError, match="closed"):
        iter(loader)


def test_a_loader_that_nobody_closed_leaves_no_descriptor(tmp_path: Path) -> None:
    """A loader that is collected gives its descriptors back, without `close`, whether its epoch ended or not."""
    import gc

    pack(tmp_path, 40, 2)
    for whole in (True, False):
        loader = make_loader(tmp_path, batch_size=10, num_workers=0)
        for _batch in loader:
            assert open_in(tmp_path)
            if not whole:
                break
        del loader
        gc.collect()
        assert open_in(tmp_path) == []
