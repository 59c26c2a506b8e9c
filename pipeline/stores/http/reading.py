"""Reads one range forward, each byte once and in order, through any number of replies; does no waiting of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from pipeline.errors import ChangedError, RemoteError
from pipeline.stores import Place
from pipeline.stores.http.counts import Counter
from pipeline.stores.http.replies import HEAD_BYTES, Remote, check_head, check_kind, content_range, described, encoded, unsatisfied
from pipeline.stores.http.retry import PROGRESS_BYTES, Again

Take: TypeAlias = Callable[[int, memoryview], None]
Expect: TypeAlias = Callable[[bytes], bool]

# What is asked of a socket at once: more where all of it came. In pieces of 1 MiB a GB costs a fifth less CPU than in those of
# 256 KiB, as threads hand the interpreter on less often; TLS never gives more than 16 KiB.
_LEAST_PIECE, _LARGEST_PIECE = 64 * 1024, 2**20
_OK, _UNSATISFIABLE = 200, 416


class Reply(Protocol):
    """The reply to one request: its status and headers, and a body (`length` None: nobody says of how many bytes)."""

    status: int
    headers: Mapping[str, str]
    chunked: bool

    @property
    def length(self) -> int | None:
        """How many bytes are still to come."""
        ...

    def read(self, size: int) -> bytes | memoryview:
        """Return up to `size` bytes, none at the end, the caller's until the next call; raises Again when they don't come."""
        ...


class Reading:
    """The state of one read: the next byte that is wanted, and what is known of the object."""

    def __init__(self, address: Place, start: int, stop: int | None, known: Remote | None, take: Take) -> None:
        """Begin; raises RemoteError if the object is known to be shorter."""
        self._address, self.known, self._take = address, known or Remote(None), take
        self.at, self._stop, self._whole = start, stop, start == 0 and stop is None
        self._open_ended = -1  # where a body ended that didn't say whether this was its end
        self._learn(self.known)

    @property
    def done(self) -> bool:
        """Whether all was delivered."""
        return self._stop is not None and self.at >= self._stop

    @property
    def rest(self) -> int | None:
        """How many bytes are still to come, None where nobody said."""
        return None if self._stop is None else self._stop - self.at

    def headers(self) -> dict[str, str]:
        """Return what to ask for next: the rest, and only of the version whose beginning is there."""
        if self._whole and self.at == 0:
            return {}
        headers = {"Range": f"bytes={self.at}-{'' if self._stop is None else self._stop - 1}"}
        return headers | ({"If-Range": self.known.validator} if self.known.validator else {})

    def step(self, reply: Reply, counter: Counter, expect: Expect | None) -> None:
        """Deliver what a reply brings; raises Again where it isn't all that it should be, RemoteError where nothing helps."""
        if reply.status == _UNSATISFIABLE:
            self._past_the_end(reply)
            return
        check_kind(self._address, reply.headers, judged=expect is not None and self.at == 0)
        start, stop, seen = self._whole_body(reply) if reply.status == _OK else self._part(reply)
        # An error page has another length than the object: told apart before lengths are compared.
        data: bytes | memoryview = b"" if start else _head(reply, expect)
        self._learn(seen)
        place, piece = self._deliver(start, stop, data, counter), _LEAST_PIECE
        while not self.done and (stop is None or place < stop) and (data := reply.read(piece)):
            place = self._deliver(place, stop, data, counter)
            piece = min(_LARGEST_PIECE, 2 * piece) if len(data) == piece else max(_LEAST_PIECE, len(data))
        if not self.done:
            self._ended(reply, start, place, stop)

    def _whole_body(self, reply: Reply) -> tuple[int, int | None, Remote]:
        if reply.length == 0:
            raise Again("the server answered 200 with an empty body")
        return 0, reply.length, described(reply.headers, reply.length, ranges=False)

    def _part(self, reply: Reply) -> tuple[int, int | None, Remote]:
        found = content_range(reply.headers)
        if found is None:
            raise Again("the server answered 206 with a Content-Range that is missing or makes no sense")
        start, stop, size = found
        if reply.length not in (None, stop - start):
            raise Again(
                f"the server answered 206 with a Content-Length of {reply.length} and a Content-Range of {stop - start} bytes"
            )
        if start != self.at or (self._stop is not None and stop > self._stop):
            raise Again(f"the server answered 206 with other bytes ({start} to {stop}) than were asked for (from {self.at})")
        return start, stop, described(reply.headers, size, ranges=True)

    def _learn(self, seen: Remote) -> None:
        """Take over what a reply says of the object; raises ChangedError where that is another one."""
        sizes = (self.known.size, seen.size)
        if self.known.etag and self.known.etag == seen.etag and None not in sizes and sizes[0] != sizes[1]:
            raise Again(f"the server said that the same version is {seen.size} bytes long, and {self.known.size} before")
        if change := self.known.change(seen):
            if seen.encoded and not self.known.encoded and self.known.size is not None:
                raise encoded("as its name says")  # once more, and only this time: other bytes of the same version
            if not self.known.validator and self.known.size is not None and seen.size is not None:  # a manifest's word
                raise ChangedError(
                    f"{self._address}: has {seen.size} bytes, and {self.known.size} were expected; was it cut or replaced after it "
                    "was indexed? Upload it again, or index it again"
                )
            raise ChangedError(
                f"{self._address}: changed while it was read ({change}); old and new bytes can't be mixed: read it again from its "
                "start, and give a new version a new name"
            )
        self.known = self.known.joined(seen)
        size = self.known.size
        if size is None:
            return
        if self.at > size or (self._stop is not None and self._stop > size):
            raise RemoteError(
                f"{self._address}: has {size} bytes, and those from {self.at} to {self._stop or 'its end'} are wanted; "
                "was it cut after it was indexed? Upload it again, or index it again"
            )
        self._stop = size if self._stop is None else self._stop

    def _deliver(self, place: int, stop: int | None, data: bytes | memoryview, counter: Counter) -> int:
        """Hand on what is wanted of bytes that lie at `place`, of a body up to `stop`; returns where they end."""
        end = min(bound for bound in (place + len(data), stop, self._stop) if bound is not None)
        size = max(0, end - self.at)
        counter.body(len(data), len(data) - size)
        if size:
            with memoryview(data)[self.at - place : end - place] as view:
                self._take(self.at, view)
            self.at += size
        return place + len(data)

    def _ended(self, reply: Reply, start: int, place: int, stop: int | None) -> None:
        """Judge a body that ended before all was delivered."""
        if stop is not None and place < stop:
            raise Again(f"the body ended at byte {place} of {stop}")
        if stop is not None:  # a server that sends less at once than it is asked for, or knows no size
            if place - start < PROGRESS_BYTES:
                raise Again(f"the server sent {place - start} bytes, fewer than were asked for")
        elif self.known.size is not None or place < self.at:
            raise Again(f"the body ended at byte {place} of {max(self.known.size or 0, self.at)}")
        elif reply.chunked:
            self._learn(Remote(place, ranges=False))
        elif self._open_ended == place:
            raise RemoteError(
                f"{self._address}: comes without its length, from a server that can't begin in the middle, so its end "
                "can't be told from a cut; serve it with a Content-Length"
            )
        else:
            self._open_ended = place  # if this is the end, the server answers 416 to what follows
            raise Again(f"the body ended at byte {place}, of a length that the server doesn't say")

    def _past_the_end(self, reply: Reply) -> None:
        size = unsatisfied(reply.headers)
        if size is None or size > self.at:
            raise Again(f"the server answered 416 to bytes from {self.at}" + ("" if size is None else f" of {size}"))
        self._learn(Remote(size, ranges=True))


def _head(reply: Reply, expect: Expect | None) -> bytes:
    """Return the object's first bytes; raises Again where they are something else's."""
    head = b""
    while len(head) < HEAD_BYTES and (piece := reply.read(HEAD_BYTES - len(head))):
        head += piece
    if not head:
        raise Again(f"the server answered {reply.status} with an empty body")
    check_head(head, None if expect is None else expect(head))
    return head
