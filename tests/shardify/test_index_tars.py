"""Tars of others are indexed to the byte, whoever wrote them, and none that can't be read rightly gets an index in silence."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign import looked_up, mk, run, samples, streamed
from gallery import tree

from shardify.format import manifest

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
GNU_TAR = shutil.which("tar")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("headers_only", [False, True])
@pytest.mark.case("N11", "T13")
def test_every_byte_is_where_the_index_says(tmp_path: Path, form: int, headers_only: bool) -> None:
    """Index lookup equals what streams, for all formats of tarfile, odd owners, float times and members that are no sample's (N11)."""
    members = [
        ("README", b"x" * 700),
        *samples(0),
        ("LICENSE", b""),
        *samples(4, 30),
        ("train.v1/0001.jpg", b"j"),
        ("train.v1/0001.cls", b""),
    ]
    path = mk(tmp_path / "train-0.tar", members, form, uname="A B", mtime=1.5 if form == tarfile.PAX_FORMAT else 1)
    found = run(path, headers_only=headers_only)
    assert found.problems == () and found.splits["train"].samples == 35
    assert looked_up(path) == streamed(path)


@pytest.mark.parametrize("form", ["gnu", "pax"])
@pytest.mark.case("N10")
def test_long_names(tmp_path: Path, form: str) -> None:
    """Names above the header's 100 bytes, and not ASCII, are whole in the index (N10)."""
    name = "é" * 137
    path = mk(tmp_path / "train-0.tar", [(f"{name}.jpg", b"one"), (f"{name}.cls", b"1")], FORMATS[form])
    assert run(path).problems == ()
    assert looked_up(path) == streamed(path) == [(f"{name}.jpg", b"one"), (f"{name}.cls", b"1")]


@pytest.mark.skipif(GNU_TAR is None, reason="needs tar")
@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_what_gnu_tar_writes(tmp_path: Path, form: str) -> None:
    """Folders packed by tar, in each of its formats, with their folder entries and blocking, are indexed to the byte."""
    for name, data in samples(0, 12):
        (tmp_path / "in" / "n01").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / "n01" / name).write_bytes(data)
    command = [
        str(GNU_TAR),
        f"--format={form}",
        "--sort=name",
        "-C",
        str(tmp_path / "in"),
        "-cf",
        str(tmp_path / "train-0.tar"),
        ".",
    ]
    subprocess.run(command, check=True)
    found = run(tmp_path / "train-0.tar")
    assert found.problems == () and found.splits["train"].samples == 12
    assert looked_up(tmp_path / "train-0.tar") == streamed(tmp_path / "train-0.tar")


