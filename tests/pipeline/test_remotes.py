"""What URLs name: manifests and tars over HTTP, what a stranger's manifest may say, and what no message shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faulty import Fault, Faulty, Request
from packing import PackedSet

from pipeline.errors import MissingError, OptionsError, PipelineError, SourceError
from pipeline.stores.http import HttpOptions
from pipeline.urls import resolve

pytestmark = pytest.mark.usefixtures("no_network")

NO_WAIT = HttpOptions(attempts=1, connect_seconds=0.5, first_wait_seconds=0.001)


def message(pointed: Any, kind: type[PipelineError] = SourceError, split: str | None = None) -> str:
    """Return the text of the error that resolving gives."""
    with pytest.raises(kind) as caught:
        resolve(pointed, split=split, http=NO_WAIT)
    return str(caught.value)


def manifest(*entries: dict[str, Any], **more: Any) -> bytes:
    """Return a wids shard index."""
    return json.dumps({"wids_version": 1, "shardlist": list(entries), **more}).encode()


def test_a_manifest_is_the_set_that_a_folder_is(small_set: PackedSet) -> None:
    """Names, samples, sizes, hashes, classes and digest are those of the folder; shards and indexes are asked for beside it."""
    local = resolve(small_set.folder)
    with Faulty(small_set.folder) as server:
        found = resolve(server.url("/train-shardindex.json"), http=NO_WAIT)
        assert [request.target for request in server.log] == ["/train-shardindex.json"]
        assert found.digest == local.digest
        assert (found.classes, found.fields, found.split, found.name) == (local.classes, local.fields, local.split, local.name)
        for mine, theirs in zip(found.shards, local.shards, strict=True):
            assert (mine.name, mine.samples, mine.bytes, mine.sha256) == (theirs.name, theirs.samples, theirs.bytes, theirs.sha256)
            assert mine.path == mine.url == server.url(f"/{mine.name}")
            assert mine.index == mine.index_url == server.url(f"/{mine.name.removesuffix('.tar')}.idx")


def test_tars_are_counted_by_the_manifest_beside_them(small_set: PackedSet) -> None:
    """A pattern, a list and one tar; without a manifest nothing is known but their sizes."""
    files = {f"/a b/{path.name}": path.read_bytes() for path in small_set.folder.iterdir()}
    with Faulty(files) as server:
        for pointed in ("/a b/train-{000000..000003}.tar", "/a%20b/train-{000000..000003}.tar"):
            assert resolve(server.url(pointed), http=NO_WAIT).digest == resolve(small_set.folder).digest
        assert resolve([server.url("/a b/train-000002.tar")], http=NO_WAIT).samples == 50
        del server.files["/a b/train-shardindex.json"]  # type: ignore[attr-defined]
        (shard,) = resolve(server.url("/a b/train-000002.tar"), http=NO_WAIT).shards
        assert (shard.samples, shard.bytes) == (None, (small_set.folder / "train-000002.tar").stat().st_size)


def test_a_page_in_place_of_the_manifest_beside_tars_is_none(small_set: PackedSet, caplog: pytest.LogCaptureFixture) -> None:
    """Some servers answer each path with a page: asked once, not fatal, and told; a manifest that is named itself must be one."""
    tars = {f"/{path.name}": path.read_bytes() for path in small_set.folder.glob("*.tar")}

    def page(request: Request) -> Fault | None:
        return None if request.target in tars else Fault(body=b"<!doctype html><html>log in", kind="text/html")

    with Faulty(tars, page) as server:
        shards = resolve(server.url("/train-{000000..000003}.tar"), http=NO_WAIT).shards
        assert [(shard.samples, shard.bytes) for shard in shards] == [(None, len(tars[f"/{shard.name}"])) for shard in shards]
        assert [request.target for request in server.log if request.target not in tars] == ["/train-shardindex.json"]
        assert "train-shardindex.json: a page came in place of a manifest" in caplog.text
        assert "an HTML page came in place of the data" in message(server.url("/train-shardindex.json"))


def test_names_are_quoted_once(tmp_path: Path) -> None:
    """Blanks, plus, ampersands and what is quoted already in a manifest's names."""
    names = ["a b.tar", "a+b&c.tar", "a%2Fb.tar", "ä.tar"]
    listed = manifest(*({"url": name, "nsamples": 1, "filesize": 1024} for name in names))
    with Faulty({"/set/index.json": listed}) as server:
        found = resolve(server.url("/set/index.json"), http=NO_WAIT)
        urls = [shard.path.removeprefix(server.origin) for shard in found.shards]
        assert urls == ["/set/a%20b.tar", "/set/a%2Bb%26c.tar", "/set/a%2Fb.tar", "/set/%C3%A4.tar"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:///etc/passwd.tar", "may name URLs of HTTP only"),
        ("s3://bucket/0.tar", "may name URLs of HTTP only"),
        ("http://localhost/0.tar", "within this network"),
        ("http://169.254.169.254/latest/meta-data/0.tar", "within this network"),
        ("http://10.0.0.1/0.tar", "within this network"),
        ("//169.254.169.254/0.tar", "within this network"),
        ("http://nas.lan/0.tar", "within this network"),
        ("http://x.corp./0.tar", "within this network"),
        ("http://[::ffff:10.0.0.1]/0.tar", "within this network"),
        ("http://[64:ff9b::a9fe:a9fe]/0.tar", "within this network"),
        ("http://[2002:a9fe:a9fe::1]/0.tar", "within this network"),
        ("http://[64:ff9b:1::7f00:1]/0.tar", "within this network"),
        ("http://[::127.0.0.1]/0.tar", "within this network"),
        ("http://[::ffff:0:127.0.0.1]/0.tar", "within this network"),
        ("http://224.0.0.1/0.tar", "within this network"),
        ("//user@10.0.0.1:80/0.tar", "within this network"),
        ("http://127.1/0.tar", "within this network"),
        ("http://0x7f.1/0.tar", "within this network"),
        ("http://metadata.google.internal./0.tar", "within this network"),
        ("http://[::1]/0.tar", "within this network"),
        ("http://intranet/0.tar", "within this network"),
        ("0.tar.gz", "compressed"),
        ("0.zip", "compressed"),
        ("0.txt", "neither a tar nor a manifest"),
    ],
)
def test_what_a_strangers_manifest_may_not_say(url: str, says: str) -> None:
    """It leads to no local file and to nothing within the network; what can't be read is said by name."""
    with Faulty({"/index.json": manifest({"url": url, "nsamples": 1, "filesize": 1024})}) as server:
        assert says in message(server.url("/index.json"))


