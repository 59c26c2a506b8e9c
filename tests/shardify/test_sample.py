"""The sample set: what it looks like, that only the pictures tell the class, and that it appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from shardify import scene
from shardify.errors import SettingsError, StorageError
from shardify.sample import SampleSet, draw

Floats = npt.NDArray[np.float64]
PINNED_TABLE = "id,landmark_id\n71f349e4b863b2e1,147789\nb6b33277c4e7ffdf,129230\nb991b2d4013272b7,63811\n"
PINNED_PIXELS = [
    "3ab50c8a56b82b1a",
    "573b682373510f72",
    "e1a7c69f630a7a24",
    "a93e34f70e278415",
    "2bac7e5e5deea151",
    "67c1fbf07e030730",
    "617e1843185af7d8",
    "cc1637e5025a091b",
    "4d44cf8d9b01c621",
    "3636e566eb30158d",
]
SMALL = 44  # enough for the processes to start


def rows(folder: Path) -> list[tuple[str, str]]:
    """Read a set's table."""
    head, *lines = (folder / "train.csv").read_text().splitlines()
    assert head == "id,landmark_id"
    return [(line.split(",")[0], line.split(",")[1]) for line in lines]


def picture_path(folder: Path, identifier: str) -> Path:
    """Return where a picture lies in the GLR2020 layout."""
    return folder / "train" / identifier[0] / identifier[1] / identifier[2] / f"{identifier}.jpg"


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file under a folder with its bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def pictures(drawn: SampleSet) -> list[npt.NDArray[np.uint8]]:
    """Its pictures in the order of the table, BGR."""
    found = [cv2.imread(str(picture_path(drawn.folder, identifier))) for identifier, _ in rows(drawn.folder)]
    assert all(picture is not None for picture in found)
    return [picture.astype(np.uint8, copy=False) for picture in found if picture is not None]


@pytest.fixture(scope="module")
def labels(drawn: SampleSet) -> npt.NDArray[np.int64]:
    """Its labels in the order of the table, 0 to 9."""
    landmarks = [int(landmark) for _, landmark in rows(drawn.folder)]
    return np.unique(landmarks, return_inverse=True)[1].astype(np.int64)


def centroid_accuracy(features: Floats, labels: npt.NDArray[np.int64], folds: int = 5) -> float:
    """Return how often the nearest class mean (of the other folds) names a picture's class; chance is 0.1."""
    features = (features - features.mean(0)) / (features.std(0) + 1e-9)
    fold = np.arange(len(labels)) % folds
    hits = 0
    for k in range(folds):
        train, held = fold != k, fold == k
        centers = np.stack([features[train & (labels == c)].mean(0) for c in range(10)])
        distances = ((features[held, None] - centers[None]) ** 2).sum(2)
        hits += int((distances.argmin(1) == labels[held]).sum())
    return hits / len(labels)


def edge_histogram(picture: npt.NDArray[np.uint8]) -> Floats:
    """Describe a picture by how much edge of each of 12 directions it has, in 16 bands across and 8 down."""
    grey = cv2.GaussianBlur(cv2.resize(cv2.cvtColor(picture, cv2.COLOR_BGR2GRAY), (128, 128)), (5, 5), 0).astype(np.float64)
    dy, dx = np.gradient(grey)
    strength = np.hypot(dy, dx)
    strength[strength < np.quantile(strength, 0.85)] = 0
    direction = ((np.arctan2(dy, dx) % np.pi) / np.pi * 12).astype(int).clip(0, 11)
    parts = [np.where(direction == k, strength, 0) for k in range(12)]
    down = np.stack([p.reshape(8, 16, 128).sum((1, 2)) for p in parts])
    return np.concatenate((down.ravel(), [p.sum() for p in parts])) / strength.sum()


def test_the_default_set_is_as_promised(drawn: SampleSet) -> None:
    """600 JPEGs of 20 to 60 KB, several sizes, upright and wide, 10 even classes with sparse labels, in the GLR2020 layout."""
    table = rows(drawn.folder)
    assert (drawn.pictures, drawn.classes, drawn.fresh) == (600, 10, True)
    assert len({identifier for identifier, _ in table}) == 600
    assert all(re.fullmatch("[0-9a-f]{16}", identifier) for identifier, _ in table)
    assert set(tree(drawn.folder)) == {"train.csv"} | {
        picture_path(drawn.folder, identifier).relative_to(drawn.folder).as_posix() for identifier, _ in table
    }
    counts = {landmark: sum(row[1] == landmark for row in table) for _, landmark in table}
    assert sorted(counts.values()) == [60] * 10
    assert max(int(landmark) for landmark in counts) > 10_000
    sizes = [picture_path(drawn.folder, identifier).stat().st_size for identifier, _ in table]
    assert min(sizes) >= 20_000
    assert max(sizes) <= 60_000
    assert drawn.bytes == sum(sizes)


def test_pictures_have_several_sizes_and_orientations(pictures: list[npt.NDArray[np.uint8]]) -> None:
    """Wide, upright and square pictures occur, each often; all have texture everywhere."""
    shapes = [picture.shape[:2] for picture in pictures]
    assert len(set(shapes)) >= 5
    assert sum(h > w for h, w in shapes) > 100
    assert sum(h < w for h, w in shapes) > 100
    assert sum(h == w for h, w in shapes) > 30
    assert all(picture[:32, :32].std() > 3 for picture in pictures)


