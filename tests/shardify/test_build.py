"""Builds: every picture with its label, the same bytes anywhere, and no half set whatever happens."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from gallery import Gallery, Silent, make_gallery, place, tree
from packing import jpeg

from shardify import build, durable, job, machine
from shardify.config import BuildConfig
from shardify.errors import DataError, SettingsError, StorageError
from shardify.format import card, manifest, tar
from shardify.format.manifest import Manifest
from shardify.items import Refused
from shardify.journal import NAME
from shardify.losses import Losses
from shardify.sinks import folder
from shardify.stopwatch import Stopwatch

KILLED = """
import sys
from pathlib import Path
from shardify import build, config
from gallery import Silent
settings = config.load(Path(sys.argv[1]))
print("go", flush=True)
build.build(settings, force=False, skipped_to=None, progress=Silent())
"""


def run(config: BuildConfig, *, force: bool = False, resume: bool = False, skipped_to: Path | None = None) -> build.Report:
    """Build without showing progress."""
    return build.build(config, force=force, resume=resume, skipped_to=skipped_to, progress=Silent())


def plan(config: BuildConfig) -> build.Report:
    """Plan without showing progress."""
    return build.plan(config, skipped_to=None, progress=Silent())


def contents(folder: Path, split: str) -> dict[str, dict[str, bytes]]:
    """Return a split's samples in order: fields by key."""
    found: dict[str, dict[str, bytes]] = {}
    for entry in manifest.read(folder / f"{split}-shardindex.json").shards:
        raw = (folder / entry.url).read_bytes()
        for record in tar.samples(io.BytesIO(raw), len(raw)):
            parts = zip(record.fields, record.members, strict=True)
            found[record.key] = {field: raw[m.offset : m.offset + m.size] for field, m in parts}
    return found


def manifests(folder: Path) -> list[Manifest]:
    """Return a folder's manifests by name."""
    return [manifest.read(path) for path in manifest.find(folder)]


def png(number: int) -> bytes:
    """Return a PNG."""
    return bytes(cv2.imencode(".png", np.full((20, 30, 3), number % 250, np.uint8))[1].tobytes())


def test_every_picture_with_its_label(tmp_path: Path) -> None:
    """All pictures are packed once, byte for byte, with their class's index; picture first; manifests and card say the same."""
    gallery = make_gallery(tmp_path / "in")
    report = run(gallery.config(tmp_path / "out"))
    train, val = contents(tmp_path / "out", "train"), contents(tmp_path / "out", "val")
    assert len(train) + len(val) == 30 and not train.keys() & val.keys()
    for key, fields in (train | val).items():
        assert list(fields.items()) == [("jpg", gallery.pictures[key]), ("cls", b"%d" % gallery.labels[key])]
    made = manifests(tmp_path / "out")
    assert [m.samples for m in made] == [len(train), len(val)] == [report.splits[s].samples for s in ("train", "val")]
    assert all(m.classes == ("7", "21", "1000") and m.fields == ("cls", "jpg") and m.opencv is None for m in made)
    assert (tmp_path / "out" / "README.md").read_bytes() == card.dump(made)
    assert report.kinds == {"jpeg": 30} and report.skipped == {} and report.classes == 3
    assert list(train) != [key for key in gallery.keys if key in train]  # shuffled


def test_progress_tells_of_every_picture(tmp_path: Path) -> None:
    """Each picture is counted once, refused ones too, out of the stage's total."""
    gallery = make_gallery(tmp_path / "in", 10)
    gallery.path(3).write_bytes(b"")
    progress = Silent()
    build.build(gallery.config(tmp_path / "out", encode={"refused": "skip"}), force=False, skipped_to=None, progress=progress)
    stages = [("reading the source", 0), ("looking up files", 10), ("reading", 10), ("writing", 9), ("finishing", 0)]
    assert progress.stages == stages and progress.told == 29


