"""The sets that a loader takes: classes, splits, fields, tars of others; what damaged ones and wrong arguments say."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import albumentations as A
import pytest
import torch
from batches import KEYED
from packing import PackedSet, jpeg, pack

import pipeline
from pipeline import LoaderOptions, make_loader


@pytest.mark.case("S06")
def test_classes(tmp_path: Path) -> None:
    """The loader tells the classes; a val set that numbers them otherwise is an error that names the first that differs."""
    pack(tmp_path / "s", 20, 1)
    pack(tmp_path / "s", 20, 1, split="val", first=100)
    pack(tmp_path / "other", 20, 1, split="val", classes=("a", "c", "b", "d", "e"))
    train = make_loader(tmp_path / "s", batch_size=4, num_workers=0, options=LoaderOptions(split="train"))
    assert train.classes == ("a", "b", "c", "d", "e")
    assert train.num_classes == 5
    make_loader(tmp_path / "s", batch_size=4, num_workers=0, options=LoaderOptions(split="val", classes=train.classes))
    with pytest.raises(pipeline.OptionsError, match=r"class 1 is 'c' here and 'b' there"):
        make_loader(tmp_path / "other", batch_size=4, num_workers=0, options=LoaderOptions(classes=train.classes))


def test_two_splits_and_none_named(tmp_path: Path) -> None:
    """A folder with two splits and none named is an error that names both."""
    pack(tmp_path, 20, 1)
    pack(tmp_path, 20, 1, split="val", first=100)
    with pytest.raises(pipeline.PipelineError, match=r"train.*val.*split"):
        make_loader(tmp_path, batch_size=4)


def test_no_labels_and_labels_in_json(small_set: PackedSet, tmp_path: Path) -> None:
    """label=None gives None; label="json:name" reads a number from the sample's json."""
    assert next(iter(make_loader(small_set.folder, batch_size=4, num_workers=0, options=LoaderOptions(label=None)))).labels is None
    from packing import write_tar

    write_tar(tmp_path / "j-000000.tar", [(f"k{i}", [("jpg", jpeg(i)), ("json", b'{"height": %d}' % (i * 10))]) for i in range(8)])
    options = LoaderOptions(label="json:height", keys=True)
    for _images, labels, keys in make_loader(tmp_path, batch_size=4, num_workers=0, options=options):
        assert labels.tolist() == [int(key[1:]) * 10 for key in keys]


def test_unindexed_tars_of_others(tmp_path: Path) -> None:
    """Tars without index and manifest are read too: classes are unknown, everything else as ever."""
    packed = pack(tmp_path, 40, 3)
    for path in [*tmp_path.glob("*.idx"), *tmp_path.glob("*.json")]:
        path.unlink()
    with make_loader(str(tmp_path / "train-{000000..000002}.tar"), batch_size=8, num_workers=2, options=KEYED) as loader:
        assert sorted(key for batch in loader for key in batch.keys) == sorted(packed.keys)
        assert loader.classes is None
        assert loader.num_classes is None


def test_counted_tars_without_indexes_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A manifest without indexes, as wids writes it, is read, and a log line says what that costs; with them nothing is said."""
    packed = pack(tmp_path, 40, 3)
    with caplog.at_level("INFO", "pipeline"), make_loader(tmp_path, batch_size=8, num_workers=0, options=KEYED):
        assert "without an index" not in caplog.text
    for path in tmp_path.glob("*.idx"):
        path.unlink()
    with (
        caplog.at_level("INFO", "pipeline"),
        make_loader(tmp_path, batch_size=8, num_workers=1, options=KEYED) as loader,
    ):
        assert "train-000000.tar: counted by a manifest, and without an index" in caplog.text
        assert len(loader) == 5
        assert sorted(key for batch in loader for key in batch.keys) == sorted(packed.keys)


def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    """A shard shorter than its manifest says is an error with both sizes, from workers too."""
    pack(tmp_path, 40, 1)
    path = tmp_path / "train-000000.tar"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2)
    for workers in (0, 1):
        with make_loader(tmp_path, batch_size=8, num_workers=workers) as loader, pytest.raises(pipeline.ShardError) as caught:
            list(loader)
        assert str(size) in str(caught.value)
        assert str(size // 2) in str(caught.value)
        assert "train-000000.tar" in str(caught.value)


@pytest.mark.case("I04", "I15", "A02")
def test_an_undecodable_picture_is_named(tmp_path: Path) -> None:
    """A picture that can't be decoded names shard, offset, key, field, the cause and the next step, from workers too."""
    pack(tmp_path, 8, 1, make=lambda n: b"<html>no picture</html>" if n == 3 else jpeg(n))
    for workers in (0, 1):
        with make_loader(tmp_path, batch_size=8, num_workers=workers) as loader, pytest.raises(pipeline.DecodeError) as caught:
            list(loader)
        for part in ("train-000000.tar", "at byte", "'train000003'", "jpg", "HTML", "verify --decode"):
            assert part.lower() in str(caught.value).lower()


def test_image_names_the_field(tmp_path: Path) -> None:
    """`image` picks the field that holds the picture."""
    from packing import write_tar

    fields = [("jpg", b"j"), ("png", b"p"), ("cls", b"1")]
    write_tar(tmp_path / "a-000000.tar", [(f"k{i}", fields) for i in range(4)])
    for image, expected in (("jpg;png", b"j"), ("png;jpg", b"p"), ("png", b"p")):
        options = LoaderOptions(image=image, decode="none")
        assert next(iter(make_loader(tmp_path, batch_size=4, num_workers=0, options=options))).images == [expected] * 4


