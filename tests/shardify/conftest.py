"""Fixtures that the packing side's tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import certificates

__all__ = ["certificates"]


@pytest.fixture
def no_root() -> Iterator[Path]:
    """Give up root's right to read and write everything for a test; return a folder of whom the test is run as then."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        os.seteuid(user)
