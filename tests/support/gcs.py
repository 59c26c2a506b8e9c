"""As much of Google's store, by its XML interface, as a build of small shards asks for, with generations as its conditions."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "pictures"


class Gcs(ThreadingHTTPServer):
    """The server; `objects`: key -> (bytes, metadata, generation)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[bytes, dict[str, str], int]] = {}
        self.generation = 1000
        self.lock = threading.Lock()

    def tree(self, prefix: str) -> dict[str, bytes]:
        """Return all objects below a prefix by their name behind it."""
        return {key.removeprefix(f"{prefix}/"): data for key, (data, _, _) in self.objects.items() if key.startswith(f"{prefix}/")}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gcs

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").lstrip("/")

    def do_GET(self) -> None:
        if not unquote(urlsplit(self.path).path).startswith(f"/{BUCKET}"):
            return self._answer(
                404, b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist.</Message></Error>"
            )
        if not self._key:
            return self._list(parse_qs(urlsplit(self.path).query).get("prefix", [""])[0])
        if self._key not in self.server.objects:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        data, metadata, generation = self.server.objects[self._key]
        return self._answer(200, data, **_facts(generation), **{f"x-goog-meta-{name}": value for name, value in metadata.items()})

    do_HEAD = do_GET  # noqa: N815

    def _list(self, prefix: str) -> None:
        keys = sorted(key for key in self.server.objects if key.startswith(prefix))
        folders = {prefix + key.removeprefix(prefix).partition("/")[0] + "/" for key in keys if "/" in key.removeprefix(prefix)}
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.server.objects[key][0])}</Size>"
            f'<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>"{self.server.objects[key][2]}"</ETag></Contents>'
            for key in keys
            if "/" not in key.removeprefix(prefix)
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders))
        self._answer(200, f"<ListBucketResult>{found}{common}</ListBucketResult>".encode())

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            wanted, there = self.headers.get("x-goog-if-generation-match"), self.server.objects.get(self._key)
            if wanted is not None and int(wanted) != (there[2] if there else 0):
                return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            self.server.generation += 1
            metadata = {
                k.lower().removeprefix("x-goog-meta-"): v for k, v in self.headers.items() if k.lower().startswith("x-goog-meta-")
            }
            self.server.objects[self._key] = (data, metadata, self.server.generation)
            return self._answer(200, **_facts(self.server.generation))

    def do_DELETE(self) -> None:
        self._answer(204 if self.server.objects.pop(self._key, None) else 404)

    def log_message(self, *text: object) -> None:
        """Say nothing."""


def _facts(generation: int) -> dict[str, str]:
    return {"ETag": f'"{generation}"', "Last-Modified": formatdate(usegmt=True), "x-goog-generation": str(generation)}


@contextlib.contextmanager
def gcs_server(home: Path) -> Iterator[tuple[Gcs, Path]]:
    """Run the server; yields it and a service account's file that leads to it."""
    server = Gcs()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    account = {"gcs_base_url": f"http://127.0.0.1:{server.server_address[1]}", "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    (home / "account.json").write_text(json.dumps(account))
    try:
        yield server, home / "account.json"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
