"""Tar bytes: ours are plain USTAR to the last bit, and what others wrote is read whole or refused, never lost in silence."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify.errors import FormatError
from shardify.format import tar

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def make(members: Sequence[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT, **attributes: object) -> bytes:
    """Return a tar that the standard library wrote."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for attribute, value in attributes.items():
                setattr(info, attribute, value)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read(data: bytes) -> list[tuple[str, bytes]]:
    """Return (name, content) of a tar's members by our reader."""
    found = tar.members(io.BytesIO(data), len(data), "t.tar")
    return [(member.name, data[member.offset : member.offset + member.size]) for member in found]


def keys(data: bytes) -> list[tuple[str, tuple[str, ...]]]:
    """Return (key, fields) of a tar's samples."""
    return [(record.key, record.fields) for record in tar.samples(io.BytesIO(data), len(data), "t.tar")]


@given(st.from_regex(r"[A-Za-z0-9_-]{1,90}\.[a-z]{1,9}", fullmatch=True), st.integers(0, 8 * 2**30 - 1))
@pytest.mark.case("T08")
def test_our_header_is_the_standard_librarys(name: str, size: int) -> None:
    """A header has the very bytes that tarfile writes for the same plain file, and POSIX's zeros where that leaves devices empty."""
    info = tarfile.TarInfo(name)
    info.size = size
    ours, theirs = tar.header(name, size), info.tobuf(tarfile.USTAR_FORMAT)
    assert ours[:148] + ours[156:329] + ours[345:] == theirs[:148] + theirs[156:329] + theirs[345:]
    assert ours[329:345] == b"0000000\0" * 2
    read = tarfile.TarInfo.frombuf(ours, "ascii", "strict")
    assert (read.name, read.size, read.mode, read.mtime, read.type) == (name, size, 0o644, 0, tarfile.REGTYPE)


@pytest.mark.parametrize("name", ["", "x" * 101, "é.jpg"])
def test_names_that_ustar_cannot_hold(name: str) -> None:
    """A header refuses what its name field can't hold."""
    with pytest.raises(FormatError, match="100 ASCII bytes"):
        tar.header(name, 1)


def test_sizes_that_ustar_cannot_hold() -> None:
    """A header refuses a member of 8 GiB."""
    with pytest.raises(FormatError, match=r"a1\.jpg"):
        tar.header("a1.jpg", 8 * 2**30)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@given(st.lists(st.tuples(st.from_regex(r"[a-z0-9]{1,12}", fullmatch=True), st.binary(max_size=1500)), unique_by=lambda m: m[0]))
def test_all_formats_are_read(form: int, members: list[tuple[str, bytes]]) -> None:
    """What tarfile writes in any of its formats is read back, names and contents."""
    members = [(f"{name}.jpg", data) for name, data in members]
    assert read(make(members, form)) == members


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
@pytest.mark.case("N10")
def test_long_names(form: int) -> None:
    """A name of 141 characters beyond ASCII comes through whole (N10)."""
    name = "é" * 137 + ".jpg"
    assert read(make([(name, b"x"), ("b.jpg", b"y")], form)) == [(name, b"x"), ("b.jpg", b"y")]


def test_ustar_prefix() -> None:
    """A name that USTAR splits between its two fields is put together."""
    name = "d" * 90 + "/" + "n" * 90 + ".jpg"
    assert read(make([(name, b"x")])) == [(name, b"x")]


@pytest.mark.case("T13")
def test_offsets_behind_extra_headers() -> None:
    """Offsets are right behind PAX headers, with an owner's name of two words and a float time (T07, T13)."""
    data = make([("a.jpg", b"one"), ("b.jpg", b"two")], tarfile.PAX_FORMAT, uname="A B", mtime=1.5)
    assert read(data) == [("a.jpg", b"one"), ("b.jpg", b"two")]


@pytest.mark.case("T10")
def test_pax_sizes() -> None:
    """A PAX record's size counts, and one beyond the file is refused before anything is allocated (T10)."""
    whole = make([("a.jpg", b"x" * 600)], tarfile.PAX_FORMAT, pax_headers={"comment": "123456789"})
    record = b"21 comment=123456789\n"
    assert read(whole.replace(record, b"21 size=000000000600\n")) == [("a.jpg", b"x" * 600)]
    with pytest.raises(FormatError, match="a member of 999999999999 bytes in a tar of"):
        read(whole.replace(record, b"21 size=999999999999\n"))
    with pytest.raises(FormatError, match="a member of -1 bytes"):
        read(whole.replace(record, b"21 size=99999999999x\n"))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
