"""HTTPS: who is trusted, what a redirect may not undo, and the way through a proxy."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from faulty import Fault, Faulty, Taken

from pipeline.errors import OptionsError, RemoteError
from pipeline.stores.http import HttpOptions, HttpStore

pytestmark = [
    pytest.mark.usefixtures("no_network"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl"),
]

DATA = bytes(range(256)) * 1000
QUICK = HttpOptions(first_wait_seconds=0.002, longest_wait_seconds=0.01, attempts=3)


@pytest.fixture
def tls(certificates: Path) -> ssl.SSLContext:
    return server_context(certificates, "good")


def server_context(folder: Path, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


@pytest.mark.parametrize("by", ["ca", "folder", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_a_private_ca_is_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, certificates: Path, tls: ssl.SSLContext, by: str
) -> None:
    """By option (a file or a folder), or by the environment's usual names."""
    ca = str(certificates / "ca.pem")
    if by == "folder":
        hashed = subprocess.run(
            ["openssl", "x509", "-hash", "-noout", "-in", ca], check=True, capture_output=True, text=True
        ).stdout.strip()
        shutil.copy(ca, tmp_path / f"{hashed}.0")
        ca = str(tmp_path)
    elif by != "ca":
        monkeypatch.setenv(by, ca)
    with Faulty({"/a.tar": DATA}, tls=tls) as server, HttpStore(HttpOptions(ca=ca if by in ("ca", "folder") else None)) as store:
        assert store.fetch(server.url("/a.tar"), 10**6) == DATA
        store.look(server.url("/a.tar"))
        assert store.counts.connections == 1


def test_an_unknown_ca_is_an_error_at_once(tls: ssl.SSLContext) -> None:
    """No retry makes a certificate good; the message says how to name its CA."""
    with Faulty({"/a.tar": DATA}, tls=tls) as server, HttpStore() as store:
        with pytest.raises(RemoteError, match=r"certificate isn't trusted \(.*by ca= or REQUESTS_CA_BUNDLE"):
            store.fetch(server.url("/a.tar"), 10**6)
        assert (server.connections, server.log) == (1, [])


def test_a_certificate_of_another_host_is_an_error(certificates: Path) -> None:
    """The right CA isn't enough."""
    context, options = server_context(certificates, "other"), HttpOptions(ca=str(certificates / "ca.pem"))
    with (
        Faulty({"/a.tar": DATA}, tls=context) as server,
        HttpStore(options) as store,
        pytest.raises(RemoteError, match=r"certificate isn't trusted \(IP address mismatch"),
    ):
        store.fetch(server.url("/a.tar"), 10**6)


@pytest.mark.parametrize("name", ["none.pem", "good.key"])
def test_certificates_that_cant_be_used_are_named(certificates: Path, name: str) -> None:
    """A path that is wrong is found at the start, not at the first shard."""
    with pytest.raises(OptionsError, match=f"{name}: these certificates can't be used"):
        HttpStore(HttpOptions(ca=str(certificates / name)))


def test_https_on_a_port_of_http_is_named() -> None:
    """The usual slip with a NAS."""
    with (
        Faulty({"/a.tar": DATA}) as server,
        HttpStore(QUICK) as store,
        pytest.raises(RemoteError, match="doesn't speak TLS on this port"),
    ):
        store.fetch(server.url("/a.tar").replace("http:", "https:"), 10)


def test_redirects_only_go_up(certificates: Path, tls: ssl.SSLContext) -> None:
    """From http to https yes, from https to http never."""
    options = HttpOptions(ca=str(certificates / "ca.pem"))
    with Faulty({"/a.tar": DATA}, tls=tls) as up, Faulty({"/a.tar": DATA}) as down, HttpStore(options) as store:
        with Faulty({}, [Fault(redirect=up.url("/a.tar"))]) as first:
            assert store.fetch(first.url("/a.tar"), 10**6) == DATA
        with (
            Faulty({}, [Fault(redirect=down.url("/a.tar?SECRET"))], tls=tls) as first,
            pytest.raises(RemoteError, match="without the protection of https") as error,
        ):
            store.fetch(first.url("/a.tar"), 10**6)
        assert down.log == []
        assert "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    "fault", [Fault(cut=1000), Fault(cut=100_000, reset=True), Fault(chunked=True, cut=70_000), Fault(cut=0, stall=0.3)]
)
def test_a_cut_under_tls_is_resumed(certificates: Path, tls: ssl.SSLContext, fault: Fault) -> None:
    """TLS hides ends and resets behind errors of its own."""
    options = HttpOptions(ca=str(certificates / "ca.pem"), first_wait_seconds=0.002, idle_seconds=0.2)
    taken = Taken(1)
    with Faulty({"/a.tar": DATA}, [fault, fault], tls=tls) as server, HttpStore(options) as store:
        store.read(server.url("/a.tar"), 1, None, None, taken)
    assert taken.data == DATA[1:]


def test_https_goes_through_the_environments_proxy(
    monkeypatch: pytest.MonkeyPatch, certificates: Path, tls: ssl.SSLContext
) -> None:
    """HTTPS_PROXY connects through and sees neither path nor headers; its password goes to nobody else."""
    options = HttpOptions(ca=str(certificates / "ca.pem"))
    with Faulty({"/a.tar": DATA}, tls=tls) as server, Faulty({}) as proxy:
        monkeypatch.setenv("https_proxy", proxy.origin.replace("//", "//user:SECRET@"))
        with HttpStore(options) as store:
            assert store.fetch(server.url("/a.tar?x=1"), 10**6) == DATA
            assert store.look(server.url("/a.tar")).size == len(DATA)
        assert [(request.method, request.target) for request in proxy.log] == [("CONNECT", f"127.0.0.1:{server.port}")]
        assert proxy.log[0].headers["proxy-authorization"].startswith("Basic ")
        assert not any("proxy-authorization" in request.headers for request in server.log)


@pytest.mark.parametrize(
    ("status", "words", "tries"), [(407, "the proxy refuses \\(407\\)", 1), (502, "the proxy can't reach it \\(502\\)", 3)]
)
def test_a_proxy_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch, status: int, words: str, tries: int) -> None:
    """What the proxy denies is no fault of the server's; what it can't reach now may come."""
    raw = f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode()
    with Faulty({}, lambda request: Fault(raw=raw)) as proxy:
        monkeypatch.setenv("https_proxy", proxy.origin)
        with HttpStore(QUICK) as store, pytest.raises(RemoteError, match=words):
            store.fetch("https://h.invalid/a.tar", 10)
        assert len(proxy.log) == tries
