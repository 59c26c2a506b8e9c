"""Compressed tars, as their tools write them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from faulty import Faulty

from pipeline.index import index

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACKERS: Mapping[str, Callable[[bytes], bytes]] = {
    "tar.gz": lambda data: gzip.compress(data, 1, mtime=0),
    "tgz": lambda data: gzip.compress(data, 1, mtime=0),
    "tar.zst": lambda data: bytes(zstd.compress(data, 1)),
    "tar.bz2": lambda data: bz2.compress(data, 1),
    "tar.xz": lambda data: lzma.compress(data, preset=0),
}


def in_members(data: bytes, ending: str, size: int) -> bytes:
    """Return data compressed in members of so many bytes, as bgzip, pigz and pzstd do."""
    return b"".join(PACKERS[ending](data[at : at + size]) for at in range(0, len(data), size))


def squeeze(folder: Path, out: Path, ending: str = "tar.gz") -> Path:
    """Write a folder's tars into another one, compressed."""
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.tar"):
        (out / f"{path.stem}.{ending}").write_bytes(PACKERS[ending](path.read_bytes()))
    return out


def described(folder: Path, out: Path) -> None:
    """Index a folder of compressed tars, and put what that makes beside them, as an upload would."""
    with Faulty(folder) as server:
        found = index([server.url(f"/{path.name}") for path in sorted(folder.iterdir())], out=out)
        assert found.problems == ()
        (name,) = found.manifests.values()
        text = Path(name).read_text().replace(server.origin + "/", "")
    for path in out.glob("*.idx"):
        shutil.copy(path, folder)
    (folder / Path(name).name).write_text(text)
