"""A shard's index in DALI's text layout: one line a sample, `<ext> <offset> <size> <member name>` for each of its members.

    v1.2 2
    jpg 512 48213 a1.jpg cls 49664 1 a1.cls
    jpg 51200 50011 b7.jpg cls 102400 2 b7.cls

Offsets are of the data, in bytes from the start of the tar.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardify.errors import FormatError
from shardify.format.names import split_field
from shardify.format.tar import Member, SampleRecord

_VERSION = "v1.2"


def dump(samples: Iterable[SampleRecord]) -> bytes:
    """Return the index of `samples`; raises FormatError for a name with a blank, which the layout can't hold."""
    lines = [" ".join(_words(sample)) for sample in samples]
    return "".join(f"{line}\n" for line in (f"{_VERSION} {len(lines)}", *lines)).encode("utf-8", "surrogateescape")


def count(first_line: str, name: str = "index") -> int:
    """Return the number of samples that an index's first line states."""
    words = first_line.split()
    if len(words) != 2 or words[0] != _VERSION or not _is_number(words[1]):
        begin = f"{first_line[:60]!r} is not the first line of an index, '{_VERSION} <samples>'"
        raise FormatError(f"{name}: {begin}; delete the file or write it again")
    return int(words[1])


def load(data: bytes, name: str = "index") -> list[SampleRecord]:
    """Parse an index; raises FormatError with the line for anything that isn't one, and for a count that doesn't fit."""
    first, *lines = data.decode("utf-8", "surrogateescape").split("\n")
    stated = count(first, name)
    if len(lines) != stated + 1 or lines.pop():  # what follows the last line feed is empty, or half a line
        raise FormatError(f"{name}: states {stated} samples and doesn't have as many whole lines; it was cut: write it again")
    return [record(line, f"{name} line {number}") for number, line in enumerate(lines, 2)]


def record(line: str, where: str) -> SampleRecord:
    """Parse the line of one sample; raises FormatError, which begins with `where`."""
    words = line.split()
    if not words or len(words) % 4:
        raise FormatError(f"{where}: {len(words)} words, not four for each member; delete the index or write it again")
    keys: set[str] = set()
    parts: dict[str, Member] = {}
    for field, offset, size, name in zip(*(words[i::4] for i in range(4)), strict=True):
        named = split_field(name)
        if named is None or named[1] != field or not (_is_number(offset) and _is_number(size)):
            raise FormatError(
                f"{where}: {field} {offset} {size} {name} is not '<ext> <offset> <size> <name>'; delete the index or write it again"
            )
        keys.add(named[0])
        parts[field] = Member(name, int(offset), int(size))
    if len(keys) > 1 or 4 * len(parts) < len(words):
        raise FormatError(f"{where}: members of several samples, or one twice; delete the index or write it again")
    return SampleRecord(keys.pop(), tuple(parts), tuple(parts.values()))


def _words(sample: SampleRecord) -> Iterable[str]:
    for field, member in zip(sample.fields, sample.members, strict=True):
        if member.name.split() != [member.name]:
            raise FormatError(f"member {member.name!r}: DALI's index can't hold a name with a blank")
        yield f"{field} {member.offset} {member.size} {member.name}"


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 20
