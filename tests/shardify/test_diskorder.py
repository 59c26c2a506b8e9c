"""Disk order: what is there is found, by few seeks, and read in the order in which it lies."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gallery import Silent
from hypothesis import given
from hypothesis import strategies as st

from shardify import diskorder, fiemap, machine
from shardify.diskorder import Survey
from shardify.errors import StorageError
from shardify.machine import Disk


def survey(root: Path, paths: list[str], rows: list[int] | None = None) -> Survey:
    """Look up rows, by default all."""
    wanted = np.arange(len(paths)) if rows is None else np.array(rows, np.int64)
    return diskorder.survey(str(root), paths, wanted, Silent())


def block(path: Path) -> int | None:
    """Return where a file begins on its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return fiemap.first_block(descriptor)
    finally:
        os.close(descriptor)


def test_missing_files_are_found_by_listing(tmp_path: Path) -> None:
    """Rows whose path is no file are missing: absent, another case, a folder, a broken link, a name too long; links to files count."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/x.jpg").touch()
    (tmp_path / "y.jpg").touch()
    (tmp_path / "a/link.jpg").symlink_to("x.jpg")
    (tmp_path / "a/broken.jpg").symlink_to("none.jpg")
    (tmp_path / "a/loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "é.jpg").touch()
    os.mkfifo(tmp_path / "a/fifo.jpg")
    there = ["a/x.jpg", "y.jpg", "a/link.jpg", "é.jpg", "a/x.jpg"]
    gone = [
        "a/X.jpg",
        "a/b",
        "a/broken.jpg",
        "none/x.jpg",
        "y.jpg/z",
        "a/" + "n" * 300,
        "n" * 300 + "/a",
        "a/loop.jpg",
        "a/fifo.jpg",
    ]
    paths = [*gone, *there]
    found = survey(tmp_path, paths)
    assert {paths[row]: refused.cause for row, refused in found.refused.items()} == dict.fromkeys(gone, "missing")
    assert sorted(found.order.tolist()) == list(range(len(gone), len(paths)))
    assert survey(tmp_path, []).order.tolist() == []
    assert survey(tmp_path, paths, [len(gone)]).refused == {}


def test_sizes_and_times(tmp_path: Path) -> None:
    """What is there has its bytes and its time; what a link leads to counts."""
    (tmp_path / "x.jpg").write_bytes(b"12345")
    os.utime(tmp_path / "x.jpg", ns=(0, 1_234_567_890_123_456_789))
    (tmp_path / "link.jpg").symlink_to("x.jpg")
    found = survey(tmp_path, ["x.jpg", "none", "link.jpg"])
    assert found.sizes.tolist() == [5, -1, 5]
    assert found.mtimes[[0, 2]].tolist() == [1_234_567_890_123_456_789] * 2


def test_an_odd_way_to_a_file(tmp_path: Path) -> None:
    """Links to folders on the way, doubled slashes and dots are what they are to the system."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.jpg").write_bytes(b"1")
    (tmp_path / "l").symlink_to("a")
    assert survey(tmp_path, ["l/x.jpg", "a//x.jpg", "a/./x.jpg", "./a/x.jpg"]).sizes.tolist() == [1, 1, 1, 1]


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is there and can't be listed is an error that names it, not missing pictures; one only passed through may be."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x.jpg").touch()
    real = os.scandir
    denied = str(tmp_path / "a")

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        if path == denied:
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert survey(tmp_path, ["a/b/x.jpg"]).refused == {}
    denied = str(tmp_path / "a/b")
    with pytest.raises(StorageError, match=r"a/b: can't be listed \(Permission denied\)"):
        survey(tmp_path, ["a/b/x.jpg"])


@pytest.mark.case("S12")
def test_a_file_without_permission(no_root: Path) -> None:
    """A file that may not be opened is unreadable, not missing, and known before hours of work (S12)."""
    (no_root / "x.jpg").touch(mode=0)
    assert survey(no_root, ["x.jpg"]).refused[0].cause == "unreadable"


