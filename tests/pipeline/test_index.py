"""`python -m pipeline index`: tars behind URLs are read once, and a set is made of them that loaders count and read."""

from __future__ import annotations

import functools
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from afar import QUICK, epochs, loader_of
from faulty import HTML, Fault, Faulty, Request, some_faults
from foreign import mk, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from network import no_network  # noqa: F401
from nginx import NGINX, nginx

from pipeline.errors import DeniedError, MissingError, OptionsError, RemoteError
from pipeline.index import Indexed, index
from pipeline.index.crew import in_order
from pipeline.index.record import NAME
from pipeline.stores.forward import Forward, LeftError
from shardify.format import manifest

pytestmark = pytest.mark.usefixtures("no_network")

SHARDS, EACH = 3, 40


def members(first: int, count: int = EACH, size: int = 3000) -> list[tuple[str, bytes]]:
    """Return members of samples of different bytes."""
    made = []
    for n in range(first, first + count):
        made += [(f"k{n:04d}.jpg", random.Random(n).randbytes(size + n)), (f"k{n:04d}.cls", str(n % 7).encode())]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tars as the standard library writes them: no index, padded to 10 KiB."""
    made = tmp_path_factory.mktemp("tars")
    for number in range(SHARDS):
        mk(made / f"train-{number:06d}.tar", members(number * EACH))
    return made


@pytest.fixture(scope="module")
def local(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tars with what `shardify index` writes."""
    made = tmp_path_factory.mktemp("local") / "set"
    shutil.copytree(folder, made)
    run(made)
    return made