def test_a_signed_url_needs_its_index(tmp_path: Path) -> None:
    """Nothing can be asked for beside a URL that is signed: a manifest of one's own says so at once, and how to name the index."""
    url = "https://cdn.example.org/x/a%20b-000000.tar?X-Amz-Signature=SECRET"
    (tmp_path / "index.json").write_bytes(manifest({"url": url, "nsamples": 4, "filesize": 1024}))
    text = message(tmp_path / "index.json")
    assert "a%20b-000000.tar?...: a query may sign" in text and '"index": "a b-000000.idx"' in text and "SECRET" not in text
    (tmp_path / "index.json").write_bytes(manifest({"url": url, "nsamples": 4, "filesize": 1024, "index": "a b-000000.idx"}))
    assert resolve(tmp_path / "index.json", http=NO_WAIT).shards[0].index == str(tmp_path / "a b-000000.idx")


def test_a_manifest_may_name_another_public_server() -> None:
    """Absolute URLs are taken as they are, signatures and all, and shown without them."""
    listed = manifest({"url": "https://cdn.example.org/x/0.tar?X-Amz-Signature=SECRET", "nsamples": 4, "filesize": 1024})
    with Faulty({"/index.json": listed}) as server:
        (shard,) = resolve(server.url("/index.json"), http=NO_WAIT).shards
    assert shard.url.endswith("SECRET") and shard.path == "https://cdn.example.org/x/0.tar"
    assert "SECRET" not in repr(shard) and shard.name == "0.tar"


