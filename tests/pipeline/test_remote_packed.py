"""Compressed tars over HTTP: indexed once, then the batches of a local folder, unpacked while they stream, whatever the network does."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from afar import QUICK, WINDOW, bytes_asked, epochs, loader_of, read
from faulty import HTML, Fault, Faulty, Request, some_faults
from foreign import mk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing import PackedSet
from residence import big_set
from squeezed import PACKERS, described, in_members, squeeze

import pipeline
from pipeline import HttpOptions
from pipeline.index import Indexed, index
from pipeline.stores.cache import CHUNK, Cache
from pipeline.urls import resolve
from shardify.format import manifest

pytestmark = pytest.mark.usefixtures("no_network")

COUNT, SHARDS, SIZE = 240, 4, 20_000
NAMES = "/train-{000000..000003}."
MANIFEST = "train-shardindex.json"


def index_of(*texts: str, out: Path, **given: Any) -> Indexed:
    """Index with little patience."""
    return index(texts, out=out, http=QUICK, **given)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """240 samples of 20 KB in four shards."""
    return big_set(tmp_path_factory.mktemp("plain"), COUNT, SHARDS, SIZE)


@pytest.fixture(scope="module")
def expected(packed: PackedSet, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The batches of three epochs, from the folder of plain tars."""
    return epochs(str(packed.folder), tmp_path_factory.mktemp("unused"), 3)


@pytest.fixture(scope="module")
def served(packed: PackedSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tars compressed by gzip, with a manifest beside them."""
    folder = squeeze(packed.folder, tmp_path_factory.mktemp("served"))
    described(folder, tmp_path_factory.mktemp("made"))
    return folder


SELDOM = ("tgz", "tar.bz2", "tar.xz")


@pytest.mark.parametrize("ending", [pytest.param(e, marks=pytest.mark.slow) if e in SELDOM else e for e in PACKERS])
def test_every_kind_is_the_plain_set(packed: PackedSet, expected: list[Any], tmp_path: Path, ending: str) -> None:
    """Its manifest has the plain tars' numbers, hashes and indexes; a loader on it the batches, each byte asked for about once."""
    folder = squeeze(packed.folder, tmp_path / "served", ending)
    with Faulty(folder) as server:
        assert index_of(server.url(NAMES + ending), out=tmp_path / "set").problems == ()
        made, plain = manifest.read(tmp_path / "set" / MANIFEST), manifest.read(packed.folder / MANIFEST)
        assert [(e.nsamples, e.filesize, e.sha256) for e in made.shards] == [
            (e.nsamples, e.filesize, e.sha256) for e in plain.shards
        ]
        for path in packed.folder.glob("*.idx"):
            assert (tmp_path / "set" / path.name).read_bytes() == path.read_bytes()
        asked = [request.target for request in server.log if request.method == "GET"]
        assert sorted(asked) == [f"/train-00000{n}.{ending}" for n in range(SHARDS)]
        server.log.clear()
        where = str(tmp_path / "set" / MANIFEST)
        assert epochs(where, tmp_path / "cache", 2, workers=2) == expected[:2]
        whole = sum(path.stat().st_size for path in folder.iterdir())
        assert whole <= bytes_asked(server.log, ending) < 1.4 * whole
        server.log.clear()
        assert epochs(where, tmp_path / "cache", 1) == expected[:1]
        assert server.log == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", [f"/{MANIFEST}", NAMES + "tar.gz"])
def test_what_is_beside_them_is_found(served: Path, expected: list[Any], tmp_path: Path, where: str, workers: int) -> None:
    """The URL of the manifest, or of the tars beside it, is enough."""
    with Faulty(served) as server:
        assert epochs(server.url(where), tmp_path, 1, workers=workers) == expected[:1]


def test_members_and_padding_are_read_whole(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """Blocks of bgzip's size, an empty one at the end, and zeros behind it."""
    files = {
        f"/{path.stem}.tar.gz": in_members(path.read_bytes(), "tar.gz", 65_280) + gzip.compress(b"") + bytes(512)
        for path in packed.folder.glob("*.tar")
    }
    with Faulty(files) as server:
        assert index_of(server.url(NAMES + "tar.gz"), out=tmp_path / "set").problems == ()
        assert epochs(str(tmp_path / "set" / MANIFEST), tmp_path / "cache", 1) == expected[:1]


FAULTS = [
    Fault(cut=100_000),
    Fault(cut=0, reset=True),
    Fault(cut=70_000, chunked=True),
    Fault(raw=b""),
    Fault(status=503, retry_after="0"),
    Fault(ranges=False),
    Fault(content_range=""),
    Fault(chunked=True),
    Fault(body=HTML),
    Fault(body=b""),
    Fault(head=405),
]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_fault_costs_nothing_but_time(served: Path, expected: list[Any], tmp_path: Path, fault: Fault) -> None:
    """What goes wrong with the first replies for a shard, and every third one: all samples, once each."""
    numbers = itertools.count()

    def script(request: Request) -> Fault | None:
        return fault if request.target.endswith(".gz") and next(numbers) % 3 == 0 else None

    with Faulty(served, script) as server:
        assert epochs(server.url(f"/{MANIFEST}"), tmp_path, 1) == expected[:1]
        assert next(numbers) > 5


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.none(), st.sampled_from(FAULTS)), max_size=40), st.sampled_from([0, 2]))
def test_any_sequence_of_faults(
    served: Path, expected: list[Any], tmp_path_factory: pytest.TempPathFactory, faults: list[Fault | None], workers: int
) -> None:
    """An epoch has each sample exactly once, or ends with an error that names the server: never short, never doubled."""
    with Faulty(served, faults) as server:
        try:
            found = epochs(server.url(f"/{MANIFEST}"), tmp_path_factory.mktemp("cache"), 1, workers=workers)
            assert found == expected[:1]
        except pipeline.RemoteError as error:
            assert server.origin in str(error)
            assert faults


