"""Each case of docs/cases.md is borne by a test, and each test that bears an id has its line there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_each_case_is_a_test_with_its_id() -> None:
    """But for those that the page says can't be one, and why."""
    lines = re.findall(r"^\| ([A-Z]\d\d) \| .+ \| (.+) \|$", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
    told, without = [name for name, _ in lines], {name for name, here in lines if here.startswith("no test:")}
    borne: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for arguments in re.findall(r"^@pytest\.mark\.case\(([^)]+)\)$", path.read_text(), re.MULTILINE):
            borne |= set(re.findall(r'"([A-Z]\d\d)"', arguments))
    assert len(told) == len(set(told)) == 83
    assert set(told) - without - borne == set()
    assert borne - set(told) == set() and not without & borne