@pytest.mark.case("T12")
def test_links_are_refused(kind: bytes) -> None:
    """A link would be a label without its picture: it is named, with the way out (T12)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("b.jpg")
        info.type, info.linkname = kind, "a.jpg"
        archive.addfile(info)
    with pytest.raises(FormatError, match=r"t\.tar at byte 0: 'b\.jpg' is a link; .*--dereference"):
        read(out.getvalue())


def test_sparse_files_are_refused() -> None:
    """A sparse member's bytes aren't the file's."""
    block = bytearray(make([("a.jpg", b"x")]))
    block[156:157] = b"S"
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:512]) + 8 * 32)
    with pytest.raises(FormatError, match="sparse"):
        read(bytes(block))


@given(st.integers(0, 4 * 2560 - 1), st.data())
@pytest.mark.case("T01")
def test_a_damaged_header_is_an_error(at: int, data: st.DataObject) -> None:
    """A flipped bit in a header never ends the tar in silence (T01); in a body it is the hash's to find."""
    whole = bytearray(make([(f"s{i}.{field}", b"x" * 512) for i in range(4) for field in ("jpg", "cls")]))
    flipped = 1 << data.draw(st.integers(0, 7))
    whole[at] ^= flipped
    in_header = at // 512 % 2 == 0 and at < 8 * 1024
    try:
        found = read(bytes(whole))
    except FormatError:
        assert in_header or at >= 8 * 1024
    else:
        assert len(found) == 8


@given(st.integers(0, 8 * 1024 + 1023))
@pytest.mark.case("T02")
def test_a_cut_tar_is_an_error(size: int) -> None:
    """Wherever a tar is cut, inside a body, inside a header or between two members, it is an error (T02)."""
    whole = make([(f"s{i}.{field}", b"x" * 512) for i in range(4) for field in ("jpg", "cls")])
    with pytest.raises(FormatError, match=r"t\.tar at byte"):
        read(whole[:size])


def test_one_zero_block_is_an_error() -> None:
    """A hole in the middle isn't the end."""
    whole = make([("a.jpg", b"x"), ("b.jpg", b"y")])
    with pytest.raises(FormatError, match="one zero block"):
        read(whole[:1024] + bytes(512) + whole[1024:])


@given(st.binary(max_size=4096))
def test_noise_is_refused_or_empty(noise: bytes) -> None:
    """Bytes that are no tar raise FormatError and nothing else."""
    try:
        read(noise)
    except FormatError:
        pass
    else:
        assert not any(noise[:1024])


