"""The Makefile: says what it can do, installs wholly or not at all, and passes on what the user names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "Makefile").read_text()
STAMP = ".venv/.shardify-pack"


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make in `folder`, as from a shell (not as a part of the make that may run the tests)."""
    inherited = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "PYTHON", "CONFIG", "SOURCE", "OUT", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder, with a blank in its name, that holds the Makefile and what its rules depend on."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def installed(clone: Path) -> None:
    """Pretend that packing's part is installed."""
    (clone / ".venv").mkdir()
    (clone / STAMP).touch()


def test_help_is_the_default_and_lists_every_target(clone: Path) -> None:
    """`make` lists each phony target, and installs nothing."""
    result = make(clone)
    phony = re.search(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)
    assert phony is not None
    assert re.findall(r"^  make ([a-z-]+) +\S", result.stdout, re.MULTILINE) == re.findall(r"^([a-z-]+):.*## ", TEXT, re.MULTILINE)
    assert set(re.findall(r"^  make ([a-z-]+)", result.stdout, re.MULTILINE)) == set(phony[1].split())
    assert not (clone / ".venv").exists()


def test_a_python_too_old_is_named_and_leaves_nothing(clone: Path) -> None:
    """An interpreter that is none of 3.11 or newer ends with a message that says how to name another."""
    result = make(clone, "shards", "PYTHON=/bin/false")
    assert result.returncode == 2
    assert "/bin/false is no Python of 3.11 or newer" in result.stderr
    assert "make PYTHON=" in result.stderr
    assert not (clone / ".venv").exists()


def test_a_failed_install_leaves_no_stamp(clone: Path) -> None:
    """Where pip fails, the next make installs again: there is an environment, but no stamp."""
    (clone / "pyproject.toml").write_text("[project")
    result = make(clone, "shards")
    assert result.returncode == 2
    assert (clone / ".venv" / "bin" / "python").exists()
    assert not (clone / STAMP).exists()


def test_the_sample_set_is_drawn_only_by_default(clone: Path) -> None:
    """Without arguments data/sample is drawn and packed; a source of the user's is packed as named, and nothing drawn."""
    installed(clone)
    default = make(clone, "-n", "shards").stdout
    assert "shardify sample data/sample" in default
    assert 'shardify build "configs/sample.yaml"   --if-missing --resume' in default
    assert "--resume" in default and "--resume" not in make(clone, "-n", "shards", "ARGS=--force").stdout  # they exclude each other
    own = make(clone, "-n", "shards", "CONFIG=configs/glr2020.yaml", "SOURCE=/data/my set", "OUT=/data/shards").stdout
    assert "shardify sample" not in own
    assert 'shardify build "configs/glr2020.yaml" --source "/data/my set" --out "/data/shards" --if-missing --resume' in own


def test_installed_once_it_is_installed_until_the_requirements_change(clone: Path) -> None:
    """A stamp newer than pyproject.toml and constraints.txt means no pip; an older one means pip again."""
    installed(clone)
    assert "pip install" not in make(clone, "-n", "shards").stdout
    os.utime(clone / STAMP, (1, 1))
    assert "pip install" in make(clone, "-n", "shards").stdout


def test_clean_keeps_the_users_data(clone: Path) -> None:
    """`make clean` deletes what make made for itself; data/ and shards/ stay."""
    installed(clone)
    for name in (
        "data/sample/train.csv",
        "shards/sample/train-000000.tar",
        "shardify/x.py",
        "tests/x.py",
        "pipeline/x.py",
        "examples/x.py",
    ):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).touch()
    result = make(clone, "clean")
    assert result.returncode == 0, result.stderr
    assert not (clone / ".venv").exists()
    assert (clone / "data/sample/train.csv").exists()
    assert (clone / "shards/sample/train-000000.tar").exists()
