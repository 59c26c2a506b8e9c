"""docs/ERRORS.md says what each class of error says: its messages are made again, and no class is missing."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mishaps import INNER, MISHAPS, page

import pipeline
import shardify
from pipeline.errors import PipelineError
from shardify.errors import ShardifyError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "ERRORS.md"


def classes(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    """Yield a class of errors and all below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from classes(below)


def plain(text: str) -> str:
    """Return a page with sizes in bytes left out, which differ between versions of encoders, and its lines joined."""
    return re.sub(r"[0-9a-f]{3,}", "N", " ".join(text.split()))


@pytest.mark.filterwarnings("ignore")
def test_the_page_says_what_is_said() -> None:
    """`python tests/support/mishaps.py` writes it; sizes of pictures may differ."""
    assert plain(page()) == plain(PAGE.read_text())


def test_no_class_is_missing() -> None:
    """Each class below the two bases has its message, but for bases and what is caught within."""
    for package in (shardify, pipeline):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found = {
        kind.__name__
        for base in (ShardifyError, PipelineError)
        for kind in classes(base)
        if kind.__module__.split(".")[0] in ("shardify", "pipeline")
    }
    told = {name.partition(" ")[0] for name in MISHAPS} | INNER
    assert found - told == set()
    assert all(f"## {name.partition(' ')[0]}\n" in PAGE.read_text() for name in MISHAPS)
