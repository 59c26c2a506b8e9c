"""What reads over HTTP deliver: each byte once and in order, whatever one reply or another lacks."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty import HTML, Fault, Faulty, Request, Script, Taken

from pipeline.errors import ChangedError, OptionsError, RemoteError
from pipeline.stores.http import HttpOptions, HttpStore, Remote

pytestmark = pytest.mark.usefixtures("no_network")

DATA = random.Random(1).randbytes(300_000)
TAR = b"0000.jpg".ljust(257, b"\0") + b"ustar\x0000" + bytes(2000)
QUICK = HttpOptions(first_wait_seconds=0.002, longest_wait_seconds=0.01, attempts=4, idle_seconds=5)


@pytest.fixture
def store() -> Iterator[HttpStore]:
    with HttpStore(QUICK) as store:
        yield store


def read(
    store: HttpStore, script: Script, start: int = 0, stop: int | None = None, known: Remote | None = None
) -> tuple[bytes, Faulty]:
    """Read from a server that follows a script."""
    taken = Taken(start)
    with Faulty({"/a.tar": DATA}, script) as server:
        store.read(server.url("/a.tar"), start, stop, known, taken)
    return bytes(taken.data), server


@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 1), (5, 1000), (1, None), (299_999, 300_000), (0, 300_000)])
@pytest.mark.case("H09")
def test_a_range_is_read(store: HttpStore, start: int, stop: int | None) -> None:
    """Any range comes as it lies there, in one request."""
    got, server = read(store, (), start, stop)
    assert got == DATA[start:stop]
    assert len(server.log) == 1
    assert server.log[0].headers["accept-encoding"] == "identity"


def test_an_empty_range_asks_for_nothing(store: HttpStore) -> None:
    """No bytes, no request."""
    got, server = read(store, (), 7, 7)
    assert (got, server.log) == (b"", [])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 511, 512, 100_000, 299_999])
@pytest.mark.case("H02", "H03")
def test_a_cut_body_is_resumed(store: HttpStore, cut: int, reset: bool, chunked: bool) -> None:
    """A body that is cut anywhere goes on from the last good byte, of the same version only."""
    got, server = read(store, [Fault(cut=cut, reset=reset, chunked=chunked)], 0, len(DATA))
    assert got == DATA
    assert (len(server.log), store.counts.retries) == (2, 1)
    second = server.log[1].headers
    assert int(second["range"].removeprefix("bytes=").partition("-")[0]) <= cut
    assert cut < 512 or second["if-range"].startswith('"')


@pytest.mark.case("H01")
def test_a_body_without_length_is_no_end(store: HttpStore) -> None:
    """Where a body ends that doesn't say its length is no end until the server says that nothing follows."""
    got, server = read(store, [Fault(length=False, cut=1000), Fault(length=False, cut=150_000), Fault(length=False)])
    assert got == DATA
    assert [request.headers.get("range") for request in server.log] == [None, "bytes=1000-", "bytes=151000-299999"]
    got, server = read(store, [Fault(length=False)])
    assert got == DATA
    assert server.log[1].headers["range"] == "bytes=300000-"  # 416: that was the end


def test_an_end_that_nobody_can_tell_is_an_error(store: HttpStore) -> None:
    """Without length and without ranges a cut looks like an end: neither is taken for the other."""
    with pytest.raises(RemoteError, match=r"can't be told from a cut.*Content-Length"):
        read(store, lambda request: Fault(length=False, ranges=False, cut=1000))


def test_a_body_without_length_serves_a_range(store: HttpStore) -> None:
    """What is wanted of a body without length is known to be there."""
    got, _ = read(store, lambda request: Fault(length=False, ranges=False), 10, 250_000)
    assert got == DATA[10:250_000]


@pytest.mark.parametrize("stop", [None, 200_000])
def test_chunked_bodies_are_read(store: HttpStore, stop: int | None) -> None:
    """Chunks need no length; their end mark is an end."""
    got, server = read(store, lambda request: Fault(chunked=True, ranges=False), 0, stop)
    assert got == DATA[:stop]
    assert len(server.log) == 1


def test_an_end_mark_too_early_is_no_end(store: HttpStore) -> None:
    """A gateway that lost its source may end the chunks properly: the length that is known counts."""
    got, server = read(store, [Fault(body=DATA[:200_000], chunked=True)], 0, None, Remote(300_000))
    assert got == DATA
    assert server.log[1].headers["range"] == "bytes=200000-299999"
    part = Fault(status=206, body=DATA[:200_000], chunked=True, content_range="bytes 0-299999/300000")
    assert read(store, [part], 0, 300_000)[0] == DATA
    assert store.counts.retries == 2


