"""An object of the cache: every byte that is said to be there is the right one, whatever is fetched, dropped, read and cut off."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ShardError
from pipeline.stores.cache import CHUNK, AbsentError, Cache, CachedFile, Entry, Facts, layout

URL = "http://nas/a.tar"
SIZE = 5 * CHUNK + 1234

FETCH = """
import sys, time
from pathlib import Path
from pipeline.stores.cache import CHUNK, Cache, Facts
data = Path(sys.argv[2]).read_bytes()
entry = Cache(Path(sys.argv[1]), 10**9).open(Facts("http://nas/a.tar", len(data)))
print("up", flush=True)
while not entry.there(0, len(data)):
    for start in range(0, len(data), 3 * CHUNK):
        stop = min(start + 3 * CHUNK, len(data))
        claim = entry.claim(start, stop)
        if claim is None:
            continue
        with claim:
            for begin, end in claim.missing():
                claim.begin(begin)
                for at in range(begin, end, 10_000):
                    claim.take(at, memoryview(data)[at:min(at + 10_000, end)])
                    time.sleep(0.0002)
print("done", flush=True)
"""


def content(size: int = SIZE) -> bytes:
    """Return bytes none of which is zero: a hole would show."""
    return bytes(1 + at % 251 for at in range(size))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Return a cache that nothing is in."""
    return Cache(tmp_path / "cache", 10**9)


@pytest.fixture
def entry(cache: Cache) -> Iterator[Entry]:
    """Yield an object of which nothing is there."""
    with cache.open(Facts(URL, SIZE, set="s")) as opened:
        yield opened


def fetch(entry: Entry, data: bytes, start: int, stop: int, most: int | None = None) -> None:
    """Fetch what is missing of a range, in pieces of odd sizes; a connection that breaks after `most` bytes ends it."""
    claim = entry.claim(start, stop)
    assert claim is not None
    left = len(data) if most is None else most
    with claim:
        for begin, end in claim.missing():
            claim.begin(begin)
            at = begin
            while at < end and left > 0:
                size = min(7777, end - at, left)
                claim.take(at, memoryview(data)[at : at + size])
                at, left = at + size, left - size


@given(st.integers(0, 10**7), st.text(max_size=20), st.booleans(), st.integers(0, 2**63))
def test_a_head_says_what_it_was_told(size: int, text: str, vouched: bool, used: int) -> None:
    """What an object is comes back from its last page, and from no file of another length."""
    head = layout.Head(Facts(text, size, text[::-1], "", text * 2), used, os.urandom(16), vouched)
    page = layout.dump(head)
    assert layout.load(page, layout.file_size(size)) == head
    assert layout.load(page, layout.file_size(size) + 1) is None
    assert layout.load(bytes(len(page)), layout.file_size(size)) is None
    assert layout.table_at(size) >= size and layout.file_size(size) >= layout.table_at(size) + layout.chunks(size) + len(page)


def test_a_url_of_thousands_of_signs(cache: Cache) -> None:
    """A long URL has an object of its own like any other."""
    with cache.open(Facts("http://nas/" + "x" * 9000, 10)) as one, cache.open(Facts("http://nas/" + "x" * 9001, 10)) as other:
        assert one.path != other.path


OPERATIONS = st.one_of(
    st.tuples(st.just("fetch"), st.integers(0, SIZE), st.integers(0, SIZE), st.one_of(st.none(), st.integers(0, SIZE))),
    st.tuples(st.just("drop"), st.integers(0, SIZE), st.integers(0, SIZE), st.none()),
    st.tuples(st.just("hold"), st.integers(0, SIZE), st.integers(0, SIZE), st.none()),
    st.tuples(st.just("let go"), st.integers(0, SIZE), st.integers(0, SIZE), st.none()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, max_size=12), st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), min_size=1, max_size=6))
