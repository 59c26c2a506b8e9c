"""Cases that go through both packages, from a user's files to batches, and what the project asks of other packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import albumentations as A
import cv2
import numpy as np
import pytest
from gallery import Silent
from packing import jpeg

from pipeline import LoaderOptions, make_loader
from shardify import build
from shardify.config import BuildConfig
from shardify.verify import verify

ROOT = Path(__file__).resolve().parent.parent


def packed(source: Path, out: Path) -> None:
    """Pack class folders into one split."""
    settings = {"name": "t", "source": {"kind": "folders", "root": str(source)}, "splits": {"train": 1.0}}
    config = BuildConfig.model_validate(settings | {"shards": {"out": str(out)}})
    build.build(config, force=False, skipped_to=None, progress=Silent())


@pytest.mark.case("A01")
def test_red_is_red_from_file_to_batch(tmp_path: Path) -> None:
    """Channels are swapped once: a red PNG is red behind packing, decoding and a Normalize that changes nothing."""
    (tmp_path / "in" / "reds").mkdir(parents=True)
    red = np.zeros((16, 16, 3), np.uint8)
    red[..., 2] = 255  # cv2 writes BGR
    assert cv2.imwrite(str(tmp_path / "in" / "reds" / "a.png"), red)
    packed(tmp_path / "in", tmp_path / "out")
    same = A.Compose([A.Normalize(mean=(0, 0, 0), std=(1, 1, 1), max_pixel_value=1)])
    ((images, _),) = make_loader(tmp_path / "out", batch_size=1, num_workers=0, transform=same)
    assert [channel.unique().tolist() for channel in images[0]] == [[255.0], [0.0], [0.0]]


@pytest.mark.case("V06")
def test_paths_beyond_ascii(tmp_path: Path) -> None:
    """Pictures, shards and tables below folders of any script are read by Python, never by a path that cv2 is given."""
    path = tmp_path / "é" / "in" / "כיתה" / "א.jpg"
    path.parent.mkdir(parents=True)
    path.write_bytes(jpeg(1))
    packed(tmp_path / "é" / "in", tmp_path / "é" / "ש")
    assert verify(tmp_path / "é" / "ש", decode=True, progress=Silent()).problems == ()
    options = LoaderOptions(decode="none")
    loader = make_loader(tmp_path / "é" / "ש", batch_size=1, num_workers=0, options=options)
    ((images, labels),) = loader
    assert (images, labels.tolist(), loader.classes) == ([jpeg(1)], [0], ("כיתה",))


@pytest.mark.case("A06", "A07")
def test_one_opencv_and_no_release_that_nobody_tried() -> None:
    """The headless wheel alone is required, as albumentations does, below its next major version; the lock's is within."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    (opencv,) = [line for line in required if line.startswith("opencv")]
    bounds = re.fullmatch(r"opencv-python-headless>=(\d+)\.\d+,<(\d+)", opencv)
    locked = re.findall(r"^opencv[a-z-]*==(\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert bounds and len(locked) == 1
    assert int(bounds[1]) <= int(locked[0]) < int(bounds[2])
    assert int(bounds[1]) <= int(cv2.__version__.partition(".")[0]) < int(bounds[2])
    # docs/pictures.md, which a test holds to the installed version, tells where the versions within these bounds differ.
    assert f"({bounds[1]}: " in (ROOT / "docs" / "pictures.md").read_text() and int(bounds[2]) == int(bounds[1]) + 2
