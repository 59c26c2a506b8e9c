"""What the user names becomes tars in order, each with its split and the places of its index and manifest; the rest is named."""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify.errors import SettingsError
from shardify.tars import arrange, find


def touch(folder: Path, *names: str) -> list[Path]:
    """Make empty files below a folder."""
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return paths


def test_files_keep_their_order_and_folders_count(tmp_path: Path) -> None:
    """Files come as named; a folder's tars by the value of their numbers, without hidden ones and other files."""
    touch(tmp_path, "10.tar", "2.tar", "1.TAR", "._2.tar", "2.idx", "README.md", "sub/3.tar")
    assert find([str(tmp_path / "10.tar"), str(tmp_path / "2.tar")]) == [tmp_path / "10.tar", tmp_path / "2.tar"]
    assert find([str(tmp_path)]) == [tmp_path / "1.TAR", tmp_path / "2.tar", tmp_path / "10.tar"]


def test_patterns_in_quotes(tmp_path: Path) -> None:
    """Braces and stars that no shell expanded mean what they mean there; a file of that very name wins."""
    paths = touch(tmp_path, "t-008.tar", "t-009.tar", "t-010.tar")
    assert find([f"{tmp_path}/t-{{008..010}}.tar"]) == paths
    assert find([f"{tmp_path}/*.tar"]) == paths
    assert find([f"{tmp_path}/t-{{00*,010}}.tar"]) == paths
    with chdir(tmp_path):
        assert find(["t-{008..009}.tar"]) == [Path("t-008.tar"), Path("t-009.tar")]
    odd = touch(tmp_path, "{1..2}.tar")
    assert find([str(odd[0])]) == odd


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("none.tar", "none.tar: not there"),
        ("t-{0..7}.tar", r"t-0\.tar: not there \(from .*t-\{0\.\.7\}\.tar\).*t-4\.tar.*and 3 more like these"),
        ("n*.tar", r"n\*\.tar: not there"),
        ("t-{0..9999999}.tar", "gives more than 1,000,000 names"),
        ("t-{0..2.tar", "its braces don't pair"),
        ("x" * 5000 + ".tar", "not there"),
        ("empty", "empty: no .tar in it; it is empty"),
        ("others", "others: no .tar in it; it holds a.txt"),
        ("packed", "packed: holds compressed files .a.tar.gz. and no .tar; unpack"),
        ("packed/a.tar.gz", "a.tar.gz: compressed, so that samples can't be read by offset; unpack"),
        ("others/a.txt", "a.txt: not called .tar"),
        ("pipe.tar", "pipe.tar: not a regular file"),
    ],
)
def test_what_cannot_be_indexed_is_named(tmp_path: Path, text: str, said: str) -> None:
    """What isn't there, isn't a tar, or is compressed is an error of usage that says which, and what lies there instead."""
    touch(tmp_path, "others/a.txt", "packed/a.tar.gz")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(SettingsError, match=said):
        find([f"{tmp_path}/{text}"])


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    """A tar that is named twice, on whatever way, one that is missing and one that is compressed are one message."""
    touch(tmp_path, "a.tar", "b.tar.gz")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SettingsError) as caught:
        find([str(tmp_path / name) for name in ("a.tar", "link/a.tar", "b.tar.gz", "c.tar")])
    assert all(said in str(caught.value) for said in ("a.tar: named 2 times", "b.tar.gz: compressed", "c.tar: not there"))


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train-000000.tar", "train-000001.tar"], {"train": 2}),
        (["imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar"], {"imagenet1k-train": 1, "imagenet1k-validation": 1}),
        (["train-00000-of-00002.tar", "train-00001-of-00002.tar"], {"train": 2}),
        (["train_0000_0499.tar", "train_0500_0999.tar"], {"train": 2}),
        (["train000.tar", "train001.tar"], {"train": 2}),
        (["val.tar"], {"val": 1}),
    ],
)
def test_splits_by_their_names(tmp_path: Path, names: list[str], splits: dict[str, int]) -> None:
    """Where names begin with a split, each split has its manifest."""
    targets = arrange(touch(tmp_path, *names), split=None, out=None)
    assert {target.split: len(target.tars) for target in targets} == splits
    assert all(target.manifest == tmp_path.resolve() / f"{target.split}-shardindex.json" for target in targets)


