"""Draws the small sample set that `make shards` packs by default: ten landmarks, laid out like Google Landmarks 2020.

    DIR/train/a/b/c/<16 hex>.jpg
    DIR/train.csv                  id,landmark_id

What is in a picture (`scene`) decides its label, and nothing else does: ids, sizes, bytes and the order of the table are drawn
without looking at the landmark. train.csv comes last, so a set that has it is complete.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shardify import machine, scene
from shardify.durable import write_file
from shardify.encode import to_jpeg
from shardify.engines import local
from shardify.errors import SettingsError, naming
from shardify.format.names import PARTIAL
from shardify.items import Progress

COUNT = 600
TABLE = "train.csv"
_SIZES = ((640, 480), (480, 640), (512, 512), (720, 540), (540, 720), (600, 450), (450, 600))  # width, height
_BYTES = (22_000, 54_000)  # what is aimed at; the promise is 20 to 60 KB
_BYTES_PER_PIXEL = (0.09, 0.15)
_LANDMARK_LIMIT = 203_094  # the real set's ids end here
_STEP = 25  # by how much the quality must rise for twice the bytes, about: three or four tries a picture
_INLINE = 40  # fewer pictures than this are drawn faster than processes start


@dataclass(frozen=True, slots=True)
class SampleSet:
    """A sample set on disk: its folder, pictures, classes, the pictures' bytes; `fresh` is False where it was there before."""

    folder: Path
    pictures: int
    classes: int
    bytes: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class _Plate:
    """One picture to draw: number, id, index of its landmark and landmark id."""

    seed: int
    number: int
    id: str
    landmark: int
    landmark_id: int

    @property
    def path(self) -> str:
        """Its path in the set."""
        return f"train/{self.id[0]}/{self.id[1]}/{self.id[2]}/{self.id}.jpg"


def draw(
    folder: Path, *, count: int = COUNT, seed: int = 0, processes: int | None = None, progress: Progress | None = None
) -> SampleSet:
    """Draw the set of (count, seed) into `folder`, or find it there.

    The files are the same for any number of processes (default: one a CPU that this process may use). What a killed run left
    is drawn over. Raises SettingsError for a folder that holds anything else, StorageError where it can't be written.
    """
    if count < 1:
        raise SettingsError(f"a sample set of {count} pictures: count must be at least 1")
    plates = _plates(seed, count)
    classes = len({plate.landmark for plate in plates})
    with naming(folder):
        fresh = not _is_there(folder, plates)
        if fresh:
            _write(folder, plates, processes or machine.cpus(), progress)
        size = sum((folder / plate.path).stat().st_size for plate in plates)
    return SampleSet(folder, count, classes, size, fresh)


def _keyed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _plates(seed: int, count: int) -> list[_Plate]:
    """Plan a set in the order of its table: landmarks as even as can be, dealt by a hash; ids by another one."""
    kinds = len(scene.LANDMARKS)
    band = _LANDMARK_LIMIT // kinds
    bands = sorted(range(kinds), key=lambda kind: _keyed(f"band {seed} {kind}"))
    landmark_ids = [band * place + _keyed(f"landmark {seed} {place}") % band for place in bands]
    deal = sorted(range(count), key=lambda number: _keyed(f"deal {seed} {number}"))
    plates = [
        _Plate(seed, number, f"{_keyed(f'picture {seed} {number}'):016x}", place % kinds, landmark_ids[place % kinds])
        for place, number in enumerate(deal)
    ]
    return sorted(plates, key=lambda plate: plate.id)


def _table(plates: list[_Plate]) -> bytes:
    return "".join(["id,landmark_id\n", *(f"{plate.id},{plate.landmark_id}\n" for plate in plates)]).encode()


def _strange(folder: Path, wanted: set[str]) -> list[str]:
    """List what is under `folder`, deepest first, but for what is wanted, its folders and a killed run's scraps."""
    known = wanted | {path + PARTIAL for path in wanted}
    ways = {parent.as_posix() for path in wanted for parent in Path(path).parents}
    found = (Path(root, name) for root, folders, files in os.walk(folder) for name in (*files, *folders))
    names = ((path.relative_to(folder).as_posix(), path) for path in found)
    strange = [name for name, path in names if name not in known and (name not in ways or path.is_symlink())]
    return sorted(strange, key=lambda name: (-name.count("/"), name))


def _is_there(folder: Path, plates: list[_Plate]) -> bool:
    """Tell whether the set stands complete in `folder`; raise SettingsError for any folder that can't be drawn into."""
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"{folder} is a file; name a folder for the sample set")
    table = folder / TABLE
    if table.exists() and table.read_bytes() != _table(plates):
        raise SettingsError(f"{table} is the table of another set; name another folder, or delete this one")
    wanted = {plate.path for plate in plates}
    if strange := _strange(folder, {TABLE, *wanted}):
        raise SettingsError(
            f"{folder} isn't empty and holds {len(strange)} files or folders that are not of this sample set, "
            f"such as {strange[0]}; name an empty or new folder"
        )
    missing = sum(not (folder / path).is_file() for path in wanted)
    if table.exists() and missing:
        raise SettingsError(f"{folder} is a sample set that lacks {missing} pictures; delete {TABLE} there to draw it again")
    return table.exists()


def _write(folder: Path, plates: list[_Plate], processes: int, progress: Progress | None) -> None:
    for parent in sorted({(folder / plate.path).parent for plate in plates}):
        parent.mkdir(parents=True, exist_ok=True)
    if progress is not None:
        progress.begin("drawing", len(plates))
    workers = processes if len(plates) >= _INLINE else 1
    with closing(local.map_ordered(_picture, plates, workers=workers)) as pictures:
        for plate, data in zip(plates, pictures, strict=True):
            _put(folder / plate.path, data)
            if progress is not None:
                progress.advance(len(data))
    for plate in plates:  # all at the end: the first one commits the folders too, the others find little left to do
        _sync(folder / plate.path)
    write_file(folder / TABLE, _table(plates))


def _put(path: Path, data: bytes) -> None:
    unfinished = path.with_name(path.name + PARTIAL)
    unfinished.write_bytes(data)
    unfinished.rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _picture(plate: _Plate) -> bytes:
    """Draw a picture as a JPEG whose size and bytes are chosen without looking at the landmark.

    The quality is sought that comes nearest to the bytes drawn for it: a fixed one would tell busy buildings from plain ones.
    """
    draws = scene.Draws(f"shardify sample {plate.seed} {plate.number}")
    width, height = _SIZES[draws.below(len(_SIZES))]
    target = min(max(width * height * draws.number(*_BYTES_PER_PIXEL), _BYTES[0]), _BYTES[1])
    pixels = scene.picture(plate.seed, plate.number, plate.landmark, height, width)
    tried: dict[int, bytes] = {}
    quality = 75
    while quality not in tried:
        tried[quality] = to_jpeg(pixels, quality)
        short = target / len(tried[quality]) - 1
        quality = min(max(quality + round(short * _STEP), 20), 97)
    return min(tried.values(), key=lambda data: abs(len(data) - target))
