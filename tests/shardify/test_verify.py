"""Verify: a good set passes, and every kind of damage is found and named, all of it at once."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gallery import Silent
from packing import jpeg, pack, write_tar

from shardify.errors import SettingsError
from shardify.format import index, manifest
from shardify.format.manifest import Manifest, ShardEntry
from shardify.verify import Verdict, verify


def check(path: Path, *, decode: bool = False) -> Verdict:
    """Verify without showing progress."""
    return verify(path, decode=decode, progress=Silent())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits: 12 pictures in 3 shards, 4 in one."""
    folder = tmp_path_factory.mktemp("good")
    pack(folder, 12, 3)
    pack(folder, 4, 1, split="val", first=12)
    return folder


@pytest.fixture
def copied(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(good, tmp_path / "set")


def rewrite(folder: Path, samples: Sequence[tuple[str, Sequence[tuple[str, bytes]]]], **changes: Any) -> None:
    """Write shard 1 anew with index and manifest that fit it, so that only the samples can be wrong."""
    path = folder / "train-000001.tar"
    records = write_tar(path, samples)
    path.with_suffix(".idx").write_bytes(index.dump(records))
    raw = path.read_bytes()
    old = manifest.read(folder / "train-shardindex.json")
    entry = ShardEntry(path.name, len(records), len(raw), hashlib.sha256(raw).hexdigest())
    fields = {"name": "x", "split": "train", "classes": old.classes} | changes
    made = Manifest(shards=(old.shards[0], entry, old.shards[2]), **fields)
    (folder / "train-shardindex.json").write_bytes(manifest.dump(made))


def change_manifest(folder: Path, **changes: Any) -> None:
    """Replace keys of train's manifest."""
    path = folder / "train-shardindex.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def patch(path: Path, at: int, data: bytes) -> None:
    """Overwrite bytes in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("decode", [False, True])
def test_a_good_set_passes(good: Path, decode: bool) -> None:
    """A whole set has no problems, decoded or not; the numbers are the manifests'."""
    verdict = check(good, decode=decode)
    assert verdict.problems == ()
    assert {name: (s.shards, s.samples) for name, s in verdict.splits.items()} == {"train": (3, 12), "val": (1, 4)}


def test_one_split_by_its_manifest(copied: Path) -> None:
    """A manifest is verified alone: the other split's damage and strays are not its own."""
    (copied / "val-000000.tar").unlink()
    (copied / "val-000007.tar").write_bytes(b"")
    assert check(copied / "train-shardindex.json").problems == ()
    assert set(check(copied / "train-shardindex.json").splits) == {"train"}


SPOILED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a shard is missing": (lambda d: (d / "train-000001.tar").unlink(), ["train-000001.tar: listed in the manifest of 'train', and not there"]),
    "a shard is renamed": (
        lambda d: (d / "train-000001.tar").rename(d / "train-000009.tar"),
        ["train-000001.tar: listed", "train-000009.tar: no manifest lists it"],
    ),
    "a stray index": (lambda d: (d / "test-000000.idx").write_bytes(b""), ["test-000000.idx: no manifest lists it"]),
    "an unfinished file": (lambda d: (d / "x.tar.partial").write_bytes(b""), ["x.tar.partial: no manifest lists it"]),
    "a bit is flipped in a picture": (lambda d: patch(d / "train-000000.tar", 1000, b"\0"), ["train-000000.tar: its sha256 isn't"]),
    "a header is damaged": (
        lambda d: patch(d / "train-000000.tar", 10, b"!"),
        ["train-000000.tar: its sha256", "train-000000.tar at byte 0: a damaged header"],
    ),
    "a shard is cut": (
        lambda d: (d / "val-000000.tar").write_bytes((d / "val-000000.tar").read_bytes()[:-1024]),
        ["val-000000.tar: .* bytes, and the manifest says", "val-000000.tar: its sha256", "val-000000.tar at byte .*two zero blocks"],
    ),
    "a shard of zeros": (
        lambda d: (d / "val-000000.tar").write_bytes(bytes((d / "val-000000.tar").stat().st_size)),
        ["val-000000.tar: its sha256", "val-000000.tar: 0 samples, and the manifest says 4", r"val-000000\.idx: 4 samples, and the tar holds 0"],
    ),
    "an index is missing": (lambda d: (d / "train-000002.idx").unlink(), ["train-000002.idx: not there"]),
    "an index is another's": (
        lambda d: shutil.copy(d / "train-000001.idx", d / "train-000000.idx"),
        [f"train-000000.idx line {line}: not what the tar holds there, 'train00000{line - 2}'" for line in range(2, 6)],
    ),
    "an index is cut": (lambda d: (d / "train-000000.idx").write_bytes(b"v1.2 4\n"), ["train-000000.idx: states 4 samples"]),
    "a manifest is broken": (
        lambda d: (d / "val-shardindex.json").write_text("{"),
        [r"val-shardindex\.json: not JSON"],
    ),
    "a manifest is edited": (
        lambda d: change_manifest(d, digest="0" * 64),
        ["train-shardindex.json: digest is 000"],
    ),
    "classes differ": (
        lambda d: change_manifest(d, classes=["a", "b", "c", "d", "e", "f"]),
        ["train-shardindex.json, val-shardindex.json: the splits differ in their classes"],
    ),
    "a remote shard": (
        lambda d: rewrite_url(d, "https://host/train-000001.tar"),
        ["https://host/train-000001.tar: a remote shard isn't verified"],
    ),
    "keys of another split": (
        lambda d: rewrite(d, [("train000004", [("jpg", jpeg(1)), ("cls", b"0")]), ("val000012", [("jpg", jpeg(2)), ("cls", b"1")])]),
        ["val-000000.tar: key 'val000012' stands in train-000001.tar too"],
    ),
    "keys out of the grammar": (
        lambda d: rewrite(d, [("_a", [("jpg", jpeg(1)), ("cls", b"0")])]),
        ["train-000001.tar: sample '_a': its key isn't of letters"],
    ),
    "members of samples that don't stand together": (
        lambda d: rewrite(d, [("a", [("jpg", b"1")]), ("b", [("jpg", b"2")]), ("a", [("cls", b"0")]), ("b", [("cls", b"1")])]),
        [r"train-000001\.tar at byte 2048: 'a\.cls' comes after its sample was closed"],
    ),
    "labels": (
        lambda d: rewrite(d, [(f"k{n}", [("jpg", jpeg(n)), ("cls", text)]) for n, text in enumerate((b"5", b"-1", b"1.0", b"", b"4"))]),
        [
            "sample 'k0': its label 5 is none of the 5 classes",
            "'k1': its label b'-1' isn't an ASCII integer",
            r"'k2': its label b'1\.0' isn't",
            "'k3': its label b'' isn't",
        ],
    ),
    "labels as they are": (
        lambda d: rewrite(d, [("k", [("jpg", jpeg(1)), ("cls", b"9223372036854775808")])], classes=None),
        ["the splits differ in their classes", "its label 9223372036854775808 is none of the 9223372036854775808"],
    ),
    "fields": (
        lambda d: rewrite(d, [("a", [("jpg", jpeg(1))]), ("b", [("cls", b"0"), ("jpg", jpeg(1))]), ("c", [("png", b""), ("cls", b"0")])]),
        [f"sample '{key}': its fields are {fields}, and" for key, fields in (("a", "jpg"), ("b", "cls, jpg"), ("c", "png, cls"))],
    ),
    "json": (
        lambda d: rewrite(
            d,
            [(f"k{n}", [("jpg", jpeg(n)), ("cls", b"0"), ("json", text)]) for n, text in enumerate((b"{}", b"[]", b"{", b"\xff"))],
            fields=("cls", "jpg", "json"),
        ),
        ["'k1': its json isn't", "'k2': its json isn't", "'k3': its json isn't"] + 8 * ["its fields are jpg, cls, and the manifest says"],
    ),
}  # fmt: skip


