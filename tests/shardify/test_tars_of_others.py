"""Tars as other tools write them: each kind of member is read as `tarfile` reads it, or refused with a reason, never dropped in silence."""

from __future__ import annotations

import io
import os
import subprocess
import sysconfig
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardify.errors import FormatError
from shardify.format import tar

WHERE = (
    f"{sysconfig.get_path('stdlib')}/test/archivetestdata/testtar.tar",
    f"{sysconfig.get_path('stdlib')}/test/testtar.tar",
    "/usr/lib/python3*/test/archivetestdata/testtar.tar",
    "/usr/lib/python3*/test/testtar.tar",
    f"{Path.home()}/.pyenv/versions/3*/lib/python3*/test/testtar.tar",
)
TESTTAR = next((found for place in WHERE for found in sorted(Path("/").glob(place.lstrip("/")))), None)
PICTURE = bytes(range(256)) * 5


def read(data: bytes) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Return the regular files of a tar with their bytes, and what was said of members that can't be read."""
    said: list[str] = []
    file = io.BytesIO(data)
    found = list(tar.members(file, len(data), "a.tar", fault=said.append))
    return [(member.name, data[member.offset : member.offset + member.size]) for member in found], said


def member(name: str, data: bytes = PICTURE, **more: Any) -> tarfile.TarInfo:
    """Return a member's header."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info


def written(form: int, *members: tuple[tarfile.TarInfo, bytes], **options: Any) -> bytes:
    """Return a tar by Python's own module."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, **options) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


def of_testtar() -> Iterator[Any]:
    """Yield each member of Python's testtar.tar, with all of its headers, as a tar of its own."""
    if TESTTAR is None:
        yield pytest.param("", b"", None, marks=pytest.mark.skip("no testtar.tar (Debian: libpython3.11-testsuite)"))
        return
    data = Path(TESTTAR).read_bytes()
    with tarfile.open(TESTTAR, encoding="utf-8", errors="surrogateescape") as opened:
        infos = opened.getmembers()
        ends = [info.offset for info in infos[1:]] + [opened.offset]
        for info, end in zip(infos, ends, strict=True):
            body = opened.extractfile(info).read() if info.isreg() else None  # type: ignore[union-attr]
            name = ascii(info.name)[1:41]
            yield pytest.param(info.name, data[info.offset : end] + tar.END, (info, body), id=f"{name}-{info.offset}")


@pytest.mark.parametrize(("name", "data", "expected"), list(of_testtar()))
def test_pythons_own_test_tar(name: str, data: bytes, expected: Any) -> None:
    """Each of its members (v7, ustar, GNU, PAX, sparse, links, devices, odd names) is read as Python does, or refused by name."""
    info, body = expected
    try:
        found, said = read(data)
    except FormatError as error:
        assert info.issparse() and "sparse" in str(error) and repr(name)[1:-1] in str(error)
        return
    if info.isreg():
        assert found == [(name, body)] and not said
    elif info.islnk() or info.issym():
        assert found == [] and "is a link" in said[0] and repr(name)[1:-1] in said[0]
    else:
        assert found == [] and not said and (info.isdir() or info.isdev())


@pytest.mark.skipif(TESTTAR is None, reason="no testtar.tar (Debian: libpython3.11-testsuite)")
def test_pythons_own_test_tar_as_a_whole() -> None:
    """The tar itself is refused, for what it holds, and not for where it ends."""
    data = Path(str(TESTTAR)).read_bytes()
    with pytest.raises(FormatError) as caught:
        tar.all_samples(io.BytesIO(data), len(data), "testtar.tar")
    assert any("is a link" in problem for problem in caught.value.problems)
    assert "sparse" in str(caught.value)


GLOBAL = {"comment": "a global header", "mtime": "1.5"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            written(tarfile.GNU_FORMAT, (member("a.jpg"), PICTURE)) + written(tarfile.GNU_FORMAT, (member("b.jpg"), PICTURE)),
            "more data",
        ),
        (written(tarfile.USTAR_FORMAT, (member("a.jpg"), PICTURE)).rstrip(b"\0") + bytes(100), "two zero blocks"),
        (written(tarfile.USTAR_FORMAT, (member("a.jpg"), PICTURE)) + b"trailer", "more data"),
        (written(tarfile.USTAR_FORMAT, (member("a.jpg"), PICTURE)) + bytes(300_000) + b"x", "more data"),
    ],
    ids=["concatenated", "no-end", "trailer", "far-trailer"],
)
def test_what_no_reader_would_see_is_refused(data: bytes, said: str) -> None:
    """Tars one behind the other, a tar without its end, and data behind the end are errors, not fewer samples."""
    with pytest.raises(FormatError, match=said):
        read(data)


