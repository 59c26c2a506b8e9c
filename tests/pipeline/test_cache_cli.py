"""`python -m pipeline cache`: what the folder holds, and how it is emptied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from pipeline.stores.cache import CHUNK, Cache, Facts


def run(*arguments: str | Path) -> str:
    """Run the command and return what it prints."""
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command, for less than half a minute."""
    command = [sys.executable, "-m", "pipeline", "cache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def put(cache: Cache, url: str, set_name: str) -> None:
    """Fetch a chunk of an object."""
    with cache.open(Facts(url, CHUNK, set=set_name)) as entry:
        claim = entry.claim(0, CHUNK)
        assert claim is not None
        with claim:
            claim.begin(0)
            claim.take(0, memoryview(b"x" * CHUNK))


def test_what_is_held_is_shown_and_removed(tmp_path: Path) -> None:
    """A line a set, JSON for programs; clear leaves what a living process reads."""
    cache = Cache(tmp_path, 10**9)
    put(cache, "http://a/0.tar", "one")
    put(cache, "http://a/1.tar", "two")
    lease = cache.lease("two")
    lines = run("info", "--dir", tmp_path).splitlines()
    assert str(tmp_path) in lines[0] and len(lines) == 3
    assert "1 objects of http://a (one)" in lines[1] and "being read" not in lines[1]
    assert lines[2].endswith("being read")
    found = json.loads(run("info", "--dir", tmp_path, "--json"))
    assert [(each["set"], each["objects"], each["reading"]) for each in found["sets"]] == [("one", 1, False), ("two", 1, True)]
    assert "are being read and stay" in run("clear", "--dir", tmp_path)
    assert [held.set for held in cache.sets()] == ["two"]
    lease.close()
    assert "removed" in run("clear", "--dir", tmp_path)
    assert cache.sets() == []


def test_the_users_own_folder_is_the_default(cache_folder: Path) -> None:
    """Without --dir it is the one that loaders use; an empty one is no error."""
    assert str(cache_folder.parent / "shards") in run("info")
    assert "0.0 MB removed" in run("clear")


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """A typo is said, by its name, with 3; so is what is no folder."""
    (tmp_path / "file").write_text("x")
    cases = (("info", "typo", "no such folder"), ("clear", "typo", "no such folder"), ("info", "file", "isn't a folder"))
    for command, folder, says in cases:
        done = call(command, "--dir", tmp_path / folder)
        assert done.returncode == 3 and says in done.stderr and f"{tmp_path / folder}: " in done.stderr and "--dir" in done.stderr
    assert not (tmp_path / "typo").exists()


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    """A pipe or a folder that is called like an object: nobody waits for it, and the rest is cleared."""
    os.mkfifo(tmp_path / "f.object")
    (tmp_path / "d.object").mkdir()
    (tmp_path / "garbage.object").write_text("x")
    assert call("info", "--dir", tmp_path).returncode == 0
    assert call("clear", "--dir", tmp_path).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.object", "f.object"]