def test_folders_are_listed_in_the_order_of_their_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level by level, each in the order of inodes, each folder once: the head goes forward once a level."""
    names = [f"{a}/{b}" for a in "wxyz" for b in "klmn"]
    random.Random(0).shuffle(names)
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.jpg").touch()
    listed: list[str] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(str(path)), real(path))[1])
    survey(tmp_path, [f"{name}/x.jpg" for name in sorted(names)])
    listed = [
        os.path.relpath(path, tmp_path) for path in listed if path.startswith(str(tmp_path))
    ]  # Python 3.13's iterdir scans too
    depths = [len(Path(name).parts) for name in listed]
    assert depths == sorted(depths) and len(listed) == 1 + 4 + 16
    for depth in (1, 2):
        inodes = [(tmp_path / name).stat().st_ino for name in listed if len(Path(name).parts) == depth]
        assert inodes == sorted(inodes)


def test_files_are_opened_in_the_order_of_their_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of each file is asked in the order of inodes, not of rows."""
    names = [f"{number}.jpg" for number in random.Random(1).sample(range(50), 50)]
    for name in names:
        (tmp_path / name).touch()
    opened: list[int] = []
    real = os.open

    def note(path: str, flags: int, *args: int) -> int:
        opened.append(Path(path).stat().st_ino)
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", note)
    survey(tmp_path, sorted(names))
    assert len(opened) == 50 and opened == sorted(opened)


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 file system of its own, as root."""
    image, mount = tmp_path / "image", tmp_path / "mnt"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    made = (
        shutil.which("mkfs.ext4")
        and subprocess.run(["mkfs.ext4", "-q", "-F", image], capture_output=True, check=False).returncode == 0
    )
    if not made or subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_files_are_read_in_the_order_of_their_blocks(ext4: Path) -> None:
    """On a disk files come by their first physical block, those without one after them by inode; the note says which."""
    names = random.Random(2).sample([f"{number:03}.jpg" for number in range(60)], 60)
    for name in names[:40]:
        (ext4 / name).write_bytes(os.urandom(9000))
    for name in names[::7]:
        (ext4 / name).unlink(missing_ok=True)  # holes that later files fill
    for name in names:
        (ext4 / name).write_bytes(os.urandom(5000))
    for name in names[:3]:
        (ext4 / name).write_bytes(b"")
    os.sync()
    found = survey(ext4, sorted(names))
    ordered = [sorted(names)[row] for row in found.order.tolist()]
    blocks = [block(ext4 / name) for name in ordered]
    assert None not in blocks[:57] and blocks[57:] == [None] * 3
    assert blocks[:57] == sorted(blocks[:57], key=lambda at: at or 0) and ordered[:57] != sorted(ordered[:57])
    inodes = [(ext4 / name).stat().st_ino for name in ordered[57:]]
    assert inodes == sorted(inodes)
    assert "57 by their block on the disk, 3 by their inode" in found.notes[0]


def test_where_nothing_tells_the_blocks(tmp_path: Path) -> None:
    """On a file system without extents (tmpfs) the order is by inode, and the note says so."""
    folder = Path("/dev/shm") / f"shardify-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no tmpfs here")
    try:
        names = random.Random(3).sample([f"{number}.jpg" for number in range(20)], 20)
        for name in names:
            (folder / name).write_bytes(b"x")
        found = survey(folder, sorted(names))
        assert block(folder / names[0]) is None
    finally:
        shutil.rmtree(folder)
    assert [sorted(names)[row] for row in found.order.tolist()] == names
    assert "20 by their inode" in found.notes[0]


def test_a_disk_that_does_not_rotate_is_not_asked_for_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where seeks cost nothing, extents aren't asked for: the order is by inode, which costs nothing either."""
    (tmp_path / "x.jpg").write_bytes(b"x")
    monkeypatch.setattr(machine, "disk_of", lambda device: Disk("flash", False))
    monkeypatch.setattr(diskorder, "first_block", lambda descriptor: pytest.fail("asked for"))
    assert survey(tmp_path, ["x.jpg"]).notes == ("read from flash (it doesn't rotate): 1 by their inode",)


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=40), min_size=1, max_size=4))
def test_several_disks_are_read_side_by_side(disks: list[list[int]]) -> None:
    """Each disk's files stay in their order, and at any moment all disks have got on by the same share of their bytes, within a file."""
    sizes = np.array([size for disk in disks for size in disk], np.int64)
    starts = np.cumsum([0, *map(len, disks)])
    parts = [np.arange(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]
    order = diskorder._merged(parts, sizes).tolist()
    assert sorted(order) == list(range(len(sizes)))
    of = np.repeat(np.arange(len(disks)), [len(disk) for disk in disks])
    for number, part in enumerate(parts):
        assert [row for row in order if of[row] == number] == part.tolist()
    weights = [sum(size + 1 for size in disk) for disk in disks]
    done = [0] * len(disks)
    for row in order:
        begun = done[of[row]] / weights[of[row]]
        assert all(begun <= (done[n] / weights[n]) + 1e-9 or done[n] == weights[n] for n in range(len(disks)))
        done[of[row]] += int(sizes[row]) + 1
