"""Opens connections and keeps them for the next request, no wait in them without an end.

urllib3's own pools aren't used: they rewrite what a URL quotes (%2f becomes %2F), log queries, and set a limit only to each single
byte of a header or a chunk's size, so that a server which sends one every few seconds holds its reader for hours.
"""

from __future__ import annotations

import functools
import http.client
import io
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import urllib3.util
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HeaderParsingError, ProtocolError, ReadTimeoutError
from urllib3.response import HTTPResponse
from urllib3.util.response import assert_header_parsing

from pipeline.errors import OptionsError, RemoteError
from pipeline.stores.http.address import Address
from pipeline.stores.http.causes import CAN_FAIL, hopeless, words
from pipeline.stores.http.counts import Counter
from pipeline.stores.http.credentials import Headers
from pipeline.stores.http.options import HttpOptions
from pipeline.stores.http.retry import Again, Limits

_SKIPPED = range(102, 200)  # statuses that aren't the reply yet: 101 is one
_KEPT = 16  # idle connections of an origin: as many readers as are foreseen

Origin = tuple[str, str, int]


class _Deadline:
    """Until when the bytes that are waited for must come; the response that they are of, and its socket."""

    until = 0.0
    response: _Response | None = None
    sock: socket.socket | None = None


class _Deadlined(io.RawIOBase):
    """A socket's bytes up to a deadline that all reads share, however many bytes come one by one."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: _Deadline) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:  # a writable buffer has no type before Python 3.12
        left = self._deadline.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that is read up to a deadline, and whose headers are whole."""

    def __init__(
        self, deadline: _Deadline, sock: socket.socket, debuglevel: int = 0, method: str | None = None, url: str | None = None
    ) -> None:
        super().__init__(sock, debuglevel, method, url)
        self.fp = io.BufferedReader(_Deadlined(self.fp.detach(), sock, deadline))
        deadline.response, deadline.sock = self, sock

    def begin(self) -> None:
        """Read the headers; urllib3 only logs what is wrong with them, with the URL's query, and loses those that follow."""
        super().begin()
        try:
            assert_header_parsing(self.msg)
        except HeaderParsingError:
            raise http.client.HTTPException from None
        # Raised from here the response is closed; from urllib3, which looks at this too, it would stay open.
        if len({length.strip() for header in self.msg.get_all("Content-Length", []) for length in header.split(",")}) > 1:
            raise http.client.HTTPException

    def _read_status(self) -> tuple[str, int, str]:
        """Read the reply's status; what comes before it (102 Processing, 103 Early Hints) is skipped, as http.client does 100."""
        while True:
            status: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]
            if not _SKIPPED.start <= status[1] < _SKIPPED.stop:
                return status
            http.client.parse_headers(self.fp)

    def receive(self, buffer: memoryview) -> int | None:
        """Read what has come, at least a byte but at the end, as `read1` does; None where nobody says of how many bytes it is."""
        if self.isclosed():
            return 0
        if self.length is None:
            return None
        size = int(self.fp.readinto1(buffer[: self.length]))
        self.length -= size
        if not size or not self.length:
            self._close_conn()  # type: ignore[attr-defined]
        return size


class _Line:
    """A connection and its deadline."""

    def __init__(self, connection: HTTPConnection, origin: Origin, forwards: bool) -> None:
        self.connection, self.origin, self.forwards, self.deadline = connection, origin, forwards, _Deadline()
        connection.response_class = functools.partial(_Response, self.deadline)  # type: ignore[assignment]