@pytest.mark.case("H10")
def test_a_server_without_ranges_is_read_from_the_start(store: HttpStore) -> None:
    """Of a 200 to a Range request the prefix is skipped, again after each failure."""
    got, server = read(
        store, [Fault(ranges=False, cut=100_000), Fault(ranges=False, cut=50_000), Fault(ranges=False)], 1000, 299_000
    )
    assert got == DATA[1000:299_000]
    assert len(server.log) == 3
    assert store.counts.skipped_bytes >= 1000 + 50_000 + 100_000


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "bytes 0-9/300000",
        "bytes 9-299998/300000",
        "bytes 11-300000/300000",
        "bytes 10-5/300000",
        "items 10-20/30",
        "bytes */300000",
    ],
)
def test_a_wrong_content_range_is_refused(store: HttpStore, wrong: str) -> None:
    """Bytes of which it isn't known where they belong are asked for again; then that is an error."""
    got, server = read(store, [Fault(content_range=wrong)], 10)
    assert got == DATA[10:]
    assert len(server.log) == 2
    with pytest.raises(RemoteError, match=r"206 with .* \(4 tries in a row failed"):
        read(store, lambda request: Fault(content_range=wrong), 10)


def test_more_bytes_than_the_range_are_refused(store: HttpStore) -> None:
    """A body that doesn't fit its Content-Range is misplaced: none of it is used; of chunks only what fits."""
    longer = {"status": 206, "body": DATA[10:70_000], "content_range": "bytes 10-19/300000"}
    got, server = read(store, [Fault(**longer)], 10)
    assert got == DATA[10:]
    assert server.log[1].headers["range"] == "bytes=10-"
    got, server = read(store, [Fault(chunked=True, **longer)], 10, 1000)
    assert got == DATA[10:1000]
    assert server.log[1].headers["range"] == "bytes=20-999"


def test_a_size_that_the_server_doesnt_know_is_found(store: HttpStore) -> None:
    """With `*` for the size the end is where nothing follows."""

    def parts(request: Request) -> Fault | None:
        start = int(request.headers["range"].removeprefix("bytes=").partition("-")[0])
        stop = min(start + 150_000, 300_000)
        return Fault(status=206, body=DATA[start:stop], content_range=f"bytes {start}-{stop - 1}/*") if start < stop else None

    got, server = read(store, parts, 1)
    assert got == DATA[1:]
    assert len(server.log) == 3


@pytest.mark.case("H09")
def test_encoded_replies_are_refused(store: HttpStore) -> None:
    """Offsets in a gzip stream are others than the file's."""
    assert read(store, [Fault(gzip=True)])[0] == DATA
    with pytest.raises(RemoteError, match="Content-Encoding: gzip"):
        read(store, lambda request: Fault(gzip=True))


@pytest.mark.parametrize(
    "page", [Fault(body=HTML, kind="text/html"), Fault(body=HTML), Fault(body=b"\xef\xbb\xbf \n<?xml version='1.0'?><a/>")]
)
def test_a_page_in_place_of_data_is_named(store: HttpStore, page: Fault) -> None:
    """An HTML or XML page with 200 is never data, whether or not its Content-Type admits it, at the start or on a resume."""
    assert read(store, [page])[0] == DATA
    assert read(store, [Fault(cut=1000), page], 0, 300_000)[0] == DATA
    with pytest.raises(RemoteError, match=r"came in place of the data \(4 tries.*a page for logging in"):
        read(store, lambda request: page)


def test_what_begins_like_a_page_can_be_data(store: HttpStore) -> None:
    """A tar whose first name begins with `<` is one; so is what the caller knows."""
    tar = b"<b>.jpg".ljust(257, b"\0") + TAR[257:]
    with Faulty({"/a.tar": tar, "/a.svg": b"<svg/>"}) as server:
        assert store.fetch(server.url("/a.tar"), 10_000) == tar
        assert store.fetch(server.url("/a.svg"), 10_000, expect=lambda head: head.startswith(b"<svg")) == b"<svg/>"


def test_the_caller_says_what_it_expects(store: HttpStore) -> None:
    """An error in JSON in place of a tar is named too, by whoever knows tars."""
    with (
        Faulty({"/a.tar": TAR}, lambda request: Fault(body=b'{"error": "token=SECRET"}', kind="application/json")) as server,
        pytest.raises(RemoteError, match="something else came in place of the data") as error,
    ):
        store.fetch(server.url("/a.tar"), 10_000, expect=lambda head: head[257:262] == b"ustar")
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("fault", [Fault(body=b""), Fault(body=b"", chunked=True), Fault(body=b"", length=False)])
def test_an_empty_200_is_named(store: HttpStore, fault: Fault) -> None:
    """An empty body isn't a shard."""
    assert read(store, [fault])[0] == DATA
    with pytest.raises(RemoteError, match="200 with an empty body"):
        read(store, lambda request: fault)


