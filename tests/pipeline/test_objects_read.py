"""What reads from object stores deliver: the contract of reads over HTTP, against a server of S3 that goes wrong as it is told."""

from __future__ import annotations

import random
import shutil
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty import HTML, Fault, Faulty, Request, Script, Taken, some_faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from objectstores import quick

from pipeline.errors import ChangedError, DeniedError, MissingError, OptionsError, RemoteError
from pipeline.stores.http import Remote
from pipeline.stores.objects import ObjectOptions

ObjectStore = pytest.importorskip("pipeline.stores.objects.store", reason="needs obstore").ObjectStore
pytestmark = pytest.mark.usefixtures("no_network")

DATA = random.Random(1).randbytes(300_000)
URL = "s3://bkt/a.tar"
KEYS = {"access_key_id": "AKIASECRET", "secret_access_key": "S3CRET", "session_token": "T0KENSECRET"}


def store_of(server: Faulty, **given: object) -> ObjectStore:
    """Return a store whose endpoint is the server."""
    return ObjectStore("s3", quick(**{"endpoint": server.origin, "config": KEYS, **given}))


def read(
    script: Script, start: int = 0, stop: int | None = None, known: Remote | None = None, **given: object
) -> tuple[bytes, list[Request], ObjectStore]:
    """Read from a server that follows a script."""
    taken = Taken(start)
    with Faulty({"/bkt/a.tar": DATA}, script) as server, store_of(server, **given) as store:
        store.read(URL, start, stop, known, taken)
    return bytes(taken.data), server.log, store


def refused(script: Script, kind: type[RemoteError] = RemoteError, **given: object) -> str:
    """Return the text of the error that a read ends with."""
    with pytest.raises(kind) as caught:
        read(script, 0, 200_000, **given)
    text = str(caught.value)
    assert text.startswith(URL) and not any(secret in text for secret in KEYS.values())
    assert caught.value.__cause__ is None and (caught.value.__context__ is None or caught.value.__suppress_context__)
    return text


def s3_error(status: int, code: str, message: str = "S3CRET") -> Fault:
    """Return a reply as S3 refuses a request."""
    return Fault(
        status=status, body=f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode(), kind="application/xml"
    )


@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 1), (5, 1000), (1, None), (299_999, 300_000), (0, 300_000)])
def test_a_range_is_read(start: int, stop: int | None) -> None:
    """Any range comes as it lies there, in one signed request."""
    got, log, store = read((), start, stop)
    assert got == DATA[start:stop]
    assert len(log) == 1 and "AKIASECRET" in log[0].headers["authorization"]
    assert (store.counts.requests, store.counts.retries) == ({206: 1}, 0)
    assert store.counts.bytes == len(got)


def test_an_empty_range_asks_for_nothing() -> None:
    """No bytes, no request."""
    assert read((), 7, 7)[:2] == (b"", [])


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 511, 512, 100_000, 199_999])
def test_a_cut_body_is_resumed(cut: int, reset: bool) -> None:
    """A body that is cut goes on from the last good byte, and nothing is delivered twice."""
    got, log, store = read([Fault(cut=cut, reset=reset)], 0, 200_000)
    assert got == DATA[:200_000]
    assert (len(log), store.counts.retries) == (2, 1)
    assert int(log[1].headers["range"].removeprefix("bytes=").partition("-")[0]) <= cut


def test_what_came_is_not_asked_for_again() -> None:
    """A try goes on about where the last one was cut."""
    _, log, _ = read([Fault(cut=250_000)])
    assert int(log[1].headers["range"].removeprefix("bytes=").partition("-")[0]) > 0


