"""Tars over HTTP that nobody counted: the batches of the same tars in a folder, from the first epoch on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from afar import QUICK, epochs, loader_of, read
from faulty import HTML, Fault, Faulty, Request, some_faults
from foreign import mk
from hypothesis import given
from hypothesis import strategies as st
from network import no_network  # noqa: F401
from residence import mounted

import pipeline
from pipeline import HttpOptions
from pipeline.arrival import ArrivalSettings, Pieces
from pipeline.stores.cache import Cache

pytestmark = pytest.mark.usefixtures("no_network")

SHARDS, EACH, SIZE = 6, 30, 20_000
PATTERN = "/train-{000000..000005}.tar"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six tars as the standard library writes them, of 30 samples of 20 KB; a name has a blank."""
    made = tmp_path_factory.mktemp("bare")
    for shard in range(SHARDS):
        members = []
        for n in range(shard * EACH, (shard + 1) * EACH):
            key = f"k {n:04d}" if n == 7 else f"k{n:04d}"
            members += [(f"{key}.jpg", random.Random(n).randbytes(SIZE + 100 * shard)), (f"{key}.cls", str(n % 7).encode())]
        path = mk(made / f"train-{shard:06d}.tar", members)
        os.utime(path, (time.time() - 60,) * 2)
    return made


@pytest.fixture(autouse=True)
def no_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The batches of three epochs of the folder, as they arrive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))
        return epochs(str(folder), tmp_path_factory.mktemp("unused"), 3)


@pytest.mark.parametrize("workers", [0, 3])
def test_the_batches_are_those_of_the_folder(folder: Path, expected: list[Any], tmp_path: Path, workers: int) -> None:
    """In the first epoch and, counted, in later ones; another job knows the counts from the start, and fetches nothing."""
    with Faulty(folder) as server:
        with loader_of(server.url(PATTERN), tmp_path / "cache", workers=workers) as loader:
            with pytest.raises(pipeline.UncountedError, match="python -m pipeline index"):
                len(loader)
            assert [list(read(loader)) for _ in range(3)] == expected
            assert len(loader) == SHARDS * EACH // 16
        before = len(server.log)
        with loader_of(server.url(PATTERN), tmp_path / "cache", workers=workers) as loader:
            assert len(loader) == SHARDS * EACH // 16
            assert [list(read(loader)) for _ in range(2)] == expected[:2]
        assert not [r for r in server.log[before:] if r.method == "GET" and r.target.endswith(".tar")]


def test_each_byte_is_asked_for_once(folder: Path, tmp_path: Path) -> None:
    """What the first epoch fetched is all that is ever fetched, where the folder has room for the set."""
    with Faulty(folder) as server:
        epochs(server.url(PATTERN), tmp_path / "cache", 2)
        asked = [r.headers.get("range", "bytes=0-0")[6:].split("-") for r in server.log if r.method == "GET" and ".tar" in r.target]
        whole = sum(path.stat().st_size for path in folder.glob("*.tar"))
        assert sum(int(last) + 1 - int(first) for first, last in asked) == whole


