"""Unpacks a compressed tar while its bytes come: pieces of bounded size, or an error that says what is wrong with it.

gzip, bzip2 and xz are the standard library's, and so is zstd from Python 3.14 on; before that its backport has the same shape.
All four give what comes of a few bytes piece by piece, so that no bomb takes more memory than a piece. Here is the door to the
backport.
"""

from __future__ import annotations

import bz2
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from pipeline.errors import OptionsError, ShardError

_ENDINGS: Final = {
    ".tar.gz": "gzip",
    ".tgz": "gzip",
    ".tar.bz2": "bzip2",
    ".tbz2": "bzip2",
    ".tar.xz": "xz",
    ".txz": "xz",
    ".tar.zst": "zstd",
    ".tzst": "zstd",
}
CANT_BE_READ: Final = (
    "compressed in a way, or called in one, that can't be read; upload plain tars, or .tar.gz, .tar.zst, .tar.bz2 or .tar.xz"
)
_PACKED: Final = re.compile(r"(?:\.tar\.(?:gz|bz2|xz|zst)|\.(?:tgz|tbz2|txz|tzst))(?:\?|$)", re.IGNORECASE)
_MAGICS: Final = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0", "zstd": b"\x28\xb5\x2f\xfd"}
_SKIPPED: Final = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame of zstd that holds nothing of the content
_PIECE_BYTES: Final = 2**20
_STEP_BYTES: Final = 64 * 1024  # that go in at once: what is left of them behind a member's end is copied
_XZ_BYTES: Final = 256 * 2**20  # of memory: xz -9 asks for 65 MiB


def coding_of(path: str) -> str:
    """Return how a tar is compressed, by its name: gzip, bzip2, xz or zstd; "" where it isn't, or can't be read."""
    name = path.rpartition("/")[2].lower()
    return next((coding for ending, coding in _ENDINGS.items() if name.endswith(ending)), "")


def plain_name(name: str) -> str:
    """Return what a compressed tar would be called as a plain one; any other name as it is."""
    ending = next((ending for ending in _ENDINGS if name.lower().endswith(ending)), "")
    return f"{name[: -len(ending)]}.tar" if ending else name


def is_packed(url: str) -> bool:
    """Tell whether a URL is that of a compressed tar, without taking it apart: a set may have a million."""
    return _PACKED.search(url) is not None


def kept_as(identity: str) -> str:
    """Return under which name the cache keeps what is read of an object: of a compressed tar, what it unpacks to."""
    return f"{identity}#tar" if is_packed(identity) else identity


class _Member(Protocol):
    """What unpacks one member (frame, stream): all that comes of what it was given is asked for before it is given more."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """A member of gzip; zlib's own object keeps to itself less of what it was given."""

    def __init__(self) -> None:
        self._member, self._left, self.needs_input = zlib.decompressobj(wbits=31), b"", True

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return at most so many bytes."""
        found = self._member.decompress(self._left + data if self._left else data, max_length)
        self._left = self._member.unconsumed_tail
        self.needs_input = not self._left and len(found) < max_length
        return found


class Unpacking:
    """One compressed tar on its way: members that follow each other are one content, as their tools read them."""

    def __init__(self, coding: str, shown: str) -> None:
        """Begin; `shown` names the object in messages. Raises OptionsError where zstd's library isn't installed."""
        self._coding, self._shown = coding, shown
        self._make, self._errors = _codec(coding, shown)
        self._member: _Member | None = None
        self._members = self._taken = self._given = 0
        self._head, self._fresh = b"", True

    def feed(self, data: memoryview | bytes) -> Iterator[bytes]:
        """Yield what comes of the next bytes, at most 1 MiB at once; all of it is to be taken before more are fed.

        Raises ShardError for what isn't compressed so, or is damaged; nothing more may be fed then.
        """
        view = memoryview(data)
        self._head += bytes(view[: 8 - len(self._head)])
        for at in range(0, len(view), _STEP_BYTES):
            step = bytes(view[at : at + _STEP_BYTES])
            self._taken += len(step)
            yield from self._step(step)

    def _step(self, data: bytes) -> Iterator[bytes]:
        while True:
            if self._member is None:
                data = data.lstrip(b"\0") if self._members else data  # zeros may fill a last block
                if not data:
                    return
                self._member, self._fresh = self._make(), True
                self._members += 1
            try:
                piece = self._member.decompress(data, _PIECE_BYTES)
            except self._errors as error:
                raise self._wrong(str(error)) from error
            if piece:
                self._fresh = False
                self._given += len(piece)
                yield piece
            if self._member.eof:
                data, self._member = self._member.unused_data, None
            elif self._member.needs_input:
                return
            else:
                data = b""

    def end(self) -> None:
        """Say that these were all bytes; raises ShardError where the last member isn't whole."""
        if not self._members:
            raise ShardError(f"{self._shown}: is empty ({self._taken} bytes); upload it again")
        if self._member is not None:
            raise self._wrong("")

    def _wrong(self, why: str) -> ShardError:
        """Return the error for what can't be unpacked; `why` "": it ended."""
        coding, said = self._coding, f" ({why})" if why else ""
        if self._members > 1 and self._fresh:
            return ShardError(
                f"{self._shown}: behind the end of what is compressed, before byte {self._taken}, something follows that is no "
                f"{coding}{said}; upload it again, whole and alone"
            )
        if not self._head.startswith(_MAGICS[coding]) and not (coding == "zstd" and _SKIPPED.match(self._head)):
            return ShardError(f"{self._shown}: isn't compressed by {coding}{said}, as its name says; call a plain tar .tar")
        if not why:
            return ShardError(
                f"{self._shown}: ends in the middle of what is compressed by {coding} (after {self._taken} bytes, unpacked "
                f"{self._given}); it was cut: upload it again"
            )
        return ShardError(f"{self._shown}: damaged before byte {self._taken}{said}, as {coding} sees; upload it again")


def _codec(coding: str, shown: str) -> tuple[Callable[[], _Member], tuple[type[Exception], ...]]:
    """Return what makes a member's unpacker, and what that raises."""
    if coding == "gzip":
        return _Gzip, (zlib.error,)
    if coding == "bzip2":
        return bz2.BZ2Decompressor, (OSError, ValueError)
    if coding == "xz":
        return (lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_BYTES)), (lzma.LZMAError,)
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd  # noqa: PLC0415
        else:
            from backports import zstd  # noqa: PLC0415  (few need it)
    except ModuleNotFoundError as error:
        raise OptionsError(f"{shown}: needs backports.zstd, which isn't installed: pip install 'shardify[train]'") from error
    return zstd.ZstdDecompressor, (zstd.ZstdError,)  # which takes at most 128 MiB of memory, unless told otherwise