def test_a_cut_each_time_ends_only_without_progress() -> None:
    """Tries that bring something begin the count anew; those that bring nothing end the read."""
    assert read(lambda _: Fault(cut=70_000), attempts=2)[0] == DATA
    assert "the body ended early (4 tries in a row failed" in refused(lambda _: Fault(cut=0))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int) -> None:
    """Busy servers are asked again, as often as the limits say, and each time is counted."""
    got, log, store = read([Fault(status=status), s3_error(400, "RequestTimeout"), Fault(raw=b"")])
    assert (got, len(log), store.counts.retries) == (DATA, 4, 3)
    assert store.counts.requests == dict(sorted({0: 1, 206: 1, 400: 1, status: 1}.items()))
    assert f"the server answered {status}" in refused(lambda _: Fault(status=status))


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (s3_error(400, "ExpiredToken"), DeniedError, "(ExpiredToken): the session has run out: get new credentials"),
        (s3_error(400, "TokenRefreshRequired"), DeniedError, "the session has run out"),
        (s3_error(403, "InvalidAccessKeyId"), DeniedError, "doesn't know this access key"),
        (s3_error(403, "SignatureDoesNotMatch"), DeniedError, "the secret key isn't that of the access key"),
        (s3_error(403, "RequestTimeTooSkewed"), DeniedError, "set it (NTP)"),
        (s3_error(403, "AccessDenied"), DeniedError, "403 Forbidden (AccessDenied): access is refused"),
        (s3_error(403, "AuthenticationFailed", "Signature not valid in the specified time frame"), DeniedError, "has run out"),
        (Fault(status=403), DeniedError, "403 Forbidden: access is refused"),
        (Fault(status=401), DeniedError, "401 Unauthorized: access is refused"),
        (s3_error(404, "NoSuchKey"), MissingError, "there is no such object in the bucket"),
        (s3_error(404, "NoSuchBucket"), MissingError, "there is no such bucket"),
        (Fault(status=410), MissingError, "410 Gone: there is nothing"),
        (s3_error(301, "PermanentRedirect"), RemoteError, "in another region: give ObjectOptions(region=)"),
        (s3_error(400, "AuthorizationHeaderMalformed"), RemoteError, "in another region"),
        (s3_error(400, "SomeNonsense"), RemoteError, "400 Bad Request"),
    ],
)
def test_refusals_are_final_and_named(fault: Fault, kind: type[RemoteError], says: str) -> None:
    """Status, code and what to do, at once, without what the server repeats of the request."""
    asked = list[Request]()

    def script(request: Request) -> Fault:
        asked.append(request)
        return fault

    assert says in refused(script, kind)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(ranges=False),
        Fault(content_range=""),
        Fault(content_range="bytes 1-2/3"),
        Fault(content_range="bytes 0-9/300000"),
        Fault(body=HTML, kind="text/html"),
        Fault(body=b""),
        Fault(gzip=True),
        Fault(chunked=True),
        Fault(length=False),
        Fault(raw=b"HTTP/1.1 nonsense\r\n\r\n"),
        Fault(status=206, body=HTML, content_range="bytes 0-199999/300000"),
    ],
    ids=repr,
)
def test_what_is_no_part_of_it_is_not_taken(fault: Fault) -> None:
    """Replies with other bytes, with pages, without a length: asked for again, then an error within the tries."""
    assert read([fault], 0, 200_000)[0] == DATA[:200_000]
    assert "4 tries in a row failed" in refused(lambda _: fault)


@pytest.mark.parametrize("change", [Fault(etag='"other"'), Fault(etag="", modified="Wed, 15 Nov 2023 22:13:21 GMT")])
def test_another_version_is_an_error(change: Fault) -> None:
    """Old and new bytes are never mixed, midway or from one read to the next."""
    first = Fault(cut=100_000) if change.etag else Fault(cut=100_000, etag="")
    with pytest.raises(ChangedError, match=r"a\.tar: changed while it was read \((ETag|Last-Modified) was"):
        read([first, change])
    with Faulty({"/bkt/a.tar": DATA}, [Fault(etag=first.etag), change]) as server, store_of(server) as store:
        known = store.look(URL)
        with pytest.raises(ChangedError):
            store.read(URL, 100, 200, known, Taken(100))


def test_an_object_that_was_cut_is_named() -> None:
    """Bytes behind its end aren't there: by a first read that is an error, by another it has changed."""
    with pytest.raises(RemoteError, match=r"has 300000 bytes, and those from 299990 to 300010 are wanted"):
        read((), 299_990, 300_010)
    with pytest.raises(RemoteError, match=r"has 300000 bytes, and those from 400000 to 400010 are wanted"):
        read((), 400_000, 400_010)
    with pytest.raises(ChangedError, match="has 300000 bytes, and 500000 were expected"):
        read((), 400_000, 400_010, Remote(500_000))


def test_an_empty_object() -> None:
    """It can be looked at and read to its end, and has no first byte."""
    with Faulty({"/bkt/a.tar": b""}) as server, store_of(server) as store:
        assert store.look(URL).size == 0
        assert store.read(URL, 0, None, None, Taken()).size == 0
        assert store.fetch(URL, 10) == b""
        with pytest.raises(RemoteError, match="has 0 bytes"):
            store.read(URL, 0, 1, None, Taken())


