"""Indexing tars of others: what is written where, what is reported, and what isn't overwritten."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from foreign import looked_up, mk, run, samples, streamed
from gallery import Silent, tree

from shardify import scan as scanning
from shardify.errors import FormatError, SettingsError
from shardify.format import index as layout
from shardify.format import manifest, tar
from shardify.index import index
from shardify.scan import scan
from shardify.verify import verify


def test_the_manifest(tmp_path: Path) -> None:
    """The manifest counts and hashes each tar, in order, names its fields, and says that others packed it; verify agrees."""
    paths = [mk(tmp_path / f"train-{n}.tar", samples(10 * n, 3 + n)) for n in (2, 10)]
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
    found = run(tmp_path)
    made = manifest.read(tmp_path / "train-shardindex.json")
    assert [(s.url, s.nsamples, s.filesize, s.sha256, s.index) for s in made.shards] == [
        (path.name, count, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest(), "")
        for path, count in zip(paths, (5, 13), strict=True)
    ]
    assert (made.fields, made.classes, made.indexed, made.split) == (("cls", "jpg"), None, True, "train")
    assert found.manifests == {"train": str(tmp_path.resolve() / "train-shardindex.json")}
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths} == before
    assert sorted(tree(tmp_path)) == ["train-10.idx", "train-10.tar", "train-2.idx", "train-2.tar", "train-shardindex.json"]
    assert verify(tmp_path / "train-shardindex.json", decode=False, progress=Silent()).splits["train"].samples == 18


@pytest.mark.parametrize("apart", [False, True])
def test_verify_knows_what_indexing_promises(tmp_path: Path, apart: bool) -> None:
    """verify takes others' keys and fields as they are, finds indexes where the manifest says, and a tar without one; not a wrong one."""
    mk(tmp_path / "in" / "train-0.tar", [(f"n01.v2/{n}.{field}", b"1") for n in range(3) for field in ("cls", "jpg")])
    mk(tmp_path / "in" / "train-1.tar", [("hot dog/1.cls", b"1"), ("hot dog/1.jpg", b"j")])
    out = tmp_path / "out" if apart else tmp_path / "in"
    run(tmp_path / "in", out=out)
    assert verify(out, decode=False, progress=Silent()).problems == ()
    (out / "train-0.idx").write_bytes(layout.dump([]))
    (problem,) = verify(out, decode=False, progress=Silent()).problems
    assert problem.startswith("train-0.idx: 0 samples, and the tar holds 3")


def test_headers_only_leaves_the_hash_out(tmp_path: Path) -> None:
    """Without the bytes there is no hash; all else is the same."""
    mk(tmp_path / "train-0.tar", samples(0))
    run(tmp_path)
    whole = manifest.read(tmp_path / "train-shardindex.json")
    run(tmp_path, headers_only=True, force=True)
    (entry,) = manifest.read(tmp_path / "train-shardindex.json").shards
    assert entry.sha256 == "" and (entry.url, entry.nsamples, entry.filesize) == tuple(
        getattr(whole.shards[0], name) for name in ("url", "nsamples", "filesize")
    )


def test_bad_tars_left_out_on_request(tmp_path: Path) -> None:
    """With skip_bad the manifest lists the good tars, the bad ones are named as remarks, and nothing but bad ones is an error."""
    mk(tmp_path / "train-0.tar", samples(0))
    (tmp_path / "train-1.tar").write_bytes(bytes(10240))
    found = run(tmp_path, skip_bad=True)
    assert found.problems == () and [s.url for s in manifest.read(tmp_path / "train-shardindex.json").shards] == ["train-0.tar"]
    assert len(found.notes) == 1 and found.notes[0].startswith(f"left out: {tmp_path}/train-1.tar: holds no sample")
    alone = run(tmp_path / "train-1.tar", skip_bad=True, out=tmp_path / "out")
    assert "not written, as 1 of 1 tars" in alone.problems[0] and not (tmp_path / "out").exists()


def test_unequal_fields_are_reported(tmp_path: Path) -> None:
    """Samples with other fields than most are reported with the first of each, and the set is written: they can be read."""
    mk(tmp_path / "train-0.tar", [*samples(0, 9), ("odd.jpg", b"j"), *samples(50, 3, ("jpg", "cls", "json"))])
    found = run(tmp_path)
    assert found.problems == (
        "train-0.tar: sample 'k0050' has jpg, cls, json, as 3 samples do; most have cls, picture",
        "train-0.tar: sample 'odd' has jpg, alone; most have cls, picture",
    )
    assert manifest.read(tmp_path / "train-shardindex.json").fields == ("cls", "jpg", "json")
    assert looked_up(tmp_path / "train-0.tar") == streamed(tmp_path / "train-0.tar")


