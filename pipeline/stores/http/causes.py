"""Says why a connection failed, and whether another try can help; never by the error's own text, which may hold what was sent."""

from __future__ import annotations

import http.client
import re
import ssl

from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationParseError,
    NameResolutionError,
    NewConnectionError,
    ReadTimeoutError,
)

CAN_FAIL = (OSError, HTTPError, http.client.HTTPException, ValueError)  # ValueError: what http.client couldn't parse

_TUNNEL = re.compile(r"Tunnel connection failed: ([0-9]+)")
_TUNNEL_REFUSED = ("401", "403", "404", "405", "407")
_WORDS: tuple[
    tuple[type[Exception], type[Exception] | None, str], ...
] = (  # (its type, its cause's type, the words), the first that fits
    (NameResolutionError, None, "its host name can't be resolved"),
    (ConnectTimeoutError, None, "no connection came about"),
    (NewConnectionError, None, "it can't be connected to"),
    (ReadTimeoutError, None, "no byte came in time"),
    (TimeoutError, None, "no byte came in time"),
    (http.client.RemoteDisconnected, None, "the server closed the connection without a reply"),
    (ConnectionResetError, None, "the connection was reset"),
    (BrokenPipeError, None, "the connection was reset"),
    (HTTPError, ConnectionError, "the connection was reset while the body came"),
    (HTTPError, http.client.IncompleteRead, "the body ended early"),
    (ssl.SSLError, None, "TLS failed"),
    (http.client.HTTPException, None, "what came isn't a reply of HTTP"),
    (ValueError, None, "what came isn't a reply of HTTP"),
)


def words(error: Exception) -> str:
    """Say what failed."""
    fits = (
        text for kind, inner, text in _WORDS if isinstance(error, kind) and (inner is None or isinstance(error.__cause__, inner))
    )
    text = next(fits, "the connection failed")
    if tunnel := _tunnel(error):
        return f"the proxy can't reach it ({tunnel})"
    if isinstance(error, ssl.SSLError):
        detail = (error.reason or "").replace("_", " ").lower()
    else:
        cause = error if isinstance(error, OSError) else error.__cause__ if isinstance(error, NewConnectionError) else None
        detail = getattr(cause, "strerror", None) or ""
    return text + (f" ({detail})" if detail else "")


def hopeless(error: Exception) -> str:
    """Say why another try would fail alike, "" where it may not."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate isn't trusted ({error.verify_message or 'verification failed'}); if a CA of your own signed it, "
            "name that one's PEM file by ca= or REQUESTS_CA_BUNDLE"
        )
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "the server doesn't speak TLS on this port; is it http://, or another port?"
    if isinstance(error, LocationParseError):
        return "its host isn't a name that DNS can know; is the URL right?"
    tunnel = _tunnel(error)
    if tunnel in _TUNNEL_REFUSED:
        return f"the proxy refuses ({tunnel}); give its user and password in HTTPS_PROXY, or list the server in NO_PROXY"
    return ""


def _tunnel(error: Exception) -> str:
    """Return the status with which a proxy refused to connect, "" for another error."""
    match = _TUNNEL.match(str(error)) if isinstance(error, OSError) else None
    return match[1] if match else ""
