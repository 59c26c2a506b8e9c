"""Takes an object's URL apart: store, bucket and key, each as it is written, since keys aren't quoted in such URLs."""

from __future__ import annotations

import re
from typing import Final

from pipeline.errors import RemoteError

KINDS: Final = {"s3": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}

_URL = re.compile(r"(s3|gs|az|abfss?)://?([^/]*)(?:/(.*))?", re.IGNORECASE | re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{1,221}")
_ACCOUNT = re.compile(r"([A-Za-z0-9$][A-Za-z0-9-]{1,62})@([a-z0-9]{3,24})\.(?:dfs|blob)\.core\.windows\.net", re.IGNORECASE)
_SIGNED = re.compile(r"[?&](x-amz-|x-goog-|sig=|signature=|awsaccesskeyid=|googleaccessid=)", re.IGNORECASE)
_LONGEST = 200  # of a URL in a message


class ObjectAddress:
    """An object, or a folder of them: its key ends with a slash, or is empty.

    `place`: the endpoint, or the account's, as the options and the environment say ("": the store's own).
    """

    __slots__ = ("_place", "_problem", "account", "bucket", "key", "kind", "scheme", "text")

    def __init__(self, text: str, place: str = "") -> None:
        """Take a URL apart; never raises (`check` does)."""
        self.text = text.strip()
        match = _URL.fullmatch(self.text)
        scheme, bucket, key = ((part or "") for part in match.groups()) if match else ("", "", "")
        self.scheme, self.kind, self.key, self.account = scheme.lower(), KINDS.get(scheme.lower(), ""), key, ""
        if self.kind == "az" and (named := _ACCOUNT.fullmatch(bucket)):
            bucket, self.account = named[1], named[2].lower()
        self.bucket = bucket
        self._place = f"https://{self.account}.blob.core.windows.net" if self.account else place
        self._problem = self._wrong(match is not None)

    def __str__(self) -> str:
        """Return the URL without what follows a question mark; of one that is malformed only the scheme."""
        if not _BUCKET.fullmatch(self.bucket):
            return f"{self.scheme or 'URL'}://..."
        key, query, _ = self.key.partition("?")
        where = f"{self.bucket}@{self.account}.dfs.core.windows.net" if self.account else self.bucket
        shown = f"{self.scheme}://{where}/{key}" + ("?..." if query else "")
        shown = "".join(sign if sign.isprintable() else "?" for sign in shown)
        return shown if len(shown) <= _LONGEST else shown[: _LONGEST // 2] + "..." + shown[-_LONGEST // 2 :]

    def __repr__(self) -> str:
        return f"<ObjectAddress {self}>"

    def check(self) -> None:
        """Raise RemoteError if this can't be asked for."""
        if self._problem:
            raise RemoteError(f"{self}: {self._problem}")

    def _wrong(self, is_url: bool) -> str:
        if not is_url:
            return "isn't a URL of an object; write s3://bucket/folder/name.tar, gs:// or az:// (container in place of bucket)"
        if not _BUCKET.fullmatch(self.bucket):
            return (
                "names no bucket, or one with signs that a bucket can't have; write "
                f"{self.scheme}://bucket/folder/name.tar, and give credentials by ObjectOptions or the environment"
            )
        if _SIGNED.search(self.key):
            return "is signed, which URLs of this kind can't be; give the signed URL as https://"
        if any(not sign.isprintable() for sign in self.key):
            return "its key holds line ends or signs that can't be printed; give it another name"
        if any(part in ("", ".", "..") for part in self.key.removesuffix("/").split("/")) and self.key:
            return "a part of its key is empty, '.' or '..', which can't be asked for; give it another name"
        return ""

    @property
    def path(self) -> str:
        """The key as a path."""
        return "/" + self.key

    @property
    def host(self) -> str:
        """Whom credentials are for, as far as URLs differ in it: an account of Azure, "" where the options alone say."""
        return self.account

    @property
    def identity(self) -> str:
        """The name of what this leads to, in a message and in the cache folder: with the endpoint, where one is given."""
        if self._place:
            return f"{self.kind}+{self._place}/{self.bucket}/{self.key}"
        return f"{self.kind}://{self.bucket}/{self.key}"
