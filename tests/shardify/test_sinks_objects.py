"""Building into an object store, with a real S3 server: the bytes of a local build, whatever happens on the way."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from buckets import AZURITE, BUCKET, CREDENTIALS, S3, Gate, azurite_server, s3_server
from faulty import Faulty
from gallery import Gallery, Silent, make_gallery, tree
from gcs import gcs_server
from resuming import PLENTY, large
from struck import Outcome, Strike, Strikes

from shardify import build
from shardify.__main__ import app
from shardify.config import BuildConfig
from shardify.config.models import LEAST_MEMORY, Store
from shardify.errors import DataError, SettingsError, ShardifyError
from shardify.format.manifest import ShardEntry
from shardify.sinks import lease, objects, uploads
from shardify.sinks.uploads import HELD_SHARDS, Uploads

pytest.importorskip("obstore", reason="needs obstore (pip install 'shardify[cloud]')")
pytest.importorskip("moto.server", reason="needs moto's server (pip install 'moto[server]')")

PICTURES = 120
SHARDS = 8  # of train and val together


@pytest.fixture(scope="module", autouse=True)
def credentials() -> Iterator[None]:
    """Credentials where they belong: in the environment, that of the processes that build too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """The server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def strikes(tmp_path_factory: pytest.TempPathFactory, credentials: None) -> Iterator[Strikes]:
    """The server that forks builds."""
    server = Strikes(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@dataclass(frozen=True)
class Scene:
    """A source, the files of a local build of it, and builds of it into the store."""

    gallery: Gallery
    expected: dict[str, bytes]
    s3: S3
    folder: Path
    origin: str = ""

    def config(self, prefix: str, **sections: Any) -> BuildConfig:
        """Return the settings of a build into the store."""
        shards = {"size": 400_000, **sections.pop("shards", {})}
        store = {"endpoint": self.origin or self.s3.origin, "allow_http": True}
        given: dict[str, Any] = {"store": store, "work": str(self.folder / "work"), "shards": shards, "memory": LEAST_MEMORY}
        return self.gallery.config(f"s3://{BUCKET}/{prefix}", **{**given, **sections})  # type: ignore[arg-type]

    def build(
        self, prefix: str, *, force: bool = False, resume: bool = False, progress: Any = None, **sections: Any
    ) -> build.Report:
        """Build in this process."""
        config = self.config(prefix, **sections)
        return build.build(config, force=force, resume=resume, skipped_to=None, progress=progress or Silent())

    def strike(self, strikes: Strikes, prefix: str, strike: Strike | None, *, resume: bool = False, **sections: Any) -> Outcome:
        """Build in a process of its own, which is struck."""
        config = self.config(prefix, **sections)
        return strikes.run(
            config=config.model_dump(mode="json"),
            arguments={"force": False, "resume": resume},
            watched=[str(config.folder)],
            strike=strike,
        )

    def is_whole(self, prefix: str) -> bool:
        """Tell whether the place holds exactly what a local build gives, and this machine nothing any more."""
        return self.s3.tree(prefix) == self.expected and not self.config(prefix).folder.exists()

    def local(self, prefix: str) -> list[Path]:
        """Return the tars in a build's work folder."""
        return [path for path in self.config(prefix).folder.glob("*.tar*") if path.is_file()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Scene:
    """The source and its local build."""
    folder = tmp_path_factory.mktemp("scene")
    gallery = make_gallery(folder / "in", PICTURES, make=large)
    config = gallery.config(folder / "out", shards={"size": 400_000})
    build.build(config, force=False, skipped_to=None, progress=Silent())
    found = tree(folder / "out")
    assert sum(name.endswith(".tar") for name in found) >= SHARDS
    return Scene(gallery, found, s3, folder)


@pytest.fixture
def scene(made: Scene, tmp_path: Path) -> Scene:
    """The scene with a work folder of the test's own."""
    return replace(made, folder=tmp_path)


@pytest.fixture
def gate(s3: S3) -> Iterator[Gate]:
    """A gate before the server."""
    with Gate(s3.origin) as before:
        yield before


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A place of the test's own."""
    return f"sets/{request.node.name}"


def refusal(scene: Scene, prefix: str, **options: Any) -> str:
    """Return what a build that fails says, its notes too."""
    with pytest.raises(ShardifyError) as caught:
        scene.build(prefix, **options)
    return "\n".join([f"{type(caught.value).__name__}: {caught.value}", *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("name", "memory"), [("plain", LEAST_MEMORY), ("a b+c%2Fd/ä/'\"&=~*", PLENTY), ("deep/er/still", LEAST_MEMORY)]
)
def test_the_bytes_of_a_local_build(scene: Scene, name: str, memory: int) -> None:
    """Shards, indexes, card and manifests are those of a local build, under the prefix as it was given; the work folder is gone."""
    prefix = f"same {memory}/{name}"
    assert build.find_built(scene.config(prefix)) is None
    report = scene.build(prefix, memory=memory)
    assert scene.is_whole(prefix)
    assert build.find_built(scene.config(prefix)) == report.splits
    assert not any(
        b"secret-for-tests" in data or b"pictures" in data for data in scene.s3.tree(prefix).values() if data[:1] == b"{"
    )


def test_an_objects_metadata_says_its_hash(scene: Scene, prefix: str) -> None:
    """What `--resume` compares: each shard's sha256, as the manifest has it."""
    scene.build(prefix)
    for shard in json.loads(scene.s3.get(f"{prefix}/train-shardindex.json"))["shardlist"]:
        head = scene.s3.client.head_object(Bucket=BUCKET, Key=f"{prefix}/{shard['url']}")
        assert (head["Metadata"]["sha256"], head["ContentLength"]) == (shard["sha256"], shard["filesize"])


def test_processes_that_decode(scene: Scene, prefix: str) -> None:
    """Workers are spawned, so the library's threads, which ran in this process before, do them no harm."""
    connected(scene, prefix).sizes()
    scene.build(prefix, encode={"check": "decode", "workers": 2})
    found, expected = ({n: d for n, d in t.items() if n[-4:] in (".tar", ".idx")} for t in (scene.s3.tree(prefix), scene.expected))
    assert found == expected


def spread(last: int, count: int) -> list[int]:
    """Return `count` numbers from 1 to `last`, evenly."""
    return [1 + (last - 1) * i // (count - 1) for i in range(count)]


@pytest.mark.parametrize(
    ("memory", "count"),
    [(LEAST_MEMORY, 4), (PLENTY, 3), pytest.param(LEAST_MEMORY, 0, marks=pytest.mark.slow)],
    ids=["spooled", "held", "all"],
)
def test_kills(scene: Scene, strikes: Strikes, prefix: str, memory: int, count: int) -> None:
    """Killed (-9) at any operation on the work folder: no manifest of a part, and a resume ends with the same bytes."""
    seen = scene.strike(strikes, f"{prefix}/undisturbed", None, memory=memory)
    assert seen.code == 0, seen.error + seen.output
    moments = [Strike("", n, "any") for n in spread(seen.count(), count or seen.count())]
    moments += [Strike("", 3, "unlink", ".tar", after=after) for after in (False, True)] if count != 3 else []
    moments += [Strike("finishing", 1, "unlink", "journal")]
    for number, strike in enumerate(moments):
        place = f"{prefix}/{number}"
        killed = scene.strike(strikes, place, strike, memory=memory)
        if killed.code == 0:  # uploads may end in another order
            continue
        assert killed.code == -signal.SIGKILL, killed.output
        there = scene.s3.tree(place)
        assert all(scene.expected[name] == data for name, data in there.items() if name != lease.NAME)
        if any(name.endswith("shardindex.json") for name in there):
            assert there.keys() >= {name for name in scene.expected if not name.endswith("shardindex.json")}
        resumed = scene.strike(strikes, place, None, resume=True, memory=memory)
        assert resumed.code == 0, (strike, resumed.error, resumed.output)
        assert scene.is_whole(place), strike


def test_a_kill_of_a_resume(scene: Scene, strikes: Strikes, prefix: str) -> None:
    """A resume that is killed is resumed: three times in a row, each a little further."""
    for n in (2, 3, 4):
        killed = scene.strike(strikes, prefix, Strike("", n, "unlink", ".tar"), resume=n > 2)
        assert killed.code == -signal.SIGKILL
    assert scene.strike(strikes, prefix, None, resume=True).code == 0
    assert scene.is_whole(prefix)


def test_an_interrupt_ends_at_once(scene: Scene, strikes: Strikes, prefix: str) -> None:
    """Ctrl-C while shards are uploaded: it says how to go on, leaves no half upload, and ends soon."""
    outcome = scene.strike(strikes, prefix, Strike("writing", PICTURES // 2, how="interrupt"))
    assert outcome.code == 130 and outcome.seconds_after < 10
    assert not scene.s3.unfinished()
    assert scene.strike(strikes, prefix, None, resume=True).code == 0
    assert scene.is_whole(prefix)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test can wait for."""
    for name, value in {"RETRIES": 2, "RETRY_SECONDS": 2, "REQUEST_SECONDS": 1, "CONNECT_SECONDS": 1}.items():
        monkeypatch.setattr(objects, name, value)
    monkeypatch.setattr(uploads, "_STOP_SECONDS", 3.0)


def test_a_server_that_stops_midway(scene: Scene, gate: Gate, prefix: str, impatient: None) -> None:
    """The error names place, cause and next step; nothing final is there; `--resume` uploads what isn't there, and no shard twice."""
    scene = replace(scene, origin=gate.origin)
    gate.shuts_after = 1_200_000
    said = refusal(scene, prefix)
    assert f"StorageError: s3://{BUCKET}/{prefix}/" in said and "check the network" in said and "go on with --resume" in said
    done = scene.s3.tree(prefix)
    assert any(name.endswith(".tar") for name in done) and not any(name.endswith(".json") for name in done)
    refused = refusal(scene, prefix, resume=True)
    assert "StorageError" in refused and "--resume" in refused
    gate.shuts_after = None
    gate.asked.clear()
    scene.build(prefix, resume=True)
    assert scene.is_whole(prefix)
    again = {line.rpartition("/")[2] for line in gate.puts(".tar")}
    assert again and again.isdisjoint(done)


def test_a_server_that_says_nothing(scene: Scene, prefix: str, impatient: None) -> None:
    """One that takes connections and never answers is an error within the limits."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as deaf:
        silent = replace(scene, origin=f"http://127.0.0.1:{deaf.getsockname()[1]}")
        said = refusal(silent, prefix)
    assert "no answer: Timeout" in said and "check the network and the endpoint" in said
    assert [path.name for path in scene.config(prefix).folder.iterdir()] == [lease.NAME]  # the server may have it
    scene.build(prefix)
    assert scene.is_whole(prefix)


def test_connections_that_break(scene: Scene, gate: Gate, prefix: str) -> None:
    """Connections that break again and again cost time, and nothing else."""
    scene = replace(scene, origin=gate.origin)
    gate.breaks_every = 500_000
    scene.build(prefix)
    assert gate.broken >= 3
    assert scene.is_whole(prefix)
    assert not scene.s3.unfinished()


def test_an_interrupt_while_a_server_says_nothing(scene: Scene, prefix: str) -> None:
    """Ctrl-C ends a build that waits for a server which never answers, within seconds."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as deaf:
        config = replace(scene, origin=f"http://127.0.0.1:{deaf.getsockname()[1]}").config(prefix)
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            build.build(config, force=False, skipped_to=None, progress=Silent())
        assert time.monotonic() - began < 5


class Refusing(BaseHTTPRequestHandler):
    """Answers everything as `answer` says: a status, and a code and a message of S3's."""

    answer = (403, "AccessDenied", "Access Denied")

    def _refuse(self) -> None:
        status, code, message = self.answer
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message><AWSAccessKeyId>key-for-tests</AWSAccessKeyId></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _refuse  # noqa: N815

    def log_message(self, *text: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((403, "AccessDenied", "Access Denied"), r"refused \(AccessDenied: Access Denied\).*AWS_ACCESS_KEY_ID.*list, read, write"),
        ((403, "SignatureDoesNotMatch", "The request signature"), r"refused \(SignatureDoesNotMatch"),
        ((400, "ExpiredToken", "The provided token has expired."), r"credentials have expired \(ExpiredToken.*renew"),
        (
            (400, "AuthorizationHeaderMalformed", "the region is wrong; expecting 'eu-west-1'"),
            r"AuthorizationHeader.*expecting 'eu-west-1'",
        ),
        ((503, "SlowDown", "Please reduce your request rate."), r"SlowDown: Please reduce.*--resume"),
    ],
)
def test_what_a_server_refuses_with(scene: Scene, prefix: str, impatient: None, answer: tuple[int, str, str], said: str) -> None:
    """The server's own words, what to look at, and no key."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (Refusing,), {"answer": answer}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        text = refusal(replace(scene, origin=f"http://127.0.0.1:{server.server_address[1]}"), prefix)
    finally:
        server.shutdown()
        server.server_close()
    assert re.search(said, text) and f"s3://{BUCKET}/{prefix}" in text
    assert "key-for-tests" not in text and "secret" not in text


def test_wrong_places(scene: Scene, prefix: str, impatient: None) -> None:
    """A bucket that isn't there, a server that isn't there: said before anything is read."""
    progress = Silent()
    config = scene.config(prefix).model_copy(
        update={"shards": scene.config(prefix).shards.model_copy(update={"out": objects.ObjectUrl("s3", "no-such-bucket", "x")})}
    )
    with pytest.raises(SettingsError, match=r"s3://no-such-bucket.*there is no bucket 'no-such-bucket'.*--out"):
        build.build(config, force=False, skipped_to=None, progress=progress)
    assert not progress.stages
    said = refusal(replace(scene, origin="http://127.0.0.1:9"), prefix)
    assert "no answer" in said and "Connect" in said


def test_a_key_with_its_line_end(scene: Scene, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no header can hold makes obstore panic, which isn't an Exception: it is a wrong setting all the same."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "c2Vj\n")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token\n")
    assert "is there a line's end in a key" in refusal(scene, prefix)


def test_a_refusal_that_repeats_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint may say again what it was asked: its words are shown, the environment's keys in them aren't."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t0ken-of-the-session")
    text = "403 Forbidden: <Code>AccessDenied</Code><Message>no access with t0ken-of-the-session here</Message>"
    assert objects._cause(text) == "AccessDenied: no access with ... here"


def test_a_folder_that_a_console_made(scene: Scene, prefix: str) -> None:
    """Its object, empty and called like the folder, is no file of someone's: a build takes the place."""
    scene.s3.put(f"{prefix}/", b"")
    scene.build(prefix)
    found = scene.s3.tree(prefix)
    assert found.pop("", b"") == b"" and found == scene.expected


def test_the_place_is_occupied(scene: Scene, prefix: str) -> None:
    """A set that is there is refused, replaced by `--force`; what no manifest names is never removed."""
    scene.build(prefix)
    assert "holds a set (README.md" in refusal(scene, prefix) and scene.is_whole(prefix)
    scene.build(prefix, force=True, shards={"size": 900_000})
    assert build.find_built(scene.config(prefix, shards={"size": 900_000})) is not None
    assert scene.s3.tree(prefix).keys() < scene.expected.keys()
    for name in ("notes.txt", "deep/notes.txt", "README.md"):  # a card that someone wrote in
        scene.s3.put(f"{prefix}/{name}")
    before = scene.s3.tree(prefix)
    assert "no manifest or journal there names (README.md, deep/, notes.txt)" in refusal(scene, prefix, force=True)
    assert scene.s3.tree(prefix) == before and not scene.config(prefix).folder.exists()


def test_force_removes_the_manifest_first(scene: Scene, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment that `--force` changes something until all is there, no manifest is."""
    scene.build(prefix)
    changes: list[str] = []
    put, delete = objects.Bucket.put, objects.Bucket.delete

    def noted_put(bucket: objects.Bucket, name: str, *rest: Any, **options: Any) -> str:
        changes.append(f"put {name}")
        return put(bucket, name, *rest, **options)

    def noted_delete(bucket: objects.Bucket, names: list[str]) -> None:
        changes.append(f"delete {' '.join(names)}")
        delete(bucket, names)

    monkeypatch.setattr(objects.Bucket, "put", noted_put)
    monkeypatch.setattr(objects.Bucket, "delete", noted_delete)
    scene.build(prefix, force=True)
    changes = [change for change in changes if not change.endswith((lease.NAME, lease.PROBE))]
    manifests = ("train-shardindex.json", "val-shardindex.json")
    assert changes[0] == f"delete {' '.join(manifests)}" and changes[1].count(".tar") >= SHARDS
    assert changes[-3:] == ["put README.md", *(f"put {name}" for name in manifests)]
    assert scene.is_whole(prefix)


def write_lease(scene: Scene, prefix: str, **facts: Any) -> None:
    """Put a lease of a build elsewhere."""
    scene.s3.put(
        f"{prefix}/{lease.NAME}",
        json.dumps({"token": "x", "run": "y", "resting": False, "shards": {}, "remove": [], **facts}).encode(),
    )


def test_another_build_there(scene: Scene, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that another machine's build writes to is refused, `--force` or not; one whose build died needs `--force`."""
    write_lease(scene, prefix, shards={"train": 2}, remove=["old.idx"])
    for name in ("train-000001.tar", "old.idx"):
        scene.s3.put(f"{prefix}/{name}")
    before = scene.s3.tree(prefix)
    for options in ({}, {"resume": True}, {"force": True}):
        assert "another build writes to" in refusal(scene, prefix, **options)
    monkeypatch.setattr(lease, "EXPIRES_SECONDS", 0.0)
    for options in ({}, {"resume": True}):
        assert "whose work folder isn't" in refusal(scene, prefix, **options)
    scene.s3.put(f"{prefix}/notes.txt")
    assert "(notes.txt)" in refusal(scene, prefix, force=True)
    assert {n: d for n, d in scene.s3.tree(prefix).items() if n != lease.NAME} == {
        **{n: d for n, d in before.items() if n != lease.NAME},
        "notes.txt": b"mine",
    }
    scene.s3.client.delete_object(Bucket=BUCKET, Key=f"{prefix}/notes.txt")
    scene.build(prefix, force=True)
    assert scene.is_whole(prefix)


def test_two_at_once(scene: Scene, prefix: str) -> None:
    """Of two builds to one place, on this machine and with different work folders, one is refused and the other is whole."""
    said: list[str] = []

    class Meanwhile(Silent):
        def begin(self, doing: str, total: int, unit: str = "images") -> None:
            if doing == "writing":
                said.append(refusal(scene, prefix))
                said.append(refusal(replace(scene, folder=scene.folder / "other"), prefix, force=True))

    scene.build(prefix, progress=Meanwhile())
    assert all("another build writes to" in text for text in said) and len(said) == 2
    assert scene.is_whole(prefix)


def test_a_store_without_conditional_writes(scene: Scene, gate: Gate, prefix: str, impatient: None) -> None:
    """It is looked whether the place is free, and written then: a running build is still respected, and a killed one resumed."""
    scene = replace(scene, origin=gate.origin)
    gate.conditions = False
    said: list[str] = []

    class Meanwhile(Silent):
        def begin(self, doing: str, total: int, unit: str = "images") -> None:
            if doing == "writing":
                said.append(refusal(replace(scene, folder=scene.folder / "other"), prefix, force=True))

    scene.build(prefix, progress=Meanwhile())
    assert len(said) == 1 and "another build writes to" in said[0]
    assert scene.is_whole(prefix)


def test_force_after_a_kill(scene: Scene, strikes: Strikes, prefix: str) -> None:
    """What a killed build left, here and in the store, goes with `--force`."""
    killed = scene.strike(strikes, prefix, Strike("writing", PICTURES * 2 // 3))
    assert killed.code == -signal.SIGKILL and "holds a build that was cut off; go on with --resume" in refusal(scene, prefix)
    assert any(name.endswith(".tar") for name in scene.s3.tree(prefix))
    scene.build(prefix, force=True, shards={"size": 900_000})
    assert build.find_built(scene.config(prefix, shards={"size": 900_000})) is not None
    assert lease.NAME not in scene.s3.tree(prefix) and len(scene.s3.tree(prefix)) < len(scene.expected)
    assert not scene.config(prefix).folder.exists()


def test_a_shard_that_someone_removes_meanwhile(scene: Scene, prefix: str) -> None:
    """No manifest names an object that isn't there: a last look is taken before."""

    class Meanwhile(Silent):
        def begin(self, doing: str, total: int, unit: str = "images") -> None:
            if doing == "finishing":
                scene.s3.client.delete_object(Bucket=BUCKET, Key=f"{prefix}/train-000001.idx")

    said = refusal(scene, prefix, progress=Meanwhile())
    assert "train-000001.tar were uploaded and are gone" in said and "--resume" in said
    assert not any(name.endswith(".json") for name in scene.s3.tree(prefix))
    scene.build(prefix, resume=True)
    assert scene.is_whole(prefix)


def test_a_place_that_was_taken_over(scene: Scene, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build whose lease is another's by now writes no manifest."""

    class Meanwhile(Silent):
        def begin(self, doing: str, total: int, unit: str = "images") -> None:
            if doing == "finishing":
                write_lease(scene, prefix)

    said = refusal(scene, prefix, progress=Meanwhile())
    assert "another build took the place over" in said and "--resume" in said
    assert not any(name.endswith(".json") for name in scene.s3.tree(prefix))


def test_room_on_this_machine_is_bounded(scene: Scene, gate: Gate, prefix: str) -> None:
    """However slow the store is, no more shards lie here than are on their way, and the one that is written."""
    scene = replace(scene, origin=gate.origin)
    gate.delay_seconds = 0.1
    most: list[int] = []

    class Looking(Silent):
        def advance(self, size: int) -> None:
            most.append(len(scene.local(prefix)))

    scene.build(prefix, progress=Looking())
    assert 2 <= max(most) <= HELD_SHARDS
    assert scene.is_whole(prefix)


def test_a_full_work_folder(scene: Scene, strikes: Strikes, prefix: str, tmp_path: Path) -> None:
    """A disk that fills up says so and how to go on, and with more room the build does."""
    disk = tmp_path / "work"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", disk], check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        fill = Strike("writing", 1, how="fill", path=str(disk / "others"))  # before a shard is uploaded, which gives room
        full = scene.strike(strikes, prefix, fill, memory=PLENTY)
        assert full.code == 3 and full.struck and "No space left" in full.error and "--resume" in full.error, full.error
        (disk / "others").unlink()
        assert scene.strike(strikes, prefix, None, resume=True, memory=PLENTY).code == 0
        assert scene.is_whole(prefix)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def connected(scene: Scene, prefix: str) -> objects.Bucket:
    """Return the place by the door itself."""
    config = scene.config(prefix)
    assert isinstance(config.shards.out, objects.ObjectUrl)
    return objects.connect(config.shards.out, config.store)


def test_a_large_shard_goes_in_parts(scene: Scene, prefix: str, tmp_path: Path) -> None:
    """More than a part's bytes are sent in parts; bytes that aren't those that were written are never there, and no part of them."""
    data = bytes(range(256)) * (objects.PART_BYTES // 256 * 2 + 5)
    bucket = connected(scene, prefix)
    for name, sha256 in (("good.tar", hashlib.sha256(data).hexdigest()), ("bad.tar", "0" * 64)):
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).with_suffix(".idx").write_bytes(b"index")
        work = Uploads(bucket, tmp_path)
        work.add(ShardEntry(name, 1, len(data), sha256), lambda: None)
        if name == "good.tar":
            work.finish(lambda: None)
        else:
            with pytest.raises(DataError, match=r"bad\.tar.*no longer those that were written"):
                work.finish(lambda: None)
    assert scene.s3.tree(prefix) == {"good.tar": data, "good.idx": b"index", "bad.idx": b"index"}
    assert (
        scene.s3.client.head_object(Bucket=BUCKET, Key=f"{prefix}/good.tar")["Metadata"]["sha256"]
        == hashlib.sha256(data).hexdigest()
    )
    assert not scene.s3.unfinished()
    assert {path.name for path in tmp_path.iterdir()} == {"bad.tar", "bad.idx"}
    assert not [thread for thread in threading.enumerate() if thread.name == "upload"]


def test_a_shard_that_vanished_from_the_store(scene: Scene, strikes: Strikes, prefix: str) -> None:
    """What the journal says is uploaded is looked for: an object that is gone, or is another one, is written again."""
    killed = scene.strike(strikes, prefix, Strike("", 5, "unlink", ".tar"))
    assert killed.code == -signal.SIGKILL
    first, second = sorted(name for name in scene.s3.tree(prefix) if name.endswith(".tar"))[:2]
    scene.s3.client.delete_object(Bucket=BUCKET, Key=f"{prefix}/{first}")
    scene.s3.put(f"{prefix}/{second}", bytes(len(scene.expected[second])))
    assert scene.strike(strikes, prefix, None, resume=True).code == 0
    assert scene.is_whole(prefix)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_a_private_ca(certificates: Path, impatient: None) -> None:
    """A certificate that nobody trusts is named with what to give; with `store.ca` the same endpoint is spoken to."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "good.pem", certificates / "good.key")
    url = objects.ObjectUrl("s3", BUCKET, "set")
    with Faulty({f"/{BUCKET}/set/a.json": b"{}"}, tls=tls) as server:
        with pytest.raises(SettingsError, match=r"s3://pictures/set/a\.json: .*certificate isn't trusted.*store\.ca"):
            objects.connect(url, Store(endpoint=server.origin)).read("a.json")
        trusting = Store(endpoint=server.origin, ca=certificates / "ca.pem")
        assert objects.connect(url, trusting).read("a.json") == b"{}"
    for name, said in (("nowhere.pem", "can't be read"), ("ca.key", "store")):
        with pytest.raises(SettingsError, match=said):
            objects.connect(url, Store(ca=certificates / name))


def test_without_the_library(scene: Scene, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what to install."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "pip install 'shardify[cloud]' (in a clone: pip install -c constraints.txt -e '.[cloud]')" in refusal(scene, prefix)
    with pytest.raises(SettingsError, match="shardify\\[cloud\\]"):
        build.find_built(scene.config(prefix))
    shutil.rmtree(scene.folder / "work", ignore_errors=True)


@pytest.mark.skipif(AZURITE is None, reason="needs azurite (npm install azurite; on PATH, or its azurite-blob named by AZURITE)")
def test_azure(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """az://container/prefix: the bytes of a local build, replaced by `--force`; a set that is there is refused; a wrong container named."""
    (tmp_path / "azurite").mkdir()
    with azurite_server(tmp_path / "azurite", "sets") as azurite:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", azurite.account)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azurite.key)
        shards, store = {"size": 400_000}, {"endpoint": azurite.origin, "allow_http": True}

        def run(container: str, **options: Any) -> None:
            config = scene.gallery.config(f"az://{container}/a/b", shards=shards, store=store, work=str(tmp_path / "work"))  # type: ignore[arg-type]
            build.build(config, **{"force": False, **options}, skipped_to=None, progress=Silent())

        run("sets")
        assert azurite.tree("sets", "a/b") == scene.expected
        with pytest.raises(SettingsError, match="az://sets/a/b holds a set"):
            run("sets")
        run("sets", force=True)
        assert azurite.tree("sets", "a/b") == scene.expected
        with pytest.raises(SettingsError, match="there is no container 'nowhere'"):
            run("nowhere")


def test_the_command_line(scene: Scene, prefix: str, tmp_path: Path) -> None:
    """`plan`, `build --out s3://... --work ...`, then `--if-missing` and `--resume`, which find the set there and change nothing."""
    settings, url = tmp_path / "settings.yaml", f"s3://{BUCKET}/{prefix}"
    settings.write_text(json.dumps(scene.config(prefix).model_dump(mode="json") | {"work": None}))

    def shardify(*arguments: str, code: int = 0) -> tuple[str, str]:
        out, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            app(arguments, prog_name="shardify")
        assert int(ended.value.code or 0) == code, errors.getvalue()
        assert "secret-for-tests" not in out.getvalue() + errors.getvalue()
        return out.getvalue(), errors.getvalue()

    options = (str(settings), "--out", url, "--work", str(tmp_path / "work"))
    planned = json.loads(shardify("plan", *options, "--json")[0])
    assert planned["disk"]["output"] < sum(map(len, scene.expected.values())) / 2
    assert planned["disk"]["held_shards"] == HELD_SHARDS
    assert f" bytes for the {HELD_SHARDS} shards that lie there at once, " in shardify("plan", *options)[0]
    assert not any(url in note for note in planned["notes"])
    assert f"packed into {url}" in shardify("build", *options)[1]
    assert scene.is_whole(prefix)
    for option in ("--if-missing", "--resume"):
        assert f"{url} is there, complete" in shardify("build", *options, option)[1]
    assert "holds a set" in shardify("build", *options, code=2)[1]
    assert f"{url} isn't empty" in shardify("plan", *options)[1]
    assert not list((tmp_path / "work").iterdir())


def test_google(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gs://bucket/prefix, whose conditions are generations: the same bytes, one build at a time, a wrong bucket named."""
    with gcs_server(tmp_path) as (server, account):
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)  # written again and again, each time on the last one's condition
        shards, store, said = {"size": 400_000}, {"allow_http": True}, list[str]()

        def run(bucket: str, progress: Any = None, work: str = "work", **options: Any) -> None:
            config = scene.gallery.config(f"gs://{bucket}/a/b", shards=shards, store=store, work=str(tmp_path / work))  # type: ignore[arg-type]
            build.build(config, **{"force": False, **options}, skipped_to=None, progress=progress or Silent())

        class Meanwhile(Silent):
            def begin(self, doing: str, total: int, unit: str = "images") -> None:
                if doing == "writing":
                    with pytest.raises(SettingsError) as caught:
                        run("pictures", work="other", force=True)
                    said.append(str(caught.value))

        run("pictures", Meanwhile())
        assert len(said) == 1 and "another build writes to gs://pictures/a/b" in said[0]
        assert server.tree("a/b") == scene.expected
        run("pictures", force=True)
        assert server.tree("a/b") == scene.expected
        with pytest.raises(SettingsError, match="there is no bucket 'nowhere'"):
            run("nowhere")
