"""Tells local paths from URLs and commands in what the user, or a manifest, points at; prints no secret of either."""

from __future__ import annotations

import re
from urllib.parse import unquote

from pipeline.errors import SourceError

ACCEPTED = (
    "a manifest (train-shardindex.json), a folder, a tar, a pattern such as train-{000000..000009}.tar, a URL of such "
    "(http, https, s3, gs, az), or a list of those"
)

# One slash too: that is what Path makes of s3://bucket.
_URL = re.compile(r"\s*(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)


def local(text: str, place: str = "") -> str:
    """Return the local path that a text names; refuses commands and remote URLs, without printing what may be secret."""
    if not text.strip():
        raise SourceError(f"{place}an empty path: give {ACCEPTED}")
    if text.lstrip().lower().startswith(("pipe:", "|")) or text.rstrip().endswith("|"):
        raise SourceError(f"{place}'pipe:' and other commands are never run: name the shards' files")
    match = _URL.fullmatch(text)
    if match is None and "://" not in text:
        return text
    if match is None or match["scheme"].lower() != "file":
        raise SourceError(
            f"{place}{_redacted(match) if match else 'a text with URLs in it'}: only local shards and URLs of http, https, s3, "
            "gs, az and abfs are read; copy them into a folder and name that"
        )
    host, _, path = match["rest"].partition("/") if len(match["slashes"]) == 2 else ("", "", match["rest"])
    if host not in ("", "localhost"):
        raise SourceError(f"{place}a file:// URL of another host: write file:///folder/shard.tar, or the plain path")
    return "/" + unquote(path)


def _redacted(match: re.Match[str]) -> str:
    """Return a URL without user, password, query and fragment; of one that is malformed only the scheme."""
    authority, slash, path = match["rest"].partition("/")
    host, path = authority.rpartition("@")[2], re.split("[?#]", path)[0]
    odd = re.search("[?#]", authority) or not re.fullmatch(r"[A-Za-z0-9._-]*(:[0-9]*)?", host) or "@" in path
    return f"{match['scheme']}://" + ("..." if odd else host + slash + path)
