"""The law of reading over HTTP: each byte once and in order, or an error of ours within the limits, whatever comes from the server."""

from __future__ import annotations

import random
import time

import pytest
from faulty import HTML, Fault, Faulty, Taken, some_faults
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pipeline.errors import RemoteError
from pipeline.stores.http import HttpOptions, HttpStore

pytestmark = pytest.mark.usefixtures("no_network")

DATA = random.Random(3).randbytes(200_000)
LIMITS = HttpOptions(
    first_wait_seconds=0.001, longest_wait_seconds=0.002, attempts=4, idle_seconds=0.15, connect_seconds=1.0, total_seconds=4.0
)
SLACK_SECONDS = 60.0  # of a machine with other work

cuts = st.one_of(st.none(), st.sampled_from((0, 1, 511, 512, 513, 65_536, 199_999)), st.integers(0, 200_000))
bodies = st.builds(
    Fault,
    cut=cuts,
    reset=st.booleans(),
    chunked=st.booleans(),
    length=st.booleans(),
    ranges=st.booleans(),
    gzip=st.sampled_from((False, False, False, True)),
    stall=st.sampled_from((0.0, 0.0, 0.0, 0.0, 0.3)),
    delay=st.sampled_from((0.0, 0.0, 0.0, 0.0, 0.3)),
    content_range=st.sampled_from((None, None, None, "", "bytes 0-9/10", "bytes 5-4/200000", "bytes */200000", "nonsense")),
    etag=st.sampled_from((None, None, None, None, "", 'W/"weak"', '"other"')),
    modified=st.sampled_from((None, None, None, "", "Wed, 15 Nov 2023 22:13:20 GMT")),
    rate=st.sampled_from((None, None, None, 2e6)),
)
refusals = st.one_of(
    st.sampled_from((400, 401, 403, 404, 410, 416, 204, 408, 425, 429, 500, 501, 502, 503, 504)).map(
        lambda status: Fault(status=status)
    ),
    st.sampled_from(("0", "", "1", "soon")).map(lambda after: Fault(status=503, retry_after=after)),
    st.sampled_from((405, 403, 501)).map(lambda head: Fault(head=head)),
    st.sampled_from((Fault(body=HTML, kind="text/html"), Fault(body=HTML), Fault(body=b""), Fault(body=b"", chunked=True))),
    st.sampled_from(
        (
            b"",
            b"\r\n",
            b"HTTP/1.1 ",
            b"HTTP/1.1 200 OK\r\n\r\n",
            b"HTTP/1.1 206 OK\r\nContent-Length: 9\r\n\r\n123",
            b"\x16\x03\x01",
        )
    ).map(lambda raw: Fault(raw=raw)),
    st.sampled_from(("/a.tar", "a.tar", "/gone", "", "ftp://h/", "http://127.0.0.1:1/a.tar")).map(
        lambda to: Fault(redirect=to, status=302)
    ),
)
scripts = st.lists(st.one_of(st.none(), bodies, refusals), max_size=8)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(scripts, st.integers(0, 200_000), st.one_of(st.none(), st.integers(0, 200_000)), st.booleans())
def test_any_faults(script: list[Fault | None], start: int, more: int | None, look: bool) -> None:
    """Any sequence of faults: never short, never double, never another's bytes, never beyond the limits."""
    stop = None if more is None else min(start + more, len(DATA))
    taken, began = Taken(start), time.monotonic()
    with Faulty({"/a.tar": DATA}, script) as server, HttpStore(LIMITS) as store:
        try:
            known = store.look(server.url("/a.tar")) if look else None
            seen = store.read(server.url("/a.tar"), start, stop, known, taken)
        except RemoteError as error:
            event("an error")
            assert str(error).startswith("http://127.0.0.1:")
            assert DATA[start:].startswith(taken.data)
        else:
            event("all bytes")
            assert taken.data == DATA[start:stop]
            assert seen.size in (None, len(DATA))
    assert time.monotonic() - began < 2 * LIMITS.total_seconds + SLACK_SECONDS if LIMITS.total_seconds else False


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.lists(st.integers(0, 200_000), max_size=5))
def test_what_passes_costs_nothing_but_time(seed: int, places: list[int]) -> None:
    """Where three replies in ten go wrong, but none for good, every read ends well, and the retries are counted."""
    options = HttpOptions(first_wait_seconds=0.001, longest_wait_seconds=0.002, attempts=30)
    edges = sorted({0, *places, len(DATA)})
    with Faulty({"/a.tar": DATA}, some_faults(0.3, seed, len(DATA))) as server, HttpStore(options) as store:
        known = store.look(server.url("/a.tar"))
        for start, stop in zip(edges, edges[1:], strict=False):
            taken = Taken(start)
            known = store.read(server.url("/a.tar"), start, stop, known, taken)
            assert taken.data == DATA[start:stop]
        assert store.counts.retries <= len(server.log)
        assert known.size == len(DATA)
