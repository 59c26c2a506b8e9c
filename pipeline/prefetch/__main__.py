"""The prefetcher's process: takes runs from the trainer's pipe, and ends when that closes.

python -P -m pipeline.prefetch PLAN BLOCK PARENT    two descriptors, and the trainer's process number
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError, said
from pipeline.machine import keep_memory
from pipeline.prefetch import RUN, plan
from pipeline.prefetch.reader import Reader
from pipeline.progress import Block, Count

if TYPE_CHECKING:
    from pipeline.prefetch.arriving import ArrivingReader
    from pipeline.prefetch.remote import RemoteReader

_LEAST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks at how far the trainer is
_FLYING_PAUSE = 0.005  # while something is on its way, and more waits for room
_NICE = 5  # where CPUs lack, decoding what is there goes before fetching what comes later
_SAID = 4096  # bytes at once of what tells of landings
_IDLE = 5.0  # seconds between two looks whether the trainer lives: its workers may hold the pipe open


class _Interrupted(Exception):  # noqa: N818  (no error)
    """Another run begins, or the trainer has gone."""


class _Trainer:
    """What the trainer says, by a pipe."""

    def __init__(self, descriptor: int, parent: int) -> None:
        self._descriptor, self._parent, self._rest = descriptor, parent, b""
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def spoke(self, seconds: float = 0.0, landing: socket.socket | None = None) -> bool:
        """Wait for the trainer to say something or end, at most some seconds; something to read of `landing` ends the wait too."""
        if landing is not None:
            self._poll.register(landing, select.POLLIN)
        ready = {descriptor for descriptor, _ in self._poll.poll(seconds * 1000)}
        if landing is not None:
            self._poll.unregister(landing)
            if landing.fileno() in ready:
                landing.recv(_SAID)
        return self._descriptor in ready or os.getppid() != self._parent

    def check(self) -> None:
        """Raise _Interrupted if the trainer said something."""
        if self.spoke():
            raise _Interrupted

    def said(self) -> tuple[int, int, int, int, int] | None:
        """Return the run that it asks for last, None where it has gone."""
        if os.getppid() != self._parent:
            return None
        while len(self._rest) < RUN.size or len(self._rest) % RUN.size:
            data = os.read(self._descriptor, 64 * RUN.size)
            if not data:
                return None
            self._rest += data
        last, self._rest = self._rest[-RUN.size :], b""
        run, epoch, position, claimed, wrapped = RUN.unpack(last)
        return run, epoch, position, claimed, wrapped


def serve(trainer: _Trainer, reader: Reader | RemoteReader | ArrivingReader, block: Block) -> None:
    """Read ahead for one run after the other, until the trainer has gone."""
    pause = _IDLE
    while True:
        asked = trainer.said() if trainer.spoke(pause, reader.landing) else ()
        if asked is None:
            return
        try:
            if asked:
                reader.begin(*asked)
            if reader.step():
                pause = 0.0
                continue
        except _Interrupted:
            pause = 0.0
            continue
        if reader.idle:
            pause = _IDLE
            continue
        longest = _FLYING_PAUSE if reader.pending and reader.full else _LONGEST_PAUSE
        pause = min(longest, max(_LEAST_PAUSE, 2 * pause)) if pause < _IDLE else _LEAST_PAUSE
        if reader.full:
            block.add(Count.FULL_NS, int(pause * 1e9))


def main(arguments: list[str]) -> None:
    """Serve the trainer that started this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which closes the pipe
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # a window of small shards holds hundreds open
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    described, shared, parent = (int(argument) for argument in arguments)
    trainer, block = _Trainer(sys.stdin.fileno(), parent), Block(shared)
    block.copy_nothing()  # as one may have that died
    block.put(Count.PID, os.getpid())
    laid = plan.read(described)
    if laid.fetching is None:
        serve(trainer, Reader(laid, block, trainer.check), block)
        return
    from pipeline.prefetch.arriving import ArrivingReader  # noqa: PLC0415
    from pipeline.prefetch.remote import RemoteReader  # noqa: PLC0415  (local sets need no urllib3)

    os.nice(_NICE)
    keep_memory()  # what comes of a socket is a MiB at a time
    try:
        remote = (ArrivingReader if laid.fetching.arrival else RemoteReader)(laid, laid.fetching, block)
    except (OSError, PipelineError) as error:
        block.report(said(error))
        return
    try:
        serve(trainer, remote, block)
    except (OSError, PipelineError) as error:  # of the cache folder: workers that wait are told why it ends
        block.report(said(error))
    except BaseException:
        remote.close()
        raise
    # What flies ends here, safely: a reader that waits for a silent server would hold its windows for as long.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
