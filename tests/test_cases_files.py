"""Cases that users of such tools ran into (docs/cases.md) and that belong to no other file; each bears its id."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gallery import Silent
from packing import jpeg, pack, write_tar

import pipeline
from pipeline.errors import DecodeError, ShardError, TransformError
from shardify import build
from shardify.config import BuildConfig
from shardify.format import tar


@pytest.mark.case("T03")
@pytest.mark.parametrize("skip", [False, True])
def test_a_sample_cut_in_half_is_never_given_out(tmp_path: Path, skip: bool) -> None:
    """A tar that ends within a picture whose label came before it: an error, under `skip` too, and what came until then is whole."""
    samples = [(f"k{n}", [("cls", b"%d" % n), ("jpg", jpeg(n))]) for n in range(4)]
    records = write_tar(tmp_path / "a.tar", samples)
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: records[2].members[1].offset + 700])
    options = pipeline.LoaderOptions(keys=True, on_error="skip" if skip else "raise", max_skipped=1.0, window_bytes=1)
    seen: list[str] = []
    with (
        pytest.raises(ShardError, match=r"a\.tar at byte .*cut"),
        pipeline.make_loader(str(tmp_path / "a.tar"), batch_size=1, num_workers=0, shuffle=False, options=options) as loader,
    ):
        for batch in loader:
            seen += batch.keys
    assert set(seen) <= {"k0", "k1"}


@pytest.mark.case("A02")
def test_a_transform_never_gets_none(tmp_path: Path) -> None:
    """A picture that isn't there or doesn't decode stops at the decoder, with its name: no transform is asked."""
    got: list[Any] = []

    def note(image: Any) -> Any:
        got.append(image)
        return image

    for number, data in enumerate((b"", b"<html>", jpeg(1)[:-400])):
        write_tar(tmp_path / f"{number}.tar", [("only", [("jpg", data), ("cls", b"0")])])
        with (
            pytest.raises(DecodeError, match=rf"{number}\.tar at byte .*'only', jpg"),
            pipeline.make_loader(str(tmp_path / f"{number}.tar"), batch_size=1, num_workers=0, transform=note) as loader,
        ):
            next(iter(loader))
    assert got == []


@pytest.mark.case("A10")
def test_a_picture_without_a_row_is_named(tmp_path: Path) -> None:
    """What a transform makes of nothing, or makes nothing of, is an error with shard and key."""
    made = pack(tmp_path / "set", 2, 1)
    for transform in (lambda image: image[:0], lambda image: np.zeros((0, 8, 3), np.uint8)):
        with (
            pytest.raises(TransformError, match=rf"(?s)\.tar: sample '({'|'.join(made.keys)})'.*\(0, "),
            pipeline.make_loader(made.folder, batch_size=2, num_workers=0, transform=transform) as loader,
        ):
            next(iter(loader))


@pytest.mark.case("V06")
def test_paths_that_are_not_ascii(tmp_path: Path) -> None:
    """Folders and files in other scripts are packed and read: bytes are read by Python, never by cv2."""
    root = tmp_path / "é"
    (root / "תמונות").mkdir(parents=True)
    names = ["א", "ü b", "日本"]
    for number, name in enumerate(names):
        (root / "תמונות" / f"{name}.jpg").write_bytes(jpeg(number))
    (root / "t.csv").write_text("id,label\n" + "".join(f"{name},{n}\n" for n, name in enumerate(names)), encoding="utf-8")
    source = {"kind": "csv", "root": str(root), "table": "t.csv", "id": "id", "label": "label", "path": "תמונות/{id}.jpg"}
    config = {"name": "n", "source": source, "splits": {"train": 1.0}, "shards": {"out": str(tmp_path / "יצא")}}
    build.build(BuildConfig.model_validate(config), force=False, skipped_to=None, progress=Silent())
    with pipeline.make_loader(str(tmp_path / "יצא"), batch_size=3, num_workers=0) as loader:
        (batch,) = loader
        assert sorted(batch.labels.tolist()) == [0, 1, 2]


@pytest.mark.case("T06")
def test_zeros_and_nothing_are_no_set(tmp_path: Path) -> None:
    """A file of zeros and a file of no bytes under a tar's name are errors with the name, not sets without samples."""
    for data in (bytes(10240), b""):
        (tmp_path / "a.tar").write_bytes(data)
        with (
            pytest.raises(ShardError, match=r"a\.tar"),
            pipeline.make_loader(str(tmp_path / "a.tar"), batch_size=1, num_workers=0) as loader,
        ):
            list(loader)
    assert list(tar.members(io.BytesIO(bytes(1024)), 1024)) == []
