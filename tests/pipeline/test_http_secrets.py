"""Who is asked for what, and told what: statuses, redirects, credentials, and that no secret is shown to anyone else."""

from __future__ import annotations

import base64
import logging
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import Fault, Faulty, Request, Script

from pipeline.errors import DeniedError, MissingError, OptionsError, PipelineError, RemoteError
from pipeline.stores.http import Address, HttpOptions, HttpStore
from pipeline.stores.http.credentials import Credentials

pytestmark = pytest.mark.usefixtures("no_network")

FILES = {"/a.tar": b"data", "/b.tar": b"data"}
QUICK = HttpOptions(first_wait_seconds=0.002, longest_wait_seconds=0.01, attempts=3)


@pytest.fixture
def store() -> Iterator[HttpStore]:
    with HttpStore(QUICK) as store:
        yield store


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def denied(store: HttpStore, fault: Fault, kind: type[PipelineError] = RemoteError) -> str:
    """Return the message of what one request, and no more, ends with."""
    with Faulty(FILES, lambda request: fault) as server:
        with pytest.raises(kind) as error:
            store.fetch(server.url("/a.tar?sig=SECRET"), 10)
        assert len(server.log) == 1
        assert str(error.value).startswith(f"{server.origin}/a.tar?...: ")
    assert type(error.value)(str(error.value)).args == error.value.args
    return str(error.value).partition("?...: ")[2]


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (
            401,
            DeniedError,
            "401 Unauthorized: access is refused; no credentials were sent: give them in HttpOptions, as user:password@",
        ),
        (403, DeniedError, "403 Forbidden: access is refused"),
        (404, MissingError, "404 Not Found: there is nothing; is the URL right"),
        (410, MissingError, "410 Gone: there is nothing"),
        (400, RemoteError, "400 Bad Request: the server doesn't serve such a request"),
        (407, DeniedError, "407 Proxy Authentication Required: the proxy wants"),
        (304, RemoteError, "304 Not Modified"),
        (451, RemoteError, "451 Unavailable For Legal Reasons"),
        (300, RemoteError, "300 Multiple Choices"),
    ],
)
def test_what_no_retry_helps_ends_at_once(store: HttpStore, status: int, kind: type[RemoteError], words: str) -> None:
    """A refusal is an error after one request: status, reason, and the URL without its query."""
    assert denied(store, Fault(status=status), kind).startswith(words)


S3 = "<?xml version='1.0'?>\n<Error><Code>{}</Code><Message>{}</Message><AWSAccessKeyId>SECRET</AWSAccessKeyId></Error>"


@pytest.mark.parametrize(
    ("status", "code", "message", "kind", "words"),
    [
        (
            400,
            "ExpiredToken",
            "The provided token has expired",
            DeniedError,
            r"400 Bad Request \(ExpiredToken\): .*run out: sign the URL anew",
        ),
        (403, "RequestTimeTooSkewed", "", DeniedError, r"\(RequestTimeTooSkewed\): this machine's clock"),
        (403, "AccessDenied", "Request has expired", DeniedError, "run out: sign the URL anew"),
        (403, "AccessDenied", "Access Denied", DeniedError, r"\(AccessDenied\): access is refused"),
        (403, "SignatureDoesNotMatch", "", DeniedError, "doesn't fit the URL"),
        (404, "NoSuchKey", "", MissingError, "no such object in the bucket"),
    ],
)
def test_errors_of_object_stores_are_named(
    store: HttpStore, status: int, code: str, message: str, kind: type[RemoteError], words: str
) -> None:
    """The code in the body says more than the status; the rest of the body isn't shown."""
    text = denied(store, Fault(status=status, body=S3.format(code, message).encode(), kind="application/xml"), kind)
    assert re.search(words, text)
    assert "SECRET" not in text


def test_busy_object_stores_are_asked_again(store: HttpStore) -> None:
    """Some say with 400 what passes."""
    with Faulty(FILES, [Fault(status=400, body=S3.format("RequestTimeout", "").encode())]) as server:
        assert store.fetch(server.url("/a.tar"), 10) == b"data"


