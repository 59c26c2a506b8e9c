"""The cache folder: bounded, shared, the set that was used longest ago goes first and never one that is read."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ChangedError, SourceError
from pipeline.stores.cache import CHUNK, AbsentError, Cache, CachedFile, Facts, folder, folder_of

READS = """
import sys, time
from pathlib import Path
from pipeline.stores.cache import Cache, Facts
cache = Cache(Path(sys.argv[1]), 10**9)
lease = cache.lease(sys.argv[2])
entry = cache.open(Facts("http://nas/held.tar", 10, etag="v1", set=sys.argv[2]))
entry.hold(0, 10)
print("up", flush=True)
time.sleep(60)
"""


def put(cache: Cache, url: str, set_name: str, chunks: int = 4, etag: str = "") -> str:
    """Fetch an object of so many chunks; return its path."""
    size = chunks * CHUNK
    with cache.open(Facts(url, size, etag=etag, set=set_name)) as entry:
        claim = entry.claim(0, size)
        assert claim is not None
        with claim:
            for begin, end in claim.missing():
                claim.begin(begin)
                claim.take(begin, memoryview(b"x" * (end - begin)))
        return entry.path


def test_equal_names_never_meet(tmp_path: Path) -> None:
    """The whole URL names an object: a.tar of two servers, and of two folders, are two."""
    cache = Cache(tmp_path, 10**9)
    urls = ["http://a/x/a.tar", "http://b/x/a.tar", "http://a/y/a.tar", "http://a/x/a.tar?v=2"]
    assert len({put(cache, url, "s") for url in urls}) == len(urls)


def test_nobody_else_can_look(tmp_path: Path) -> None:
    """The folder and its files are the user's alone."""
    cache = Cache(tmp_path / "below" / "cache", 10**9)
    path = put(cache, "http://a/a.tar", "s")
    assert stat.S_IMODE((tmp_path / "below" / "cache").stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    cache.lease("s").close()
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "below" / "cache").iterdir()} == {0o600}


def test_the_set_used_longest_ago_goes_first(tmp_path: Path) -> None:
    """Room is made by whole sets, the oldest first, and no more than is needed."""
    cache = Cache(tmp_path, 20 * CHUNK)
    for name in ("old", "older", "new"):
        for number in range(2):
            put(cache, f"http://a/{name}{number}", name, chunks=3)
    put(cache, "http://a/old0", "old", chunks=3)  # used again
    assert [held.set for held in cache.sets()] == ["older", "new", "old"]
    assert cache.make_room(CHUNK)
    assert [held.set for held in cache.sets()] == ["older", "new", "old"]
    assert cache.make_room(7 * CHUNK)
    assert [(held.set, held.objects) for held in cache.sets()] == [("new", 2), ("old", 2)]
    assert not cache.make_room(30 * CHUNK)
    assert cache.sets() == []