@pytest.mark.parametrize("fault", [Fault(etag='"other"'), Fault(modified="Wed, 15 Nov 2023 22:13:20 GMT", etag="")])
@pytest.mark.case("H03")
def test_a_changed_object_is_an_error(store: HttpStore, fault: Fault) -> None:
    """Bytes of two versions are never mixed, and the message says how they differ."""
    first = Fault(cut=1000, etag=None if fault.etag else "")
    with pytest.raises(ChangedError, match=r"changed while it was read \((ETag|Last-Modified) was .*, is .*\)"):
        read(store, [first, fault], 0, 300_000)


def test_another_length_is_another_version(store: HttpStore) -> None:
    """Without ETag and Last-Modified the length tells."""
    plain = {"etag": "", "modified": ""}
    with pytest.raises(ChangedError, match="has 5 bytes, and 300000 were expected"):
        read(
            store, [Fault(cut=1000, **plain), Fault(content_range="bytes 1000-299999/5", **plain), Fault(body=b"12345")], 0, 300_000
        )


def test_what_was_known_before_counts(store: HttpStore) -> None:
    """A version that an earlier look found is the one that is read."""
    with pytest.raises(ChangedError):
        read(store, (), 0, 10, Remote(300_000, '"old"', "", ranges=True))
    with pytest.raises(RemoteError, match="has 5 bytes, and those from 0 to 10 are wanted"):
        read(store, (), 0, 10, Remote(5))
    with pytest.raises(RemoteError, match="has 300000 bytes, and those from 299999 to 300001 are wanted"):
        read(store, (), 299_999, 300_001)


def test_a_weak_etag_is_no_validator(store: HttpStore) -> None:
    """A weak ETag may stay the same for other bytes: If-Range takes Last-Modified, or nothing."""
    _, server = read(store, [Fault(cut=1000, etag='W/"x"')], 0, 300_000)
    assert server.log[1].headers["if-range"] == "Tue, 14 Nov 2023 22:13:20 GMT"
    _, server = read(store, [Fault(cut=1000, etag='W/"x"', modified="")], 0, 300_000)
    assert "if-range" not in server.log[1].headers


def test_servers_that_send_less_at_once(store: HttpStore) -> None:
    """A shorter range than asked for is a beginning, not a failure."""

    def shorter(request: Request) -> Fault:
        start = int(request.headers["range"].removeprefix("bytes=").partition("-")[0])
        stop = min(start + 70_000, 300_000)
        return Fault(status=206, body=DATA[start:stop], content_range=f"bytes {start}-{stop - 1}/300000")

    got, server = read(store, shorter, 1)
    assert got == DATA[1:]
    assert (len(server.log), store.counts.retries) == (5, 0)


@pytest.mark.parametrize(
    ("script", "size", "ranges"),
    [
        ((), 300_000, True),
        ([Fault(head=403), None], 300_000, True),
        ([Fault(head=405), None], 300_000, True),
        ([Fault(head=501), Fault(ranges=False)], 300_000, False),
        ([Fault(head=405), Fault(chunked=True, ranges=False)], None, False),
        ([Fault(ranges=False), Fault(ranges=False)], 300_000, False),
        ([Fault(ranges=False), None], 300_000, True),
        ([Fault(status=503), Fault(raw=b""), None], 300_000, True),
        ([Fault(body=HTML, kind="text/html")], 300_000, True),
    ],
)
def test_a_look_tells_size_and_ranges(store: HttpStore, script: Script, size: int | None, ranges: bool) -> None:
    """HEAD, or the first byte where HEAD is refused or doesn't say all."""
    with Faulty({"/a.tar": DATA}, script) as server:
        seen = store.look(server.url("/a.tar"))
    assert (seen.size, seen.ranges) == (size, ranges)
    assert seen.validator.startswith('"')


@pytest.mark.parametrize("digits", [15, 19, 30])
def test_a_size_that_nothing_has_is_named(store: HttpStore, digits: int) -> None:
    """A server that says of a tar that it is petabytes long is an error, not a list of as many windows."""
    head = f"HTTP/1.1 200 OK\r\nAccept-Ranges: bytes\r\nContent-Length: {'9' * digits}\r\n\r\n".encode()
    with Faulty({"/a.tar": DATA}, lambda _request: Fault(raw=head)) as server, pytest.raises(RemoteError, match="bytes long"):
        store.look(server.url("/a.tar"))


