"""The benchmark: its programs deliver each picture once, one that doesn't has no number, and tables are made of results alone."""

from __future__ import annotations

import json
import os
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


def assert_all_came(answer: dict[str, Any], epochs: int) -> None:
    """Each epoch has each picture once."""
    found = [(epoch["samples"], epoch["missing"], epoch["doubled"]) for epoch in answer["epochs"]]
    assert found == [(COUNT, 0, 0)] * epochs
    assert all(0 < epoch["first_batch"] <= epoch["seconds"] for epoch in answer["epochs"])
    assert answer["from_start"] > answer["epochs"][0]["first_batch"]
    assert answer["versions"]["albumentations"] == "2.0.8"


@pytest.mark.parametrize(("script", "job", "epochs"), [("limit", "problem", 2), ("question", "crop", 1)], ids=["limit", "question"])
def test_programs_without_a_writer_deliver_each_picture(photos: Path, script: str, job: str, epochs: int) -> None:
    """The limit's processes and the question's loader have each picture once an epoch."""
    assert_all_came(run(sys.executable, script, "read", photos, "--count", COUNT, "--job", job, "--epochs", epochs), epochs)


@pytest.mark.parametrize(("script", "epochs"), [("ours", 2), ("webdataset", 1)])
def test_programs_read_what_their_writer_wrote(photos: Path, tmp_path: Path, script: str, epochs: int) -> None:
    """Labels are the pictures' numbers through each format; what was written is measured."""
    written = run(sys.executable, script, "write", photos, tmp_path / "set", "--shard-bytes", 100_000)
    assert written["files"] >= 4
    assert written["bytes"] >= sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    assert_all_came(run(sys.executable, script, "read", tmp_path / "set", "--count", COUNT, "--epochs", epochs), epochs)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", ["squashfs", "grain", "spdl", "litdata", "streaming", "datasets", "energon", "dali", "ffcv", "ray"]
)
def test_installed_peers_deliver_each_picture(photos: Path, tmp_path: Path, name: str) -> None:
    """As the others, each in its own environment, for two epochs of both jobs."""
    from environments import absent, python
    from programs import PROGRAMS, WRITERS

    program = PROGRAMS[name]
    writer = WRITERS[program.dataset]
    if why := absent(program) or absent(writer):
        pytest.skip(why)
    folder = tmp_path / program.dataset
    run(python(writer), writer.script, "write", photos, folder, "--shard-bytes", 100_000)
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


def test_what_is_lost_or_comes_twice_has_no_number() -> None:
    """An epoch that has one picture twice in place of another is a fault, one with all of them none."""
    from results import fault

    assert fault({"epochs": [tally([3, 1, 0, 2, 4])]}) is None
    assert fault({"epochs": [tally([3, 1, 0, 2, 2])]}) == "epoch 0: 1 pictures didn't come, 1 came more than once"
    assert fault({"epochs": [], "error": "exit code 1: no"}) == "exit code 1: no"


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


def epoch(seconds: float, **more: float) -> dict[str, Any]:
    """Return an epoch of 100 pictures."""
    return {"seconds": seconds, "first_batch": 0.5, "samples": 100, "batches": 2, "first_samples": 64} | {
        "missing": 0,
        "doubled": 0,
        **more,
    }


def outcome(program: str, number: int, *epochs: dict[str, Any]) -> dict[str, Any]:
    """Return a run as the results hold it."""
    given = {"place": "warm", "job": "crop", "round": number, "program": program, "workers": 2, "error": None, "peak": 0}
    return {**given, "from_start": 1.0, "epochs": list(epochs)}


def test_tables_show_medians_and_no_number_of_a_program_at_fault() -> None:
    """Rates are of the last epoch, shares of the same round's limit; a fault in one round takes all of a program's numbers."""
    from results import Results, tables

    runs = [
        *(outcome("limit", n, epoch(2), epoch(1)) for n in range(3)),
        *(outcome("ours", n, epoch(3), epoch(seconds)) for n, seconds in enumerate((2, 1.25, 1))),
        *(outcome("grain", n, epoch(3), epoch(1, missing=missing)) for n, missing in enumerate((0, 2, 0))),
    ]
    data = Results(Path("none.json"), {"count": 100, "rounds": 3, "batch": 64}).data
    shown = "\n".join(tables({**data, "runs": runs, "absent": {"ffcv": "no compiler"}})).splitlines()
    assert [line for line in shown if line.startswith("| ours")] == ["| ours | 2 | 80 | 0.80 | 3.0 | 1.2 | 2.40 | 0.5 |  |"]
    assert [line for line in shown if line.startswith("| grain")] == [
        "| grain | 2 | - | - | - | - | - | - | epoch 1: 2 pictures didn't come, 0 came more than once |"
    ]
    assert shown[-1] == "Not measured: ffcv (no compiler)."


def test_a_run_leaves_no_process_behind(tmp_path: Path) -> None:
    """What a program starts, in a session of its own too, ends with it; its memory is counted; its words are the reason of a failure."""
    from launch import launch

    lasting = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    done = launch(
        [sys.executable, "-c", f"{lasting}; import time; time.sleep(1); print({{}}); print('{{\"pid\": %d}}' % p.pid)"],
        patience=60,
        watch=True,
    )
    assert done.answer is not None and done.error is None
    assert done.peak > 1_000_000
    assert not Path("/proc", str(done.answer["pid"])).exists() or "Z" in Path("/proc", str(done.answer["pid"]), "stat").read_text()
    failed = launch([sys.executable, "-c", "raise SystemExit('no such set')"], patience=60)
    assert failed.error == "exit code 1: no such set"
    late = launch(["sleep", "1000"], patience=0.2)
    assert late.error == "it took longer than 0 s"


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a program is left out is said: never installed, or what the installation said."""
    import environments
    from programs import PROGRAMS

    monkeypatch.setattr(environments, "HOME", tmp_path)
    assert environments.absent(PROGRAMS["grain"]) == "not installed: make bench-setup"
    (tmp_path / "grain.failed").write_text("can't be installed here: no wheel\n")
    assert environments.absent(PROGRAMS["grain"]) == "can't be installed here: no wheel"
    assert environments.absent(PROGRAMS["ours"]) is None


def test_each_peer_has_pinned_requirements() -> None:
    """Each environment names the versions of what it measures, and torch's."""
    from programs import ENVIRONMENTS

    assert "torch==" in (BENCH / "requirements" / "common.txt").read_text()
    for name in ENVIRONMENTS:
        lines = (BENCH / "requirements" / f"{name}.txt").read_text().splitlines()
        assert lines[0] == "-r common.txt"
        build = BENCH / "requirements" / f"{name}.sh"
        assert "==" in lines[1] or "==" in build.read_text()
    assert os.access(BENCH / "requirements", os.R_OK)
