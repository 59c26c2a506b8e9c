"""Class folders: which files are pictures of which class, in an order that no file system decides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify import sources
from shardify.config import BuildConfig
from shardify.errors import DataError, SettingsError
from shardify.items import LEFT_OUT, Items
from shardify.sources.folders import make_ids

SHARES = {"train": 0.9, "val": 0.1}


def read(root: Path, splits: dict[str, Any] | None = None, **source: Any) -> Items:
    """Read the class folders below `root`."""
    given = {"kind": "folders", "root": root} | source
    return sources.read(
        BuildConfig.model_validate({"name": "t", "source": given, "splits": splits or SHARES, "shards": {"out": root / "out"}})
    )


def touch(root: Path, *paths: str) -> None:
    """Make empty files with their folders."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


@pytest.mark.case("N04")
def test_pictures_of_classes(tmp_path: Path) -> None:
    """Extensions count in any case, folders nest, order and labels follow the names (N04)."""
    touch(tmp_path, "b/2.JPG", "b/10.jpeg", "b/sub/deep/x.PnG", "a-b/1.webp", "a/z.Tiff", "a/v1.2.jpg")
    items = read(tmp_path)
    assert list(items.paths) == ["a-b/1.webp", "a/v1.2.jpg", "a/z.Tiff", "b/10.jpeg", "b/2.JPG", "b/sub/deep/x.PnG"]
    assert list(items.ids or ()) == ["a-b/1", "a/v1.2", "a/z", "b/10", "b/2", "b/sub/deep/x"]
    assert items.classes == ("a", "a-b", "b")
    assert items.labels.tolist() == [1, 0, 0, 2, 2, 2]
    assert items.splits.tolist() == [LEFT_OUT] * 6
    assert items.root == str(tmp_path)
    assert items.notes == ()


@pytest.mark.case("N06")
def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    """Hidden and companion files and folders, other extensions and stray pictures are left out, and the notes say how many (N06)."""
    touch(tmp_path, "a/1.jpg", "a/._1.jpg", "a/.2.jpg", "a/.DS_Store", "a/.git/3.jpg", "__MACOSX/a/._1.jpg", "a/__MACOSX/4.jpg")
    touch(tmp_path, "a/notes.txt", "a/b.TXT", "a/Thumbs.db", "a/README", "stray.jpg", ".cache/x.jpg")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "a/pipe.jpg")
    items = read(tmp_path)
    assert list(items.paths) == ["a/1.jpg"]
    assert items.notes == (
        "13 entries that are no pictures to pack (.db: 1, .txt: 2, hidden: 7, in no class folder: 1, no extension: 1, no regular file: 1)",
        "1 class folders hold no picture and are no classes: 'empty'",
    )


def test_links(tmp_path: Path) -> None:
    """Links to files below the root count, all others are left out, and a loop of folders doesn't hang."""
    root = tmp_path / "root"
    touch(root, "a/1.jpg")
    touch(tmp_path, "outside.jpg", "rootless/2.jpg")
    (root / "a/in.jpg").symlink_to("1.jpg")
    (root / "a/out.jpg").symlink_to("../../outside.jpg")
    (root / "a/sibling.jpg").symlink_to("../../rootless/2.jpg")
    (root / "a/broken.jpg").symlink_to("none.jpg")
    (root / "a/self.jpg").symlink_to("self.jpg")
    (root / "a/loop").symlink_to("..")
    (root / "a/again").symlink_to(".")
    (root / "b").symlink_to("a")
    (root / "a/notes.txt").symlink_to("../../outside.jpg")  # no picture by its name
    with pytest.raises(DataError, match=r"4 links lead out of source\.root, or to nothing; source\.links: anywhere") as caught:
        read(root)
    assert [line.split("'")[1] for line in caught.value.problems] == ["a/broken.jpg", "a/out.jpg", "a/self.jpg", "a/sibling.jpg"]
    items = read(root, missing="skip")
    assert list(items.paths) == ["a/1.jpg", "a/in.jpg"]
    assert items.notes == (
        "8 entries that are no pictures to pack (link that leaves the root: 3, link to a folder: 3, link to nothing: 2)",
    )
    (tmp_path / "other").symlink_to("root")
    assert list(read(tmp_path / "other", missing="skip").paths) == ["a/1.jpg", "a/in.jpg"]


