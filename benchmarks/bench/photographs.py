"""Numbers the first photographs of a set: copies them with their numbers as labels, by which each program's epochs are checked."""

from __future__ import annotations

import csv
import hashlib
import shutil
import subprocess
from pathlib import Path

TABLE = "train.csv"


class PhotographsError(Exception):
    """The photographs can't be had as asked for."""


def number(photos: Path, out: Path, count: int) -> None:
    """Copy `count` pictures into `out`, where they aren't yet; raises PhotographsError where there are fewer."""
    keys = _keys(photos, count)
    if (out / TABLE).exists() and (out / TABLE).read_text() == _table(keys) and _sizes(out, keys) == _sizes(photos, keys):
        return
    partial = out.with_name(out.name + ".partial")
    for old in (partial, out):
        shutil.rmtree(old, ignore_errors=True)
    for key in sorted(keys):
        (partial / place(key)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(photos / place(key), partial / place(key))
    (partial / TABLE).write_text(_table(keys))
    partial.rename(out)
    subprocess.run(["sync", "-f", str(out)], check=True)  # or the first writer's `sync` would wait for these too


def digest(numbered: Path) -> str:
    """Return what tells these photographs from others: their names, order and sizes."""
    with (numbered / TABLE).open(newline="") as file:
        keys = [row["id"] for row in csv.DictReader(file)]
    return hashlib.sha256(repr((keys, _sizes(numbered, keys))).encode()).hexdigest()


def total_bytes(numbered: Path) -> int:
    """Return the bytes of all pictures."""
    return sum(path.stat().st_size for path in numbered.rglob("*.jpg"))


def place(key: str) -> str:
    """Return a picture's path in its set."""
    return f"train/{key[0]}/{key[1]}/{key[2]}/{key}.jpg"


def _keys(photos: Path, count: int) -> list[str]:
    if not (photos / TABLE).exists():
        raise PhotographsError(f"{photos}: no {TABLE}; draw photographs with python benchmarks/photos.py FOLDER --count {count}")
    with (photos / TABLE).open(newline="") as file:
        keys = [row["id"] for row in csv.DictReader(file)][:count]
    if len(keys) < count:
        raise PhotographsError(
            f"{photos}: {len(keys)} photographs, {count} are asked for; ask for fewer (--count, make COUNT=) or draw more into "
            f"another folder: python benchmarks/photos.py FOLDER --count {count}"
        )
    return keys


def _sizes(folder: Path, keys: list[str]) -> list[int]:
    return [(folder / place(key)).stat().st_size for key in keys]


def _table(keys: list[str]) -> str:
    return "id,landmark_id\n" + "".join(f"{key},{n}\n" for n, key in enumerate(keys))
