"""Reads what a reply says: what lies at the URL, which bytes come, and whether it is an answer at all; no I/O in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from pipeline.errors import DeniedError, MissingError, RemoteError
from pipeline.stores import Place
from pipeline.stores.http.address import Address
from pipeline.stores.http.retry import Again, retry_after

HEAD_BYTES = 512  # a tar's first header
_LARGEST = 2**44  # bytes: more than any file system of a server holds in one file
_RETRIED = (408, 425, 429)
_RANGE = re.compile(r"bytes\s+([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.IGNORECASE)
_UNSATISFIED = re.compile(r"bytes\s+\*/([0-9]{1,19})", re.IGNORECASE)
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,60})\s*</Code>")
_EXPIRED = "the signature or session has run out: sign the URL anew"
_CODES = {
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "RequestTimeTooSkewed": "this machine's clock differs too much from the server's: set it (NTP)",
    "SignatureDoesNotMatch": "the signature doesn't fit the URL: was the URL changed after it was signed?",
    "InvalidAccessKeyId": "the server doesn't know the key that signed the URL",
    "NoSuchBucket": "there is no such bucket",
    "NoSuchKey": "there is no such object in the bucket",
}
_OF_NAMES = {"gzip": (".gz", ".tgz"), "bzip2": (".bz2", ".tbz2"), "xz": (".xz", ".txz"), "zstd": (".zst", ".tzst")}
_RETRIED_CODES = ("RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "ServerBusy")


@dataclass(frozen=True, slots=True)
class Remote:
    """What lies at a URL, as far as its server says.

    size: in bytes, None where no reply said. `etag`, `modified`: its strong ETag and its Last-Modified, "" where there is none.
    ranges: whether it can be read from the middle. encoded: whether it is said to be compressed, as its name says too.
    """

    size: int | None
    etag: str = ""
    modified: str = ""
    ranges: bool = False
    encoded: bool = False

    @classmethod
    def known_by(cls, validator: str, size: int) -> Remote:
        """Return what is known of an object by its ETag or date, "" for neither."""
        return cls(size, validator) if validator.startswith('"') else cls(size, modified=validator)

    @property
    def validator(self) -> str:
        """What tells this version from another in If-Range, "" where nothing does."""
        return self.etag or self.modified

    def change(self, seen: Remote) -> str:
        """Say how `seen` is another version of it, "" where nothing tells so."""
        pairs = [("ETag", self.etag, seen.etag)]
        if not (self.etag and seen.etag):  # servers of one name may differ in the date, but not in the ETag too
            pairs.append(("Last-Modified", self.modified, seen.modified))
        pairs.append(("length", _text(self.size), _text(seen.size)))
        return ", ".join(f"{name} was {old}, is {new}" for name, old, new in pairs if old and new and old != new)

    def joined(self, seen: Remote) -> Remote:
        """Return what both say together."""
        size = seen.size if self.size is None else self.size
        return Remote(size, self.etag or seen.etag, self.modified or seen.modified, seen.ranges, self.encoded)


def _text(size: int | None) -> str:
    return "" if size is None else str(size)


def described(headers: Mapping[str, str], size: int | None, ranges: bool) -> Remote:
    """Return what headers say of the object; a weak ETag stays the same for other bytes, so it doesn't count.

    Raises Again where its size makes no sense.
    """
    if size is not None and size > _LARGEST:
        raise Again(f"the server says that it is {size:.3g} bytes long")
    etag = headers.get("ETag", "").strip()
    coding = headers.get("Content-Encoding", "").strip().lower()
    modified = headers.get("Last-Modified", "").strip()
    return Remote(size, etag if etag.startswith('"') else "", modified, ranges, coding not in ("", "identity"))


def content_range(headers: Mapping[str, str]) -> tuple[int, int, int | None] | None:
    """Return (start, stop, size) of a 206's bytes, None where its Content-Range is missing or makes no sense."""
    match = _RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if match is None:
        return None
    start, stop, size = int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3])
    return (start, stop, size) if start < stop and (size is None or stop <= size) else None


def unsatisfied(headers: Mapping[str, str]) -> int | None:
    """Return the size that a 416 says the object has."""
    match = _UNSATISFIED.fullmatch(headers.get("Content-Range", "").strip())
    return int(match[1]) if match else None


def check_kind(address: Place, headers: Mapping[str, str], *, judged: bool = False) -> None:
    """Raise Again for a reply of 200 or 206 whose headers tell of other bytes than the object's.

    judged: its first bytes are looked at too, and tell better whether they are a page.
    """
    coding = headers.get("Content-Encoding", "").strip().lower()
    # Apache, as many set it up, says of a file's name that its bytes are encoded: they are as they lie there all the same.
    of_the_name = address.path.lower().endswith(_OF_NAMES.get(coding.removeprefix("x-"), ()))
    if coding not in ("", "identity") and not of_the_name:
        raise encoded(coding)
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if not judged and kind in ("text/html", "application/xhtml+xml") and not address.path.lower().endswith((".html", ".htm")):
        raise _page("an HTML page")


def encoded(coding: str) -> Again:
    """Return the failure of a reply that was compressed on its way."""
    return Again(
        f"the server sends it encoded (Content-Encoding: {coding[:20]}), though identity was asked for",
        advice="offsets would count other bytes, so switch compression off for this path",
    )


def check_head(head: bytes, wanted: bool | None) -> None:
    """Raise Again if an object's first bytes aren't what was asked for; `wanted`: what the caller says of them, None: nothing."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    page = text.startswith(b"<") and head[257:262] != b"ustar"
    if wanted or (wanted is None and not page):
        return
    code = _code(head)
    if not page:
        raise _page("something else")
    raise _page(f"an error ({code})" if code else "an HTML page" if b"<html" in text.lower() else "a page of XML or HTML")


def _page(what: str) -> Again:
    return Again(
        f"{what} came in place of the data",
        advice="is it a page for logging in, or an error's? Open the URL in a browser, and check the credentials",
    )


def refuse(address: Address, status: int, headers: Mapping[str, str], body: bytes, note: str) -> None:
    """Raise what a status other than 200, 206 and redirects means; `note`: what to add about credentials."""
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "unknown status"
    code = _code(body)
    said = f"{status} {phrase}" + (f" ({code})" if code else "")
    if status in _RETRIED or status >= 500 or 200 <= status < 300 or code in _RETRIED_CODES:
        raise Again(f"the server answered {said}", retry_after(headers.get("Retry-After")))
    if code == "AccessDenied" and b"xpired" in body:
        code = "RequestExpired"
    if status in (404, 410) or code in ("NoSuchKey", "NoSuchBucket"):
        reason, advice = _CODES.get(code, "there is nothing"), "is the URL right, and the upload complete?"
        if set("*?[") & set(address.path):
            advice = "over HTTP no pattern is matched: name the manifest, or the tars as {000000..000127}"
        raise MissingError(f"{address}: {said}: {reason}; {advice}")
    if status in (401, 403) or code in _CODES:
        raise DeniedError(f"{address}: {said}: {_CODES.get(code, 'access is refused')}{note}")
    if status == 407:
        raise DeniedError(f"{address}: {said}: the proxy wants user and password; give them in HTTP_PROXY")
    raise RemoteError(f"{address}: {said}: the server doesn't serve such a request; is the URL right?")


def _code(body: bytes) -> str:
    """Return the code of an S3-like error; its message isn't used: it may repeat what was signed."""
    match = _CODE.search(body)
    return match[1].decode() if match else ""
