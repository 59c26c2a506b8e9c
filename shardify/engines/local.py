"""Runs a function over tasks in this machine's processes: results in the order of the tasks, a bounded number in flight.

Each worker has a pipe of its own, so one that is killed in the middle of an answer is seen at once (end of file), and workers
whose parent is gone end by themselves. Workers ignore Ctrl-C: the parent ends them.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from shardify.errors import StorageError

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 8  # tasks an exchange: at 16 the pipes cost no less, and more pictures are in memory
CHUNK_BYTES = 2**20  # of the largest pictures each is an exchange of its own
_WAITING = 2  # chunks that a worker holds: the one it works on and the next, so that it never idles
_ROOM = 2  # chunks a worker that may lie here finished while an earlier one isn't
_END_SECONDS = 2.0


def map_ordered(
    function: Callable[[T], R],
    tasks: Iterable[T],
    *,
    workers: int,
    count: int | None = None,
    weigh: Callable[[T], int] = lambda task: 0,
) -> Generator[R, None, None]:
    """Yield `function(task)` for each task, in order, from `workers` processes; with one, or tasks too few for two, from this one.

    `function` and tasks are pickled (a module's function, or a partial of one); `count` says how many tasks there are and `weigh`
    how many bytes one holds: at most (_WAITING + _ROOM) chunks a worker are held, of at most CHUNK tasks or CHUNK_BYTES each.
    Raises StorageError where a worker dies, RuntimeError with the worker's traceback where `function` raises.
    Close the generator (or let it end) and the processes are gone.
    """
    if count is None and isinstance(tasks, Sized):
        count = len(tasks)
    if count is not None:
        workers = min(workers, -(-count // CHUNK))
    if workers <= 1:
        yield from map(function, tasks)
        return
    pool: _Pool[T, R] = _Pool(function, workers, weigh)
    try:
        pool.start()
        yield from pool.run(iter(tasks))
    finally:
        pool.stop()


@dataclass(slots=True)
class _Worker(Generic[T]):
    """One process, its pipe, and the chunks it holds: (number, tasks), oldest first."""

    process: BaseProcess
    pipe: Connection
    chunks: deque[tuple[int, list[T]]] = field(default_factory=deque)


class _Pool(Generic[T, R]):
    """The processes of one map and what is in flight."""

    def __init__(self, function: Callable[[T], R], workers: int, weigh: Callable[[T], int]) -> None:
        self._function = function
        self._weigh = weigh
        self._count = workers
        self._workers: list[_Worker[T]] = []
        self._finished: dict[int, list[R]] = {}
        self._sent = 0
        self._next = 0

    def start(self) -> None:
        """Start the processes; `spawn` inherits no lock, thread or open pipe of this process."""
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # else the first start does it, and unblocks the signal
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self._function), daemon=True)
            # A worker inherits the mask: Ctrl-C while its interpreter starts mustn't print a traceback.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
                self._workers.append(_Worker(process, ours))
            finally:
                theirs.close()  # so that end of file comes when the worker is gone
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self, tasks: Iterator[T]) -> Iterator[R]:
        """Yield the results in order."""
        self._deal(tasks)
        while self._next < self._sent:
            while self._next not in self._finished:
                for ready in wait([worker.pipe for worker in self._workers]):
                    self._take(next(worker for worker in self._workers if worker.pipe is ready))
                self._deal(tasks)
            yield from self._finished.pop(self._next)
            self._next += 1
            self._deal(tasks)

    def _deal(self, tasks: Iterator[T]) -> None:
        """Hand out chunks, to the worker that holds the fewest, while there is room."""
        while self._sent - self._next < self._count * (_WAITING + _ROOM):
            worker = min(self._workers, key=lambda w: len(w.chunks))
            chunk = self._chunk(tasks) if len(worker.chunks) < _WAITING else []
            if not chunk:
                return
            worker.chunks.append((self._sent, chunk))
            self._sent += 1
            try:
                worker.pipe.send(chunk)
            except OSError:
                raise _death(worker) from None

    def _chunk(self, tasks: Iterator[T]) -> list[T]:
        chunk: list[T] = []
        size = 0
        for task in islice(tasks, CHUNK):
            chunk.append(task)
            size += self._weigh(task)
            if size >= CHUNK_BYTES:
                break
        return chunk

    def _take(self, worker: _Worker[T]) -> None:
        try:
            done, answer = worker.pipe.recv()
        except (EOFError, OSError):
            raise _death(worker) from None
        if not done:
            raise RuntimeError(f"a worker process failed:\n{answer}")
        number, _ = worker.chunks.popleft()
        self._finished[number] = answer

    def stop(self) -> None:
        """End the processes: the pipe's end tells them, SIGTERM those that work, SIGKILL what is left."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(_END_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers = []


def _death(worker: _Worker[Any]) -> StorageError:
    worker.process.join(_END_SECONDS)
    code = worker.process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
    at = f" while it worked on the {len(worker.chunks[0][1])} from {worker.chunks[0][1][0]!r} on" if worker.chunks else ""
    return StorageError(f"a worker process was {how}{at}; if memory ran out (see `dmesg`), use fewer workers")


def _work(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """Answer chunks until the pipe ends: in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(EOFError, OSError):
        while True:
            chunk = pipe.recv()
            answer: tuple[bool, Any]
            try:
                answer = (True, [function(task) for task in chunk])
            except Exception:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
