"""Random damage to each kind of file that is read: only our own errors come out, in bounded memory and time a case.

The suite takes a hundred cases of each; `make test-slow` 10,000.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kinds import photo
from packing import PackedSet, pack
from residence import within_memory

from pipeline.decode import decode_for_crop, decode_image
from pipeline.errors import PipelineError
from pipeline.items import Wanted
from pipeline.samples import ShardFile, ShardReader
from pipeline.survey import survey
from pipeline.urls import resolve
from shardify import encode, sources
from shardify.config import BuildConfig, Encode
from shardify.errors import ShardifyError
from shardify.format import index, manifest, tar
from shardify.verify import verify

SECONDS, MEMORY_BYTES = 1.0, 2**29
WANTED = Wanted(("jpg",), "cls")
# What breaks parsers: numbers too large, negative and odd, what ends or begins something, what isn't text.
WORDS = (
    b"-1", b"0", b"9" * 18, b"9" * 19, b"9" * 40, b"1e999", b"NaN", b"null", b"[]", b"{}", b'"', b"\\", b"\n", b"\r", b"\r\n", b" ", b",",
    b"\0", b"\xff", b"\xff\xd9", b"\xff\xd8", b"\xff\xda", b"\xed\xa0\x80", b"../../../etc/passwd", b"file:///etc/passwd", b"true",
    b"\x80" + bytes(11), b"7777777", bytes(512), b"v1.2 ", "٣".encode(), "\u2028".encode(), b"[" * 3000,
)  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one to four things wrong with them."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((1, 1, 2, 8, 100, 512, len(data)))
        part, word = data[at : at + length], rng.choice(WORDS)
        flipped = bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else b""
        # What comes at that place, and how many bytes go for it.
        middle, gone = rng.choice(
            (
                (rng.randbytes(min(length, 600)), length),
                (flipped, 1),
                (b"", len(data)),
                (b"", length),
                (part, 0),
                (word, 0),
                (word, len(word)),
                (part[::-1], len(part)),
            )
        )
        data = data[:at] + middle + data[at + gone :]
    return data


def attack(good: bytes, use: Callable[[bytes], Any], count: int) -> int:
    """Give damaged bytes to `use`; return how many were refused. Fails on an error that isn't ours, or one that says nothing."""
    use(good)  # imports, caches, and that it is good
    refused = 0
    for number in range(count):
        data = mutated(good, random.Random(number))
        begin = time.process_time()
        try:
            with within_memory(MEMORY_BYTES):
                use(data)
        except (PipelineError, ShardifyError) as error:
            refused += 1
            assert str(error).strip(), number
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error
        spent = time.process_time() - begin
        assert spent < SECONDS, f"case {number} took {spent:.1f} s"
    return refused


COUNTS = pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    """A set of two small shards."""
    return pack(tmp_path / "set", 12, 2)


def samples_of(path: Path, size: int, count: int) -> None:
    """Read all samples of a shard as the loader does."""
    reader = ShardReader([ShardFile(str(path), count, size)], WANTED)
    try:
        for at in range(count):
            reader.read(0, at)
    finally:
        reader.close()


@COUNTS
def test_tars(packed: PackedSet, count: int) -> None:
    """A shard: its headers are walked, and what is found lies within the file."""
    good = sorted(packed.folder.glob("*.tar"))[0].read_bytes()

    def use(data: bytes) -> None:
        for record in tar.all_samples(io.BytesIO(data), len(data), "a.tar"):
            assert all(0 < m.offset <= m.offset + m.size <= len(data) for m in record.members)

    assert attack(good, use, count) > count // 8


@COUNTS
def test_tars_that_an_index_knows(packed: PackedSet, count: int) -> None:
    """A shard that was damaged after it was indexed: each sample is read by offset."""
    path = sorted(packed.folder.glob("*.tar"))[0]
    good = path.read_bytes()

    def use(data: bytes) -> None:
        path.write_bytes(data)
        samples_of(path, 0, 6)

    assert attack(good, use, count) > count // 8


@COUNTS
def test_indexes(packed: PackedSet, count: int) -> None:
    """An index beside its shard: parsed by both packages, and every sample that it names is read."""
    path = sorted(packed.folder.glob("*.tar"))[0]
    beside = path.with_suffix(".idx")
    good = beside.read_bytes()

    def use(data: bytes) -> None:
        beside.write_bytes(data)
        try:
            index.load(data, "a.idx")
        finally:
            samples_of(path, path.stat().st_size, 6)

    assert attack(good, use, count) > count // 2


@COUNTS
def test_manifests(packed: PackedSet, count: int) -> None:
    """A manifest: parsed, resolved into shards, surveyed; verified in some cases, for that reads all shards."""
    (path,) = packed.folder.glob("*-shardindex.json")
    good = path.read_bytes()
    tried = 0

    def use(data: bytes) -> None:
        nonlocal tried
        tried += 1
        path.write_bytes(data)
        if tried % 10 == 0:
            verify(packed.folder, decode=False, progress=Quiet())
        manifest.load(data, "a.json")
        survey(resolve(str(path)))

    assert attack(good, use, count) > count // 2


class Quiet:
    """Progress that nobody sees."""

    def begin(self, doing: str, total: int, unit: str = "images") -> None:
        """Nothing."""

    def advance(self, size: int) -> None:
        """Nothing."""


@COUNTS
@pytest.mark.parametrize("extra", [{}, {"labels": "as_is", "group": "place", "extra": ["place"]}], ids=["plain", "grouped"])
def test_tables(tmp_path: Path, extra: dict[str, Any], count: int) -> None:
    """A CSV table: its rows become items, or all that is wrong with them is one error."""
    if extra and count > 5000:
        pytest.skip("once is enough")
    good = b"id,label,place\n" + b"".join(b'%04x,%d,"place, %d"\n' % (n * 7919 % 65536, n % 5, n // 3) for n in range(40))
    source = {"kind": "csv", "root": str(tmp_path), "table": "t.csv", "id": "id", "label": "label", "path": "{id[0]}/{id}.jpg"}
    shards = {"out": str(tmp_path / "out")}
    config = BuildConfig.model_validate({"name": "n", "source": source | extra, "splits": {"train": 1.0}, "shards": shards})

    def use(data: bytes) -> None:
        (tmp_path / "t.csv").write_bytes(data)
        items = sources.read(config)
        assert len(items.paths) == len(items.keys) == len(items.labels) > 0
        assert not any(path.startswith("/") or ".." in path.split("/") for path in items.paths)

    assert attack(good, use, count) > count // 8


@COUNTS
@pytest.mark.filterwarnings("ignore")
def test_pictures(count: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A JPEG: checked in each way, mended, re-encoded, decoded whole and at a scale; what is packed under `decode` can be read."""
    good = photo()
    checks = [{"check": check, "repair": True} for check in ("header", "decode", "strict")]
    settings = [Encode.model_validate(each) for each in (*checks, {"types": "convert", "resize": {"short_side": 30}})]

    def use(data: bytes) -> None:
        for each in settings:
            try:
                made = encode.encode(data, each)
            except ShardifyError as error:
                assert str(error)
                continue
            if each.check != "header":
                assert decode_image(made.data).ndim == 3
        assert decode_image(data, (30, 40)).ndim == 3
        assert decode_for_crop(data, (10, 10), lambda sides: sides)[0].ndim == 3
        assert decode_image(data).ndim == 3

    assert attack(good, use, count) > count // 8
    capfd.readouterr()
