"""What is asked where and as whom: URLs of objects, options, the environment's places, profiles of the AWS tools."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from faulty import Faulty

import pipeline
from pipeline.errors import OptionsError, RemoteError
from pipeline.stores.objects import ObjectAddress, ObjectOptions
from pipeline.stores.objects.access import access

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.mark.parametrize(
    ("text", "bucket", "key", "shown"),
    [
        ("s3://bucket/set/0.tar", "bucket", "set/0.tar", "s3://bucket/set/0.tar"),
        (" S3://bucket/a b+c%2F?d#e ", "bucket", "a b+c%2F?d#e", "s3://bucket/a b+c%2F?..."),
        ("gs://bucket", "bucket", "", "gs://bucket/"),
        ("az://$web/ä.tar", "$web", "ä.tar", "az://$web/ä.tar"),
        ("s3:/bucket/0.tar", "bucket", "0.tar", "s3://bucket/0.tar"),
        ("abfs://box@account.dfs.core.windows.net/0.tar", "box", "0.tar", "abfs://box@account.dfs.core.windows.net/0.tar"),
        ("abfss://box/0.tar", "box", "0.tar", "abfss://box/0.tar"),
    ],
)
def test_urls_are_taken_as_they_are_written(text: str, bucket: str, key: str, shown: str) -> None:
    """A key isn't quoted; what looks like a query isn't shown."""
    address = ObjectAddress(text)
    address.check()
    assert (address.bucket, address.key, str(address)) == (bucket, key, shown)


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "s3:///key",
        "s3://key:SECRET@bucket/0.tar",
        "s3://bucket:SECRET/0.tar",
        "s3://SECRET@bucket/0.tar",
        "abfs://box@evil.example/0.tar",
        "https://bucket/0.tar",
        "s3://bucket/0.tar?X-Amz-Signature=SECRET",
        "az://box/0.tar?sv=1&sig=SECRET",
        "s3://bucket/a\nb.tar",
        "s3://bucket/a\0b.tar",
        "s3://bucket/a\udcffb.tar",
        "s3://bucket//0.tar",
        "s3://bucket/a/./0.tar",
    ],
)
def test_what_is_no_object_is_refused(text: str) -> None:
    """By name, in one line, without a secret."""
    with pytest.raises(RemoteError) as caught:
        ObjectAddress(text).check()
    assert "SECRET" not in str(caught.value) + repr(ObjectAddress(text)) and str(caught.value).isprintable()


def test_names_in_the_cache_tell_stores_apart() -> None:
    """The URL as it is, with the endpoint or the account where there is one."""
    names = [
        ObjectAddress("s3://box/k?x#y").identity,
        ObjectAddress("gs://box/k?x#y").identity,
        ObjectAddress("s3://box/k?x#y", "http://nas:9000").identity,
        ObjectAddress("s3://box/k?x#y", "http://nas:9001").identity,
        ObjectAddress("abfs://box@one.dfs.core.windows.net/k?x#y").identity,
        ObjectAddress("abfs://box@two.dfs.core.windows.net/k?x#y", "https://one.blob.core.windows.net").identity,
    ]
    assert len(set(names)) == len(names) and all(name.endswith("/k?x#y") for name in names)
    assert names[2] == "s3+http://nas:9000/box/k?x#y"
    account = access("az", ObjectOptions(), {"AZURE_STORAGE_ACCOUNT_NAME": "one"}).place
    assert ObjectAddress("az://box/k?x#y", account).identity == names[4]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"endpoint": "nas:9000"}, "endpoint isn't a URL"),
        ({"endpoint": "https://u:SECRET@nas"}, "endpoint holds credentials"),
        ({"endpoint": "https://nas?SECRET"}, "endpoint holds credentials or a query"),
        ({"endpoint": 5}, "endpoint is of type int"),
        ({"anonymous": "yes"}, "anonymous='yes': True or False"),
        ({"attempts": 0}, "attempts=0"),
        ({"idle_seconds": float("inf")}, "idle_seconds=inf"),
        ({"ca": 7}, "ca=7"),
        ({"ca": "a\0b"}, "ca='a"),
        ({"ca": "\ud800"}, "ca='"),
        ({"config": ["SECRET"]}, "config is of type list"),
        ({"config": {"secret_access_key": b"SECRET"}}, "a setting of type bytes"),
        ({"config": {"AWS_ENDPOINT_URL": "SECRET"}}, "AWS_ENDPOINT_URL isn't taken from here: give it as endpoint="),
        ({"config": {"region": "SECRET"}}, "give it as region="),
        ({"config": {"aws_bucket": "SECRET"}}, "the URL names it"),
    ],
)
def test_options_are_checked_at_birth(given: dict[str, Any], says: str) -> None:
    """What was given, what is allowed, and nothing secret."""
    with pytest.raises(OptionsError) as caught:
        ObjectOptions(**given)
    assert says in str(caught.value) and "SECRET" not in str(caught.value)


def test_options_travel_and_stay_silent() -> None:
    """As JSON, and their repr shows no setting of obstore's; LoaderOptions takes nothing else in their place."""
    options = ObjectOptions(endpoint="https://nas", config={"secret_access_key": "SECRET", "request_payer": True})
    assert ObjectOptions(**json.loads(json.dumps(asdict(options)))) == options
    assert "SECRET" not in repr(options) + repr(pipeline.LoaderOptions(objects=options))
    with pytest.raises(OptionsError, match="objects=dict"):
        pipeline.LoaderOptions(objects={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "environ", "options", "place"),
    [
        ("s3", {}, {}, ""),
        ("s3", {"AWS_ENDPOINT_URL": "https://a/", "AWS_ENDPOINT_URL_S3": "https://b"}, {}, "https://b"),
        ("s3", {"AWS_ENDPOINT_URL_S3": "https://b"}, {"endpoint": "https://c:443/"}, "https://c"),
        ("gs", {"AWS_ENDPOINT_URL": "https://a"}, {}, ""),
        ("gs", {"GOOGLE_BASE_URL": "https://a"}, {}, "https://a"),
        ("az", {"AZURE_STORAGE_ACCOUNT": "One"}, {}, "https://one.blob.core.windows.net"),
        (
            "az",
            {"AZURE_STORAGE_ACCOUNT_NAME": "one"},
            {"config": {"azure_storage_account_name": "two"}},
            "https://two.blob.core.windows.net",
        ),
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": "one"}, {"endpoint": "https://h/one"}, "https://h/one"),
    ],
)
def test_the_options_come_before_the_environment(kind: str, environ: dict[str, str], options: dict[str, Any], place: str) -> None:
    """Of each store by its own variables."""
    found = access(kind, ObjectOptions(**options), environ)
    assert found.place == place
    if kind == "s3" and place:
        assert found.config["endpoint"] == found.config["aws_endpoint_url_s3"] == place


