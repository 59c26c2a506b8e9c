"""Finds the tars that the user names by URL, and says what belongs to each: its split, and its index's file name."""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import unquote

from pipeline.braces import expand
from pipeline.errors import OptionsError, PipelineError, SourceError
from pipeline.remotes import is_remote
from pipeline.stores.folders import some
from pipeline.stores.http import Address
from pipeline.stores.objects import ObjectAddress
from pipeline.stores.remote import addressing, kind_of
from pipeline.stores.unpacking import CANT_BE_READ, coding_of, plain_name
from shardify.format.names import COMPRESSED, index_name, is_split, split_of

_SHOWN = 5
_LIST_BYTES = 2**30
_NAME_BYTES = 200  # of an index's file name: file systems take 255


@dataclass(frozen=True, slots=True)
class RemoteTar:
    """One tar: where it lies, the URL less its secrets, which names it, and what its index is to be called."""

    address: Address | ObjectAddress
    name: str
    split: str
    index: str

    @property
    def coding(self) -> str:
        """How it is compressed, "" for a plain one."""
        return coding_of(self.address.path)

    @property
    def url(self) -> str:
        """What a manifest says: the URL as given, but without user and password."""
        if isinstance(self.address, ObjectAddress):
            return self.address.text
        return f"{self.address.scheme}://{self.address.authority}{self.address.target}"


def find(texts: Sequence[str], *, split: str | None) -> dict[str, list[RemoteTar]]:
    """Return the tars that `texts` name, by split: URLs, brace patterns of them, `@FILE` and `-` (stdin) with one a line.

    Raises OptionsError with everything that can't be used: what is no URL of a tar, or named twice, or tells no split; and
    for URLs of several kinds of stores.
    """
    found: list[Address | ObjectAddress] = []
    wrong: list[str] = []
    kind, take = "", taking("http")
    for text in _lines(texts):
        if not is_remote(text):
            secret = "@" in text or "?" in text
            wrong.append(
                f"{'a text (not shown, as it may hold a secret)' if secret else text}: not a URL of http://, https://, s3://, "
                "gs:// or az://; for tars on this machine there is `shardify index`"
            )
            continue
        if not kind:
            kind = kind_of(text)
            take = taking(kind)
        shown = str(take(text))
        if kind != kind_of(text):
            raise OptionsError(f"{shown}: is in another kind of store than {kind}:// before it; index one kind at a time")
        try:
            named = [take(url) for url in (expand(text, shown) if "{" in text else [text])]
        except SourceError as error:
            wrong.append(str(error))
            continue
        reasons = [(address, _reason(address)) for address in named]
        found += [address for address, reason in reasons if not reason]
        wrong += [reason for _, reason in reasons if reason]
    times = Counter(address.identity for address in found)
    wrong += [f"{_shown(found, name)}: named {count} times; name it once" for name, count in times.items() if count > 1]
    _refuse(wrong)
    if not found:
        raise OptionsError("no URL of a tar is named; give some, or @FILE with one a line")
    return _arrange(found, split)


def taking(kind: str) -> Callable[[str], Address | ObjectAddress]:
    """Return what takes URLs of a kind of store apart, as the environment says where that is; raises OptionsError."""
    return cast("Callable[[str], Address | ObjectAddress]", addressing(kind, None))


def _shown(found: Sequence[Address | ObjectAddress], identity: str) -> str:
    return next(str(address) for address in found if address.identity == identity)


def _file(address: Address | ObjectAddress) -> str:
    """Return the last part of an address, as a folder would list it."""
    name = address.path.rpartition("/")[2]
    return name if isinstance(address, ObjectAddress) else unquote(name)


def _arrange(found: Sequence[Address | ObjectAddress], split: str | None) -> dict[str, list[RemoteTar]]:
    names = [plain_name(_file(address)) for address in found]
    stems = [name[: -len(".tar")] for name in names]
    if split == "":
        raise OptionsError("--split is empty: name the split, or leave it out where the tars' names say it")
    splits = [split_of(stem) if split is None else split for stem in stems]
    if split is None and len(found) == 1 and not splits[0]:
        splits = stems
    if nameless := [name for name, of in zip(names, splits, strict=True) if not of]:
        raise OptionsError(f"{some(nameless)}: the names don't say which split this is; name it, such as --split train")
    if odd := sorted({name for name in splits if not is_split(name)}):
        raise OptionsError(f"{odd[0]!r} can't name a split: letters, digits, - and _, at most 60; name it by --split")
    files = [_file_name(name) for name in names]
    times = Counter(file.lower() for file in files)
    made: dict[str, list[RemoteTar]] = {}
    for address, plain, of in zip(found, files, splits, strict=True):
        identity, file = address.identity, plain
        if times[file.lower()] > 1:  # of several folders or servers
            hashed = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
            file = file[: -len(".tar")] + f"-{hashed}.tar"
        made.setdefault(of, []).append(RemoteTar(address, identity, of, index_name(file)))
    return made


def _file_name(name: str) -> str:
    """Return a tar's name as a file can have it: a URL may hold slashes that are quoted, and what no file's name holds."""
    plain = re.sub(r"[/\\\x00-\x1f\x7f]", "_", name[: -len(".tar")]).lstrip(".")
    if plain != name[: -len(".tar")] or len(plain.encode()) > _NAME_BYTES:
        hashed = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        plain = plain.encode()[:_NAME_BYTES].decode(errors="ignore") + f"-{hashed}"
    return plain + ".tar"


def _lines(texts: Sequence[str]) -> Iterator[str]:
    """Yield the user's texts, and those of the lists that they name."""
    for text in texts:
        if text == "-":
            yield from _parts(sys.stdin.read(_LIST_BYTES))
        elif text.startswith("@"):
            path = Path(text[1:])
            try:
                path = path.expanduser()
                yield from _parts(path.read_text(encoding="utf-8"))
            except OSError as error:
                raise OptionsError(f"{path}: can't be read ({error.strerror}); name a file of URLs, one a line") from error
            except RuntimeError as error:
                raise OptionsError(f"{path}: there is no such user's home ({error}); name the file by its path") from error
            except UnicodeDecodeError as error:
                raise OptionsError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
        else:
            yield text.strip()


def _parts(text: str) -> Iterator[str]:
    lines = (line.strip() for line in text.splitlines())
    return (line for line in lines if line and not line.startswith("#"))


def _reason(address: Address | ObjectAddress) -> str:
    """Say why an address is no tar to index, "" where it is one."""
    try:
        address.check()
    except PipelineError as error:
        return str(error)
    name = _file(address).lower()
    if plain_name(name) != ".tar" and (name.endswith(".tar") or coding_of(address.path)):
        return ""
    if name.endswith(COMPRESSED):
        return f"{address}: {CANT_BE_READ}"
    if name.endswith(".json"):
        return f"{address}: is a manifest; point make_loader at it, or name the tars themselves"
    return f"{address}: not called .tar, and readers go by that; name the tars themselves, such as .../train-{{000..127}}.tar"


def _refuse(wrong: Sequence[str]) -> None:
    more = len(wrong) - _SHOWN
    if wrong:
        raise OptionsError("; ".join(wrong[:_SHOWN]) + (f"; and {more:,} more like these" if more > 0 else ""))
