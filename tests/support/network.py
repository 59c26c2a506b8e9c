"""What tests over the network need: an environment without the user's proxies and passwords, and certificates."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_THE_USERS = (
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "NETRC",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
_OF_CLOUDS = ("AWS_", "GOOGLE_", "AZURE_")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the user's own proxies, passwords, certificates and credentials out."""
    for name in [*_THE_USERS, *(name for name in os.environ if name.startswith(_OF_CLOUDS))]:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA (ca.pem), and certificates of 127.0.0.1 (good) and of another host (other), in one folder."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    usage = ("-addext", "keyUsage=critical,keyCertSign")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=Test CA", *usage)
    for name, place in (("good", "IP:127.0.0.1,DNS:localhost"), ("other", "DNS:other.example")):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=Test")
        (folder / f"{name}.ext").write_text(f"subjectAltName={place}\n")
        openssl(
            *f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile {name}.ext -out {name}.pem".split()
        )
    return folder
