"""The page of cases and the tests that bear their ids agree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| ([A-Z][0-9]{2}) \| (.+) \| (.+) \|$", re.MULTILINE)
MARK = re.compile(r"pytest\.mark\.case\(([^()]*)\)")


def rows() -> list[tuple[str, str]]:
    """Return (id, what happens here) of each row of the page."""
    return [(found[1], found[3].strip()) for found in ROW.finditer((ROOT / "docs" / "cases.md").read_text())]


def borne() -> set[str]:
    """Return the ids that tests bear."""
    texts = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    return {name for text in texts for mark in MARK.findall(text) for name in re.findall(r'"([^"]*)"', mark)}


def test_each_case_of_the_page_is_held_by_a_test() -> None:
    """Each id of the page is borne by a test, unless its row says why not; no test bears another."""
    untested = {name for name, here in rows() if here.startswith("no test:")}
    told = {name for name, _ in rows()}
    assert borne() == told - untested


def test_the_page_has_each_case_once() -> None:
    """Ids are unique, stand in their kind's order, and each row names where the case was reported, or that it wasn't."""
    names = [name for name, _ in rows()]
    assert len(names) >= 50
    assert len(set(names)) == len(names)
    page = (ROOT / "docs" / "cases.md").read_text()
    assert len(re.findall(r"^\| [A-Z][0-9]", page, re.MULTILINE)) == len(names)  # no row is written otherwise
    for section in page.split("\n## ")[1:]:
        numbers = [found[1] for found in ROW.finditer(section)]
        assert numbers == sorted(numbers) and len({name[0] for name in numbers}) == 1
