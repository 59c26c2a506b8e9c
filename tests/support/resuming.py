"""A source to build again and again, what an undisturbed build of it gives, and builds of it that are struck and resumed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gallery import Gallery, make_gallery, tree
from packing import jpeg
from struck import Outcome, Strike, Strikes

from shardify.config.models import LEAST_MEMORY

ROOM = 2**29  # bytes that a test may need
PICTURES = 160
PLENTY = 2**30  # a budget that holds everything
# A checkpoint every few samples, files put on the medium several times: each a moment to be killed at.
TICKING = ("shardify.spool",)
OFTEN = {"shardify.spool.SYNC_BYTES": 100_000}


@contextmanager
def in_memory() -> Iterator[Path]:
    """Give a folder in memory, where the machine has such: a disk's fsyncs would be most of these tests' time."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > ROOM
    with tempfile.TemporaryDirectory(dir=memory if fits else None) as folder:
        yield Path(folder)


def large(number: int) -> bytes:
    """Return a JPEG of 12 to 40 kB, most of it a comment that follows from `number`."""
    picture = jpeg(number)
    comment = (bytes(range(number % 251, 251)) * 200)[: 12_000 + number * 1977 % 28_000]
    return picture[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + picture[2:]


@dataclass(frozen=True)
class Scene:
    """A source of 160 pictures (4 MB), and the files of an undisturbed build of it."""

    gallery: Gallery
    expected: Mapping[str, bytes]
    strikes: Strikes

    @classmethod
    def make(cls, folder: Path, strikes: Strikes, **sections: Any) -> Scene:
        """Make the source and build it undisturbed."""
        scene = cls(make_gallery(folder / "in", PICTURES, make=large), {}, strikes)
        whole = scene.build(folder / "whole", memory=PLENTY, **sections)
        assert whole.code == 0, whole.error + whole.output
        return cls(scene.gallery, tree(folder / "whole"), strikes)

    def settings(self, out: Path, *, memory: int = LEAST_MEMORY, **sections: Any) -> dict[str, Any]:
        """Return the settings of a build into `out`."""
        given = {"shards": {"size": 500_000}, "memory": memory} | sections
        return self.gallery.config(out, **given).model_dump(mode="json")

    def build(
        self,
        out: Path,
        *,
        resume: bool = False,
        force: bool = False,
        strike: Strike | None = None,
        constants: Mapping[str, Any] | None = None,
        limits: Mapping[str, int] | None = None,
        **sections: Any,
    ) -> Outcome:
        """Run a build in its own process."""
        settings = self.settings(out, **sections)
        return self.strikes.run(
            config=settings,
            arguments={"force": force, "resume": resume},
            watched=_watched(settings),
            strike=strike,
            ticking=TICKING,
            constants={**OFTEN, **(constants or {})},
            limits=limits or {},
        )

    def is_whole(self, out: Path) -> bool:
        """Tell whether a folder holds exactly what an undisturbed build gives, and no other file or folder."""
        return tree(out) == self.expected and len(list(out.rglob("*"))) == len(self.expected)

    def resume_to_the_end(self, out: Path, **options: Any) -> None:
        """Resume, and check the promises: the bytes of an undisturbed build, nothing besides, no finished shard touched."""
        before = finished(out)
        done = self.build(out, resume=True, **options)
        assert done.code == 0, done.error + done.output
        assert self.is_whole(out), (
            f"{sorted(tree(out))} are not the undisturbed build's {sorted(self.expected)}, or their bytes differ"
        )
        after = finished(out)
        assert {name: after[name] for name in before} == before, "a finished shard was written again"


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of each finished shard."""
    found = {path.name: path.stat() for path in out.glob("*.tar")}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def _watched(settings: Mapping[str, Any]) -> Sequence[str]:
    return [folder for folder in (settings["shards"]["out"], settings["spool"]) if folder]


__all__ = ["PICTURES", "PLENTY", "Scene", "finished", "in_memory", "large"]