def raw(kind: bytes, name: str, data: bytes, size: int | None = None) -> bytes:
    """Return a header of any type with its data."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data) if size is None else size
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


def record(key: str, value: str) -> bytes:
    """Return a PAX record."""
    body = f" {key}={value}\n".encode()
    length = next(n for n in range(len(body), len(body) + 5) if len(str(n)) + len(body) == n)
    return str(length).encode() + body


LAST = raw(b"0", "z.jpg", PICTURE) + bytes(1024)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (raw(b"X", "x", record("path", "p" * 120 + ".jpg")) + raw(b"0", "x.jpg", PICTURE), ["p" * 120 + ".jpg"]),
        (raw(b"x", "x", record("size", "3")) + raw(b"~", "what", b"abc", 0), []),
        (raw(b"x", "x", record("path", "q.jpg/")) + raw(b"0", "q", PICTURE), ["q.jpg"]),
        (raw(b"\0", "folder/", b""), []),
    ],
    ids=["solaris", "size-of-an-unknown-type", "slash", "old-folder"],
)
def test_odd_headers_are_read_as_python_reads_them(data: bytes, names: list[str]) -> None:
    """Solaris' own extension header, PAX's size of a type that nobody knows, a slash behind a name."""
    tarred = tarfile.open(fileobj=io.BytesIO(data + LAST))  # noqa: SIM115
    assert [info.name for info in tarred if info.isreg() and info.type != b"~"] == [*names, "z.jpg"]
    assert [name for name, _ in read(data + LAST)[0]] == [*names, "z.jpg"]


def test_a_name_without_its_member_is_an_error() -> None:
    """A tar that was cut there, and ended, lacks a sample."""
    data = raw(b"0", "a.jpg", PICTURE) + raw(b"x", "x", record("path", "b.jpg")) + bytes(1024)
    with pytest.raises(FormatError, match="ends behind the header of a long name"):
        read(data)


@pytest.mark.parametrize("zeros", [0, 512, 9 * 1024, 2**20, 3 * 2**20])
def test_padding_behind_the_end_is_fine(zeros: int) -> None:
    """Blocks of a tape, and preallocated files, end in zeros."""
    data = written(tarfile.USTAR_FORMAT, (member("a.jpg"), PICTURE)) + bytes(zeros)
    assert read(data) == ([("a.jpg", PICTURE)], [])


def test_global_headers_and_many_of_them() -> None:
    """PAX headers for all members count for each, those of a member for it alone; odd records are passed over."""
    data = written(
        tarfile.PAX_FORMAT,
        (member("b.jpg", b"2", pax_headers={"path": "c.jpg", "a b": "="}), b"2"),
        (member("d.jpg", b"3"), b"3"),
        pax_headers=GLOBAL,
    )
    assert read(data) == ([("c.jpg", b"2"), ("d.jpg", b"3")], [])


def test_base_256_and_negative_numbers() -> None:
    """Sizes in base 256 are read; negative ones, and ones beyond the file, are refused before memory is taken."""

    def with_size(field: bytes) -> bytes:
        block = bytearray(tar.header("a.jpg", 5))
        block[124:136] = field
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block) + b"12345".ljust(512, b"\0") + tar.END

    assert read(with_size(b"\x80" + (5).to_bytes(11, "big")))[0] == [("a.jpg", b"12345")]
    for field in (
        b"\xff" * 12,
        b"\x80" + b"\x7f" * 11,
        b"77777777777\0",
        b"-0000000001\0",
        b"0x5\0".ljust(12, b"\0"),
        "٥".encode().ljust(12, b"\0"),
    ):
        with pytest.raises(FormatError, match="cut or damaged"):
            read(with_size(field))


@pytest.mark.case("T10")
def test_members_over_8_gib_by_header() -> None:
    """A size above 8 GiB, stated by base 256 or PAX, is understood, and refused where the file isn't that long."""
    huge = 9 * 2**30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("a.jpg")
        info.size = huge
        block = info.tobuf(form)
        with pytest.raises(FormatError, match=f"a member of {huge} bytes in a tar of"):
            read(block + bytes(2048))


def test_odd_keys_come_through() -> None:
    """Names with blanks, line feeds, quotes, dashes, unicode in both forms, upper and lower case are kept as they are."""
    names = [
        "a b.jpg",
        "a\nb.jpg",
        "'\"`$(x).jpg",
        "-rf.jpg",
        "\u00e9.jpg",
        "e\u0301.jpg",
        "A.jpg",
        "a.jpg",
        "./x/../y.jpg",
        "😀.jpg",
        "a\\b.jpg",
    ]
    data = written(tarfile.PAX_FORMAT, *((member(name, b"1"), b"1") for name in names))
    assert [name for name, _ in read(data)[0]] == names
    records = tar.all_samples(io.BytesIO(data), len(data))
    assert [record.key for record in records] == [tar.split_field(name)[0] for name in names]  # type: ignore[index]


