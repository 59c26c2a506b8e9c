"""Makes each kind of error that a user can see, by doing what leads to it; run as a program it prints docs/ERRORS.md."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from faulty import Fault, Faulty, Taken
from gallery import Silent, make_gallery
from kinds import KINDS
from packing import pack, write_tar

import pipeline
from pipeline.stores.http import HttpOptions, HttpStore
from pipeline.urls import resolve
from shardify import build, encode
from shardify.config import Encode, load
from shardify.scan import scan

HEAD = """\
# Errors

What each class of error says. Each message names the place, the cause and the next step; those here were made by doing what leads to
them (`tests/support/mishaps.py`, which a test compares with this page). Where a set has many problems, all are told at once.

`shardify`'s errors are below `shardify.errors.ShardifyError`, and the command line ends with the exit code of their class. Those of a
picture are told as lines of a `DataError`, behind the picture's path.
`pipeline`'s are below `pipeline.PipelineError`; those that come from a worker are the same there, with the worker's message.
"""
QUICK = HttpOptions(attempts=2, connect_seconds=1.0, first_wait_seconds=0.001)
# Classes that are never raised to a user: bases, and what is caught within.
INNER = {
    "ShardifyError", "PipelineError", "SampleError", "PictureError",  # bases
    "NoRoom", "UnconditionalError", "AbsentError",  # caught: room is waited for, another way is taken, the file is opened anew
    "TakenError",  # another build's object: told as a SettingsError
}  # fmt: skip


@dataclass(frozen=True)
class Mishap:
    """What leads to an error: a few words, and a function that does it in an empty folder."""

    when: str
    do: Callable[[Path], Any]


def _misspelled(folder: Path) -> None:
    (folder / "glr.yaml").write_text(
        "name: glr\nsource: {kind: csv, root: x, table: t.csv, id: id, lable: landmark_id, path: '{id}.jpg'}\n"
        "splits: {train: 0.9, val: 0.2}\nshards: {out: shards}\n"
    )
    load(folder / "glr.yaml")


def _build(folder: Path, **sections: Any) -> None:
    gallery = make_gallery(folder / "in", 8)
    gallery.path(2).unlink()
    gallery.path(5).write_bytes(gallery.pictures[gallery.keys[5]][:-400])
    build.build(
        gallery.config(Path(sections.pop("out", folder / "out")), **sections), force=False, skipped_to=None, progress=Silent()
    )


def _cut(folder: Path) -> Path:
    shard = min(pack(folder / "set", 8, 1).folder.glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[:-3000])
    return shard


def _picture(kind: str, **settings: Any) -> Callable[[Path], None]:
    def do(_: Path) -> None:
        encode.encode(KINDS[kind](), Encode.model_validate(settings))

    return do


def _loader(folder: Path, *pictures: bytes, **arguments: Any) -> None:
    """Read a set of pictures to its end."""
    folder.mkdir(exist_ok=True)
    write_tar(folder / "train-000000.tar", [(f"k{n}", [("jpg", data), ("cls", b"1")]) for n, data in enumerate(pictures)])
    arguments = {"batch_size": 2, "num_workers": 0, **arguments}
    with pipeline.make_loader(str(folder / "train-000000.tar"), **arguments) as loader:
        for _ in loader:
            pass


def _fails(image: np.ndarray[Any, Any]) -> Any:
    raise ValueError("the crop is larger than the picture")


def _dies(image: np.ndarray[Any, Any]) -> Any:
    os.kill(os.getpid(), 9)


def _far(fault: Fault, *more: Fault) -> Callable[[Path], None]:
    def do(_: Path) -> None:
        with Faulty({"/set/train-shardindex.json": b"{}" * 4000}, [fault, *more] if more else lambda _request: fault) as server:
            try:
                if more:
                    HttpStore(QUICK).read(server.url("/set/train-shardindex.json"), 0, 8000, None, Taken(0))
                else:
                    resolve(server.url("/set/train-shardindex.json"), http=QUICK)
            except Exception as error:
                error.args = (str(error).replace(server.origin, "https://nas.lan"),)
                raise

    return do


def _good(count: int) -> list[bytes]:
    return [KINDS["JPEG"]()] * count


SKIPPING = pipeline.LoaderOptions(on_error="skip", max_skipped=1)
MISHAPS: dict[str, Mishap] = {
    "SettingsError": Mishap("a setting that isn't one, and shares above 1", _misspelled),
    "DataError": Mishap("pictures that are missing or can't be packed", _build),
    "FormatError": Mishap("a tar that was cut", lambda folder: scan(_cut(folder), hashing=False)),
    "EmptyPictureError": Mishap("a picture of zero bytes", _picture("zero bytes")),
    "UnknownPictureError": Mishap("an error page that was saved as a picture", _picture("HTML")),
    "CutPictureError": Mishap("a picture that was cut", _picture("JPEG cut in its pixels")),
    "LargePictureError": Mishap("a picture that declares more pixels than are decoded", _picture("PNG that declares 33000x33000")),
    "PictureTypeError": Mishap("a type that not every reader decodes", _picture("TIFF")),
    "PictureError (strict)": Mishap(
        "half a picture, under `check: strict`", _picture("JPEG cut in its pixels, with an end mark (half grey)", check="strict")
    ),
    "StorageError": Mishap("a folder that can't be made", lambda folder: _build(folder, out="/proc/none/out")),
    "OptionsError": Mishap("an option that isn't one", lambda _: pipeline.LoaderOptions(lanse=4)),
    "SourceError": Mishap("a set that isn't there", lambda folder: resolve(str(folder / "shards" / "train-{000000..000009}.tar"))),
    "ShardError": Mishap("a tar that was cut", lambda folder: list(pipeline.ShardDataset(str(_cut(folder).parent)))),
    "UncountedError": Mishap(
        "the number of batches of tars that nobody counted",
        lambda folder: _length(folder),
    ),
    "MissingError": Mishap("a URL at which nothing lies", _far(Fault(status=404))),
    "DeniedError": Mishap("a URL that needs credentials", _far(Fault(status=401))),
    "RemoteError": Mishap("a server that fails", _far(Fault(status=503))),
    "ChangedError": Mishap("an object that is replaced while it is read", _far(Fault(cut=1000), Fault(etag='"new"'))),
    "DecodeError": Mishap(
        "a sample's picture that doesn't decode", lambda folder: _loader(folder, *_good(3), KINDS["JPEG cut in its pixels"]())
    ),
    "TransformError": Mishap("a transform that fails on a sample", lambda folder: _loader(folder, *_good(2), transform=_fails)),
    "SkippedError": Mishap(
        "more bad samples than may be skipped",
        lambda folder: _loader(folder, *_good(2), b"", *_good(2), b"", batch_size=6, options=SKIPPING),
    ),
    "WorkerError": Mishap(
        "a worker process that is killed", lambda folder: _loader(folder, *_good(2), num_workers=1, transform=_dies)
    ),
}


def _length(folder: Path) -> int:
    write_tar(folder / "a.tar", [("k", [("jpg", KINDS["JPEG"]()), ("cls", b"1")])])
    with pipeline.make_loader(str(folder / "a.tar"), batch_size=1, num_workers=0) as loader:
        return len(loader)


def said(mishap: Mishap) -> tuple[str, str]:
    """Return the class and the message of the error that a mishap leads to; folders and numbers of this machine left out."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mishap.do(Path(folder))
        except Exception as error:
            problems = [problem for problem in getattr(error, "problems", ()) if problem != str(error)]
            lines = [str(error), *(f"  {problem}" for problem in problems)]
            text = "\n".join(lines).replace(folder, "/data")
            return type(error).__name__, re.sub(r"pid\(s\) [0-9]+", "pid(s) 4711", text)
    raise AssertionError(f"nothing went wrong: {mishap.when}")


def messages() -> Iterator[tuple[str, str, str]]:
    """Yield each entry of the page: the class, what led to it, and the message."""
    for name, mishap in MISHAPS.items():
        kind, text = said(mishap)
        assert kind == name.partition(" ")[0], (name, kind, text)
        yield kind, mishap.when, text


def page() -> str:
    """Return docs/ERRORS.md."""
    parts = [HEAD]
    for kind, when, text in messages():
        lines = [
            part for line in text.split("\n") for part in textwrap.wrap(line, 118, subsequent_indent="  ", break_on_hyphens=False)
        ]
        body = "\n".join(f"    {line}" for line in lines)
        parts.append(f"## {kind}\n\n{when[0].upper()}{when[1:]}:\n\n{body}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
