"""Tar bytes: writes the one plain USTAR header that shards use, reads those of others, and finds every sample of a tar.

    header (512) | data, padded to 512 | header | data | ... | two zero blocks

Writing is deterministic: mode 0644, uid, gid and mtime 0, no names of owners. Reading accepts ustar, GNU (long names) and PAX
(path, size), skips what isn't a regular file, and refuses what would lose samples in silence: a damaged header, a cut end,
links, members of a sample that don't stand together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardify.errors import FormatError
from shardify.format.names import split_field

BLOCK = 512
END = bytes(2 * BLOCK)
_ZEROS = bytes(BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_LINKS = (b"1", b"2")
_DATALESS = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, FIFOs: a size there counts no data
_EXTENSIONS = (b"L", b"K", b"x", b"X", b"g")  # X: Solaris' x
_NAME_LIMIT = 100
_ANY_SIZE = 2**62
_SIZE_LIMIT = 8 * 2**30 - 1
_EXTENSION_LIMIT = 1 << 20  # a long name or a PAX header above this is an attack or damage, not a name
_PIECE = 1 << 20  # bytes at a time of what stands behind a tar's end
_PADDING = 1 << 26  # bytes there at most: a tape's block is filled up with zeros, 10 KiB as a rule; a hole may be 1 TB
_ESCAPE = re.compile(rb"\\(?:([0-3][0-7]{2})|\\)")
_FAULTS = 5  # lines about one tar: the rest is a number
_JUNK = ("__MACOSX", ".DS_Store")
_UNPACK = "and samples can't be read from that by offset; unpack it to a plain tar"
_OTHERS = {  # how files begin that are called .tar and aren't
    b"\x1f\x8b": f"compressed by gzip, {_UNPACK}",
    b"BZh": f"compressed by bzip2, {_UNPACK}",
    b"\xfd7zXZ": f"compressed by xz, {_UNPACK}",
    b"\x28\xb5\x2f\xfd": f"compressed by zstd, {_UNPACK}",
    b"\x04\x22\x4d\x18": f"compressed by lz4, {_UNPACK}",
    b"PK\x03\x04": f"a zip archive, {_UNPACK}",
    b"version https://git-lfs": "a Git LFS pointer, not the file that it stands for; fetch that (git lfs pull)",
}

Fault: TypeAlias = Callable[[str], None]
"""Is told what is wrong with a member where reading can go on; raises, or returns to have it left out."""


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file of a tar: where its data lies, in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """The members that share a key, in the order of the tar; `fields` are what follows the key's dot."""

    key: str
    fields: tuple[str, ...]
    members: tuple[Member, ...]


class Walked(Protocol):
    """What is walked: a binary file, as far as that takes."""

    def read(self, size: int, /) -> bytes:
        """Return up to so many bytes from where it stands; fewer only at the end."""
        ...

    def seek(self, at: int, /) -> int:
        """Stand at a byte."""
        ...


def padded(size: int) -> int:
    """Return `size` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def member_bytes(size: int) -> int:
    """Return what a member of `size` data bytes takes in a tar: header, data and padding."""
    return BLOCK + padded(size)


def header(name: str, size: int) -> bytes:
    """Return the 512-byte USTAR header of a regular file.

    Raises FormatError for a name above 100 ASCII bytes or a size of 8 GiB and more (POSIX.1-1988 fields).
    """
    if not name.isascii() or not 0 < len(name) <= _NAME_LIMIT:
        raise FormatError(f"member name {name!r}: a USTAR name is 1 to {_NAME_LIMIT} ASCII bytes")
    if size > _SIZE_LIMIT:
        raise FormatError(f"member {name!r} has {size} bytes: a USTAR member holds at most {_SIZE_LIMIT}")
    start = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"%011o\0" % size + b"00000000000\0"
    rest = b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
    checksum = sum(start) + sum(rest) + 8 * ord(" ")
    return start + b"%06o\0 " % checksum + rest


def _number(field: bytes) -> int:
    """Read a numeric header field: octal text, or base 256 where the first bit is set (GNU)."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
        return value if field[0] == 0x80 else -1
    text = field.split(b"\0", 1)[0].strip()
    if not text:
        return 0
    if any(c not in b"01234567" for c in text):
        return -1
    return int(text, 8)


