"""Pictures of every kind: what packing and reading make of each is what docs/pictures.md says, and pixels are as others decode them."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from gallery import Silent, make_gallery, tree
from kinds import KINDS, SIDES, Fate, fate, flipped, photo, png_bomb, scene
from PIL import Image, ImageOps
from resuming import large

from pipeline.decode import decode_image
from pipeline.errors import DecodeError
from shardify import build, encode
from shardify.config import Encode
from shardify.errors import DataError, SettingsError
from shardify.format import manifest
from shardify.format.picture import CutPictureError, PictureError
from shardify.items import MENDED
from shardify.verify import verify

PAGE = Path(__file__).resolve().parent.parent / "docs" / "pictures.md"
OLD = int(cv2.__version__.split(".", 1)[0]) < 5
# Before its version 5, OpenCV has no decoder for these.
NEWER = ("GIF", "AVIF")


def told() -> dict[str, Fate]:
    """Return the table of the page; a cell such as "JPEG (4: damaged)" says what another version of OpenCV does."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 7 and cells[0] in KINDS:
            others = [re.fullmatch(r"(.+?) \(4: (.+)\)", cell) for cell in cells]
            found[cells[0]] = Fate(
                *((other[2] if OLD else other[1]) if other else cell for cell, other in zip(cells[1:], others[1:], strict=True))
            )
    return found


def by_pillow(data: bytes) -> npt.NDArray[np.uint8]:
    """Return a picture as Pillow has it: upright, RGB."""
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))


def difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Return the mean difference in grey levels."""
    assert a.shape == b.shape
    return float(np.abs(a.astype(int) - b).mean())


def test_the_page_has_every_kind() -> None:
    """Each kind that is made here stands in the table, and no other."""
    assert list(told()) == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.case("I13")
def test_what_becomes_of_a_picture_is_what_the_page_says(kind: str) -> None:
    """Packed under each check, mended, converted and read; the same bytes whatever the file is named."""
    assert fate(KINDS[kind]()) == told()[kind]


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not (OLD and kind in NEWER)])
@pytest.mark.case("I06")
def test_pixels_are_those_of_other_decoders(kind: str, tmp_path: Path) -> None:
    """What is read equals `cv2.imread` of the file exactly, and Pillow within 3 grey levels: upright, RGB, without alpha."""
    data = KINDS[kind]()
    try:
        read = decode_image(data)
    except DecodeError:
        return
    assert read.dtype == np.uint8 and read.ndim == 3 and read.shape[2] == 3
    (tmp_path / "a.jpg").write_bytes(data)
    np.testing.assert_array_equal(read, cv2.cvtColor(cv2.imread(str(tmp_path / "a.jpg"), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB))
    if "half grey" not in kind and "wrong byte" not in kind:
        assert difference(read, by_pillow(data)) < 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_packed_is_read(kind: str) -> None:
    """What `check: decode` packs can be read, with the same pixels as it was given; so can what is converted, within a JPEG's loss."""
    data = KINDS[kind]()
    mended, converted = {"check": "decode", "repair": True}, {"check": "decode", "types": "convert", "quality": 100}
    for settings, loss in (({"check": "decode"}, 0.0), (mended, 0.0), (converted, 3.0)):
        try:
            made = encode.encode(data, Encode.model_validate(settings))
        except PictureError:
            continue
        read = decode_image(made.data)
        if made.data != data and not made.kind.endswith(MENDED):
            assert made.field == "jpg"
            original = decode_image(data)
            dithered = "palette" in kind or kind == "GIF"  # colors that change from pixel to pixel are what a JPEG keeps least of
            assert difference(read, original) <= (8 if dithered else loss)
        if "EXIF" in kind:
            assert read.shape[:2] == (SIDES if int(kind[-1]) < 5 else SIDES[::-1])


@pytest.mark.case("I01")
def test_only_the_end_mark_is_put_back() -> None:
    """A JPEG that lacks it whole or by half becomes the very bytes that it was; one that lacks more stays refused (I01)."""
    whole, settings = photo(), Encode.model_validate({"repair": True})
    for cut in (1, 2):
        made = encode.encode(whole[:-cut], settings)
        assert (made.data, made.kind) == (whole, "jpeg" + MENDED)
    assert encode.encode(whole, settings).kind == "jpeg"
    for lost in (3, 40, 400):
        with pytest.raises(CutPictureError, match=r"not that alone is missing|ends before"):
            encode.encode(whole[: -2 - lost], settings)


