"""A real server of S3 that checks signatures: the batches of a folder, whatever is named, cut or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from afar import epochs, loader_of, read
from objectstores import S3, Cutting, quick
from packing import PackedSet
from residence import big_set
from squeezed import squeeze

import pipeline
from pipeline.stores.objects import Finder
from pipeline.urls import resolve

pytest.importorskip("obstore", reason="needs obstore (pip install 'shardify[cloud]')")
pytestmark = pytest.mark.usefixtures("no_network")

SHARDS = 4


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> PackedSet:
    """240 samples of 20 KB in four shards, in a folder and in a bucket."""
    packed = big_set(tmp_path_factory.mktemp("served"), 240, SHARDS, 20_000)
    s3.put_folder(packed.folder, "bucket", "set/")
    return packed


@pytest.fixture(scope="module")
def expected(packed: PackedSet, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The batches of two epochs, from the folder."""
    return epochs(str(packed.folder), tmp_path_factory.mktemp("unused"), 2)


@pytest.mark.parametrize(
    ("where", "workers"),
    [
        ("s3://bucket/set/train-shardindex.json", 0),
        ("s3://bucket/set/train-shardindex.json", 2),
        ("s3://bucket/set/", 0),
        ("s3://bucket/set/train-{000000..000003}.tar", 0),
        ([f"S3://bucket/set/train-00000{n}.tar" for n in range(SHARDS)], 0),
    ],
)
def test_the_batches_are_those_of_a_folder(
    packed: PackedSet, expected: list[Any], s3: S3, tmp_path: Path, where: Any, workers: int
) -> None:
    """For any number of workers, whether a manifest, a folder, a pattern or a list is named."""
    assert epochs(where, tmp_path, 2, workers=workers, objects=s3.options()) == expected


def test_a_trainer_never_imports_the_library(packed: PackedSet, s3: S3, tmp_path: Path) -> None:
    """Its runtime doesn't survive a fork: it is in the prefetcher's process and in the one that finds shards, and nowhere else."""
    code = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from afar import loader_of
from objectstores import quick
keys = {"access_key_id": sys.argv[4], "secret_access_key": sys.argv[5]}
objects = quick(endpoint=sys.argv[6], region="us-east-1", config=keys)
with loader_of("s3://bucket/set/", Path(sys.argv[1]), workers=2, objects=objects) as loader:
    seen = sum(len(batch.keys) for batch in loader)
