"""The writer: shards cut by their written bytes, the same to the last bit, and whole or not there at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gallery import tree
from hypothesis import given
from hypothesis import strategies as st
from residence import chill, resident

from shardify import order, writer
from shardify.errors import StorageError
from shardify.format import index, tar
from shardify.format.manifest import ShardEntry
from shardify.items import Sample

FULL_DISK = """
import sys
from pathlib import Path
from shardify import writer
from shardify.errors import StorageError
from shardify.items import Sample
samples = (Sample(f"k{n}", (("jpg", bytes(300_000)), ("cls", b"1"))) for n in range(1000))
try:
    for number in range(1000):
        writer.write_shard([next(samples) for _ in range(3)], Path(sys.argv[1]), f"train-{number:06d}.tar", note=str)
except StorageError as error:
    print(error)
"""


def samples(sizes: list[int]) -> Iterator[Sample]:
    """Yield samples whose pictures have these sizes."""
    for number, size in enumerate(sizes):
        yield Sample(f"key{number}", (("jpg", bytes([number % 251]) * size), ("cls", b"%d" % number)))


def write(sizes: list[int], folder: Path, limit: int) -> list[ShardEntry]:
    """Write samples of these sizes, cut as a build cuts them; return the entries."""
    written = [tar.member_bytes(size) + tar.member_bytes(len(str(number))) for number, size in enumerate(sizes)]
    cuts = order.cut(np.array(written, np.int64), limit, len(tar.END)).tolist()
    every = list(samples(sizes))
    return [
        writer.write_shard(every[start:stop], folder, f"train-{number:06d}.tar", note=str)
        for number, (start, stop) in enumerate(pairwise(cuts))
    ]


@given(st.lists(st.integers(0, 5000), max_size=25), st.integers(1, 20_000))
@pytest.mark.case("S04")
def test_the_cut_is_the_plans(sizes: list[int], limit: int) -> None:
    """The writer ends its shards where order.cut says, counted as written: never above the limit, none empty (S04)."""
    with tempfile.TemporaryDirectory() as name:
        entries = write(sizes, Path(name), limit)
        on_disk = {path.name: path.stat().st_size for path in Path(name).glob("*.tar")}
    written = [tar.member_bytes(size) + tar.member_bytes(len(str(number))) for number, size in enumerate(sizes)]
    cuts = order.cut(np.array(written, np.int64), limit, len(tar.END))
    assert [entry.nsamples for entry in entries] == np.diff(cuts).tolist()
    assert all(entry.filesize <= limit or entry.nsamples == 1 for entry in entries)
    assert {entry.name: entry.filesize for entry in entries} == on_disk
    assert [entry.name for entry in entries] == [f"train-{number:06d}.tar" for number in range(len(entries))]


@pytest.mark.case("T07")
def test_contents(tmp_path: Path) -> None:
    """Shards hold every sample once and in order, plain, read by the standard library; entry and index say what is there."""
    sizes = [700, 0, 512, 5000, 1, 80, 2000]
    entries = write(sizes, tmp_path, 6000)
    expected = [(f"{sample.key}.{field}", data) for sample in samples(sizes) for field, data in sample.members]
    found = []
    for entry in entries:
        raw = (tmp_path / entry.name).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (entry.filesize, entry.sha256)
        with tarfile.open(tmp_path / entry.name, "r:") as archive:
            for info in archive:
                assert (info.mode, info.uid, info.gid, info.mtime, info.uname, info.gname) == (0o644, 0, 0, 0, "", "")
                assert info.isreg() and info.pax_headers == {}
                member = archive.extractfile(info)
                assert member is not None
                found.append((info.name, member.read()))
        with (tmp_path / entry.name).open("rb") as file:
            records = list(tar.samples(file, len(raw)))
        assert index.load((tmp_path / entry.name).with_suffix(".idx").read_bytes()) == records
        assert raw.endswith(tar.END) and entry.nsamples == len(records)
    assert found == expected
    assert len(list(tmp_path.iterdir())) == 2 * len(entries)


@pytest.mark.case("T08")
def test_the_same_bytes_twice(tmp_path: Path) -> None:
    """The same samples give the same files, to the last bit (T08)."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write([700, 0, 512, 5000], tmp_path / name, 6000)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_nothing_from_nothing(tmp_path: Path) -> None:
    """No samples make no file."""
    assert write([], tmp_path, 1000) == []
    assert tree(tmp_path) == {}


