"""Promises of what users point at: every form finds the same shards, and whatever can't be found says what is there instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packing import pack

from pipeline.errors import OptionsError, PipelineError, SourceError
from pipeline.shardset import ShardSet
from pipeline.stores import folders
from pipeline.stores.folders import natural
from pipeline.stores.http import HttpOptions
from pipeline.urls import resolve
from shardify.format.manifest import Manifest, ShardEntry, dump

CLASSES = ("cat", "dog")
NO_WAIT = HttpOptions(attempts=1, connect_seconds=0.5)


def touch(folder: Path, *names: str) -> Path:
    """Make empty files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def entries(split: str, count: int) -> tuple[ShardEntry, ...]:
    return tuple(ShardEntry(f"{split}-{i:06d}.tar", 10 + i, 1000 + i, f"{i:064x}") for i in range(count))


def write_split(folder: Path, split: str, count: int, classes: Sequence[str] | None = CLASSES) -> Manifest:
    """Write a split's manifest, and its shards as empty files."""
    touch(folder, *(entry.url for entry in entries(split, count)))
    manifest = Manifest("pets", split, entries(split, count), None if classes is None else tuple(classes))
    (folder / f"{split}-shardindex.json").write_bytes(dump(manifest))
    return manifest


def write_wids(path: Path, shards: list[dict[str, Any]]) -> None:
    """Write a shard index as wids does: no keys of ours."""
    path.write_text(json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards}))


def names(found: ShardSet) -> list[str]:
    return [shard.name for shard in found.shards]


def message(shards: Any, kind: type[PipelineError] = SourceError, split: str | None = None) -> str:
    """The text of the error that resolving gives."""
    with pytest.raises(kind) as caught:
        resolve(shards, split=split)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder with one split of three shards."""
    write_split(tmp_path / "pets", "train", 3)
    return tmp_path / "pets"


@pytest.mark.parametrize(
    "form",
    [
        "{root}/train-shardindex.json",
        "{root}",
        "{root}/",
        "{root}/../pets",
        "{root}/train-{{000000..000002}}.tar",
        "{root}/train-*.tar",
        "{root}/*",
        "{root}/train-00000?.tar",
        "{root}/train-00000[0-2].tar",
        "{root}/*index.json",
        "{root}/../p*ts/train-*.tar",
        "file://{root}/train-shardindex.json",
        "file://localhost{root}/train-{{000000..000002}}.tar",
        "file:{root}",
    ],
)
def test_every_form_finds_the_same_set(pets: Path, form: str) -> None:
    """A manifest, its folder, patterns over its tars and file URLs give the same shards with the manifest's numbers and digest."""
    found = resolve(form.format(root=pets))
    wanted = resolve(pets / "train-shardindex.json")
    assert [s.name for s in found.shards] == ["train-000000.tar", "train-000001.tar", "train-000002.tar"]
    assert [(s.samples, s.bytes, s.sha256) for s in found.shards] == [
        (s.nsamples, s.filesize, s.sha256) for s in entries("train", 3)
    ]
    assert (found.classes, found.fields, found.name, found.split) == (CLASSES, ("cls", "jpg"), "pets", "train")
    assert found.digest == wanted.digest == Manifest("pets", "train", entries("train", 3)).digest
    assert found.samples == 33
    assert all(Path(s.path).is_absolute() and Path(s.path).exists() for s in found.shards)


