"""Pages, locks and turns: what is read forward stays, what is dropped was nobody else's, a disk serves one reader at a time."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import fusefolder
import pytest
from residence import PAGE, chill, is_read, lock_range, mounted, resident

from pipeline.prefetch import pages, trial, turn
from pipeline.prefetch.pages import CHUNK, Forward, Range
from pipeline.prefetch.shards import CopiedShards, Done, Shards
from pipeline.prefetch.turn import Turn, mount_root
from pipeline.progress import Block, Count, Way
from pipeline.stores import locks
from pipeline.stores.copies import CopyReader

SIZE = 3 * CHUNK + 5 * PAGE

Lock: TypeAlias = Callable[[Path, int], Callable[[], None]]


@dataclass
class Opened:
    """An open file, as the prefetcher has it."""

    path: Path
    descriptor: int
    device: int


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """A cold file."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    chill(path)
    descriptor = os.open(path, os.O_RDONLY)
    pages.plain(descriptor)
    yield Opened(path, descriptor, path.stat().st_dev)
    os.close(descriptor)


@pytest.fixture
def block() -> Iterator[Block]:
    made = Block.make()
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Turn]:
    made = Turn(str(tmp_path))
    yield made
    made.close()


def read(opened: Opened, start: int, stop: int, disk: Turn) -> list[tuple[int, bytes]]:
    """Read a range forward; returns the chunks that were told of."""
    told: list[tuple[int, bytes]] = []
    Forward().read([Range(opened, start, stop)], disk, lambda at, data: told.append((at, bytes(data))) if data else None)
    return told