def test_an_error_of_an_object_store_with_200_is_named(store: HttpStore) -> None:
    """A gateway may hand the error on with another status."""
    with (
        Faulty(FILES, lambda request: Fault(body=S3.format("ExpiredToken", "").encode())) as server,
        pytest.raises(RemoteError, match=r"an error \(ExpiredToken\) came in place of the data"),
    ):
        store.fetch(server.url("/a.tar"), 10)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(store: HttpStore, status: int) -> None:
    """Every kind of redirect leads on, by whole and by relative URLs."""
    with Faulty(FILES, [Fault(redirect="b.tar?x=1", status=status), Fault(redirect="/a.tar", status=status)]) as server:
        assert store.fetch(server.url("/a.tar"), 10) == b"data"
        assert [request.target for request in server.log] == ["/a.tar", "/b.tar?x=1", "/a.tar"]


def test_a_circle_of_redirects_ends() -> None:
    """After max_redirects hops that is an error, at once."""
    with (
        Faulty(FILES, lambda request: Fault(redirect="/a.tar?sig=SECRET")) as server,
        HttpStore(HttpOptions(max_redirects=3)) as store,
    ):
        with pytest.raises(RemoteError, match=r"redirected 4 times.*in a circle") as error:
            store.fetch(server.url("/a.tar"), 10)
        assert len(server.log) == 4
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("location", ["", "ftp://host/a", "https://"])
def test_a_redirect_to_nowhere_is_an_error(store: HttpStore, location: str) -> None:
    """There is no way to follow it."""
    fault = Fault(status=302, headers=(("Location", location),) if location else ())
    assert "redirects to nowhere" in denied(store, fault)


@pytest.mark.case("H08")
def test_credentials_stay_with_their_origin() -> None:
    """Authorization, cookies and other headers reach no other origin, be it another port of the same host."""
    with Faulty(FILES) as there, Faulty(FILES, [Fault(redirect="/b.tar"), Fault(redirect=there.url("/b.tar?x=1"))]) as here:
        options = HttpOptions(token="SECRET", headers={"Cookie": "SECRET", "X-Api-Key": "SECRET"}, origin=here.origin)
        with HttpStore(options) as store:
            assert store.fetch(here.url("/a.tar"), 10) == b"data"
            assert store.fetch(there.url("/a.tar"), 10) == b"data"  # as a manifest may name it
    for request in here.log:
        assert request.headers["authorization"] == "Bearer SECRET"
        assert (request.headers["cookie"], request.headers["x-api-key"]) == ("SECRET", "SECRET")
    assert [request.target for request in there.log] == ["/b.tar?x=1", "/a.tar"]
    assert "SECRET" not in str(there.log)


@pytest.mark.case("H08")
def test_the_urls_password_stays_with_its_origin(store: HttpStore) -> None:
    """User and password of a URL aren't for where it redirects to."""
    with Faulty(FILES) as there, Faulty(FILES, [Fault(redirect=there.url("/b.tar"))]) as here:
        assert store.fetch(here.url("/a.tar").replace("//", "//user:SECRET@"), 10) == b"data"
    assert here.log[0].headers["authorization"] == basic("user:SECRET")
    assert "authorization" not in there.log[0].headers


def test_a_redirect_brings_no_credentials(store: HttpStore) -> None:
    """User and password that a redirect itself names are a server's, not the user's."""
    with Faulty(FILES) as there, Faulty(FILES, [Fault(redirect=there.url("/b.tar").replace("//", "//user:pw@"))]) as here:
        assert store.fetch(here.url("/a.tar"), 10) == b"data"
        assert "authorization" not in there.log[0].headers


def test_a_refusal_after_a_redirect_says_who_got_nothing() -> None:
    """Where credentials are missing because they were held back, the message says so."""
    with Faulty(FILES, lambda request: Fault(status=401)) as there, Faulty(FILES, [Fault(redirect=there.url("/b.tar"))]) as here:
        with (
            HttpStore(HttpOptions(token="SECRET", origin=here.origin)) as store,
            pytest.raises(DeniedError, match=f"redirected to {there.origin}, which gets no credentials"),
        ):
            store.fetch(here.url("/a.tar"), 10)
        with (
            HttpStore(HttpOptions(token="SECRET", origin=there.origin)) as store,
            pytest.raises(DeniedError, match="are they right"),
        ):
            store.fetch(there.url("/a.tar"), 10)


