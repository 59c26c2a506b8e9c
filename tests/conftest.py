"""Fixtures that tests share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings
from packing import PackedSet, pack

from shardify.sample import SampleSet, draw

# A shell that starts the tests in the background has SIGINT ignored, and what they start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No test is timed: a busy machine isn't a failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of each test's own: no test sees what another one, or the user, has read before."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "shardify" / "indexes"


@pytest.fixture(scope="session")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """200 pictures of 64x48 in 4 shards, five classes."""
    return pack(tmp_path_factory.mktemp("small"), 200, 4)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """The sample set as `make shards` draws it."""
    return draw(tmp_path_factory.mktemp("drawn"))
