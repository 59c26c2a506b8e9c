"""How long a read goes on: back-off, Retry-After, and a limit to every wait."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from faulty import Fault, Faulty, Script, Taken

from pipeline.errors import OptionsError, RemoteError
from pipeline.stores.http import HttpOptions, HttpStore
from pipeline.stores.http.address import Address
from pipeline.stores.http.counts import Counter
from pipeline.stores.http.retry import Again, Limits, Patience, retry_after

pytestmark = pytest.mark.usefixtures("no_network")

DATA = bytes(range(256)) * 1000
SOON_SECONDS = 60  # with room for a machine that has other work
QUICK = HttpOptions(first_wait_seconds=0.002, longest_wait_seconds=0.01, attempts=4, idle_seconds=5)
STILL = {"first_wait_seconds": 0.001, "longest_wait_seconds": 0.001}


@pytest.fixture
def store() -> Iterator[HttpStore]:
    with HttpStore(QUICK) as store:
        yield store


def fails(options: HttpOptions, script: Script, words: str) -> tuple[float, HttpStore]:
    """Read what can't be read; returns how many seconds that took."""
    began = time.monotonic()
    with Faulty({"/a.tar": DATA}, script) as server, HttpStore(options) as store, pytest.raises(RemoteError, match=words):
        store.fetch(server.url("/a.tar?sig=SECRET"), 10**6)
    return time.monotonic() - began, store


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_what_may_pass_is_tried_again(store: HttpStore, status: int) -> None:
    """Statuses of a busy or broken server are asked again, a bounded number of times."""
    with Faulty({"/a.tar": DATA}, [Fault(status=status)] * 3) as server:
        assert store.fetch(server.url("/a.tar"), 10**6) == DATA
        assert len(server.log) == 4
    assert store.counts.retries == 3
    fails(QUICK, lambda request: Fault(status=status), rf"the server answered {status} .*\(4 tries in a row failed")


@pytest.mark.parametrize(
    "raw",
    [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5", b"HTTP/1.1 200 OK\r\nX\r\n\r\nhello", b"\0" * 70_000],
)
def test_what_is_no_reply_is_tried_again(store: HttpStore, raw: bytes) -> None:
    """A connection that ends, or speaks another protocol, is a failure like others."""
    with Faulty({"/a.tar": DATA}, [Fault(raw=raw)]) as server:
        assert store.fetch(server.url("/a.tar"), 10**6) == DATA
    fails(QUICK, lambda request: Fault(raw=raw), "tries in a row failed")


@pytest.mark.parametrize("lengths", [("5", "6"), ("-1",), ("five",)])
def test_a_length_that_is_none_is_never_believed(store: HttpStore, lengths: tuple[str, ...]) -> None:
    """Two lengths, or one that isn't a number, say nothing of where the body ends."""
    fault = Fault(length=False, headers=tuple(("Content-Length", length) for length in lengths))
    with Faulty({"/a.tar": DATA}, [fault]) as server:
        assert store.fetch(server.url("/a.tar"), 10**6) == DATA


def test_a_server_that_restarts_is_waited_for() -> None:
    """Connections that are refused for a while are a failure like others."""
    options = HttpOptions(first_wait_seconds=0.1, longest_wait_seconds=0.3, attempts=50)
    with Faulty({"/a.tar": DATA}) as server, HttpStore(options) as store:
        server.refuse(0.6)
        assert store.fetch(server.url("/a.tar"), 10**6) == DATA
    assert store.counts.requests[0] > 0


def test_progress_begins_the_count_anew(store: HttpStore) -> None:
    """A body that is cut often, but gets on each time, is read to its end; one that hardly moves isn't."""
    with Faulty({"/a.tar": DATA}, lambda request: Fault(cut=40_000)) as server:
        taken = Taken()
        store.read(server.url("/a.tar"), 0, len(DATA), None, taken)
        assert taken.data == DATA
    fails(QUICK, lambda request: Fault(cut=600), "4 tries in a row failed")


def test_waits_double_with_full_jitter() -> None:
    """The most that is waited doubles up to its bound; what is waited is drawn from all of it."""
    options = HttpOptions(first_wait_seconds=0.01, longest_wait_seconds=0.04, attempts=6)
    drawn: list[list[float]] = [[] for _ in range(5)]
    for _ in range(30):
        counter = Counter()
        patience = Patience(Address("http://host/"), options, Limits(options), counter, threading.Event())
        before = 0.0
        for waits in drawn:
            patience.wait(Again("it failed"))
            waits.append(counter.now().waited_seconds - before)
            before = counter.now().waited_seconds
    for waits, most in zip(drawn, (0.01, 0.02, 0.04, 0.04, 0.04), strict=True):
        assert max(waits) <= most
        assert min(waits) < most / 2
        assert most / 4 < statistics.mean(waits) < most * 3 / 4


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_in_seconds_is_kept(status: int) -> None:
    """What the server asks to wait is waited, at the least."""
    options = HttpOptions(**STILL)
    with Faulty({"/a.tar": DATA}, [Fault(status=status, retry_after="1")]) as server, HttpStore(options) as store:
        began = time.monotonic()
        store.fetch(server.url("/a.tar"), 10**6)
        assert time.monotonic() - began >= 1


def test_retry_after_is_read_as_number_and_date() -> None:
    """Both forms of the header are understood; nonsense, and a date that is over, are nothing."""
    assert retry_after("17") == 17
    assert 28 < retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)) <= 30
    assert [retry_after(value) for value in (None, "", "soon", "-5", "Tue, 14 Nov 2023 22:13:20 GMT", "²")] == [0] * 6
    assert retry_after("9" * 50) < 1e10


