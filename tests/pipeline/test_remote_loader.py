"""Shards over HTTP: the same batches as from a folder, each byte asked for once, whatever the network does."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from afar import QUICK, WINDOW, bytes_asked, epochs, loader_of, options, read
from faulty import HTML, Fault, Faulty, Request, some_faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from residence import PackedSet, big_set, mounted, until

import pipeline
from pipeline import HttpOptions, make_loader
from pipeline.prefetch.flights import Flights
from pipeline.prefetch.shortage import Shortage
from pipeline.progress import Block
from pipeline.stores.cache import CHUNK, Cache

pytestmark = pytest.mark.usefixtures("no_network")

MANIFEST = "/train-shardindex.json"
COUNT, SHARDS, SIZE = 240, 4, 20_000

RANK = """
import sys, json
from pathlib import Path
sys.path[:0] = sys.argv[5:]
from afar import epochs
found = epochs(sys.argv[1], Path(sys.argv[2]), 2, rank=int(sys.argv[3]), world_size=int(sys.argv[4]))
print(json.dumps([[keys for keys, _, _ in epoch] for epoch in found]))
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """240 samples of 20 KB in four shards."""
    return big_set(tmp_path_factory.mktemp("served"), COUNT, SHARDS, SIZE)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """720 samples of 20 KB in six shards: a multiple of the least room."""
    return big_set(tmp_path_factory.mktemp("large"), 720, 6, SIZE)


@pytest.fixture(scope="module")
def expected(packed: PackedSet, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The batches of three epochs, from the folder."""
    return epochs(str(packed.folder), tmp_path_factory.mktemp("unused"), 3)


@pytest.mark.parametrize("workers", [0, 2, 5])
def test_the_batches_are_those_of_a_folder(packed: PackedSet, expected: list[Any], tmp_path: Path, workers: int) -> None:
    """For any number of workers; each byte is asked for once, a later epoch asks for nothing, nor does another loader."""
    with Faulty(packed.folder) as server:
        assert epochs(server.url(MANIFEST), tmp_path, 2, workers=workers) == expected[:2]
        whole = sum(path.stat().st_size for path in packed.folder.glob("*.tar"))
        assert whole - 2048 * SHARDS <= bytes_asked(server.log) <= whole
        before = len(server.log)
        assert epochs(server.url(MANIFEST), tmp_path, 1, workers=workers) == expected[:1]
        assert [request.target for request in server.log[before:]] == [MANIFEST]


def test_a_pattern_and_a_list_are_the_same_set(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """Tars beside their manifest are counted by it, however they are named."""
    with Faulty(packed.folder) as server:
        assert epochs(server.url("/train-{000000..000003}.tar"), tmp_path, 1) == expected[:1]
        assert epochs([server.url(f"/train-00000{n}.tar") for n in range(4)], tmp_path, 1) == expected[:1]


FAULTS = [
    Fault(cut=100_000),
    Fault(cut=0, reset=True),
    Fault(cut=70_000, chunked=True),
    Fault(cut=100, length=False),
    Fault(raw=b""),
    Fault(raw=b"HTTP/1.1 nonsense\r\n\r\n"),
    Fault(status=500),
    Fault(status=502, body=b"<html>", kind="text/html"),
    Fault(status=503, retry_after="0"),
    Fault(status=429),
    Fault(ranges=False),
    Fault(content_range=""),
    Fault(content_range="bytes 1-2/3"),
    Fault(gzip=True),
    Fault(chunked=True),
    Fault(body=HTML, kind="text/html"),
    Fault(body=HTML),
    Fault(body=b'{"error": "busy"}', kind="application/json"),
    Fault(body=b""),
    Fault(head=405),
    Fault(early=b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n"),
    Fault(delay=0.05),
]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
@pytest.mark.case("H02")
def test_a_fault_costs_nothing_but_time(packed: PackedSet, expected: list[Any], tmp_path: Path, fault: Fault) -> None:
    """What goes wrong with the first replies for a shard, and every fifth one: all samples, once each."""
    numbers = itertools.count()

    def script(request: Request) -> Fault | None:
        return fault if request.target.endswith(".tar") and next(numbers) % 5 == 0 else None

    with Faulty(packed.folder, script) as server:
        assert epochs(server.url(MANIFEST), tmp_path, 1) == expected[:1]
        assert next(numbers) > 5


class Quiet(ThreadingHTTPServer):
    """Says nothing of clients that close a connection early."""

    def handle_error(self, *_given: Any) -> None:
        """Say nothing."""


class Plain(SimpleHTTPRequestHandler):
    """The standard library's server of a folder, which knows no ranges; without its log."""

    def log_message(self, *_given: Any) -> None:
        """Say nothing."""


@pytest.mark.case("H10")
def test_pythons_own_server_is_enough(small_set: PackedSet, tmp_path: Path) -> None:
    """`python -m http.server` answers each range with the whole file: the batches are those of the folder (H10)."""
    expected = epochs(str(small_set.folder), tmp_path / "unused", 1)
    with Quiet(("127.0.0.1", 0), functools.partial(Plain, directory=str(small_set.folder))) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            assert epochs(f"http://127.0.0.1:{server.server_address[1]}{MANIFEST}", tmp_path / "cache", 1) == expected
        finally:
            server.shutdown()
            serving.join()


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.none(), st.sampled_from(FAULTS)), max_size=40), st.sampled_from([0, 2]))
def test_any_sequence_of_faults(
    packed: PackedSet, expected: list[Any], tmp_path_factory: pytest.TempPathFactory, faults: list[Fault | None], workers: int
) -> None:
    """An epoch has each sample exactly once, or ends with an error that names the server: never short, never doubled."""
    with Faulty(packed.folder, faults) as server:
        try:
            assert epochs(server.url(MANIFEST), tmp_path_factory.mktemp("cache"), 1, workers=workers) == expected[:1]
        except pipeline.SourceError as error:  # no RemoteError where another JSON comes in place of the manifest
            assert server.origin in str(error)
            assert faults