@pytest.mark.parametrize("encode", [{}, {"resize": {"short_side": 24}, "quality": 80}, {"check": "decode"}])
@pytest.mark.case("S02")
def test_the_same_bytes_anywhere(tmp_path: Path, encode: dict[str, Any]) -> None:
    """Another place, another number of processes, another order of the rows: the same files to the last bit (S02)."""
    gallery = make_gallery(tmp_path / "in")
    run(gallery.config(tmp_path / "a", encode=encode | {"workers": 1}))
    run(gallery.config(tmp_path / "b", encode=encode | {"workers": 2}))
    moved = Gallery(shutil.copytree(tmp_path / "in", tmp_path / "moved"))
    first, *rows = (moved.root / "train.csv").read_text().splitlines()
    (moved.root / "train.csv").write_text("\n".join([first, *reversed(rows)]) + "\n")
    run(moved.config(tmp_path / "c" / "d", encode=encode))
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c" / "d")
    assert manifests(tmp_path / "a")[0].opencv == (cv2.__version__ if "quality" in encode else None)


def test_seeds(tmp_path: Path) -> None:
    """Another order.seed writes another order and moves no picture between splits."""
    gallery = make_gallery(tmp_path / "in", 40)
    for name, seed in (("a", 0), ("b", 1)):
        run(gallery.config(tmp_path / name, order={"seed": seed}))
    a, b = contents(tmp_path / "a", "train"), contents(tmp_path / "b", "train")
    assert a == b and list(a) != list(b)


@pytest.mark.case("N01")
def test_metadata(tmp_path: Path) -> None:
    """Extra columns become each sample's json, keys sorted, texts as they are; an id that is no key stands there too (N01)."""
    (tmp_path / "in").mkdir()
    rows = [("IMG.2020.01", "7", "Zürich"), ("b", "21", ""), ("a b", "7", '"quoted"')]
    with (tmp_path / "in" / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "landmark_id", "where"), *rows])
    for number, (name, _, _) in enumerate(rows):
        (tmp_path / "in" / f"{name}.jpg").write_bytes(jpeg(number))
    config = Gallery(tmp_path / "in").config(tmp_path / "out", source={"path": "{id}.jpg", "extra": ["where"]}, splits={"train": 1})
    run(config)
    found = contents(tmp_path / "out", "train")
    assert all(list(fields) == ["jpg", "cls", "json"] for fields in found.values())
    assert sorted(fields["json"].decode() for fields in found.values()) == sorted(
        ['{"id": "IMG.2020.01", "where": "Zürich"}', '{"id": "b", "where": ""}', '{"id": "a b", "where": "\\"quoted\\""}']
    )
    assert manifests(tmp_path / "out")[0].fields == ("cls", "jpg", "json")


@pytest.mark.parametrize("size", [3000, 20_000, 10**9])
@pytest.mark.parametrize("mode", ["shuffle", "stratified", "source"])
def test_the_plan_is_what_is_built(tmp_path: Path, size: int, mode: str) -> None:
    """plan's shards, samples and bytes are the build's, and it writes nothing."""
    gallery = make_gallery(tmp_path / "in")
    config = gallery.config(tmp_path / "out", shards={"size": size}, order={"mode": mode})
    planned = plan(config)
    assert not (tmp_path / "out").exists()
    assert planned == run(config) and planned.exact
    assert sum(s.bytes for s in planned.splits.values()) == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.tar"))


def test_a_plan_that_re_encodes_says_so(tmp_path: Path) -> None:
    """Sizes of what is re-encoded are estimates, and marked."""
    report = plan(make_gallery(tmp_path / "in").config(tmp_path / "out", encode={"resize": {"short_side": 24}}))
    assert not report.exact and report.splits["train"].samples + report.splits["val"].samples == 30


def test_rows_left_out_are_told(tmp_path: Path) -> None:
    """Shares below 1 leave rows out, and say how many; classes that train lacks are told."""
    report = run(make_gallery(tmp_path / "in", 200).config(tmp_path / "out", splits={"train": 0.01, "val": 0.5}))
    packed = sum(s.samples for s in report.splits.values())
    assert any(f"{200 - packed} of 200 rows left out" in note for note in report.notes)
    assert any("split val" in note and "no sample in train" in note for note in report.notes)


def spoil(gallery: Gallery) -> Mapping[str, str]:
    """Spoil five pictures, each in its way; return what the error says of each path."""
    gallery.path(2).unlink()
    gallery.path(5).write_bytes(b"")
    gallery.path(7).write_bytes(b"<html>" * 50)
    gallery.path(11).write_bytes(gallery.pictures[gallery.keys[11]][:-2])
    gallery.path(13).unlink()
    gallery.path(13).mkdir()
    said = ("no such file", "zero bytes", "HTML or XML text", "without its end", "not a regular file")
    return {place(gallery.keys[number]): text for number, text in zip((2, 5, 7, 11, 13), said, strict=True)}


