"""Ends a worker when its trainer is gone, and leaves Ctrl-C to the trainer.

Nothing else does where workers start by "forkserver": their parent is the server, which lives as long as they do. The kernel's own
death signal (PR_SET_PDEATHSIG) would be the server's too, and under "fork" that of the thread that began the epoch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess, parent_process
from multiprocessing.util import get_temp_dir
from shutil import rmtree


def share_temporary_folder() -> None:
    """Make the folder of this process's sockets one that its workers use too, before they start.

    It goes when the trainer ends, or with the last worker; each worker's own would stay where the worker is killed.
    """
    get_temp_dir()


def follow_trainer() -> None:
    """Make this process, a worker, end as soon as the one that started it does; Ctrl-C at the terminal does nothing to it.

    The trainer gets Ctrl-C too, and ends its workers: without this each would print a traceback of its own.
    """
    with suppress(ValueError):  # not the main thread: nobody's worker
        signal.signal(signal.SIGINT, _leave)  # not SIG_IGN: programs that a transform starts would inherit that
    trainer = parent_process()
    if trainer is None:
        return
    threading.Thread(target=_end_with, args=(_signs(trainer),), name="pipeline-lifeline", daemon=True).start()


def _signs(trainer: BaseProcess) -> Sequence[int]:
    """Return descriptors of which one becomes readable when the trainer ends.

    The sentinel is a pipe that the trainer holds open; but what it forks later, such as the next worker, holds it open as well.
    """
    signs = [trainer.sentinel]
    try:
        signs.append(os.pidfd_open(trainer.pid or 0))
    except ProcessLookupError:
        os._exit(1)  # it has ended already
    except (AttributeError, OSError):
        pass  # no such call here
    return signs


def _end_with(signs: Sequence[int]) -> None:
    wait(signs)
    rmtree(get_temp_dir(), ignore_errors=True)  # nobody is left to do it: the trainer was killed
    os._exit(1)


def _leave(_number: int, _frame: object) -> None:
    pass