def test_paths_lists_and_the_current_folder(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path objects, lists of tars in their order, relative paths and `~` are understood."""
    assert names(resolve([pets / "train-000002.tar", str(pets / "train-000000.tar")])) == ["train-000002.tar", "train-000000.tar"]
    monkeypatch.chdir(pets)
    assert len(resolve("train-*.tar").shards) == len(resolve(".").shards) == 3
    monkeypatch.setenv("HOME", str(pets.parent))
    assert len(resolve("~/pets").shards) == len(resolve(Path("~/pets/train-*.tar")).shards) == 3


def test_a_part_of_a_set_has_the_manifests_numbers(pets: Path) -> None:
    """A pattern over some of the tars keeps their numbers and classes; its digest is another one."""
    found = resolve(str(pets / "train-{000000,000002}.tar"))
    assert [s.samples for s in found.shards] == [10, 12]
    assert found.classes == CLASSES
    assert found.digest != resolve(pets).digest


def test_tars_without_a_manifest_are_sorted_by_number(tmp_path: Path) -> None:
    """A folder and a glob give plain tars in natural order, hidden ones and other files left out; nothing is known of them."""
    touch(tmp_path, "s10.tar", "s2.tar", "s1.TAR", "._s1.tar", "s1.idx", "notes.json", "readme.txt")
    for found in (resolve(tmp_path), resolve(str(tmp_path / "*"))):
        assert names(found) == ["s1.TAR", "s2.tar", "s10.tar"]
        assert {(s.samples, s.bytes, s.sha256) for s in found.shards} == {(None, None, "")}
        assert (found.samples, found.classes, found.name) == (None, None, tmp_path.name)


def test_a_shard_index_of_other_tools_is_read(tmp_path: Path) -> None:
    """Any wids index counts, by whatever name: its URLs are relative to it, in folders below and beside it."""
    touch(tmp_path / "a", "0.tar")
    touch(tmp_path / "b", "0.tar")
    write_wids(tmp_path / "a" / "all.json", [{"url": "0.tar", "nsamples": 4}, {"url": "../b/0.tar", "nsamples": 5}])
    for pointed in (tmp_path / "a" / "all.json", tmp_path / "a"):
        found = resolve(pointed)
        assert [(s.name, s.samples, s.bytes) for s in found.shards] == [("0.tar", 4, None), ("0.tar", 5, None)]
        assert (found.classes, found.fields, found.split) == (None, (), "")
        assert Path(found.shards[1].path).samefile(tmp_path / "b" / "0.tar")


def test_a_manifest_of_remote_shards_tells_of_local_copies(tmp_path: Path) -> None:
    """Tars are found in the manifest beside them by file name, although its URLs point elsewhere."""
    touch(tmp_path, "0.tar")
    write_wids(
        tmp_path / "shardindex.json", [{"url": "https://host/set/0.tar?sig=x", "nsamples": 4, "filesize": 1024, "index": "0.idx"}]
    )
    assert resolve(tmp_path / "0.tar").samples == 4
    (shard,) = resolve(tmp_path / "shardindex.json", http=NO_WAIT).shards
    assert (shard.path, shard.url, shard.samples) == ("https://host/set/0.tar", "https://host/set/0.tar?sig=x", 4)


def test_braces_that_do_not_pair_show_no_secret() -> None:
    """The traceback of the error has no other error in it that shows the whole URL."""
    secret = "c2Vj" * 3
    with pytest.raises(SourceError) as caught:
        resolve(f"https://host/set/{{000000..000003.tar?X-Amz-Signature={secret}")
    assert secret not in "".join(traceback.format_exception(caught.value))


def test_braces_in_braces_in_braces() -> None:
    """Nested deeper than anyone means it is an error that names the pattern."""
    assert "braces don't pair" in message("{a," * 2000 + "}" * 2000)


def test_two_splits_must_be_told_apart(pets: Path) -> None:
    """A folder with two splits and none named is an error with both and the option; named, it gives that one."""
    write_split(pets, "val", 2)
    assert "holds the splits train, val: name one by LoaderOptions(split=...)" in message(pets, OptionsError)
    assert names(resolve(pets, split="val")) == ["val-000000.tar", "val-000001.tar"]
    assert "no split 'vall' (did you mean 'val'?)" in message(pets, OptionsError, split="vall")
    assert f"split='val', but {pets}/train-shardindex.json is of split 'train'" in message(
        pets / "train-shardindex.json", OptionsError, split="val"
    )
    (pets / "copy-shardindex.json").write_bytes((pets / "val-shardindex.json").read_bytes())
    assert "several manifests of split 'val'" in message(pets, OptionsError, split="val")


def test_a_split_that_nothing_tells(tmp_path: Path) -> None:
    """A split asked of tars that are named by themselves is an error that says what to name: it would choose nothing."""
    touch(tmp_path, "val-000000.tar", "val-000001.tar")
    for shards in (tmp_path / "val-000000.tar", str(tmp_path / "val-{000000..000001}.tar"), str(tmp_path / "*.tar")):
        text = message(shards, OptionsError, split="val")
        assert "split='val', but nothing tells the split of the tars" in text and "name their folder" in text
    assert len(resolve(tmp_path, split="val").shards) == 2
    write_split(tmp_path, "val", 2)
    assert len(resolve(str(tmp_path / "val-*.tar"), split="val").shards) == 2


def test_two_splits_of_plain_tars_must_be_told_apart(tmp_path: Path) -> None:
    """Without manifests the names of the tars tell the splits; a glob over both is taken at its word."""
    touch(tmp_path, "train-000000.tar", "train-000001.tar", "val-000000.tar")
    assert "holds the splits train, val" in message(tmp_path, OptionsError)
    assert names(resolve(tmp_path, split="train")) == ["train-000000.tar", "train-000001.tar"]
    assert "no split 'test'" in message(tmp_path, OptionsError, split="test")
    assert len(resolve(str(tmp_path / "*.tar")).shards) == 3


def test_several_manifests_make_one_set_where_their_classes_agree(tmp_path: Path) -> None:
    """A list of manifests is read in its order; a mapping of its own in one of them is an error that names both."""
    write_split(tmp_path / "a", "train", 2)
    write_split(tmp_path / "b", "extra", 1)
    both = [tmp_path / "b" / "extra-shardindex.json", tmp_path / "a"]
    found = resolve(both)
    assert names(found) == ["extra-000000.tar", "train-000000.tar", "train-000001.tar"]
    assert (found.classes, found.name, found.split) == (CLASSES, "pets", "")
    write_split(tmp_path / "b", "extra", 1, classes=("dog", "cat"))
    text = message(both)
    assert f"{tmp_path}/a/train-shardindex.json numbers its classes otherwise than {tmp_path}/b/extra-shardindex.json" in text


def test_tars_of_two_splits_in_one_glob_have_their_numbers(pets: Path) -> None:
    """Tars that no single manifest lists all take theirs from each."""
    write_split(pets, "val", 2)
    found = resolve(str(pets / "*.tar"))
    assert [s.samples for s in found.shards] == [10, 11, 12, 10, 11]
    assert found.split == ""


@pytest.mark.parametrize("literal", ["set{1,2}", "set[0-9]", "{x}", "a*b", "per cent%20", "ümlaut"])
def test_a_name_that_looks_like_a_pattern_is_taken_as_it_is(tmp_path: Path, literal: str) -> None:
    """An existing file or folder wins over the pattern that its name could be, as a whole and as a folder before a pattern."""
    write_split(tmp_path / literal, "train", 2)
    for pointed in (f"{tmp_path}/{literal}", f"{tmp_path}/{literal}/train-{{000000..000001}}.tar", f"{tmp_path}/{literal}/*.tar"):
        assert len(resolve(pointed).shards) == 2
    touch(tmp_path, f"{literal}.tar")
    assert names(resolve(f"{tmp_path}/{literal}.tar")) == [f"{literal}.tar"]


def test_missing_names_say_what_is_there(pets: Path) -> None:
    """What matches nothing says what was looked for, where, and which names are most like it."""
    text = message(pets / "trian-*.tar")
    assert text.startswith(f"{pets}/trian-*.tar: nothing matches; {pets} holds train-")
    assert f"{pets}/train-000007.tar: not there; {pets} holds train-00000" in message(pets / "train-000007.tar")
    assert f"{pets.parent} holds pets" in message(pets.parent / "pest" / "train-*.tar")
    assert "nothing matches" in message(f"{pets}/{{train,val}}-*.tar")
    touch(pets.parent / "empty")
    assert f"{pets.parent}/empty is empty" in message(pets.parent / "empty" / "*.tar")
    assert f"{pets.parent}/empty: no manifest and no tar in it; it is empty" in message(pets.parent / "empty")
    assert "holds README.md" in message(touch(pets.parent / "docs", "README.md"))
    assert "matches no tar, manifest or folder, only README.md" in message(pets.parent / "docs" / "R*")


def test_missing_shards_are_all_named(pets: Path) -> None:
    """Every missing name of a manifest or a pattern is counted, the first ten named, with the folder."""
    write_split(pets, "train", 14)
    for i in range(1, 14):
        (pets / f"train-{i:06d}.tar").unlink()
    text = message(pets)
    assert f"13 of 14 shards that {pets}/train-shardindex.json lists aren't in {pets}: train-000001.tar, train-000002.tar" in text
    assert "train-000010.tar and 3 more" in text
    text = message(pets / "train-{000000..000013}.tar")
    assert "13 of its names aren't there: train-000001.tar" in text
    assert "train-000010.tar and 3 more" in text


def test_a_shard_named_twice_is_an_error(pets: Path) -> None:
    """The same file by two items, two spellings or a link to its folder would be read twice an epoch."""
    (pets.parent / "link").symlink_to(pets)
    for twice in ([pets, pets / "train-000001.tar"], [pets, pets.parent / "link"], [pets, f"{pets}/../pets"]):
        text = message(twice)
        assert "named more than once" in text
        assert "train-000001.tar" in text


def test_tars_that_a_manifest_forgot_are_an_error(pets: Path) -> None:
    """Tars with numbers and tars without don't mix: the error names those in no manifest."""
    touch(pets, "train-000003.tar")
    text = message(pets / "*.tar")
    assert f"1 of 4 tars are in no manifest: {pets}/train-000003.tar; the others are in {pets}/train-shardindex.json" in text
    assert "in no manifest" in message([pets, touch(pets.parent / "plain", "0.tar")])
    assert resolve(pets / "train-000003.tar").samples is None


@pytest.mark.parametrize(
    "text",
    [
        "{https://u:SECRET@host/0.tar,https://u:SECRET@host/1.tar}",
        "ftp://key:SECRET@host/0.tar",
        "hdfs://host/0.tar",
        "file://SECRET@nas/0.tar",
        "pipe:curl -H 'Token: SECRET' https://host/0.tar",
        "PIPE:cat SECRET",
        "| cat SECRET",
        "cat SECRET |",
    ],
)
def test_other_schemes_and_commands_are_refused_without_their_secrets(tmp_path: Path, text: str) -> None:
    """Other stores aren't read, commands never run, named or in a manifest; passwords and commands aren't printed."""
    write_wids(tmp_path / "index.json", [{"url": text, "nsamples": 1}])
    for pointed in (text, [text], tmp_path / "index.json"):
        got = message(pointed)
        assert "SEC" not in got
        assert "local" in got or "never run" in got or "another host" in got


def test_a_remote_path_object_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path("s3://bucket/x") has lost a slash, and is still no local path."""
    monkeypatch.chdir(tmp_path)
    assert "hdfs://host/0.tar: only local shards" in message(Path("hdfs://host/0.tar"))
    assert "s3://bucket/0.txt: neither a tar" in message(Path("s3://bucket/{0,1}.txt").with_name("{0,0}.txt"))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("0.tar.gz", "compressed"),
        ("0.tgz", "compressed"),
        ("0.idx", "neither a tar nor a manifest"),
        ("cut-shardindex.json", "not JSON"),
        ("a{b.json", "not JSON"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, made: str, says: str) -> None:
    """A file that is no tar and no manifest says so, with its path."""
    touch(tmp_path, made)
    text = message(tmp_path / made)
    assert says in text
    assert made in text


def test_broken_manifests_are_errors(pets: Path) -> None:
    """A cut manifest beside tars isn't passed over in silence; one without shards, or with compressed ones, says so."""
    (pets / "train-shardindex.json").write_bytes((pets / "train-shardindex.json").read_bytes()[:80])
    for pointed in (pets, pets / "train-000000.tar", pets / "train-shardindex.json"):
        assert f"{pets}/train-shardindex.json: not JSON" in message(pointed)
    write_wids(pets / "train-shardindex.json", [])
    assert "lists no shards" in message(pets)
    write_wids(pets / "train-shardindex.json", [{"url": "a.tar.gz", "nsamples": 1}])
    assert "compressed shards" in message(pets)
    (pets / "train-shardindex.json").unlink()
    (pets / "train-shardindex.json").mkdir()
    assert names(resolve(pets)) == ["train-000000.tar", "train-000001.tar", "train-000002.tar"]


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        (None, "NoneType"),
        (3, "int"),
        (b"x.tar", "bytes"),
        ({"a.tar"}, "set"),
        ([["a.tar"]], "list"),
        ([1], "int"),
        (iter([]), "iterator"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_arguments_of_other_types_are_refused(shards: Any, says: str) -> None:
    """What is no path and no list of paths is an error that says what to give."""
    text = message(shards, OptionsError)
    assert says in text
    assert "a list of those" in text


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ([], "an empty list"),
        ("", "an empty path"),
        ("  ", "an empty path"),
        ("/nowhere/x-{000000..00", "braces don't pair"),
        ("/nowhere/{0..9999}/{0..9999..2}.tar", "gives more than 10000000 names"),
        ("/nowhere/a**b/*.tar", "no pattern|nothing matches"),
        ("/nowhere\0/x.tar", "not there"),
        ("/nowhere/{" + ",".join(f"{i:04d}" for i in range(200)) + "}.tar", "200 of its names"),
        ("~nobody-of-this-name/x.tar", "not there"),
    ],
)
def test_texts_that_name_nothing_are_errors(shards: Any, says: str) -> None:
    """Empty, unbalanced, endless and over-long texts are errors of their own, never a traceback of the system's."""
    with pytest.raises(SourceError, match=says):
        resolve(shards)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_says_so(pets: Path) -> None:
    """A folder that this user may not list is an error with its path."""
    pets.chmod(0)
    try:
        assert f"{pets}" in message(pets / "*.tar")
    finally:
        pets.chmod(0o755)


