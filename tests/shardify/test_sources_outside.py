"""Rows whose files aren't theirs alone: links that lead out of the root, and several rows that name one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gallery import Silent, make_gallery, tree
from packing import jpeg

from shardify import build
from shardify.config import BuildConfig
from shardify.errors import DataError


def run(config: BuildConfig, **more: Any) -> build.Report:
    """Build quietly."""
    return build.build(config, force=False, skipped_to=None, progress=Silent(), **more)


@pytest.mark.parametrize("kind", ["file", "folder", "relative", "chain"])
def test_a_link_out_of_the_root_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """Whether the file, or a folder above it, is the link: the picture isn't read, and the message says where it leads (safety)."""
    gallery = make_gallery(tmp_path / "in")
    path, secret = gallery.path(4), tmp_path / "secret"
    secret.mkdir()
    if kind == "folder":
        path.parent.rename(secret / "folder")
        path.parent.symlink_to(secret / "folder")
        target = secret / "folder"
    else:
        path.unlink()
        (secret / "other.jpg").write_bytes(jpeg(99))
        target = secret / "other.jpg"
        if kind == "chain":
            (tmp_path / "in" / "hop").symlink_to(target)
            path.symlink_to(tmp_path / "in" / "hop")
        else:
            path.symlink_to(
                Path(*[".."] * len(path.relative_to(tmp_path).parent.parts)) / "secret" / "other.jpg"
                if kind == "relative"
                else target
            )
    with pytest.raises(DataError, match="1 outside") as caught:
        run(gallery.config(tmp_path / "out"))
    (problem,) = caught.value.problems
    assert problem.startswith(str(path.relative_to(gallery.root))) and str(target) in problem and "links: anywhere" in problem
    report = run(gallery.config(tmp_path / "skipped", source={"missing": "skip"}))
    assert report.skipped == {"outside": 1}
    report = run(gallery.config(tmp_path / "all", source={"links": "anywhere"}))
    assert sum(split.samples for split in report.splits.values()) == 30 and report.skipped == {}


@pytest.mark.case("T12")
def test_links_within_the_root_are_followed(tmp_path: Path) -> None:
    """A root that is a link itself, and links that stay below it, are the user's own affair."""
    gallery = make_gallery(tmp_path / "in")
    plain = run(gallery.config(tmp_path / "plain"))
    path = gallery.path(4)
    path.rename(gallery.root / "elsewhere.jpg")
    path.symlink_to(gallery.root / "elsewhere.jpg")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    linked = gallery.config(tmp_path / "linked", source={"root": str(tmp_path / "link")})
    assert run(linked).splits == plain.splits
    one, other = tree(tmp_path / "plain"), tree(tmp_path / "linked")
    assert {name: data for name, data in one.items() if name.endswith(".tar")} == {
        name: data for name, data in other.items() if name.endswith(".tar")
    }


def test_two_rows_that_name_one_file(tmp_path: Path) -> None:
    """They are told with both rows, all at once; `keep` packs the picture for each."""
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.jpg").write_bytes(jpeg(ord(name)))
    (tmp_path / "in" / "train.csv").write_text("id,file,label\n1,a,cat\n2,b,dog\n3,a,dog\n4,c,cat\n5,b,dog\n")
    source = {"kind": "csv", "root": str(tmp_path / "in"), "table": "train.csv", "id": "id", "label": "label", "path": "{file}.jpg"}
    base = {"name": "n", "source": source, "splits": {"train": 1.0}, "shards": {"out": str(tmp_path / "out")}}
    with pytest.raises(DataError) as caught:
        run(BuildConfig.model_validate(base))
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "train.csv row 4: path 'a.jpg' stands in train.csv row 2 too",
        "train.csv row 6: path 'b.jpg' stands in train.csv row 3 too",
    ]
    report = run(BuildConfig.model_validate(base | {"source": source | {"repeated": "keep"}}))
    assert report.splits["train"].samples == 5


@pytest.mark.parametrize("path", ["{id}.jpg", "train/{id[0]}/{id[-1]}/{id}.jpg"])
def test_paths_that_ids_tell_apart_are_not_compared(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the path has the id whole and single characters beside it, unique ids are unique paths: millions needn't be made."""
    from shardify.sources import rows

    monkeypatch.setattr(rows, "_repeated", lambda *_: pytest.fail("compared"))
    gallery = make_gallery(tmp_path / "in", 3)
    with pytest.raises(DataError, match="3 missing"):
        run(gallery.config(tmp_path / "out", source={"path": path}))
