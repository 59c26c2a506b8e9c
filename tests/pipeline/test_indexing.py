"""Indexes of tars that have none: remembered by state of the tar, by any number of processes, in bounded room, never trusted blindly."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from foreign import mk, samples

from pipeline import indexing
from pipeline.errors import ShardError
from pipeline.indexing import IndexCache, Stamp, scan
from pipeline.samples import read_index


def settled(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write a tar that was last changed long enough ago to be remembered."""
    mk(path, members)
    long_ago = time.time() - 60
    os.utime(path, (long_ago, long_ago))
    return path


def entries(folder: Path) -> list[Path]:
    """Return the files below a cache folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the path of each tar whose headers are read from now on."""
    read: list[str] = []
    headers = indexing.headers
    monkeypatch.setattr(indexing, "headers", lambda path: (read.append(path), headers(path))[1])
    return read


def test_headers_are_read_once(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look at a tar without an index reads no header, and finds the same."""
    path = str(settled(tmp_path / "a.tar", samples(0)))
    read = scans(monkeypatch)
    first = scan(path)
    assert [record.key for record in first] == ["k0000", "k0001", "k0002", "k0003"]
    assert scan(path) == first == read_index(path)
    assert read == [path]
    assert len(entries(cache_folder)) == 1


def test_names_with_blanks_and_half_characters(tmp_path: Path) -> None:
    """Names that DALI's layout can't hold, and undecodable ones, are remembered as they are."""
    path = str(settled(tmp_path / "a.tar", [("hot dog/1 2.seg.png", b"p"), ("hot dog/1 2.cls", b"5"), ("\udce4.jpg", b"j")]))
    first = scan(path)
    assert IndexCache().get(path, Stamp.of(path)) == first
    assert [record.key for record in first] == ["hot dog/1 2", "\udce4"]


@pytest.mark.parametrize("change", ["content", "time", "moved"])
def test_a_changed_tar_is_read_anew(tmp_path: Path, cache_folder: Path, change: str) -> None:
    """Another size, another time of change or another path: what was remembered isn't used, and of the same path it is dropped."""
    path = settled(tmp_path / "a.tar", samples(0))
    scan(str(path))
    if change == "content":
        settled(path, samples(4, 6))
    elif change == "time":
        settled(path, samples(4))
        os.utime(path, (time.time() - 30,) * 2)
    else:
        path = settled(path.rename(tmp_path / "b.tar"), samples(4))
    assert scan(str(path))[0].key == "k0004"
    assert len(entries(cache_folder)) == (2 if change == "moved" else 1)


def test_a_tar_that_may_still_change_is_not_remembered(tmp_path: Path, cache_folder: Path) -> None:
    """A tar that was written a moment ago could change within the same tick of the clock; so could one that changes meanwhile."""
    mk(tmp_path / "a.tar", samples(0))
    scan(str(tmp_path / "a.tar"))
    assert entries(cache_folder) == []
    path = str(settled(tmp_path / "b.tar", samples(0)))
    before = Stamp.of(path)
    settled(Path(path), samples(0, 9))
    IndexCache().put(path, before, scan(path)[:4])
    assert len(scan(path)) == 9
    assert [path.name.rpartition("-")[2] for path in entries(cache_folder)] == ["9.json.z"]


@pytest.mark.parametrize("damage", [b"", b"junk", b"\x78\x01cut", None])
def test_damaged_entries_are_ignored(tmp_path: Path, cache_folder: Path, damage: bytes | None) -> None:
    """An entry that is empty, cut, something else or of another tar is as good as none, and is replaced."""
    path = str(settled(tmp_path / "a.tar", samples(0)))
    first = scan(path)
    (entry,) = entries(cache_folder)
    good = entry.read_bytes()
    entry.write_bytes(indexing._dump(first[:2]) if damage is None else damage)
    assert scan(path) == first
    assert entry.read_bytes() == good


def test_counts_without_opening(tmp_path: Path, cache_folder: Path) -> None:
    """What is known of many tars comes from names alone; what isn't known is None."""
    paths = [str(settled(tmp_path / f"{n}.tar", samples(0, n + 1))) for n in range(5)]
    for path in paths[1:4]:
        scan(path)
    settled(tmp_path / "2.tar", samples(0, 9))
    for other in ("notes", "a-b-c-d.json.z", ".x.tmp"):  # whatever else lies there is passed over
        (cache_folder / "ab").mkdir(exist_ok=True)
        (cache_folder / "ab" / other).write_bytes(b"")
        (cache_folder / other).write_bytes(b"")
    assert IndexCache().count([(path, Stamp.of(path)) for path in paths]) == [None, 2, None, 4, None]


def test_room_is_bounded(tmp_path: Path) -> None:
    """Entries beyond the limit go, those used longest ago first; what a killed process left goes too."""
    cache = IndexCache(tmp_path / "cache", limit_bytes=400)
    paths = [str(settled(tmp_path / f"{n}.tar", samples(0))) for n in range(8)]
    for age, path in enumerate(reversed(paths)):
        cache.put(path, Stamp.of(path), scan(path))
        (entry,) = (e for e in entries(tmp_path / "cache") if e.name.startswith(indexing._key(path, Stamp.of(path))[0]))
        os.utime(entry, (time.time() - 100 + age,) * 2)
    debris = entry.with_name(".killed.tmp")
    debris.write_bytes(b"half")
    os.utime(debris, (0, 0))
    cache.prune()
    held = [path for path in paths if cache.get(path, Stamp.of(path))]
    assert 0 < len(held) < 8 and held == paths[: len(held)]
    assert sum(e.stat().st_size for e in entries(tmp_path / "cache")) <= 400
    assert not debris.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a folder nothing is remembered, nothing fails, and a log line says so once."""
    (tmp_path / "file").write_bytes(b"")
    cache = IndexCache(tmp_path / "file" / "cache")
    path = str(settled(tmp_path / "a.tar", samples(0)))
    with caplog.at_level("INFO", logger="pipeline"):
        for _ in range(2):
            cache.put(path, Stamp.of(path), scan(path))
    assert cache.get(path, Stamp.of(path)) is None
    assert caplog.text.count("can't be written") == 1


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_CACHE_HOME counts where it is absolute, as its specification says; else it is ~/.cache."""
    assert indexing.default_folder() == Path(os.environ["XDG_CACHE_HOME"]) / "shardify" / "indexes"
    monkeypatch.setenv("HOME", "/somewhere")
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert indexing.default_folder() == Path("/somewhere/.cache/shardify/indexes")


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where neither XDG_CACHE_HOME nor a home is known nothing is remembered, nothing lands in the working folder, and it is said once."""
    path = str(settled(tmp_path / "a.tar", samples(0)))
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert indexing.default_folder() is None
    indexing._cache_in.cache_clear()
    with caplog.at_level("INFO", logger="pipeline"):
        for _ in range(2):
            assert len(scan(path)) == 4
    assert indexing.cache().count([(path, Stamp.of(path))]) == [None]
    indexing.cache().prune()
    assert list((tmp_path / "here").iterdir()) == []
    assert caplog.text.count("no cache folder") == 1


def test_an_entry_that_cannot_be_removed(tmp_path: Path, cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An entry of an earlier state that can't be removed ends no epoch."""
    path = settled(tmp_path / "a.tar", samples(0))
    scan(str(path))
    (entry,) = entries(cache_folder)
    entry.with_name(entry.name.replace("-4.", "-5.")).mkdir()  # no file: `unlink` fails
    settled(path, samples(4, 6))
    with caplog.at_level("INFO", logger="pipeline"):
        assert len(scan(str(path))) == 6
    assert "can't be written" in caplog.text


def _scan_all(paths: list[str]) -> None:
    for path in paths * 3:
        assert len(scan(path)) == 4


def test_many_processes(tmp_path: Path, cache_folder: Path) -> None:
    """Processes that find, write and drop entries of the same tars at once see whole ones or none."""
    paths = [str(settled(tmp_path / f"{n}.tar", samples(0))) for n in range(20)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_scan_all, args=(paths,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(entries(cache_folder)) == 20


def test_damage_is_named(tmp_path: Path) -> None:
    """A cut tar is an error that names it, and nothing of it is remembered."""
    path = settled(tmp_path / "a.tar", samples(0))
    path.write_bytes(path.read_bytes()[:2500])
    with pytest.raises(ShardError, match=r"a\.tar"):
        scan(str(path))
    with pytest.raises(ShardError, match=r"missing\.tar"):
        scan(str(tmp_path / "missing.tar"))
