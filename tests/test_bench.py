"""The benchmark: its programs deliver each picture once, one that doesn't has no number, and tables are made of results alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "benchmarks" / "bench"
COUNT = 70  # more than a batch


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the benchmark's modules importable."""
    monkeypatch.syspath_prepend(BENCH)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of loose files whose labels are their numbers, in no order that their names have."""
    root = tmp_path_factory.mktemp("bench") / "files"
    rows = ["id,landmark_id"]
    for number in range(COUNT):
        key = f"{number * 7919 % 65536:04x}" * 4
        path = root / "train" / key[0] / key[1] / key[2] / f"{key}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
        cv2.imwrite(str(path), cv2.resize(noise, (160, 120), interpolation=cv2.INTER_CUBIC))
        rows.append(f"{key},{number}")
    (root / "train.csv").write_text("\n".join(rows) + "\n")
    return root


def run(python: Path | str, script: str, *arguments: object) -> dict[str, Any]:
    """Run a program's script; return its JSON."""
    done = subprocess.run(
        [str(python), str(BENCH / f"with_{script}.py"), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def assert_all_came(answer: dict[str, Any], epochs: int, *, shuffled: bool = True) -> None:
    """Each epoch has each picture once, in an order of its own."""
    found = [(sum(epoch["sizes"]), epoch["missing"], epoch["doubled"]) for epoch in answer["epochs"]]
    assert found == [(COUNT, 0, 0)] * epochs
    for epoch in answer["epochs"]:
        assert 0 < epoch["arrivals"][0] <= epoch["arrivals"][-1] <= epoch["seconds"]
        assert len(epoch["arrivals"]) == len(epoch["sizes"])
        assert epoch["cpu"] > 0
        assert not shuffled or (epoch["in_order"] < 0.5 and epoch["repeated"] < 0.5)
    assert answer["versions"]["albumentations"] == "2.0.8"


@pytest.mark.parametrize(
    ("script", "job", "epochs"),
    [("limit", "problem", 2), ("question", "crop", 1), ("question", "bytes", 1)],
    ids=["limit", "question", "question-bytes"],
)
def test_programs_without_a_writer_deliver_each_picture(photos: Path, script: str, job: str, epochs: int) -> None:
    """The limit's processes and the question's loader have each picture once an epoch."""
    answer = run(sys.executable, script, "read", photos, "--count", COUNT, "--job", job, "--epochs", epochs)
    assert_all_came(answer, epochs, shuffled=script != "limit")


@pytest.fixture(scope="module")
def packed(photos: Path) -> Path:
    """The pictures as ours packs them; what was written is measured."""
    out = photos.with_name("packed")
    written = run(sys.executable, "ours", "write", photos, out, "--shards", 4)
    assert 4 <= sum(1 for _ in out.glob("*.tar")) <= 5 and written["files"] > 4
    assert written["bytes"] >= sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    return out


@pytest.mark.parametrize(("job", "epochs"), [("problem", 2), ("bytes", 1)])
def test_ours_reads_what_it_wrote(packed: Path, job: str, epochs: int) -> None:
    """Pictures or their bytes: each once an epoch."""
    assert_all_came(run(sys.executable, "ours", "read", packed, "--count", COUNT, "--job", job, "--epochs", epochs), epochs)


def test_a_peer_reads_what_its_writer_wrote(photos: Path, tmp_path: Path) -> None:
    """Labels are the pictures' numbers through another format too, of as many shards as were asked for."""
    written = run(sys.executable, "webdataset", "write", photos, tmp_path / "set", "--shards", 4)
    assert written["files"] == 4
    assert_all_came(run(sys.executable, "webdataset", "read", tmp_path / "set", "--count", COUNT, "--epochs", 1), 1)


@pytest.mark.slow
def test_small_pictures_take_less_room(photos: Path, packed: Path, tmp_path: Path) -> None:
    """`--short-side` shrinks what is packed."""
    run(sys.executable, "ours", "write", photos, tmp_path / "small", "--short-side", 30)
    small, whole = (sum(tar.stat().st_size for tar in folder.glob("*.tar")) for folder in (tmp_path / "small", packed))
    assert small < whole / 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    ["squashfs", "ram", "grain", "spdl", "spdl-cv2", "litdata", "streaming", "datasets", "energon", "dali", "ffcv", "ray"],
)
def test_installed_peers_deliver_each_picture(photos: Path, tmp_path: Path, name: str) -> None:
    """As the others, each in its own environment, for two epochs of its jobs."""
    from environments import absent, python
    from programs import DATASETS, PROGRAMS

    program = PROGRAMS[name]
    writer = PROGRAMS[DATASETS[program.dataset].writer]
    if why := absent(program) or absent(writer):
        pytest.skip(why)
    folder = tmp_path / program.dataset
    run(python(writer), writer.script, "write", photos, folder, "--shards", 4)
    for job in program.jobs:
        given = ["read", folder, "--count", COUNT, "--job", job, "--variant", program.variant]
        assert_all_came(run(python(program), program.script, *given), 2)


def tally(labels: list[int], images: np.ndarray | None = None) -> dict[str, Any]:
    """Return what an epoch of one batch of these labels comes to, of five pictures."""
    from protocol import Options, Tally

    made = Tally(Options("", Path(), 5, "crop", 1, 1, ""), time.monotonic())
    made.add(
        np.random.default_rng(0).normal(size=(len(labels), 3, 224, 224)).astype(np.float32) if images is None else images, labels
    )
    return made.answer(time.monotonic())


def test_what_is_lost_or_comes_twice_is_counted() -> None:
    """An epoch that has one picture twice in place of another says so, and how much of it came in the order of writing."""
    assert {name: tally([3, 1, 0, 2, 4])[name] for name in ("missing", "doubled", "in_order")} == {
        "missing": 0,
        "doubled": 0,
        "in_order": 0.0,
    }
    assert {name: tally([3, 1, 2, 2, 3])[name] for name in ("missing", "doubled", "in_order")} == {
        "missing": 2,
        "doubled": 2,
        "in_order": 0.4,
    }


def test_an_epoch_in_the_order_of_the_last_one_is_seen() -> None:
    """The share of pictures at the place of the epoch before: 0 without one, and of epochs of other lengths."""
    from protocol import repeated

    labels = np.arange(8)
    assert repeated(labels, None) == 0
    assert repeated(labels, labels.copy()) == 1
    assert repeated(labels, np.array([0, 1, 2, 3, 7, 6, 5, 4])) == 0.5
    assert repeated(labels, np.arange(7)) == 0


@pytest.mark.parametrize("first", [True, False], ids=["channels first", "channels last"])
def test_rotated_pictures_and_dropped_channels_are_counted(first: bool) -> None:
    """A black corner and a channel of one value are found in both layouts, and in no other picture."""
    from protocol import BLACK

    images = np.random.default_rng(0).normal(size=(5, 224, 224, 3)).astype(np.float32)
    images[1, :20, :20] = BLACK
    images[2, :, :, 1] = BLACK[1]
    images[3, :, :, 0] = BLACK[0]
    found = tally([0, 1, 2, 3, 4], images.transpose(0, 3, 1, 2) if first else images)
    assert (found["black_corners"], found["dropped_channels"]) == (0.2, 0.4)


def test_each_batch_is_checked() -> None:
    """A later batch of bytes ends the program too."""
    from protocol import Options, Tally

    made = Tally(Options("", Path(), 5, "crop", 1, 1, ""), time.monotonic())
    made.add(np.random.default_rng(0).normal(size=(2, 3, 224, 224)).astype(np.float32), [0, 1])
    with pytest.raises(SystemExit, match="not float32"):
        made.add(np.zeros((2, 3, 224, 224), np.uint8), [2, 3])


def test_a_shuffle_buffer_is_a_stated_share() -> None:
    """1,000 samples, of a small set an eighth, never so few that nothing is shuffled."""
    from protocol import Options

    assert [Options("", Path(), count, "crop", 1, 1, "").buffer for count in (9000, 2000, 70)] == [1000, 250, 16]


def test_shards_are_of_equal_size() -> None:
    """A writer that counts samples cuts no more shards than it is asked for."""
    from protocol import Plan

    assert [-(-count // Plan(16).samples(count)) for count in (2000, 9000, 160)] == [16, 16, 16]


@pytest.mark.parametrize(
    ("images", "why"),
    [
        (np.zeros((5, 224, 224, 3), np.uint8), "not float32"),
        (np.zeros((5, 3, 200, 224), np.float32), "not float32 of 224x224"),
        (np.full((5, 3, 224, 224), 0.5, np.float32), "aren't normalized"),
        (np.random.default_rng(0).normal(size=(4, 3, 224, 224)).astype(np.float32), "4 pictures with 5 labels"),
    ],
)
def test_batches_that_are_other_than_asked_for_are_refused(images: np.ndarray, why: str) -> None:
    """Bytes, other sizes and pictures that aren't normalized end the program with what they are."""
    with pytest.raises(SystemExit, match=why):
        tally([0, 1, 2, 3, 4], images)


def test_a_label_of_no_picture_ends_the_program() -> None:
    """Labels that aren't numbers of the set's pictures can't be checked."""
    with pytest.raises(SystemExit, match="of 5 pictures"):
        tally([0, 1, 2, 3, 5])