def test_repeated_keys_are_reported(tmp_path: Path) -> None:
    """A key in several tars, also of several splits, is reported with both, and the set is written."""
    mk(tmp_path / "train-0.tar", samples(0))
    mk(tmp_path / "train-1.tar", samples(3))
    mk(tmp_path / "val-0.tar", samples(6, 2))
    found = run(tmp_path)
    assert sorted(found.problems) == [
        "train-1.tar: key 'k0003' stands in train-0.tar too; keys must be unique in the whole set",
        "val-0.tar: key 'k0006' stands in train-1.tar too; keys must be unique in the whole set",
    ]
    assert {name: size.samples for name, size in found.splits.items()} == {"train": 8, "val": 2}
    assert set(found.manifests) == {"train", "val"}


def test_names_with_blanks(tmp_path: Path) -> None:
    """DALI's layout can't hold a blank: such a tar is in the manifest, gets no index, and that is a problem; keys are still compared."""
    mk(tmp_path / "train-0.tar", [("hot dog/1.jpg", b"j"), ("hot dog/1.cls", b"0")])
    mk(tmp_path / "train-1.tar", [("hot dog/1.jpg", b"j"), ("hot dog/1.cls", b"0")])
    mk(tmp_path / "train-2.tar", samples(0))
    found = run(tmp_path, out=tmp_path / "out")
    assert len(found.problems) == 3 and all(
        "'hot dog/1.jpg': DALI's index can't hold a name with a blank; it gets none" in p for p in found.problems[:2]
    )
    assert found.problems[2].startswith("../train-1.tar: key 'hot dog/1' stands in ../train-0.tar too")
    assert [(s.nsamples, s.index) for s in manifest.read(tmp_path / "out" / "train-shardindex.json").shards] == [
        (1, ""),
        (1, ""),
        (4, "train-2.idx"),
    ]
    (tmp_path / "train-0.idx").write_bytes(layout.dump([]))
    found = run(tmp_path, force=True)
    assert f"{tmp_path}/train-0.idx is there; it can't be right: remove it" in found.problems[0]
    assert not (tmp_path / "train-shardindex.json").exists()


def test_what_a_trainer_has_to_say(tmp_path: Path) -> None:
    """Fields that a loader doesn't look for by itself are remarks with the option to set, not problems."""
    mk(tmp_path / "train-0.tar", samples(0, 3, ("tif", "json")))
    mk(tmp_path / "val-0.tar", [("a.jpg", b"j"), ("a.cls", b"0"), ("b.png", b"p"), ("b.cls", b"0")])
    found = run(tmp_path)
    assert found.problems == () and len(found.notes) == 3
    assert (
        "LoaderOptions(image=...)" in found.notes[0]
        and "label=None" in found.notes[1]
        and "several types: jpg, png" in found.notes[2]
    )


def test_again(tmp_path: Path) -> None:
    """A second run finds what it would write, and changes no file."""
    mk(tmp_path / "train-0.tar", samples(0))
    first = run(tmp_path)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    assert run(tmp_path) == first
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


STANDING: dict[str, tuple[str, bytes, str]] = {
    "another tool's index": ("train-0.idx", b"jpg 512 3\n", "train-0.idx: .* is not the first line of an index"),
    "half an index": ("train-0.idx", b"", "train-0.idx: '' is not the first line"),
    "another tool's manifest": (
        "train-shardindex.json",
        b'{"wids_version": 1, "shardlist": [{"url": "train-0.tar", "nsamples": 4}]}',
        "train-shardindex.json: is another tool's",
    ),
    "no manifest": ("train-shardindex.json", b"[1]", "train-shardindex.json: no wids shard index"),
    "a manifest of fewer tars": (
        "train-shardindex.json",
        manifest.dump(manifest.Manifest("train", "train", (), indexed=True)),
        "lists 0 tars, and not these 1 with their sizes",
    ),
}


@pytest.mark.parametrize("what", STANDING)
def test_what_stands_there_is_not_overwritten(tmp_path: Path, what: str) -> None:
    """Files of others, or of another set of tars, are refused before anything is read, and replaced by force alone."""
    name, data, said = STANDING[what]
    mk(tmp_path / "train-0.tar", samples(0))
    (tmp_path / name).write_bytes(data)
    before = tree(tmp_path)
    with pytest.raises(SettingsError, match=f"{said}.*--force"):
        run(tmp_path)
    assert tree(tmp_path) == before
    assert run(tmp_path, force=True).problems == ()
    assert looked_up(tmp_path / "train-0.tar") == streamed(tmp_path / "train-0.tar")


