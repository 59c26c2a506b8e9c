"""The output folder: nobody's files are touched, one build at a time, nothing stays of a failed one."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from gallery import tree
from packing import pack

from shardify.errors import SettingsError
from shardify.format import card, manifest
from shardify.journal import NAME, SPOOL, Journal, Record
from shardify.sinks.folder import FolderSink


def make_set(folder: Path) -> None:
    """Put a packed set with its card into a folder."""
    pack(folder, 6, 2)
    pack(folder, 2, 1, split="val", first=6)
    (folder / "README.md").write_bytes(card.dump([manifest.read(path) for path in manifest.find(folder)]))


def open_and_clear(folder: Path, *, force: bool) -> None:
    """Do what a build does before it writes."""
    with FolderSink(folder, ("train", "val"), force=force) as sink, closing(clear(sink)):
        sink.finish()


def clear(sink: FolderSink) -> Journal:
    """Begin a journal and clear the folder for two shards of train, as a build does once all is read."""
    spool = sink.folder / SPOOL
    sink.begin(spool)
    log = Journal.create(sink.journal_path, Record("build", {"spool": SPOOL, "place": sink.place, "replaces": sink.replaced()}))
    sink.clear(log, {"train": 2, "val": 1})
    return log


@pytest.mark.parametrize("force", [False, True])
def test_new_and_empty_folders_are_fine(tmp_path: Path, force: bool) -> None:
    """A folder that isn't there is made, with those above it."""
    open_and_clear(tmp_path, force=force)
    with FolderSink(tmp_path / "a" / "b", ("train",), force=force) as sink, closing(clear(sink)):
        (sink.folder / "train-shardindex.json").write_text("{}")
        sink.finish()
    assert tree(tmp_path) == {"a/b/train-shardindex.json": b"{}"}


