"""How servers are asked: limits, credentials and trust; frozen, checked at birth, silent about secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.errors import OptionsError, RemoteError
from pipeline.stores.http.address import Address

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MOST_SECONDS = 10_000_000  # four months; what systems wait for at once has an end
_OURS = ("range", "if-range", "accept-encoding", "host", "content-length", "transfer-encoding", "connection")


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """Options of an HttpStore.

    connect_seconds: to connect to one address of the host, and for TLS again; how long DNS takes is the system's to say.
    idle_seconds: without a byte of the reply.
    total_seconds: for one read, with all its tries and waits (None: no limit).
    first_wait_seconds, longest_wait_seconds: the most that is waited after the first failure in a row, and after any; the most
        doubles with each, and how much of it is waited is drawn anew. A server's Retry-After comes on top, up to 120 s.
    attempts: tries in a row that bring nothing new, before that is an error.
    user, password: for Basic authentication. `token`: for Bearer. `headers`: further ones, such as a cookie.
    origin: scheme://host[:port] that user, token and headers are for; nobody else ever gets them.
    ca: a file or folder of certificates to trust in place of the system's (None: REQUESTS_CA_BUNDLE, SSL_CERT_FILE, the system's).
    max_redirects: hops from the URL as given to the data.
    """

    connect_seconds: float = 10.0  # three SYNs of a lossy link come within 7 s
    idle_seconds: float = 30.0  # disks of a NAS that sleep take 10 to 15 s to spin up
    total_seconds: float | None = None
    attempts: int = 10  # with the waits between them 45 s on average: a server restarts meanwhile
    first_wait_seconds: float = 0.25
    longest_wait_seconds: float = 30.0
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    origin: str = field(default="", repr=False)
    ca: str | None = None
    max_redirects: int = 10

    def __post_init__(self) -> None:
        for name in ("connect_seconds", "idle_seconds", "total_seconds", "first_wait_seconds", "longest_wait_seconds"):
            _check_seconds(name, getattr(self, name))
        for name, least in (("attempts", 1), ("max_redirects", 0)):
            got = getattr(self, name)
            if isinstance(got, bool) or not isinstance(got, int) or got < least:
                raise OptionsError(f"{name}={got!r}: a whole number, {least} or more")
        for name in ("user", "password", "token", "origin"):
            if not isinstance(getattr(self, name), str):
                raise OptionsError(f"{name} is of type {type(getattr(self, name)).__name__}: a text, or leave it out")
        if not isinstance(self.headers, Mapping) or not all(isinstance(name, str) for name in self.headers):
            raise OptionsError(f"headers is of type {type(self.headers).__name__}: a mapping of names to texts")
        object.__setattr__(self, "headers", dict(self.headers))  # it is sent to other processes
        if self.ca is not None and not is_file_name(self.ca):
            raise OptionsError(f"ca={self.ca!r}: a file or folder of certificates, or None")
        self._check_credentials()
        if self.origin:
            try:
                Address(self.origin).check()
            except RemoteError:
                raise OptionsError("origin isn't a URL such as https://host:9000") from None

    def _check_credentials(self) -> None:
        # Their values are never shown, so what is wrong with them is said in words.
        if self.token and (self.user or self.password):
            raise OptionsError("user and token are both given: a request has room for one; leave the other out")
        if self.password and not self.user:
            raise OptionsError("password is given without user")
        if ":" in self.user:
            raise OptionsError("user holds a colon: Basic authentication would take what follows for the password")
        if not _is_text(self.user + self.password):
            raise OptionsError("user or password holds half a character")
        if not all(sign.isascii() and sign.isprintable() and sign != " " for sign in self.token):
            raise OptionsError("token holds blanks, line ends or signs beyond ASCII: was it read with the end of its line?")
        for name, value in self.headers.items():
            if not _TOKEN.fullmatch(name):
                raise OptionsError("headers: a name with signs that a header can't have")
            if name.lower() == "authorization" and (self.user or self.token):
                raise OptionsError("headers: Authorization is given beside user or token; leave one of them out")
            if name.lower() in _OURS:
                raise OptionsError(f"headers: {name} is set by the store itself; leave it out")
            if not isinstance(value, str) or not value.isprintable() or not _latin(value):
                raise OptionsError(f"headers: the value of {name} isn't one line of Latin text")

    @property
    def secret(self) -> bool:
        """Whether there is something that not everyone may get."""
        return bool(self.user or self.token or self.headers)


def _check_seconds(name: str, got: object) -> None:
    if got is None and name == "total_seconds":
        return
    if isinstance(got, bool) or not isinstance(got, int | float) or not 0 < got <= _MOST_SECONDS:
        raise OptionsError(
            f"{name}={got!r}: seconds, more than 0 and at most {_MOST_SECONDS:,}"
            + (", or None for no limit" if name == "total_seconds" else "")
        )


def is_file_name(given: object) -> bool:
    """Tell whether it is a text that a path can be."""
    return isinstance(given, str) and bool(given) and "\0" not in given and _is_text(given)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeError:
        return False
    return True


def _latin(text: str) -> bool:
    try:
        text.encode("latin-1")
    except UnicodeError:
        return False
    return True
