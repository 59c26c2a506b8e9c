"""Sees that an interrupt isn't lost: what a signal's handler raises in a destructor or in a weak reference's callback is.

Python prints such an exception (here it doesn't) and drops it, and a thread that is started each second gives many occasions. So it
is remembered, and raised again where work goes on.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


class Interrupts:
    """The signals that end a command: Ctrl-C, SIGTERM, and a lost terminal, unless nohup says otherwise."""

    def __init__(self) -> None:
        self.came = False

    def heed(self) -> None:
        """From now on raise KeyboardInterrupt at such a signal; those that are ignored stay so, but for SIGTERM."""
        signal.signal(signal.SIGTERM, self._handle)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, self._handle)
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
        before = sys.unraisablehook

        def hook(lost: UnraisableHookArgs) -> None:
            if not (self.came and lost.exc_type is KeyboardInterrupt):
                before(lost)

        sys.unraisablehook = hook

    def check(self) -> None:
        """Raise KeyboardInterrupt if one came and was lost."""
        if self.came:
            raise KeyboardInterrupt

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


INTERRUPTS = Interrupts()  # a process has but one set of handlers