def test_basic_credentials_come_from_options_and_urls(store: HttpStore) -> None:
    """The URL's come first; quoted signs are unquoted, and it is UTF-8 that is sent."""
    with Faulty(FILES) as server:
        store.fetch(server.url("/a.tar").replace("//", "//us%40er:p%2Fä@"), 10)
        with HttpStore(HttpOptions(user="me", password="p:w", origin=server.origin)) as own:
            own.fetch(server.url("/a.tar"), 10)
            own.fetch(server.url("/a.tar").replace("//", "//you:x@"), 10)
        assert [request.headers["authorization"] for request in server.log] == [basic("us@er:p/ä"), basic("me:p:w"), basic("you:x")]
    with Faulty(FILES) as server, HttpStore(HttpOptions(headers={"authorization": "Own x"}, origin=server.origin)) as own:
        own.fetch(server.url("/a.tar"), 10)
        own.fetch(server.url("/a.tar").replace("//", "//you:x@"), 10)
        assert [request.headers["authorization"] for request in server.log] == ["Own x", basic("you:x")]


def test_credentials_name_whom_they_are_for() -> None:
    """Without an origin a manifest could have them sent anywhere."""
    with pytest.raises(OptionsError, match="without origin") as error:
        HttpStore(HttpOptions(token="SECRET"))
    assert "SECRET" not in str(error.value)


def test_a_user_without_a_home_has_no_netrc() -> None:
    """A container runs as a number that no table of users has."""
    program = "import os; from pipeline.stores.http import HttpStore; os.setuid(54321); HttpStore().close(); print('fine')"
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "NETRC")}
    if os.geteuid():
        pytest.skip("needs root")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "fine\n", done.stderr


def test_netrc_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """~/.netrc or NETRC, for the hosts that it names; its default goes to nobody."""
    with Faulty(FILES) as server:
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password SECRET\n")
        with HttpStore() as store:
            store.fetch(server.url("/a.tar"), 10)
        other = tmp_path / "other"
        other.write_text("machine h.org login me password x\ndefault login anyone password SECRET\n")
        monkeypatch.setenv("NETRC", str(other))
        with HttpStore() as store:
            store.fetch(server.url("/a.tar"), 10)
        assert [request.headers.get("authorization") for request in server.log] == [basic("me:SECRET"), None]
    assert not Credentials(HttpOptions()).of(Address("http://default/"))


@pytest.mark.parametrize("text", ["machine h login me SECRET\n", b"\xff\xfe"])
def test_a_broken_netrc_is_named_without_its_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | bytes) -> None:
    """The parser's own message repeats what it stumbled over."""
    path = tmp_path / "passwords"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setenv("NETRC", str(path))
    with pytest.raises(OptionsError, match="passwords: the file of passwords can't be used") as error:
        HttpStore()
    assert error.value.__traceback__
    trace = error.value.__traceback__.tb_next
    assert "SECRET" not in "".join(traceback.TracebackException(OptionsError, error.value, trace, capture_locals=True).format())
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(OptionsError, match="No such file"):
        HttpStore()


ENDINGS: list[Script] = [
    lambda request: Fault(status=401),
    lambda request: Fault(status=503),
    lambda request: Fault(raw=b""),
    lambda request: Fault(raw=b"HTTP/1.1 200 OK\r\nbroken\r\nContent-Length: 5\r\n\r\nhello"),
    lambda request: Fault(raw=f"HTTP/1.1 200 {request.target} {request.headers['authorization']}".encode()),
    lambda request: Fault(cut=2),
    lambda request: Fault(chunked=True, cut=2),
    lambda request: Fault(redirect=request.target),
    lambda request: Fault(redirect="http://user:SECRET@127.0.0.1:1/?SECRET"),
    lambda request: Fault(redirect="ftp://user:SECRET@h/?SECRET"),
    lambda request: Fault(body=b"<html>"),
    lambda request: Fault(content_range="bytes 1-2/3"),
    lambda request: Fault(etag=f'"{len(request.headers)}"', cut=513),
    lambda request: Fault(length=False, ranges=False),
    lambda request: Fault(delay=5),
    lambda request: Fault(length=False, headers=(("Content-Length", "1"), ("Content-Length", "2"))),
    lambda request: Fault(chunked=True, headers=(("Content-Length", "5"),)),
]


