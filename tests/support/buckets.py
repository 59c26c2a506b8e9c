"""A real S3 server with a bucket, Azurite where it is installed, and a gate before it that counts what is asked, slows it down or stays shut."""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

BUCKET = "pictures"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key-for-tests", "AWS_SECRET_ACCESS_KEY": "secret-for-tests", "AWS_REGION": "us-east-1"}


class S3:
    """The server's bucket as its own client sees it."""

    def __init__(self, origin: str) -> None:
        import boto3

        self.origin = origin
        keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
        self.client: Any = boto3.client("s3", endpoint_url=origin, **keys)
        self.client.create_bucket(Bucket=BUCKET)

    def tree(self, prefix: str) -> dict[str, bytes]:
        """Return all objects below a prefix by their name behind it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        keys = [found["Key"] for page in pages for found in page.get("Contents", [])]
        return {key.removeprefix(f"{prefix}/"): self.get(key) for key in keys}

    def get(self, key: str) -> bytes:
        """Return an object's bytes."""
        return bytes(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def put(self, key: str, data: bytes = b"mine") -> None:
        """Write an object."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def unfinished(self) -> list[Any]:
        """Return the uploads in parts that were neither completed nor aborted."""
        return list(self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))


@contextlib.contextmanager
def s3_server(home: Path) -> Iterator[S3]:
    """Run moto's server, a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with (home / "moto.log").open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None, (home / "moto.log").read_text()
            time.sleep(0.05)
        yield S3(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(10)


class Azurite:
    """Azurite's blobs, asked with its well-known account."""

    account, key = "devstoreaccount1", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def __init__(self, port: int) -> None:
        self.origin = f"http://127.0.0.1:{port}/{self.account}"
        self._server = ("127.0.0.1", port)

    def ask(self, method: str, path: str, query: Sequence[tuple[str, str]] = ()) -> tuple[int, bytes]:
        """Send a signed request; return status and body."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        signed = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        resource = f"/{self.account}/{self.account}{path}" + "".join(f"\n{name}:{value}" for name, value in sorted(query))
        text = f"{method}{chr(10) * 12}{signed}{resource}"
        digest = base64.b64encode(hmac.digest(base64.b64decode(self.key), text.encode(), "sha256")).decode()
        connection = http.client.HTTPConnection(*self._server)
        try:
            url = f"/{self.account}{path}" + ("?" + urlencode(query) if query else "")
            connection.request(method, url, headers=headers | {"Authorization": f"SharedKey {self.account}:{digest}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def tree(self, container: str, prefix: str) -> dict[str, bytes]:
        """Return all blobs below a prefix by their name behind it."""
        query = [("restype", "container"), ("comp", "list"), ("prefix", f"{prefix}/")]
        names = re.findall(r"<Name>([^<]*)</Name>", self.ask("GET", f"/{container}", query)[1].decode())
        return {name.removeprefix(f"{prefix}/"): self.ask("GET", f"/{container}/{name}")[1] for name in names}


AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")


@contextlib.contextmanager
def azurite_server(home: Path, container: str) -> Iterator[Azurite]:
    """Run azurite, with a container."""
    assert AZURITE is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        AZURITE,
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--location",
        str(home),
        "--skipApiVersionCheck",
        "--silent",
    ]
    server = subprocess.Popen(command)
    azurite = Azurite(port)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                status, body = azurite.ask("PUT", f"/{container}", [("restype", "container")])
                assert status == 201, body
                break
            assert server.poll() is None
            time.sleep(0.05)
        yield azurite
    finally:
        server.terminate()
        server.wait(10)


class Gate:
    """A relay to the server. `shuts_after`: bytes to the server until it breaks all connections, and opens none (None: never).

    `conditions`: False, and a request with one is answered by 501, as some stores do.
    `breaks_every`: so many bytes, and all connections break; new ones are taken.
    """

    def __init__(self, origin: str) -> None:
        self._to = ("127.0.0.1", int(origin.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.origin = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[str] = []  # "PUT /bucket/key", ...
        self.sent = 0
        self.shuts_after: int | None = None
        self.breaks_every: int | None = None
        self.broken = 0
        self.conditions = True
        self.delay_seconds = 0.0
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *error: object) -> None:
        self.shuts_after = 0
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break()

    @property
    def shut(self) -> bool:
        """Whether nothing passes."""
        return self.shuts_after is not None and self.sent >= self.shuts_after

    def puts(self, ending: str) -> list[str]:
        """Return the writes of objects whose names end so."""
        return [asked for asked in self.asked if asked.startswith("PUT ") and asked.partition("?")[0].endswith(ending)]

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.shut:
                client.close()
                continue
            server = socket.create_connection(self._to)
            self._open += [client, server]
            for source, target, counted in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass, args=(source, target, counted), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted:
                    asked = re.findall(rb"(?:GET|PUT|HEAD|DELETE|POST) /\S*(?= HTTP/1.1\r\n)", data)
                    self.asked += [line.decode() for line in asked]
                    self.sent += len(data)
                    if any(line.startswith(b"PUT ") for line in asked):
                        time.sleep(self.delay_seconds)
                    due = self.breaks_every is not None and self.sent // self.breaks_every > self.broken
                    self.broken += due
                    if not self.conditions and re.search(rb"(?i)\r\nif-(none-)?match:", data):
                        source.sendall(b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                        source.shutdown(socket.SHUT_RDWR)
                        return
                    if self.shut or due:
                        self._break()
                        return
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _break(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open = []