def test_no_byte_is_ever_wrong(operations: list[tuple[str, int, int, int | None]], reads: list[tuple[int, int]]) -> None:
    """After any fetches, cut anywhere, and drops: what is read is right or absent; what was fetched is there; what is held stays."""
    data, present, held = content(), bytearray(SIZE), set[tuple[int, int]]()
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder), 10**9)
        with cache.open(Facts(URL, SIZE)) as entry, cache.open(Facts(URL, SIZE)) as other:
            for what, one, two, most in operations:
                start, stop = min(one, two), max(one, two)
                if what == "fetch" and start < stop:
                    fetch(entry, data, start, stop, most)
                    if most is None:
                        present[start:stop] = b"\1" * (stop - start)
                elif what == "drop":
                    freed = entry.drop(start, stop)
                    assert freed is not None or any(a < stop and start < b for a, b in held)
                    if freed:
                        present[start:stop] = bytes(stop - start)
                elif what == "hold":
                    other.hold(start, stop)
                    held.add((start, stop))
                else:
                    other.let_go(start, stop)
                    held = {(a, b) for lo, hi in held for a, b in ((lo, min(hi, start)), (max(lo, stop), hi)) if a < b}
            file = CachedFile(entry.path, URL)
            for one, two in reads:
                start, stop = min(one, two), max(one, two)
                try:
                    assert file.read(start, stop - start) == data[start:stop]
                except AbsentError:
                    assert stop > start and not all(present[start:stop])
            file.close()


def test_what_is_dropped_is_given_back(entry: Entry) -> None:
    """A drop gives whole chunks back to the disk, and leaves those that are cut."""
    data = content()
    fetch(entry, data, 0, SIZE)
    full = Path(entry.path).stat().st_blocks
    assert entry.drop(CHUNK - 1, 3 * CHUNK + 1) == 2 * CHUNK
    assert Path(entry.path).stat().st_blocks <= full - 2 * CHUNK // 512
    assert entry.missing(0, SIZE) == [(CHUNK, 3 * CHUNK)]
    assert entry.drop(CHUNK, 3 * CHUNK) == 0
    assert entry.drop(4 * CHUNK, SIZE) == SIZE - 4 * CHUNK


def test_one_fetches_at_a_time(cache: Cache, entry: Entry) -> None:
    """What one fetches another can't, nor give back; when it is done, or closed, it can."""
    with cache.open(Facts(URL, SIZE)) as other:
        claim = entry.claim(CHUNK, 2 * CHUNK)
        assert claim is not None
        with claim:
            assert other.claim(0, 2 * CHUNK) is None
            assert other.drop(CHUNK, 2 * CHUNK) is None
            free = other.claim(2 * CHUNK, SIZE)
            assert free is not None
            with free:
                pass
        assert other.claim(0, SIZE) is not None
        assert entry.claim(0, 10) is None
        other.close()
        assert entry.claim(0, 10) is not None


def test_what_is_read_stays(cache: Cache, entry: Entry) -> None:
    """A range that another window holds isn't given back, whatever is asked; what lies beside it is."""
    fetch(entry, content(), 0, SIZE)
    with cache.open(Facts(URL, SIZE)) as other:
        other.hold(2 * CHUNK, 2 * CHUNK + 1)
        assert entry.drop(0, SIZE) is None
        assert entry.missing(0, SIZE) == []
        assert entry.drop(0, 2 * CHUNK) == 2 * CHUNK
        other.let_go(2 * CHUNK, 2 * CHUNK + 1)
        assert entry.drop(2 * CHUNK, SIZE) == SIZE - 2 * CHUNK


def verified(entry: Entry, sha256: str) -> bool:
    """Compare an object with its hash, and put it on the medium."""
    if not entry.check(sha256):
        return False
    entry.settle()
    return True


def test_a_hash_is_checked_when_all_is_there(entry: Entry) -> None:
    """The whole object is compared with its hash once; another object's bytes go, and the error names both hashes."""
    data = content()
    right, wrong = hashlib.sha256(data).hexdigest(), "0" * 64
    assert not verified(entry, right)
    fetch(entry, data, 0, SIZE)
    assert verified(entry, right)
    assert verified(entry, wrong)  # it was checked before, and nothing has changed
    assert entry.drop(0, CHUNK) == CHUNK
    fetch(entry, data, 0, CHUNK)
    with pytest.raises(ShardError, match=rf"{URL}: .*{right}.*{wrong}"):
        verified(entry, wrong)
    assert entry.missing(0, SIZE) == [(0, SIZE)]