def test_links_are_followed_where_asked(tmp_path: Path) -> None:
    """Out of the root, and to folders, as annexes and dataset tools lay sets out; a folder that leads back into itself ends."""
    root = tmp_path / "root"
    touch(root, "a/1.jpg")
    touch(tmp_path, "outside.jpg", "store/cats/2.jpg", "store/cats/deep/3.jpg")
    (root / "a/out.jpg").symlink_to("../../outside.jpg")
    (root / "b").symlink_to(tmp_path / "store" / "cats")
    (root / "a/around").symlink_to("..")
    (tmp_path / "store/cats/back").symlink_to(root)
    (tmp_path / "store/cats/self").symlink_to(".")
    paths = list(read(root, links="anywhere").paths)
    assert paths[:2] == ["a/1.jpg", "a/out.jpg"] and {"b/2.jpg", "b/deep/3.jpg"} < set(paths)
    assert len(paths) < 20 and not [path for path in paths if "self" in path or "around" in path]
    (root / "a/broken.jpg").symlink_to("none.jpg")
    with pytest.raises(DataError, match=r"1 links lead out of source\.root, or to nothing"):
        read(root, links="anywhere")


@pytest.mark.parametrize("name", ["@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found", "__pycache__"])
def test_what_systems_put_beside_files_is_no_class(tmp_path: Path, name: str) -> None:
    """Nor are thumbnails of a disk station samples."""
    touch(tmp_path, "a/1.jpg", f"{name}/2.jpg", f"a/{name}/1.jpg/SYNOPHOTO_THUMB_XL.jpg")
    items = read(tmp_path)
    assert (list(items.paths), items.classes) == (["a/1.jpg"], ("a",))


@pytest.mark.case("S06")
def test_a_folder_for_each_split(tmp_path: Path) -> None:
    """Splits that are texts are folders of their own with one mapping of classes; train comes first, as in the settings (S06)."""
    touch(tmp_path, "training/a/1.jpg", "training/b/2.jpg", "val/b/1.jpg", "val/c/1.jpg", "other/d/1.jpg")
    items = read(tmp_path, {"train": "training/", "val": "val"})
    assert list(items.paths) == ["training/a/1.jpg", "training/b/2.jpg", "val/b/1.jpg", "val/c/1.jpg"]
    assert items.splits.tolist() == [0, 0, 1, 1]
    assert items.classes == ("a", "b", "c")
    assert items.labels.tolist() == [0, 1, 1, 2]
    assert sources.unseen_classes(items) == ("split val: 1 of its classes (1 samples) have no sample in train",)


def test_split_folders_that_are_wrong(tmp_path: Path) -> None:
    """A folder that isn't there is named with the nearest, one that isn't below the root is refused, and so is one in another."""
    touch(tmp_path, "train/a/1.jpg", "train/b/c/1.jpg")
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, {"train": "trian", "val": "../x", "test": "/x"})
    assert str(caught.value) == (
        f"{tmp_path} holds the folders 'train', but splits.train: no folder 'trian' there, did you mean 'train'?; "
        "splits.val: '../x' isn't below source.root; splits.test: '/x' isn't below source.root; "
        "where these are the classes, let shares draw the splits: splits: {train: 0.9, val: 0.1}"
    )
    with pytest.raises(DataError) as data:
        read(tmp_path, {"train": "train", "val": "train/b"})
    assert data.value.problems == ("'train/b/c/1.jpg': id 'train/b/c/1.jpg' stands in 'train/b/c/1.jpg' too",)


def test_shares_over_folders_named_as_splits_are_noted(tmp_path: Path) -> None:
    """train/ and val/ taken for two classes is a slip that the notes point out."""
    touch(tmp_path, "train/a/1.jpg", "val/a/1.jpg")
    assert "for splits, write splits: {train: train, ...}" in read(tmp_path).notes[-1]


@pytest.mark.case("N04")
def test_no_picture_is_an_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    """Nothing found names the place, the extensions and what was left out."""
    touch(tmp_path, "a/1.txt", "stray.jpg")
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert f"no picture found below {tmp_path}/<class>/ (extensions avif, bmp" in str(caught.value)
    assert "there are 1 class folders; left out: .txt: 1, in no class folder: 1" in str(caught.value)


def test_a_split_without_pictures_is_an_error(tmp_path: Path) -> None:
    """A split's empty folder is named, though the others hold pictures."""
    touch(tmp_path, "train/a/1.jpg", "val/a/1.txt")
    with pytest.raises(DataError, match=f"no picture found below {tmp_path}/val/<class>/ "):
        read(tmp_path, {"train": "train", "val": "val"})


