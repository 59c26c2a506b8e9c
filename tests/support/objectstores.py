"""Real object stores over sockets, for as long as a `with` block runs: moto's server for S3, azurite for Azure where it is there.

azurite is looked for on the PATH; AZURITE names another one (`npm install azurite`, node_modules/.bin/azurite-blob).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from pipeline import ObjectOptions

AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")
_SOMEBODY = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"}
_IAM = {name: text.replace("/s3/", "/iam/") for name, text in _SOMEBODY.items()} | {
    "Content-Type": "application/x-www-form-urlencoded"
}
_MAY_ALL = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


@dataclass(frozen=True)
class S3:
    """A server of S3 that checks signatures, and the keys of one who may do all."""

    port: int
    key: str
    secret: str

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def put(self, bucket: str, files: Mapping[str, bytes]) -> None:
        """Make a bucket, and put objects into it by their keys."""
        with self.trusting():
            _ask(self.port, "PUT", f"/{bucket}", headers=_SOMEBODY, may=(200, 409))  # it may be there
            for key, data in files.items():
                _ask(self.port, "PUT", f"/{bucket}/{quote(key)}", data, _SOMEBODY)

    @contextlib.contextmanager
    def trusting(self) -> Iterator[None]:
        """Check no signatures meanwhile."""
        _ask(self.port, "POST", "/moto-api/reset-auth", b"1000000")  # so many requests needn't be signed
        try:
            yield
        finally:
            _ask(self.port, "POST", "/moto-api/reset-auth", b"0")

    def put_folder(self, folder: Path, bucket: str, prefix: str = "") -> None:
        """Put a folder's files into a bucket."""
        self.put(bucket, {prefix + path.name: path.read_bytes() for path in folder.iterdir()})

    def options(self, **given: Any) -> ObjectOptions:
        """Return options of one who may read all, with little patience."""
        keys = {"access_key_id": self.key, "secret_access_key": self.secret}
        return quick(**{"endpoint": self.origin, "region": "us-east-1", "config": keys, **given})


def quick(**given: Any) -> ObjectOptions:
    """Return options with little patience, for endpoints without TLS."""
    patience = {"first_wait_seconds": 0.002, "longest_wait_seconds": 0.02, "attempts": 4, "idle_seconds": 5}
    return ObjectOptions(**{"allow_http": True, **patience, **given})


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A server of S3; skips where moto isn't installed."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask_cors") is None:
        pytest.skip("needs moto, flask and flask-cors")
    port = free_port()
    command = [sys.executable, "-c", "from moto.server import main; main()", "-p", str(port)]
    log = tmp_path_factory.mktemp("moto") / "log"
    with _running(command, port, log):
        _ask(port, "POST", "/", urlencode({"Action": "CreateUser", "UserName": "u", "Version": "2010-05-08"}).encode(), _IAM)
        policy = {"Action": "PutUserPolicy", "UserName": "u", "PolicyName": "p", "PolicyDocument": json.dumps(_MAY_ALL)}
        _ask(port, "POST", "/", urlencode(policy | {"Version": "2010-05-08"}).encode(), _IAM)
        made = _ask(port, "POST", "/", b"Action=CreateAccessKey&UserName=u&Version=2010-05-08", _IAM).decode()
        key, secret = (re.findall(f"<{name}>(.*?)<", made)[0] for name in ("AccessKeyId", "SecretAccessKey"))
        yield S3(port, key, secret)


@dataclass(frozen=True)
class Azure:
    """An azurite, and what its account may do."""

    port: int
    key: str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # azurite's own, for all

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/devstoreaccount1"

    def signature(self, expires: str = "2099-01-01T00:00:00Z") -> str:
        """Return a shared access signature for all that the account may do."""
        fields = {"sp": "rwlc", "ss": "b", "srt": "sco", "st": "", "se": expires, "sip": "", "spr": "", "sv": "2018-11-09"}
        text = "\n".join(["devstoreaccount1", *fields.values(), ""])
        made = hmac.new(base64.b64decode(self.key), text.encode(), hashlib.sha256).digest()
        return urlencode({name: value for name, value in fields.items() if value} | {"sig": base64.b64encode(made).decode()})

    def put_folder(self, folder: Path, container: str, prefix: str) -> None:
        """Make a container, and put a folder's files into it."""
        place = f"/devstoreaccount1/{container}"
        _ask(self.port, "PUT", f"{place}?restype=container&{self.signature()}", may=(201,))
        for path in folder.iterdir():
            target = f"{place}/{quote(prefix + path.name)}?{self.signature()}"
            _ask(self.port, "PUT", target, path.read_bytes(), {"x-ms-blob-type": "BlockBlob"}, may=(201,))


@contextlib.contextmanager
def azurite(home: Path) -> Iterator[Azure]:
    """Run azurite, with its files in a folder."""
    assert AZURITE is not None
    port = free_port()
    command = [AZURITE, "--blobPort", str(port), "--location", str(home), "--silent", "--skipApiVersionCheck"]
    with _running(command, port, home / "log"):
        yield Azure(port)


class Cutting:
    """A proxy that cuts connections, after so many bytes of a reply, as often as it is told."""

    def __init__(self, port: int, after: int, times: int) -> None:
        self._there, self._after, self.left, self.cuts = port, after, times, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._lock = threading.Lock()
        self._threads[0].start()

    def __enter__(self) -> Cutting:
        return self

    def __exit__(self, *_exception: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(here,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, here: socket.socket) -> None:
        with here, socket.create_connection(("127.0.0.1", self._there)) as there:
            forth = threading.Thread(target=self._pump, args=(here, there, False), daemon=True)
            forth.start()
            self._pump(there, here, True)
            forth.join(10)

    def _pump(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(16_384):
                seen += len(data)
                if replies and seen > self._after and self._may_cut():
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _may_cut(self) -> bool:
        with self._lock:
            if self.cuts == self.left:
                return False
            self.cuts += 1
            return True


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _running(command: list[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, process_group=0)
    try:
        for _ in range(400):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        server.terminate()
        server.wait(10)


def _ask(
    port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, may: Sequence[int] = (200,)
) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers or {}))
        reply = connection.getresponse()
        data = reply.read()
        assert reply.status in may, (reply.status, data)
        return data