@pytest.mark.case("I02")
def test_a_strict_check_hears_what_the_decoder_says() -> None:
    """Half a picture with an end mark decodes, and is refused under `strict` alone; of single wrong bytes some are heard (I02)."""
    half = photo()[: len(photo()) // 2] + b"\xff\xd9"
    assert encode.encode(half, Encode.model_validate({"check": "decode"})).data == half
    with pytest.raises(PictureError, match=r"60.*complaint: .*premature end"):
        encode.encode(half, Encode.model_validate({"check": "strict"}))
    large = io.BytesIO()
    Image.fromarray(scene(300, 400)).save(large, "JPEG", quality=92)
    heard = 0
    for place in np.linspace(0.2, 0.9, 40):
        try:
            encode.encode(flipped(large.getvalue(), float(place)), Encode.model_validate({"check": "strict"}))
        except PictureError:
            heard += 1
    assert heard >= 8  # docs/pictures.md: 13 of 40


def checked_strictly(folder: Path, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    """Check half a picture strictly in a process of its own, which prints what kind of error that is."""
    (folder / "half.jpg").write_bytes(photo()[: len(photo()) // 2] + b"\xff\xd9")
    program = (
        f"import os, sys\n{before}\nfrom shardify.complaints import overheard; from shardify import encode\n"
        f"data = open({str(folder / 'half.jpg')!r}, 'rb').read()\n"
        "try: encode.check_decodes(data, strict=True)\n"
        f"except Exception as error: print(type(error).__name__)\n{after}"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PAGE.parent.parent)


def test_what_a_decoder_says_stays_off_the_terminal_and_other_words_come_through(tmp_path: Path) -> None:
    """Complaints are told as errors, not on stderr; what others write there meanwhile is written after all."""
    done = checked_strictly(
        tmp_path,
        after="with overheard() as heard: os.write(2, b'a bar\\rCorrupt JPEG data: 3 extraneous bytes\\nand more')\n"
        "print(heard); sys.stderr.write('after')",
    )
    assert done.stdout.splitlines() == ["PictureError", "['Corrupt JPEG data: 3 extraneous bytes']"]
    assert done.stderr.replace("\n", "\r").split("\r") == ["a bar", "and moreafter"]


def test_a_strict_check_needs_no_stderr(tmp_path: Path) -> None:
    """In a process whose stderr is closed half a picture is found all the same."""
    assert checked_strictly(tmp_path, before="os.close(2)").stdout == "PictureError\n"


def test_a_strict_check_fails_where_it_would_pass_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a decoder that says nothing of half a picture, the settings are refused before the first picture."""
    encode._make_sure_to_hear.cache_clear()
    monkeypatch.setattr(encode.cv2, "imdecode", lambda *_: np.zeros((64, 64, 3), np.uint8))
    with pytest.raises(SettingsError, match="a strict check can't be made here"):
        encode.check_able(Encode.model_validate({"check": "strict"}))
    encode.check_able(Encode.model_validate({"check": "decode"}))


@pytest.mark.case("I14")
def test_bombs_take_no_memory() -> None:
    """Pictures that declare a billion pixels, and a PNG whose data unpacks to far more than its size, cost nothing in either package."""
    program = (
        "import resource, sys, zlib, struct; sys.path[:0] = ['tests/support', '.']\n"
        "from kinds import jpeg_bomb, png_bomb; from shardify import encode; from shardify.config import Encode\n"
        "from pipeline.decode import decode_image; from shardify.complaints import check_png\n"
        "from shardify.errors import FormatError; from pipeline.errors import DecodeError\n"
        "stuffed = png_bomb(64, 64); packed = zlib.compress(bytes(2**28)); chunk = b'IDAT' + packed\n"
        "stuffed = stuffed[:33] + struct.pack('>I', len(packed)) + chunk + struct.pack('>I', zlib.crc32(chunk)) + stuffed[-12:]\n"
        "sides = struct.pack('<HHIIHHII', 256, 4, 1, 33000, 257, 4, 1, 33000)\n"
        "tiff = b'II*\\0' + struct.pack('<IH', 8, 2) + sides + bytes(4)\n"
        "gif = b'GIF89a' + struct.pack('<HH', 65000, 65000) + bytes(3) + b',' + struct.pack('<HHHH', 0, 0, 65000, 65000) + bytes(9)\n"
        "bmp = b'BM' + struct.pack('<IIIIiiHH', 70, 0, 54, 40, 33000, -33000, 1, 24) + bytes(40)\n"
        "webp = b'RIFF' + struct.pack('<I', 40) + b'WEBPVP8X' + struct.pack('<II', 10, 0) + b'\\xff\\xff\\xff' * 2 + bytes(20)\n"
        "bombs = [png_bomb(33000, 33000), jpeg_bomb(65000, 65000), png_bomb(2**31 - 1, 2**31 - 1), stuffed, tiff, gif, bmp, webp]\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for data in bombs:\n"
        "    for check in ('header', 'decode', 'strict'):\n"
        "        try: encode.encode(data, Encode.model_validate({'check': check, 'types': 'convert'}))\n"
        "        except FormatError: pass\n"
        "    try: decode_image(data)\n"
        "    except DecodeError: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    environment = {**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PAGE.parent.parent, env=environment
    )
    assert int(done.stdout) < 60_000  # KiB


def test_how_many_pixels_a_picture_may_have_can_be_set() -> None:
    """`encode.pixels` and `max_pixels` count what the header says: one more pixel is refused, by the same rule in both packages."""
    data, count = photo(), SIDES[0] * SIDES[1]
    assert encode.encode(data, Encode.model_validate({"pixels": count})).data == data
    with pytest.raises(PictureError, match=f"80x60 pixels; at most {count - 1} are decoded"):
        encode.encode(data, Encode.model_validate({"pixels": count - 1}))
    assert decode_image(data, None, count).shape == (*SIDES, 3)
    for refused in (data, png_bomb(80, 60)):
        with pytest.raises(DecodeError, match="80x60 pixels"):
            decode_image(refused, None, count - 1)


@pytest.mark.case("I13")
def test_types_that_not_every_reader_decodes_are_named_before_a_shard_is_written(tmp_path: Path) -> None:
    """AVIF, GIF and HEIC called .jpg are told by their first bytes, each by its own name, whatever this OpenCV can decode."""
    gallery = make_gallery(tmp_path / "in", 6)
    named = {gallery.path(at): kind for at, kind in ((1, "AVIF"), (2, "GIF"), (4, "HEIC"))}
    for path, kind in named.items():
        path.write_bytes(KINDS[kind]())
    with pytest.raises(DataError, match=r"3 of 6 pictures can't be packed \(3 type\)") as caught:
        build.build(gallery.config(tmp_path / "out"), force=False, skipped_to=None, progress=Silent())
    said = [
        f"{path.relative_to(gallery.root)}: {kind.lower()}, which not every reader of shards decodes"
        for path, kind in named.items()
    ]
    assert [problem.partition(";")[0] for problem in caught.value.problems] == said
    assert not (tmp_path / "out").exists()


@pytest.mark.case("I01")
def test_a_build_mends_counts_and_lists(tmp_path: Path) -> None:
    """Mended pictures are whole in the shards, counted in the report and listed in the manifest; a plan says the same; verify agrees."""
    gallery = make_gallery(tmp_path / "in")
    short = sorted(gallery.keys[:3])
    for number, cut in ((0, 2), (1, 1), (2, 2)):
        gallery.path(number).write_bytes(gallery.pictures[gallery.keys[number]][:-cut])
    gallery.path(3).write_bytes(gallery.pictures[gallery.keys[3]][:-200])
    config = gallery.config(tmp_path / "out", encode={"repair": True, "refused": "skip"}, splits={"train": 1.0})
    planned = build.plan(config, skipped_to=None, progress=Silent())
    report = build.build(config, force=False, skipped_to=None, progress=Silent())
    assert report.splits == planned.splits and report.kinds == planned.kinds == {"jpeg": 29}
    assert report.skipped == planned.skipped == {"cut": 1}
    assert "3 JPEGs lacked their end mark and nothing else; it was put back" in report.notes and report.notes[-1] in planned.notes
    made = manifest.read(tmp_path / "out" / "train-shardindex.json")
    assert (made.repaired.count, list(made.repaired.keys)) == (3, short)
    found = verify(tmp_path / "out", decode=True, strict=True, progress=Silent())
    assert found.problems == () and sum(split.samples for split in found.splits.values()) == 29
    shards = b"".join(path.read_bytes() for path in sorted((tmp_path / "out").glob("*.tar")))
    assert all(gallery.pictures[key] in shards for key in short)


def test_a_resumed_build_remembers_what_it_mended(tmp_path: Path) -> None:
    """A build that ends in the middle and goes on writes the manifest that one in a single run writes."""
    gallery = make_gallery(tmp_path / "in", 60, make=large)
    for number in range(0, 60, 7):
        gallery.path(number).write_bytes(gallery.pictures[gallery.keys[number]][:-2])
    gallery.path(5).write_bytes(b"")
    sections: dict[str, Any] = {"memory": 2**20, "shards": {"size": 200_000}}
    whole = gallery.config(tmp_path / "whole", encode={"repair": True, "refused": "skip"}, **sections)
    build.build(whole, force=False, skipped_to=None, progress=Silent())
    with pytest.raises(DataError, match="1 of 60"):
        build.build(
            gallery.config(tmp_path / "cut", encode={"repair": True}, **sections), force=False, skipped_to=None, progress=Silent()
        )
    cut = gallery.config(tmp_path / "cut", encode={"repair": True, "refused": "skip"}, **sections)
    report = build.build(cut, force=False, resume=True, skipped_to=None, progress=Silent())
    assert "9 JPEGs lacked their end mark and nothing else; it was put back" in report.notes
    one, other = tree(tmp_path / "whole"), tree(tmp_path / "cut")
    assert one == other


@pytest.mark.case("I02")
def test_verify_names_half_a_picture_only_where_it_is_asked_to(tmp_path: Path) -> None:
    """`--decode` passes what decodes, `--strict` names it with shard, member and complaint."""
    gallery = make_gallery(tmp_path / "in", 12)
    half = gallery.pictures[gallery.keys[4]]
    gallery.path(4).write_bytes(half[: len(half) * 3 // 4] + b"\xff\xd9")
    build.build(gallery.config(tmp_path / "out", splits={"train": 1.0}), force=False, skipped_to=None, progress=Silent())
    assert verify(tmp_path / "out", decode=True, progress=Silent()).problems == ()
    (problem,) = verify(tmp_path / "out", decode=False, strict=True, progress=Silent()).problems
    assert re.search(rf"train-0.*\.tar: {gallery.keys[4]}\.jpg: .*decodes with a complaint", problem)
