"""Uploads finished shards in threads while later ones are written: a bounded number, each gone from the folder when it is there."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shardify.errors import DataError, SettingsError, StorageError, naming
from shardify.format.manifest import ShardEntry
from shardify.format.names import index_name
from shardify.sinks import objects
from shardify.sinks.objects import Bucket

AT_ONCE = 2  # shards; each in `objects.PARTS` requests at once
HELD_SHARDS = AT_ONCE + 1  # in the folder: those on their way, and the one that is written
SMALL_BYTES = objects.PART_BYTES  # at most so much goes in one request
_READ_BYTES = 2**20  # a stop is noticed after each
_POLL_SECONDS = 0.2
_STOP_SECONDS = 15.0  # for the requests on their way; a server that is dead isn't waited for


class _StoppedError(Exception):
    """Uploads are to end: raised among a shard's parts, so that what was sent of it is taken back."""


class Uploads:
    """The uploads of one build. The threads are daemons: one whose server never answers can't keep the process."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self._bucket, self._folder = bucket, folder
        self._tasks: queue.SimpleQueue[ShardEntry | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._room = threading.Semaphore(AT_ONCE)
        self._stopped = threading.Event()
        self._failure: BaseException | None = None

    def add(self, entry: ShardEntry, check: Callable[[], None]) -> None:
        """Upload a shard of the folder, and its index before it; waits while AT_ONCE are on their way.

        Raises what an upload before failed with; `check` is called while it waits, and may raise too.
        """
        self._wait(check)
        if len(self._threads) < AT_ONCE:
            self._threads.append(threading.Thread(target=self._work, name="upload", daemon=True))
            self._threads[-1].start()
        self._tasks.put(entry)

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until all are there; raises what one of them failed with."""
        for _ in range(AT_ONCE):
            self._wait(check)
        self.stop()

    def stop(self) -> None:
        """End the threads: what is on its way is taken back, as far as the server answers."""
        self._stopped.set()
        for _ in self._threads:
            self._tasks.put(None)
        until = time.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _wait(self, check: Callable[[], None]) -> None:
        while not self._room.acquire(timeout=_POLL_SECONDS):
            self._raise()
            check()
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (entry := self._tasks.get()) is not None and not self._stopped.is_set():
            try:
                self._upload(entry)
            except _StoppedError:
                return
            except BaseException as error:
                self._failure = self._failure or error
                self._stopped.set()  # the others end too: the build does
                return
            finally:
                self._room.release()

    def _upload(self, entry: ShardEntry) -> None:
        tar, index = self._folder / entry.name, self._folder / index_name(entry.name)
        for path, size, sha256 in ((index, None, ""), (tar, entry.filesize, entry.sha256)):
            for tries_left in reversed(range(objects.TRIES)):
                try:
                    self._put(path, size, sha256)
                    break
                except (objects.AbsentError, objects.TakenError, SettingsError, DataError):
                    raise
                except StorageError:
                    if not tries_left or self._stopped.is_set():
                        raise
        with naming(tar):
            tar.unlink()
            index.unlink()

    def _put(self, path: Path, size: int | None, sha256: str) -> None:
        with naming(path):
            found = path.stat().st_size
        size = found if size is None else size
        if size <= SMALL_BYTES:
            data = b"".join(self._parts(path, sha256))
            self._bucket.put(path.name, data, sha256=hashlib.sha256(data).hexdigest())
        else:
            self._bucket.put_parts(path.name, self._parts(path, sha256), size=size, sha256=sha256)

    def _parts(self, path: Path, sha256: str) -> Iterator[bytes]:
        """Yield a file's bytes; raises DataError behind the last where they aren't those that were written."""
        digest = hashlib.sha256()
        with naming(path), path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                if self._stopped.is_set():
                    raise _StoppedError
                digest.update(data)
                yield data
        if sha256 and digest.hexdigest() != sha256:
            raise DataError(f"{path}: its bytes are no longer those that were written; check the disk, and begin anew with --force")
