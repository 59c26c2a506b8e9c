"""Reads what lies in object stores, whatever the network does: the door to obstore, without a cache or a shard's format.

obstore signs, connects and streams; whether and when to try again is decided here, as it is for HTTP.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import obstore
from obstore.exceptions import BaseError, UnknownConfigurationKeyError
from obstore.store import AzureStore, GCSStore, S3Store

from pipeline.errors import OptionsError, RemoteError
from pipeline.stores.http.counts import Counter, Counts
from pipeline.stores.http.reading import Expect, Reading, Take
from pipeline.stores.http.replies import Remote, check_kind, described
from pipeline.stores.http.retry import Again, Limits, Patience
from pipeline.stores.objects.access import access
from pipeline.stores.objects.address import ObjectAddress
from pipeline.stores.objects.options import ObjectOptions
from pipeline.stores.objects.refusals import refusal
from shardify.format.names import COMPRESSED

_CAN_FAIL = (BaseError, OSError, ValueError, TypeError)
_PARTIAL, _UNSATISFIABLE = 206, 416
_STORES = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_AS_IT_COMES = 1  # what obstore gathers for a larger piece is lost when the connection breaks; at 800 MB/s pieces are 400 KB anyway
_NO_RETRIES = {"max_retries": 0}  # they are made here, where they are counted and told of
_CREDENTIAL_TRIES = 3  # a machine's own service for them may be starting; without one each takes up to connect_seconds

Got = TypeVar("Got")


class _Body:
    """What one request brought, as a reply of HTTP would say it."""

    chunked = False

    def __init__(self, address: ObjectAddress, result: Any, limits: Limits) -> None:
        self._address, self._limits = address, limits
        self._start, self._stop = result.range
        self._left = memoryview(b"")
        self._pieces: Iterator[Any] = iter(result.stream(min_chunk_size=_AS_IT_COMES))
        self.size = int(result.meta["size"])
        self.status = _PARTIAL if self.size else _UNSATISFIABLE
        self.headers: Mapping[str, str] = {
            "Content-Range": f"bytes {self._start}-{self._stop - 1}/{self.size}" if self.size else "bytes */0",
            **_version(result.meta),
            "Content-Encoding": _coding(address, str(result.attributes.get("Content-Encoding", ""))),
        }

    @property
    def length(self) -> int | None:
        return int(self._stop - self._start)

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, none at the end; raises Again when they don't come."""
        failed: Exception | None = None
        if not self._left:
            if self._limits.end <= time.monotonic():
                raise Again("bytes still came")
            try:
                self._left = memoryview(next(self._pieces, b""))
            except _CAN_FAIL as error:
                failed = error
            if failed is not None:
                raise refusal(self._address, str(failed), type(failed).__name__).error
        data, self._left = bytes(self._left[:size]), self._left[size:]
        return data


class _Past:
    """The reply to a request for bytes behind an object's end."""

    status, chunked, length = _UNSATISFIABLE, False, None

    def __init__(self, size: int | None) -> None:
        self.headers: Mapping[str, str] = {} if size is None else {"Content-Range": f"bytes */{size}"}

    def read(self, size: int) -> bytes:
        """Return nothing."""
        del size
        return b""