def test_no_page_of_a_shard_stays_cached(tmp_path: Path) -> None:
    """A set that is written doesn't fill the machine's memory: not while a long shard is written, and not after."""
    (tmp_path / "probe").write_bytes(bytes(100_000))
    chill(tmp_path / "probe")
    written = 0
    most = 0

    def long() -> Iterator[Sample]:
        nonlocal written, most
        for sample in samples([10**6] * 300):
            yield sample
            written += 10**6
            if written % (20 * 10**6) == 0:
                with (tmp_path / "a-000000.tar.partial").open("rb") as file:
                    os.fsync(file.fileno())  # as fast as a disk can be
                most = max(most, resident(tmp_path / "a-000000.tar.partial"))

    entry = writer.write_shard(long(), tmp_path, "a-000000.tar", note=str)
    assert entry.filesize > 300_000_000
    assert most <= writer.TRAIL_BYTES + 40 * 10**6
    assert resident(tmp_path / "a-000000.tar") == 0


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """When the samples break off, the unfinished shard is gone and the error is theirs."""

    def broken() -> Iterator[Sample]:
        yield from samples([3000, 3000, 3000])
        raise OSError("cable")

    with pytest.raises(OSError, match="cable"):
        writer.write_shard(broken(), tmp_path, "train-000000.tar", note=str)
    assert tree(tmp_path) == {}


def test_what_is_noted_is_on_the_medium_and_has_no_name_yet(tmp_path: Path) -> None:
    """A shard is told of when it is whole, before it gets its name: a crash between the two loses nothing."""
    seen: list[tuple[ShardEntry, list[str]]] = []
    entry = writer.write_shard(samples([10]), tmp_path, "a-000000.tar", note=lambda e: seen.append((e, sorted(tree(tmp_path)))))
    assert seen == [(entry, ["a-000000.idx", "a-000000.tar.partial"])]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 2 MB, where that may be done."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.case("S01")
def test_a_full_disk(small_disk: Path) -> None:
    """A full disk is an error that names the file and says what to do; no half file stays (S01)."""
    result = subprocess.run([sys.executable, "-c", FULL_DISK, small_disk], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"{small_disk}/train-000002.tar.partial: No space left on device; free some space")
    assert sorted(tree(small_disk)) == ["train-000000.idx", "train-000000.tar", "train-000001.idx", "train-000001.tar"]
    with pytest.raises(StorageError, match=r"x\.json: No space left"):
        writer.write_file(small_disk / "x.json", bytes(3_000_000))
    assert not list(small_disk.glob("x.json*"))


@pytest.mark.case("S01")
def test_a_file_size_limit(tmp_path: Path) -> None:
    """A write that the system refuses for another cause is named likewise."""
    limited = f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))\n{FULL_DISK}"
    result = subprocess.run([sys.executable, "-c", limited, tmp_path], capture_output=True, text=True, check=True)
    assert result.stdout == f"{tmp_path}/train-000000.tar.partial: File too large\n"
    assert tree(tmp_path) == {}


def test_write_file(tmp_path: Path) -> None:
    """A file appears whole; a folder that isn't there is named."""
    writer.write_file(tmp_path / "a.json", b"{}")
    assert tree(tmp_path) == {"a.json": b"{}"}
    with pytest.raises(StorageError, match="none"):
        writer.write_file(tmp_path / "none" / "a.json", b"{}")


def test_data_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard's name comes after its data, and after its whole index: a power cut leaves no empty file under a final name."""
    events: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        events.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        events.append(f"name {target.name}")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    write([100], tmp_path, 6000)
    here = f"sync {tmp_path.name}"
    assert events == [
        "sync train-000000.tar.partial",
        "sync train-000000.idx.partial",
        "name train-000000.idx",
        here,
        "name train-000000.tar",
        here,
    ]
