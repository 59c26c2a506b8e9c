"""How samples, members and shards are named, and how a name is shown that may be a signed URL.

A key is `[A-Za-z0-9-][A-Za-z0-9_-]*`, at most 90 characters: no dot (readers cut the key at the first one), no blank (DALI's
index is blank-separated), no path, and short enough for the 100-byte name field of a USTAR header with its extension.
"""

from __future__ import annotations

import hashlib
import re

KEY_LIMIT = 90
SLUG_LIMIT = 60
PARTIAL = ".partial"  # ends the name of a file that is still being written
# How tools end the names of what they compressed, whether or not it can be read here.
COMPRESSED = (".tgz", ".tbz2", ".txz", ".tzst", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
_KEY = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_-]*")
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>[0-9]{6,})\.tar")
_SPLIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# A user and password hold "@" and "/" at times; digits behind a host's colon are a port, and an "@" behind that is a path's.
_SECRET = re.compile(r"(?<=://)(?:[^/\s]*@|[^/:\s]*:(?![0-9]*/)[^\s?]*@)|\?\S*")
# train-000012.tar, train_12.tar, train-00012-of-00128.tar, train-0000-0127.tar; then train000.tar.
_SPLIT_NAMES = (re.compile(r"(.+?)(?:[-_.]+(?:of[-_.]+)?[0-9]+)+"), re.compile(r"(.*?)[0-9]+"))


def is_key(text: str) -> bool:
    """Tell whether `text` can be a sample's key as it stands."""
    return len(text) <= KEY_LIMIT and _KEY.fullmatch(text) is not None


def make_key(identifier: str) -> str:
    """Return `identifier` where it is a key already, else a slug of it, `-`, and 16 hex digits of blake2b-8 over its UTF-8.

    Each run of other characters becomes one `_`; the slug is cut at 60 characters. A slug may not start with `_` (readers
    skip such members), so a leading one is dropped. Lone surrogates (undecodable file names) are hashed as they are.
    """
    if is_key(identifier):
        return identifier
    slug = re.sub(r"[^A-Za-z0-9-]+", "_", identifier).lstrip("_")[:SLUG_LIMIT]
    digest = hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{slug}-{digest}" if slug else digest


def is_split(text: str) -> bool:
    """Tell whether `text` can name a split (it begins the names of the split's files)."""
    return len(text) <= 60 and _SPLIT.fullmatch(text) is not None


def split_of(stem: str) -> str:
    """Return the split that the name of another's tar begins with (`stem`: without .tar), "" where it says none."""
    return next((match[1] for shape in _SPLIT_NAMES if (match := shape.fullmatch(stem))), "")


def shard_name(split: str, number: int) -> str:
    """Return the file name of a split's shard, such as `train-000012.tar`."""
    return f"{split}-{number:06d}.tar"


def parse_shard_name(name: str) -> tuple[str, int] | None:
    """Return (split, number) of a shard's file name, or None where it is no such name."""
    match = _SHARD.fullmatch(name)
    return (match["split"], int(match["number"])) if match else None


def index_name(shard: str) -> str:
    """Return the name of the index beside a shard: `train-000000.idx` for `train-000000.tar`."""
    return shard.removesuffix(".tar") + ".idx"


def manifest_name(split: str) -> str:
    """Return the file name of a split's manifest."""
    return f"{split}-shardindex.json"


def split_field(member: str) -> tuple[str, str] | None:
    """Return (key, field) of a member's name by webdataset's rule, the first dot of the basename; None where it has no field."""
    folder, slash, base = member.rpartition("/")
    stem, dot, field = base.partition(".")
    return (folder + slash + stem, field) if dot and stem else None


def without_secrets(text: str) -> str:
    """Return a text without the user, the password and the query of the URLs in it."""
    return _SECRET.sub(lambda match: "?..." if match[0][0] == "?" else "...@", text) if "://" in text else text


def shown(url: str) -> str:
    """Return a shard's name, path or URL of a manifest as messages may have it: without user, password and query."""
    name, mark, query = url.partition("?")
    return without_secrets(f"{name}?..." if mark and "=" in query else url)