def test_retry_after_is_capped() -> None:
    """An hour isn't waited: at most two minutes; a wait beyond the total limit is an error at once, with both numbers."""
    began = time.monotonic()
    fails(
        HttpOptions(total_seconds=100),
        lambda request: Fault(status=503, retry_after="3600"),
        r"wait 120 s, beyond total_seconds=100",
    )
    assert time.monotonic() - began < SOON_SECONDS


def test_a_stall_ends_with_the_idle_limit() -> None:
    """A server that stands still for longer than idle_seconds is left, wherever it does."""
    for fault in (Fault(cut=1000, stall=600), Fault(delay=600), Fault(chunked=True, cut=5, stall=600), Fault(cut=0, stall=600)):
        took, store = fails(
            HttpOptions(idle_seconds=0.2, attempts=2, **STILL), lambda request, fault=fault: fault, "no byte came in time"
        )  # type: ignore[misc]
        assert 0.4 <= took < SOON_SECONDS
        assert store.counts.retries == 1


def test_headers_that_trickle_end_with_the_idle_limit() -> None:
    """A byte of the headers now and then is no reply."""
    took, _ = fails(HttpOptions(idle_seconds=0.3, attempts=1, **STILL), lambda request: Fault(trickle=0.2), "no byte came in time")
    assert took < SOON_SECONDS


def test_chunk_sizes_that_trickle_end_with_the_idle_limit() -> None:
    """Nor are the digits of a chunk's size data."""
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def trickle(listener: socket.socket) -> None:
        with listener.accept()[0] as sock:
            sock.recv(1000)
            try:
                sock.sendall(raw)
                while True:
                    sock.sendall(b"0")
                    time.sleep(0.1)
            except OSError:
                pass

    with closing(socket.create_server(("127.0.0.1", 0))) as listener, HttpStore(HttpOptions(idle_seconds=0.3, attempts=1)) as store:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        with pytest.raises(RemoteError, match="no byte came in time"):
            store.fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/", 10)
        thread.join(5)


def test_slow_isnt_idle() -> None:
    """A link that is slow, but gives a byte in time, is read to its end."""
    options = HttpOptions(idle_seconds=1, attempts=1)
    with Faulty({"/a.tar": DATA[:200_000]}, rate=130_000) as server, HttpStore(options) as store:
        assert store.fetch(server.url("/a.tar"), 10**6) == DATA[:200_000]


