"""The example: it trains from packed shards, and its exit code says whether the target was passed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def train(folder: Path, count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Draw a sample set of `count` pictures, pack it with configs/sample.yaml, and train from it."""
    build = ["build", str(ROOT / "configs" / "sample.yaml"), "--source", "data", "--out", "shards"]
    for command in (["sample", "data", "--count", str(count)], build):
        subprocess.run([sys.executable, "-m", "shardify", *command], cwd=folder, capture_output=True, check=True)
    program = [sys.executable, str(ROOT / "examples" / "train.py"), "shards", *arguments]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)


def test_it_says_how_long_it_waited_and_misses_a_target_with_1(tmp_path: Path) -> None:
    """A line an epoch with img/s, seconds waited and accuracy; below the target it exits with 1."""
    result = train(tmp_path, 80, "--epochs", "1", "--target", "1")
    assert result.returncode == 1, result.stderr
    assert re.search(
        r"epoch  1/1: +\d+ img/s, waited \d+\.\d\d of \d+\.\d\d s for data, validation accuracy \d+\.\d%", result.stdout
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_learns_the_sample_set(tmp_path: Path) -> None:
    """From the whole sample set it reaches more than 90 %: images and labels stayed together."""
    result = train(tmp_path, 600)
    assert result.returncode == 0, result.stdout + result.stderr