class ObjectStore:
    """Objects of one kind of store; for any number of threads at once, but never in a process that forks."""

    def __init__(self, kind: str, options: ObjectOptions | None = None) -> None:
        """Settle how stores of a kind (s3, gs, az) are reached; raises OptionsError where that can't be used."""
        self._kind, self._options = kind, options or ObjectOptions()
        self._access = access(kind, self._options, os.environ)
        self._own_limits = self._options.limits()
        self._counter, self._closed, self._lock = Counter(), threading.Event(), threading.Lock()
        self._buckets = dict[tuple[str, str], Any]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End waits between tries; a second call does nothing."""
        self._closed.set()

    @property
    def counts(self) -> Counts:
        """What the network was asked for, up to now; connections are obstore's own, and not counted."""
        return self._counter.now()

    def look(self, url: str | ObjectAddress) -> Remote:
        """Return what lies at a URL; raises RemoteError."""
        address = self._address(url)
        return self._patiently(address, lambda limits: self._look(address, limits))

    def names(self, url: str | ObjectAddress) -> dict[str, Remote]:
        """Return what lies right in a folder, by name; nothing where there is no such folder. Raises RemoteError."""
        address = self._address(url)
        prefix = address.key.rstrip("/") + "/" if address.key else None

        def listed(limits: Limits) -> dict[str, Remote]:
            del limits  # a page of a listing is one request
            found = self._call(address, lambda bucket: obstore.list_with_delimiter(bucket, prefix=prefix))
            self._counter.reply(200)
            # What tools put where a folder would be, an object "folder/", is listed as if it were beside it.
            within = [entry for entry in found["objects"] if entry["path"].startswith(prefix or "")]
            return {e["path"].rpartition("/")[2]: described(_version(e), int(e["size"]), ranges=True) for e in within}

        return self._patiently(address, listed)

    def read(
        self,
        url: str | ObjectAddress,
        start: int,
        stop: int | None,
        known: Remote | None,
        take: Take,
        *,
        expect: Expect | None = None,
    ) -> Remote:
        """Give `take(offset, bytes)` the bytes [start, stop) forward, each exactly once, as `HttpStore.read` does."""
        if start < 0 or (stop is not None and stop < start):
            raise OptionsError(f"start={start}, stop={stop}: a range of bytes, 0 <= start <= stop")
        address = self._address(url)
        limits, patience = self._begin(address)
        reading = Reading(address, start, stop, known, take)
        tries = 0
        while not reading.done:
            at, rest, failure = reading.at, reading.rest, None
            try:
                reading.step(self._ask(address, at, stop if rest is None else at + rest, limits), self._counter, expect)
            except Again as error:
                failure = error
            patience.progress(reading.at - at, rest)
            if failure is not None:
                tries = _check_tries(failure, tries)
                patience.wait(failure)
        return reading.known

    def fetch(self, url: str | ObjectAddress, limit: int, *, expect: Expect | None = None) -> bytes:
        """Return all of a small object; raises RemoteError, also where it has more than `limit` bytes."""
        address, parts = self._address(url), bytearray()

        def take(offset: int, data: memoryview) -> None:
            del offset
            if len(parts) + len(data) > limit:
                raise RemoteError(f"{address}: has more than {limit} bytes; it isn't what it was taken for")
            parts.extend(data)

        self.read(address, 0, None, None, take, expect=expect)
        return bytes(parts)

    def _address(self, url: str | ObjectAddress) -> ObjectAddress:
        address = url if isinstance(url, ObjectAddress) else ObjectAddress(url, self._access.place)
        address.check()
        if address.kind != self._kind:
            raise OptionsError(f"{address}: asked of a store of {self._kind}://")
        return address

    def _begin(self, address: ObjectAddress) -> tuple[Limits, Patience]:
        limits = Limits(self._own_limits)
        return limits, Patience(address, self._own_limits, limits, self._counter, self._closed)

    def _patiently(self, address: ObjectAddress, act: Callable[[Limits], Got]) -> Got:
        """Return what an act does, tried again as often as the limits allow."""
        limits, patience = self._begin(address)
        tries = 0
        while True:
            try:
                return act(limits)
            except Again as error:
                failure = error
            tries = _check_tries(failure, tries)
            patience.wait(failure)

    def _look(self, address: ObjectAddress, limits: Limits) -> Remote:
        """Ask for the first byte, not for the head: what a server says of an error comes in a body."""
        body = self._ask(address, 0, 1, limits)
        if not isinstance(body, _Body):
            return Remote(0, ranges=True)
        check_kind(address, body.headers)  # the size of what is encoded is another one
        body.read(1)
        return described(body.headers, body.size, ranges=True)

    def _ask(self, address: ObjectAddress, start: int, stop: int | None, limits: Limits) -> _Body | _Past:
        """Return what is at [start, stop) of an object; raises Again or RemoteError where nothing comes."""
        options: Any = {"range": (start, stop)} if stop is not None else {"range": {"offset": start}} if start else {}
        result = self._call(address, lambda bucket: obstore.get(bucket, address.key, options=options))
        if result is None:
            return _Past(self._look(address, limits).size if start else 0)
        self._counter.reply(_PARTIAL)
        return _Body(address, result, limits)

    def _call(self, address: ObjectAddress, act: Callable[[Any], Any]) -> Any:
        """Return what an act gives on the address's bucket; None where the server says that nothing is there at those bytes.

        Raises Again or RemoteError.
        """
        bucket, failed = self._bucket(address), None
        with _no_panic(address):
            try:
                return act(bucket)
            except _CAN_FAIL as error:
                failed = error
        found = refusal(address, str(failed), type(failed).__name__)
        self._counter.reply(found.status)
        if found.status == _UNSATISFIABLE:
            return None
        if found.credentials:
            raise _Unsigned(found.error)
        if found.denied and self._renewed(bucket):
            raise Again("the credentials were refused, and there are others now")
        raise found.error

    def _renewed(self, bucket: Any) -> bool:
        """Look for credentials again, as those of a profile may have been renewed; tells whether a bucket's are others now."""
        with self._lock:
            if all(bucket is not known for known in self._buckets.values()):
                return True  # another thread has found others since it asked
            try:
                found = access(self._kind, self._options, os.environ)
            except OptionsError:  # a file that is being written
                return False
            if found == self._access or found.place != self._access.place:
                return False
            self._access = found
            self._buckets.clear()
            return True

    def _bucket(self, address: ObjectAddress) -> Any:
        """Return obstore's own store for a bucket; raises OptionsError where its settings can't be used."""
        with self._lock:
            key = (address.account, address.bucket)
            if key not in self._buckets:
                self._buckets[key] = self._made(address)
            return self._buckets[key]

    def _made(self, address: ObjectAddress) -> Any:
        config = self._access.config
        if address.account:  # what the URL names comes before what the environment says
            config = config | {"account_name": address.account, "endpoint": f"https://{address.account}.blob.core.windows.net"}
        problem = ""
        with _no_panic(address):
            try:
                make: Any = _STORES[self._kind]
                return make(address.bucket, config=config, client_options=self._access.client, retry_config=_NO_RETRIES)
            except UnknownConfigurationKeyError as error:
                named = [name for name in self._options.config if f"'{name}'" in str(error)]
                problem = f"config: obstore knows no {named[0]!r} for {self._kind}://" if named else "config: a setting isn't known"
            except _CAN_FAIL as error:
                problem = _said_of_settings(str(error))
        raise OptionsError(f"{address}: {problem}")