print(seen, [name for name in sys.modules if "obstore" in name])
"""
    support, root = str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])
    command = [sys.executable, "-c", code, str(tmp_path), support, root, s3.key, s3.secret, s3.origin]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[0] == "240 []"


def test_a_resume_goes_on(packed: PackedSet, expected: list[Any], s3: S3, tmp_path: Path) -> None:
    """On another machine, with an empty folder."""
    where = "s3://bucket/set/"
    with loader_of(where, tmp_path / "one", objects=s3.options()) as loader:
        got = [batch for _, batch in zip(range(7), read(loader), strict=False)]
        state = loader.state_dict()
    with loader_of(where, tmp_path / "two", workers=2, objects=s3.options()) as loader:
        loader.load_state_dict(state)
        assert got + list(read(loader)) == expected[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_cut_connections_go_on(packed: PackedSet, expected: list[Any], s3: S3, tmp_path: Path, workers: int) -> None:
    """Cut midway ten times, from finding shards on: every sample once, and the retries are counted."""
    with Cutting(s3.port, 50_000, 10) as cutting:
        objects = s3.options(endpoint=cutting.origin, attempts=8)
        with loader_of("s3://bucket/set/", tmp_path, workers=workers, objects=objects) as loader:
            assert list(read(loader)) == expected[0]
            assert cutting.cuts == 10
            assert loader.stats().reading.retries >= 5


def test_options_come_from_the_environment(
    packed: PackedSet, expected: list[Any], s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoint, region and keys where the AWS tools look for them, and keys in their files."""
    for name, value in (("ENDPOINT_URL", s3.origin), ("REGION", "us-east-1"), ("ALLOW_HTTP", "true"), ("ACCESS_KEY_ID", s3.key)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    assert epochs("s3://bucket/set/", tmp_path, 1) == expected[:1]
    for name in ("ENDPOINT_URL", "REGION", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {s3.origin}\n")
    keys = f"[mine]\naws_access_key_id = {s3.key}\naws_secret_access_key = {s3.secret}\n"
    (tmp_path / ".aws" / "credentials").write_text(keys)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert epochs("s3://bucket/set/", tmp_path / "again", 1) == expected[:1]


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("s3://bucket/gone.json", pipeline.MissingError, "404 Not Found (NoSuchKey): there is no such object"),
        ("s3://bucket/gone/0.tar", pipeline.MissingError, "404 Not Found (NoSuchKey)"),
        ("s3://no-such-bucket/a.json", pipeline.MissingError, "(NoSuchBucket): there is no such bucket"),
        ("s3://no-such-bucket/set/", pipeline.MissingError, "(NoSuchBucket): there is no such bucket"),
        ("s3://bucket/gone/", pipeline.MissingError, "nothing in it"),
        ("s3://bucket/a//b.json", pipeline.RemoteError, "a part of its key is empty"),
        ("s3://bucket/a/../b.json", pipeline.RemoteError, "a part of its key is empty"),
    ],
)
def test_what_is_not_there_is_named(packed: PackedSet, s3: S3, url: str, kind: type[Exception], says: str) -> None:
    """A key, a bucket, a folder, and keys that can't be asked for."""
    with pytest.raises(kind) as caught:
        resolve(url, objects=s3.options())
    assert says in str(caught.value) and url in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("", "wr0ng"), "(SignatureDoesNotMatch): the secret key isn't that of the access key"),
        (("AKIAWR0NG", "wr0ng"), "(InvalidAccessKeyId): the server doesn't know this access key"),
    ],
)
def test_wrong_credentials_are_named(packed: PackedSet, s3: S3, keys: tuple[str, str], says: str) -> None:
    """At once, and without them."""
    config = {"access_key_id": keys[0] or s3.key, "secret_access_key": keys[1]}
    for url in ("s3://bucket/set/", "s3://bucket/set/train-shardindex.json"):
        with pytest.raises(pipeline.DeniedError) as caught:
            resolve(url, objects=s3.options(config=config))
        assert says in str(caught.value) and "wr0ng" not in str(caught.value) and s3.key not in str(caught.value)


ODD = ["a b+c", "50%", "a%2Fb", "ä€", "q?a=b#c&d", "~!'()*", "a=b;c:d@e,f"]


def test_odd_names_are_read_as_they_are(packed: PackedSet, s3: S3, tmp_path: Path) -> None:
    """Keys aren't quoted in URLs: blanks, plus, percent, what looks like a query, in names and in folders, signed each time."""
    shards = sorted(packed.folder.glob("*.tar"))
    files = dict[str, bytes]()
    for place, name in enumerate(ODD):
        for at, path in enumerate(shards[:2]):
            files[f"{name}/{name}{at}.tar"] = path.read_bytes()
            files[f"{name}/{name}{at}.idx"] = path.with_suffix(".idx").read_bytes()
        entries = [
            {"url": f"{name}{at}.tar", "nsamples": 60, "filesize": path.stat().st_size} for at, path in enumerate(shards[:2])
        ]
        files[f"{name}/{place}.json"] = json.dumps({"wids_version": 1, "shardlist": entries}).encode()
    s3.put("odd", files)
    for place, name in enumerate(ODD):
        found = resolve(f"s3://odd/{name}/{place}.json", objects=s3.options())
        assert [shard.name for shard in found.shards] == [f"{name}{at}.tar" for at in range(2)]
        with s3.trusting():  # moto counts a blank in a query, a plus when it is sent, otherwise than Amazon
            assert resolve(f"s3://odd/{name}/", objects=s3.options()).shards == found.shards
    every = [f"s3://odd/{name}/{place}.json" for place, name in enumerate(ODD)]
    (batches,) = epochs(every, tmp_path, 1, objects=s3.options(), last_batch="uneven")
    assert sorted(key for keys, _, _ in batches for key in keys) == sorted(packed.keys[:120] * len(ODD))