class Reply:
    """The reply to one request; ends with `close`, which keeps the connection if the body was read to its end."""

    def __init__(self, pool: Connections, line: _Line, response: HTTPResponse, limits: Limits) -> None:
        self._pool, self._line, self._response, self._limits = pool, line, response, limits
        if response.length_remaining == 0:
            response.read1(1, decode_content=False)  # nothing comes, and http.client takes note of the end only so
        self._ended = bool(response.isclosed())
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self.chunked = bool(response.chunked)
        self._body, self._buffer, self._closed = line.deadline.response, bytearray(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def length(self) -> int | None:
        """How many bytes of the body are still to come, None where the reply doesn't say."""
        return self._response.length_remaining

    def read(self, size: int) -> bytes | memoryview:
        """Return up to `size` bytes as soon as there are some, none at the end; raises Again when they don't come.

        They are the caller's until the next call.
        """
        self._line.deadline.until = self._limits.waiting()
        failed: Exception | None = None
        try:
            data = self._receive(size)
        except CAN_FAIL as error:
            failed = error
        if failed is not None:
            raise Again(words(failed))
        self._ended = self._response.isclosed()
        return data

    def _receive(self, size: int) -> bytes | memoryview:
        """Read into memory that is used again and again: what is allocated anew for each piece costs its pages anew, too."""
        assert self._body is not None
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        came = self._body.receive(memoryview(self._buffer)[:size])
        if came is None:
            return self._response.read1(size, decode_content=False) or b""
        if not came and self._body.length:
            raise ProtocolError("ended") from http.client.IncompleteRead(b"")
        return memoryview(self._buffer)[:came]

    def close(self) -> None:
        """Give the connection back, or close it if something of the body is still to come; a second call does nothing."""
        self._response.close()
        if self._ended and not self._line.connection.is_closed:
            self._pool.put(self._line)
        elif not self._closed:
            self._pool.drop(self._line)
        self._ended, self._closed = False, True


class Connections:
    """Connections by origin; each is one reader's at a time."""

    def __init__(self, options: HttpOptions, counter: Counter) -> None:
        """Look up proxies and certificates; raises OptionsError where they can't be used."""
        self.counter = counter
        self._lock, self._idle, self._closed = threading.Lock(), defaultdict[Origin, list[_Line]](list), False
        self._used = set[_Line]()
        self._proxies = urllib.request.getproxies()
        self._trust = options.ca or os.environ.get("REQUESTS_CA_BUNDLE") or ""
        self._context = _context(self._trust) if self._trust else None  # the system's takes 20 ms to load: once it is needed

    def ask(self, method: str, address: Address, headers: Headers, limits: Limits) -> Reply:
        """Send a request and return the reply's beginning; raises Again where none comes, RemoteError where none can."""
        line, used = self._take(address), True
        if line is None:
            line, used = self._open(address), False
        self._use(line)
        failed = self._exchange(line, method, address, headers, limits)
        if used and not isinstance(failed, Reply) and not isinstance(failed, TimeoutError | ReadTimeoutError):
            line = self._use(self._open(address))  # the server had closed it as the request went out: that is no failure
            failed = self._exchange(line, method, address, headers, limits)
        if isinstance(failed, Reply):
            self.counter.reply(failed.status)
            return failed
        self.counter.reply(0)
        proxy = self._proxy(address)
        by = f", by way of the proxy {proxy.scheme}://{proxy.authority} that the environment names" if proxy else ""
        if reason := hopeless(failed):
            raise RemoteError(f"{address}: {reason}{by}")
        raise Again(words(failed) + by)

    def _exchange(self, line: _Line, method: str, address: Address, headers: Headers, limits: Limits) -> Reply | Exception:
        """Return the reply, or what went wrong: raised from here it would show urllib3's frames, and their locals the secrets."""
        connection, done = line.connection, False
        try:
            if connection.is_closed:
                line.deadline.until = limits.connecting()
                connection.timeout = max(line.deadline.until - time.monotonic(), 0.001)
                connection.connect()
                self.counter.connection()
            line.deadline.until = limits.waiting()
            connection.timeout = max(line.deadline.until - time.monotonic(), 0.001)
            target = f"{address.scheme}://{address.authority}{address.target}" if line.forwards else address.target
            if line.forwards:
                headers = Headers(headers | self._proxy_headers(address))
            connection.request(method, target, headers=headers, preload_content=False, decode_content=False)
            reply = Reply(self, line, connection.getresponse(), limits)
            done = True
        except CAN_FAIL as error:
            return error
        finally:
            if not done:
                self.drop(line)
        return reply

    def _use(self, line: _Line) -> _Line:
        """Say that a reader waits on a connection, so that `close` ends its wait."""
        with self._lock:
            self._used.add(line)
        return line

    def drop(self, line: _Line) -> None:
        """Close a connection that a reader used."""
        with self._lock:
            self._used.discard(line)
        line.connection.close()

    def _take(self, address: Address) -> _Line | None:
        """Return an idle connection to an origin that is still open, the last used first."""
        while True:
            with self._lock:
                lines = self._idle[address.origin]
                line = lines.pop() if lines else None
            if line is None or line.connection.is_connected:
                return line
            line.connection.close()

    def put(self, line: _Line) -> None:
        """Keep a connection for the next request."""
        with self._lock:
            self._used.discard(line)
            lines = self._idle[line.origin]
            if keep := not self._closed and len(lines) < _KEPT:
                lines.append(line)
        if not keep:
            line.connection.close()

    def close(self) -> None:
        """Close what is idle, from now on what becomes so, and end the waits of those who read."""
        with self._lock:
            self._closed = True
            lines = [line for group in self._idle.values() for line in group]
            self._idle.clear()
            sockets = [line.deadline.sock or line.connection.sock for line in self._used]
        for line in lines:
            line.connection.close()
        for sock in filter(None, sockets):
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS' own would tear down what its reader is within

    def _open(self, address: Address) -> _Line:
        """Return a connection that isn't connected yet, straight or by way of the proxy that the environment names."""
        proxy = self._proxy(address)
        host, port = (proxy.host.strip("[]"), proxy.port) if proxy else (address.host.strip("[]"), address.port)
        if address.scheme == "http":
            return _Line(HTTPConnection(host, port), address.origin, proxy is not None)
        with self._lock:
            self._context = self._context or _context("")
        connection = HTTPSConnection(host, port, ssl_context=self._context)
        if proxy:
            connection.set_tunnel(address.host.strip("[]"), address.port, self._proxy_headers(address), "http")
        return _Line(connection, address.origin, False)

    def _proxy(self, address: Address) -> Address | None:
        url = self._proxies.get(address.scheme) or self._proxies.get("all")
        if not url or urllib.request.proxy_bypass(address.authority):
            return None
        proxy = Address(url if "://" in url else f"http://{url}")
        if proxy.scheme != "http" or proxy.host == "":
            raise OptionsError(
                f"the environment's proxy for {address.scheme} ({proxy}) can't be used: only http://host:port can; "
                "set HTTP_PROXY and HTTPS_PROXY so, or list the server in NO_PROXY"
            )
        return proxy

    def _proxy_headers(self, address: Address) -> Headers:
        login = proxy.login if (proxy := self._proxy(address)) else None
        return Headers(urllib3.util.make_headers(proxy_basic_auth=":".join(login)) if login else {})


def _context(trust: str) -> ssl.SSLContext:
    """Return how servers prove who they are; SSL_CERT_FILE and SSL_CERT_DIR are OpenSSL's own and followed by it."""
    try:
        if trust and Path(trust).is_dir():
            return ssl.create_default_context(capath=trust)
        return ssl.create_default_context(cafile=trust or None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise OptionsError(
            f"{trust}: these certificates can't be used ({reason}); name a PEM file, or a folder of them, by ca= or "
            "REQUESTS_CA_BUNDLE"
        ) from None