def test_a_set_is_refused_and_replaced_by_force(tmp_path: Path) -> None:
    """A folder with a set is refused, and emptied by --force: tars, indexes, manifests, card and their temporary files."""
    make_set(tmp_path)
    (tmp_path / "train-000001.tar.partial").write_bytes(b"half")
    before = tree(tmp_path)
    with pytest.raises(SettingsError, match=r"holds a set \(README.md, .*--out.*--force"):
        open_and_clear(tmp_path, force=False)
    assert tree(tmp_path) == before
    open_and_clear(tmp_path, force=True)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "train-000002.tar", "train-000002.idx", "test-000000.tar", "x.partial", "deep/train-000000.tar", "README.md.bak"],
)
@pytest.mark.case("S03")
def test_force_removes_nothing_that_no_manifest_names(tmp_path: Path, name: str) -> None:
    """One file more than a manifest names, and nothing is removed: the file is named (S03)."""
    make_set(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    before = tree(tmp_path)
    with pytest.raises(SettingsError, match=rf"no manifest or journal there names \({name.split('/', maxsplit=1)[0]}\)"):
        open_and_clear(tmp_path, force=True)
    assert tree(tmp_path) == before


def test_an_edited_card_is_the_users(tmp_path: Path) -> None:
    """A README that someone wrote in isn't removed."""
    make_set(tmp_path)
    with (tmp_path / "README.md").open("a") as file:
        file.write("Where the pictures come from: ...\n")
    with pytest.raises(SettingsError, match=r"\(README\.md\)"):
        open_and_clear(tmp_path, force=True)


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    """URLs that lead out of the folder, links and folders under a shard's name are left alone."""
    target, other = tmp_path / "out", tmp_path / "train-000000.tar"
    make_set(target)
    shutil.move(target / "train-000000.tar", other)
    listed = (target / "train-shardindex.json").read_text()
    (target / "train-shardindex.json").write_text(listed.replace('"train-000000.tar"', '"../train-000000.tar"'))
    (target / "train-000000.idx").unlink()
    open_and_clear(target, force=True)
    assert tree(tmp_path).keys() == {"train-000000.tar"}
    make_set(target)
    (target / "train-000000.tar").unlink()
    (target / "train-000000.tar").symlink_to(other)
    with pytest.raises(SettingsError, match=r"\(train-000000\.tar\)"):
        open_and_clear(target, force=True)
    assert other.exists()


def test_a_broken_manifest_names_nothing(tmp_path: Path) -> None:
    """A manifest that can't be read is a stranger's file."""
    make_set(tmp_path)
    (tmp_path / "val-shardindex.json").write_text("{")
    with pytest.raises(SettingsError, match=r"\(val-000000.idx, val-000000.tar, val-shardindex.json\)"):
        open_and_clear(tmp_path, force=True)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    """An output that is a file is refused."""
    (tmp_path / "out").write_text("x")
    with pytest.raises(SettingsError, match="is a file, not a folder"):
        open_and_clear(tmp_path / "out", force=True)


def test_two_builds_at_once(tmp_path: Path) -> None:
    """The second build into a folder is refused while the first one runs, whether or not it has written, and can't harm it."""
    folder = tmp_path / "out"
    with FolderSink(folder, ("train",)) as sink:
        with pytest.raises(SettingsError, match="another build writes to"):
            open_and_clear(folder, force=True)
        clear(sink).close()
        (folder / "train-000000.tar").write_bytes(b"x")
        with pytest.raises(SettingsError, match="another build writes to"):
            open_and_clear(folder, force=True)
        sink.finish()
    assert tree(folder) == {"train-000000.tar": b"x"}


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """What a build that has nothing to go on from wrote goes when it fails, and a folder it made; files of others stay."""
    folder = tmp_path / "new"

    def fail(*names: str) -> None:
        with FolderSink(folder, ("train", "val")) as sink:
            sink.begin(folder / SPOOL)
            Journal.create(sink.journal_path, Record("build", {})).close()
            (folder / SPOOL).mkdir()
            for name in names:
                (folder / name).write_bytes(b"x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt):
        fail("notes.txt")
    assert tree(folder).keys() == {"notes.txt"}


def test_a_build_that_fails_early_keeps_the_old_set(tmp_path: Path) -> None:
    """Under --force the old set goes when the new one is about to be written, not when the source turns out wrong."""
    make_set(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt), FolderSink(tmp_path, ("train", "val"), force=True):
        raise KeyboardInterrupt
    assert tree(tmp_path) == before


def cut_off(folder: Path, *names: str) -> None:
    """Leave a folder as a build does that was killed after it wrote these files."""
    with pytest.raises(KeyboardInterrupt), FolderSink(folder, ("train", "val"), force=True) as sink, closing(clear(sink)):
        sink.keeps = True
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"x")
        raise KeyboardInterrupt


def test_what_a_cut_off_build_left_is_called_that(tmp_path: Path) -> None:
    """A journal there is the way to go on; without --resume or --force nothing is touched."""
    cut_off(tmp_path, "train-000000.tar", "train-000001.tar.partial")
    before = tree(tmp_path)
    with pytest.raises(SettingsError, match="cut off; go on with --resume"):
        open_and_clear(tmp_path, force=False)
    with FolderSink(tmp_path, ("train", "val"), resume=True) as sink:
        assert sink.resumes
    assert tree(tmp_path) == before


def test_force_removes_what_a_journal_names(tmp_path: Path) -> None:
    """Shards, indexes, half files and the spool of a build that was cut off go, and nothing else."""
    written = ["train-000000.tar", "train-000000.idx", "train-000001.tar.partial", "val-000000.idx.partial", "val-shardindex.json"]
    cut_off(tmp_path, *written, f"{SPOOL}/000000")
    (tmp_path / "train-000002.tar").write_bytes(b"mine")
    with pytest.raises(SettingsError, match=r"no manifest or journal there names \(train-000002\.tar\)"):
        open_and_clear(tmp_path, force=True)
    assert (tmp_path / "train-000000.tar").exists()
    (tmp_path / "train-000002.tar").unlink()
    open_and_clear(tmp_path, force=True)
    assert tree(tmp_path) == {}


def test_force_after_a_force_that_was_cut_off(tmp_path: Path) -> None:
    """The old set that a killed --force was about to remove is removed by the next one, wherever the kill came."""
    make_set(tmp_path)
    cut_off(tmp_path)
    make_set(tmp_path)  # as if it had been killed right after it noted what goes
    open_and_clear(tmp_path, force=True)
    assert tree(tmp_path) == {}


def test_a_resume_of_nothing(tmp_path: Path) -> None:
    """In an empty folder there is nothing to go on with, and a set without a journal is refused."""
    with FolderSink(tmp_path, ("train", "val"), resume=True) as sink:
        assert not sink.resumes
    make_set(tmp_path)
    with pytest.raises(SettingsError, match="no journal of a build to go on with"), FolderSink(tmp_path, ("train",), resume=True):
        pass


def test_a_journal_that_cannot_be_read(tmp_path: Path) -> None:
    """A journal of another version is no reason to guess: --resume names it, --force begins anew."""
    (tmp_path / NAME).write_bytes(b"shardify journal 9\n")
    with FolderSink(tmp_path, ("train",), resume=True) as sink, pytest.raises(SettingsError, match="no journal of this version"):
        Journal.reopen(sink.journal_path)
    open_and_clear(tmp_path, force=True)
    assert tree(tmp_path) == {}
