"""A server of HTTP on raw sockets that goes wrong as it is told: each request takes the next fault of a script.

In a test: `with Faulty({"/a.tar": data}, [Fault(cut=100), None, Fault(status=503)]) as server:`. As a process:

    faulty.py FOLDER [--port N] [--rate BYTES_PER_SECOND] [--share 0.3 --seed 7] [--cert FILE --key FILE]

It prints its URL, serves until its stdin ends, and then prints its log, a JSON object a line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import hashlib
import json
import os
import random
import re
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote

_PIECE_BYTES = 50_000  # never what the reader counts in
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]*)")
HTML = b"<!DOCTYPE html>\n<html><body><h1>Please log in</h1></body></html>\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes wrong with one reply; what isn't given goes well.

    delay: seconds before the reply. `raw`: sent in place of it, and the connection closed (b"": no reply at all).
    status, body, kind: another status, body and Content-Type. `redirect`: where to. `retry_after`, `headers`: further headers.
    head: the status of HEAD requests only. `gzip`: the body is encoded. `chunked`: it comes in chunks. `length`: with Content-Length.
    ranges: whether Range is honored. `content_range`: another one ("": none). `etag`, `modified`: others ("": none).
    cut: the body ends after so many bytes, and with it the connection, by a reset if `reset`; after `stall` seconds of nothing.
    rate: bytes a second. `trickle`: seconds between each byte of the headers. `early`: sent before the reply.
    """

    delay: float = 0.0
    raw: bytes | None = None
    status: int | None = None
    body: bytes | None = None
    kind: str = "application/x-tar"
    redirect: str = ""
    retry_after: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    head: int | None = None
    gzip: bool = False
    chunked: bool = False
    length: bool = True
    ranges: bool = True
    content_range: str | None = None
    etag: str | None = None
    modified: str | None = None
    cut: int | None = None
    reset: bool = False
    stall: float = 0.0
    rate: float | None = None
    trickle: float = 0.0
    early: bytes = b""


WELL = Fault()
Script = Iterable[Fault | None] | Callable[["Request"], Fault | None]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came; names of headers in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    connection: int = 0
    proxied: bool = False


class Bucket:
    """A link of so many bytes a second, however many share it."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free = rate, threading.Lock(), time.monotonic()

    def wait(self, size: int) -> float:
        """Return the seconds until `size` bytes have gone through."""
        with self._lock:
            self._free = max(self._free, time.monotonic() - 0.05) + size / self._rate
            return max(0.0, self._free - time.monotonic())


class Taken:
    """What a read gives, held to its promise: each byte once and in order."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.data = start, bytearray()

    def __call__(self, offset: int, data: memoryview) -> None:
        assert len(data), "nothing was delivered"
        assert offset == self.start + len(self.data), "bytes are delivered twice or out of order"
        self.data += data


class _GoneError(Exception):
    """This connection is to be closed."""


