"""Takes a URL apart without changing what it names: quoted once, its secrets out of sight, its signature told from the rest."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from typing import Final
from urllib.parse import quote, unquote, urljoin

from pipeline.errors import RemoteError

_URL = re.compile(r"(https?)://([^/?#]*)([^?#]*)(\?[^#]*)?(?:#.*)?", re.IGNORECASE | re.DOTALL)
_HOST = re.compile(r"([a-z0-9._~-]+|\[[0-9a-f:.]+\])(?::([0-9]{0,5}))?", re.IGNORECASE)
_PORTS: Final = {"http": 80, "https": 443}
# What a request line holds as it is; the rest is quoted, so that neither a blank nor a line's end can end it.
_AS_IS = "!#$%&'()*+,-./:;=?@[]_~"
_LONE_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")
_LONGEST = 200  # of a URL in a message

# Parameters that sign a URL, by the one whose presence tells that scheme: `st` or `Expires` alone may well name an object.
_SIGNED_BY: Final = {
    "signature": {"signature", "expires", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid", "hash-algorithm"},
    "sig": {"sig", "se", "sp", "sv", "sr", "st", "ss", "srt", "spr", "sip", "skoid", "sktid", "skt", "ske", "sks", "skv", "sdd"},
}
_ALWAYS_SIGN: Final = {"token", "access_token", "auth_token", "hdnts", "hdnea", "__token__"}
_SIGN_PREFIXES: Final = ("x-amz-", "x-goog-")


class Address:
    """A URL of HTTP or HTTPS; its text and repr hold no secret, so neither do messages and printed locals."""

    __slots__ = ("_authority", "_problem", "_query", "_user", "host", "path", "port", "scheme")

    def __init__(self, text: str) -> None:
        """Take a URL apart; never raises (`check` does), so that no frame of a traceback holds the text itself."""
        match = _URL.fullmatch(text.strip())
        scheme, authority, path, query = ((part or "") for part in match.groups()) if match else ("", "", "", "")
        user, _, authority = authority.rpartition("@")
        self.scheme, self._user = str(scheme).lower(), user
        place = _HOST.fullmatch(_ascii(authority))
        self.host = place[1].lower() if place else ""
        self.port = int(place[2] or _PORTS[self.scheme]) if place and match else 0
        self._authority = self.host + (f":{self.port}" if self.port != _PORTS.get(self.scheme) else "")
        self.path, self._query = _quoted(path) or "/", _quoted(query)
        self._problem = (
            "isn't a URL of http:// or https://"
            if match is None
            else "names no host, or one with signs that a host can't have (in a password, write @ as %40 and / as %2F)"
            if place is None or not 0 < self.port < 2**16
            else ""
        )

    def __str__(self) -> str:
        """Return the URL without user, password, query and fragment; of one that is malformed only the scheme."""
        if self._problem or "@" in self.path:  # what follows may be the end of a password
            return f"{self.scheme or 'URL'}://..."
        shown = f"{self.scheme}://{self._authority}{self.path}" + ("?..." if self._query else "")
        return shown if len(shown) <= _LONGEST else shown[: _LONGEST // 2] + "..." + shown[-_LONGEST // 2 :]

    def __repr__(self) -> str:
        return f"<Address {self}>"

    def check(self) -> None:
        """Raise RemoteError if this can't be asked for."""
        if self._problem:
            raise RemoteError(f"{self}: {self._problem}; write it as https://host/folder/name.tar")

    @property
    def origin(self) -> tuple[str, str, int]:
        """Whom credentials are for: scheme, host, port."""
        return (self.scheme, self.host, self.port)

    @property
    def authority(self) -> str:
        """Host and port, as the Host header says them."""
        return self._authority

    @property
    def target(self) -> str:
        """Path and query as they are sent; a secret, if the query holds one."""
        return self.path + self._query

    @property
    def login(self) -> tuple[str, str] | None:
        """User and password of the URL, None where it has none."""
        user, colon, password = self._user.partition(":")
        return (unquote(user), unquote(password)) if user or colon else None

    @property
    def identity(self) -> str:
        """The URL without user, password and fragment, and without what signs it: a URL signed anew is the same object.

        What else its query says is hashed, as it may be a secret of another name: this is shown, and written into files.
        """
        given = [part for part in self._query[1:].split("&") if part]
        names = [unquote(part.partition("=")[0]).lower() for part in given]
        signing = _ALWAYS_SIGN.union(*(group for mark, group in _SIGNED_BY.items() if mark in names))
        kept = [
            part for part, name in zip(given, names, strict=True) if name not in signing and not name.startswith(_SIGN_PREFIXES)
        ]
        query = hashlib.blake2b("&".join(kept).encode(), digest_size=8).hexdigest() if kept else ""
        return f"{self.scheme}://{self._authority}{self.path}" + (f"?{query}" if query else "")

    def follow(self, location: str) -> Address:
        """Return where a redirect from here leads, a malformed address where it leads nowhere."""
        if not location.strip():
            return Address("")
        with suppress(UnicodeError):  # http.client reads headers as Latin-1; what servers send unquoted is UTF-8
            location = location.encode("latin-1").decode()
        try:
            return Address(urljoin(f"{self.scheme}://{self._authority}{self.target}", location.strip()))
        except ValueError:  # brackets that don't pair
            return Address("")


def identity(url: str) -> str:
    """Return the name of what a URL leads to, however it is signed: less its secrets, its query hashed."""
    address = Address(url)
    address.check()
    return address.identity


def _quoted(text: str) -> str:
    """Quote what can't be sent, and nothing twice."""
    raw = _LONE_PERCENT.sub("%25", text)
    try:
        return quote(raw, safe=_AS_IS, errors="surrogateescape")
    except UnicodeEncodeError:  # half of a character
        return quote(raw, safe=_AS_IS, errors="surrogatepass")


def _ascii(authority: str) -> str:
    """Return a host as DNS knows it."""
    if authority.isascii():
        return authority
    host, colon, port = authority.partition(":")
    try:
        return host.encode("idna").decode() + colon + port
    except UnicodeError:
        return ""
