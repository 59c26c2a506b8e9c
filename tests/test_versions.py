"""The lowest versions that are tested are the lowest that pyproject.toml allows, and no others."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("train", "cloud", "parquet")
OF_THEIR_TIME = {"click"}  # typer's own: of a later one this typer is warned


def test_the_lowest_versions_are_those_of_the_ranges() -> None:
    """`make test-lowest` installs each runtime dependency at the lower bound of its range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    bounds = dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[a-z]+\])?[>=]=([0-9.]+)", "\n".join(wanted), re.MULTILINE))
    lines = (ROOT / "tests" / "versions" / "lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert len(bounds) == len(wanted) and pinned.keys() == bounds.keys() | OF_THEIR_TIME
    for name, bound in bounds.items():
        least, pin = (tuple(int(part) for part in text.split(".")) for text in (bound, pinned[name]))
        assert pin[: len(least)] == least and not any(pin[len(least) :][:1]), name


def test_the_tested_versions_lie_within_the_ranges() -> None:
    """constraints.txt pins every runtime dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[>=;<]", one)[0] for extra in EXTRAS for one in project["optional-dependencies"][extra]}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert names - pinned == set()