def test_plain_http_is_asked_for() -> None:
    """An endpoint without TLS, wherever it was given, needs a yes."""
    for options, environ in ((ObjectOptions(endpoint="http://nas"), {}), (ObjectOptions(), {"AWS_ENDPOINT_URL": "http://nas"})):
        with pytest.raises(OptionsError, match=r"without TLS.*allow_http=True"):
            access("s3", options, environ)
        assert access("s3", options, environ | {"AWS_ALLOW_HTTP": "TRUE"}).client["allow_http"]


@pytest.fixture
def aws_files(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Write the AWS tools' files; gives the environment that names them."""

    def write(credentials: str, config: str = "", **more: str) -> dict[str, str]:
        (tmp_path / "credentials").write_text(credentials)
        (tmp_path / "config").write_text(config)
        files = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "AWS_CONFIG_FILE": str(tmp_path / "config")}
        return files | more

    return write


MINE = "[default]\naws_access_key_id=A\naws_secret_access_key=B\n[mine]\naws_access_key_id = C\naws_secret_access_key = D%x\naws_session_token=E\n"


def test_profiles_are_read(aws_files: Callable[..., dict[str, str]]) -> None:
    """The one that is named, else the default; keys that are given otherwise come first."""
    config = "[default]\nregion=r1\n[profile mine]\nregion = r2\nendpoint_url = https://nas\n"
    found = access("s3", ObjectOptions(), aws_files(MINE, config))
    assert (found.config["access_key_id"], found.config["region"], found.place) == ("A", "r1", "")
    found = access("s3", ObjectOptions(), aws_files(MINE, config, AWS_PROFILE="mine"))
    assert [found.config[name] for name in ("access_key_id", "secret_access_key", "session_token")] == ["C", "D%x", "E"]
    assert (found.config["region"], found.place) == ("r2", "https://nas")
    for environ, options in (
        ({"AWS_ACCESS_KEY_ID": "X"}, ObjectOptions()),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "X"}, ObjectOptions()),
        ({}, ObjectOptions(anonymous=True)),
        ({}, ObjectOptions(config={"aws_access_key_id": "X"})),
    ):
        found = access("s3", options, aws_files(MINE, config) | environ)
        assert "secret_access_key" not in found.config and found.config["region"] == "r1"
    assert "region" not in access("s3", ObjectOptions(), aws_files(MINE, config, AWS_REGION="r3")).config
    assert not access("gs", ObjectOptions(), aws_files(MINE, config, AWS_PROFILE="none")).config


@pytest.mark.parametrize(
    ("credentials", "config", "says"),
    [
        (MINE, "", "AWS_PROFILE=other: neither"),
        ("", "[profile other]\nsso_session = SECRET\n", "AWS_PROFILE=other: has no keys of its own"),
        ("SECRET\n", "", "the file of AWS profiles can't be used (can't be understood)"),
    ],
)
def test_profiles_that_cannot_be_used(aws_files: Callable[..., dict[str, str]], credentials: str, config: str, says: str) -> None:
    """What is wrong and what to do, without the file's text."""
    with pytest.raises(OptionsError) as caught:
        access("s3", ObjectOptions(), aws_files(credentials, config, AWS_PROFILE="other"))
    assert says in str(caught.value) and "SECRET" not in str(caught.value)


def test_google_is_asked_by_its_own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its endpoint, a token, or nobody's."""
    object_store = pytest.importorskip("pipeline.stores.objects.store", reason="needs obstore").ObjectStore
    data = random.Random(1).randbytes(1000)
    with Faulty({"/bkt/a b.tar": data}) as server:
        for options in (ObjectOptions(anonymous=True), ObjectOptions(config={"bearer_token": "T0KEN"})):
            monkeypatch.setenv("GOOGLE_BASE_URL", server.origin)
            monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "1")
            with object_store("gs", options) as store:
                assert store.fetch("gs://bkt/a b.tar", 1000) == data
                with pytest.raises(OptionsError, match=r"asked of a store of gs://"):
                    store.look("s3://bkt/a b.tar")
        assert [request.headers.get("authorization") for request in server.log] == [None, "Bearer T0KEN"]