def test_a_look_at_an_empty_object(store: HttpStore) -> None:
    """Nothing but a server that says so makes an object empty."""
    with Faulty({"/a.tar": b""}) as server, pytest.raises(RemoteError, match="empty"):
        store.fetch(server.url("/a.tar"), 10)
    with Faulty({"/a.tar": b""}) as server:
        assert store.look(server.url("/a.tar")).size == 0


def test_a_small_file_is_small(store: HttpStore) -> None:
    """A manifest of gigabytes isn't one."""
    with Faulty({"/m.json": b"[1, 2]"}) as server:
        assert store.fetch(server.url("/m.json"), 6) == b"[1, 2]"
        with pytest.raises(RemoteError, match="more than 5 bytes"):
            store.fetch(server.url("/m.json"), 5)


def test_what_take_raises_ends_the_read(store: HttpStore) -> None:
    """A full disk ends the read at once, without another request, and the store goes on working."""

    def full(offset: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with Faulty({"/a.tar": DATA}, [Fault(rate=1e6)]) as server:
        with pytest.raises(OSError, match="No space left"):
            store.read(server.url("/a.tar"), 0, None, None, full)
        assert len(server.log) == 1
        assert store.fetch(server.url("/a.tar"), 10**6) == DATA


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (5, 4)])
def test_an_impossible_range_is_refused(store: HttpStore, start: int, stop: int | None) -> None:
    """It would be a mistake of ours, not the network's."""
    with pytest.raises(OptionsError, match="a range of bytes"):
        store.read("http://localhost/", start, stop, None, Taken())


def test_connections_are_kept(store: HttpStore) -> None:
    """Requests one after another, HEAD and errors too, share a connection."""
    with Faulty({"/a.tar": DATA}, [None, None, Fault(status=503, body=b"busy"), None]) as server:
        known = store.look(server.url("/a.tar"))
        for start in (0, 1000, 2000):
            store.read(server.url("/a.tar"), start, start + 1000, known, Taken(start))
        assert (server.connections, store.counts.connections) == (1, 1)
        assert store.counts.requests == {200: 1, 206: 3, 503: 1}


def test_a_connection_that_went_stale_is_no_failure(store: HttpStore) -> None:
    """A server may close what is idle at any time; that costs a connection, not a try."""
    with Faulty({"/a.tar": DATA}, [None, Fault(raw=b"")]) as server:
        for start in (0, 1000):
            store.read(server.url("/a.tar"), start, start + 1000, None, Taken(start))
        assert (server.connections, store.counts.retries) == (2, 0)


def test_sixteen_readers_share_a_store() -> None:
    """Sixteen threads on one store get each what they asked for."""
    store = HttpStore(HttpOptions(first_wait_seconds=0.002, longest_wait_seconds=0.01, attempts=30))
    faults = random.Random(5)
    lock = threading.Lock()

    def sometimes(request: Request) -> Fault | None:
        with lock:
            return faults.choice((None, None, Fault(cut=5000), Fault(status=503)))

    def one(start: int) -> bool:
        taken = Taken(start)
        store.read(server.url("/a.tar"), start, start + 15_000, None, taken)
        return bytes(taken.data) == DATA[start : start + 15_000]

    with Faulty({"/a.tar": DATA}, sometimes) as server, ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, [at % 280_000 for at in range(0, 2_800_000, 14_000)]))
    store.close()
    counts = store.counts
    assert counts.retries > 0
    assert counts.bytes >= 200 * 15_000
    assert sum(counts.requests.values()) == len(server.log)


def test_a_closed_store_reads_nothing(store: HttpStore) -> None:
    """Closing ends the waits of readers, and a later read says why it can't."""
    slow = HttpStore(HttpOptions(first_wait_seconds=60, longest_wait_seconds=60))
    with Faulty({"/a.tar": DATA}, lambda request: Fault(status=503, retry_after="100")) as server, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(slow.fetch, server.url("/a.tar"), 10**6)
        while not server.log:
            time.sleep(0.01)
        time.sleep(0.05)
        slow.close()
        with pytest.raises(RemoteError, match="the store was closed"):
            reading.result(10)
        with pytest.raises(RemoteError, match="the store was closed"):
            slow.look(server.url("/a.tar"))


def test_nothing_stays_open(store: HttpStore) -> None:
    """No descriptor is left after a close, whatever happened before."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with (
            Faulty({"/a.tar": DATA}, [Fault(cut=7), Fault(raw=b"x"), Fault(chunked=True), None]) as server,
            HttpStore(QUICK) as own,
        ):
            own.fetch(server.url("/a.tar"), 10**6)
            own.read(server.url("/a.tar"), 5, 10, None, Taken(5))
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
