"""Settles whole objects of the cache beside what else is fetched: compared with their hashes, put on the medium if they stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from pipeline.stores.cache import Entry

_AT_ONCE = 4  # objects that are put on the medium, or wait for it; as many as are fetched at once by default

Report = Callable[[str, str, OSError], None]


class Settler:
    """What is being settled; for any number of threads. `report` is told what can't be written: its URL, its path, and why."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._pool = ThreadPoolExecutor(1, "settle")
        self._entries: dict[str, Entry | None] = {}  # by path; None while it is compared
        self._lock = threading.Lock()

    def verify(self, opened: Callable[[], Entry], path: str, sha256: str, *, stays: bool) -> bool:
        """Compare a whole object with its hash; False at once where another thread does that now.

        Where it `stays` it is put on the medium, too: by a thread, for a few objects at once, as nothing of them can be given back
        meanwhile. What doesn't stay needn't be there after this run of the machine. Raises what `Entry.check` does.
        """
        with self._lock:
            if path in self._entries:
                return self._entries[path] is not None
            self._entries[path] = None
        whole, checked = None, False
        try:
            whole = opened()
            whole.hold(0, whole.size)  # else a window that is used up meanwhile would take bytes away
            checked = whole.check(sha256)
        finally:
            if not checked or not stays:
                if whole is not None:
                    whole.close()
                del self._entries[path]
        if checked and stays:
            self._entries[path] = whole
            if len(self._entries) <= _AT_ONCE:
                self._pool.submit(self._settle, whole)
            else:
                self._settle(whole)
        return True

    def close(self) -> None:
        """End the thread; what it hasn't come to isn't vouched for, and is fetched again after this run of the machine."""
        self._pool.shutdown(cancel_futures=True)
        for whole in filter(None, self._entries.values()):
            whole.close()

    def _settle(self, whole: Entry) -> None:
        """Put an object on the medium; where that fails none of it is there any more: pages that can't be written may be lost."""
        try:
            with whole:
                try:
                    whole.settle()
                except OSError as error:
                    with suppress(OSError):
                        whole.forget()
                    self._report(whole.facts.url, whole.path, error)
        finally:
            del self._entries[whole.path]
