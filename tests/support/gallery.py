"""Sources to pack: a table and its pictures in the layout of Google Landmarks 2020, settings for them, and a silent progress."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packing import jpeg

from shardify.config import BuildConfig


@dataclass
class Gallery:
    """A source's root, and its pictures and labels (class indices) by key."""

    root: Path
    pictures: dict[str, bytes] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The keys in the order of the table."""
        return list(self.pictures)

    def path(self, number: int) -> Path:
        """The path of the picture in a row of the table."""
        return self.root / place(self.keys[number])

    def config(self, out: Path, **sections: Any) -> BuildConfig:
        """Return settings that pack it into `out`; `sections` are merged in, such as `encode={"check": "decode"}`."""
        path = "train/{id[0]}/{id[1]}/{id[2]}/{id}.jpg"
        source = {"kind": "csv", "root": str(self.root), "table": "train.csv", "id": "id", "label": "landmark_id", "path": path}
        base: dict[str, Any] = {"source": source, "splits": {"train": 0.8, "val": 0.2}, "shards": {"out": str(out), "size": 20_000}}
        base["max_skipped"] = 1.0  # of 30 pictures the default allows none
        for name, section in sections.items():
            base[name] = {**base.get(name, {}), **section} if isinstance(section, Mapping) and name != "splits" else section
        return BuildConfig.model_validate({"name": "gallery", **base})


def place(key: str) -> str:
    """Return a picture's path below the root."""
    return f"train/{key[0]}/{key[1]}/{key[2]}/{key}.jpg"


def make_gallery(root: Path, count: int = 30, *, make: Callable[[int], bytes] = jpeg) -> Gallery:
    """Write `count` pictures of three classes (landmarks 7, 21, 1000) and their table."""
    gallery = Gallery(root)
    rows = ["id,landmark_id"]
    for number in range(count):
        key = hashlib.sha256(b"%d" % number).hexdigest()[:16]
        gallery.pictures[key], gallery.labels[key] = make(number), number % 3
        path = root / place(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gallery.pictures[key])
        rows.append(f"{key},{(7, 21, 1000)[number % 3]}")
    (root / "train.csv").write_text("\n".join(rows) + "\n")
    return gallery


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Silent:
    """Progress that nobody sees, and how many pictures were told of."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.told = 0

    def begin(self, doing: str, total: int, unit: str = "images") -> None:
        """Note the stage."""
        self.stages.append((doing, total))

    def advance(self, size: int) -> None:
        """Count."""
        self.told += 1
