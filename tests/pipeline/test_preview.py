"""The contact sheet shows an epoch's first pictures, raw beside augmented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import albumentations as A
import cv2
import numpy as np
import pytest
from packing import PackedSet

from pipeline.errors import OptionsError
from pipeline.preview import contact_sheet


def test_sheet(small_set: PackedSet) -> None:
    """Raw and augmented pictures differ where the transform says so, and lie side by side."""
    inverted = contact_sheet(small_set.folder, count=4, transform=A.Compose([A.InvertImg(p=1), A.Normalize()]))
    plain = contact_sheet(small_set.folder, count=4)
    a, b = (cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB) for data in (inverted, plain))
    assert a.shape == b.shape
    raw, augmented = a[8:56, 8:72], a[8:56, 176:240]
    np.testing.assert_array_equal(raw, b[8:56, 8:72])
    np.testing.assert_array_equal(255 - raw, augmented)
    assert (a[170:204, 8:160] < 128).any()  # the captions


def test_another_epoch_is_another_sheet(small_set: PackedSet) -> None:
    """The sheet follows the epoch and the seed."""
    assert len({contact_sheet(small_set.folder, count=4, epoch=e, seed=s) for e, s in [(0, 0), (1, 0), (0, 1)]}) == 3


def test_count_is_checked_and_capped(small_set: PackedSet) -> None:
    """More pictures than the set has shows all of them; none is an error."""
    assert contact_sheet(small_set.folder, count=1000)
    with pytest.raises(OptionsError, match="count=0"):
        contact_sheet(small_set.folder, count=0)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pipeline", *arguments], capture_output=True, text=True, check=False)


def test_command(small_set: PackedSet, tmp_path: Path) -> None:
    """`python -m pipeline preview` writes a PNG, with a transform from a YAML file; a wrong one exits with 2 and its place."""
    steps = tmp_path / "t.yaml"
    steps.write_text("- Resize: {height: 32, width: 32}\n- HorizontalFlip\n- Normalize\n")
    done = run("preview", str(small_set.folder), "--out", str(tmp_path / "s.png"), "--transform", str(steps))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    steps.write_text("- Rezize: {height: 32}\n")
    wrong = run("preview", str(small_set.folder), "--transform", str(steps))
    assert wrong.returncode == 2
    assert "did you mean Resize" in wrong.stderr
    assert "t.yaml" in wrong.stderr
    nothing = run("preview", str(tmp_path / "nothing"))
    assert nothing.returncode == 1
    assert "Traceback" not in nothing.stderr
