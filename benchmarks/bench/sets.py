"""Has each program's set written by its own writer, as often as is to be timed, and anew when what it is made of has changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import photographs
from environments import absent, digest, python, script
from launch import launch
from programs import DATASETS, PROGRAMS, Program
from records import Written, written_from

PATIENCE_SECONDS = 3600.0  # litdata took 48 s for 2,000 pictures
ROOT = Path(__file__).resolve().parent.parent.parent

Say = Callable[[str], None]


class SetError(Exception):
    """A set can't be written; says why."""


class Sets:
    """The sets below a folder; one that couldn't be written isn't tried again."""

    def __init__(self, folder: Path, photos: Path, *, shards: int, times: int, say: Say) -> None:
        self.folder = folder
        self._photos, self._shards, self._times, self._say = photos, shards, times, say
        self._photos_digest = ""
        self._failed: dict[str, str] = {}

    def ensure(self, name: str) -> Written:
        """Return the record of a set that is there, written now where it wasn't; raises SetError."""
        if name in self._failed:
            raise SetError(self._failed[name])
        try:
            return self._ensure(name)
        except (SetError, OSError) as error:
            shutil.rmtree(self._partial(name), ignore_errors=True)
            self._failed[name] = f"its set can't be written: {error}"
            raise SetError(self._failed[name]) from error

    def _ensure(self, name: str) -> Written:
        folder, record = self.folder / name, self.folder / f"{name}.json"
        known = recorded(record) if folder.exists() else None
        if known is None or known.digest != self._digest(name):
            shutil.rmtree(folder, ignore_errors=True)
            known = self._write(name)
            self._partial(name).rename(folder)
            record.with_suffix(".digest").write_text(known.digest)
            record.write_text(json.dumps(asdict(known)))
        while len(known.seconds) < self._times:
            again = self._write(name)
            shutil.rmtree(self._partial(name))
            known = replace(known, seconds=(*known.seconds, *again.seconds), date=again.date)
            record.write_text(json.dumps(asdict(known)))
        return known

    def _write(self, name: str) -> Written:
        dataset = DATASETS[name]
        writer, partial = PROGRAMS[dataset.writer], self._partial(name)
        shutil.rmtree(partial, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        more = ["--shards", str(self._shards), *(["--short-side", str(dataset.short_side)] if dataset.short_side else [])]
        interpreter = python(writer) if absent(writer) is None else Path(sys.executable)
        done = launch([interpreter, script(writer), "write", self._photos, partial, *more], patience=PATIENCE_SECONDS)
        if done.answer is None:
            raise SetError(str(done.error))
        found = done.answer
        self._say(f"{name}: written in {found['seconds']:.1f} s, {found['bytes'] / 1e6:.1f} MB")
        return Written(
            digest=self._digest(name),
            seconds=(found["seconds"],),
            bytes=found["bytes"],
            files=found["files"],
            date=time.strftime("%Y-%m-%d"),
        )

    def _partial(self, name: str) -> Path:
        return self.folder / f"{name}.partial"

    def _digest(self, name: str) -> str:
        """Return what tells this set from one of other photographs, another writer or another cut."""
        self._photos_digest = self._photos_digest or photographs.digest(self._photos)
        dataset = DATASETS[name]
        parts = [self._photos_digest, str(self._shards), str(dataset.short_side), sources(PROGRAMS[dataset.writer])]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def recorded(record: Path) -> Written | None:
    """Return what is known of a set; None where there is no record, or one of another version of the benchmark."""
    try:
        return written_from(json.loads(record.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sources(writer: Program) -> str:
    """Return what tells a writer from an older one: its script, and its library's version, or of ours all of its code."""
    files = [script(writer), *(script(writer).with_name(name) for name in ("protocol.py", "jobs.py", "tars.py"))]
    if writer.script == "ours":
        files += [*sorted((ROOT / "shardify").rglob("*.py")), ROOT / "configs" / "glr2020.yaml"]
    found = hashlib.sha256(b"\0".join(file.read_bytes() for file in files))
    found.update(digest(writer.environment).encode() if writer.environment else b"")
    return found.hexdigest()