def test_all_that_is_wrong_is_one_error(tmp_path: Path) -> None:
    """Refused pictures are an error that lists every one with its reason; the folder is as it was, the list is in the file."""
    gallery = make_gallery(tmp_path / "in")
    wrong = spoil(gallery)
    config = gallery.config(tmp_path / "out", source={"missing": "skip"})
    with pytest.raises(
        DataError, match=r"3 of 30 pictures can't be packed \(1 cut, 1 empty, 1 not a picture\); .*encode.refused: skip"
    ) as e:
        run(config, skipped_to=tmp_path / "skipped.csv")
    assert len(e.value.problems) == 3
    assert all(any(line.startswith(f"{path}: ") and wrong[path] in line for path in wrong) for line in e.value.problems)
    assert not (tmp_path / "out").exists()
    with (tmp_path / "skipped.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["path"] for row in rows} == wrong.keys() and all(wrong[row["path"]] in row["reason"] for row in rows)
    assert set(plan(config).problems) == set(e.value.problems)


@pytest.mark.case("S11", "A02")
def test_missing_files_are_found_before_anything_is_written(tmp_path: Path) -> None:
    """Missing files are an error at once, with every path, before a set that is there is touched (S11)."""
    gallery = make_gallery(tmp_path / "in")
    run(gallery.config(tmp_path / "out"))
    before = tree(tmp_path / "out")
    spoil(gallery)
    with pytest.raises(DataError, match=r"2 of 30 pictures can't be packed \(2 missing\); .*source.missing: skip") as caught:
        run(gallery.config(tmp_path / "out"), force=True)
    assert caught.value.problems == tuple(
        f"{place(gallery.keys[n])}: {why}" for n, why in ((2, "no such file"), (13, "there, but not a regular file"))
    )
    assert tree(tmp_path / "out") == before


@pytest.mark.case("S11")
def test_pictures_that_the_table_lacks_are_told(tmp_path: Path) -> None:
    """Table and files may differ either way: a picture beside those of the rows is told, unless rows are left out anyway."""
    gallery = make_gallery(tmp_path / "in", 5)
    path = gallery.path(2)
    told = f"1 files beside those of the table, such as {str(path.relative_to(gallery.root).parent / 'zz.JPG')!r}, "
    for name in ("zz.JPG", "._zz.jpg", "notes.txt", "jpg"):
        (path.parent / name).write_bytes(jpeg(9))
    assert [note for note in plan(gallery.config(tmp_path / "out")).notes if "beside" in note] == [
        f"{told}are named by no row that is packed"
    ]
    fewer = plan(gallery.config(tmp_path / "out", splits={"train": 0.5}))
    assert not [note for note in fewer.notes if "beside" in note]
    (path.parent / "zz.JPG").unlink()
    assert not [note for note in plan(gallery.config(tmp_path / "out")).notes if "beside" in note]


@pytest.mark.parametrize(
    ("most", "allows", "fine"), [(2, 2, False), (4, 4, False), (0.16, 4, False), (5, 5, True), (0.17, 5, True)]
)
def test_what_is_left_out_has_a_bound(tmp_path: Path, most: float, allows: int, *, fine: bool) -> None:
    """More than a count or a share of the rows is an error with the numbers, in which all pictures stand; nothing is written."""
    gallery = make_gallery(tmp_path / "in")
    wrong = spoil(gallery)
    sections = {"source": {"missing": "skip"}, "encode": {"refused": "skip"}}
    config = gallery.config(tmp_path / "out", max_skipped=most, **sections)
    if fine:
        assert sum(run(config).skipped.values()) == 5 and plan(config).problems == ()
        return
    with pytest.raises(
        DataError, match=rf"^5 of 30 pictures would be left out \(.*\), and max_skipped: {most} allows {allows};"
    ) as e:
        run(config)
    assert sorted(line.partition(": ")[0] for line in e.value.problems) == sorted(wrong)
    assert not (tmp_path / "out").exists() and set(plan(config).problems) == set(e.value.problems)


@pytest.mark.parametrize(("given", "allows"), [(0.29, 29), (0.57, 57), (1.0, 100), (0.0, 0)])
def test_a_share_is_what_it_says(tmp_path: Path, given: float, allows: int) -> None:
    """Floating point loses none: 0.29 of 100 are 29."""
    config = make_gallery(tmp_path, 100).config(tmp_path / "out", max_skipped=given, source={"missing": "skip"})
    losses = Losses(config, job.prepare(config, Stopwatch(Silent())).items)
    for row in range(allows):
        losses.refuse(row, Refused("x", "missing", "no such file"))
    assert losses.error() is None
    if allows < 100:
        losses.refuse(99, Refused("x", "missing", "no such file"))
        assert losses.error() is not None


@pytest.mark.case("S11")
def test_skipping_is_asked_for_and_counted(tmp_path: Path) -> None:
    """With skip the rest is packed; manifests count by cause and name the keys, the file lists all."""
    gallery = make_gallery(tmp_path / "in")
    spoil(gallery)
    config = gallery.config(tmp_path / "out", source={"missing": "skip"}, encode={"refused": "skip"})
    report = run(config, skipped_to=tmp_path / "skipped.csv")
    assert report.skipped == {"cut": 1, "empty": 1, "missing": 2, "not a picture": 1}
    planned = plan(config)
    assert replace(planned, notes=report.notes, disk=report.disk) == report
    assert any("isn't empty" in note for note in planned.notes)  # the set that was just built is in the way of another build
    skipped = [(cause, key) for m in manifests(tmp_path / "out") for cause, s in m.skipped.items() for key in s.keys]
    assert sorted(key for _, key in skipped) == sorted(gallery.keys[n] for n in (2, 5, 7, 11, 13))
    assert dict(skipped)["empty"] == gallery.keys[5]
    packed = contents(tmp_path / "out", "train") | contents(tmp_path / "out", "val")
    assert packed.keys() == set(gallery.keys) - {key for _, key in skipped}
    assert len((tmp_path / "skipped.csv").read_text().splitlines()) == 6


@pytest.mark.case("S04")
def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    """A set of no picture at all isn't written (S04)."""
    gallery = make_gallery(tmp_path / "in", 3, make=lambda _: b"")
    with pytest.raises(DataError, match="no picture to pack"):
        run(gallery.config(tmp_path / "out", encode={"refused": "skip"}))
    assert not (tmp_path / "out").exists()


def test_an_empty_split_is_written_as_such(tmp_path: Path) -> None:
    """A split that no picture falls into has a manifest without shards, and no pattern in the card."""
    gallery = make_gallery(tmp_path / "in", 3)
    run(gallery.config(tmp_path / "out", splits={"train": 0.999999, "val": 0.000001}))
    assert [len(m.shards) > 0 for m in manifests(tmp_path / "out")] == [True, False]
    assert "val-" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.case("I12")
def test_several_types_are_an_error_unless_said(tmp_path: Path) -> None:
    """A PNG named .jpg: counted by plan, an error that names it, kept or converted when asked (I12)."""
    gallery = make_gallery(tmp_path / "in", 12, make=lambda n: png(n) if n in (4, 9) else jpeg(n))
    named = {f"{place(gallery.keys[n])}: png, where most are jpeg" for n in (4, 9)}
    assert plan(gallery.config(tmp_path / "out")).kinds == {"jpeg": 10, "png": 2}
    assert set(plan(gallery.config(tmp_path / "out")).problems) == named
    with pytest.raises(DataError, match=r"several types \(10 jpeg, 2 png\); set encode.types") as caught:
        run(gallery.config(tmp_path / "out"))
    assert set(caught.value.problems) == named and not (tmp_path / "out").exists()
    run(gallery.config(tmp_path / "kept", encode={"types": "keep"}, splits={"train": 1}))
    kept = contents(tmp_path / "kept", "train")
    assert kept[gallery.keys[4]] == {"png": png(4), "cls": b"1"} and kept[gallery.keys[0]]["jpg"] == jpeg(0)
    assert manifests(tmp_path / "kept")[0].fields == ("cls", "jpg", "png")
    assert "several types" in (tmp_path / "kept" / "README.md").read_text()
    run(gallery.config(tmp_path / "made", encode={"types": "convert"}, splits={"train": 1}))
    made = contents(tmp_path / "made", "train")
    assert all(list(fields) == ["jpg", "cls"] for fields in made.values()) and made[gallery.keys[0]]["jpg"] == jpeg(0)
    assert manifests(tmp_path / "made")[0].opencv == cv2.__version__


def test_a_set_of_pngs_is_fine(tmp_path: Path) -> None:
    """One true type is one field, whatever the files are called."""
    gallery = make_gallery(tmp_path / "in", 5, make=png)
    run(gallery.config(tmp_path / "out", splits={"train": 1}))
    assert {tuple(fields) for fields in contents(tmp_path / "out", "train").values()} == {("png", "cls")}


@pytest.mark.case("N10")
def test_odd_names(tmp_path: Path) -> None:
    """Class folders with any file names are packed under keys of the grammar, the true name in the json."""
    names = [
        "a.b.jpg",
        "with blank.JPG",
        "été.jpeg",
        "_x.jpg",
        "-y.jpg",
        "new\nline.jpg",
        os.fsdecode(b"half\xff.jpg"),
        "y" * 200 + ".jpg",
    ]
    for number, name in enumerate(names):
        path = tmp_path / "in" / f"class.{number % 2}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    settings = {"name": "odd", "source": {"kind": "folders", "root": str(tmp_path / "in")}, "splits": {"train": 1.0}}
    run(BuildConfig.model_validate(settings | {"shards": {"out": str(tmp_path / "out")}}))
    found = contents(tmp_path / "out", "train")
    assert sorted(fields["jpg"] for fields in found.values()) == sorted(jpeg(number) for number in range(len(names)))
    ids = [json.loads(fields["json"])["id"] for fields in found.values()]
    assert len(set(ids)) == len(names) and any("with blank" in name for name in ids)


def test_find_built(tmp_path: Path) -> None:
    """A set is found where it is complete and of these settings; a changed setting, a cut shard or a missing one is no set."""
    gallery = make_gallery(tmp_path / "in")
    config = gallery.config(tmp_path / "out")
    assert build.find_built(config) is None
    report = run(config)
    assert build.find_built(config) == report.splits
    assert build.find_built(gallery.config(tmp_path / "out", order={"seed": 1})) is None
    assert build.find_built(gallery.config(tmp_path / "out", encode={"workers": 2})) == report.splits
    shard = tmp_path / "out" / "train-000000.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert build.find_built(config) is None
    shard.unlink()
    assert build.find_built(config) is None
    shard.write_bytes(whole)
    (tmp_path / "out" / "val-shardindex.json").unlink()
    assert build.find_built(config) is None


@pytest.mark.case("S03")
def test_force_replaces_a_set_and_keeps_no_stale_shard(tmp_path: Path) -> None:
    """A second, smaller build leaves exactly what a build elsewhere gives (S03)."""
    gallery = make_gallery(tmp_path / "in")
    run(gallery.config(tmp_path / "out", shards={"size": 5000}))
    with pytest.raises(SettingsError, match="--force"):
        run(gallery.config(tmp_path / "out"))
    run(gallery.config(tmp_path / "out"), force=True)
    run(gallery.config(tmp_path / "new"))
    assert tree(tmp_path / "out") == tree(tmp_path / "new")


def start(tmp_path: Path, config: BuildConfig) -> subprocess.Popen[str]:
    """Start a build in a process of its own; return once it is about to begin."""
    (tmp_path / "settings.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path / "settings.yaml"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "go\n":
        pytest.fail(process.communicate()[1])
    return process


def wait_for(there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something is there, or the process ended."""
    while not there() and process.poll() is None:
        time.sleep(0.001)


@pytest.mark.case("S01", "S02")
def test_a_killed_build_leaves_whole_files_only(tmp_path: Path) -> None:
    """Killed at any time (-9), every file under a final name is whole: shards with their index, no manifest of a part (S01)."""
    gallery = make_gallery(tmp_path / "in", 400)
    whole = tmp_path / "whole"
    run(gallery.config(whole, shards={"size": 6000}))
    expected = tree(whole)
    rng = random.Random(0)
    for round_ in range(4):
        out = tmp_path / f"out{round_}"
        process = start(tmp_path, gallery.config(out, shards={"size": 6000}))
        enough = rng.randrange(1, 200)
        wait_for(lambda out=out, enough=enough: len(list(out.glob("*"))) >= enough, process)  # type: ignore[misc]
        process.kill()
        process.communicate()
        found = tree(out)
        final = {name: data for name, data in found.items() if not name.endswith(".partial")}
        assert 0 < len(final) < len(expected)
        final = {name: data for name, data in final.items() if name != NAME}
        assert all(expected[name] == data for name, data in final.items())
        assert all(name.replace(".tar", ".idx") in final for name in final if name.endswith(".tar"))
        assert not [name for name in final if name.endswith(".json")]
        with pytest.raises(SettingsError, match="cut off; go on with --resume"):
            run(gallery.config(out, shards={"size": 6000}))
        run(gallery.config(out, shards={"size": 6000}), resume=True)
        assert tree(out) == expected


def test_ctrl_c_leaves_what_a_resume_goes_on_from(tmp_path: Path) -> None:
    """Interrupted while it writes, a build ends within seconds and says how to go on; that ends as if nothing had been (P07)."""
    gallery = make_gallery(tmp_path / "in", 400)
    run(gallery.config(tmp_path / "whole", shards={"size": 6000}))
    config = gallery.config(tmp_path / "out", shards={"size": 6000})
    process = start(tmp_path, config)
    wait_for(lambda: len(list((tmp_path / "out").glob("*.tar"))) >= 3, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors and "go on with --resume" in errors and process.returncode != 0
    run(config, resume=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_killed_worker_fails_the_build(tmp_path: Path) -> None:
    """When a process of the build is killed, the build says so and leaves nothing."""
    gallery = make_gallery(tmp_path / "in", 400)
    process = start(tmp_path, gallery.config(tmp_path / "out", encode={"check": "decode", "workers": 2}, shards={"size": 6000}))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: len(children.read_text().split()) >= 3, process)  # two workers and multiprocessing's tracker
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    assert "StorageError: a worker process was killed by SIGKILL" in errors
    assert not (tmp_path / "out").exists()


def test_two_builds_into_one_folder(tmp_path: Path) -> None:
    """While one build runs, another one into its folder is refused, and the first one ends as if alone."""
    gallery = make_gallery(tmp_path / "in", 300)
    config = gallery.config(tmp_path / "out", shards={"size": 6000})
    process = start(tmp_path, config)
    wait_for(lambda: (tmp_path / "out" / "train-000000.tar").exists(), process)
    with pytest.raises(SettingsError, match="another build writes to"):
        run(config, force=True)
    assert process.communicate(timeout=30)[1] == ""
    assert build.find_built(config) is not None


@pytest.mark.case("S12")
def test_a_folder_that_may_not_be_written(no_root: Path) -> None:
    """A target without permission is an error that names it (S12)."""
    (no_root / "locked").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="locked"):
        run(make_gallery(no_root / "in", 3).config(no_root / "locked" / "out"))


@pytest.mark.case("S12")
def test_a_picture_that_may_not_be_read(no_root: Path) -> None:
    """It is told with its path before anything is written, and left out where missing pictures may be."""
    gallery = make_gallery(no_root / "in", 5)
    gallery.path(2).chmod(0)
    with pytest.raises(DataError, match=r"1 of 5 pictures can't be packed \(1 unreadable\); .*source.missing: skip") as caught:
        run(gallery.config(no_root / "out"))
    assert caught.value.problems == (f"{place(gallery.keys[2])}: Permission denied",)
    assert not (no_root / "out").exists()
    assert run(gallery.config(no_root / "out", source={"missing": "skip"})).skipped == {"unreadable": 1}


def test_an_output_below_a_file(tmp_path: Path) -> None:
    """A target that can't be made is an error that names it."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        run(make_gallery(tmp_path / "in", 3).config(tmp_path / "file" / "out"))


def test_splits_seed_moves_pictures_between_splits(tmp_path: Path) -> None:
    """splits_seed decides who is in val, order.seed doesn't."""
    gallery = make_gallery(tmp_path / "in")
    vals = {}
    for name, values in (("a", {}), ("b", {"splits_seed": 1}), ("c", {"order": {"seed": 9}})):
        run(gallery.config(tmp_path / name, **values))
        vals[name] = set(contents(tmp_path / name, "val"))
    assert vals["a"] == vals["c"] != vals["b"]


def test_manifests_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card is written before any manifest, which makes a set complete, and all after the shards."""
    names: list[str] = []
    real = durable.write_file

    def note(path: Path, data: bytes) -> None:
        names.append(path.name)
        real(path, data)

    monkeypatch.setattr(folder, "write_file", note)
    run(make_gallery(tmp_path / "in").config(tmp_path / "out"))
    assert names == [card.NAME, "train-shardindex.json", "val-shardindex.json"]


def test_what_decodes_uses_all_cpus(tmp_path: Path) -> None:
    """Several processes where pictures are decoded, one where they are only read, and as many as asked."""
    config = make_gallery(tmp_path / "in").config
    cpus = machine.cpus()
    wanted = (({}, 1), ({"check": "decode"}, cpus), ({"resize": {"short_side": 9}}, cpus), ({"workers": 3}, 3))
    assert all(job._workers(config(tmp_path / "out", encode=values).encode) == workers for values, workers in wanted)


def test_the_list_of_skipped_stays_out_of_the_set(tmp_path: Path) -> None:
    """--skipped within the output folder is refused before anything is written."""
    config = make_gallery(tmp_path / "in").config(tmp_path / "out")
    with pytest.raises(SettingsError, match="lies in"):
        run(config, skipped_to=tmp_path / "out" / "skipped.csv")
    assert not (tmp_path / "out").exists()


def test_a_failed_force_keeps_the_old_set_or_says_that_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under --force the old set stays until all pictures are read; an error after that says that it is gone, and how to go on."""
    gallery = make_gallery(tmp_path / "in")
    config = gallery.config(tmp_path / "out")
    run(config)
    before = tree(tmp_path / "out")
    picture = gallery.path(3).read_bytes()
    gallery.path(3).write_bytes(b"<html>")
    with pytest.raises(DataError) as caught:
        run(config, force=True)
    assert tree(tmp_path / "out") == before and not hasattr(caught.value, "__notes__")
    gallery.path(3).write_bytes(picture)
    with monkeypatch.context() as patched:
        patched.setattr(build.card, "dump", lambda manifests: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failed:
            run(config, force=True)
    assert any("is gone" in note and "--resume finishes this one" in note for note in failed.value.__notes__)
    run(config, resume=True)
    assert tree(tmp_path / "out") == before


def test_a_set_that_lacks_an_index_or_the_card_is_not_complete(tmp_path: Path) -> None:
    """What --if-missing takes for complete has all its files."""
    config = make_gallery(tmp_path / "in").config(tmp_path / "out")
    for name in ("train-000000.idx", card.NAME):
        run(config, force=True)
        assert build.find_built(config) is not None
        (tmp_path / "out" / name).unlink()
        assert build.find_built(config) is None


@pytest.mark.parametrize("target", ["loop", "x" * 300, "nowhere/x"])
def test_an_odd_link_hides_no_neighbor(tmp_path: Path, target: str) -> None:
    """A link that can't be followed, beside the pictures, is no reason to call them missing."""
    gallery = make_gallery(tmp_path / "in")
    for number in range(30):
        (gallery.path(number).parent / "loop").unlink(missing_ok=True)
        (gallery.path(number).parent / "loop").symlink_to(target)
    assert sum(split.samples for split in run(gallery.config(tmp_path / "out")).splits.values()) == 30


def cut_off(tmp_path: Path, config: BuildConfig, shards: int, **flags: bool) -> None:
    """Leave a build that was killed when it had written so many shards."""

    class KilledError(BaseException):
        pass

    made: list[str] = []
    real = build.writer.write_shard

    def write(samples: Any, folder: Path, name: str, *, note: Any) -> Any:
        if len(made) == shards:
            raise KilledError
        made.append(name)
        return real(samples, folder, name, note=note)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(build.writer, "write_shard", write)
        run(config, **flags)


def large(number: int) -> bytes:
    """Return a JPEG of 30 kB: forty of them don't fit in the least memory."""
    picture = jpeg(number)
    return picture[:2] + b"\xff\xfe" + (30_000).to_bytes(2, "big") + bytes(29_998) + picture[2:]


def test_what_was_skipped_before_shards_were_written_stays_skipped(tmp_path: Path) -> None:
    """A picture that is corrected when its shard is there already is counted as skipped, not lost in silence."""
    gallery = make_gallery(tmp_path / "in", 60, make=large)
    good = gallery.path(7).read_bytes()
    gallery.path(7).write_bytes(b"")
    settings: dict[str, Any] = {"memory": 2**20, "encode": {"refused": "skip"}, "shards": {"size": 700_000}, "splits": {"train": 1}}
    run(gallery.config(tmp_path / "whole", **settings))
    config = gallery.config(tmp_path / "out", **settings)
    cut_off(tmp_path, config, 2)
    gallery.path(7).write_bytes(good)
    assert run(config, resume=True).skipped == {"empty": 1}
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_force_that_goes_on_removes_the_whole_old_set(tmp_path: Path) -> None:
    """What --force was to replace, other splits and more shards too, goes when the build goes on by --resume."""
    gallery = make_gallery(tmp_path / "in", 60, make=large)
    old = gallery.config(tmp_path / "out", splits={"train": 0.5, "val": 0.2, "test": 0.3}, shards={"size": 40_000})
    config = gallery.config(tmp_path / "out", memory=2**20, shards={"size": 700_000})
    run(gallery.config(tmp_path / "whole", memory=2**20, shards={"size": 700_000}))
    run(old)
    real = build.jobs.cut
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(build.jobs, "cut", lambda *_: 1 / 0)
        run(config, force=True)
    assert build.jobs.cut is real and (tmp_path / "out" / "test-000000.tar").exists()
    run(config, resume=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_disk_that_drops_out_is_no_reason_to_skip(tmp_path: Path) -> None:
    """Files that were there when they were looked up and are gone by the hundred end the build, whatever may be skipped."""
    gallery = make_gallery(tmp_path / "in", 40, make=large)
    config = gallery.config(tmp_path / "out", memory=2**20, source={"missing": "skip"}, encode={"refused": "skip"})

    class Pulls(Silent):
        def begin(self, doing: str, total: int, unit: str = "images") -> None:
            if doing == "reading":
                (tmp_path / "in" / "train").rename(tmp_path / "in" / "gone")

    with pytest.raises(StorageError, match="is the disk still there"):
        build.build(config, force=False, skipped_to=None, progress=Pulls())
    assert not (tmp_path / "out").exists()


def test_the_list_of_skipped_overwrites_no_other_file(tmp_path: Path) -> None:
    """--skipped on the source's table, or on anything but a former list, is refused before it is touched."""
    gallery = make_gallery(tmp_path / "in", 5)
    config = gallery.config(tmp_path / "out", encode={"refused": "skip"})
    table = (gallery.root / "train.csv").read_bytes()
    for action in (
        lambda: run(config, skipped_to=gallery.root / "train.csv"),
        lambda: build.plan(config, skipped_to=gallery.root / "train.csv", progress=Silent()),
    ):
        with pytest.raises(SettingsError, match="no list of skipped pictures"):
            action()
    assert (gallery.root / "train.csv").read_bytes() == table
    for _ in range(2):
        run(config, force=True, skipped_to=tmp_path / "skipped.csv")
    assert (tmp_path / "skipped.csv").read_text() == "key,path,cause,reason\n"


@pytest.mark.case("S02")
def test_a_resume_with_another_source_says_what_changed(tmp_path: Path) -> None:
    """Fewer rows, and files that are gone, are named; so is another spool."""
    gallery = make_gallery(tmp_path / "in", 60, make=large)
    settings: dict[str, Any] = {"memory": 2**20, "source": {"missing": "skip"}, "shards": {"size": 700_000}}
    config = gallery.config(tmp_path / "out", **settings)
    cut_off(tmp_path, config, 1)
    table = (gallery.root / "train.csv").read_text().splitlines(keepends=True)
    (gallery.root / "train.csv").write_text("".join(table[:30]))
    with pytest.raises(SettingsError, match="the source has 29 rows, had 60"):
        run(config, resume=True)
    (gallery.root / "train.csv").write_text("".join(table))
    gallery.path(3).rename(tmp_path / "aside")
    with pytest.raises(SettingsError, match="1 files changed: train/"):
        run(config, resume=True)
    (tmp_path / "aside").rename(gallery.path(3))
    with pytest.raises(SettingsError, match=r"spool is .*, was None"):
        run(gallery.config(tmp_path / "out", spool=str(tmp_path / "spool"), **settings), resume=True)
    with pytest.raises(SettingsError, match="give one of them"):
        run(config, resume=True, force=True)
    run(config, resume=True)
    run(gallery.config(tmp_path / "whole", **settings))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_plan_sees_an_output_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among what stands in a build's way: the lowest folder that is there is asked."""
    config = make_gallery(tmp_path / "in", 3).config(tmp_path / "x" / "deep" / "set")
    assert not [note for note in plan(config).notes if "written to" in note]
    (tmp_path / "x").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "x" and real(path, mode))
    assert [note for note in plan(config).notes if note.startswith(f"{tmp_path / 'x'}: can't be written to")]