def test_look_says_what_lies_there() -> None:
    """Size and version, by one byte: a refusal then says its reason."""
    with Faulty({"/bkt/a.tar": DATA}) as server, store_of(server) as store:
        found = store.look(URL)
        assert (found.size, found.ranges) == (300_000, True) and found.etag.startswith('"') and found.modified
        assert store.read(URL, 5, 10, found, Taken(5)) == found
        assert server.log[0].headers["range"] == "bytes=0-0"
        with pytest.raises(MissingError):
            store.look("s3://bkt/b.tar")


def test_keys_that_were_renewed_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's keys run out in the middle: once its file has others the read goes on with them, and else it is refused."""
    keys = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def written(key: str) -> None:
        keys.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = S3CRET\naws_session_token = T0KEN\n")

    seen = list[str]()

    def script(request: Request) -> Fault | None:
        seen.append("new" if "AKIANEW" in request.headers["authorization"] else "old")
        if len(seen) == 1:
            return Fault(cut=100_000)
        if seen[-1] == "old" and renewing:
            written("AKIANEW")
        return s3_error(400, "ExpiredToken") if seen[-1] == "old" else None

    for renewing in (True, False):
        seen.clear()
        written("AKIAOLD")
        taken = Taken(0)
        with Faulty({"/bkt/a.tar": DATA}, script) as server, store_of(server, config={}) as store:
            if renewing:
                store.read(URL, 0, None, None, taken)
                assert bytes(taken.data) == DATA and seen == ["old", "old", "new"]
            else:
                with pytest.raises(DeniedError, match="ExpiredToken"):
                    store.read(URL, 0, None, None, taken)
                assert seen == ["old", "old"]


def test_an_encoded_reply_does_not_tell_the_size() -> None:
    """One that is compressed on its way has another length: not the object's, whether it is looked at or read behind its end."""
    with Faulty({"/bkt/a.tar": DATA}, [Fault(gzip=True)]) as server, store_of(server) as store:
        assert (store.look(URL).size, store.counts.retries) == (300_000, 1)
    text = DATA[:1000] + bytes(100_000)
    with Faulty({"/bkt/a.tar": text}, [Fault(gzip=True)] * 2) as server, store_of(server) as store:
        store.read(URL, 50_000, None, Remote(len(text)), taken := Taken(50_000))
        assert bytes(taken.data) == text[50_000:]


def test_a_small_file_is_fetched_up_to_a_limit() -> None:
    """Whole, or an error; what is asked for can be told by its beginning."""
    with Faulty({"/bkt/a.tar": DATA}) as server, store_of(server) as store:
        assert store.fetch(URL, 300_000) == DATA
        with pytest.raises(RemoteError, match="more than 299999 bytes"):
            store.fetch(URL, 299_999)
        with pytest.raises(RemoteError, match="something else came in place of the data"):
            store.fetch(URL, 300_000, expect=lambda head: head.startswith(b"{"))


def test_a_stall_ends_by_the_idle_limit() -> None:
    """A server that goes silent is left, and read on from there."""
    began = time.monotonic()
    got, log, _ = read([Fault(cut=100_000, stall=30), Fault(delay=30)], idle_seconds=0.3)
    assert (got, len(log)) == (DATA, 3)
    assert time.monotonic() - began < 10


def test_the_total_limit_holds() -> None:
    """However many tries are allowed."""
    began = time.monotonic()
    assert "total_seconds=0.5" in refused(lambda _: Fault(status=503), total_seconds=0.5, attempts=10**6)
    assert "total_seconds=0.5" in refused(lambda _: Fault(rate=1000), total_seconds=0.5, attempts=10**6)
    assert time.monotonic() - began < 10


def test_what_take_raises_ends_the_read() -> None:
    """At once, as it is."""

    def take(offset: int, data: memoryview) -> None:
        raise KeyError(offset)

    with Faulty({"/bkt/a.tar": DATA}) as server, store_of(server) as store, pytest.raises(KeyError):
        store.read(URL, 0, None, None, take)
    assert len(server.log) == 1