# A window a lane and one, the chunks that cut three parts of shards in each, and indexes.
LEAST = 9 * (WINDOW + 2 * SIZE + 3 * 2 * CHUNK) + 6 * 16_384 + 720 * 90


@pytest.mark.parametrize(("workers", "count"), [(2, 3), pytest.param(0, 20, marks=pytest.mark.slow)])
def test_three_in_ten_of_all_replies_fail(
    large: PackedSet, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, workers: int, count: int
) -> None:
    """Epochs that fetch all of it anew are exact, and each reply that was no good is counted as a retry."""
    patient = HttpOptions(first_wait_seconds=0.001, longest_wait_seconds=0.01, attempts=40, idle_seconds=5)
    draw, faults = some_faults(0.3, 5, 200_000), list[Fault]()

    def script(request: Request) -> Fault | None:
        fault = draw(request)
        if fault is not None and not request.target.endswith(".json"):  # manifests are the trainer's own to fetch
            faults.append(fault)
        return fault

    right, retries = epochs(str(large.folder), tmp_path_factory.mktemp("unused"), count), 0
    with (
        Faulty(large.folder, script) as server,
        loader_of(server.url(MANIFEST), tmp_path, http=patient, cache_bytes=LEAST, workers=workers) as loader,
    ):
        for epoch in range(count):
            assert list(read(loader)) == right[epoch]
            retries += loader.stats().reading.retries
        sure = sum(1 for fault in faults if fault.status or fault.gzip or fault.body is not None)
        assert 0.2 < len(faults) / len(server.log) < 0.4
        assert 15 * count < sure <= retries <= len(faults)


@pytest.mark.parametrize("workers", [0, 3])
def test_the_least_room_is_enough(large: PackedSet, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, workers: int) -> None:
    """A folder with room for lanes + 1 windows never holds more than it may, and every epoch is exact."""
    most, right = 0, epochs(str(large.folder), tmp_path_factory.mktemp("unused"), 4)
    with Faulty(large.folder) as server, loader_of(server.url(MANIFEST), tmp_path, cache_bytes=LEAST, workers=workers) as loader:
        cache = Cache(tmp_path, LEAST)
        for epoch in range(4):
            got = []
            for batch in read(loader):
                got.append(batch)
                most = max(most, cache.used_bytes())
            assert got == right[epoch]
    assert LEAST / 2 < most <= LEAST + 4 * 2 * 3 * CHUNK  # what is cut by windows that fly isn't known before


