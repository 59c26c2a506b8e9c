"""Other tools read our shards: the same keys, bytes and labels as the source's table says.

Stock webdataset and DALI's index layout are checked in every run; wids and `datasets` need environments of their own
(`make interop`).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import webdataset as wds

from shardify.format import index

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
stock = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves closing its tars to the collector

WIDS = """
import hashlib, json, sys
import wids
found, lengths = {}, {}
for split in ("train", "val"):
    path = f"{sys.argv[1]}/{split}-shardindex.json"
    classes = json.load(open(path))["classes"]
    samples = wids.ShardListDataset(path, transformations=[], cache_dir=sys.argv[2])
    lengths[split] = len(samples)
    for number in range(len(samples)):
        sample = samples[number]
        found[sample["__key__"]] = (
            hashlib.sha256(sample[".jpg"].read()).hexdigest(), classes[int(sample[".cls"].read())]
        )
print(json.dumps([lengths, found]))
"""

DATASETS = """
import hashlib, json, sys
import datasets
datasets.disable_progress_bars()
loaded = datasets.load_dataset(sys.argv[1])
found = {}
for split in loaded:
    classes = json.load(open(f"{sys.argv[1]}/{split}-shardindex.json"))["classes"]
    for row in loaded[split].cast_column("jpg", datasets.Image(decode=False)):
        found[row["__key__"]] = (hashlib.sha256(row["jpg"]["bytes"]).hexdigest(), classes[int(row["cls"])])
    assert loaded[split][0]["jpg"].size[0] > 100
print(json.dumps([{split: len(loaded[split]) for split in loaded}, found]))
"""


@dataclass(frozen=True)
class Packed:
    """A packed set's folder, and what its source says: key -> (SHA-256 of the picture, label as text)."""

    folder: Path
    truth: dict[str, tuple[str, str]]


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """120 pictures of the sample set, packed with configs/sample.yaml into several small shards."""
    folder = tmp_path_factory.mktemp("interop")
    settings = ["--source", "data", "--out", "shards", "--set", "shards.size=1MiB"]
    for command in (["sample", "data", "--count", "120"], ["build", str(ROOT / "configs" / "sample.yaml"), *settings]):
        subprocess.run([sys.executable, "-m", "shardify", *command], cwd=folder, capture_output=True, check=True)
    truth = {}
    for line in (folder / "data" / "train.csv").read_text().splitlines()[1:]:
        key, label = line.split(",")
        picture = folder / "data" / "train" / key[0] / key[1] / key[2] / f"{key}.jpg"
        truth[key] = (hashlib.sha256(picture.read_bytes()).hexdigest(), label)
    return Packed(folder / "shards", truth)


@pytest.fixture(scope="session")
def tool_python() -> Callable[[str], Path]:
    """Return the interpreter of a tool's own environment: .venv-interop/<tool>, made from <tool>.txt when that changes."""

    def make(tool: str) -> Path:
        wanted = (HERE / f"{tool}.txt").read_text()
        folder = ROOT / ".venv-interop" / tool
        python, stamp = folder / "bin" / "python", folder / "installed.txt"
        if not stamp.exists() or stamp.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            (folder.parent / ".gitignore").write_text("*\n")
            install = [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "-r",
                str(HERE / f"{tool}.txt"),
            ]
            subprocess.run(install, check=True)
            stamp.write_text(wanted)
        return python

    return make


@pytest.fixture(scope="session")
def run_in(tool_python: Callable[[str], Path]) -> Callable[..., str]:
    """Return a function that runs a program in a tool's environment, offline, and returns what it prints."""

    def run(tool: str, program: str, *arguments: str, cwd: Path) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment = clean | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(cwd / "hf")}
        command = [str(tool_python(tool)), "-c", program, *arguments]
        result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


@stock
def test_stock_webdataset_yields_what_the_table_says(packed: Packed) -> None:
    """Every row once, under its id, with its picture byte for byte and its own landmark, over both splits."""
    found: dict[str, tuple[str, str]] = {}
    for split in ("train", "val"):
        classes = json.loads((packed.folder / f"{split}-shardindex.json").read_text())["classes"]
        tars = sorted(str(path) for path in packed.folder.glob(f"{split}-*.tar"))
        for sample in wds.WebDataset(tars, shardshuffle=False):
            assert sample["__key__"] not in found
            assert {name for name in sample if not name.startswith("__")} == {"jpg", "cls"}
            found[sample["__key__"]] = (hashlib.sha256(sample["jpg"]).hexdigest(), classes[int(sample["cls"])])
    assert found == packed.truth


@stock
def test_stock_webdataset_decodes_our_members(packed: Packed) -> None:
    """Its own decoders take our fields: cls becomes an int."""
    tars = sorted(str(path) for path in packed.folder.glob("val-*.tar"))
    labels = [label for (label,) in wds.WebDataset(tars, shardshuffle=False).decode().to_tuple("cls")]
    assert labels
    assert all(isinstance(label, int) and 0 <= label < 10 for label in labels)


def lengths(folder: Path) -> dict[str, int]:
    """Return the samples of each split, as its manifest states them."""
    return {split: json.loads((folder / f"{split}-shardindex.json").read_text())["samples"] for split in ("train", "val")}


@pytest.mark.interop
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tool", "program"), [("wids", WIDS), ("datasets", DATASETS)])
def test_a_tool_reads_both_splits(packed: Packed, run_in: Callable[..., str], tmp_path: Path, tool: str, program: str) -> None:
    """wids opens the manifests, `datasets` the folder by its card: every key with its bytes and its label, in both splits."""
    counted, found = json.loads(run_in(tool, program, str(packed.folder), str(tmp_path / "cache"), cwd=tmp_path).splitlines()[-1])
    assert counted == lengths(packed.folder)
    assert {key: tuple(value) for key, value in found.items()} == packed.truth


def test_the_indexes_point_at_the_members_in_dalis_layout(packed: Packed) -> None:
    """By the .idx alone, line by line as DALI reads it, each picture's bytes are found in its tar."""
    seen = 0
    for path in sorted(packed.folder.glob("*.idx")):
        head, *lines = path.read_text().splitlines()
        tar = path.with_suffix(".tar").read_bytes()
        assert head == f"v1.2 {len(lines)}"
        assert len(index.load(path.read_bytes())) == len(lines)
        for line in lines:
            kind, offset, size, name = line.split()[:4]
            data = tar[int(offset) : int(offset) + int(size)]
            assert (kind, name.rpartition(".")[2], int(offset) % 512) == ("jpg", "jpg", 0)
            assert hashlib.sha256(data).hexdigest() == packed.truth[name.partition(".")[0]][0]
            seen += 1
    assert seen == len(packed.truth)