@pytest.mark.parametrize(
    "text",
    [
        "https://user:SECRET@nowhere.invalid/set/0.tar",
        "https://nowhere.invalid/set/{0..3}.tar?sig=SECRET",
        " https://nowhere.invalid/0.tar#SECRET",
        "https://user:SEC/RET@nowhere.invalid/0.tar",
        "https://user:p?SECRET@nowhere.invalid/0.tar",
        "https://nowhere.invalid?mail=a@SECRET",
        "http:/SECRET",
    ],
)
def test_no_message_shows_a_secret(tmp_path: Path, text: str) -> None:
    """Passwords, queries and fragments aren't printed, wherever they stand, named or in a manifest of one's own."""
    (tmp_path / "index.json").write_bytes(manifest({"url": text, "nsamples": 1}))
    for pointed in (text, [text], tmp_path / "index.json"):
        assert "SEC" not in message(pointed)


def test_what_is_not_there_is_named(small_set: PackedSet) -> None:
    """A manifest that isn't there, a folder, an empty list, a page in a manifest's place, a cut one."""
    whole = (small_set.folder / "train-shardindex.json").read_bytes()
    files = {"/cut.json": whole[:500], "/page.json": b"<html>", "/none.json": manifest()}
    with Faulty(files) as server:
        assert "/gone.json: 404" in message(server.url("/gone.json"), MissingError)
        assert "a folder can't be listed" in message(server.url("/set/"))
        assert "lists no shards" in message(server.url("/none.json"))
        assert "not JSON" in message(server.url("/cut.json"))
        assert "page.json" in message(server.url("/page.json"))


def test_many_sizes_are_asked_for_at_once() -> None:
    """Without a manifest each tar's server is asked for its size: sixteen at a time, and for the manifest beside them once."""
    files = {f"/s/train-{number:06d}.tar": bytes(1000 + number) for number in range(64)}
    with Faulty(files, lambda request: Fault(delay=0.05, head=404 if request.target.endswith(".json") else None)) as server:
        found = resolve([server.url(name) for name in files], http=NO_WAIT)
        assert [shard.bytes for shard in found.shards] == list(range(1000, 1064))
        assert server.connections == 16
        assert [request.target for request in server.log if request.method == "GET"] == ["/s/train-shardindex.json"]


def test_of_many_the_first_that_fails_is_named() -> None:
    """The order in which shards are named decides, not that in which their servers answer."""
    slow, quick = "/a-2.tar", "/a-5.tar"
    files = {f"/a-{number}.tar": bytes(1000) for number in range(40) if f"/a-{number}.tar" not in (slow, quick)}

    def script(request: Request) -> Fault | None:
        return Fault(delay=0.3) if request.target == slow else None

    with Faulty(files, script) as server:
        assert "/a-2.tar: 404" in message(server.url("/a-{0..39}.tar"), MissingError)


def test_splits_and_repetitions(small_set: PackedSet) -> None:
    """A shard named twice, another split, and tars with and without a manifest are errors, as they are in folders."""
    files = {f"/{path.name}": path.read_bytes() for path in small_set.folder.iterdir()}
    files["/other/0.tar"] = files["/train-000000.tar"]
    with Faulty(files) as server:
        both = [server.url("/train-shardindex.json"), server.url("/train-000001.tar")]
        assert "named more than once" in message(both)
        assert "is of split 'train'" in message(both[0], OptionsError, split="val")
        assert resolve(both[0], split="train", http=NO_WAIT).split == "train"
        assert "in no manifest" in message([both[0], server.url("/other/0.tar")])