@pytest.mark.slow
def test_a_disk_that_another_program_fills(large: PackedSet, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """The cache gets smaller as long as what is left is enough; then the error says what there is no room for."""
    right = epochs(str(large.folder), tmp_path_factory.mktemp("unused"), 4)
    with (
        mounted("tmpfs", tmp_path / "disk", "size=400m") as disk,
        Faulty(large.folder, rate=20e6) as server,
        loader_of(server.url(MANIFEST), disk / "cache", workers=2) as loader,
    ):
        cache, others = Cache(disk / "cache"), disk / "others"
        assert list(read(loader)) == right[0]
        assert loader.stats().reading.kept_share == 1
        batches = read(loader)
        got = [next(batches) for _ in range(3)]
        others.write_bytes(bytes(cache.room() + cache.used_bytes() - LEAST - 1_000_000))
        assert [got + list(batches), *(list(read(loader)) for _ in range(2))] == right[1:]
        assert cache.room() >= -4 * (WINDOW + 6 * CHUNK)
        assert loader.stats().reading.kept_share < 0.7
        with others.open("ab") as file:
            file.write(bytes(cache.room() + cache.used_bytes() - 1_000_000))
        with pytest.raises(pipeline.SourceError, match="no room for"):
            list(read(loader))


def test_too_little_room_is_said_at_once(packed: PackedSet, tmp_path: Path) -> None:
    """A folder that can't hold a window of each lane is an error with both numbers."""
    with (
        Faulty(packed.folder) as server,
        loader_of(server.url(MANIFEST), tmp_path, cache_bytes=10**6) as loader,
        pytest.raises(pipeline.SourceError, match=r"1 MiB of room \(.*\), and \d+ MiB are needed.*cache_bytes"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_room_for_all_of_a_set_is_enough(packed: PackedSet, expected: list[Any], tmp_path: Path, workers: int) -> None:
    """However large windows are: a small set needs no more room than it takes, and is fetched once."""
    whole = sum(path.stat().st_size for path in packed.folder.glob("*.tar"))
    room = whole + SHARDS * (CHUNK + 16_384) + COUNT * 90
    large = epochs(str(packed.folder), tmp_path / "unused", 2, window_bytes=2**25)
    with Faulty(packed.folder) as server:
        assert epochs(server.url(MANIFEST), tmp_path / "a", 2, cache_bytes=room, workers=workers, window_bytes=2**25) == large
        assert epochs(server.url(MANIFEST), tmp_path / "b", 2, cache_bytes=room, workers=workers) == expected[:2]
        assert bytes_asked(server.log) <= 2 * whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (Fault(status=404), pipeline.MissingError, "404"),
        (Fault(status=410), pipeline.MissingError, "410"),
        (Fault(status=403), pipeline.DeniedError, "403"),
        (Fault(status=401), pipeline.DeniedError, "401"),
        (Fault(status=500), pipeline.RemoteError, "500"),
        (Fault(body=HTML, kind="text/html"), pipeline.RemoteError, "(?i)html"),
        (
            Fault(body=b'{"error": "log in"}', kind="application/json"),
            pipeline.RemoteError,
            "something else came in place of the data",
        ),
    ],
)
@pytest.mark.case("H04")
def test_what_stays_wrong_is_an_error_in_the_trainer(
    packed: PackedSet, tmp_path: Path, fault: Fault, kind: type[Exception], text: str, workers: int
) -> None:
    """A shard that can't be had ends the epoch with its type, its status and its URL, within seconds; nothing secret in it."""
    began = time.monotonic()

    def script(request: Request) -> Fault | None:
        return fault if "000002.tar" in request.target else None

    with Faulty(packed.folder, script) as server:
        url = server.url(MANIFEST).replace("http://", "http://user:secret@")
        with pytest.raises(kind, match=text) as caught, loader_of(url, tmp_path, workers=workers) as loader:
            list(read(loader))
        assert "train-000002.tar" in str(caught.value) and "secret" not in str(caught.value)
    assert time.monotonic() - began < 20


@pytest.mark.case("H04")
@pytest.mark.parametrize("fault", [Fault(status=404), Fault(status=403), Fault(body=HTML, kind="text/html"), Fault(body=b"")])
def test_skipping_hides_no_shard_that_cannot_be_had(packed: PackedSet, tmp_path: Path, fault: Fault) -> None:
    """Whatever may be skipped of bad samples, a shard that isn't there, is refused, or is a page, ends the epoch (H04)."""

    def script(request: Request) -> Fault | None:
        return fault if "000002.tar" in request.target else None

    given = {"on_error": "skip", "max_skipped": 1.0}
    with (
        Faulty(packed.folder, script) as server,
        loader_of(server.url(MANIFEST), tmp_path, **given) as loader,
        pytest.raises(pipeline.RemoteError, match=r"train-000002\.tar"),
    ):
        list(read(loader))


def test_the_next_epoch_goes_on_once_it_is_mended(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """After an error the loader can be iterated again, and what was fetched is there."""
    broken = [True]

    def script(request: Request) -> Fault | None:
        return Fault(status=404) if broken[0] and "000002.tar" in request.target else None

    with Faulty(packed.folder, script) as server, loader_of(server.url(MANIFEST), tmp_path, workers=2) as loader:
        with pytest.raises(pipeline.MissingError):
            list(read(loader))
        broken[0] = False
        loader.set_epoch(0)
        assert list(read(loader)) == expected[0]


def test_another_version_midway_is_an_error(packed: PackedSet, tmp_path: Path) -> None:
    """A shard whose ETag changes while it is read isn't mixed with the old one."""
    seen = itertools.count()

    def script(request: Request) -> Fault | None:
        return Fault(etag='"new"') if "000001.tar" in request.target and next(seen) > 1 else None

    with (
        Faulty(packed.folder, script) as server,
        loader_of(server.url(MANIFEST), tmp_path) as loader,
        pytest.raises(pipeline.ChangedError, match=r"train-000001\.tar.*ETag"),
    ):
        list(read(loader))


def test_a_wrong_index_that_is_corrected(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """Of another tar, with as many samples: an error that says what to do; once the right one lies there, a run is whole."""
    served = Path(shutil.copytree(packed.folder, tmp_path / "served"))
    index = served / "train-000002.idx"
    right = index.read_bytes()
    first, *lines = right.splitlines(keepends=True)
    with Faulty(served) as server:
        index.write_bytes(first + b"".join(later(line, 2**30) for line in lines))
        with (
            loader_of(server.url(MANIFEST), tmp_path / "cache") as loader,
            pytest.raises(pipeline.ShardError, match=r"train-000002\.idx: has a sample at byte .*upload the right one"),
        ):
            list(read(loader))
        index.write_bytes(right)
        assert epochs(server.url(MANIFEST), tmp_path / "cache", 1) == expected[:1]


def later(line: bytes, by: int) -> bytes:
    """Return a sample's line of an index, its members so many bytes further on."""
    words = line.split(b" ")
    return b" ".join([words[0], b"%d" % (int(words[1]) + by), *words[2:]])


def test_another_version_than_parts_were_kept_of_is_an_error(large: PackedSet, tmp_path: Path) -> None:
    """Where the folder can't hold a set its hashes are never known: another ETag under the same hash is told, and what to do."""
    etag, expected = ['"old"'], epochs(str(large.folder), tmp_path / "unused", 2)

    def script(request: Request) -> Fault | None:
        return Fault(etag=etag[0]) if ".tar" in request.target else None

    with Faulty(large.folder, script) as server:
        for run in ("old", "old", "new", "cleared"):
            etag[0] = '"old"' if run == "old" else '"new"'
            if run == "cleared":
                Cache(tmp_path / "cache").clear()
            with loader_of(server.url(MANIFEST), tmp_path / "cache", cache_bytes=2 * LEAST) as loader:
                if run == "new":
                    with pytest.raises(pipeline.ChangedError, match=r"was replaced since parts of it were fetched.*cache clear"):
                        list(read(loader))
                else:
                    assert [list(read(loader)) for _ in range(2)] == expected[:2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["emptied", "removed", "damaged"])
def test_a_folder_that_is_taken_away_is_made_again(
    packed: PackedSet, expected: list[Any], tmp_path: Path, workers: int, how: str
) -> None:
    """Emptied, removed or damaged amid an epoch that is an error, if any was still needed; the next epochs are whole."""
    cache = tmp_path / "cache"
    with Faulty(packed.folder) as server, loader_of(server.url(MANIFEST), cache, workers=workers) as loader:
        batches = read(loader)
        next(batches)
        for path in cache.iterdir():
            if how != "damaged":
                path.unlink()
            elif path.suffix == ".object":
                with path.open("r+b") as file:
                    file.seek(-4096, os.SEEK_END)
                    file.write(b"?" * 4096)
        while how == "removed" and cache.exists():
            shutil.rmtree(cache, ignore_errors=True)  # the prefetcher may just write into it
        with suppress(pipeline.PipelineError):
            list(batches)
        for epoch in (1, 2):
            loader.set_epoch(epoch)
            assert list(read(loader)) == expected[epoch]


@pytest.mark.parametrize("change", [10_240, -10_240])
def test_a_tar_of_another_length_than_its_manifest_says(packed: PackedSet, tmp_path: Path, change: int) -> None:
    """It was replaced, or cut: an error at its first bytes, though its hash is never known where the folder can't hold all of it."""
    files = {f"/{path.name}": path.read_bytes() for path in packed.folder.iterdir()}
    data = files["/train-000001.tar"]
    files["/train-000001.tar"] = data + bytes(change) if change > 0 else data[:change]
    with (
        Faulty(files) as server,
        loader_of(server.url(MANIFEST), tmp_path) as loader,
        pytest.raises(
            pipeline.ChangedError, match=rf"train-000001\.tar: has {len(data) + change} bytes, and {len(data)} were expected"
        ),
    ):
        list(read(loader))


def test_no_room_twice_is_not_no_room_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds without a change are counted from when there was no room, and anew once there was some."""
    clock = [1000.0]
    monkeypatch.setattr("pipeline.prefetch.shortage.time.monotonic", lambda: clock[0])
    fetcher: Any = SimpleNamespace(cache=Cache(tmp_path, 10**6))
    shortage = Shortage(fetcher, cast("Flights", None), cast("Block", None), 0)
    assert not shortage.is_stuck()
    clock[0] += 9
    assert not shortage.is_stuck()
    shortage.has_room()
    clock[0] += 60
    assert not shortage.is_stuck()
    clock[0] += 11
    assert shortage.is_stuck()


def test_bytes_that_are_not_the_manifests(packed: PackedSet, tmp_path: Path) -> None:
    """A shard of the right length and other bytes is found by its hash, and isn't read again as if it were right."""
    files = {f"/{path.name}": path.read_bytes() for path in packed.folder.iterdir()}
    wrong = bytearray(files["/train-000003.tar"])
    wrong[5000] ^= 1
    with Faulty(files | {"/train-000003.tar": bytes(wrong)}) as server:
        for _ in range(2):
            with (
                loader_of(server.url(MANIFEST), tmp_path) as loader,
                pytest.raises(pipeline.ShardError, match=r"train-000003\.tar.*sha256"),
            ):
                list(read(loader))


def test_a_killed_prefetcher_is_an_error_and_starts_again(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """Nobody waits for ever for a process that is gone, and nobody reads what isn't there; the next epoch is whole."""
    with Faulty(packed.folder, rate=2e6) as server, loader_of(server.url(MANIFEST), tmp_path, workers=2) as loader:
        batches = read(loader)
        next(batches)
        os.kill(loader._reading._prefetcher._process[0].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(pipeline.RemoteError, match="has ended"):
            list(batches)
        assert time.monotonic() - began < 10
        loader.set_epoch(0)
        assert list(read(loader)) == expected[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_there_needs_no_prefetcher(packed: PackedSet, expected: list[Any], tmp_path: Path, workers: int) -> None:
    """Where it is killed while all of the set is in the folder, the epoch ends well, and soon: not each batch waits for it."""
    with Faulty(packed.folder) as server, loader_of(server.url(MANIFEST), tmp_path, workers=workers) as loader:
        list(read(loader))
        batches = read(loader)
        got = [next(batches)]
        os.kill(loader._reading._prefetcher._process[0].pid, signal.SIGKILL)
        began = time.monotonic()
        assert got + list(batches) == expected[1]
        assert time.monotonic() - began < 8  # by 2 s a batch it would be 28


def children() -> set[str]:
    """Return this process's children, ended ones that nobody waited for too."""
    return {child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()}


@pytest.mark.case("H12")
def test_loaders_that_are_dropped_leave_no_process(packed: PackedSet, tmp_path: Path) -> None:
    """A first batch is taken and the loader dropped, twice: no worker, no prefetcher and nothing else runs on (H12)."""
    with Faulty(packed.folder) as server:
        before = children()  # what other tests of this process have left
        for _ in range(2):
            loader = loader_of(server.url(MANIFEST), tmp_path, workers=1)
            next(iter(loader))
            assert len(children() - before) >= 2  # a worker and a prefetcher
            del loader
            gc.collect()
            until(lambda: len(children() - before) <= 1)  # multiprocessing may keep a helper of its own


def test_ranks_share_a_folder(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """Two ranks get the batches of one, and together ask for each byte once."""
    support = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]
    with Faulty(packed.folder) as server:
        command = [sys.executable, "-c", RANK, server.url(MANIFEST), str(tmp_path)]
        ranks = [subprocess.Popen([*command, str(r), "2", *support], stdout=subprocess.PIPE, text=True) for r in range(2)]
        found = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
        for epoch in range(2):
            keys = [key for rank in found for batch in rank[epoch] for key in batch]
            assert len(keys) == len(set(keys))
            assert set(keys) <= set(packed.keys) and len(keys) >= COUNT - 32
        whole = sum(path.stat().st_size for path in packed.folder.glob("*.tar"))
        assert bytes_asked(server.log) <= whole


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_come_once_more_are_there(large: PackedSet, tmp_path: Path, workers: int) -> None:
    """last_batch="pad" fills up from the epoch's start, of which a folder of the least room has nothing left; after a resume, too."""
    given = {"last_batch": "pad", "cache_bytes": 10 * 2**20}

    def batches(where: str, cache: Path, after: int = 0) -> list[Any]:
        made = functools.partial(make_loader, where, batch_size=28, num_workers=workers, seed=3)
        with made(options=options(cache, **given)) as loader:
            found = list(itertools.islice(read(loader), after)) if after else [*read(loader), *read(loader)]
            state = loader.state_dict()
        if not after:
            return found
        shutil.rmtree(cache, ignore_errors=True)
        with made(options=options(cache, **given)) as loader:
            loader.load_state_dict(state)
            return found + list(read(loader))

    want = batches(str(large.folder), tmp_path / "unused")
    with Faulty(large.folder) as server:
        assert batches(server.url(MANIFEST), tmp_path / "cache") == want
        assert batches(server.url(MANIFEST), tmp_path / "other", after=20) == want[:26]


def test_without_hashes_another_version_is_never_mixed_in(packed: PackedSet, tmp_path: Path) -> None:
    """Of a set whose manifest has no hashes a tar is replaced by another of its size: the next job has the new bytes, all of them."""
    served = tmp_path / "served"
    shutil.copytree(packed.folder, served)
    manifest = json.loads((served / MANIFEST[1:]).read_text())
    for entry in manifest["shardlist"]:
        entry.pop("sha256")
    (served / MANIFEST[1:]).write_text(json.dumps(manifest))
    for round_ in range(2):
        with Faulty(served) as server:
            found = epochs(server.url(MANIFEST), tmp_path / "cache", 1)
        assert found == epochs(str(served), tmp_path / "unused", 1)
        data = bytearray((served / "train-000001.tar").read_bytes())
        data[600:664] = bytes(64)  # in its first picture
        if not round_:
            (served / "train-000001.tar").write_bytes(data)


def test_what_the_folder_has_is_counted(packed: PackedSet, tmp_path: Path) -> None:
    """In the first epoch bytes come from the network, in the second from the folder: the stats say so."""
    with Faulty(packed.folder) as server, loader_of(server.url(MANIFEST), tmp_path) as loader:
        list(loader)
        first = loader.stats()
        list(loader)
        second = loader.stats()
    assert first.reading.remote and first.medium_bytes > COUNT * SIZE
    assert second.medium_bytes == 0 and second.cache_bytes > COUNT * SIZE
    assert first.reading.replies[206] > 0 and "from the cache folder" in second.summary()


@pytest.mark.case("R07")
def test_a_resume_elsewhere_fetches_what_is_left(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """On another machine, with nothing in its folder, the rest of the epoch costs the rest of its bytes."""
    with Faulty(packed.folder) as server:
        with loader_of(server.url(MANIFEST), tmp_path / "one") as loader:
            got = [batch for _, batch in zip(range(12), read(loader), strict=False)]
            state = loader.state_dict()
        assert got == expected[0][:12]
        server.log.clear()
        with loader_of(server.url(MANIFEST), tmp_path / "two") as loader:
            loader.load_state_dict(state)
            assert list(read(loader)) == expected[0][12:]
        whole = sum(path.stat().st_size for path in packed.folder.glob("*.tar"))
        assert bytes_asked(server.log) < 0.4 * whole + 8 * (256 * 1024 + 2 * CHUNK)


def test_credentials_go_where_they_are_for(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """A token reaches the prefetcher's process, and every request to its origin."""

    def script(request: Request) -> Fault | None:
        return None if request.headers.get("authorization") == "Bearer t0ken" else Fault(status=401)

    with Faulty(packed.folder, script) as server:
        http = HttpOptions(token="t0ken", origin=server.origin)
        with pipeline.make_loader(
            server.url(MANIFEST),
            batch_size=16,
            num_workers=0,
            seed=3,
            options=pipeline.LoaderOptions(decode="none", keys=True, window_bytes=256 * 1024, cache_dir=tmp_path, http=http),
        ) as loader:
            assert list(read(loader)) == expected[0]
        for path in tmp_path.iterdir():
            assert b"t0ken" not in path.read_bytes()
    assert QUICK.token == ""


def test_the_first_batch_comes_soon(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Over a link of 20 MB/s, from a shard of 128 MiB, the first batch needs a part of the first windows only."""
    folder = tmp_path_factory.mktemp("large")
    big_set(folder, 1280, 1, 100_000)
    with Faulty(folder, rate=20e6) as server:
        options = pipeline.LoaderOptions(decode="none", cache_dir=tmp_path_factory.mktemp("cache"))
        with pipeline.make_loader(server.url(MANIFEST), batch_size=64, num_workers=2, options=options) as loader:
            next(iter(loader))
            assert bytes_asked(server.log) < 40e6


def test_what_cannot_be_mixed_or_done(packed: PackedSet, tmp_path: Path) -> None:
    """Local and remote together, and remote shards without the prefetcher, are refused by name."""
    with Faulty(packed.folder) as server:
        with pytest.raises(pipeline.OptionsError, match="can't be mixed"):
            loader_of([server.url(MANIFEST), str(packed.folder)], tmp_path)
        with pytest.raises(pipeline.OptionsError, match="prefetch=False"):
            loader_of(server.url(MANIFEST), tmp_path, prefetch=False)


def test_the_folder_stays_when_the_trainer_goes_elsewhere(
    packed: PackedSet, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative cache_dir is that of the moment when the options were made, for all processes."""
    monkeypatch.chdir(tmp_path)
    with Faulty(packed.folder) as server, loader_of(server.url(MANIFEST), Path("cache")) as loader:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert list(read(loader)) == expected[0]
    assert list((tmp_path / "cache").glob("*.object")) and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.case("V05")
def test_a_query_needs_no_quotes(packed: PackedSet, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """URLs with `&` are sent as they are: there is no shell to quote them for, and no program to be found."""
    monkeypatch.setenv("PATH", "")
    query = "?a=1&b=2;touch x"
    with Faulty(packed.folder) as server:
        (found,) = epochs([server.url(f"/train-00000{n}.tar{query}") for n in range(SHARDS)], tmp_path, 1)
        asked = [request.target for request in server.log if ".tar" in request.target]
    assert sorted(pair for keys, hashes, _ in found for pair in zip(keys, hashes, strict=True)) == sorted(
        pair for keys, hashes, _ in expected[0] for pair in zip(keys, hashes, strict=True)
    )
    assert asked and all(target.endswith(".tar?a=1&b=2;touch%20x") for target in asked)