@pytest.mark.parametrize("names", [["00000.tar", "00001.tar"], ["cats.tar", "dogs.tar"], ["my set-0.tar"], ["ä.tar"]])
def test_names_that_tell_no_split(tmp_path: Path, names: list[str]) -> None:
    """Where names don't say the split nobody guesses: the message asks for --split, and with it all tars are one split."""
    paths = touch(tmp_path, *names)
    with pytest.raises(SettingsError, match="--split"):
        arrange(paths, split=None, out=None)
    (target,) = arrange(paths, split="train", out=None)
    assert [tar.path for tar in target.tars] == paths


def test_a_split_that_cannot_be_one(tmp_path: Path) -> None:
    """--split takes what can begin a file's name."""
    with pytest.raises(SettingsError, match="'a/b' can't name a split"):
        arrange(touch(tmp_path, "a.tar"), split="a/b", out=None)


def test_a_name_that_a_reader_misreads(tmp_path: Path) -> None:
    """A question mark would begin a query when the manifest is read."""
    with pytest.raises(SettingsError, match="question mark"):
        arrange(touch(tmp_path, "a?b-0.tar"), split="train", out=None)


def test_beside_the_tars(tmp_path: Path) -> None:
    """Indexes lie beside their tars; the manifest in the deepest folder that holds all, and names them from there."""
    (target,) = arrange(touch(tmp_path, "s/00/000.tar", "s/01/000.tar"), split="train", out=None)
    assert target.manifest == tmp_path.resolve() / "s" / "train-shardindex.json"
    assert [(tar.index, tar.url, tar.index_url) for tar in target.tars] == [
        (tmp_path / "s/00/000.idx", "00/000.tar", ""),
        (tmp_path / "s/01/000.idx", "01/000.tar", ""),
    ]


def test_in_another_folder(tmp_path: Path) -> None:
    """With a folder of their own, indexes lie in it as the tars do, and the manifest leads to both, by way of real folders."""
    paths = touch(tmp_path, "s/00/000.tar", "s/01/000.tar")
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    (target,) = arrange(paths, split="train", out=tmp_path / "link")
    out = (tmp_path / "real" / "deep").resolve()
    assert target.manifest == out / "train-shardindex.json"
    assert [(tar.index, tar.index_url) for tar in target.tars] == [(out / f"0{n}/000.idx", f"0{n}/000.idx") for n in (0, 1)]
    assert [tar.url for tar in target.tars] == ["../../s/00/000.tar", "../../s/01/000.tar"]
    assert all((tmp_path / "link" / tar.url).samefile(path) for tar, path in zip(target.tars, paths, strict=True))


def test_links_to_blobs_keep_their_names(tmp_path: Path) -> None:
    """A tar that is a link, as in a download cache, is called what the link is called, and its index lies beside that."""
    touch(tmp_path, "blobs/5ca1ab1e")
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "train-0.tar"
    link.symlink_to("../blobs/5ca1ab1e")
    (target,) = arrange(find([str(tmp_path / "snapshot")]), split=None, out=None)
    assert (target.tars[0].url, target.tars[0].index) == ("train-0.tar", tmp_path / "snapshot" / "train-0.idx")


def test_no_manifest_in_the_root() -> None:
    """Tars that only the root holds together need --out."""
    with pytest.raises(SettingsError, match="--out"):
        arrange([Path("/disk1/a-0.tar"), Path("/disk2/a-1.tar")], split=None, out=None)
    (target,) = arrange([Path("/disk1/a-0.tar"), Path("/disk2/a-1.tar")], split=None, out=Path("/disk3"))
    assert [(tar.url, tar.index_url) for tar in target.tars] == [
        ("../disk1/a-0.tar", "disk1/a-0.idx"),
        ("../disk2/a-1.tar", "disk2/a-1.idx"),
    ]


@given(st.lists(st.from_regex(r"[a-z]{1,3}-[0-9]{1,4}\.tar", fullmatch=True), min_size=1, unique=True))
def test_no_tar_is_lost(names: list[str]) -> None:
    """Every tar is in the one target of its split, in the order given."""
    paths = [Path("/nowhere") / name for name in names]
    targets = arrange(paths, split=None, out=None)
    for target in targets:
        assert [tar.path.name for tar in target.tars] == [name for name in names if name.startswith(f"{target.split}-")]
    assert sum(len(target.tars) for target in targets) == len(names)


@pytest.mark.parametrize("pattern", ["{0..99999999}", "{0..%s}" % ("9" * 5000), "{1..9}{0..999999}"])
def test_patterns_of_too_many_names(tmp_path: Path, pattern: str) -> None:
    """A slip in a pattern is an error at once, whatever numbers it has."""
    with pytest.raises(SettingsError, match="gives more than 1,000,000 names"):
        find([f"{tmp_path}/{pattern}.tar"])
