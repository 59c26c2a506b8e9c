"""Keeps a place in an object store to one build at a time: an object that says whose it is, written again as long as it runs.

    none, or of this build                     taken
    of another, written within EXPIRES seconds refused: it runs, perhaps elsewhere
    of another, older                          a build that was cut off elsewhere; taken with `force`

It also lists what its build may have written or was about to remove, so that `--force` elsewhere can remove just that. Where a
store takes no conditional writes two builds that begin within the same moment aren't told apart.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardify.durable import write_file
from shardify.errors import SettingsError, StorageError, naming
from shardify.sinks.objects import Bucket, TakenError, UnconditionalError, Version

NAME = ".shardify-lease"  # of the object, and of the file in the work folder that says which one is ours
PROBE = ".shardify-probe"
RENEW_SECONDS = 20.0
EXPIRES_SECONDS = 120.0


class Lease:
    """A build's right to a place; `left` is what a lease that was there before lists: (shards by split, names to remove)."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self.left: tuple[Mapping[str, int], Sequence[str]] = ({}, ())
        self._bucket = bucket
        self._file = folder / NAME
        self._run = secrets.token_hex(8)
        self._facts: dict[str, Any] = {}
        self._before: Mapping[str, Any] | None = None  # what a lease that was there said, restored where nothing is begun
        self._version: Version | None = None  # as it was written last; None: not taken
        self._written, self._writes = 0.0, 0
        self._plain = False  # whether the store takes no conditions
        self._lost: StorageError | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, *, force: bool) -> None:
        """Take the place, and keep it. Raises SettingsError where another build has it."""
        fresh = not self._file.exists()
        token = self._token()
        self._facts = {"token": token, "run": self._run, "resting": False, "shards": {}, "remove": []}
        try:
            self._put("create")
        except TakenError:
            try:
                self._take_over(token, force=force)
            except SettingsError:
                if fresh:
                    self._file.unlink()
                raise
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def note(self, shards: Mapping[str, int], remove: Sequence[str]) -> None:
        """List what this build is about to write and to remove."""
        self._facts |= {"shards": dict(shards), "remove": list(remove)}
        self.check()

    def check(self) -> None:
        """Write the lease again; raises StorageError where the place is another build's by now."""
        with self._lock:
            try:
                self._put(self._version or "create")
            except TakenError:
                self._is_ours_still()
        if self._lost is not None:
            raise self._lost

    def raise_lost(self) -> None:
        """Raise StorageError where the place was found to be another build's; looks where nobody has for a while (a sleep)."""
        if self._lost is None and _now() - self._written > EXPIRES_SECONDS / 2:
            self.check()
        if self._lost is not None:
            raise self._lost

    def stop(self) -> None:
        """Write it no more; it stays."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)  # a request that hangs is left to the end of the process

    def give_back(self) -> None:
        """Remove it, or restore the one that was there before: the files of its build still are."""
        if self._before is not None:
            self._rest(self._before)
            return
        self.stop()
        with self._lock:
            if self._version is None:  # not taken; or the answer was lost, and then the file says whose it is
                return
            with suppress(TakenError):  # of a process that was suspended the lease may be another's by now
                self._put(self._version)
                if self._lost is None:
                    self._bucket.delete([NAME])
        self._file.unlink(missing_ok=True)

    def rest(self) -> None:
        """Leave it, marked as that of a build that has stopped and can go on."""
        self._rest(self._facts)

    def begun(self) -> None:
        """Note that the files which an earlier lease listed are gone: it isn't restored any more."""
        self._before = None

    def _rest(self, facts: Mapping[str, Any]) -> None:
        self.stop()
        with self._lock:
            if self._lost is None and self._version is not None:
                self._facts = {**facts, "resting": True}
                self._put(self._version)

    def _token(self) -> str:
        """Return what makes the lease of a build that was killed known as ours: it is in the work folder."""
        with naming(self._file):
            if not self._file.exists():
                write_file(self._file, secrets.token_hex(16).encode())
            return self._file.read_text(errors="replace").strip()

    def _take_over(self, token: str, *, force: bool) -> None:
        found = self._bucket.find(NAME)
        if found is None:  # it ended just now
            self._put("create")
            return
        facts = _parse(self._bucket.read(NAME))
        if facts["token"] != token:
            age = EXPIRES_SECONDS if facts["resting"] else self._age(found.written.timestamp())
            if age < EXPIRES_SECONDS:
                raise SettingsError(
                    f"another build writes to {self._bucket.url} (it said so {max(age, 0):.0f} s ago); wait for it (one that was "
                    f"killed holds the place for {EXPIRES_SECONDS:.0f} s), or choose another one (--out)"
                )
            if not force:
                raise SettingsError(
                    f"{self._bucket.url} holds a build that was cut off, whose work folder isn't {self._file.parent}; go on with "
                    "--resume where it was begun (--work), or begin anew with --force"
                )
        self._before = facts
        self.left = (facts["shards"], facts["remove"])
        self._facts |= {"shards": facts["shards"], "remove": facts["remove"]}
        try:
            self._put(found.version)
        except TakenError:
            raise SettingsError(
                f"another build has just begun in {self._bucket.url}; wait for it, or choose another place"
            ) from None

    def _age(self, written: float) -> float:
        """Return how old something is by the server's clock."""
        self._bucket.put(PROBE, secrets.token_bytes(8))
        probe = self._bucket.find(PROBE)
        self._bucket.delete([PROBE])
        return probe.written.timestamp() - written if probe is not None else 0.0

    def _put(self, condition: str | Version) -> None:
        self._writes += 1  # an ETag that is a hash tells a lease that was renewed from the one before
        data, now = json.dumps({**self._facts, "writes": self._writes}).encode(), _now()
        try:
            if not self._plain:
                self._version = self._bucket.put(NAME, data, condition=condition)
                self._written = now
                return
        except TakenError:
            if not self._adopt():
                raise
            return
        except UnconditionalError:
            self._plain = True
        found = self._bucket.find(NAME)
        wanted = None if isinstance(condition, str) else condition.get("e_tag")
        if (found and found.version.get("e_tag")) != wanted:
            if self._adopt():
                return
            raise TakenError(f"{self._bucket.place(NAME)}: another build wrote it meanwhile")
        self._version = self._bucket.put(NAME, data)
        self._written = now

    def _adopt(self) -> bool:
        """Take the object's ETag where it is this run's: the answer to a write that went well may have been lost."""
        found = self._bucket.find(NAME)
        if found is None or _parse(self._bucket.read(NAME))["run"] != self._run:
            return False
        self._version, self._written = found.version, _now()
        return True

    def _is_ours_still(self) -> None:
        """Take a lease that someone removed again; note one that is another's."""
        with suppress(TakenError):
            self._put("create")
            return
        self._lost = StorageError(
            f"{self._bucket.url}: another build took the place over while this one was suspended or cut off from the store; "
            "stop one of them, then --resume or --force"
        )

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS) and self._lost is None:
            with suppress(StorageError, SettingsError):  # out of reach: the uploads will say so, or it comes back
                self.check()


def _now() -> float:
    """Return the seconds since the machine's start, those that it slept too."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # macOS has the latter alone


def _parse(data: bytes) -> dict[str, Any]:
    """Return a lease's facts; of one that can't be read, that it lists nothing."""
    empty: dict[str, Any] = {"token": "", "run": "", "resting": False, "shards": {}, "remove": []}
    try:
        facts = json.loads(data)
        known = {key: facts[key] for key in empty if isinstance(facts[key], type(empty[key]))}
    except (ValueError, KeyError, TypeError, RecursionError):
        return empty
    shards = {split: count for split, count in known.get("shards", {}).items() if isinstance(count, int) and 0 <= count < 10**7}
    return empty | known | {"shards": shards, "remove": [name for name in known.get("remove", ()) if isinstance(name, str)]}
