"""Tars of others, once indexed, train: from the manifest alone, with labels in cls, in a json, or without; as webdataset reads them."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from foreign import mk, run
from packing import jpeg
from webdataset import tariterators

import pipeline
from pipeline.errors import ShardError
from pipeline.items import Wanted
from pipeline.samples import ShardFile, ShardReader
from shardify.format import manifest

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def foreign_set(folder: Path, form: int = tarfile.USTAR_FORMAT, tars: int = 3, each: int = 7) -> list[Path]:
    """Write tars as others do: keys in folders, fields sorted by name, a README in front."""
    paths = []
    for shard in range(tars):
        members = [("README", b"a set of others")]
        for n in range(shard * each, (shard + 1) * each):
            members += [
                (f"n01.v2/{n:05d}.{field}", data)
                for field, data in (("cls", b"%d" % n), ("jpg", jpeg(n)), ("json", b'{"n": %d}' % -n))
            ]
        paths.append(mk(folder / f"train-{shard}.tar", members, form, mtime=1.5 if form == tarfile.PAX_FORMAT else 0))
    return paths


def pairs(shards: Path, *, label: str | None = "cls", workers: int = 0) -> dict[str, tuple[bytes, int | None]]:
    """Return the bytes and labels of an epoch by key; no key may come twice."""
    options = pipeline.LoaderOptions(decode="none", keys=True, label=label, last_batch="uneven")
    found: dict[str, tuple[bytes, int | None]] = {}
    with pipeline.make_loader(shards, batch_size=4, num_workers=workers, options=options) as loader:
        for images, labels, keys in loader:
            for at, key in enumerate(keys):
                assert key not in found
                found[key] = (bytes(images[at]), None if labels is None else int(labels[at]))
    return found


def stock(path: Path) -> list[dict[str, Any]]:
    """Return a tar's samples as webdataset's own readers group them."""
    with path.open("rb") as file:
        files = ({**item, "__url__": str(path)} for item in tariterators.tar_file_iterator(file))
        return list(tariterators.group_by_keys(files))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_trains_from_the_manifest(tmp_path: Path, form: int, workers: int) -> None:
    """Every picture with its own label, each once, from the manifest that indexing wrote."""
    foreign_set(tmp_path, form)
    assert run(tmp_path).problems == ()
    found = pairs(tmp_path / "train-shardindex.json", workers=workers)
    assert found == {f"n01.v2/{n:05d}": (jpeg(n), n) for n in range(21)}


@pytest.mark.parametrize(("label", "sign"), [("json:n", -1), (None, None)])
def test_labels_elsewhere_or_nowhere(tmp_path: Path, label: str | None, sign: int | None) -> None:
    """Labels may lie in a json, or not be asked for."""
    foreign_set(tmp_path)
    run(tmp_path)
    assert pairs(tmp_path, label=label) == {f"n01.v2/{n:05d}": (jpeg(n), None if sign is None else sign * n) for n in range(21)}


def test_decoded_batches(tmp_path: Path) -> None:
    """The default loader decodes them into float batches."""
    foreign_set(tmp_path)
    run(tmp_path)
    with pipeline.make_loader(tmp_path, batch_size=7, num_workers=0) as loader:
        shapes = [(tuple(images.shape), len(labels)) for images, labels in loader]
    assert shapes == [((7, 3, 48, 64), 7)] * 3


def test_from_a_folder_of_its_own(tmp_path: Path) -> None:
    """A manifest and indexes in another folder than the tars train as well."""
    foreign_set(tmp_path / "in")
    assert run(tmp_path / "in", out=tmp_path / "deep" / "out").problems == ()
    assert pairs(tmp_path / "deep" / "out") == {f"n01.v2/{n:05d}": (jpeg(n), n) for n in range(21)}
    (tmp_path / "deep" / "out" / "train-1.idx").write_bytes(b"spoiled")
    with pytest.raises(ShardError, match=r"out/train-1\.idx"):  # the indexes are what was read, not the headers
        pairs(tmp_path / "deep" / "out")


def test_names_with_blanks_train_without_an_index(tmp_path: Path) -> None:
    """A tar whose names no index can hold is read by its headers."""
    mk(tmp_path / "train-0.tar", [("hot dog/1.jpg", jpeg(1)), ("hot dog/1.cls", b"5")])
    run(tmp_path)
    assert pairs(tmp_path / "train-shardindex.json") == {"hot dog/1": (jpeg(1), 5)}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.case("N11")
def test_as_webdataset_streams_them(tmp_path: Path, form: int, indexed: bool) -> None:
    """Sample by sample, what the index leads to is what stock webdataset streams, and what headers lead to (N11)."""
    paths = foreign_set(tmp_path, form)
    if indexed:
        run(tmp_path)
    counts = [7, 7, 7]
    reader = ShardReader(
        [ShardFile(str(p), n, p.stat().st_size) for p, n in zip(paths, counts, strict=True)], Wanted(("jpg",), "cls")
    )
    ours = [reader.read(shard, at) for shard in range(3) for at in range(7)]
    theirs = [sample for path in paths for sample in stock(path)]
    assert [(s["__key__"], s["jpg"], s["cls"]) for s in ours] == [(s["__key__"], s["jpg"], s["cls"]) for s in theirs]
    reader.close()


@pytest.mark.case("T07")
def test_what_webdataset_wrote(tmp_path: Path) -> None:
    """Shards of webdataset's own writer, with a PAX header for each member, are indexed and train (T07, T08)."""
    with wds.ShardWriter(f"{tmp_path}/train-%06d.tar", maxcount=4, verbose=0) as writer:
        for n in range(10):
            writer.write({"__key__": f"k{n}", "jpg": jpeg(n), "cls": n})
    found = run(tmp_path)
    assert found.problems == () and [s.nsamples for s in manifest.read(tmp_path / "train-shardindex.json").shards] == [4, 4, 2]
    assert pairs(tmp_path) == {f"k{n}": (jpeg(n), n) for n in range(10)}


def test_what_tar_wrote(tmp_path: Path) -> None:
    """A folder packed by GNU tar, as the way is that everyone knows, trains once it is indexed."""
    (tmp_path / "in").mkdir()
    for n in range(6):
        (tmp_path / "in" / f"{n:04d}.jpg").write_bytes(jpeg(n))
        (tmp_path / "in" / f"{n:04d}.cls").write_text(str(n))
    subprocess.run(["tar", "--sort=name", "-C", tmp_path / "in", "-cf", tmp_path / "train.tar", "."], check=True)
    assert run(tmp_path / "train.tar").problems == ()
    assert pairs(tmp_path / "train-shardindex.json") == {f"./{n:04d}": (jpeg(n), n) for n in range(6)}