def _checksum_fits(block: bytes) -> bool:
    """Compare a header's checksum with its bytes, as an unsigned and as a (very old) signed sum."""
    stored = _number(block[148:156])
    rest = block[:148] + b" " * 8 + block[156:]
    return stored == sum(rest) or stored == sum(b - 256 if b > 127 else b for b in rest)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(body: bytes, where: str) -> dict[str, str]:
    """Parse PAX records: `<length> <key>=<value>` and a line feed."""
    records: dict[str, str] = {}
    at = 0
    while at < len(body) and body[at] != 0:
        digits, blank, _ = body[at : at + 20].partition(b" ")
        length = int(digits) if blank and digits.isdigit() else 0
        record = body[at + len(digits) + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if length <= len(digits) + 1 or at + length > len(body) or not equals or not value.endswith(b"\n"):
            raise FormatError(f"{where}: a damaged PAX header; write the tar again")
        records[key.decode("utf-8", "surrogateescape")] = value[:-1].decode("utf-8", "surrogateescape")
        at += length
    return records


def _read(file: Walked, size: int, where: str) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise FormatError(f"{where}: the tar ends inside a header; copy or write it again")
    return data


class _Settings:
    """What GNU and PAX extension headers say about the members behind them: the next one, or (`g`) all."""

    def __init__(self) -> None:
        self._next: dict[str, str] = {}
        self._all: dict[str, str] = {}

    def learn(self, kind: bytes, body: bytes, where: str) -> None:
        """Take in an extension header."""
        if kind == b"L":
            self._next["path"] = _text(body)
        elif kind in (b"x", b"X"):
            self._next |= _pax(body, where)
        elif kind == b"g":
            self._all |= _pax(body, where)

    def size(self, stated: int) -> int:
        """Return the next member's size, -1 for what is no number."""
        size = self._next.get("size") or self._all.get("size")
        if size is None:
            return stated
        return int(size) if size.isdecimal() and len(size) < 20 else -1

    @property
    def pending(self) -> bool:
        """Whether something was said about a member that didn't come."""
        return bool(self._next)

    def settle(self, stated: str) -> tuple[str, bool]:
        """Return the next member's path and whether it is a sparse file; what was said about it alone is spent."""
        said, self._next = self._all | self._next, {}
        return said.get("GNU.sparse.name") or said.get("path") or stated, any(key.startswith("GNU.sparse.") for key in said)


def refuse(problem: str) -> None:
    """Raise FormatError: the `Fault` of those who don't go on."""
    raise FormatError(problem)


def members(file: Walked, size: int, name: str = "tar", *, fault: Fault = refuse) -> Iterator[Member]:
    """Yield the regular files of a tar of `size` bytes, reading headers only, from its start to its end.

    `file` must be seekable; `name` stands in messages. Raises FormatError for a damaged header, a member beyond the end, a
    missing end (two zero blocks) and sparse files; `fault` is told of links, which a reader would drop in silence.
    """
    at, settings = 0, _Settings()
    while (block := _header_at(file, at, size, name)) is not None:
        where, kind = f"{name} at byte {at}", block[156:157]
        length = _number(block[124:136])
        if kind not in _DATALESS and kind not in _EXTENSIONS:
            length = settings.size(length)
        data, at = at + BLOCK, at + BLOCK + (0 if kind in _DATALESS else padded(length))
        if length < 0 or (kind not in _DATALESS and data + length > size):
            raise FormatError(
                f"{where}: a member of {length} bytes in a tar of {size}; it was cut or damaged: copy or write it again"
            )
        if kind in _EXTENSIONS:
            if length > _EXTENSION_LIMIT:
                raise FormatError(f"{where}: an extension header of {length} bytes; write the tar again")
            settings.learn(kind, _read(file, length, where), where)
            continue
        path, sparse = settings.settle(_path(block))
        if sparse or kind == b"S":
            raise FormatError(f"{where}: {path!r} is a sparse file; write the tar again without --sparse")
        if kind in _LINKS:
            fault(f"{where}: {path!r} is a link; write the tar again with --dereference --hard-dereference")
        if kind in _REGULAR and not (path.endswith("/") and kind == b"\0"):  # a folder, as the oldest tars write it
            yield Member(path.rstrip("/"), data, length)
    if settings.pending:
        raise FormatError(f"{name} at byte {at}: the tar ends behind the header of a long name; it was cut: copy or write it again")


def _header_at(file: Walked, at: int, size: int, name: str) -> bytes | None:
    """Read the header at a position, None at the two zero blocks that end a tar."""
    where = f"{name} at byte {at}"
    if at + 2 * BLOCK > size:
        _refuse_others(file, at, name)
        raise FormatError(
            f"{where}: the tar ends without its two zero blocks (it has {size} bytes); it was cut: copy or write it again"
        )
    file.seek(at)
    block = _read(file, BLOCK, where)
    if block == _ZEROS:
        if _read(file, BLOCK, where) != _ZEROS:
            raise FormatError(f"{where}: one zero block and more data behind it; write the tar again")
        _refuse_more(file, at + 2 * BLOCK, size, name)
        return None
    if not _checksum_fits(block):
        _refuse_others(file, at, name)
        raise FormatError(
            f"{where}: a damaged header (its checksum doesn't fit); all samples from here on are lost: copy or write it again"
        )
    return block


def _refuse_more(file: Walked, at: int, size: int, name: str) -> None:
    """Raise FormatError where more than a block's padding stands behind a tar's end: no reader would ever see it."""
    end = at
    while at < size and (piece := file.read(min(size - at, _PIECE))):
        if piece.strip(b"\0"):
            raise FormatError(
                f"{name} at byte {end}: the tar ends here, and more data stands behind its end; were tars put one behind the "
                "other? Unpack them and write one tar"
            )
        at += len(piece)
        if at - end > _PADDING:
            raise FormatError(
                f"{name} at byte {end}: the tar ends here, and more than {_PADDING >> 20} MiB of zeros stand behind its end; "
                "write the tar again"
            )


def _refuse_others(file: Walked, at: int, name: str) -> None:
    """Raise FormatError where the first header can't be read because the file is something else, and say what."""
    if at:
        return
    file.seek(0)
    head = file.read(BLOCK)
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise FormatError(f"{name}: {what}")


def _path(block: bytes) -> str:
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return (f"{prefix}/" if prefix else "") + _text(block[:100])


def is_header(block: bytes, path: str, size: int) -> bool:
    """Tell whether a block is the header of a member of this path and size.

    What a block can't hold stands in blocks before it, which aren't looked at: a long path, one that isn't ASCII, a size of 8 GiB.
    Upper and lower case are the same here, and so is a path as the listings of tar have it, of which others make indexes.
    """
    name = path.encode("utf-8", "surrogateescape")
    if block.startswith(name + b"\0") and block[124:135] == b"%011o" % size:  # as nearly all tars have it
        return True
    stated = _number(block[124:136]) if len(block) == BLOCK and _checksum_fits(block) else -1
    if stated < 0 or (stated != size and size <= _SIZE_LIMIT):
        return False
    listed = _unescaped(path)
    if len(name) >= _NAME_LIMIT or not listed.isascii():
        return True
    return _path(block).removeprefix("./").lower() in (path.removeprefix("./").lower(), listed.removeprefix("./").lower())


def _unescaped(path: str) -> str:
    """Return a path that GNU tar has listed: what isn't ASCII as bytes in octal, a backslash as two."""
    if "\\" not in path:
        return path
    raw = _ESCAPE.sub(lambda found: bytes([int(found[1], 8)]) if found[1] else b"\\", path.encode("ascii", "replace"))
    return raw.decode("utf-8", "surrogateescape")


def is_sample_member(path: str) -> bool:
    """Tell whether a member can belong to a sample: no macOS companion, no `__name__` at the root, and an extension."""
    folders, _, base = path.rpartition("/")
    if base.startswith("._") or any(part in _JUNK for part in path.split("/")):
        return False
    return split_field(path) is not None and not (not folders and base.startswith("__") and base.endswith("__"))


def samples(file: Walked, size: int, name: str = "tar", *, fault: Fault = refuse) -> Iterator[SampleRecord]:
    """Yield the samples of a tar: adjacent members that share a key.

    Raises FormatError as `members` does; `fault` is told also of a key that comes back after another one, and of a field that
    comes twice in a sample. If it returns, the former begins a sample anew, and of the latter the first is kept.
    """
    closed: set[str] = set()
    key, parts = "", dict[str, Member]()
    for member in members(file, size, name, fault=fault):
        named = split_field(member.name) if is_sample_member(member.name) else None
        if named is None:
            continue
        where = f"{name} at byte {member.offset - BLOCK}: {member.name!r}"
        if named[0] != key:
            if parts:
                yield SampleRecord(key, tuple(parts), tuple(parts.values()))
                closed.add(key)
            key, parts = named[0], {}
            if key in closed:
                fault(
                    f"{where} comes after its sample was closed; the members of a sample must stand together, each key once: "
                    "write the tar again"
                )
        if named[1] in parts:
            fault(f"{where} comes twice; each key must be unique: write the tar again")
        parts.setdefault(named[1], member)
    if parts:
        yield SampleRecord(key, tuple(parts), tuple(parts.values()))


def all_samples(file: Walked, size: int | None, name: str = "tar") -> list[SampleRecord]:
    """Return the samples of a tar of `size` bytes; None where that isn't known, and its end is seen by what can't be read.

    Raises FormatError, with its problems, where a reader would miss samples or mix them up, and where there are none.
    """
    faults = _Faults()
    try:
        records = list(samples(file, _ANY_SIZE if size is None else size, name, fault=faults))
    except FormatError as error:
        raise FormatError(str(error), [*faults.lines(name), str(error)]) from error
    if faults.count:
        raise FormatError(f"{name}: {faults.count:,} members can't be read", faults.lines(name))
    if not records:
        counted = "" if size is None else f" ({size} bytes)"
        raise FormatError(f"{name}: holds no sample{counted}; copy or write it again, or leave it out")
    return records


class _Faults:
    """Takes in what is wrong with single members of a tar: the first lines and a count."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self.count = 0

    def __call__(self, problem: str) -> None:
        self.count += 1
        if len(self._lines) < _FAULTS:
            self._lines.append(problem)

    def lines(self, name: str) -> list[str]:
        """Return what to say of the tar."""
        more = self.count - len(self._lines)
        return [*self._lines, *([f"{name}: and {more:,} more members like these"] if more else [])]