def test_an_index_of_another_tar(tmp_path: Path) -> None:
    """An index that looks fine and says something else is found when the tar was read: kept, reported, replaced by force."""
    mk(tmp_path / "train-0.tar", samples(0))
    run(tmp_path)
    mk(tmp_path / "train-0.tar", samples(2))
    before = tree(tmp_path)
    found = run(tmp_path, skip_bad=True)
    assert "train-0.idx: is there and says something else" in found.problems[0] and "--force" in found.problems[0]
    assert tree(tmp_path) == before and found.manifests == {}
    assert run(tmp_path, force=True).problems == ()
    assert looked_up(tmp_path / "train-0.tar") == streamed(tmp_path / "train-0.tar")


def test_a_packed_set_is_not_indexed(tmp_path: Path) -> None:
    """A set that shardify packed has all this and more: its manifest is never replaced, not even by force."""
    mk(tmp_path / "train-0.tar", samples(0))
    packed = manifest.Manifest("x", "train", (), classes=("a",), settings={"order": {"seed": 0}})
    (tmp_path / "train-shardindex.json").write_bytes(manifest.dump(packed))
    with pytest.raises(SettingsError, match="packed by shardify"):
        run(tmp_path, force=True)


def test_a_folder_of_its_own(tmp_path: Path) -> None:
    """With `out` nothing appears beside the tars; the manifest leads from there to tars and indexes."""
    for n in (0, 1):
        mk(tmp_path / "in" / f"0{n}" / "000.tar", samples(10 * n))
    before = tree(tmp_path / "in")
    assert run(*sorted((tmp_path / "in").iterdir()), split="train", out=tmp_path / "deep" / "out").problems == ()
    assert tree(tmp_path / "in") == before
    out = tmp_path / "deep" / "out"
    assert sorted(tree(out)) == ["00/000.idx", "01/000.idx", "train-shardindex.json"]
    for entry in manifest.read(out / "train-shardindex.json").shards:
        assert entry.url.startswith("../../in/0")
        assert looked_up(out / entry.url, out / entry.index) == streamed(out / entry.url)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    """A folder that can't be written to is said before anything is read, with the way out."""
    mk(tmp_path / "in" / "train-0.tar", samples(0))
    (tmp_path / "in").chmod(0o500)
    with pytest.raises(SettingsError, match="can't be written to; name another folder by --out"):
        run(tmp_path / "in")
    assert run(tmp_path / "in", out=tmp_path / "out").problems == ()


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    """An output folder that is a file is said before anything is read."""
    mk(tmp_path / "train-0.tar", samples(0))
    with pytest.raises(SettingsError, match="can't be written to"):
        run(tmp_path, out=tmp_path / "train-0.tar" / "x")


def test_a_tar_that_grows_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tar that changes while it is read is no tar to index yet."""
    path = mk(tmp_path / "train-0.tar", samples(0))
    real = tar.samples

    def growing(*arguments: Any, **options: Any) -> Any:
        with path.open("ab") as file:
            file.write(b"more")
        return real(*arguments, **options)

    monkeypatch.setattr(scanning.tar, "samples", growing)
    with pytest.raises(FormatError, match="changed while it was read"):
        scan(path, hashing=True)


class Stopping(Silent):
    """Progress at which someone presses Ctrl-C."""

    def advance(self, size: int) -> None:
        """Stop at the second tar."""
        super().advance(size)
        if self.told == 2:
            raise KeyboardInterrupt


def test_an_interrupted_run(tmp_path: Path) -> None:
    """What a run that was stopped has written is complete, there is no manifest, and the next run ends as an undisturbed one."""
    for n in range(3):
        mk(tmp_path / f"train-{n}.tar", samples(10 * n))
    with pytest.raises(KeyboardInterrupt):
        index([str(tmp_path)], progress=Stopping())
    assert sorted(name for name in tree(tmp_path) if not name.endswith(".tar")) == ["train-0.idx", "train-1.idx"]
    assert looked_up(tmp_path / "train-1.tar") == streamed(tmp_path / "train-1.tar")
    assert run(tmp_path).problems == ()
    assert manifest.read(tmp_path / "train-shardindex.json").samples == 12


def test_progress_counts_tars(tmp_path: Path) -> None:
    """Progress is told of each tar, good or bad."""
    mk(tmp_path / "train-0.tar", samples(0))
    (tmp_path / "train-1.tar").write_bytes(b"")
    silent = Silent()
    index([str(tmp_path)], progress=silent)
    assert (silent.stages, silent.told) == ([("indexing", 2)], 2)
