"""Says what obstore's failures mean: its errors are texts, and these are never shown, as they repeat what the server was sent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from pipeline.errors import DeniedError, MissingError, RemoteError
from pipeline.stores.http.retry import Again
from pipeline.stores.objects.address import ObjectAddress

_STATUS = re.compile(r"non-2xx status code: ([1-5][0-9]{2})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,60})\s*</Code>")
_ASKED = re.compile(r"Error performing [A-Z]+ (https?://\S+)")
# Where obstore looks for the credentials of a machine in the cloud, when nothing else gives any.
_FOR_CREDENTIALS = re.compile(
    r"https?://(169\.254\.|\[fd00:|metadata\.google\.|sts\.[a-z0-9.-]*amazonaws\.|login\.microsoftonline\.|oauth2\.googleapis\.)",
    re.IGNORECASE,
)
_RETRIED = (408, 425, 429)
_RETRIED_CODES = ("RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "ServerBusy", "OperationTimedOut")
_MISSING_CODES = ("NoSuchBucket", "NoSuchKey", "ContainerNotFound", "BlobNotFound", "ResourceNotFound")
_EXPIRED = "the session has run out: get new credentials (log in again, or a new AWS_SESSION_TOKEN), and run again"
_REGION = "the bucket is in another region: give ObjectOptions(region=) or AWS_REGION"
_CODES: Final = {
    "ExpiredToken": _EXPIRED,
    "ExpiredAuthenticationToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": "the session token isn't one that the server knows; does it belong to the access key?",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the server's: set it (NTP)",
    "SignatureDoesNotMatch": "the secret key isn't that of the access key",
    "InvalidAccessKeyId": "the server doesn't know this access key",
    "AuthenticationFailed": "the server doesn't accept the account's key or signature; is it the account's, and still valid?",
    "AccessDenied": (
        "access is refused; may these credentials read it? (Who may not list the bucket hears this of what isn't there, too)"
    ),
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NoSuchBucket": "there is no such bucket",
    "NoSuchKey": "there is no such object in the bucket",
    "ContainerNotFound": "there is no such container",
    "BlobNotFound": "there is no such object in the container",
}
_REGION_CODES = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_TO_GIVE: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws/credentials",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_KEY)",
}
_WORDS: Final = (  # (what obstore's text holds, the words), the first that fits
    ("dns error", "its host name can't be resolved"),
    ("ConnectionRefused", "it can't be connected to (Connection refused)"),
    ("TimedOut", "no byte came in time"),
    ("kind: Timeout", "no byte came in time"),
    ("ConnectionReset", "the connection was reset"),
    ("BrokenPipe", "the connection was reset"),
    ("body error", "the body ended early"),
    ("IncompleteMessage", "the server closed the connection without a reply"),
    ("kind: Connect", "it can't be connected to"),
    ("hyper::Error", "what came isn't a reply of HTTP"),
    ("non-partial response", "the server answered with the whole object to a request for a part"),
    ("Content-Range", "the server answered with a Content-Range that is missing or makes no sense"),
    ("Content-Length", "the server answered without a Content-Length"),
    ("MissingContentLength", "the server answered without a Content-Length"),
    ("Requested ", "the server answered with other bytes than were asked for"),
)
_UNTRUSTED = ("invalid peer certificate", "InvalidCertificate", "UnknownIssuer")
_NO_TLS = ("InvalidContentType", "corrupt message")


@dataclass(frozen=True, slots=True)
class Refusal:
    """What one failure says. `status`: the server's, 0 where none came.

    credentials: whether it was they that nobody gave.
    """

    status: int
    error: Exception
    credentials: bool = False

    @property
    def denied(self) -> bool:
        """Whether the server refused the credentials that it got."""
        return isinstance(self.error, DeniedError) and not self.credentials


def refusal(address: ObjectAddress, text: str, kind: str) -> Refusal:
    """Return what an error's text means; `kind`: its type's name. Its `error` is Again where another try may help."""
    found = _STATUS.search(text)
    status, code = int(found[1]) if found else 0, _code(text)
    asked = _ASKED.search(text)
    if "token request" in text[:200] or (asked and _FOR_CREDENTIALS.match(asked[1])):
        return Refusal(status, no_credentials(address), credentials=True)
    if "redirect without LOCATION" in text:
        return Refusal(301, RemoteError(f"{address}: {_REGION}"))
    if status:
        return Refusal(status, _by_status(address, status, code, "xpired" in text or "time frame" in text))
    return Refusal(0, _by_words(address, text.replace(address.key, ""), kind))


def no_credentials(address: ObjectAddress) -> DeniedError:
    """Return the error for a request that nobody could sign."""
    return DeniedError(
        f"{address}: no credentials were found, or those of this machine can't be had; give {_TO_GIVE[address.kind]}, or "
        "ObjectOptions(anonymous=True) for a public bucket"
    )


def _by_status(address: ObjectAddress, status: int, code: str, expired: bool) -> Exception:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "unknown status"
    said = f"{status} {phrase}" + (f" ({code})" if code else "")
    if status in _RETRIED or status >= 500 or code in _RETRIED_CODES:
        return Again(f"the server answered {said}")
    if code in _REGION_CODES:
        return RemoteError(f"{address}: {said}: {_REGION}")
    if status in (404, 410) or code in _MISSING_CODES:
        return MissingError(
            f"{address}: {said}: {_CODES.get(code, 'there is nothing')}; is the URL right, and the upload complete?"
        )
    if code == "AuthenticationFailed" and expired:
        return DeniedError(
            f"{address}: {said}: the shared access signature has run out: make another, and give it as AZURE_STORAGE_SAS_KEY"
        )
    if status in (401, 403) or code in _CODES:
        words = _CODES.get(code, "access is refused: are the credentials right, and allowed to read this?")
        return DeniedError(f"{address}: {said}: {words}")
    return RemoteError(f"{address}: {said}: the server doesn't serve such a request; is the URL right, and the endpoint?")


def _by_words(address: ObjectAddress, text: str, kind: str) -> Exception:
    if kind in ("InvalidPathError", "ValueError"):
        return RemoteError(
            f"{address}: a key there has an empty part, '.' or '..', which can't be asked for or listed; name the manifest, "
            "or rename that object"
        )
    if any(mark in text for mark in _UNTRUSTED):
        return RemoteError(
            f"{address}: the server's certificate isn't trusted; if a CA of your own signed it, name that one's PEM file by "
            "ObjectOptions(ca=)"
        )
    if any(mark in text for mark in _NO_TLS):
        return RemoteError(f"{address}: the endpoint doesn't speak TLS; is it http://, or another port?")
    words = next((words for mark, words in _WORDS if mark in text), f"it can't be read ({kind})")
    return Again(words, advice="is the endpoint right, the server up and its network well? Then run again")


def _code(text: str) -> str:
    match = _CODE.search(text)
    return match[1] if match else ""