@dataclass
class Content:
    """A file: bytes in memory, or where they lie."""

    data: bytes | Path
    modified: str = field(default_factory=lambda: formatdate(1_700_000_000, usegmt=True))

    @functools.cached_property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.stat().st_size

    @functools.cached_property
    def etag(self) -> str:
        if isinstance(self.data, bytes):
            return f'"{hashlib.sha256(self.data).hexdigest()[:16]}"'
        return f'"{self.data.stat().st_mtime_ns:x}-{self.size:x}"'

    def pieces(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes [start, stop)."""
        if isinstance(self.data, bytes):
            yield from (self.data[at : min(at + _PIECE_BYTES, stop)] for at in range(start, stop, _PIECE_BYTES))
            return
        with self.data.open("rb") as file:
            file.seek(start)
            while start < stop and (piece := file.read(min(_PIECE_BYTES, stop - start))):
                start += len(piece)
                yield piece


class Faulty:
    """The server, in threads; `log` holds the requests that came. Requests beyond the script go well, or as `otherwise` says.

    It is a proxy too: absolute targets are served as its own, CONNECT is connected through.
    """

    def __init__(
        self,
        files: Mapping[str, bytes] | Path,
        script: Script = (),
        *,
        otherwise: Fault = WELL,
        rate: float | None = None,
        tls: ssl.SSLContext | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        self.files = files if isinstance(files, Path) else {name: Content(data) for name, data in files.items()}
        self._script, self._otherwise, self._tls = script if callable(script) else iter(script), otherwise, tls
        self._bucket = Bucket(rate) if rate else None
        self.log: list[Request] = []
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._open = set[socket.socket]()
        self._threads = list[threading.Thread]()
        self._connections = 0
        self.host, self.port = host, port
        self._listener = self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def origin(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.host}:{self.port}"

    def url(self, target: str) -> str:
        return self.origin + target

    @property
    def connections(self) -> int:
        """How many were opened."""
        return self._connections

    def _listen(self) -> socket.socket:
        listener = socket.create_server((self.host, self.port), backlog=128)
        self.port = listener.getsockname()[1]
        self._start(self._accept, listener)
        return listener

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def refuse(self, seconds: float) -> None:
        """Refuse connections for a while; those that stand are cut."""
        self._shut(self._listener)
        self._cut()

        def back() -> None:
            if not self._stopped.wait(seconds):
                self._listener = self._listen()

        self._start(back)

    @staticmethod
    def _shut(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # close alone wouldn't wake the thread that waits in accept
        sock.close()

    def _cut(self) -> None:
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections and threads."""
        self._stopped.set()
        self._shut(self._listener)
        self._cut()
        for thread in self._threads:
            thread.join(10)
        self._shut(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections += 1
                number = self._connections
            self._start(self._serve, sock, number)

    def _serve(self, sock: socket.socket, number: int) -> None:
        with self._lock:
            self._open.add(sock)
        plain = sock
        try:
            if self._tls:
                sock = self._tls.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._open.add(sock)
            elif sock.recv(1, socket.MSG_PEEK) == b"\x16":  # TLS, on a port where there is none
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                return
            with sock.makefile("rb") as lines:
                while request := self._request(lines, number):
                    with self._lock:
                        self.log.append(request)
                        fault = (self._script(request) if callable(self._script) else next(self._script, None)) or self._otherwise
                    if request.method == "CONNECT" and fault.raw is None:
                        self._connect_through(sock, request)
                    self._answer(sock, request, fault)
        except (OSError, _GoneError, ValueError):
            pass
        finally:
            with self._lock:
                self._open -= {plain, sock}
            sock.close()
            plain.close()

    def _request(self, lines: Iterable[bytes], number: int) -> Request | None:
        head = list[str]()
        for line in lines:
            if line in (b"\r\n", b"\n"):
                break
            head.append(line.decode("latin-1").rstrip("\r\n"))
        if not head:
            return None
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        own = re.sub("^https?://[^/]*", "", target)
        return Request(method, own, headers, number, proxied=own != target)

    def _connect_through(self, sock: socket.socket, request: Request) -> None:
        host, _, port = request.target.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as there:
            sock.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            with self._lock:
                self._open.add(there)

            def pump(source: socket.socket, sink: socket.socket) -> None:
                with contextlib.suppress(OSError):
                    while data := source.recv(_PIECE_BYTES):
                        sink.sendall(data)
                for end in (source, sink):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

            back = threading.Thread(target=pump, args=(there, sock), daemon=True)
            back.start()
            pump(sock, there)
            back.join(10)
            with self._lock:
                self._open.discard(there)
        raise _GoneError

    def _find(self, target: str) -> Content | None:
        name = unquote(target.partition("?")[0])
        if isinstance(self.files, Path):
            path = self.files / name.lstrip("/")
            return Content(path, formatdate(path.stat().st_mtime, usegmt=True)) if path.is_file() else None
        return self.files.get(name)

    def _answer(self, sock: socket.socket, request: Request, fault: Fault) -> None:
        self._sleep(fault.delay)
        if fault.raw is not None:
            sock.sendall(fault.raw)
            self._end(sock, fault)
        content = self._find(request.target)
        if fault.body is not None:
            content = Content(gzip.compress(fault.body) if fault.gzip else fault.body)
        elif fault.gzip and content:
            content = Content(gzip.compress(b"".join(content.pieces(0, content.size))))
        status, start, stop = self._status(request, fault, content)
        if status not in (200, 206) and fault.body is None:
            content, start, stop = Content(b""), 0, 0
        assert content
        headers = self._headers(request, fault, content, (status, start, stop))
        closing = not fault.length and not fault.chunked
        lines = [f"HTTP/1.{0 if closing else 1} {status} Because", *(f"{name}: {value}" for name, value in headers)]
        sock.sendall(fault.early)
        text = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        for part in [text[at : at + 1] for at in range(len(text))] if fault.trickle else [text]:
            self._sleep(fault.trickle)
            sock.sendall(part)
        if request.method != "HEAD":
            self._body(sock, fault, content.pieces(start, stop))
        if closing:
            self._end(sock, fault)

    def _status(self, request: Request, fault: Fault, content: Content | None) -> tuple[int, int, int]:
        """Return the status and the range of the body."""
        size = content.size if content else 0
        if request.method == "HEAD" and fault.head:
            return fault.head, 0, size
        if fault.redirect:
            return fault.status or 302, 0, 0
        if fault.status:
            return fault.status, 0, size
        if content is None:
            return 404, 0, 0
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        current = (
            content.etag if fault.etag is None else fault.etag,
            content.modified if fault.modified is None else fault.modified,
        )
        same = request.headers.get("if-range", current[0]) in current
        if asked is None or not fault.ranges or not same or fault.body is not None:
            return 200, 0, size
        start, stop = int(asked[1]), min(int(asked[2] or size) + 1, size)
        return (206, start, stop) if start < stop else (416, 0, 0)

    def _headers(self, request: Request, fault: Fault, content: Content, span: tuple[int, int, int]) -> list[tuple[str, str]]:
        status, start, stop = span
        found = self._find(request.target)
        headers = [("Content-Type", fault.kind)]
        if status in (200, 206):
            etag, modified = (content.etag, content.modified) if fault.body is None else ("", "")
            etag, modified = etag if fault.etag is None else fault.etag, modified if fault.modified is None else fault.modified
            headers += [("ETag", etag)] * bool(etag) + [("Last-Modified", modified)] * bool(modified)
            headers += [("Accept-Ranges", "bytes")] * fault.ranges
        if status == 206 and fault.content_range != "":
            headers.append(("Content-Range", fault.content_range or f"bytes {start}-{stop - 1}/{content.size}"))
        if status == 416:
            headers.append(("Content-Range", f"bytes */{found.size if found else 0}"))
        if fault.chunked:
            headers.append(("Transfer-Encoding", "chunked"))
        elif fault.length:
            headers.append(("Content-Length", str(stop - start)))
        headers += [("Content-Encoding", "gzip")] * fault.gzip + [("Location", fault.redirect)] * bool(fault.redirect)
        return headers + [("Retry-After", fault.retry_after)] * bool(fault.retry_after) + list(fault.headers)

    def _body(self, sock: socket.socket, fault: Fault, pieces: Iterator[bytes]) -> None:
        left, bucket = fault.cut, Bucket(fault.rate) if fault.rate else None
        for whole in pieces:
            piece = whole if left is None else whole[:left]
            for link in (bucket, self._bucket):
                self._sleep(link.wait(len(piece)) if link else 0.0)
            if piece:
                sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if fault.chunked else piece)
            if left is not None:
                left -= len(piece)
                if left <= 0:
                    break
        if left is not None:
            self._sleep(fault.stall)
            self._end(sock, fault)
        if fault.chunked:
            sock.sendall(b"0\r\n\r\n")

    def _end(self, sock: socket.socket, fault: Fault) -> None:
        if fault.reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise _GoneError

    def _sleep(self, seconds: float) -> None:
        if seconds > 0 and self._stopped.wait(seconds):
            raise _GoneError


def some_faults(share: float, seed: int, size: int) -> Callable[[Request], Fault | None]:
    """Return a script by which that share of replies goes wrong, none of them for good."""
    draw = random.Random(seed)
    kinds: Sequence[Callable[[], Fault]] = (
        lambda: Fault(cut=draw.randrange(size)),
        lambda: Fault(cut=draw.randrange(size), reset=True),
        lambda: Fault(cut=draw.randrange(size), chunked=True),
        lambda: Fault(raw=b""),
        lambda: Fault(status=draw.choice((500, 502, 503, 504, 429)), body=b"<html>busy</html>", kind="text/html"),
        lambda: Fault(status=503, retry_after="0"),
        lambda: Fault(ranges=False),
        lambda: Fault(content_range=draw.choice(("", "bytes 1-2/3"))),
        lambda: Fault(body=HTML, kind="text/html"),
        lambda: Fault(body=b""),
        lambda: Fault(gzip=True),
    )
    return lambda request: draw.choice(kinds)() if draw.random() < share else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a folder until stdin ends."""
    parser = argparse.ArgumentParser(description="Serve a folder over HTTP, with faults.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--share", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cut-below", type=int, default=2**20)
    parser.add_argument("--cert")
    parser.add_argument("--key")
    given = parser.parse_args(arguments)
    tls = None
    if given.cert:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(given.cert, given.key)
    script = some_faults(given.share, given.seed, given.cut_below)
    with Faulty(given.folder, script, rate=given.rate, tls=tls, port=given.port) as server:
        sys.stdout.write(server.origin + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    for request in server.log:
        sys.stdout.write(json.dumps(asdict(request)) + os.linesep)


if __name__ == "__main__":
    main()
