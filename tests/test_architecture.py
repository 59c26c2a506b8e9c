"""The architecture: the import contracts hold, each of them can fail, and importing a package costs nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
OPEN_TO_PIPELINE = {"format", "errors"}
PLANTED = {  # file: (line to add, the contract that it breaks)
    "shardify/utils.py": ("", "shardify: shell"),
    "pipeline/helpers.py": ("", "pipeline: shell"),
    "shardify/items.py": ("import shardify.encode", "shardify: shell"),
    "pipeline/decode.py": ("import pipeline.batch", "pipeline: shell"),
    "shardify/scene.py": ("import os", "plans are pure"),
    "shardify/encode.py": ("import torch", "packing needs no trainer"),
    "pipeline/urls.py": ("import shardify.encode", "pipeline sees of shardify only format and errors"),
    "shardify/format/names.py": ("import numpy", "the format is the standard library only"),
    "shardify/sample.py": ("import cv2", "cv2"),
    "shardify/order.py": ("import pandas", "pandas"),
    "pipeline/device.py": ("import albumentations", "albumentations"),
    "pipeline/options.py": ("import braceexpand", "braceexpand"),
    "shardify/info.py": ("import pyarrow", "pyarrow"),
    "pipeline/samples.py": ("import webdataset", "webdataset"),
    "pipeline/remotes.py": ("import urllib3", "urllib3"),
    "shardify/verify.py": ("import obstore", "obstore"),
    "pipeline/stores/objects/finder.py": ("import obstore", "obstore"),
    "pipeline/prefetch/streams.py": ("import backports.zstd", "zstd"),
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages under `root`."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(root), "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


# make test-lowest and test-newest install no linters.
needs_linter = pytest.mark.skipif(importlib.util.find_spec("importlinter") is None, reason="needs import-linter")


def copy_packages(target: Path) -> None:
    """Copy what import-linter reads."""
    for package in ("shardify", "pipeline"):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)


@needs_linter
def test_the_import_contracts_hold() -> None:
    """No stage imports a stage, plans are pure, each library has one door."""
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_linter
def test_every_contract_can_break(tmp_path: Path) -> None:
    """An import planted against each contract is found: none of them is satisfied by accident."""
    copy_packages(tmp_path)
    for name, (line, _) in PLANTED.items():
        with (tmp_path / name).open("a") as file:
            file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    listed = result.stdout.partition("Broken contracts")[0]
    verdicts = {c["name"]: f"{c['name']} BROKEN" in listed for c in CONTRACTS}
    assert all(verdicts.values()), (verdicts, result.stdout)
    assert {contract for _, contract in PLANTED.values()} == {c["name"].partition(" >")[0] for c in CONTRACTS}
    for stray in ("utils", "helpers"):
        assert stray in result.stdout


def test_pipeline_is_kept_from_every_other_module_of_shardify() -> None:
    """The contract names all of shardify but format and errors, also modules that were added later."""
    modules = {path.stem for path in (ROOT / "shardify").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    contract = next(c for c in CONTRACTS if c["name"].startswith("pipeline sees"))
    named = {name.removeprefix("shardify.") for name in contract["forbidden_modules"]}
    assert named == modules - OPEN_TO_PIPELINE - {"__init__"}


@pytest.mark.parametrize("package", ["shardify", "pipeline"])
def test_importing_a_package_costs_nothing(package: str) -> None:
    """`import shardify` and `import pipeline` load no third-party library."""
    heavy = "numpy torch cv2 pandas albumentations webdataset pydantic yaml typer rich braceexpand"
    code = f"import sys, {package}; print([name for name in {heavy.split()!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_module_grows_beyond_400_lines() -> None:
    """A module that needs more decides two things."""
    long = {
        p.name: n
        for d in ("shardify", "pipeline")
        for p in (ROOT / d).rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert not long