def test_a_large_tar_is_hashed_whole(tmp_path: Path) -> None:
    """Members larger than the buffer, and what lies behind the tar's end, are in the hash; the index is right behind them."""
    path = mk(
        tmp_path / "train-0.tar",
        [("a.jpg", os.urandom(3_000_001)), ("a.cls", b"1"), ("b.jpg", os.urandom(2_500_000)), ("b.cls", b"2")],
    )
    with path.open("ab") as file:
        file.write(bytes(2_000_000))
    run(path)
    (entry,) = manifest.read(tmp_path / "train-shardindex.json").shards
    assert (entry.filesize, entry.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert looked_up(path) == streamed(path)


@pytest.mark.case("N06")
def test_companions_of_macos(tmp_path: Path) -> None:
    """Companions are no samples and split none (N06)."""
    names = ["x/._a.jpg", "x/a.jpg", "x/._a.cls", "x/a.cls", "__MACOSX/x/b.jpg", "x/.DS_Store"]
    mk(tmp_path / "train-0.tar", [(name, name.encode()) for name in names])
    assert run(tmp_path).problems == ()
    assert looked_up(tmp_path / "train-0.tar") == [("x/a.jpg", b"x/a.jpg"), ("x/a.cls", b"x/a.cls")]


def linked(path: Path) -> None:
    """Write a tar of GNU tar with a hard and a symbolic link (T12)."""
    folder = path.parent / "links"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(b"j")
    os.link(folder / "a.jpg", folder / "b.jpg")
    (folder / "c.jpg").symlink_to("a.jpg")
    subprocess.run([str(GNU_TAR), "--sort=name", "-C", folder, "-cf", path, "a.jpg", "b.jpg", "c.jpg"], check=True)
    shutil.rmtree(folder)


def linked_bytes(path: Path) -> bytes:
    """Return the bytes of a tar with links, which is there no more."""
    linked(path)
    return path.read_bytes()


def sparse(path: Path) -> None:
    """Write a tar of GNU tar with a sparse file."""
    with (path.parent / "a.jpg").open("wb") as file:
        file.truncate(1_000_000)
    subprocess.run([str(GNU_TAR), "--sparse", "-C", path.parent, "-cf", path, "a.jpg"], check=True)
    (path.parent / "a.jpg").unlink()


def spoil(path: Path, change: Callable[[bytearray], object]) -> None:
    """Write a tar of four samples of 2,048 bytes each, and change its bytes."""
    raw = bytearray(mk(path, samples(0)).read_bytes())
    change(raw)
    path.write_bytes(raw)


def over_8_gib(raw: bytearray) -> None:
    """Let a header state 9 GiB, as base 256."""
    raw[124:136] = b"\x80" + (9 * 2**30).to_bytes(11, "big")
    raw[148:156] = b"%06o\0 " % (sum(raw[:148]) + sum(raw[156:512]) + 8 * 32)


BAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "cut in a body": (lambda p: p.write_bytes(mk(p, [("a.jpg", bytes(9000))]).read_bytes()[:5000]), ["a member of 9000 bytes in a tar of 5000"]),
    "cut at an edge": (lambda p: spoil(p, lambda raw: raw.__delitem__(slice(4096, None))), ["without its two zero blocks"]),
    "cut in a header": (lambda p: spoil(p, lambda raw: raw.__delitem__(slice(4196, None))), ["without its two zero blocks"]),
    "no end": (lambda p: spoil(p, lambda raw: raw.__delitem__(slice(8192, None))), ["without its two zero blocks"]),
    "one zero block": (lambda p: spoil(p, lambda raw: raw.__setitem__(slice(4096, 4096), bytes(512))), ["one zero block"]),
    "a flipped bit in a header": (lambda p: spoil(p, lambda raw: raw.__setitem__(4100, 1)), ["at byte 4096: a damaged header"]),
    "over 8 GiB by its header": (lambda p: spoil(p, over_8_gib), ["a member of 9663676416 bytes in a tar of"]),
    "zeros": (lambda p: p.write_bytes(bytes(10240)), ["holds no sample .10240 bytes."]),
    "empty": (lambda p: p.write_bytes(b""), ["without its two zero blocks .it has 0 bytes."]),
    "no samples": (lambda p: mk(p, [("README", b"x"), ("._a.jpg", b"x")]), ["holds no sample"]),
    "gzip under a tar's name": (lambda p: p.write_bytes(gzip.compress(mk(p, samples(0, 99)).read_bytes())), ["compressed by gzip"]),
    "a Git LFS pointer": (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"), ["Git LFS pointer"]),
    "a web page": (lambda p: p.write_bytes(b"<html>" * 500), ["damaged header"]),
    "sparse": (sparse, ["'a.jpg' is a sparse file"]),
    "links": (linked, ["'b.jpg' is a link", "'c.jpg' is a link"]),
    "split samples": (
        lambda p: mk(p, [(f"s{n}.{field}", b"x") for field in ("jpg", "cls") for n in range(3)]),
        [f"'s{n}.cls' comes after its sample was closed" for n in range(3)],
    ),
    "repeated names": (lambda p: mk(p, [(f"a.{f}", b"x") for f in ("jpg", "cls", "jpg", "cls")]), ["'a.jpg' comes twice", "'a.cls' comes twice"]),
    "a link, then damage": (
        lambda p: p.write_bytes(bytes(a ^ b for a, b in zip(linked_bytes(p), bytes(1537) + b"\x01" + bytes(10**6), strict=False))),
        ["'b.jpg' is a link", "at byte 1536: a damaged header"],
    ),
    "all split": (
        lambda p: mk(p, [(f"s{n}.{field}", b"x") for field in ("jpg", "cls") for n in range(50)]),
        [*[f"'s{n}.cls' comes after" for n in range(5)], "and 45 more members like these"],
    ),
}  # fmt: skip


@pytest.mark.skipif(GNU_TAR is None, reason="needs tar")
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("headers_only", [False, True])
@pytest.mark.case("N07", "N08", "T01", "T02", "T06", "T12")
def test_a_bad_tar_gets_no_index(tmp_path: Path, kind: str, headers_only: bool) -> None:
    """Each kind of bad tar is named with all its problems; it gets no index and the split no manifest, the good tar its index."""
    make, said = BAD[kind]
    make(tmp_path / "train-1.tar")
    mk(tmp_path / "train-0.tar", samples(100))
    before = (tmp_path / "train-1.tar").read_bytes()
    found = run(tmp_path, headers_only=headers_only)
    assert len(found.problems) == len(said) + 1, found.problems
    for text, line in zip(said, found.problems, strict=False):
        assert f"{tmp_path}/train-1.tar" in line and re.search(text, line)
    assert "train-shardindex.json: not written, as 1 of 2 tars aren't indexed" in found.problems[-1]
    assert sorted(tree(tmp_path)) == ["train-0.idx", "train-0.tar", "train-1.tar"]
    assert (tmp_path / "train-1.tar").read_bytes() == before and found.manifests == {}
