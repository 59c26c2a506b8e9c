"""Every picture of Pillow's own tests, over a thousand odd ones, packed and read (make corpus): no crash, no hang, no silence.

The pictures come with Pillow's source distribution, which pip fetches; SHARDIFY_CORPUS names a folder that has it unpacked.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import numpy.typing as npt
import PIL
import pytest
from gallery import Silent
from PIL import Image, ImageFile, ImageOps

import pipeline
from pipeline.decode import decode_image
from shardify import build
from shardify.config import BuildConfig
from shardify.encode import to_jpeg
from shardify.format import tar
from shardify.format.picture import PictureError, probe

pytestmark = [pytest.mark.corpus, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
CLOSE = 3.0  # grey levels of 255, mean


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pictures, and a table of all files that it holds."""
    folder = tmp_path_factory.mktemp("corpus")
    unpacked = Path(os.environ.get("SHARDIFY_CORPUS") or _fetched(folder))
    files = sorted(path for path in unpacked.rglob("*") if path.is_file() and "images" in path.parts)
    assert len(files) > 1000, unpacked
    with (folder / "t.csv").open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out)
        rows.writerow(["id", "label", "path"])
        for number, path in enumerate(files):
            (folder / f"{number:05d}").symlink_to(path)
            rows.writerow([f"{number:05d}", number % 10, f"{number:05d}"])
    return folder


def _fetched(folder: Path) -> Path:
    name = f"pillow=={PIL.__version__}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        "pillow",
        "-d",
        str(folder / "sdist"),
        name,
    ]
    subprocess.run(command, check=True)
    with tarfile.open(next((folder / "sdist").glob("*.tar.gz"))) as opened:
        opened.extractall(folder / "source", filter="data")
    return folder / "source"


def packed(corpus: Path, out: Path, **encode: Any) -> tuple[build.Report, list[dict[str, str]]]:
    """Pack all files under `skip`; return the report, and what was refused."""
    source = {
        "kind": "csv",
        "root": str(corpus),
        "table": "t.csv",
        "id": "id",
        "label": "label",
        "path": "{path}",
        "links": "anywhere",
    }
    config = BuildConfig.model_validate(
        {
            "name": "corpus",
            "source": source,
            "splits": {"train": 1.0},
            "encode": {"refused": "skip", **encode},
            "max_skipped": 1.0,
            "shards": {"out": str(out), "size": "8MiB"},
        }
    )
    report = build.build(config, force=False, skipped_to=out.with_suffix(".csv"), progress=Silent())
    with out.with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        return report, list(csv.DictReader(file))


def pictures(out: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (key, bytes) of each packed picture."""
    for shard in sorted(out.glob("*.tar")):
        data = shard.read_bytes()
        for record in tar.samples(io.BytesIO(data), len(data)):
            member = record.members[0]
            yield record.key, data[member.offset : member.offset + member.size]


def by_others(data: bytes) -> list[npt.NDArray[np.uint8]]:
    """Return a picture as OpenCV's own reading of a file has it, and as Pillow has it, where they can."""
    found = []
    by_cv2 = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if by_cv2 is not None:
        found.append(np.asarray(cv2.cvtColor(by_cv2, cv2.COLOR_BGR2RGB)))
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as picture:
            found.append(np.asarray(ImageOps.exif_transpose(picture).convert("RGB")))
    except Exception:  # Pillow's many ways to say no
        pass
    return found


@pytest.mark.parametrize("encode", [{"types": "keep", "check": "decode"}, {"types": "keep", "check": "strict", "repair": True}])
def test_what_is_packed_as_it_is_reads_as_others_read_it(corpus: Path, tmp_path: Path, encode: dict[str, Any]) -> None:
    """Each file is packed or refused with a reason; what is packed decodes as OpenCV or Pillow decodes it, within 3 grey levels."""
    report, refused = packed(corpus, tmp_path / "out", **encode)
    total = len((corpus / "t.csv").read_text().splitlines()) - 1
    kept = dict(pictures(tmp_path / "out"))
    assert len(kept) + len(refused) == total
    assert all(row["reason"].strip() and row["cause"] for row in refused)
    far = []
    for key, data in kept.items():
        read = decode_image(data)
        others = [other for other in by_others(data) if other.shape == read.shape]
        if not any(np.abs(read.astype(int) - other).mean() < CLOSE for other in others):
            far.append((key, probe(data)))
    print(
        f"\n{encode}: {len(kept)} packed, {dict(report.kinds)}; refused {dict(Counter(row['cause'] for row in refused))}; far {far}"
    )
    assert not far


def test_what_is_converted_reads_as_others_read_it(corpus: Path, tmp_path: Path) -> None:
    """Under `convert` each is a JPEG or refused with a reason; it is what a JPEG of others' pixels is, within 3 grey levels."""
    _, refused = packed(corpus, tmp_path / "out", types="convert", check="decode", quality=100)
    far, count = [], 0
    for key, data in pictures(tmp_path / "out"):
        count += 1
        assert probe(data).kind == "jpeg"
        original, read = (corpus / key).read_bytes(), decode_image(data)
        others = [decode_image(to_jpeg(other, 100)) for other in by_others(original) if other.shape == read.shape]
        if not any(np.abs(read.astype(int) - other).mean() < CLOSE for other in others):
            far.append((key, probe(original)))
    print(f"\nconverted: {count}; refused {dict(Counter(row['cause'] for row in refused))}; far {far}")
    assert all(row["reason"].strip() for row in refused)
    assert not far


def test_a_loader_goes_through_all_of_it(corpus: Path, tmp_path: Path) -> None:
    """Packed by a header's check alone, read under `skip`: the epoch comes to its end, and every sample is there or counted."""
    packed(corpus, tmp_path / "out", types="keep")
    options = pipeline.LoaderOptions(on_error="skip", max_skipped=1.0, keys=True, last_batch="uneven")
    shrink = A.Compose([A.Resize(32, 32)])
    with pipeline.make_loader(tmp_path / "out", batch_size=32, num_workers=2, transform=shrink, options=options) as loader:
        count = sum(len(batch.labels) for batch in loader)
        skipped = loader.stats().skipped
        assert count == len(list(pictures(tmp_path / "out"))) > 300
    print(f"\nread: {count}; {skipped}")
    assert all(" " in reason for reason in skipped.first)


def test_every_file_is_probed(corpus: Path) -> None:
    """The header's reading gives a size and a type, or a typed error, for every file."""
    causes: Counter[str] = Counter()
    for row in csv.DictReader((corpus / "t.csv").open(newline="")):
        data = (corpus / row["path"]).read_bytes()
        try:
            causes[probe(data).kind] += 1
        except PictureError as error:
            assert str(error).strip()
            causes[error.cause] += 1
    print(f"\n{dict(causes)}")