@given(st.lists(st.tuples(st.integers(0, 6143), st.binary(min_size=1, max_size=8)), max_size=6))
def test_a_pax_tar_with_noise_raises_only_format_errors(patches: list[tuple[int, bytes]]) -> None:
    """Damage anywhere in a tar with extension headers, checksums mended, never escapes as another exception."""
    data = bytearray(make([("é" * 120 + ".jpg", b"x"), ("b.jpg", b"y" * 700)], tarfile.PAX_FORMAT, mtime=0.5))
    for at, noise in patches:
        data[at : at + len(noise)] = noise
    for at in range(0, len(data), 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b"%06o\0 " % (sum(data[at : at + 148]) + sum(data[at + 156 : at + 512]) + 8 * 32)
    with contextlib.suppress(FormatError):
        list(tar.samples(io.BytesIO(bytes(data)), len(data)))


@pytest.mark.case("N02", "N06")
def test_samples_group_by_key() -> None:
    """A folder's dots don't cut a key, files without an extension and companions of macOS belong to no sample (N02, N06, N11)."""
    data = make(
        [
            ("README", b""),
            ("train.v1/._0001.jpg", b"x"),
            ("train.v1/0001.jpg", b"j"),
            ("train.v1/._0001.cls", b"x"),
            ("train.v1/0001.cls", b"0"),
            ("__MACOSX/0002.jpg", b"x"),
            ("__a.b__", b"{}"),
            ("train.v1/.DS_Store", b"x"),
            ("train.v1/0002.jpg", b"j"),
        ]
    )
    assert keys(data) == [("train.v1/0001", ("jpg", "cls")), ("train.v1/0002", ("jpg",))]


@pytest.mark.parametrize(
    "names",
    [
        ["a.jpg", "b.jpg", "a.cls", "b.cls"],
        ["a.jpg", "a.cls", "a.jpg", "a.cls"],
        ["a.jpg", "b.jpg", "a.jpg"],
    ],
)
@pytest.mark.case("N07", "N08")
def test_split_and_repeated_samples_are_errors(names: list[str]) -> None:
    """Members that don't stand together, or come twice, are named with their place (N07, N08)."""
    with pytest.raises(FormatError, match=r"t\.tar at byte \d+: 'a\.(jpg|cls)' comes"):
        keys(make([(name, b"x") for name in names]))


def test_who_takes_faults_hears_of_all() -> None:
    """With a fault of one's own reading goes on: every link, split and repeated member is told of, and what is left is yielded."""
    out = io.BytesIO(make([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"3"), ("b.cls", b"4"), ("b.cls", b"5")]))
    with tarfile.open(fileobj=out, mode="a") as archive:
        for name in ("c.jpg", "d.jpg"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, "a.jpg"
            archive.addfile(info)
    told: list[str] = []
    data = out.getvalue()
    found = list(tar.samples(io.BytesIO(data), len(data), "t.tar", fault=told.append))
    assert [line.split("'")[1] for line in told] == ["a.cls", "b.cls", "b.cls", "c.jpg", "d.jpg"]
    assert [(record.key, record.fields) for record in found] == [("a", ("jpg",)), ("b", ("jpg",)), ("a", ("cls",)), ("b", ("cls",))]
    assert data[found[3].members[0].offset :][:1] == b"4"


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"\x1f\x8b\x08", "compressed by gzip"),
        (b"BZh9", "compressed by bzip2"),
        (b"\xfd7zXZ\x00", "compressed by xz"),
        (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
        (b"PK\x03\x04", "a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    ],
)
@pytest.mark.parametrize("size", [100, 5000])
def test_what_is_no_tar_is_called_by_its_name(head: bytes, said: str, size: int) -> None:
    """A compressed file or a pointer under a tar's name is called that, not damaged."""
    with pytest.raises(FormatError, match=said):
        read(head.ljust(size, b"x"))


def test_a_first_member_called_like_a_magic_number() -> None:
    """A tar whose first member's name begins as compressed files do is a tar."""
    assert read(make([("BZh9.jpg", b"x")])) == [("BZh9.jpg", b"x")]


def test_a_tar_of_zeros_has_no_samples() -> None:
    """Zeros are an empty tar: the manifest's count is what finds that out (T06)."""
    assert keys(bytes(10240)) == []


NAMES = [
    "a.jpg",
    "./a.jpg",
    "x/y/A.JPG",
    "a" * 96 + ".jpg",
    "a" * 97 + ".jpg",
    "p/" * 60 + "a.jpg",
    "k" * 300 + ".jpg",
    "ü.jpg",
    "日/本.jpg",
    "back\\slash.jpg",
]


def listed(name: str) -> str:
    """Return a name as `tar --list` shows it where the locale knows ASCII alone."""
    shown = {byte: chr(byte) for byte in range(32, 127)} | {ord("\\"): "\\\\"}
    return "".join(shown.get(byte, f"\\{byte:03o}") for byte in name.encode())


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_a_members_header_is_known(form: int, name: str) -> None:
    """The block before a member's bytes is its header, whoever wrote it: also where the name, or a part of it, stands elsewhere."""
    try:
        data = make([("first.cls", b"1"), (name, b"x" * 700)], form)
    except ValueError:  # USTAR has no such names
        return
    member = list(tar.members(io.BytesIO(data), len(data), "t.tar"))[1]
    block = data[member.offset - tar.BLOCK : member.offset]
    assert tar.is_header(block, member.name, 700)
    assert not tar.is_header(block, member.name, 701)
    assert not tar.is_header(block[:-1], "other.jpg", 700)
    assert not tar.is_header(block[1:] + b"x", member.name, 700)
    assert tar.is_header(block, listed(member.name), 700)
    if name in ("a.jpg", "x/y/A.JPG"):
        assert not tar.is_header(block, "\\\\b.jpg", 700)
        assert not tar.is_header(block, "b.jpg", 700)
        assert tar.is_header(block, name.lower(), 700)


@given(st.binary(max_size=600), st.text(max_size=120), st.integers(0, 2**40))
def test_no_other_block_is_a_header(block: bytes, name: str, size: int) -> None:
    """Bytes of any kind are told apart, and never raise."""
    assert not tar.is_header(block, name, size)
