"""The local engine: results in order, bounded work in flight, and processes that never hang nor stay behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from shardify.engines.local import _ROOM, _WAITING, CHUNK, CHUNK_BYTES, map_ordered
from shardify.errors import StorageError

SCRIPT = """
import sys, time
from itertools import count
sys.path.insert(0, {folder!r})
from test_engines_local import nap
from shardify.engines.local import map_ordered
if __name__ == "__main__":
    for n in map_ordered(nap, count(), workers=2):
        print(n, flush=True)
"""


def uneven(number: int) -> int:
    """Return the square, late for some numbers."""
    time.sleep(0.01 * (number % 7 == 0))
    return number * number


def nap(number: int) -> int:
    """Return the number, slowly."""
    time.sleep(0.01)
    return number


def fail_at_50(number: int) -> int:
    """Raise for one number."""
    if number == 50:
        raise KeyError("fifty")
    return number


def die_at_50(number: int) -> int:
    """Kill this process for one number."""
    if number == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def large(number: int) -> bytes:
    """Return more than a pipe holds."""
    return bytes([number % 256]) * 3_000_000


def pid(_: int) -> int:
    """Return this process's number."""
    time.sleep(0.005)
    return os.getpid()


def children() -> list[int]:
    """Return the processes that multiprocessing started here and that live."""
    return [process.pid or 0 for process in multiprocessing.active_children()]


def is_alive(number: int) -> bool:
    """Tell whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("tasks", [0, 1, CHUNK, 5 * CHUNK + 3])
def test_order_is_kept(workers: int, tasks: int) -> None:
    """Results come in the order of the tasks, all of them, for any number of processes."""
    assert list(map_ordered(uneven, range(tasks), workers=workers)) == [n * n for n in range(tasks)]
    assert children() == []


def test_one_worker_is_this_process() -> None:
    """With one worker nothing is started; with two, two work."""
    assert set(map_ordered(pid, range(20), workers=1)) == {os.getpid()}
    assert len(set(map_ordered(pid, range(200), workers=2)) - {os.getpid()}) == 2


def test_what_is_in_flight_is_bounded() -> None:
    """However slow the reader, only so many tasks are taken from an endless source."""
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for number in count():
            taken = number + 1
            yield number

    results = map_ordered(nap, tasks(), workers=2)
    for expected in range(3 * CHUNK):
        assert next(results) == expected
    time.sleep(0.3)
    assert taken <= 3 * CHUNK + 2 * (_WAITING + _ROOM) * CHUNK
    results.close()
    assert children() == []


def test_an_exception_comes_with_its_traceback() -> None:
    """What a function raises ends the map with the worker's traceback, and its processes."""
    with pytest.raises(RuntimeError, match=r"(?s)fail_at_50.*KeyError: 'fifty'"):
        list(map_ordered(fail_at_50, range(100), workers=2))
    assert children() == []


def test_a_killed_worker_is_an_error() -> None:
    """A worker that dies is named with the signal and its tasks, within seconds."""
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"killed by SIGKILL while it worked on the 8 from 48 on; .*fewer workers"):
        list(map_ordered(die_at_50, range(1000), workers=2))
    assert time.monotonic() - start < 10
    assert children() == []


def test_a_worker_killed_in_the_middle_of_an_answer() -> None:
    """A worker killed while its answer is half sent is an error too, not a wait without end."""
    results = map_ordered(large, range(1000), workers=2)
    next(results)
    time.sleep(0.3)  # both now block on a full pipe
    for process in multiprocessing.active_children():
        process.kill()
    with pytest.raises(StorageError, match="killed by SIGKILL"):
        list(results)
    assert children() == []


def start_script(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a script that maps without end; return it and its workers once they work."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return process, [int(number) for number in workers]


def wait_for_end(numbers: list[int]) -> None:
    """Wait until none of these processes runs."""
    end = time.monotonic() + 10
    while any(is_alive(number) for number in numbers):
        assert time.monotonic() < end, f"{[n for n in numbers if is_alive(n)]} still run"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    """Ctrl-C, which reaches every process of a terminal, ends the map at once: one traceback, of the parent."""
    process, workers = start_script(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
    wait_for_end(workers)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves no process behind."""
    process, workers = start_script(tmp_path)
    assert len(workers) >= 2
    process.kill()
    process.communicate(timeout=10)
    wait_for_end(workers)


def test_large_tasks_go_in_small_chunks(tmp_path: Path) -> None:
    """What a worker is handed at once is bounded in bytes too: of large tasks each is a chunk of its own."""
    asked: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(200):
            asked.append(number)
            yield number

    results = map_ordered(pid, tasks(), workers=2, count=200, weigh=lambda task: CHUNK_BYTES)
    next(results)
    assert len(asked) <= 2 * (_WAITING + _ROOM) + 2
    results.close()