def test_a_folder_is_listed_once(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand tars cost one listing of their folder, however they are named."""
    asked: list[str] = []
    real = folders._list
    monkeypatch.setattr(folders, "_list", lambda folder: asked.append(folder) or real(folder))  # type: ignore[func-returns-value]
    write_split(pets, "train", 50)
    resolve([pets / f"train-{i:06d}.tar" for i in range(50)])
    assert asked == [str(pets)]


def test_a_big_manifest_is_resolved_in_seconds(tmp_path: Path) -> None:
    """Twenty thousand shards take well under five seconds, missing ones included."""
    touch(tmp_path)
    manifest = Manifest("big", "train", entries("train", 20_000), CLASSES)
    (tmp_path / "train-shardindex.json").write_bytes(dump(manifest))
    began = time.perf_counter()
    assert "20000 of 20000 shards" in message(tmp_path)
    assert time.perf_counter() - began < 5


def test_numbers_of_any_length_are_sorted() -> None:
    """By value; Python makes no integer of five thousand digits."""
    names = ["9" * 5000, "10.tar", "a", "2.tar", "002.tar", "1" + "0" * 5000, "0.tar"]
    assert sorted(names, key=natural) == ["0.tar", "002.tar", "2.tar", "10.tar", "9" * 5000, "1" + "0" * 5000, "a"]


@pytest.mark.parametrize("pattern", ["{/etc/*,b}", "*/" * 3000 + "x"])
def test_patterns_that_python_cannot_look_for(tmp_path: Path, pattern: str) -> None:
    """An absolute part in braces, and thousands of folders, are errors with the pattern."""
    with pytest.raises(SourceError):
        resolve(f"{tmp_path}/{pattern}")


@pytest.mark.parametrize("name", ["train-000000.tar", "train-000000.idx", "train-shardindex.json"])
def test_a_pipe_is_no_shard(tmp_path: Path, name: str) -> None:
    """What waits for ever for somebody who writes is refused by name: as a tar, an index, a manifest."""
    pack(tmp_path, 4, 1)
    for path in tmp_path.glob("*-shardindex.json"):
        path.unlink()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    program = "import sys, pipeline\nwith pipeline.make_loader(sys.argv[1], batch_size=2, num_workers=0) as loader: list(loader)"
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "not a regular file" in done.stderr.splitlines()[-1]