def test_closing_ends_the_waits() -> None:
    """A read that waits for its next try ends when its store is closed, and none begins after that."""
    with Faulty({}, lambda _: Fault(status=503)) as server:
        store = store_of(server, first_wait_seconds=60, longest_wait_seconds=60)
        timer = threading.Timer(0.5, store.close)
        timer.start()
        with pytest.raises(RemoteError, match="the store was closed"):
            store.read(URL, 0, 1, None, Taken())
        timer.join()
        with pytest.raises(RemoteError, match="the store was closed"):
            store.look(URL)


def test_many_threads_read_at_once() -> None:
    """One store, eight readers, a third of all replies wrong: each gets its bytes."""
    with Faulty({"/bkt/a.tar": DATA}, some_faults(0.3, 7, 40_000)) as server, store_of(server, attempts=30) as store:

        def one(number: int) -> bool:
            taken = Taken(number * 30_000)
            store.read(URL, number * 30_000, number * 30_000 + 60_000, None, taken)
            return bytes(taken.data) == DATA[number * 30_000 : number * 30_000 + 60_000]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(one, range(8)))


FAULTS = st.sampled_from(
    [
        None,
        Fault(cut=0),
        Fault(cut=40_000),
        Fault(cut=90_000, reset=True),
        Fault(raw=b""),
        Fault(status=500),
        Fault(status=404),
        Fault(ranges=False),
        Fault(content_range=""),
        Fault(etag='"other"'),
        Fault(body=HTML),
        Fault(gzip=True),
        s3_error(503, "SlowDown"),
        s3_error(400, "ExpiredToken"),
    ]
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(FAULTS, max_size=8), st.integers(0, 200_000), st.one_of(st.none(), st.integers(200_000, 300_000)))
def test_any_sequence_of_faults(faults: list[Fault | None], start: int, stop: int | None) -> None:
    """The bytes, each once and in order, or an error of ours; never fewer."""
    taken = Taken(start)
    with Faulty({"/bkt/a.tar": DATA}, faults) as server, store_of(server) as store:
        try:
            store.read(URL, start, stop, None, taken)
        except RemoteError:
            assert any(faults)
        else:
            assert bytes(taken.data) == DATA[start:stop]


def test_nobody_signs_for_a_public_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `anonymous` nothing is signed, whatever keys there are."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S3CRET")
    with Faulty({"/bkt/a.tar": DATA}) as server, store_of(server, anonymous=True, config={}) as store:
        assert store.fetch(URL, 300_000) == DATA
        assert "authorization" not in server.log[0].headers


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("s3", {"config": {"nonsense": "S3CRET"}}, "obstore knows no 'nonsense' for s3://"),
        ("az", {"config": {"account_name": "x", "account_key": "S3CRET?"}}, "the account's key isn't one"),
        ("az", {}, "the account isn't known"),
        ("gs", {"config": {"application_credentials": "/S3CRET"}}, "service account can't be used"),
    ],
)
def test_settings_that_cannot_be_used(kind: str, options: dict[str, object], says: str) -> None:
    """They are named, their values aren't shown."""
    with ObjectStore(kind, ObjectOptions(**options)) as store, pytest.raises(OptionsError) as caught:
        store.look(f"{kind}://bkt/a.tar")
    assert says in str(caught.value) and "S3CRET" not in str(caught.value)


def test_a_machine_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing gives any, the error says what to give, after a few tries and not all of them."""
    with Faulty({}, lambda _: Fault(status=403)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.origin)
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.origin)
        options = quick(config={"metadata_endpoint": "http://169.254.0.1:1"}, attempts=9, connect_seconds=0.2)
        with ObjectStore("s3", options) as store, pytest.raises(DeniedError, match=r"no credentials.*AWS_ACCESS_KEY_ID"):
            store.look(URL)
        assert not any("/bkt" in request.target for request in server.log)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_an_untrusted_certificate_is_named(certificates: Path) -> None:
    """At once, with what to name; with the CA the same endpoint is read."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "good.pem", certificates / "good.key")
    with Faulty({"/bkt/a.tar": DATA}, tls=tls) as server:
        with store_of(server) as store, pytest.raises(RemoteError, match=r"certificate isn't trusted.*ObjectOptions\(ca=\)"):
            store.look(URL)
        with store_of(server, ca=str(certificates / "ca.pem")) as store:
            assert store.look(URL).size == 300_000
    with (
        Faulty({}) as server,
        store_of(server, endpoint=server.origin.replace("http:", "https:")) as store,
        pytest.raises(RemoteError, match="doesn't speak TLS"),
    ):
        store.look(URL)