def test_attributes_that_frameworks_read(small_set: PackedSet) -> None:
    """`batch_size` and a `dataset` with a length are there."""
    loader = make_loader(small_set.folder, batch_size=8, num_workers=0)
    assert loader.batch_size == 8
    assert len(loader.dataset) == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"shuffle": 1}, "shuffle=1"),
        ({"transform": 3}, "transform=3"),
        ({"transform": A.Normalize}, "transform="),
        ({"device": "gpu"}, "device='gpu'"),
        pytest.param({"device": "cuda"}, "no usable CUDA", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one")),
        ({"options": {"keys": True}}, "LoaderOptions"),
        ({"transform": A.Normalize(), "options": LoaderOptions(decode="none")}, "decode='none'"),
    ],
)
def test_arguments_are_checked_at_once(small_set: PackedSet, arguments: dict[str, Any], message: str) -> None:
    """A wrong argument is an OptionsError (a ValueError) at the call, with its name and what was given."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make_loader(small_set.folder, **{"batch_size": 4, **arguments})


@pytest.mark.case("A04")
def test_arguments_that_albumentations_ignores_are_an_error(small_set: PackedSet) -> None:
    """An old argument name only warns in albumentations, and training would run with other augmentations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transform = A.Compose([A.OneOf([A.ChannelDropout(fill_value=5)])])
    with pytest.raises(pipeline.OptionsError, match=r"ChannelDropout\(fill_value"):
        make_loader(small_set.folder, batch_size=4, transform=transform)


def test_public_names() -> None:
    """The public surface is this list, each name is there, and importing the package loads nothing heavy."""
    assert pipeline.__all__ == sorted(pipeline.__all__)
    assert all(getattr(pipeline, name) is not None for name in pipeline.__all__)
    code = "import sys, pipeline; print([m for m in ('torch', 'numpy', 'cv2', 'webdataset', 'albumentations', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_without_the_extra_the_message_names_the_command() -> None:
    """Without torch, `pipeline.make_loader` says which command installs it."""
    code = "import sys; sys.modules['torch'] = None\nimport pipeline\ntry: pipeline.make_loader\nexcept ModuleNotFoundError as e: print(e)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "pip install 'shardify[train]'" in out


@pytest.mark.parametrize("size", [10_240, 20_480])
@pytest.mark.case("T06")
def test_a_shard_of_zeros_is_an_error(tmp_path: Path, size: int) -> None:
    """A tar without a sample among good ones is an error that names it, with and without an index (T06)."""
    from packing import write_tar

    write_tar(tmp_path / "a-000000.tar", [("k", [("jpg", jpeg(0)), ("cls", b"0")])])
    (tmp_path / "a-000001.tar").write_bytes(bytes(size))
    for epoch in (0, 1):  # the first one is read as it arrives, for another one all samples are counted
        with make_loader(tmp_path, batch_size=1, num_workers=0) as loader:
            loader.set_epoch(epoch)
            with pytest.raises(pipeline.SourceError, match=r"a-000001\.tar: holds no sample"):
                list(loader)
    (tmp_path / "a-000001.idx").write_text("v1.2 0\n")
    with pytest.raises(pipeline.SourceError, match=r"a-000001\.tar: holds no sample"):
        make_loader(tmp_path, batch_size=1)


def test_a_stale_index_is_an_error(tmp_path: Path) -> None:
    """An index that lists less than its tar holds, or a sample twice, hides samples: an error that names the tar."""
    pack(tmp_path, 60, 1)
    (tmp_path / "train-shardindex.json").unlink()
    index = tmp_path / "train-000000.idx"
    lines = index.read_text().splitlines()
    for wrong in (["v1.2 20", *lines[1:21]], [lines[0], *lines[1:60], lines[1]]):
        index.write_text("\n".join(wrong) + "\n")
        with pytest.raises(pipeline.ShardError, match=r"train-000000\.tar.*index is of another tar"):
            list(make_loader(tmp_path, batch_size=4, num_workers=0))


def test_a_set_of_which_a_build_left_a_part_is_refused(tmp_path: Path) -> None:
    """Tars beside an unfinished one and without a manifest are a part of a set: an error, not a smaller set."""
    pack(tmp_path, 60, 3)
    (tmp_path / "train-shardindex.json").unlink()
    (tmp_path / "train-000003.tar.partial").write_bytes(b"x")
    for pointed in (tmp_path, f"{tmp_path}/train-*.tar"):
        with pytest.raises(pipeline.SourceError, match=r"train-000003\.tar\.partial: a build that didn't end"):
            make_loader(pointed, batch_size=4)


def test_a_manifest_that_lost_shards_is_an_error(tmp_path: Path) -> None:
    """A manifest whose list is shorter than the samples it states is refused."""
    import json

    pack(tmp_path, 60, 3)
    path = tmp_path / "train-shardindex.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "shardlist": raw["shardlist"][:2]}))
    with pytest.raises(pipeline.SourceError, match=r"samples is 60, and its list of shards makes 40"):
        make_loader(tmp_path, batch_size=4)
