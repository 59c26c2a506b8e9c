"""What goes wrong with an object store while a trainer reads: its batches are exact, or it hears what happened."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from afar import epochs, loader_of, read
from faulty import Fault, Faulty, Request, some_faults
from objectstores import quick
from packing import PackedSet
from residence import big_set

import pipeline
from pipeline.stores.remote import opened

pytest.importorskip("obstore", reason="needs obstore (pip install 'shardify[cloud]')")
pytestmark = pytest.mark.usefixtures("no_network")

WHERE = "s3://bkt/train-shardindex.json"
EXPIRED = Fault(status=400, body=b"<Error><Code>ExpiredToken</Code><Message>T0KEN</Message></Error>", kind="application/xml")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """240 samples of 20 KB in four shards."""
    return big_set(tmp_path_factory.mktemp("served"), 240, 4, 20_000)


@pytest.fixture(scope="module")
def expected(packed: PackedSet, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The batches of two epochs, from the folder."""
    return epochs(str(packed.folder), tmp_path_factory.mktemp("unused"), 2)


def objects(server: Faulty, **given: Any) -> pipeline.ObjectOptions:
    keys = {"access_key_id": "AKIA", "secret_access_key": "S3CRET", "session_token": "T0KEN"}
    return quick(**{"endpoint": server.origin, "config": keys, **given})


def files(packed: PackedSet) -> dict[str, bytes]:
    return {f"/bkt/{path.name}": path.read_bytes() for path in packed.folder.iterdir()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_session_that_runs_out(packed: PackedSet, expected: list[Any], tmp_path: Path, workers: int) -> None:
    """In the middle of an epoch it ends that, by its name; with new credentials what was fetched is there."""
    seen = itertools.count()
    expired = [True]

    def script(request: Request) -> Fault | None:
        return EXPIRED if expired[0] and request.target.endswith(".tar") and next(seen) > 4 else None

    with Faulty(files(packed), script) as server:
        with (
            pytest.raises(
                pipeline.DeniedError, match=r"\.tar: 400 Bad Request \(ExpiredToken\): the session has run out"
            ) as caught,
            loader_of(WHERE, tmp_path, workers=workers, objects=objects(server)) as loader,
        ):
            list(read(loader))
        assert not any(secret in str(caught.value) for secret in ("AKIA", "S3CRET", "T0KEN"))
        expired[0] = False
        assert epochs(WHERE, tmp_path, 1, workers=workers, objects=objects(server)) == expected[:1]
        assert all(b"T0KEN" not in path.read_bytes() and b"S3CRET" not in path.read_bytes() for path in tmp_path.iterdir())


def test_a_third_of_all_replies_fail(packed: PackedSet, expected: list[Any], tmp_path: Path) -> None:
    """From finding the shards on: exact, and the retries are counted."""
    with (
        Faulty(files(packed), some_faults(0.3, 5, 200_000)) as server,
        loader_of(WHERE, tmp_path, workers=2, objects=objects(server, attempts=40)) as loader,
    ):
        assert list(read(loader)) == expected[0]
        assert loader.stats().reading.retries > 0
        assert list(read(loader)) == expected[1]


def test_another_version_midway_is_an_error(packed: PackedSet, tmp_path: Path) -> None:
    """A shard whose ETag changes while it is read isn't mixed with the old one."""
    seen = itertools.count()

    def script(request: Request) -> Fault | None:
        return Fault(etag='"new"') if "000001.tar" in request.target and next(seen) > 1 else None

    with (
        Faulty(files(packed), script) as server,
        loader_of(WHERE, tmp_path, objects=objects(server)) as loader,
        pytest.raises(pipeline.ChangedError, match=r"train-000001\.tar.*ETag"),
    ):
        list(read(loader))


def test_bytes_that_are_not_the_manifests(packed: PackedSet, tmp_path: Path) -> None:
    """A shard of the right length and other bytes is found by its hash."""
    wrong = bytearray(files(packed)["/bkt/train-000003.tar"])
    wrong[5000] ^= 1
    with (
        Faulty(files(packed) | {"/bkt/train-000003.tar": bytes(wrong)}) as server,
        loader_of(WHERE, tmp_path, objects=objects(server)) as loader,
        pytest.raises(pipeline.ShardError, match=r"train-000003\.tar.*sha256"),
    ):
        list(read(loader))


def test_two_endpoints_do_not_share_what_they_hold(packed: PackedSet, tmp_path: Path) -> None:
    """Of equal URLs at two endpoints each is fetched for itself."""
    for _ in range(2):
        with Faulty(files(packed)) as server:
            epochs(WHERE, tmp_path, 1, objects=objects(server))
            assert any(request.target.endswith(".tar") for request in server.log)


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Object stores are an extra."""
    monkeypatch.delitem(sys.modules, "pipeline.stores.objects.store", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(pipeline.OptionsError, match=r"s3:// needs obstore.*pip install 'shardify\[cloud\]'"):
        opened("s3", None, None)