def test_after_a_power_cut_only_what_was_vouched_for_is_there(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run of the machine trusts what was put on the medium as a whole, and nothing else."""
    data = content()
    with cache.open(Facts(URL, SIZE)) as entry:
        fetch(entry, data, 0, SIZE)
    with cache.open(Facts(URL, SIZE)) as again:
        assert again.there(0, SIZE)
    monkeypatch.setattr(layout, "boot_id", lambda: b"2" * 16)
    with cache.open(Facts(URL, SIZE)) as entry:
        assert entry.missing(0, SIZE) == [(0, SIZE)]
        fetch(entry, data, 0, SIZE)
        assert verified(entry, hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(layout, "boot_id", lambda: b"3" * 16)
    with cache.open(Facts(URL, SIZE)) as entry:
        assert entry.there(0, SIZE)
        assert entry.drop(0, CHUNK)
    monkeypatch.setattr(layout, "boot_id", lambda: b"4" * 16)
    with cache.open(Facts(URL, SIZE)) as entry:
        assert entry.missing(0, SIZE) == [(0, SIZE)]


def test_an_object_of_no_bytes(cache: Cache) -> None:
    """An empty object is there at once."""
    with cache.open(Facts(URL, 0)) as entry:
        assert entry.there(0, 0) and entry.missing(0, 0) == []
        assert verified(entry, hashlib.sha256(b"").hexdigest())
        file = CachedFile(entry.path, URL)
        assert file.read(0, 0) == b""
        file.close()


def test_reading_beyond_the_end_is_another_error(entry: Entry) -> None:
    """Bytes that the object doesn't have aren't waited for."""
    file = CachedFile(entry.path, URL)
    with pytest.raises(ShardError, match=rf"{URL}: ends at byte {SIZE}") as caught:
        file.read(SIZE - 1, 2)
    assert not isinstance(caught.value, AbsentError)
    file.close()


def test_two_that_are_killed_again_and_again(tmp_path: Path) -> None:
    """Processes that fetch one object at once and are killed at random leave nothing wrong, and the last ones finish it."""
    data, source, folder = content(40 * CHUNK + 17), tmp_path / "source", tmp_path / "cache"
    source.write_bytes(data)
    draw, cache = random.Random(7), Cache(folder, 10**9)
    command = [sys.executable, "-c", FETCH, folder, source]
    for last in (*[False] * 8, True):
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for process in running:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
        if not last:
            time.sleep(draw.uniform(0, 0.15))
            for process in running:
                process.kill()
        for process in running:
            process.communicate(timeout=60)
            assert not last or process.returncode == 0
        with cache.open(Facts(URL, len(data))) as entry:
            file = CachedFile(entry.path, URL)
            gone = entry.missing(0, len(data))
            starts = [0, *(end for _, end in gone)]
            for start, stop in zip(starts, [*(begin for begin, _ in gone), len(data)], strict=True):
                assert file.read(start, stop - start) == data[start:stop]
            file.close()
            assert not last or gone == []
    assert [path.suffix for path in folder.iterdir()] == [".object"]


def test_a_full_disk_leaves_what_is_there(tmp_path: Path) -> None:
    """A write that finds no room is the system's error, and what is marked is there."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        data = content(40 * CHUNK)
        cache = Cache(folder / "cache", 10**9)
        with cache.open(Facts(URL, len(data))) as entry:
            with pytest.raises(OSError, match="No space left"):
                fetch(entry, data, 0, len(data))
            (begin, end), *more = entry.missing(0, len(data))
            assert not more and begin > 0 and end == len(data)
            file = CachedFile(entry.path, URL)
            assert file.read(0, begin) == data[:begin]
            file.close()
            assert cache.room() < 0
            assert entry.drop(0, begin) == begin
            fetch(entry, data, 0, 4 * CHUNK)
    finally:
        subprocess.run(["umount", folder], check=True)
