"""What single benchmarks compute beside their measurements."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    """Import a benchmark."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_differences_are_summed_up_by_their_counts() -> None:
    """Of 200 zeros, one 5 and one 9 the mean is 14/202; 99 % are 0 or 5."""
    histogram = np.zeros(256, np.int64)
    assert load("scaled").difference(histogram) == {"mean": 0, "p99": 0, "largest": 0}
    histogram[[0, 5, 9]] = 200, 1, 1
    assert load("scaled").difference(histogram) == {"mean": pytest.approx(14 / 202), "p99": 0, "largest": 9}
    histogram[5] = 3
    assert load("scaled").difference(histogram)["p99"] == 5


def test_pictures_that_are_not_scaled_differ_in_nothing() -> None:
    """Of a large and a small smooth picture the large one is decoded at half, and differs little."""
    pictures = []
    for side in (400, 120):
        colors = np.random.default_rng(side).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        pictures.append(bytes(cv2.imencode(".jpg", cv2.resize(colors, (side, side), interpolation=cv2.INTER_CUBIC))[1]))
    found = load("scaled").compare(pictures, 100)
    assert (found["pictures"], found["scaled"]) == (2, 0.5)
    assert 0 < found["mean"] < 2 and found["largest"] < 20
    assert load("scaled").compare(pictures[1:], 100)["largest"] == 0
    assert load("scaled").compare(pictures[:1], 50, crop=True)["scaled"] == 1


def test_the_share_of_work_is_of_workers_alone() -> None:
    """The trainer's samples don't count; decoding and transforming are told from what lies around them."""
    gather = "run (torch/worker.py:1);__getitem__ (pipeline/worker.py:90);gather (pipeline/batch.py:9)"
    decode = f"{gather};augment (pipeline/augment.py:9);decode (pipeline/decode.py:111)"
    stacks = [
        f"{decode};decode_image (pipeline/decode.py:50);_decoded (pipeline/decode.py:70) 60",
        f"{gather};augment (pipeline/augment.py:9);_run (pipeline/augment.py:20);apply (albumentations/core.py:1) 30",
        f"{decode};read_samples (pipeline/samples.py:5);read (io.py:3) 6",
        f"{gather} 4",
        "main (pipeline/device.py:1) 1000",
    ]
    found, alone = load("profiling").shares(stacks)
    assert found == {"decode": 0.6, "transform": 0.3, "rest": 0.1}
    assert alone.most_common(1) == [("_decoded (pipeline/decode.py)", 60)]
    assert load("profiling").shares([])[0] == {"decode": 0, "transform": 0, "rest": 0}


def test_a_larger_set_costs_loose_files_a_seek_each_and_shards_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated set of a hundred times as many pictures takes a hundred times as long; in memory only shards' kept part is free."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    growing = load("growing")
    options = argparse.Namespace(memory=50e6, cpu=3.3, cores=2)
    small, large = (growing.simulate(pictures, options) for pictures in (1_000, 100_000))
    assert small.files_seeks > 0.9 * 1_000 and large.files_seeks > 0.99 * 100_000
    assert large.shards_seeks < 0.01 * large.files_seeks
    assert 50 < large.files / small.files < 200 and large.files > 3 * large.shards
    assert large.shards >= 100_000 * 0.0033 / 2  # two cores decode no faster
    whole = growing.simulate(1_000, argparse.Namespace(memory=1e9, cpu=3.3, cores=2))
    assert whole.files_again == pytest.approx(1_000 * 0.0033 / 2, rel=0.01) and small.files_again > 2 * whole.files_again