def test_folders_hold_what_local_ones_hold(packed: PackedSet, s3: S3) -> None:
    """Splits are chosen, tars without a manifest are found in their order, and what lies deeper isn't a part."""
    manifest = json.loads((packed.folder / "train-shardindex.json").read_bytes())
    shard = (packed.folder / "train-000000.tar").read_bytes()
    val = manifest | {"split": "val"} | {"__info__": manifest.get("__info__", {})}
    files = {f"two/train-{n:06}.tar": shard for n in range(4)} | {f"plain/{n}.tar": shard for n in (10, 9)}
    files |= {"two/train-shardindex.json": json.dumps(manifest).encode(), "two/val-shardindex.json": json.dumps(val).encode()}
    s3.put("folders", files | {"plain/deeper/1.tar": shard, "none/notes.txt": b"x"})
    found = resolve("s3://folders/plain", objects=s3.options())
    assert [(s.name, s.bytes) for s in found.shards] == [("9.tar", len(shard)), ("10.tar", len(shard))]
    assert resolve("s3://folders/two/", split="train", objects=s3.options()).samples == 240
    with pytest.raises(pipeline.SourceError, match=r"no manifest and no tar in it; it holds notes\.txt"):
        resolve("s3://folders/none", objects=s3.options())
    with pytest.raises(pipeline.MissingError, match="nothing in it"):
        resolve("s3://folders/", objects=s3.options())


def test_folders_with_odd_things_in_them(s3: S3) -> None:
    """An object that stands for the folder is none of its files; a key that can't be asked for is an error, at once."""
    s3.put("strays", {"one/": b"", "one/0.tar": b"x" * 1024, "two//1.tar": b"x", "two/0.tar": b"x"})
    assert [shard.name for shard in resolve("s3://strays/one/", objects=s3.options()).shards] == ["0.tar"]
    with pytest.raises(pipeline.RemoteError, match=r"s3://strays/two/: a key there has an empty part.*name the manifest"):
        resolve("s3://strays/two/", objects=s3.options())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/0.tar", "may name objects of that store only"),
        ("https://example.org/0.tar", "may name objects of that store only"),
        ("file:///etc/passwd.tar", "may name objects of that store only"),
        ("/etc/passwd.tar", "a part of its key is empty"),
        ("../0.tar", "a part of its key is empty"),
        ("0.zip", "compressed"),
    ],
)
def test_what_a_manifest_may_not_say(s3: S3, url: str, says: str) -> None:
    """It leads to its own store only."""
    listed = json.dumps({"wids_version": 1, "shardlist": [{"url": url, "nsamples": 1, "filesize": 1024}]}).encode()
    s3.put("strange", {"index.json": listed})
    with pytest.raises(pipeline.SourceError, match=says):
        resolve("s3://strange/index.json", objects=s3.options())


def test_a_manifest_may_name_objects_of_its_store(packed: PackedSet, s3: S3, tmp_path: Path) -> None:
    """In another bucket, too; and so may one that lies here."""
    listed = {"wids_version": 1, "shardlist": [{"url": "s3://bucket/set/train-000000.tar", "nsamples": 60}]}
    s3.put("lists", {"index.json": json.dumps(listed).encode()})
    (tmp_path / "index.json").write_text(json.dumps(listed))
    for where in ("s3://lists/index.json", str(tmp_path / "index.json")):
        (shard,) = resolve(where, objects=s3.options()).shards
        assert (shard.name, shard.samples) == ("train-000000.tar", 60)
        assert shard.bytes == (packed.folder / "train-000000.tar").stat().st_size
        assert shard.path == f"s3+{s3.origin}/bucket/set/train-000000.tar"