def test_little_room_is_enough(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    """The folder never holds much more than it may; what is used up goes."""
    window = 64 * 1024
    limit = 2_200_000
    most, total = 0, sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert limit < 0.8 * total
    small = {"window_bytes": window, "lanes": 4}
    want = epochs(str(folder), tmp_path / "unused", 2, **small)
    shutil.rmtree(tmp_path / "xdg")
    with (
        Faulty(folder) as server,
        loader_of(server.url(PATTERN), tmp_path / "cache", workers=2, cache_bytes=limit, **small) as loader,
    ):
        cache = Cache(tmp_path / "cache", limit)
        for epoch in range(2):
            got = []
            for batch in read(loader):
                got.append(batch)
                most = max(most, cache.used_bytes())
            assert got == want[epoch]
    assert 0 < most <= limit + 8 * window


@pytest.mark.slow
def test_a_disk_that_another_program_fills(folder: Path, tmp_path: Path) -> None:
    """What was to stay goes, half by half, as long as what is left is enough."""
    window, least = 2**16, 2 * (3 * 8 + 1) * 2**16  # a window of a chunk may take two
    right = epochs(str(folder), tmp_path / "unused", 1, window_bytes=window)
    with (
        mounted("tmpfs", tmp_path / "disk", "size=400m") as disk,
        Faulty(folder, rate=4e5) as server,
        loader_of(server.url(PATTERN), disk / "cache", window_bytes=window, workers=2) as loader,
    ):
        cache, batches = Cache(disk / "cache"), read(loader)
        got = [next(batches)]
        (disk / "others").write_bytes(bytes(cache.room() + cache.used_bytes() - least))
        assert loader.stats().reading.kept_share == 1
        assert got + list(batches) == right[0]
        assert loader.stats().reading.kept_share < 1


def test_what_a_killed_job_left_is_no_hindrance(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    """A folder full of the set's own leftovers: they are given back, or used."""
    limit = 2_200_000
    small = {"window_bytes": 64 * 1024, "lanes": 4}
    with Faulty(folder) as server:
        epochs(server.url(PATTERN), tmp_path / "cache", 1, **small)  # all of it stays
        shutil.rmtree(tmp_path / "xdg")
        want = epochs(str(folder), tmp_path / "unused", 2, **small)
        shutil.rmtree(tmp_path / "xdg")
        assert epochs(server.url(PATTERN), tmp_path / "cache", 2, cache_bytes=limit, **small) == want
    assert Cache(tmp_path / "cache", limit).used_bytes() <= limit + 600_000


def test_too_little_room_is_an_error(folder: Path, tmp_path: Path) -> None:
    """With both numbers, and the next step; nothing hangs."""
    with (
        Faulty(folder) as server,
        loader_of(server.url(PATTERN), tmp_path / "cache", cache_bytes=400_000) as loader,
        pytest.raises(pipeline.SourceError, match=r"MiB of room.*cache_bytes"),
    ):
        next(iter(loader))


FAULTS = [
    Fault(cut=100_000),
    Fault(cut=0, reset=True),
    Fault(raw=b""),
    Fault(status=503, retry_after="0"),
    Fault(ranges=False),
    Fault(body=HTML),
    Fault(chunked=True),
]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_fault_costs_nothing_but_time(folder: Path, expected: list[Any], tmp_path: Path, fault: Fault) -> None:
    """Every third reply goes wrong: all samples, once each."""
    numbers = itertools.count()

    def script(request: Request) -> Fault | None:
        return fault if request.method == "GET" and request.target.endswith(".tar") and next(numbers) % 3 == 0 else None

    with Faulty(folder, script) as server:
        patient = dataclasses.replace(QUICK, attempts=60)  # with several connections one may meet every third reply many times
        assert epochs(server.url(PATTERN), tmp_path / "cache", 1, http=patient) == expected[:1]


@pytest.mark.case("H01")
@pytest.mark.parametrize("length", [False, True])
def test_a_cut_between_two_samples_is_no_end(tmp_path: Path, length: bool) -> None:
    """A body that ends behind 20 of 40 samples, with and without Content-Length: once it costs nothing, each time it is an error (H01)."""
    members = [(f"k{n:02d}.{field}", data) for n in range(40) for field, data in (("jpg", bytes([n]) * 3000), ("cls", b"1"))]
    whole = mk(tmp_path / "a-000000.tar", members).read_bytes()
    edge = 20 * (512 + 3072 + 512 + 512)
    assert whole[edge:].startswith(b"k20.jpg")
    fault = Fault(cut=edge, length=length, ranges=False)

    for number, faults in enumerate((iter([fault]), itertools.repeat(fault))):

        def script(request: Request, faults: Iterator[Fault] = faults) -> Fault | None:
            return next(faults, None) if request.method == "GET" and request.target.endswith(".tar") else None

        with Faulty({"/a-000000.tar": whole}, script) as server:
            loader = loader_of(server.url("/a-000000.tar"), tmp_path / f"cache{number}", last_batch="uneven")
            with loader, pytest.raises(pipeline.RemoteError, match=r"a-000000\.tar") if number else contextlib.nullcontext():
                assert sorted(key for batch in read(loader) for key in batch[0]) == [f"k{n:02d}" for n in range(40)]
        shutil.rmtree(tmp_path / "xdg", ignore_errors=True)  # forget how many there are


@pytest.mark.case("H06")
def test_tars_of_one_name_in_two_folders(tmp_path: Path) -> None:
    """Signed URLs that differ by folder and signature alone are two shards; signed anew they are the same two, and nothing is fetched (H06)."""
    files = {}
    for folder in "ab":
        members = [(f"{folder}{n}.{field}", b"%d" % n) for n in range(8) for field in ("jpg", "cls")]
        files[f"/{folder}/0.tar"] = mk(tmp_path / folder / "0.tar", members).read_bytes()
    with Faulty(files) as server:
        for signature in (1, 3):
            urls = [server.url(f"/a/0.tar?sig={signature}"), server.url(f"/b/0.tar?sig={signature + 1}")]
            asked = len(server.log)
            ((*batches,),) = epochs(urls, tmp_path / "cache", 1, last_batch="uneven")
            assert sorted(key for batch in batches for key in batch[0]) == [f"{folder}{n}" for folder in "ab" for n in range(8)]
        assert not [request for request in server.log[asked:] if request.method == "GET" and ".tar" in request.target]


def test_a_third_of_all_replies_fail(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    """Two epochs: exact."""
    patient = HttpOptions(first_wait_seconds=0.001, longest_wait_seconds=0.01, attempts=40, idle_seconds=5)
    with Faulty(folder, some_faults(0.3, 5, 200_000)) as server:
        assert epochs(server.url(PATTERN), tmp_path / "cache", 2, workers=2, http=patient) == expected[:2]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_can_t_be_fetched_is_an_error(folder: Path, expected: list[Any], tmp_path: Path, workers: int) -> None:
    """It is raised in the loop, named, and the loader can be iterated again."""
    broken = [True]
    script = lambda r: Fault(status=403) if broken[0] and r.method == "GET" and "000003" in r.target else None  # noqa: E731
    with Faulty(folder, script) as server, loader_of(server.url(PATTERN), tmp_path / "cache", workers=workers) as loader:
        with pytest.raises(pipeline.DeniedError, match=r"train-000003.tar"):
            list(read(loader))
        broken[0] = False
        loader.set_epoch(0)
        assert list(read(loader)) == expected[0]


def test_a_damaged_tar_is_named(tmp_path: Path) -> None:
    """A header that can't be read ends the epoch, with the place."""
    good = mk(tmp_path / "a.tar", [(f"k{n}.jpg", bytes(3000)) for n in range(40)]).read_bytes()
    files = {"/a-0.tar": good[: 11 * 3584] + b"x" * 512 + good[11 * 3584 + 512 :], "/a-1.tar": good}
    with (
        Faulty(files) as server,
        loader_of(server.url("/a-{0..1}.tar"), tmp_path / "cache", label=None) as loader,
        pytest.raises(pipeline.ShardError, match=r"a-0.tar at byte \d+: a damaged header"),
    ):
        list(loader)


def test_an_early_break_and_another_first_epoch(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    """A run that is left is given up; the first epoch begins anew; one beyond it wants counts, and says so."""
    with Faulty(folder) as server, loader_of(server.url(PATTERN), tmp_path / "cache", workers=2) as loader:
        next(iter(loader))
        with pytest.raises(pipeline.UncountedError, match="python -m pipeline index"):
            iter(loader)
        loader.set_epoch(0)
        assert list(read(loader)) == expected[0]
        loader.set_epoch(0)
        assert list(read(loader)) == expected[0]
        assert list(read(loader)) == expected[1]


def test_a_resume_in_the_middle(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    """Once the tars are counted, a first epoch goes on anywhere, on a machine without a byte of them."""
    with Faulty(folder) as server:
        epochs(server.url(PATTERN), tmp_path / "cache", 1)
        with loader_of(server.url(PATTERN), tmp_path / "cache") as loader:
            batches = read(loader)
            before = [next(batches) for _ in range(4)]
            state = loader.state_dict()
        with loader_of(server.url(PATTERN), tmp_path / "other", workers=2) as loader:
            loader.load_state_dict(state)
            assert before + list(read(loader)) == expected[0]


def test_ranks_want_counts(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    """Several ranks say what to do; once the tars are counted they share the epoch."""
    with Faulty(folder) as server:
        with (
            loader_of(server.url(PATTERN), tmp_path / "cache", rank=0, world_size=2) as loader,
            pytest.raises(pipeline.UncountedError, match=r"several ranks.*python -m pipeline index"),
        ):
            iter(loader)
        epochs(server.url(PATTERN), tmp_path / "cache", 1)
        parts = [epochs(server.url(PATTERN), tmp_path / "cache", 1, rank=rank, world_size=2)[0] for rank in range(2)]
        keys = [key for part in parts for batch in part for key in batch[0]]
        assert len(keys) == len(set(keys)) == SHARDS * EACH // 32 * 32


@pytest.mark.parametrize("last", ["pad", "uneven"])
def test_ends(folder: Path, tmp_path: Path, last: str) -> None:
    """Each sample once; padding wraps round to the first ones."""
    want = epochs(str(folder), tmp_path / "unused", 1, last_batch=last)
    with Faulty(folder) as server:
        assert epochs(server.url(PATTERN), tmp_path / "cache", 1, last_batch=last, workers=2) == want


def test_a_new_version_is_not_mixed_with_the_old(folder: Path, tmp_path: Path) -> None:
    """Another ETag than when the loader was made is a ChangedError."""
    script = lambda r: Fault(etag='"new"') if r.method == "GET" and "000002" in r.target else None  # noqa: E731
    with (
        Faulty(folder, script) as server,
        loader_of(server.url(PATTERN), tmp_path / "cache") as loader,
        pytest.raises(pipeline.ChangedError, match=r"000002.tar: changed while it was read"),
    ):
        list(loader)


def test_the_prefetcher_s_death_is_an_error(folder: Path, tmp_path: Path) -> None:
    """Nobody else fetches: an error, not a hang; the next iter starts it again."""
    with Faulty(folder, rate=1_000_000) as server, loader_of(server.url(PATTERN), tmp_path / "cache") as loader:
        batches = iter(loader)
        next(batches)
        os.kill(loader.dataset.arrival_block.process, signal.SIGKILL)
        with pytest.raises(pipeline.RemoteError, match="has ended"):
            list(batches)


@given(
    st.lists(st.integers(0, 3 * 10**6), min_size=1, max_size=20),
    st.integers(1, 9),
    st.integers(1, 10**6),
    st.booleans(),
    st.integers(0, 3),
)
def test_pieces_cover_every_byte_once(sizes: list[int], lanes: int, window: int, shuffle: bool, seed: int) -> None:
    """In a lane's order, each found by its bytes."""
    pieces = Pieces(sizes, ArrivalSettings(seed=seed, lanes=lanes, window_bytes=window, shuffle=shuffle), 0)
    numbers = list(pieces)
    assert numbers == sorted(set(numbers))
    seen: dict[int, int] = dict.fromkeys(range(len(sizes)), 0)
    for number in numbers:
        ranges = pieces.ranges(number)
        assert ranges
        for shard, begin, end in ranges:
            assert seen[shard] == begin < end <= sizes[shard]
            assert pieces.number(shard, begin) == pieces.number(shard, end - 1) == number
            seen[shard] = end
    assert [seen[shard] for shard in range(len(sizes))] == sizes