@pytest.mark.parametrize(
    "tool",
    ["--format=v7", "--format=oldgnu", "--format=gnu", "--format=ustar", "--format=posix", "--sparse", "--null", "-b1", "-b200"],
)
def test_gnu_tar_itself(tool: str, tmp_path: Path) -> None:
    """What GNU tar writes in each of its formats and blockings; a file with holes is refused under --sparse, by name."""
    (tmp_path / "a.jpg").write_bytes(PICTURE)
    (tmp_path / "a.cls").write_bytes(b"7")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ("n" * 80 + ".jpg")).write_bytes(b"long")
    if tool == "--sparse":
        with (tmp_path / "hole.jpg").open("wb") as file:
            file.truncate(10**6)
            file.seek(10**6)
            file.write(b"x")
    names = ["a.jpg", "a.cls", "folder", *(["hole.jpg"] if tool == "--sparse" else [])]
    option = [] if tool == "--null" else [tool]
    made = subprocess.run(["tar", *option, "-cf", "-", "-C", str(tmp_path), *names], capture_output=True, check=True).stdout
    if tool == "--sparse":
        with pytest.raises(FormatError, match=r"hole\.jpg.*sparse"):
            read(made)
        return
    found, said = read(made)
    assert found == [("a.jpg", PICTURE), ("a.cls", b"7"), ("folder/" + "n" * 80 + ".jpg", b"long")] and not said


Fields = st.binary(min_size=0, max_size=12)


@settings(max_examples=600)
@given(
    size=Fields,
    kind=st.sampled_from([bytes([n]) for n in b"01234567LKxgSVMNDA\0 \xff"]),
    name=st.binary(max_size=100),
    magic=st.sampled_from([b"ustar\x0000", b"ustar  \0", bytes(8), b"USTAR\x0000"]),
    body=st.binary(max_size=1200),
    prefix=st.binary(max_size=155),
)
@example(size=b"\x80", kind=b"x", name=b"", magic=b"ustar\x0000", body=b"99999999999999999999 size=1\n", prefix=b"")
@example(size=b"777", kind=b"L", name=b"", magic=bytes(8), body=b"", prefix=b"")
def test_any_header(size: bytes, kind: bytes, name: bytes, magic: bytes, body: bytes, prefix: bytes) -> None:
    """A header of any bytes with a checksum that fits: our own error or members within the file, in a bounded number of reads."""
    block = bytearray(512)
    block[0 : len(name)] = name
    block[124 : 124 + len(size)] = size
    block[156:157] = kind
    block[257:265] = magic
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    data = bytes(block) + body + bytes(-len(body) % 512) + bytes(block) + tar.END
    file = Bounded(data)
    try:
        found = list(tar.members(file, len(data), "a.tar", fault=lambda _: None))
    except FormatError as error:
        assert str(error).startswith("a.tar")
        return
    assert all(m.offset >= 0 and m.offset + m.size <= len(data) for m in found)


class Bounded:
    """A file that allows no more bytes to be asked for at once than a header's limit, and no more reads than it has blocks."""

    def __init__(self, data: bytes) -> None:
        self._file, self._reads = io.BytesIO(data), 8 + len(data) // 128

    def read(self, size: int, /) -> bytes:
        """Read; fails where too much is asked for."""
        self._reads -= 1
        assert 0 <= size <= 2**20 and self._reads > 0
        return self._file.read(size)

    def seek(self, at: int, /) -> int:
        """Stand at a byte."""
        return self._file.seek(at)


@pytest.mark.skipif(os.name != "posix", reason="sparse files")
def test_a_tar_that_grows_only_on_paper(tmp_path: Path) -> None:
    """A file of 1 TB that is a hole behind its samples is refused at once; some MB of zeros are a block's padding."""
    data = written(tarfile.USTAR_FORMAT, (member("a.jpg"), PICTURE))
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    for size, fine in ((2**24, True), (2**40, False)):
        os.truncate(path, size)
        with path.open("rb") as file, nullcontext() if fine else pytest.raises(FormatError, match="more than 64 MiB of zeros"):
            assert len(tar.all_samples(file, size, "a.tar")) == 1


@pytest.mark.parametrize("between", [0, 2**20, 2**24 + 512])
@pytest.mark.parametrize("counted", [True, False])
def test_tars_one_behind_the_other(tmp_path: Path, between: int, *, counted: bool) -> None:
    """What stands behind a tar's end is seen however far behind, and where the tar's size isn't known too (it is unpacked)."""
    one, other = (written(tarfile.USTAR_FORMAT, (member(name), PICTURE)) for name in ("a.jpg", "b.jpg"))
    path = tmp_path / "a.tar"
    path.write_bytes(one + bytes(between) + other)
    with path.open("rb") as file, pytest.raises(FormatError, match="more data stands behind its end"):
        tar.all_samples(file, path.stat().st_size if counted else None, "a.tar")