def test_kinds_of_stores_do_not_mix(s3: S3, tmp_path: Path) -> None:
    """In one set, both are named, in a manifest of one's own too."""
    for pair in (("http://h/0.tar", "s3://b/0.tar"), ("gs://b/0.tar", "az://b/0.tar")):
        first, second = (url.partition("/")[0] + "//" for url in pair)
        (tmp_path / "index.json").write_text(
            json.dumps({"wids_version": 1, "shardlist": [{"url": url, "nsamples": 1} for url in pair]})
        )
        for where in (list(pair), tmp_path / "index.json"):
            with pytest.raises(pipeline.OptionsError, match=f"{first} and {second} can't be mixed"):
                resolve(where, objects=s3.options())
    with pytest.raises(pipeline.OptionsError, match="can't be mixed"):
        resolve(["s3://b/0.tar", str(tmp_path)])


def test_a_process_that_dies_is_an_error(packed: PackedSet, s3: S3) -> None:
    """Whoever asks for an object hears of it, and the next question starts another one."""
    with Finder("s3", s3.options()) as finder:
        assert finder.look("s3://bucket/set/train-000000.tar").size
        assert finder._process is not None
        finder._process.kill()
        with pytest.raises(pipeline.SourceError, match="has ended"):
            finder.look("s3://bucket/set/train-000000.tar")
        assert finder.fetch("s3://bucket/set/train-000000.idx", 10**6).startswith(b"v1.2 ")
        with pytest.raises(pipeline.RemoteError, match="more than 10 bytes"):
            finder.fetch("s3://bucket/set/train-000000.idx", 10)


@pytest.mark.parametrize("name", ["access_key_id", "session_token", "region"])
def test_a_key_with_its_line_end(name: str) -> None:
    """What no header can hold makes obstore panic: that is an error which says what to look for, in finder and reader."""
    given: dict[str, Any] = {
        "access_key_id": "key",
        "secret_access_key": "c2Vj",
        "session_token": "token",
        "region": "r",
        name: "c2Vj\n",
    }
    region = given.pop("region")
    wrong = quick(endpoint="http://127.0.0.1:1", region=region, config=given)
    with pytest.raises(pipeline.OptionsError, match="is there a line's end in a key") as caught:
        resolve("s3://bucket/a.json", objects=wrong)
    assert "c2Vj" not in str(caught.value)


def test_nothing_answers(tmp_path: Path) -> None:
    """An endpoint where nobody listens is an error that says so, within the tries."""
    with pytest.raises(
        pipeline.RemoteError, match=r"s3://bucket/a\.json: it can't be connected to .*4 tries.*is the endpoint right"
    ):
        resolve("s3://bucket/a.json", objects=quick(endpoint="http://127.0.0.1:1", anonymous=True))


def test_tars_are_indexed_where_they_lie(packed: PackedSet, expected: list[Any], s3: S3, tmp_path: Path) -> None:
    """Compressed ones too: by the command, with the environment's keys; the manifest is read here, and uploaded beside them."""
    squeeze(packed.folder, tmp_path / "served", "tar.zst")
    s3.put_folder(tmp_path / "served", "bucket", "packed-set/")
    environ = {**os.environ, "AWS_ENDPOINT_URL": s3.origin, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    environ |= {"AWS_ACCESS_KEY_ID": s3.key, "AWS_SECRET_ACCESS_KEY": s3.secret}
    made = tmp_path / "made"
    command = [sys.executable, "-m", "pipeline", "index", "s3://bucket/packed-set/train-{000000..000003}.tar.zst", "--out", made]
    for read_now in (SHARDS, 0):
        done = subprocess.run([*command, "--json"], check=False, capture_output=True, text=True, timeout=60, env=environ)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["splits"]["train"]["read"] == read_now
    assert epochs(str(made / "train-shardindex.json"), tmp_path / "one", 2, workers=2, objects=s3.options()) == expected
    s3.put_folder(made, "bucket", "packed-set/")
    assert epochs("s3://bucket/packed-set/", tmp_path / "two", 1, objects=s3.options()) == expected[:1]
