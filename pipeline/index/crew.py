"""Runs tasks in a few threads and gives their results in order; those that are ahead of the slowest wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

T = TypeVar("T")
_LOOK_SECONDS = 0.5
_Job: TypeAlias = "tuple[Future[T], Callable[[], T]] | None"


def in_order(tasks: Iterable[Callable[[], T]], at_once: int) -> Iterator[T]:
    """Yield what each task returns, or raise what it raises; at most `at_once` run, and twice as many are begun or held.

    Its threads never keep a process from ending: after an interrupt one may wait for a server that says nothing.
    """
    jobs: SimpleQueue[_Job[T]] = SimpleQueue()
    for _ in range(at_once):
        threading.Thread(target=_work, args=(jobs,), daemon=True, name="index").start()
    begun: deque[Future[T]] = deque()
    try:
        for task in tasks:
            begun.append(Future())
            jobs.put((begun[-1], task))
            if len(begun) == 2 * at_once:
                yield _result(begun.popleft())
        while begun:
            yield _result(begun.popleft())
    finally:
        for future in begun:
            future.cancel()
        for _ in range(at_once):
            jobs.put(None)


def _result(future: Future[T]) -> T:
    """Return what comes of a task; looks up now and then, as a signal that comes just before a wait doesn't end it."""
    while not wait([future], _LOOK_SECONDS).done:
        pass
    return future.result()


def _work(jobs: SimpleQueue[_Job[T]]) -> None:
    while (job := jobs.get()) is not None:
        future, task = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(task())
        except BaseException as error:  # whatever it is, it is for whoever waits
            future.set_exception(error)
