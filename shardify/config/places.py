"""Where a set goes: a folder, or a place in an object store; nothing secret of it in a message."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shardify.errors import SettingsError
from shardify.format.names import without_secrets

SCHEMES = {"s3": "bucket", "gs": "bucket", "az": "container"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_EXAMPLE = "write for example s3://bucket/sets/train (or gs://, az://)"


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """A bucket (of Azure: a container) and the prefix of a set's objects in it, "" for the bucket's root."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    @classmethod
    def parse(cls, text: str) -> ObjectUrl:
        """Return the place that a URL names, its path taken as it stands; raises ValueError, which repeats no secret of it."""
        scheme, _, rest = text.partition("://")
        if scheme.lower() not in SCHEMES:
            raise ValueError(f"can't be written to by {scheme}://; {_EXAMPLE}, or a folder")
        bucket, _, prefix = rest.partition("/")
        if "@" in bucket:
            raise ValueError("credentials don't belong in a URL; leave them to the environment (AWS_..., GOOGLE_..., AZURE_...)")
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(f"names no {SCHEMES[scheme.lower()]}; {_EXAMPLE}")
        if "?" in prefix or "#" in prefix:
            raise ValueError("has a query; name the bucket and the prefix alone, and leave credentials to the environment")
        prefix = prefix.rstrip("/")
        parts = prefix.split("/") if prefix else []
        if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
            raise ValueError("has a part that is empty, '.', '..' or unprintable, which no object can be found by; leave that out")
        if len(prefix.encode(errors="replace")) > 900:
            raise ValueError("is longer than the names of objects may be; choose a shorter one")
        return cls(scheme.lower(), bucket, prefix)


def is_url(text: object) -> bool:
    """Tell whether a text names a place by a URL, and no file."""
    return isinstance(text, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def refuse_url(text: str) -> None:
    """Raise SettingsError for a URL (also one that has been taken for a path, s3:/b/x) where only a local path will do."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", text)
    if match and not os.path.lexists(text):
        url = without_secrets(f"{match[1]}://{text[match.end() :]}")
        raise SettingsError(
            f"{url}: this command reads what lies on this machine; copy the set to a folder first (aws s3 sync, gcloud storage "
            "rsync, azcopy sync), or read it where it is, with `pipeline`"
        )


def work_folder(url: ObjectUrl, work: Path | None) -> Path:
    """Return the folder in which a set for `url` is made: below `work`, else in the user's cache; the same one for each build."""
    name = re.sub(r"[^A-Za-z0-9-]+", "_", f"{url.bucket}-{url.prefix}")[:60].strip("_-")
    return (work or _cache()) / f"{name}-{hashlib.blake2b(str(url).encode(errors='replace'), digest_size=8).hexdigest()}"


def _cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "shardify" / "builds"
    except RuntimeError:
        raise SettingsError("there is no home folder for what is built for an object store; name a folder with --work") from None