def rewrite_url(folder: Path, url: str) -> None:
    """Let train's manifest name its second shard by another URL, and put the file away."""
    path = folder / "train-shardindex.json"
    path.write_text(path.read_text().replace('"train-000001.tar"', json.dumps(url)))


@pytest.mark.parametrize("damage", SPOILED)
@pytest.mark.case("N07")
def test_damage_is_found(copied: Path, damage: str) -> None:
    """Each kind of damage is named, with its place, and nothing else is."""
    spoil, said = SPOILED[damage]
    spoil(copied)
    problems = check(copied).problems
    assert len(problems) == len(said), problems
    for text in said:
        assert any(re.search(text, problem) for problem in problems), (text, problems)


def test_all_damage_is_reported_at_once(copied: Path) -> None:
    """Damage of several kinds in several shards is one list."""
    for damage in ("a bit is flipped in a picture", "an index is missing", "a stray index", "a shard is cut"):
        SPOILED[damage][0](copied)
    assert len(check(copied).problems) == 6


def test_decoding_finds_what_the_rest_cannot(copied: Path) -> None:
    """A picture that was packed broken, hashes and all, is found by decoding alone, and named."""
    cut = jpeg(2)[:-2]
    rewrite(
        copied,
        [("ok", [("jpg", jpeg(1)), ("cls", b"0")]), ("cut", [("jpg", cut), ("cls", b"1")]), ("no", [("jpg", b"x"), ("cls", b"1")])],
    )
    assert check(copied).problems == ()
    first, second = check(copied, decode=True).problems
    assert first.startswith("train-000001.tar: cut.jpg: jpeg of") and "without its end" in first
    assert second.startswith("train-000001.tar: no.jpg: text, not a picture")