def test_nothing_but_the_picture_tells_the_class(
    drawn: SampleSet, pictures: list[npt.NDArray[np.uint8]], labels: npt.NDArray[np.int64]
) -> None:
    """Bytes, dimensions, mean color, id and place in the table are near chance (0.1); the picture's edges are far from it."""
    table = rows(drawn.folder)
    nibbles = np.array([[int(c, 16) for c in identifier] for identifier, _ in table], float)
    bytes_ = np.array([[picture_path(drawn.folder, identifier).stat().st_size] for identifier, _ in table], float)
    shapes = np.array([picture.shape[:2] for picture in pictures], float)
    places = np.arange(600, dtype=float)[:, None]
    means = np.array([cv2.mean(picture)[:3] for picture in pictures])
    beside = {
        "id": nibbles,
        "bytes": bytes_,
        "dimensions": np.hstack((shapes, shapes.prod(1, keepdims=True))),
        "bytes a pixel": bytes_ / shapes.prod(1, keepdims=True),
        "place": np.hstack((places, places % 10, places % 60)),
        "mean color": np.hstack((means, means.mean(1, keepdims=True))),
    }
    beside["all of them"] = np.hstack(list(beside.values()))
    found = {name: centroid_accuracy(features, labels) for name, features in beside.items()}
    assert max(found.values()) < 0.16, found
    assert centroid_accuracy(np.stack([edge_histogram(picture) for picture in pictures]), labels) > 0.5


def test_same_bytes_for_any_number_of_processes(tmp_path: Path) -> None:
    """One process or three, here or elsewhere: the same files."""
    draw(tmp_path / "one", count=SMALL, processes=1)
    draw(tmp_path / "three", count=SMALL, processes=3)
    assert tree(tmp_path / "one") == tree(tmp_path / "three")


def test_pixels_and_table_are_pinned(tmp_path: Path) -> None:
    """Neither a machine nor a release of numpy changes ids, labels or pixels: they are pinned here."""
    draw(tmp_path, count=3)
    assert (tmp_path / "train.csv").read_text() == PINNED_TABLE
    digests = [hashlib.sha256(scene.picture(0, k, k, 120, 160).tobytes()).hexdigest()[:16] for k in range(10)]
    assert digests == PINNED_PIXELS


def test_another_seed_is_another_set(tmp_path: Path) -> None:
    """The seed decides ids, labels and pixels."""
    draw(tmp_path / "0", count=12)
    draw(tmp_path / "1", count=12, seed=1)
    first, second = tree(tmp_path / "0"), tree(tmp_path / "1")
    assert set(first) & set(second) == {"train.csv"}
    assert not set(first.values()) & set(second.values())
    assert not {landmark for _, landmark in rows(tmp_path / "0")} & {landmark for _, landmark in rows(tmp_path / "1")}


def test_a_second_run_finds_the_set_and_writes_nothing(tmp_path: Path) -> None:
    """A finished set is reported as there, and no file of it is touched."""
    first = draw(tmp_path, count=12)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = draw(tmp_path, count=12)
    assert (first.fresh, second.fresh) == (True, False)
    assert second.bytes == first.bytes
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("strange", ["notes.txt", "train/a/b/c/abc0000000000000.jpg", "train.csv.bak", "holiday/"])
def test_a_folder_with_anything_else_is_refused(tmp_path: Path, strange: str) -> None:
    """A folder that holds something of somebody else's is refused by name and left as it is."""
    path = tmp_path / strange
    (path if strange.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
    if not strange.endswith("/"):
        path.write_text("mine")
    with pytest.raises(SettingsError, match=re.escape(strange.rstrip("/"))):
        draw(tmp_path, count=3)
    assert path.exists()
    assert not (tmp_path / "train.csv").exists()


def test_another_set_is_refused(tmp_path: Path) -> None:
    """A set of another count or seed, a damaged one and a file in the folder's place are refused with the next step."""
    draw(tmp_path / "set", count=3)
    with pytest.raises(SettingsError, match="table of another set"):
        draw(tmp_path / "set", count=4)
    next((tmp_path / "set" / "train").rglob("*.jpg")).unlink()
    with pytest.raises(SettingsError, match=r"lacks 1 pictures; delete train\.csv"):
        draw(tmp_path / "set", count=3)
    with pytest.raises(SettingsError, match="is a file"):
        draw(tmp_path / "set" / "train.csv", count=3)
    with pytest.raises(SettingsError, match="at least 1"):
        draw(tmp_path / "none", count=0)
    with pytest.raises(StorageError, match=r"(?i)not a directory"):
        draw(tmp_path / "set" / "train.csv" / "inside", count=3)


def test_a_killed_run_leaves_no_table_and_is_drawn_over(tmp_path: Path) -> None:
    """After SIGKILL in the middle there is no train.csv; the next run completes the set, byte for byte, and leaves no scraps."""
    code = f"from pathlib import Path; from shardify.sample import draw; draw(Path({str(tmp_path / 'cut')!r}), count=36)"
    child = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cut").rglob("*.jpg")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    left = tree(tmp_path / "cut")
    assert 0 < len(left) < 36
    assert "train.csv" not in left
    name = next(name for name in left if name.endswith(".jpg"))
    (tmp_path / "cut" / name).write_bytes(b"cut by a power failure")
    (tmp_path / "cut" / (name + ".partial")).write_bytes(b"scrap")
    (tmp_path / "cut" / "train.csv.partial").write_bytes(b"scrap")
    assert draw(tmp_path / "cut", count=36).fresh
    draw(tmp_path / "whole", count=36)
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")