@pytest.fixture(scope="module")
def expected(local: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The batches of two epochs of the local set."""
    return epochs(str(local), tmp_path_factory.mktemp("unused"), 2)


PATTERN = "/train-{000000..000002}.tar"


def index_of(*texts: str, out: Path, **given: Any) -> Indexed:
    """Index with little patience."""
    return index(texts, out=out, http=QUICK, **given)


def tar_requests(server: Faulty) -> list[str]:
    """Return which tars were read."""
    return [request.target for request in server.log if request.method == "GET" and request.target.endswith(".tar")]


@pytest.mark.parametrize("connections", [1, 4])
def test_the_set_is_that_of_shardify_index(folder: Path, local: Path, tmp_path: Path, connections: int) -> None:
    """Indexes are equal byte for byte, the manifest but for URLs and the indexes' places; each tar is asked for once, whole."""
    with Faulty(folder) as server:
        found = index_of(server.url(PATTERN), out=tmp_path, connections=connections)
        assert found.problems == ()
        assert sorted(tar_requests(server)) == [f"/train-00000{n}.tar" for n in range(SHARDS)]
        assert found.manifests == {"train": str(tmp_path / "train-shardindex.json")}
        mine, theirs = (manifest.read(where / "train-shardindex.json") for where in (tmp_path, local))
        assert [entry.url for entry in mine.shards] == [server.url(f"/train-00000{n}.tar") for n in range(SHARDS)]
    facts = [[(e.name, e.nsamples, e.filesize, e.sha256) for e in each.shards] for each in (mine, theirs)]
    assert facts[0] == facts[1] and mine.digest == theirs.digest
    assert (mine.fields, mine.indexed, mine.split, mine.classes) == (theirs.fields, True, "train", None)
    for path in local.glob("*.idx"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".partial") == []


def test_a_loader_reads_it_as_the_local_set(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    """The same batches, a length, and a rank's part."""
    with Faulty(folder) as server:
        index_of(server.url(PATTERN), out=tmp_path / "set")
        where = str(tmp_path / "set" / "train-shardindex.json")
        assert epochs(where, tmp_path / "cache", 2, workers=2) == expected
        with loader_of(where, tmp_path / "cache") as loader:
            assert len(loader) == SHARDS * EACH // 16
        keys = [[k for b in epochs(where, tmp_path / "cache", 1, rank=r, world_size=2)[0] for k in b[0]] for r in range(2)]
        assert not set(keys[0]) & set(keys[1])


def test_it_is_usable_beside_the_tars_too(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    """What was written can be uploaded beside the tars: then the URL of the manifest, or of the tars, is enough."""
    served = tmp_path / "served"
    shutil.copytree(folder, served)
    with Faulty(served) as server:
        index_of(server.url(PATTERN), out=tmp_path / "set")
        for path in (tmp_path / "set").glob("train-*"):
            shutil.copy(path, served)
        assert epochs(server.url("/train-shardindex.json"), tmp_path / "cache", 1) == expected[:1]
        assert epochs(server.url(PATTERN), tmp_path / "cache", 1) == expected[:1]


def test_a_second_run_reads_nothing(folder: Path, tmp_path: Path) -> None:
    """Nor does it change anything; without the record, or with a damaged one, or another index, tars are read again."""
    with Faulty(folder) as server:
        first = index_of(server.url(PATTERN), out=tmp_path)
        before, asked = {path: path.read_bytes() for path in tmp_path.iterdir()}, len(tar_requests(server))
        again = index_of(server.url(PATTERN), out=tmp_path)
        assert len(tar_requests(server)) == asked
        assert [(s.samples, s.bytes, s.read) for s in again.splits.values()] == [
            (s.samples, s.bytes, 0) for s in first.splits.values()
        ]
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        lines = (tmp_path / NAME).read_text().splitlines()
        (tmp_path / NAME).write_text(lines[0] + "\n" + '{"tar": 3}\n[]\n' + lines[1][:40])  # the end of a killed process
        index_of(server.url(PATTERN), out=tmp_path)
        assert len(tar_requests(server)) == asked + 2
        assert index_of(server.url(PATTERN), out=tmp_path).splits["train"].read == 0
        (tmp_path / "train-000001.idx").unlink()
        assert index_of(server.url(PATTERN), out=tmp_path).splits["train"].read == 1
        assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != NAME} == {
            path: data for path, data in before.items() if path.name != NAME
        }


def test_without_versions_everything_is_read_again(folder: Path, tmp_path: Path) -> None:
    """A length alone tells nothing of the bytes."""
    with Faulty(folder, otherwise=Fault(etag="", modified="")) as server:
        index_of(server.url(PATTERN), out=tmp_path)
        assert index_of(server.url(PATTERN), out=tmp_path).splits["train"].read == SHARDS


def test_a_killed_run_goes_on(folder: Path, local: Path, tmp_path: Path) -> None:
    """SIGKILL at any time leaves whole files; the next run reads only what is missing."""
    with Faulty(folder, rate=250_000) as server:
        command = [sys.executable, "-m", "pipeline", "index", server.url(PATTERN), "--out", str(tmp_path), "--connections", "1"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 30
        while not (tmp_path / NAME).exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "train-shardindex.json").exists()
    with Faulty(folder, port=server.port) as server:
        found = index_of(server.url(PATTERN), out=tmp_path)
        assert 0 < found.splits["train"].read < SHARDS
    for path in local.glob("*.idx"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_an_interrupt_ends_it_at_once(folder: Path, tmp_path: Path) -> None:
    """Ctrl-C while a server says nothing: exit code 130, within seconds."""
    with Faulty(folder, otherwise=Fault(cut=1000, stall=60)) as server:
        command = [sys.executable, "-m", "pipeline", "index", server.url(PATTERN), "--out", str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        until = time.monotonic() + 30
        while not tar_requests(server) and time.monotonic() < until:
            time.sleep(0.01)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert time.monotonic() - began < 5


def test_most_replies_fail(folder: Path, local: Path, tmp_path: Path) -> None:
    """Every sample, once; the retries are counted."""
    patient = QUICK.__class__(first_wait_seconds=0.001, longest_wait_seconds=0.01, attempts=60, idle_seconds=5)
    with Faulty(folder, some_faults(0.7, 5, 50_000)) as server:
        found = index([server.url(PATTERN)], out=tmp_path, http=patient)
    assert found.problems == () and any("made again" in note for note in found.notes)
    for path in local.glob("*.idx"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


FAULTS = [
    Fault(cut=70_000),
    Fault(raw=b""),
    Fault(status=503),
    Fault(body=HTML),
    Fault(ranges=False),
    Fault(chunked=True),
    Fault(gzip=True),
]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.none(), st.sampled_from(FAULTS)), max_size=25))
def test_any_sequence_of_faults(
    folder: Path, local: Path, tmp_path_factory: pytest.TempPathFactory, faults: list[Fault | None]
) -> None:
    """The manifest is right, or there is none and what is said names the server."""
    out = tmp_path_factory.mktemp("out")
    with Faulty(folder, faults) as server:
        try:
            found = index_of(server.url(PATTERN), out=out, connections=1)
            if found.problems:  # a server that says another length first, and then none
                assert faults and found.manifests == {} and server.origin in found.problems[0]
                return
            assert manifest.read(out / "train-shardindex.json").digest == manifest.read(local / "train-shardindex.json").digest
        except RemoteError as error:
            assert server.origin in str(error)
            assert not (out / "train-shardindex.json").exists()


def test_a_server_that_knows_no_length(folder: Path, local: Path, tmp_path: Path) -> None:
    """Chunked bodies end where their last chunk says so."""
    with Faulty(folder, otherwise=Fault(chunked=True, ranges=False, head=405)) as server:
        index_of(server.url(PATTERN), out=tmp_path)
    assert manifest.read(tmp_path / "train-shardindex.json").digest == manifest.read(local / "train-shardindex.json").digest


def test_what_changes_between_is_an_error(folder: Path, tmp_path: Path) -> None:
    """Another ETag after the first look is a ChangedError; after an index was written it is refused, and read anew with force."""

    def script(request: Request) -> Fault | None:
        return Fault(etag='"new"') if request.method == "GET" and "000001" in request.target else None

    with Faulty(folder, script) as server, pytest.raises(RemoteError, match="changed while it was read"):
        index_of(server.url(PATTERN), out=tmp_path)
    with Faulty(folder, port=server.port) as server:
        index_of(server.url(PATTERN), out=tmp_path)
    with Faulty(folder, otherwise=Fault(etag='"new"'), port=server.port) as server:
        with pytest.raises(OptionsError, match=r"changed since it was indexed.*--force"):
            index_of(server.url(PATTERN), out=tmp_path)
        assert index_of(server.url(PATTERN), out=tmp_path, force=True).splits["train"].read == SHARDS


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [(404, MissingError, "2 of 3 tars aren't there"), (403, DeniedError, "403"), (500, RemoteError, "500")],
)
def test_what_can_t_be_read_is_named(folder: Path, tmp_path: Path, status: int, kind: type[RemoteError], text: str) -> None:
    """All tars that aren't there at once, before any is read."""
    script = lambda request: Fault(status=status) if "000000" not in request.target else None  # noqa: E731
    with Faulty(folder, script) as server:
        with pytest.raises(kind, match=text):
            index_of(server.url(PATTERN), out=tmp_path)
        assert tar_requests(server) == [] or status in {500, 403}
    assert not (tmp_path / "train-shardindex.json").exists()


def served(**files: bytes) -> dict[str, bytes]:
    """Return files by their targets."""
    return {f"/{name.replace('__', '-').replace('_', '.')}": data for name, data in files.items()}


def tar_of(content: list[tuple[str, bytes]], tmp_path: Path, **attributes: Any) -> bytes:
    """Return a tar's bytes."""
    return mk(tmp_path / "made.tar", content, **attributes).read_bytes()


def test_bad_tars_are_reported_or_left_out(tmp_path: Path) -> None:
    """A cut one, a page, none of them indexed, all named; the good one has its index; `skip_bad` makes a set of it."""
    good = tar_of(members(0), tmp_path)
    files = {
        "/t-0.tar": good,
        "/t-1.tar": good[: len(good) // 2],
        "/t-2.tar": b"\x1f\x8b" + bytes(2000),
        "/t-3.tar": bytes(10240),
        "/t-4.tar": tar_of([("a.jpg", b"x"), ("b.jpg", b"y"), ("a.cls", b"1"), ("b.cls", b"2")], tmp_path),
        "/t-5.tar": tar_of([("a b.jpg", b"x"), ("a b.cls", b"1")], tmp_path),
    }
    with Faulty(files) as server:
        found = index_of(server.url("/t-{0..5}.tar"), out=tmp_path / "out")
        told = "\n".join(found.problems)
        for number, word in (
            (1, "cut"),
            (2, "compressed by gzip"),
            (3, "no sample"),
            (4, "after its sample was closed"),
            (5, "blank"),
        ):
            assert any(f"/t-{number}.tar" in line and word in line for line in found.problems), (number, told)
        assert "5 of 6 tars aren't indexed" in told and found.manifests == {}
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [NAME, "t-0.idx"]
        kept = index_of(server.url("/t-{0..5}.tar"), out=tmp_path / "out", skip_bad=True)
        assert kept.problems == () and kept.splits["t"].shards == 1 and kept.splits["t"].read == 0
        assert len([note for note in kept.notes if note.startswith("left out: ")]) >= 5


def test_fields_and_keys_are_compared(tmp_path: Path) -> None:
    """Samples of other fields, keys that stand in several tars: said, and a set all the same."""
    files = {
        "/a-0.tar": tar_of(members(0), tmp_path),
        "/a-1.tar": tar_of([*members(EACH - 2), ("odd.png", b"x")], tmp_path),
    }
    with Faulty(files) as server:
        found = index_of(server.url("/a-{0..1}.tar"), out=tmp_path / "out")
        again = index_of(server.url("/a-{0..1}.tar"), out=tmp_path / "out")
        assert found.problems == again.problems
        assert found.manifests
        told = "\n".join(found.problems)
        assert "'odd' has png" in told
        for key in ("k0038", "k0039"):
            assert f"{server.origin}/a-1.tar: key '{key}' stands in {server.origin}/a-0.tar too" in told


def test_equal_names_and_odd_names(tmp_path: Path) -> None:
    """Tars of one name from several folders, quoted slashes, blanks, dots: each has its own index, in the folder."""
    targets = [
        "/a/t-0.tar",
        "/b/t-0.tar",
        "/c/x%2F..%2F..%2Ft-0.tar",
        "/c/with%20blank%20%26+-0.tar",
        "/c/.t-0.tar",
        "/c/%C3%A4-0.tar",
    ]
    names = ["/a/t-0.tar", "/b/t-0.tar", "/c/x/../../t-0.tar", "/c/with blank &+-0.tar", "/c/.t-0.tar", "/c/ä-0.tar"]
    files = {name: tar_of(members(n * EACH, 4), tmp_path) for n, name in enumerate(names)}
    with Faulty(files) as server:
        out = tmp_path / "deep" / "out"
        found = index_of(*map(server.url, targets), out=out, split="train")
        assert found.problems == ()
        assert len(list(out.glob("*.idx"))) == len(targets)
        assert not list(tmp_path.glob("*.idx"))
        assert len({key for batch in epochs(str(out), tmp_path / "cache", 1, last_batch="uneven")[0] for key in batch[0]}) == 24


def test_several_splits(tmp_path: Path) -> None:
    """Names tell splits; each gets its manifest."""
    files = {f"/{name}-0.tar": tar_of(members(n * EACH), tmp_path) for n, name in enumerate(("train", "val"))}
    with Faulty(files) as server:
        found = index_of(server.url("/{train,val}-0.tar"), out=tmp_path / "out")
        assert set(found.manifests) == {"train", "val"} and found.problems == ()


def test_secrets_stay_out(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A password is written nowhere; a signature only into the manifest, for its user alone; signed anew, nothing is read again."""
    with Faulty(folder) as server:
        urls = [f"http://me:hunter2@127.0.0.1:{server.port}/train-00000{n}.tar?X-Amz-Signature=s3cret1" for n in range(SHARDS)]
        found = index_of(*urls, out=tmp_path)
        for path in tmp_path.iterdir():
            text = path.read_text()
            assert "hunter2" not in text
            assert ("s3cret1" in text) == (path.suffix == ".json")
        assert (tmp_path / "train-shardindex.json").stat().st_mode & 0o077 == 0
        assert not any("s3cret1" in text or "hunter2" in text for text in (*found.notes, *found.problems))
        anew = index_of(*(url.replace("s3cret1", "s3cret2") for url in urls), out=tmp_path)
        assert anew.splits["train"].read == 0
        assert "s3cret2" in (tmp_path / "train-shardindex.json").read_text()
        assert "s3cret" not in "".join(capfd.readouterr())


def test_files_in_the_way_are_refused(folder: Path, tmp_path: Path) -> None:
    """Before anything is read; `force` replaces them."""
    with Faulty(folder) as server:
        (tmp_path / "train-000001.idx").write_text("mine")
        (tmp_path / "train-shardindex.json").write_text("{}")
        with pytest.raises(OptionsError, match=r"shardindex.json.*train-000001.idx"):
            index_of(server.url(PATTERN), out=tmp_path)
        assert tar_requests(server) == []
        assert index_of(server.url(PATTERN), out=tmp_path, force=True).problems == ()
        with pytest.raises(OptionsError, match="lists 3 tars, and not these 2"):
            index_of(server.url("/train-{000000..000001}.tar"), out=tmp_path)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        (tmp_path / "train-000001.idx").write_text("v1.2 1\njpg 512 3 a.jpg\n")  # of another tar
        found = index_of(server.url(PATTERN), out=tmp_path)
        assert any("train-000001.idx: is there and says something else" in line for line in found.problems)
        assert found.manifests == {}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["/data/a.tar"], "/data/a.tar: not a URL.*shardify index"),
        (["https//me:pw@host/a.tar"], "a text \\(not shown"),
        (["http://h/a.tar.lz4"], "compressed"),
        (["http://h/.tar.gz"], "compressed"),
        (["http://h/a.tar", "s3://bucket/a.tar"], "one kind at a time"),
        (["s3://bucket/folder/"], "not called .tar"),
        (["http://h/a-shardindex.json"], "is a manifest"),
        (["http://h/folder/"], "not called .tar"),
        (["http://h/a-0.tar", "http://h/a-0.tar?X-Amz-Signature=2"], "named 2 times"),
        (["http://h/00000.tar", "http://h/00001.tar"], "which split"),
        (["http://h/a-{0..3.tar"], "braces"),
        (["http://:0/a.tar"], "no host"),
        (["@nowhere.txt"], "nowhere.txt: can't be read"),
        ([], "no URL"),
    ],
)
def test_texts_that_can_t_be_used(texts: list[str], words: str, tmp_path: Path) -> None:
    """They are named before anything is asked for."""
    with pytest.raises(OptionsError, match=words):
        index_of(*texts, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lists_from_a_file_and_stdin(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One URL or pattern a line, remarks and empty lines aside."""
    with Faulty(folder) as server:
        text = f"# the set\n\n{server.url('/train-{000000..000001}.tar')}\r\n  {server.url('/train-000002.tar')}  \n"
        (tmp_path / "urls.txt").write_text(text)
        assert index_of(f"@{tmp_path / 'urls.txt'}", out=tmp_path / "a").splits["train"].shards == SHARDS
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert index_of("-", out=tmp_path / "b").splits["train"].shards == SHARDS


def test_the_command(folder: Path, tmp_path: Path) -> None:
    """Results on stdout, nothing on stderr; 3 is the exit code for the network."""
    with Faulty(folder) as server:

        def command(*arguments: str) -> subprocess.CompletedProcess[str]:
            whole = [sys.executable, "-m", "pipeline", "index", *arguments]
            return subprocess.run(whole, capture_output=True, text=True, check=False, cwd=tmp_path)

        done = command(server.url(PATTERN))
        assert (done.returncode, done.stderr) == (0, "")
        size = sum(path.stat().st_size for path in folder.glob("*.tar"))
        assert done.stdout.splitlines() == [f"train: 3 tars (3 read now), 120 samples, {size:,} bytes", "train-shardindex.json"]
        told = json.loads(command(server.url(PATTERN), "--json").stdout)
        assert told["splits"]["train"] == {"shards": 3, "samples": 120, "bytes": size, "read": 0}
        gone = command(server.url("/none-0.tar"))
        assert gone.returncode == 3 and "none-0.tar" in gone.stderr


@pytest.mark.skipif(NGINX is None, reason="nginx isn't installed")
def test_a_real_server(folder: Path, local: Path, tmp_path: Path) -> None:
    """Nginx over HTTP."""
    with nginx(folder, tmp_path / "nginx") as origin:
        assert index_of(origin + PATTERN, out=tmp_path / "out").problems == ()
        assert index_of(origin + PATTERN, out=tmp_path / "out").splits["train"].read == 0
    assert manifest.read(tmp_path / "out" / "train-shardindex.json").digest == manifest.read(local / "train-shardindex.json").digest


def test_results_come_in_order_and_bounded() -> None:
    """However long each takes; the first error ends it, and threads go."""
    begun: list[int] = []

    def task(number: int) -> int:
        begun.append(number)
        time.sleep(0.02 if number == 0 else 0)
        if number == 30:
            raise OSError("thirty")
        return number

    got = []
    with pytest.raises(OSError, match="thirty"):
        for value in in_order([functools.partial(task, n) for n in range(100)], 3):
            got.append(value)
            assert max(begun) <= value + 6
    assert got == list(range(30))


@given(st.binary(max_size=3000), st.integers(0, 2**32))
def test_a_forward_file_is_the_file(data: bytes, seed: int) -> None:
    """Reads and seeks forward, pieces of any size: what a file of the same bytes gives."""
    draw, file, plain = random.Random(seed), Forward(), io.BytesIO(data)
    at = 0
    while at < len(data):
        size = draw.randint(1, 700)
        file.feed(memoryview(data)[at : at + size])
        at += size
    file.end()
    place = 0
    for _ in range(20):
        place += draw.randint(0, 300)
        size = draw.randint(0, 700)
        file.seek(place)
        plain.seek(place)
        got = file.read(size)
        assert got == plain.read(size)
        place += len(got)
    assert file.drain() >= min(place, len(data))


def test_a_forward_file_tells_of_errors_and_of_readers_that_left() -> None:
    """Whoever reads gets what the other end met, whoever feeds learns that nobody reads."""
    file = Forward()
    file.feed(memoryview(b"abc"))
    file.end(RemoteError("lost"))
    assert file.read(3) == b"abc"
    with pytest.raises(RemoteError, match="lost"):
        file.read(1)
    file.leave()
    with pytest.raises(LeftError):
        file.feed(memoryview(b"x"))