def test_a_kept_mixture_passes(copied: Path) -> None:
    """Under `types: keep` each sample has one of the picture fields."""
    rewrite(copied, [("a", [("png", b"x"), ("cls", b"0")]), ("b", [("jpg", b"x"), ("cls", b"0")])], fields=("cls", "jpg", "png"))
    assert check(copied).problems == ()


def test_a_wids_index_of_others_passes(copied: Path) -> None:
    """Where a manifest states no hash, size, fields or classes, what it states is checked."""
    for path in {*copied.glob("val*"), *copied.glob("*.idx")}:
        path.unlink()
    shards = [{"url": f"train-{n:06d}.tar", "nsamples": 4} for n in range(3)]
    (copied / "train-shardindex.json").write_text(json.dumps({"wids_version": 1, "shardlist": shards}))
    assert check(copied).problems == ()
    shards[0]["nsamples"] = 5
    (copied / "train-shardindex.json").write_text(json.dumps({"wids_version": 1, "shardlist": shards}))
    assert check(copied).problems == ("train-000000.tar: 4 samples, and the manifest says 5; copy it again",)


def test_where_there_is_no_set(tmp_path: Path) -> None:
    """A path that isn't there is an argument's error; a folder without a manifest is an unfinished build."""
    with pytest.raises(SettingsError, match="no such folder or manifest"):
        check(tmp_path / "none")
    assert "no <split>-shardindex.json; the build didn't end" in check(tmp_path).problems[0]


def test_no_secret_of_a_manifest_is_told(tmp_path: Path) -> None:
    """Users, passwords and queries of the URLs in a manifest are in no message of verify or doctor."""
    import random

    from shardify.doctor import contents

    urls = ["https://me:hush@host/train-000000.tar?sig=hush", "train-000001.tar?sig=hush"]
    entries = tuple(ShardEntry(url, 2, 4096, "") for url in urls)
    path = tmp_path / "train-shardindex.json"
    path.write_bytes(manifest.dump(Manifest("x", "train", entries)))
    told = check(tmp_path).problems
    assert any("https://...@host/train-000000.tar?...: a remote shard isn't verified" in line for line in told)
    assert any(line.startswith("train-000001.tar?...: listed in the manifest") for line in told)
    found = contents.look(path, {"jpg"}, 1.0, random.Random(0))
    assert "hush" not in repr((told, found.troubles))
