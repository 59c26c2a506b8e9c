"""A real server of Azure's blobs: the batches of a folder, by the account's key and by a signature."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from afar import epochs, loader_of, read
from objectstores import AZURITE, Azure, azurite, quick
from packing import PackedSet
from residence import big_set

import pipeline
from pipeline.urls import resolve

pytest.importorskip("obstore", reason="needs obstore (pip install 'shardify[cloud]')")
pytestmark = [
    pytest.mark.usefixtures("no_network"),
    pytest.mark.skipif(AZURITE is None, reason="needs azurite on the PATH, or named by AZURITE"),
]

WHERE = "az://container/a set+1/"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """240 samples of 20 KB in four shards."""
    return big_set(tmp_path_factory.mktemp("served"), 240, 4, 20_000)


@pytest.fixture(scope="module")
def azure(packed: PackedSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azure]:
    """The set in a container."""
    with azurite(tmp_path_factory.mktemp("azurite")) as azure:
        azure.put_folder(packed.folder, "container", "a set+1/")
        yield azure


def options(azure: Azure, **config: str) -> pipeline.ObjectOptions:
    return quick(endpoint=azure.endpoint, config={"account_name": "devstoreaccount1", **config})


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_are_those_of_a_folder(packed: PackedSet, azure: Azure, tmp_path: Path, workers: int) -> None:
    """For any number of workers, and after a resume on another machine."""
    expected: list[Any] = epochs(str(packed.folder), tmp_path / "unused", 2)
    objects = options(azure, account_key=azure.key)
    assert epochs(WHERE, tmp_path / "one", 2, workers=workers, objects=objects) == expected
    with loader_of(WHERE + "train-shardindex.json", tmp_path / "two", workers=workers, objects=objects) as loader:
        got = [batch for _, batch in zip(range(7), read(loader), strict=False)]
        state = loader.state_dict()
    with loader_of("abfs://container/a set+1/", tmp_path / "three", workers=workers, objects=objects) as loader:
        loader.load_state_dict(state)
        assert got + list(read(loader)) == expected[0]


def test_the_environment_says_who_asks(packed: PackedSet, azure: Azure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Account, endpoint and signature by Azure's own variables."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", azure.signature())
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    assert epochs(WHERE, tmp_path / "cache", 1) == epochs(str(packed.folder), tmp_path / "unused", 1)


def test_refusals_are_named(azure: Azure) -> None:
    """A wrong key, a signature that has run out, a blob and a container that aren't there; no secret in it."""
    wrong = azure.key[:-6] + "AAAA=="
    cases = [
        (WHERE, options(azure, account_key=wrong), pipeline.DeniedError, "403 Forbidden"),
        (WHERE, options(azure, sas_key=azure.signature("2020-01-01T00:00:00Z")), pipeline.DeniedError, "403 Forbidden"),
        (WHERE + "gone.json", options(azure, account_key=azure.key), pipeline.MissingError, "there is no such object"),
        ("az://no-container/x.json", options(azure, account_key=azure.key), pipeline.MissingError, "there is no such container"),
    ]
    for url, objects, kind, says in cases:
        with pytest.raises(kind) as caught:
            resolve(url, objects=objects)
        assert says in str(caught.value) and "sig=" not in str(caught.value) and wrong not in str(caught.value)