@pytest.mark.parametrize("number", range(len(ENDINGS)))
def test_no_secret_is_printed(number: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever goes wrong: no message, log line, or local of a frame of ours in a traceback shows what only the server may know."""
    caplog.set_level(logging.DEBUG)
    with Faulty({"/a.tar": b"x" * 1000}, ENDINGS[number]) as server:
        secret = "SECRET"
        url = server.url(f"/a.tar?sig={secret}").replace("//", f"//{secret}:{secret}@")
        options = HttpOptions(
            token=secret, headers={"Cookie": secret}, origin=server.origin, attempts=2, idle_seconds=0.2, first_wait_seconds=0.001
        )
        assert secret not in repr(options)
        with HttpStore(options) as store:
            for call in (
                lambda: store.fetch(url, 10**6),
                lambda: store.read(url, 1, 500, None, lambda at, data: None),
                lambda: store.look(url),
            ):
                try:
                    call()
                except RemoteError as error:
                    assert error.__traceback__
                    assert error.__traceback__.tb_next
                    trace = error.__traceback__.tb_next.tb_next  # the first two frames are this test's
                    shown = traceback.TracebackException(type(error), error, trace, capture_locals=True)
                    assert secret not in "".join(shown.format())
            assert secret not in repr(vars(store))
    assert secret not in caplog.text
    out, err = capfd.readouterr()
    assert secret not in out + err


def test_a_failing_take_shows_no_secret() -> None:
    """The caller's own error passes through our frames."""

    def full(offset: int, data: memoryview) -> None:
        raise OSError("full")

    with Faulty(FILES) as server, HttpStore(HttpOptions(token="SECRET", origin=server.origin)) as store:
        url = server.url("/a.tar?SECRET")
        with pytest.raises(OSError, match="full") as error:
            store.read(url, 0, 4, None, full)
    trace = error.value.__traceback__
    assert trace
    assert "SECRET" not in "".join(traceback.TracebackException(OSError, error.value, trace.tb_next, capture_locals=True).format())


@pytest.mark.parametrize("through", ["proxy.example", "user:SECRET@"])
def test_the_environments_proxy_is_used(monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    """HTTP_PROXY, with user and password if it has them, but not for what NO_PROXY names."""
    with Faulty({"/a.tar": b"direct"}) as server, Faulty({"/a.tar": b"proxied"}) as proxy:
        login = through if "@" in through else ""
        monkeypatch.setenv("http_proxy", proxy.origin.replace("//", f"//{login}"))
        with HttpStore() as store:
            assert store.fetch(server.url("/a.tar?x=1"), 10) == b"proxied"
        assert proxy.log[0].proxied
        assert proxy.log[0].target == "/a.tar?x=1"
        assert proxy.log[0].headers.get("proxy-authorization") == (basic("user:SECRET") if login else None)
        assert proxy.log[0].headers["host"] == server.origin.partition("//")[2]
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with HttpStore() as store:
            assert store.fetch(server.url("/a.tar"), 10) == b"direct"
        assert "proxy-authorization" not in server.log[0].headers


@pytest.mark.parametrize("url", ["socks5://user:SECRET@127.0.0.1:1", "https://127.0.0.1:1", "http://"])
def test_other_proxies_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A proxy that can't be used is never passed by."""
    monkeypatch.setenv("http_proxy", url)
    with (
        HttpStore() as store,
        pytest.raises(OptionsError, match=r"proxy for http .* can't be used: only http://host:port can") as error,
    ):
        store.fetch("http://h.invalid/", 10)
    assert "SECRET" not in str(error.value)


def test_the_servers_log_shows_what_was_sent(store: HttpStore) -> None:
    """The tests' own server tells the truth: without credentials none are in its log."""
    with Faulty(FILES) as server:
        store.look(server.url("/a.tar"))
        assert isinstance(server.log[0], Request)
        assert set(server.log[0].headers) == {"host", "accept-encoding", "user-agent"}