def test_the_total_limit_holds() -> None:
    """total_seconds ends a slow body, the retries, and the waits between them."""
    for script in (
        lambda request: Fault(rate=10_000),
        lambda request: Fault(status=500),
        lambda request: Fault(delay=600),
        lambda request: Fault(trickle=0.05),
    ):
        took, _ = fails(
            HttpOptions(total_seconds=0.5, attempts=10**6, first_wait_seconds=0.1), script, r"total_seconds=0.5 are over, in"
        )
        assert 0.4 < took < SOON_SECONDS


def test_a_host_that_doesnt_answer_ends_with_the_connect_limit() -> None:
    """A full backlog, as a firewall's silence, is waited for connect_seconds only."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as listener:
        port, full = listener.getsockname()[1], []
        for _ in range(3):  # what the system queues beyond the backlog
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
            full.append(sock)
        time.sleep(0.05)
        began = time.monotonic()
        with (
            HttpStore(HttpOptions(connect_seconds=0.3, attempts=2, **STILL)) as store,
            pytest.raises(RemoteError, match="no connection came about"),
        ):
            store.fetch(f"http://127.0.0.1:{port}/", 10)
        assert 0.5 < time.monotonic() - began < SOON_SECONDS
        for sock in full:
            sock.close()


def test_a_server_that_never_shakes_hands_ends_with_the_connect_limit() -> None:
    """A TLS handshake belongs to the connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        began = time.monotonic()
        with HttpStore(HttpOptions(connect_seconds=0.3, attempts=1)) as store, pytest.raises(RemoteError, match="in time"):
            store.fetch(f"https://127.0.0.1:{listener.getsockname()[1]}/", 10)
        assert time.monotonic() - began < SOON_SECONDS


def test_an_unknown_host_is_named() -> None:
    """DNS that doesn't know a name is tried again: it may be starting too."""
    with HttpStore(QUICK) as store, pytest.raises(RemoteError, match=r"http://host\.invalid/a: its host name can't be resolved"):
        store.fetch("http://host.invalid/a", 10)
    with HttpStore(QUICK) as store, pytest.raises(RemoteError, match="isn't a name that DNS can know"):
        store.fetch(f"http://{'a' * 64}.invalid/a", 10)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"connect_seconds": 0}, "connect_seconds=0: seconds, more than 0"),
        ({"idle_seconds": float("nan")}, "idle_seconds=nan"),
        ({"total_seconds": -1}, "total_seconds=-1.*None for no limit"),
        ({"idle_seconds": 10**400}, "idle_seconds=10*: seconds.*at most"),
        ({"token": None}, "token is of type NoneType: a text"),
        ({"user": b"x"}, "user is of type bytes"),
        ({"user": "a", "password": "\ud800"}, "half a character"),
        ({"headers": ["a: b"]}, "headers is of type list"),
        ({"headers": {1: "b"}}, "headers is of type dict"),
        ({"origin": 5}, "origin is of type int"),
        ({"origin": "x"}, "origin isn't a URL"),
        ({"ca": 5}, "ca=5"),
        ({"longest_wait_seconds": True}, "longest_wait_seconds=True"),
        ({"attempts": 0}, "attempts=0: a whole number, 1 or more"),
        ({"max_redirects": 1.5}, "max_redirects=1.5"),
        ({"password": "SECRET"}, "without user"),
        ({"user": "a:SECRET"}, "a colon"),
        ({"user": "a", "token": "SECRET"}, "leave the other out"),
        ({"token": "SECRET\n"}, "end of its line"),
        ({"headers": {"A b": "SECRET"}}, "signs that a header can't have"),
        ({"headers": {"A": "SECRET\r\nB: c"}}, "isn't one line"),
        ({"token": "a", "headers": {"authorization": "SECRET"}}, "leave one of them out"),
        ({"headers": {"Range": "bytes=0-1"}}, "set by the store itself"),
        ({"origin": "host"}, "isn't a URL"),
    ],
)
def test_options_are_checked_at_birth(given: dict[str, object], words: str) -> None:
    """An option that can't be used is refused by name, without its value where that is a secret."""
    with pytest.raises((OptionsError, RemoteError), match=words) as error:
        HttpOptions(**given)  # type: ignore[arg-type]
    assert "SECRET" not in str(error.value)
