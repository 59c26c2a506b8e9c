"""Reads what lies at URLs of HTTP and HTTPS, whatever the network does: the network alone, no cache and no shard's format."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from pipeline.errors import OptionsError, RemoteError
from pipeline.stores.http.address import Address
from pipeline.stores.http.connections import Connections, Reply
from pipeline.stores.http.counts import Counter, Counts
from pipeline.stores.http.credentials import Credentials, Headers
from pipeline.stores.http.options import HttpOptions
from pipeline.stores.http.reading import Expect, Reading, Take
from pipeline.stores.http.replies import Remote, check_kind, content_range, described, refuse, unsatisfied
from pipeline.stores.http.retry import Again, Limits, Patience

_OK, _PARTIAL, _UNSATISFIABLE = 200, 206, 416
_REDIRECTS = (301, 302, 303, 307, 308)
_NO_HEAD = (400, 403, 405, 501)  # URLs that are signed for GET answer 403 to HEAD
_ERROR_BYTES = 8192  # of an error's body, to find its code in


class HttpStore:
    """Files behind URLs; for any number of threads at once, but of one process: a fork makes its own."""

    def __init__(self, options: HttpOptions | None = None) -> None:
        """Look up credentials, proxies and certificates; raises OptionsError where they can't be used."""
        self._options = options or HttpOptions()
        self._counter, self._closed = Counter(), threading.Event()
        self._credentials = Credentials(self._options)
        self._connections = Connections(self._options, self._counter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End waits between tries, and the connections that nobody reads from; a second call does nothing."""
        self._closed.set()
        self._connections.close()

    @property
    def counts(self) -> Counts:
        """What the network was asked for, up to now."""
        return self._counter.now()

    def look(self, url: str | Address) -> Remote:
        """Return what lies at a URL; raises RemoteError."""
        url = _address(url)
        limits, patience = self._begin(url)
        while True:
            try:
                return self._look(url, limits)
            except Again as error:
                failure = error
            patience.wait(failure)

    def names(self, url: str | Address) -> dict[str, Remote]:
        """Raise RemoteError: HTTP knows no folders."""
        raise RemoteError(
            f"{_address(url)}: a folder can't be listed over HTTP; name its manifest (<split>-shardindex.json) or tars"
        )

    def read(
        self, url: str | Address, start: int, stop: int | None, known: Remote | None, take: Take, *, expect: Expect | None = None
    ) -> Remote:
        """Give `take(offset, bytes)` the bytes [start, stop) forward, each exactly once; returns what is known of the object.

        `stop` None: to its end. `known`: what `look` or another read returned; another version is a ChangedError. The bytes are
        `take`'s during the call only; what it raises ends the read. `expect` tells whether an object's first bytes (up to 512) are
        what was asked for; without it a page of HTML or XML isn't. Raises RemoteError.
        """
        if start < 0 or (stop is not None and stop < start):
            raise OptionsError(f"start={start}, stop={stop}: a range of bytes, 0 <= start <= stop")
        url = _address(url)
        limits, patience = self._begin(url)
        reading = Reading(url, start, stop, known, take)
        while not reading.done:
            at, rest, failure = reading.at, reading.rest, None
            try:
                with self._ask("GET", url, Headers(reading.headers()), limits, (_OK, _PARTIAL, _UNSATISFIABLE)) as reply:
                    reading.step(reply, self._counter, expect)
            except Again as error:
                failure = error
            patience.progress(reading.at - at, rest)
            if failure is not None:
                patience.wait(failure)
        return reading.known

    def fetch(self, url: str | Address, limit: int, *, expect: Expect | None = None) -> bytes:
        """Return all of a small file; raises RemoteError, also where it has more than `limit` bytes."""
        url, parts = _address(url), bytearray()

        def take(offset: int, data: memoryview) -> None:
            if len(parts) + len(data) > limit:
                raise RemoteError(f"{url}: has more than {limit} bytes; it isn't what it was taken for")
            parts.extend(data)

        self.read(url, 0, None, None, take, expect=expect)
        return bytes(parts)

    def _begin(self, address: Address) -> tuple[Limits, Patience]:
        address.check()
        limits = Limits(self._options)
        return limits, Patience(address, self._options, limits, self._counter, self._closed)

    def _look(self, address: Address, limits: Limits) -> Remote:
        with self._ask("HEAD", address, Headers(), limits, (_OK, *_NO_HEAD)) as reply:
            if reply.status == _OK:
                check_kind(address, reply.headers)
                size = reply.headers.get("Content-Length", "").strip()[:20]
                ranges = reply.headers.get("Accept-Ranges", "").strip().lower()
                # Many can read from the middle and don't say so; some say 0 for what they only know once they send it.
                if size.isdecimal() and int(size) and ranges in ("bytes", "none"):
                    return described(reply.headers, int(size), ranges == "bytes")
        with self._ask("GET", address, Headers({"Range": "bytes=0-0"}), limits, (_OK, _PARTIAL, _UNSATISFIABLE)) as reply:
            if reply.status == _UNSATISFIABLE:
                if unsatisfied(reply.headers) != 0:
                    raise Again("the server answered 416 to the first byte")
                return described(reply.headers, 0, ranges=True)
            check_kind(address, reply.headers)
            if reply.status == _OK:
                if reply.length == 0:
                    raise Again("the server answered 200 with an empty body")
                return described(reply.headers, reply.length, ranges=False)
            found = content_range(reply.headers)
            if found is None or found[:2] != (0, 1):
                raise Again("the server answered 206 with a Content-Range that is missing or makes no sense")
            reply.read(1)
            return described(reply.headers, found[2], ranges=True)

    def _ask(self, method: str, address: Address, headers: Headers, limits: Limits, wanted: tuple[int, ...]) -> Reply:
        """Return the reply with one of the wanted statuses, after redirects; raises Again or RemoteError for any other."""
        here, login = address, self._credentials.of(address)
        headers["Accept-Encoding"] = "identity"
        for _ in range(self._options.max_redirects + 1):
            own = here.origin == address.origin
            reply = self._connections.ask(method, here, Headers(headers | (login if own else {})), limits)
            if reply.status in wanted:
                return reply
            with reply:
                if reply.status not in _REDIRECTS:
                    refuse(here, reply.status, reply.headers, _start_of(reply, limits), _note(here, own, bool(login)))
                here = _next(here, reply)
        raise RemoteError(
            f"{address}: was redirected {self._options.max_redirects + 1} times, last to {here}: in a circle? Name the URL where "
            "the data lies, or raise max_redirects"
        )


def _note(here: Address, own: bool, login: bool) -> str:
    """Say of a refusal what was sent to whom."""
    if not own:
        return f"; it was redirected to {here.scheme}://{here.authority}, which gets no credentials: they are for where it began"
    if login:
        return "; credentials were sent: are they right, and allowed to read this?"
    return "; no credentials were sent: give them in HttpOptions, as user:password@ in the URL, or in ~/.netrc"


def _address(url: str | Address) -> Address:
    return url if isinstance(url, Address) else Address(url)


def _start_of(reply: Reply, limits: Limits) -> bytes:
    """Return the beginning of an error's body, as far as it comes in the time of one wait."""
    body, until = b"", limits.waiting()
    try:
        while len(body) < _ERROR_BYTES and time.monotonic() < until and (piece := reply.read(_ERROR_BYTES - len(body))):
            body += piece
    except Again:
        pass
    return body


def _next(here: Address, reply: Reply) -> Address:
    """Return where a redirect leads; raises RemoteError where it may not be followed."""
    there = here.follow(reply.headers.get("Location", ""))
    try:
        there.check()
    except RemoteError:
        lost = True
    else:
        lost = False
    if lost:
        raise RemoteError(f"{here}: {reply.status}: redirects to nowhere (no Location that is a URL of HTTP); is the URL right?")
    if here.scheme == "https" and there.scheme == "http":
        raise RemoteError(
            f"{here}: {reply.status}: redirects to {there}, without the protection of https, so it isn't followed; name that URL "
            "yourself if you trust the way to it"
        )
    return there
