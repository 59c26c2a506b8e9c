"""Jobs that share a cache folder are killed at random: what survives reads exact epochs, the folder stays bounded, nothing is left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from afar import WINDOW, epochs
from faulty import Fault, Faulty
from residence import PackedSet, big_set, until
from squeezed import described, squeeze
from survivor import digest

from pipeline.stores.cache import CHUNK, Cache, Entry
from pipeline.stores.unpacking import plain_name

pytestmark = pytest.mark.usefixtures("no_network")

SUPPORT = Path(__file__).parents[1] / "support"
SIZE = 20_000
CUT = 3 * 2 * CHUNK  # of a window's three parts of shards, at both ends
BESIDE = 6 * 16_384 + 720 * 90
# Two ranks of four lanes each and a job of eight, a window more for each of them.
ROOM = 19 * (WINDOW + 2 * SIZE + CUT) + 3 * BESIDE
SLACK = 2 * 4 * (WINDOW + 2 * SIZE + CUT)  # what the two others let fly at once
KINDS = ("worker", "prefetcher", "trainer")
JOBS = ((3, 0, 2), (3, 1, 2), (8, 0, 1))  # seed, rank, ranks


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """720 samples of 20 KB in six shards."""
    return big_set(tmp_path_factory.mktemp("large"), 720, 6, SIZE)


class Job:
    """A trainer that is started anew whenever it was killed."""

    def __init__(self, url: str, cache: Path, numbers: tuple[int, int, int]) -> None:
        self._command = [sys.executable, SUPPORT / "survivor.py", url, cache, str(ROOM), *map(str, numbers)]
        self._environ = {**os.environ, "SURVIVOR": str(cache), "PYTHONPATH": f"{SUPPORT}:{SUPPORT.parents[1]}"}
        self.lines: list[dict[str, Any]] = []
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self._environ
        )
        self._readers = [threading.Thread(target=read) for read in (self._read, self._drain)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += [json.loads(line) for line in self.process.stdout if line.endswith(b"\n")]

    def _drain(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read().decode()

    def stop(self) -> None:
        """Have it end after its epoch."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self, *, kill: bool) -> int:
        """Wait until it has ended, by a kill or as it was told to; returns its exit code."""
        if kill:
            self.stop()
            self.process.kill()
        code = self.process.wait(60)
        for reader in self._readers:  # they end with the last process that has the pipes open
            reader.join(20)
            assert not reader.is_alive(), "what a killed trainer started lives on"
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code


def started(mark: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (process, its parent, its command) of all that jobs on a cache folder started."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"SURVIVOR={mark}\0".encode() in (entry / "environ").read_bytes():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                yield int(entry.name), parent, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def taken(folder: Path) -> int:
    """Return what a folder takes on the disk."""
    found = 0
    with suppress(OSError), os.scandir(folder) as items:
        for item in items:
            with suppress(OSError):
                found += item.stat().st_blocks * 512
    return found


def wrong_chunks(folder: Path, source: Path) -> set[tuple[str, int]]:
    """Return where objects say that bytes are there which aren't those of their shard, while others fetch and give back."""
    found = set[tuple[str, int]]()
    for path in folder.glob("*.object"):
        with suppress(FileNotFoundError):
            entry = Entry.load(str(path))
            assert entry is not None, path
            with entry, path.open("rb") as file:
                name = plain_name(entry.facts.url.rpartition("/")[2].removesuffix("#tar"))
                if not name.endswith(".tar"):
                    continue
                data = (source / name).read_bytes()
                for at in range(0, len(data), CHUNK):
                    stop = min(at + CHUNK, len(data))
                    if entry.there(at, stop):
                        file.seek(at)
                        if file.read(stop - at) != data[at:stop] and entry.there(at, stop):
                            found.add((path.name, at))
    return found


def check_what_is_there(folder: Path, source: Path) -> None:
    """Assert that what objects say is there is right; a chunk that was given back and fetched anew during the look is looked at again."""
    if wrong := wrong_chunks(folder, source):
        assert not wrong & wrong_chunks(folder, source)


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("rounds", "ending"), [(2, "tar"), pytest.param(120, "tar", marks=SLOW), pytest.param(60, "tar.zst", marks=SLOW)]
)
def test_jobs_that_are_killed_again_and_again(large: PackedSet, tmp_path: Path, rounds: int, ending: str) -> None:
    """Trainers, prefetchers and workers of two ranks and a second job, on a folder of the least room for them."""
    served = large.folder if ending == "tar" else squeeze(large.folder, tmp_path / "served", ending)
    if served is not large.folder:
        described(served, tmp_path / "made")
    folder, draw, most, ended = tmp_path / "cache", random.Random(rounds), [0], threading.Event()
    before = set(os.listdir("/dev/shm"))

    def sample() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], taken(folder))

    sampler = threading.Thread(target=sample)
    pids = set[int]()
    with Faulty(served, otherwise=Fault(rate=3e6)) as server:
        sampler.start()
        jobs = [Job(server.url("/train-shardindex.json"), folder, numbers) for numbers in JOBS]
        try:
            until(lambda: taken(folder) > ROOM / 4, 60)
            for number in range(rounds):
                time.sleep(draw.uniform(0.0, 1.0))
                job, kind = draw.choice(jobs), KINDS[number % 3]
                own = [(pid, command) for pid, parent, command in started(folder) if parent == job.process.pid]
                pids |= {pid for pid, _, _ in started(folder)}
                fetches = [pid for pid, command in own if "pipeline.prefetch" in command]
                works = [pid for pid, command in own if "pipeline.prefetch" not in command]
                if kind == "trainer":
                    job.end(kill=True)
                    job.start()
                with suppress(ProcessLookupError):
                    for pid in {"prefetcher": fetches, "worker": draw.sample(works, min(1, len(works))), "trainer": []}[kind]:
                        os.kill(pid, signal.SIGKILL)
                check_what_is_there(folder, large.folder)
        finally:
            for job in jobs:
                job.stop()
            codes = [job.end(kill=False) for job in jobs]
            ended.set()
            sampler.join()
        assert codes == [0, 0, 0], [job.errors for job in jobs]
    until(lambda: not list(started(folder)), 10)
    for job, (seed, rank, world) in zip(jobs, JOBS, strict=True):
        read = {line["epoch"]: line["digest"] for line in job.lines if "digest" in line}
        right = epochs(str(large.folder), tmp_path / "none", max(read) + 1, seed=seed, rank=rank, world_size=world)
        assert [read[epoch] for epoch in sorted(read)] == [digest(right[epoch]) for epoch in sorted(read)]
        for line in job.lines:
            assert line.get("error", "ended").partition(":")[0] in ("ended", "RemoteError", "WorkerError"), line
    assert ROOM / 2 < most[0] <= ROOM + SLACK
    check_what_is_there(folder, large.folder)
    left = {name for name in set(os.listdir("/dev/shm")) - before if any(f"_{pid}_" in name for pid in pids)}
    assert not left
    cache = Cache(folder, ROOM)
    assert not any(held.reading for held in cache.sets())
    for path in folder.glob(".*"):
        os.utime(path, (1, 1))  # a file that a killed process was about to name goes a minute later
    assert cache.clear() > 0 and not list(folder.iterdir())
