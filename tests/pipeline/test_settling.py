"""Whole objects are compared with their hashes, and put on the medium beside what else is fetched."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.errors import ShardError
from pipeline.prefetch.settling import Settler
from pipeline.stores.cache import CHUNK, Cache, Entry, Facts

SIZE = 3 * CHUNK + 5
DATA = os.urandom(SIZE)
RIGHT = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A cache folder."""
    return Cache(tmp_path, 10**9)


@pytest.fixture
def told() -> list[tuple[str, str, OSError]]:
    """What couldn't be written."""
    return []


@pytest.fixture
def settler(told: list[tuple[str, str, OSError]]) -> Iterator[Settler]:
    """A settler that is closed afterwards."""
    made = Settler(lambda *said: told.append(said))
    yield made
    made.close()


def opening(cache: Cache, name: str = "0") -> Callable[[], Entry]:
    """Return what opens an object, all of which is there."""
    facts = Facts(f"http://a/{name}.tar", SIZE)
    with cache.open(facts) as entry:
        claim = entry.claim(0, SIZE)
        assert claim is not None
        with claim:
            for start, _ in claim.missing():
                claim.begin(start)
                claim.take(start, memoryview(DATA))
    return lambda: cache.open(facts)


def vouched(opened: Callable[[], Entry]) -> bool:
    """Tell whether an object is on the medium."""
    with opened() as entry:
        return entry.vouched


def test_what_stays_is_on_the_medium_and_what_goes_need_not_be(settler: Settler, cache: Cache) -> None:
    """Both are compared; only the first is vouched for after this run of the machine."""
    for name, stays in (("0", True), ("1", False)):
        opened = opening(cache, name)
        with opened() as entry:
            assert settler.verify(opened, entry.path, RIGHT, stays=stays)
        settler._pool.submit(int).result()  # what came before it is done
        assert vouched(opened) == stays
        with opened() as entry:
            assert entry.drop(0, SIZE) == SIZE  # nobody holds it any more


def test_other_bytes_are_refused_and_gone(settler: Settler, cache: Cache) -> None:
    """A wrong hash is an error each time, and none of the object is there, nor on the disk."""
    opened = opening(cache)
    with opened() as entry:
        path = entry.path
    with pytest.raises(ShardError, match="came to sha256"):
        settler.verify(opened, path, "0" * 64, stays=True)
    with opened() as entry:
        assert entry.missing(0, SIZE) == [(0, SIZE)]
    opening(cache)
    with pytest.raises(ShardError, match="came to sha256"):
        settler.verify(opened, path, "0" * 64, stays=True)


def test_a_second_window_is_told_that_the_first_compares(settler: Settler, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that see an object whole one compares it, and the other is told so at once; afterwards it is told that it was."""
    opened, begun, go_on = opening(cache), threading.Event(), threading.Event()
    with opened() as entry:
        path = entry.path
    check = Entry.check

    def slow(entry: Entry, sha256: str) -> bool:
        begun.set()
        assert go_on.wait(10)
        return check(entry, sha256)

    monkeypatch.setattr(Entry, "check", slow)
    first = threading.Thread(target=settler.verify, args=(opened, path, RIGHT), kwargs={"stays": True})
    first.start()
    assert begun.wait(10)
    assert not settler.verify(opened, path, RIGHT, stays=True)
    go_on.set()
    first.join()
    assert settler.verify(opened, path, RIGHT, stays=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_written_is_told_and_gone(
    settler: Settler, told: list[tuple[str, str, OSError]], cache: Cache, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Pages that a disk didn't take may be lost at any time: none of the object is there any more, and its room is free."""

    def fails(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    opened = opening(cache)
    with opened() as entry:
        path = entry.path
        monkeypatch.setattr(os, "fsync", fails)
        assert settler.verify(opened, path, RIGHT, stays=True)
        settler._pool.submit(int).result()
        assert entry.missing(0, SIZE) == [(0, SIZE)]
    assert [(url, where, error.errno) for url, where, error in told] == [("http://a/0.tar", path, number)]
    assert cache.used_bytes() < 2 * CHUNK  # its head and table
    monkeypatch.undo()
    opening(cache)
    assert settler.verify(opened, path, RIGHT, stays=True)


def test_many_wait_for_the_medium_in_few_places(settler: Settler, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes long holds up whoever fetches: what waits for it can't be given back, so it isn't without bounds."""
    settle, go_on, waiting = Entry.settle, threading.Event(), list[str]()

    def slow(entry: Entry) -> None:
        waiting.append(entry.path)
        assert go_on.wait(10)
        settle(entry)

    monkeypatch.setattr(Entry, "settle", slow)
    threads = []
    for number in range(8):
        opened = opening(cache, str(number))
        with opened() as entry:
            path = entry.path
        arguments = {"target": settler.verify, "args": (opened, path, RIGHT), "kwargs": {"stays": True}}
        threads.append(threading.Thread(**arguments))  # type: ignore[arg-type]
        threads[-1].start()
        threads[-1].join(0.2)
    assert sum(thread.is_alive() for thread in threads) == 4
    go_on.set()
    for thread in threads:
        thread.join(10)
    settler._pool.submit(int).result()
    assert all(vouched(opening(cache, str(number))) for number in range(8))


def test_closing_lets_go_of_what_it_has_not_come_to(told: list[tuple[str, str, OSError]], cache: Cache) -> None:
    """It isn't vouched for, nobody holds it, and nothing is told."""
    settler, opened, go_on = Settler(lambda *said: told.append(said)), opening(cache), threading.Event()
    settler._pool.submit(go_on.wait, 10)
    with opened() as entry:
        assert settler.verify(opened, entry.path, RIGHT, stays=True)
    threading.Timer(0.2, go_on.set).start()
    settler.close()
    assert not vouched(opened) and not told
    with opened() as entry:
        assert entry.drop(0, SIZE) == SIZE
