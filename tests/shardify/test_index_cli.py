"""`shardify index` at the command line: what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from packing import write_tar

from shardify.__main__ import app


def shardify(*arguments: object, cwd: Path) -> tuple[int, str, str]:
    """Run the command line; return its exit code, stdout and stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), chdir(cwd), pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments], prog_name="shardify")
    return int(ended.value.code or 0), out.getvalue(), errors.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tars of others."""
    for n in range(2):
        write_tar(tmp_path / f"train-{n}.tar", [(f"k{n}{i}", [("jpg", b"j"), ("cls", b"1")]) for i in range(5)])
    return tmp_path


def test_fine(folder: Path) -> None:
    """A good set exits with 0: the table and the manifest's place on stdout, progress on stderr."""
    code, out, errors = shardify("index", "train-{0..1}.tar", cwd=folder)
    assert code == 0 and "indexing" in errors
    assert out.splitlines()[1].split() == ["train", "2", "10", "22,528"]
    assert out.splitlines()[2] == str(folder.resolve() / "train-shardindex.json")


def test_json(folder: Path) -> None:
    """With --json stdout is one object: splits, manifests, remarks, problems."""
    code, out, _ = shardify("index", ".", "--split", "all", "--out", "out", "--headers-only", "--json", cwd=folder)
    answer = json.loads(out)
    assert code == 0 and answer["splits"] == {"all": {"shards": 2, "samples": 10, "bytes": 22528}}
    assert answer["manifests"] == {"all": str(folder.resolve() / "out" / "all-shardindex.json")}
    assert answer["notes"] == answer["problems"] == []


def test_problems_exit_with_1(folder: Path) -> None:
    """Problems exit with 1 and stand on stdout; --skip-bad makes remarks of bad tars, on stderr."""
    (folder / "train-2.tar").write_bytes(b"")
    code, out, _ = shardify("index", ".", cwd=folder)
    assert code == 1 and "train-2.tar at byte 0: the tar ends" in out and "not written, as 1 of 3 tars" in out
    code, out, errors = shardify("index", ".", "--skip-bad", cwd=folder)
    assert code == 0 and "left out: train-2.tar at byte 0" in errors and "train-2" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["index"], "TARS"), (["index", "none.tar"], "none.tar: not there"), (["index", ".", "--split", "a b"], "can't name a split")],
)
def test_wrong_usage_exits_with_2(folder: Path, arguments: list[str], said: str) -> None:
    """Wrong arguments exit with 2 and say which."""
    code, out, errors = shardify(*arguments, cwd=folder)
    assert code == 2 and said in errors and out == ""


def test_what_stands_there_needs_force(folder: Path) -> None:
    """Another tool's index is refused with 2, and replaced under --force."""
    (folder / "train-0.idx").write_text("jpg 512 1\n")
    code, _, errors = shardify("index", ".", cwd=folder)
    assert code == 2 and "--force" in errors
    assert shardify("index", ".", "--force", cwd=folder)[0] == 0