LARGE, LARGE_SHARDS = 720, 6
# A window a lane and one, the chunks that cut three parts of shards in each, and indexes.
LEAST = 9 * (WINDOW + 2 * SIZE + 3 * 2 * CHUNK) + LARGE_SHARDS * 16_384 + LARGE * 90


@pytest.mark.parametrize("ranges", [True, False])
def test_the_least_room_is_enough(tmp_path: Path, ranges: bool) -> None:
    """Three in ten replies fail, and nothing can stay that isn't wanted: a shard is unpacked again and again, and epochs are exact."""
    large = big_set(tmp_path / "plain", LARGE, LARGE_SHARDS, SIZE)
    expected = epochs(str(large.folder), tmp_path / "unused", 2)
    served = squeeze(large.folder, tmp_path / "served")
    described(served, tmp_path / "made")
    patient = HttpOptions(first_wait_seconds=0.001, longest_wait_seconds=0.01, attempts=40, idle_seconds=5)
    draw = some_faults(0.3, 5, 200_000)

    def script(request: Request) -> Fault | None:
        return draw(request) if request.target.endswith(".gz") else None

    with (
        Faulty(served, script, otherwise=Fault(ranges=ranges)) as server,
        loader_of(server.url(f"/{MANIFEST}"), tmp_path / "cache", cache_bytes=LEAST, workers=2, http=patient) as loader,
    ):
        cache, most = Cache(tmp_path / "cache", LEAST), 0
        for epoch in range(2):
            for got, right in zip(read(loader), expected[epoch], strict=True):
                assert got == right
                most = max(most, cache.used_bytes())
        assert most <= LEAST + 4 * 2 * 3 * CHUNK
        assert loader.stats().reading.retries > 5


def test_a_resume_goes_on(served: Path, expected: list[Any], tmp_path: Path) -> None:
    """Midway, on another machine."""
    with Faulty(served) as server:
        with loader_of(server.url(f"/{MANIFEST}"), tmp_path / "one") as loader:
            got = [batch for _, batch in zip(range(6), read(loader), strict=False)]
            state = loader.state_dict()
        with loader_of(server.url(f"/{MANIFEST}"), tmp_path / "two", workers=2) as loader:
            loader.load_state_dict(state)
            assert got + list(read(loader)) == expected[0]