def test_what_a_living_process_reads_stays(tmp_path: Path) -> None:
    """A set that a process reads isn't removed, by room or by clear; when the process is killed it is."""
    cache = Cache(tmp_path, 10**9)
    with subprocess.Popen([sys.executable, "-c", READS, tmp_path, "theirs"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        put(cache, "http://a/theirs", "theirs")
        put(cache, "http://a/mine", "mine")
        assert [(held.set, held.reading) for held in cache.sets()] == [("theirs", True), ("mine", False)]
        assert cache.clear() >= 4 * CHUNK
        assert [held.set for held in cache.sets()] == ["theirs"]
        assert not Cache(tmp_path, CHUNK).make_room(CHUNK)
        with pytest.raises(ChangedError, match=r"http://nas/held\.tar: is another version"):
            cache.open(Facts("http://nas/held.tar", 10, etag="v2", set="mine"))
        process.kill()
    cache.open(Facts("http://nas/held.tar", 10, etag="v2", set="mine")).close()
    cache.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_new_version_takes_the_place_of_one_that_nobody_reads(tmp_path: Path) -> None:
    """Another ETag, or length, is another object: nothing of the old one is there."""
    cache = Cache(tmp_path, 10**9)
    path = put(cache, "http://a/a.tar", "s", etag="v1")
    with cache.open(Facts("http://a/a.tar", 4 * CHUNK)) as entry:  # a server that tells no version
        assert entry.there(0, 4 * CHUNK)
    with cache.open(Facts("http://a/a.tar", 4 * CHUNK, etag="v2")) as entry:
        assert entry.path == path and not entry.there(0, 1)
    with cache.open(Facts("http://a/a.tar", 5 * CHUNK, etag="v2")) as entry:
        assert entry.size == 5 * CHUNK


@pytest.mark.parametrize("damage", [b"", b"x" * 100, bytes(100_000)])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    """A file that is none of an object's, or was cut, is as good as none."""
    cache = Cache(tmp_path, 10**9)
    path = Path(put(cache, "http://a/a.tar", "s"))
    path.write_bytes(damage)
    with pytest.raises(AbsentError, match=r"http://a/a\.tar"):
        CachedFile(str(path), "http://a/a.tar")
    with cache.open(Facts("http://a/a.tar", 4 * CHUNK, set="s")) as entry:
        assert not entry.there(0, 1)
    assert [held.objects for held in cache.sets()] == [1]


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    """Files without a name yet are removed once they are old; young ones are another process's."""
    cache = Cache(tmp_path, 10**9)
    for name, age in (("old", 3600.0), ("young", 0.0)):
        path = tmp_path / f".{name}.tmp"
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
    cache.used_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [".young.tmp"]


def test_the_room_is_that_of_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default half of what is free, with what the cache holds, at most 64 GiB; and never the disk's last bytes."""
    monkeypatch.setattr(Cache, "_free", lambda _self: 10 * 2**30)
    assert Cache(tmp_path).limit == 5 * 2**30
    monkeypatch.setattr(Cache, "_free", lambda _self: 10**15)
    assert Cache(tmp_path).limit == folder.DEFAULT_MOST
    monkeypatch.setattr(Cache, "_free", lambda _self: 2**20)
    assert Cache(tmp_path, 10**9).room() < 0


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its place, and a user without a home, are errors with the option that helps."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(SourceError, match=r"file.*cache_dir"):
        Cache(tmp_path / "file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache(None, 1).folder == tmp_path / "xdg" / "shardify" / "shards"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(SourceError, match="cache_dir"):
        Cache()


def test_many_make_one_object(tmp_path: Path) -> None:
    """Processes that open an object at once get one file."""
    code = (
        "import sys; from pathlib import Path; from pipeline.stores.cache import Cache, Facts; "
        "import os; e = Cache(Path(sys.argv[1]), 10**9).open(Facts('http://a/a', 10)); print(os.stat(e.path).st_ino, e.removed)"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert len({process.communicate()[0] for process in running}) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("kind", "shared"), [("ext4", False), ("tmpfs", False), ("overlay", False), ("nfs4", True), ("fuse.sshfs", True)]
)
def test_what_other_machines_see_too_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shared: bool) -> None:
    """A home on a file server is the home of many machines: each has a folder of its own in it."""
    monkeypatch.setattr(folder, "file_system", lambda _path: kind)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for given, base in ((None, tmp_path / "shardify" / "shards"), (str(tmp_path / "here"), tmp_path / "here")):
        found = folder_of(given)
        assert found.parent == base and found.name.startswith(socket.gethostname()) if shared else found == base
        assert folder_of(found) == found  # as messages name it


def test_whether_parts_are_given_back_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By giving one back; nothing of the trial is left."""
    cache = Cache(tmp_path, 10**9)
    assert cache.gives_back() and not list(tmp_path.iterdir())

    def refuse(*_given: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(folder, "punch", refuse)
    assert not cache.gives_back() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["a pipe", "nested", "short"])
def test_what_is_no_object_is_replaced(tmp_path: Path, what: str) -> None:
    """In an object's place a pipe isn't waited for, and a head of lists in lists isn't read to its end."""
    cache, facts = Cache(tmp_path, 2**30), Facts("http://h/a.tar", 10**5, '"v"', "", "s")
    cache.open(facts).close()
    path = Path(cache.path(facts.url))
    length = path.stat().st_size
    path.unlink()
    if what == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"x" if what == "short" else (b"[" * 4000).rjust(length, b"\0"))
    assert cache.find(facts.url) is None
    with cache.open(facts) as entry:
        assert entry.size == facts.size
    assert cache.find(facts.url) == facts


def test_windows_that_replace_an_old_version_at_once(tmp_path: Path) -> None:
    """While one removes it, the others wait for that: it isn't another job that reads the old one."""
    cache = Cache(tmp_path, 2**30)
    for number in range(20):
        url = f"http://h/{number}.tar"
        cache.open(Facts(url, 10**6, '"old"', "", "s")).close()
        together = threading.Barrier(8)

        def window(_number: int, url: str = url, together: threading.Barrier = together) -> str:
            together.wait()
            with cache.open(Facts(url, 10**6, '"new"', "", "s")) as entry:
                entry.hold(0, CHUNK)
                return entry.facts.etag

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(window, range(8))) == {'"new"'}


