"""A real nginx: the batches of a folder, over HTTP and HTTPS, behind a password, and while it is restarted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from afar import QUICK, epochs, loader_of, read
from nginx import NGINX, nginx
from residence import PackedSet, big_set

import pipeline
from pipeline import HttpOptions

pytestmark = [
    pytest.mark.usefixtures("no_network"),
    pytest.mark.skipif(NGINX is None, reason="needs nginx"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl"),
]

MANIFEST = "/train-shardindex.json"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """240 samples of 20 KB in four shards."""
    return big_set(tmp_path_factory.mktemp("served"), 240, 4, 20_000)


@pytest.fixture(scope="module")
def expected(packed: PackedSet, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The batches of two epochs, from the folder."""
    return epochs(str(packed.folder), tmp_path_factory.mktemp("unused"), 2)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("workers", [0, 2, 5])
def test_the_batches_are_those_of_a_folder(
    packed: PackedSet, expected: list[Any], certificates: Path, tmp_path: Path, workers: int, secure: bool
) -> None:
    """For any number of workers, over HTTP and over HTTPS with a CA of one's own."""
    http = HttpOptions(ca=str(certificates / "ca.pem"), idle_seconds=10)
    with nginx(packed.folder, tmp_path / "nginx", certificates=certificates if secure else None) as origin:
        found = epochs(origin + MANIFEST, tmp_path / "cache", 2, workers=workers, http=http)
        assert found == expected
    log = (tmp_path / "nginx" / "access.log").read_text()
    assert log.count(".tar HTTP/1.1") == log.count('.tar HTTP/1.1" 206')


def test_a_certificate_that_nobody_trusts(packed: PackedSet, certificates: Path, tmp_path: Path) -> None:
    """Without the CA it is an error at once that says what to name."""
    with (
        nginx(packed.folder, tmp_path / "nginx", certificates=certificates) as origin,
        pytest.raises(pipeline.RemoteError, match=r"isn't trusted.*REQUESTS_CA_BUNDLE"),
    ):
        loader_of(origin + MANIFEST, tmp_path / "cache", http=QUICK)


def test_a_password(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """Basic authentication, by options and in the URL; without one it is a DeniedError."""
    (tmp_path / "passwords").write_text("ann:{PLAIN}s3cret\n")
    locked = f'auth_basic "set"; auth_basic_user_file {tmp_path}/passwords;'
    with nginx(packed.folder, tmp_path / "nginx", more=locked) as origin:
        http = HttpOptions(user="ann", password="s3cret", origin=origin)
        assert epochs(origin + MANIFEST, tmp_path / "one", 1, http=http) == expected[:1]
        named = origin.replace("http://", "http://ann:s3cret@")
        assert epochs(named + "/train-{000000..000003}.tar", tmp_path / "two", 1) == expected[:1]
        with pytest.raises(pipeline.DeniedError, match="401"):
            loader_of(origin + MANIFEST, tmp_path / "three")


@pytest.mark.parametrize(
    "more", ["limit_rate 400k;", "max_ranges 0;", "gzip on; gzip_types *;", "etag off;", "keepalive_timeout 0;"]
)
def test_how_servers_are_set_up(packed: PackedSet, expected: list[Any], tmp_path: Path, more: str) -> None:
    """Slow, without ranges, eager to compress, without ETags, without connections that stay: the same batches."""
    with nginx(packed.folder, tmp_path / "nginx", more=more) as origin:
        assert epochs(origin + MANIFEST, tmp_path / "cache", 1, workers=2) == expected[:1]


def test_a_server_that_is_restarted(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """A server that goes in the middle and comes back elsewhere: what was fetched is there, the rest is an error that names it."""
    with nginx(packed.folder, tmp_path / "nginx", more="limit_rate 200k;") as origin:
        loader = loader_of(origin + MANIFEST, tmp_path / "cache", workers=2)
        batches = read(loader)
        got = [next(batches)]
    with loader, pytest.raises(pipeline.RemoteError, match=r"can't be connected to|connection"):
        got += list(batches)
    assert got == expected[0][: len(got)]