class _Unsigned(Again):
    """Nobody gave credentials."""

    def __init__(self, error: Exception) -> None:
        super().__init__("no credentials could be had")
        self.error = error


@contextmanager
def _no_panic(address: ObjectAddress) -> Iterator[None]:
    """Raise OptionsError where obstore panics, which is no Exception: so it does of settings that no header can hold."""
    try:
        yield
        return
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
    raise OptionsError(
        f"{address}: obstore can't use what it was told: is there a line's end in a key, a token or the region, as where one was "
        "read from a file?"
    )


def _coding(address: ObjectAddress, given: str) -> str:
    """Return how an object's bytes are encoded where its name doesn't say so: offsets would count others than were indexed."""
    codings = [coding for part in given.lower().split(",") if (coding := part.strip()) not in ("", "identity", "aws-chunked")]
    return "" if address.key.lower().endswith((*COMPRESSED, ".br")) else ", ".join(codings)


def _check_tries(failure: Again, tries: int) -> int:
    """Return how often in a row no credentials came; raises the error for that once another try has little hope."""
    if not isinstance(failure, _Unsigned):
        return 0
    if tries + 1 >= _CREDENTIAL_TRIES:
        raise failure.error
    return tries + 1


def _said_of_settings(text: str) -> str:
    """Say which settings can't be used: never by the error's own text, which may hold them."""
    for mark, words in (
        ("Account must be specified", "the account isn't known; give AZURE_STORAGE_ACCOUNT_NAME or config={'account_name': ...}"),
        ("Invalid Access Key", "the account's key isn't one (base64); give AZURE_STORAGE_ACCOUNT_KEY as the portal shows it"),
        ("service account", "the file of the service account can't be used; is GOOGLE_APPLICATION_CREDENTIALS right?"),
        ("credentials", "the credentials given can't be used"),
    ):
        if mark.lower() in text.lower():
            return words
    return "obstore can't be set up like this; are endpoint, region and config right?"


def _version(meta: Any) -> dict[str, str]:
    """Return what tells an object's version, as HTTP's headers do; some stores leave out the quotes."""
    etag = meta["e_tag"] or ""
    return {"ETag": etag if not etag or etag.startswith(('"', "W/")) else f'"{etag}"', "Last-Modified": str(meta["last_modified"])}