def test_one_file_of_many_that_are_made_at_once_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system has none (exFAT), all who open an object at the same moment open the same one."""

    def refuses(*_names: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuses)
    cache, gate = Cache(tmp_path, 10**9), threading.Barrier(8)

    def opened(number: int) -> int:
        gate.wait()
        with cache.open(Facts(f"http://a/{number // 8}.tar", CHUNK)) as entry:
            gate.wait()
            return os.stat(f"/proc/self/fd/{entry._descriptor}").st_ino  # noqa: PTH116

    with ThreadPoolExecutor(8) as pool:
        for object_number in range(25):
            found = set(pool.map(opened, range(8 * object_number, 8 * object_number + 8)))
            assert found == {os.stat(cache.path(f"http://a/{object_number}.tar")).st_ino}  # noqa: PTH116


def test_in_memory_the_default_is_half_of_what_the_job_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of tmpfs is the job's memory: a container's limit counts, not what the machine has."""
    monkeypatch.setattr(folder, "available_memory", lambda: 10**8)
    assert Cache(tmp_path / "a").limit > 10**8
    monkeypatch.setattr(folder, "file_system", lambda _path: "tmpfs")
    assert Cache(tmp_path / "b").limit == 10**8 // 2


def test_another_users_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is one user's: what can't be opened in it is an error with a way out."""
    cache = Cache(tmp_path, 10**9)
    path, real = put(cache, "http://a/0.tar", "s"), os.open

    def refuses(name: Any, *rest: Any, **more: Any) -> int:
        if str(name) == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(
        SourceError, match=r"\.object: can't be opened \(Permission denied\); a cache folder is one user's.*cache_dir"
    ):
        cache.open(Facts("http://a/0.tar", 4 * CHUNK))


def test_a_full_disk_at_the_start_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is fetched the folder needs a few bytes."""
    cache = Cache(tmp_path, 10**9)

    def refuses(*_given: Any, **_more: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", refuses)
    for act in (lambda: cache.lease("s"), cache.gives_back):
        with pytest.raises(SourceError, match=rf"^{tmp_path}: can't be used .*No space left on device.*cache_dir"):
            act()


def test_room_is_told_with_what_takes_it(tmp_path: Path) -> None:
    """Never below nothing, with what jobs read, the disk's own room, and what is left to others."""
    cache = Cache(tmp_path, 10 * 2**20)
    put(cache, "http://a/0.tar", "s", chunks=64)
    lease = cache.lease("s")
    assert re.fullmatch(
        r"0 MiB of room \(10 MiB are allowed, jobs read 4; \d+ MiB are free on the disk, of which 256 are left to others\)",
        cache.said_of(-(10**9)),
    )
    lease.close()
