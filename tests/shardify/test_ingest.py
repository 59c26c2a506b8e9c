"""Ingest: files whole and in order, asked for ahead, refused where they changed, the page cache left as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify import ingest
from shardify.ingest import ChangedFileError, File


def look_up(path: Path, **values: bool) -> File:
    """Return a file as it was looked up."""
    status = path.stat()
    return File(str(path), status.st_size, status.st_mtime_ns, **values)


@given(st.lists(st.integers(-1, 100), max_size=50), st.integers(0, 200))
def test_ahead_by_bytes(sizes: list[int], window: int) -> None:
    """Files come in their order, each once; no more than the window (and one file) is asked for beyond what was yielded."""
    asked: list[int] = []

    def files() -> Iterator[File]:
        for number, size in enumerate(sizes):
            asked.append(max(size, 0))
            yield File(f"/none/{number}", size)

    given_out = 0
    for number, file in enumerate(ingest.ahead(files(), window)):
        assert file == File(f"/none/{number}", sizes[number])
        given_out += 1
        beyond = asked[given_out:]
        assert sum(beyond[:-1]) <= window  # the last one made it more
        assert len(asked) == len(sizes) or sum(beyond) + asked[number] > window
    assert given_out == len(sizes)


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    """Bytes come as they are, whether or not the size was known."""
    (tmp_path / "a").write_bytes(b"12345")
    assert ingest.read(look_up(tmp_path / "a")) == ingest.read(File(str(tmp_path / "a"))) == b"12345"


@pytest.mark.parametrize("change", ["longer", "touched", "replaced"])
def test_a_file_that_changed(tmp_path: Path, change: str) -> None:
    """A file that isn't the one that was looked up is an error that says so: its bytes were planned otherwise."""
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    file = look_up(path)
    if change == "longer":
        path.write_bytes(b"123456")
    elif change == "replaced":
        (tmp_path / "b").write_bytes(b"54321")
        os.utime(tmp_path / "b", ns=(0, 1))
        (tmp_path / "b").rename(path)
    os.utime(path, ns=(0, file.mtime + (1 if change == "touched" else -1)))
    with pytest.raises(ChangedFileError, match="changed since it was looked up"):
        ingest.read(file)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    """A FIFO, a folder and a file that is gone are errors at once, and pass through the asking ahead."""
    os.mkfifo(tmp_path / "fifo")
    files = [File(str(tmp_path / name)) for name in ("fifo", "none", ".", "nul\0")]
    assert list(ingest.ahead(files)) == files
    for file, kind in zip(files, (OSError, FileNotFoundError, OSError, ValueError), strict=True):
        with pytest.raises(kind):
            ingest.read(file)


def cached(path: Path) -> bool:
    """Tell whether a file's first page is in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_the_page_cache_stays_as_it_was(tmp_path: Path) -> None:
    """What wasn't cached isn't after it was read; what was cached stays."""
    for name in ("cold", "warm", "probe"):
        path = tmp_path / name
        path.write_bytes(os.urandom(100_000))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if name != "warm":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        if cached(tmp_path / "probe"):  # not the file itself: a look may begin to read it
            pytest.skip("this file system keeps its pages")
    except OSError:
        pytest.skip("this file system doesn't tell what is cached")
    files = list(ingest.ahead(look_up(tmp_path / name) for name in ("cold", "warm")))
    assert [file.drop for file in files] == [True, False]
    for file in files:
        ingest.read(file)
    assert [cached(tmp_path / name) for name in ("cold", "warm")] == [False, True]


def test_reading_does_not_write(tmp_path: Path) -> None:
    """The time of the last access stays: a disk needn't write an inode for each file that is read."""
    path = tmp_path / "a"
    path.write_bytes(b"1")
    os.utime(path, ns=(1, 1))
    ingest.read(File(str(path)))
    assert path.stat().st_atime_ns == 1