def test_pictures_that_differ_by_extension_only(tmp_path: Path) -> None:
    """Two files never become one sample: their ids keep the extension."""
    touch(tmp_path, "a/x.jpg", "a/x.png", "a/x.jpg.png", "a/y.jpg")
    items = read(tmp_path)
    assert list(items.paths) == ["a/x.jpg", "a/x.jpg.png", "a/x.png", "a/y.jpg"]
    assert list(items.ids or ()) == ["a/x.jpg", "a/x.jpg.png", "a/x.png", "a/y"]


def deep(root: Path) -> None:
    """Make folders of three levels, whose inodes are in another order than their names."""
    names = [f"{number * 37 % 100:02}" for number in range(8)]
    touch(root, *(f"{a}/{b}/{c}/x.jpg" for c in names[:3] for b in names[:5] for a in names))


def test_folders_are_opened_level_by_level_in_the_order_of_inodes(tmp_path: Path) -> None:
    """A disk's head goes forward once a level; the order of the pictures is that of their paths all the same."""
    deep(tmp_path)
    code = (
        "import sys; from shardify.sources.walk import Walk; walk, opened = Walk(sys.argv[1]), []\n"
        "sys.addaudithook(lambda event, args: opened.append(args[0]) if event == 'os.scandir' else None)\n"
        "found = walk.pictures(''); print(*opened, sep='\\n'); print('--'); print(*found, sep='\\n')"
    )
    printed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    opened, _, found = printed.partition("--\n")
    inodes = {}
    for folder, _, _ in os.walk(tmp_path):
        with os.scandir(folder) as entries:
            inodes.update({f"{entry.path}/": entry.inode() for entry in entries})
    folders = [folder for folder in inodes if folder.count("/") - str(tmp_path).count("/") < 5]
    by_level = [[f for f in folders if f.count("/") == str(tmp_path).count("/") + level] for level in (2, 3, 4)]
    wanted = [sorted(level, key=inodes.__getitem__) for level in by_level]
    assert [len(level) for level in wanted] == [8, 40, 120]
    assert opened.splitlines() == [f"{tmp_path}/", *wanted[0], *wanted[1], *wanted[2]]
    assert opened.splitlines() != sorted(opened.splitlines())
    assert found.splitlines() == sorted(found.splitlines())
    assert len(found.splitlines()) == 120


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_no_file_is_looked_at_by_itself(tmp_path: Path) -> None:
    """What an entry is the listing tells: no stat of a picture or a folder below the root, which on a hard disk is a seek each."""
    deep(tmp_path / "root")
    code = "import sys; from shardify.sources.walk import Walk; print(len(Walk(sys.argv[1]).pictures('')))"
    log, command = tmp_path / "log", [sys.executable, "-c", code, str(tmp_path / "root")]
    traced = subprocess.run(
        ["strace", "-f", "-e", "trace=%file,%desc", "-o", str(log), *command], capture_output=True, text=True, check=False
    )
    if traced.returncode:
        pytest.skip(f"strace can't trace here: {traced.stderr[-200:]}")
    calls = [line for line in log.read_text(errors="replace").splitlines() if f'"{tmp_path}/root/' in line]
    assert traced.stdout == "120\n"
    assert len(calls) == 1 + 8 + 40 + 120
    assert all("O_DIRECTORY" in line for line in calls)


@given(st.sets(st.text("ab.", min_size=1, max_size=6)))
def test_ids_are_unique(paths: set[str]) -> None:
    """Distinct paths have distinct ids, whatever their dots."""
    assert len(set(make_ids(sorted(paths)))) == len(paths)


def test_folder_names_as_labels(tmp_path: Path) -> None:
    """Under as_is each class folder is an integer, or all that aren't are named at once."""
    touch(tmp_path, "007/1.jpg", "12/1.jpg")
    assert read(tmp_path, labels="as_is").labels.tolist() == [7, 12]
    touch(tmp_path, "cat/1.jpg", "dog/1.jpg")
    with pytest.raises(DataError) as caught:
        read(tmp_path, labels="as_is")
    assert [line[:19] for line in caught.value.problems] == ["class folder 'cat':", "class folder 'dog':"]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A name in no encoding is packed as it is, under a key of its own, and found again on the disk."""
    folder = os.fsencode(tmp_path) + b"/a\xff"
    Path(os.fsdecode(folder)).mkdir()
    for name in (b"/\xe9.jpg", b"/\xea.jpg", "/é.jpg".encode()):
        Path(os.fsdecode(folder + name)).touch()
    items = read(tmp_path)
    assert [os.fsencode(path) for path in items.paths] == [b"a\xff/\xc3\xa9.jpg", b"a\xff/\xe9.jpg", b"a\xff/\xea.jpg"]
    assert len(set(items.keys)) == 3
    assert all(Path(items.root, path).is_file() for path in items.paths)