def test_epochs_that_are_left_early(served: Path, expected: list[Any], tmp_path: Path) -> None:
    """Streams that nobody wants to the end any more are taken on, or begun anew."""
    with Faulty(served, rate=20e6) as server, loader_of(server.url(f"/{MANIFEST}"), tmp_path, workers=2) as loader:
        for epoch, count in ((0, 1), (1, 4), (2, COUNT // 16)):
            got = [batch for _, batch in zip(range(count), read(loader), strict=False)]
            assert got == expected[epoch][:count]


RANK = """
import sys, json
from pathlib import Path
sys.path[:0] = sys.argv[4:]
from afar import epochs
found = epochs(sys.argv[1], Path(sys.argv[2]), 1, rank=int(sys.argv[3]), world_size=2, last_batch="uneven")
print(json.dumps([batch[0] for batch in found[0]]))
"""


def test_ranks_share_what_is_unpacked(served: Path, packed: PackedSet, tmp_path: Path) -> None:
    """Two processes on one folder: each sample once, and no process asks for a shard more than once from its start to its end."""
    support = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]
    with Faulty(served) as server:
        command = [sys.executable, "-c", RANK, server.url(f"/{MANIFEST}"), str(tmp_path)]
        ranks = [subprocess.Popen([*command, str(rank), *support], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        keys = [key for rank in ranks for batch in json.loads(rank.communicate(timeout=60)[0]) for key in batch]
        assert sorted(keys) == sorted(packed.keys)
        assert bytes_asked(server.log, ".gz") <= 2 * sum(path.stat().st_size for path in served.glob("*.gz"))


def changed(served: Path, data: bytes) -> dict[str, bytes]:
    """Return what is served, with other bytes for the third tar."""
    return {f"/{path.name}": path.read_bytes() for path in served.iterdir()} | {"/train-000002.tar.gz": data}


def broken(plain: bytes) -> dict[str, tuple[bytes, str]]:
    """Return by a word what may lie in place of a tar, and what is to be said of it."""
    good, other = gzip.compress(plain, 1), bytearray(plain)
    other[5000] ^= 1
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0x10
    return {
        "cut": (good[:-100_000], "ends in the middle of what is compressed by gzip"),
        "cut by a byte": (good[:-1], "ends in the middle of what is compressed by gzip"),
        "garbage": (good + b"garbage", "something follows that is no gzip"),
        "damaged": (bytes(flipped), "damaged before byte"),
        "other bytes": (gzip.compress(bytes(other), 1), "unpacks to bytes of sha256"),
        "longer": (gzip.compress(plain + bytes(512), 1), "unpacks to more than the"),
        "shorter": (gzip.compress(plain[:-512], 1), "unpacks to .* bytes, and its manifest says"),
        "a bomb": (gzip.compress(plain, 1) + gzip.compress(bytes(2**28), 9), "unpacks to more than the"),
        "plain": (plain, "isn't compressed by gzip"),
        "empty": (b"", "is empty"),
    }


@pytest.mark.parametrize("what", list(broken(b"x" * 10_000)))
def test_what_isn_t_the_tar_that_was_indexed(served: Path, packed: PackedSet, tmp_path: Path, what: str) -> None:
    """It ends the epoch with its URL and the cause, each time, also where another loader finds the cache folder."""
    data, words = broken((packed.folder / "train-000002.tar").read_bytes())[what]
    with Faulty(changed(served, data)) as server:
        for _ in range(2):
            with (
                loader_of(server.url(f"/{MANIFEST}"), tmp_path, workers=2) as loader,
                pytest.raises(pipeline.SourceError, match=rf"train-000002\.tar\.gz.*{words}"),
            ):
                list(read(loader))


def test_another_version_midway_is_an_error(served: Path, tmp_path: Path) -> None:
    """Old and new bytes don't go into one stream."""
    seen = Counter[str]()

    def script(request: Request) -> Fault | None:
        seen[request.target] += 1
        return Fault(etag='"new"') if request.target.endswith(".gz") and seen[request.target] > 2 else None

    with (
        Faulty(served, script) as server,
        loader_of(server.url(f"/{MANIFEST}"), tmp_path) as loader,
        pytest.raises(pipeline.ChangedError, match=r"train-00000.\.tar\.gz.*ETag"),
    ):
        list(read(loader))


def test_a_server_that_calls_the_file_encoded(served: Path, expected: list[Any], tmp_path: Path) -> None:
    """Apache says Content-Encoding: x-gzip of what ends with .gz; its bytes are the file's."""
    says = Fault(headers=(("Content-Encoding", "x-gzip"),))
    with Faulty(served, lambda request: says if request.target.endswith(".gz") else None) as server:
        assert index_of(server.url(NAMES + "tar.gz"), out=tmp_path / "set").problems == ()
        assert epochs(server.url(f"/{MANIFEST}"), tmp_path / "cache", 1) == expected[:1]


def test_without_a_manifest_the_cure_is_said(served: Path, tmp_path: Path) -> None:
    """At once, before a tar is asked for; so it is for a manifest that knows only what is compressed."""
    files = {f"/{path.name}": path.read_bytes() for path in served.glob("*.gz")}
    shards = [{"url": f"train-00000{n}.tar.gz", "nsamples": 60} for n in range(SHARDS)]
    listed = json.dumps({"wids_version": 1, "shardlist": shards}).encode()
    with Faulty(files | {"/other.json": listed}) as server:
        for where in (server.url(NAMES + "tar.gz"), server.url("/other.json")):
            with pytest.raises(pipeline.UncountedError, match="python -m pipeline index"):
                loader_of(where, tmp_path)
        assert not any(request.target.endswith(".gz") for request in server.log)


def test_plain_and_compressed_ones_in_one_set(packed: PackedSet, served: Path, expected: list[Any], tmp_path: Path) -> None:
    """Each shard is read as its own name says."""
    files = {f"/{path.name}": path.read_bytes() for folder in (served, packed.folder) for path in folder.iterdir()}
    files["/mixed.json"] = (
        (served / MANIFEST).read_bytes().replace(b"000001.tar.gz", b"000001.tar").replace(b"03.tar.gz", b"03.tar")
    )
    with Faulty(files) as server:
        assert epochs(server.url("/mixed.json"), tmp_path, 1) == expected[:1]


def test_a_second_indexing_reads_nothing(served: Path, tmp_path: Path) -> None:
    """Its record knows how long the compressed tars are; another version is refused without force."""
    with Faulty(served) as server:
        first = index_of(server.url(NAMES + "tar.gz"), out=tmp_path)
        server.log.clear()
        again = index_of(server.url(NAMES + "tar.gz"), out=tmp_path)
        assert (again.splits["train"].read, again.splits["train"].samples) == (0, first.splits["train"].samples)
        assert not [request for request in server.log if request.method == "GET"]
    longer = (served / "train-000002.tar.gz").read_bytes() + gzip.compress(b"")
    with Faulty(changed(served, longer), port=server.port) as server:
        with pytest.raises(pipeline.OptionsError, match=r"train-000002\.tar\.gz: changed since it was indexed"):
            index_of(server.url(NAMES + "tar.gz"), out=tmp_path)
        assert index_of(server.url(NAMES + "tar.gz"), out=tmp_path, force=True).problems == ()


def test_bad_ones_are_reported_or_left_out(packed: PackedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its URL and what is wrong; a bomb ends at its bounds."""
    plain = (packed.folder / "train-000000.tar").read_bytes()
    good = gzip.compress(plain, 1)
    monkeypatch.setattr(sys.modules["pipeline.index.scan"], "_ANY_TIMES_BYTES", 2**23)
    monkeypatch.setattr(sys.modules["pipeline.index.scan"], "_MOST_TIMES", 10)
    bad = {
        "cut": (good[:-100_000], "ends in the middle"),
        "garbage": (good + b"garbage", "something follows"),
        "plain": (plain, "isn't compressed by gzip"),
        "half": (gzip.compress(plain[:-5000], 1), "ends"),
        "twice": (gzip.compress(good, 1), "compressed by gzip"),
        "bomb": (gzip.compress(plain + bytes(2**25), 9), "no tar of samples does"),
    }
    files = {f"/t-{n}.tar.gz": data for n, (data, _) in enumerate(bad.values())} | {"/t-9.tar.gz": good}
    with Faulty(files) as server:
        urls = [server.url(name) for name in files]
        found = index_of(*urls, out=tmp_path)
        for number, (_, words) in enumerate(bad.values()):
            assert any(f"/t-{number}.tar.gz" in line and words in line for line in found.problems), (words, found.problems)
        assert found.manifests == {} and "6 of 7 tars aren't indexed" in "\n".join(found.problems)
        kept = index_of(*urls, out=tmp_path, skip_bad=True)
        assert kept.problems == () and kept.splits["t"].shards == 1


def test_names_that_are_odd_or_equal(tmp_path: Path) -> None:
    """Tars of one name, compressed or not, from several folders, quoted signs and signatures: each has its own index and entry."""
    targets = ["/a/t-0.tar.gz", "/b/t-0.tgz", "/c/x%2Fy%20+&-0.tar.zst", "/d/t-0.tar", "/e/T-0.TAR.GZ?X-Amz-Signature=s3cret"]
    files = {}
    for number, target in enumerate(targets):
        content = [(f"k{number}{n:02d}.{field}", b"%d" % n) for n in range(20) for field in ("jpg", "cls")]
        data, name = mk(tmp_path / f"{number}.tar", content).read_bytes(), unquote(target.partition("?")[0])
        files[name] = data if name.endswith(".tar") else PACKERS["tar.zst" if ".zst" in name else "tar.gz"](data)
    with Faulty(files) as server:
        out = tmp_path / "out"
        found = index_of(*map(server.url, targets), out=out, split="t")
        assert found.problems == () and len(list(out.glob("*.idx"))) == len(targets)
        (epoch,) = epochs(str(out / "t-shardindex.json"), tmp_path / "cache", 1, last_batch="uneven")
        assert len({key for batch in epoch for key in batch[0]}) == 20 * len(targets)
        assert "s3cret" not in repr(resolve(str(out / "t-shardindex.json")).shards)
