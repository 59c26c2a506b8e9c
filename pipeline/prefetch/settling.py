"""Compares whole objects of the cache with their hashes, and puts them on the medium beside what is fetched: that may take long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pipeline.errors import SourceError
from pipeline.stores.cache import Entry

_AT_ONCE = 4  # objects that are put on the medium, or wait for it, while others are fetched


class Settler:
    """What is being settled; for any number of threads. `report` is told of an object that can't be written."""

    def __init__(self, report: Callable[[SourceError], None]) -> None:
        self._report = report
        self._pool = ThreadPoolExecutor(1, "settle")
        self._entries: dict[str, Entry | None] = {}  # by path; None while it is compared
        self._lock = threading.Lock()

    def verify(self, opened: Callable[[], Entry], path: str, sha256: str, *, stays: bool) -> None:
        """Compare a whole object with its hash, unless another thread does, and put it on the medium.

        Where it `stays` a thread does the second, for a few objects at once: meanwhile nothing of them can be given back. Raises
        what `Entry.check` does.
        """
        with self._lock:
            if path in self._entries:
                return
            self._entries[path] = None
        whole, checked = None, False
        try:
            whole = opened()
            whole.hold(0, whole.size)  # else a window that is used up meanwhile would take bytes away
            checked = whole.check(sha256)
        finally:
            if not checked:
                if whole is not None:
                    whole.close()
                del self._entries[path]
        self._entries[path] = whole
        if stays and len(self._entries) <= _AT_ONCE:
            self._pool.submit(self._settle, whole)
        else:
            self._settle(whole)

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
                    whole.forget()
                    self._report(
                        SourceError(
                            f"{whole.path}: can't be written to its disk ({error.strerror}); it holds {whole.facts.url}: give "
                            "LoaderOptions(cache_dir=...) on another one"
                        )
                    )
        finally:
            del self._entries[whole.path]