def test_a_range_is_read_once_in_one_turn(opened: Opened, disk: Turn) -> None:
    """A cold range is told of in order and whole, stays in the cache, and nothing beyond it is read."""
    start, stop = 5000, 2 * CHUNK + 777
    told = read(opened, start, stop, disk)
    assert disk.held and disk.granted
    assert b"".join(data for _, data in told) == opened.path.read_bytes()[start:stop]
    assert [at for at, _ in told] == [start + sum(len(data) for _, data in told[:i]) for i in range(len(told))]
    chill(opened.path)
    disk.leave()
    read(opened, start, 2 * start, disk)
    assert resident(opened.path) == 2 * PAGE
    disk.leave()
    read(opened, start, stop, disk)
    assert resident(opened.path, 0, stop // PAGE * PAGE) >= stop - start
    assert resident(opened.path, stop + 2 * PAGE) == 0


def test_several_ranges_are_read_in_one_turn(opened: Opened, disk: Turn) -> None:
    """A window's ranges are read one behind the other, each whole, with none of what lies between; one that ends early is no end."""
    parts = [(0, CHUNK // 2), (CHUNK, CHUNK + 100), (2 * CHUNK, SIZE + CHUNK), (3 * CHUNK // 2, 7 * CHUNK // 4)]
    whole = opened.path.read_bytes()
    forward = Forward()
    for _ in range(2):
        chill(opened.path)
        told: list[bytes] = []
        forward.read([Range(opened, *part) for part in parts], disk, lambda _at, data, told=told: told.append(bytes(data)))  # type: ignore[misc]
        assert b"".join(told) == b"".join(whole[start:stop] for start, stop in parts)
        assert disk.held
        assert resident(opened.path, CHUNK // 2, CHUNK) == 0 == resident(opened.path, CHUNK + 2 * PAGE, 3 * CHUNK // 2)
        disk.leave()


def test_what_is_there_takes_no_turn(opened: Opened, disk: Turn) -> None:
    """Bytes in the page cache are read without waiting for the disk."""
    opened.path.read_bytes()
    assert b"".join(data for _, data in read(opened, 0, SIZE, disk)) == opened.path.read_bytes()
    assert not disk.held


def test_a_file_that_ends_early_ends_the_reading(opened: Opened, disk: Turn) -> None:
    """A cut shard is no hang: whoever needs the rest says so."""
    assert sum(len(data) for _, data in read(opened, 0, 10 * SIZE, disk)) == SIZE


def test_without_nowait_the_turn_is_taken(opened: Opened, disk: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that doesn't know RWF_NOWAIT is read in the disk's turn, and asked for it once only."""
    asked = []

    def refuse(*arguments: Any) -> int:
        if len(arguments) == 4:
            asked.append(arguments)
            raise OSError(95, "not supported")
        return plain(*arguments)

    plain = os.preadv
    monkeypatch.setattr(os, "preadv", refuse)
    forward = Forward()
    for _ in range(3):
        forward.read([Range(opened, 0, CHUNK)], disk, lambda _at, _data: None)
        assert disk.held
        disk.leave()
    assert len(asked) == 1


def test_an_exception_ends_the_reading(opened: Opened, disk: Turn) -> None:
    """Another run that begins doesn't wait for the window's end."""
    told: list[int] = []

    def stop(at: int, _data: memoryview) -> None:
        told.append(at)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Forward().read([Range(opened, 0, SIZE)], disk, stop)
    assert told == [0]


def test_a_slow_disk_gives_signs_of_life(tmp_path: Path, disk: Turn) -> None:
    """At 400 KB/s 1 MiB comes in many chunks, so that workers don't take the disk for dead."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(os.urandom(800_000))
    with fusefolder.mounted(tmp_path / "in", tmp_path / "m", rate=400_000.0) as point:
        descriptor = os.open(point / "file", os.O_RDONLY)
        pages.plain(descriptor)
        told: list[float] = [time.monotonic()]
        file = Opened(point / "file", descriptor, (point / "file").stat().st_dev)
        Forward().read([Range(file, 0, 800_000)], disk, lambda _at, _data: told.append(time.monotonic()))
        os.close(descriptor)
    assert len(told) > 10


def _hold(path: str, kind: int | None, held: Any, release: Any) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    if kind is None:
        lock_range(descriptor)
    else:
        fcntl.flock(descriptor, kind)
    held.set()
    release.wait()


@pytest.fixture
def other() -> Iterator[Lock]:
    """Have another process lock a path, or read all of a file; calling what is returned lets it go."""
    context = multiprocessing.get_context("fork")
    releases: list[Callable[[], None]] = []

    def lock(path: Path, kind: int | None = None) -> Callable[[], None]:
        held, let_go = context.Event(), context.Event()
        process = context.Process(target=_hold, args=(str(path), kind, held, let_go))
        process.start()

        def release() -> None:
            let_go.set()
            process.join()

        releases.append(release)
        assert held.wait(20)
        return release

    yield lock
    for release in releases:
        release()


def test_used_pages_are_dropped(opened: Opened) -> None:
    """A used window's whole pages go at once, and no others."""
    opened.path.read_bytes()
    locks.hold(opened.descriptor, CHUNK, 2 * CHUNK)
    assert pages.drop(opened.descriptor, [(CHUNK, 2 * CHUNK)]) == []
    left = resident(opened.path, CHUNK, 2 * CHUNK)
    assert left <= CHUNK // 2  # a large folio at an edge stays
    assert resident(opened.path, 0, CHUNK // 2) == CHUNK // 2


def test_pages_that_another_reader_holds_stay(opened: Opened, other: Lock) -> None:
    """What another process reads isn't dropped, and this one's own lock isn't lost; afterwards it is."""
    opened.path.read_bytes()
    locks.hold(opened.descriptor, 0, CHUNK)
    release = other(opened.path)
    assert pages.drop(opened.descriptor, [(0, SIZE)]) == [(0, SIZE)]
    assert resident(opened.path) == SIZE
    release()
    assert is_read(opened.path, 0, CHUNK) and not is_read(opened.path, CHUNK)
    assert pages.drop(opened.descriptor, [(0, SIZE)]) == []
    assert resident(opened.path) == 0


def test_two_readers_of_a_shard_drop_their_own_parts(opened: Opened, block: Block) -> None:
    """What one reader has used goes while another one reads elsewhere in the same shard, as ranks do that share few shards."""
    opened.path.read_bytes()
    middle = SIZE // 2 // PAGE * PAGE
    one, two = Shards(block), Shards(block)
    first, second = (shards.open(0, str(opened.path)) for shards in (one, two))
    one.keep(first, 0, middle)
    two.keep(second, middle, SIZE)
    one.release(first, [(0, middle)], [Done(0, middle, None, None)])
    assert resident(opened.path, 0, middle) <= CHUNK  # a large folio at an edge stays
    assert resident(opened.path, middle) == SIZE - middle
    two.release(second, [(middle, SIZE)], [Done(middle, SIZE, None, None)])
    assert resident(opened.path) == 0
    assert block.count(Count.REFUSED) == 0


def test_a_shard_is_locked_while_a_window_holds_it(opened: Opened, block: Block) -> None:
    """As long as a window holds bytes others see that they are read; after the last one the shard is closed."""
    shards = Shards(block)
    first = shards.open(3, str(opened.path))
    assert shards.open(3, str(opened.path)) is first
    for start in (0, CHUNK):
        shards.keep(first, start, start + CHUNK)
    for start in (0, CHUNK):
        assert is_read(opened.path, start, start + CHUNK)
        shards.release(first, [(start, start + CHUNK)], [])
        assert not is_read(opened.path, start, start + CHUNK)
    assert not _is_open(first.descriptor, opened.path)


def _is_open(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except OSError:
        return False


def test_a_window_drops_nothing_of_the_next(opened: Opened, block: Block) -> None:
    """What a later window of the same shard holds stays, to the page; what is between goes with the later one."""
    opened.path.read_bytes()
    shards = Shards(block)
    shard = shards.open(0, str(opened.path))
    shards.open(0, str(opened.path))
    middle = CHUNK + 100
    shard.stays.add(0, middle)
    shard.stays.add(middle, SIZE)
    shards.release(shard, [(0, middle)], [Done(0, middle, None, None)])
    assert resident(opened.path, middle // PAGE * PAGE) == SIZE - middle // PAGE * PAGE
    assert resident(opened.path, 0, middle) < middle // 2
    shards.release(shard, [(middle, SIZE)], [Done(middle, SIZE, None, None)])
    assert resident(opened.path) == 0
    assert block.count(Count.DROPPED_BYTES) >= SIZE - 2 * PAGE


def test_what_another_held_is_dropped_later(opened: Opened, block: Block, other: Lock) -> None:
    """A drop that was refused is counted and made up for; two readers that wait for each other both come to it."""
    opened.path.read_bytes()
    release = other(opened.path)
    shards = Shards(block)
    shard = shards.open(0, str(opened.path))
    shard.stays.add(0, SIZE)
    shards.release(shard, [(0, SIZE)], [Done(0, SIZE, None, None)])
    assert (block.count(Count.REFUSED), resident(opened.path)) == (1, SIZE)
    release()
    assert not is_read(opened.path)  # nothing of this process stands in the way of the other's drop
    shards.retry()
    assert resident(opened.path) == 0
    assert not _is_open(shard.descriptor, opened.path)


def test_what_is_read_again_is_not_dropped_late(opened: Opened, block: Block, other: Lock) -> None:
    """A drop that waited spares what the next epoch holds by then."""
    opened.path.read_bytes()
    release = other(opened.path)
    shards = Shards(block)
    shard = shards.open(0, str(opened.path))
    shards.release(shard, [], [Done(0, SIZE, None, None)])
    again = shards.open(0, str(opened.path))
    assert again is shard
    again.stays.add(CHUNK, 2 * CHUNK)
    release()
    shards.open(0, str(opened.path))
    shards.release(again, [], [])
    assert resident(opened.path, CHUNK, 2 * CHUNK) == CHUNK
    assert resident(opened.path, 2 * CHUNK + 2 * PAGE) == 0
    shards.release(again, [(CHUNK, 2 * CHUNK)], [])


def test_copies_hold_what_is_there_and_no_more() -> None:
    """Copies of far shards lie in one sparse file, are read by another process's number, and give their memory back."""
    copied = CopiedShards()
    data = memoryview(os.urandom(3 * PAGE))
    copied.add(900_000, 10 * PAGE + 100, data)
    assert copied.copies.used_bytes() <= 5 * PAGE
    reader = CopyReader(os.getpid(), copied.copies.descriptor)
    assert reader.read(900_000, 10 * PAGE + 100, len(data)) == data
    assert copied.missing(900_000, 10 * PAGE, 14 * PAGE) == [(10 * PAGE, 10 * PAGE + 100), (13 * PAGE + 100, 14 * PAGE)]
    copied.drop(900_000, [Done(10 * PAGE + 100, 12 * PAGE, None, None)])
    assert reader.read(900_000, 12 * PAGE, PAGE + 100) == data[2 * PAGE - 100 :]
    assert reader.read(900_000, 11 * PAGE, 2 * PAGE) is None  # a part of it was dropped
    assert reader.read(900_001, 0, 10) is None and reader.read(5, 0, 10) is None
    copied.drop(900_000, [Done(12 * PAGE, 13 * PAGE + 100, None, None)])
    assert copied.copies.used_bytes() == 0
    copied.add(900_000, 0, data)
    copied.copies.empty()
    assert copied.copies.used_bytes() == 0 and reader.read(900_000, 0, 10) is None
    reader.close()
    copied.copies.close()
    with pytest.raises(OSError, match="No such file"):
        CopyReader(os.getpid(), copied.copies.descriptor)


def test_the_mounts_root_is_what_is_locked(tmp_path: Path) -> None:
    """All folders of a mount share one turn, and no file is made for it."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    root = mount_root(str(tmp_path / "a" / "b"))
    assert os.path.ismount(root) and Path(root).stat().st_dev == tmp_path.stat().st_dev
    before = sorted(tmp_path.rglob("*"))
    one, two = Turn(str(tmp_path / "a")), Turn(str(tmp_path / "a" / "b"))
    one.take()
    with open_folder(root) as descriptor, pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    one.leave()
    two.take()
    assert two.granted and sorted(tmp_path.rglob("*")) == before
    one.close()
    two.close()


class open_folder:  # noqa: N801
    """A descriptor of a folder."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> int:
        return self.descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def test_a_turn_is_advice(tmp_path: Path, other: Lock) -> None:
    """Whoever holds the disk for longer than a second doesn't stop the others, and its turn is theirs again afterwards."""
    root = Path(mount_root(str(tmp_path)))
    release = other(root, fcntl.LOCK_EX)
    disk = Turn(str(tmp_path))
    disk.take()
    assert disk.held and not disk.granted
    assert 0.9e9 < disk.waited_ns < 5e9
    disk.leave()
    threading.Timer(0.2, release).start()
    disk.take()
    assert disk.granted and disk.waited_ns < 0.9e9
    disk.close()


_TAKER = """
import sys, time
from pipeline.prefetch.turn import Turn
disk, last = Turn(sys.argv[1]), 0.0
print("up", flush=True); sys.stdin.readline()
lines = []
for _ in range(20):
    disk.take()
    lines.append(f"{disk.granted} {time.monotonic()}")
    time.sleep(0.02)
    lines.append(f"end {time.monotonic()}")
    disk.leave()
print(*lines, sep=chr(10))
"""


def test_readers_take_turns(tmp_path: Path) -> None:
    """Two processes never have the disk at once, and neither keeps it: a lock taken again at once would starve the other."""
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", _TAKER, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(pages.__file__).parents[2])},
        )
        for _ in range(2)
    ]
    for taker in takers:
        assert taker.stdout is not None and taker.stdout.readline() == "up\n"
    spans = []
    for taker in takers:
        assert taker.stdin is not None
        taker.stdin.write("\n")
        taker.stdin.flush()
    for number, taker in enumerate(takers):
        lines = taker.communicate()[0].split("\n")[:-1]
        assert all(line.startswith("True") for line in lines[::2])
        spans += [(float(a.split()[1]), float(b.split()[1]), number) for a, b in zip(lines[::2], lines[1::2], strict=True)]
    spans.sort()
    assert len(spans) == 40
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    both = max(min(span[0] for span in spans if span[2] == number) for number in (0, 1))
    turns = [number for start, _, number in spans if start >= both]
    turns = turns[: 1 + max(at for at, number in enumerate(turns) if number != turns[-1])]  # while both want it
    assert sum(a != b for a, b in zip(turns, turns[1:], strict=False)) >= len(turns) // 2


def test_without_locks_reading_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no locks is read without turns."""

    def refuse(*_arguments: object) -> None:
        raise OSError(22, "no locks")

    monkeypatch.setattr(turn.fcntl, "flock", refuse)
    disk = Turn(str(tmp_path))
    disk.take()
    assert disk.held and disk.granted
    disk.leave()
    disk.close()


def way_of(path: Path) -> Way:
    """Return what the folder test says of a file of which a MiB was read."""
    if trial.in_memory(str(path)):
        return Way.MEMORY
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.pread(descriptor, CHUNK, 0)
        return trial.find_way(str(path), descriptor, 0, CHUNK)
    finally:
        os.close(descriptor)


def test_the_folder_test_on_a_disk(opened: Opened) -> None:
    """Where pages stay for other processes, the page cache is the way, though the file is another process's first."""
    assert way_of(opened.path) is Way.PAGE_CACHE


def test_the_folder_test_in_memory(tmp_path: Path, block: Block) -> None:
    """What lies in memory isn't read ahead."""
    with mounted("tmpfs", tmp_path / "m", "size=8m") as point:
        (point / "file").write_bytes(bytes(SIZE))
        assert way_of(point / "file") is Way.MEMORY


def test_the_folder_test_on_overlayfs(tmp_path: Path) -> None:
    """A container's layers keep their pages, whether or not they know RWF_NOWAIT."""
    for name in ("low", "up", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "low" / "file").write_bytes(os.urandom(SIZE))
    chill(tmp_path / "low" / "file")
    layers = f"lowerdir={tmp_path}/low,upperdir={tmp_path}/up,workdir={tmp_path}/work"
    with mounted("overlay", tmp_path / "m", layers) as point:
        assert way_of(point / "file") is Way.PAGE_CACHE


def test_the_folder_test_without_nowait(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where RWF_NOWAIT isn't known, what the kernel counts for a process tells: a cold read is counted, another's isn't."""
    monkeypatch.setattr(trial, "_look", lambda *_: trial._UNKNOWN)
    assert way_of(opened.path) is Way.PAGE_CACHE
    monkeypatch.setattr(trial, "medium_bytes", lambda: 0)
    assert way_of(opened.path) is Way.COPIES


@pytest.mark.parametrize("keep", [False, True])
def test_the_folder_test_on_fuse(tmp_path: Path, keep: bool) -> None:
    """Where an open throws pages away, or that can't be told, shards are copied."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(os.urandom(SIZE))
    with fusefolder.mounted(tmp_path / "in", tmp_path / "m", keep=keep) as point:
        assert (point / "file").read_bytes() == (tmp_path / "in" / "file").read_bytes()
        assert way_of(point / "file") is Way.COPIES
