"""Finds out, in bounded time, what lies in a folder: pictures or shards, about how many, and a random sample of them.

The tree is listed level by level, each level's folders in random order. A level that takes more than its share of the time is cut
short and counted by the part that was seen: 1.6 million files needn't be listed for a sample of a few hundred.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from shardify.errors import FormatError
from shardify.format import index, manifest, tar
from shardify.format.names import index_name, manifest_name, shown

_KEPT = 4096  # names held of each level: more than can be read from a hard disk in the time that a measurement takes
_LEAST = 64  # folders of a level that are listed however long it takes: their mean stands for the level
_LOOK = 1024  # entries between two looks at the clock
_SHARDS = 16  # that are looked into to count the samples of others
_SAMPLES = 64  # in each of them, where no index says how many it holds

Troubles = list[tuple[str, str]]  # (path, cause) of what can't be listed or read


@dataclass(slots=True)
class Found:
    """Files of one kind: how many (scaled up where levels were cut short), in how many folders, and random ones of them."""

    count: float = 0
    folders: float = 0
    levels: list[tuple[float, list[str]]] = field(default_factory=list)

    def add(self, level: _Level, scale: float) -> None:
        """Add what a level holds, each of its listed folders standing for `scale` of them."""
        if level.count:
            self.count += level.count * scale
            self.folders += level.folders * scale
            self.levels.append((level.count * scale, level.kept))

    def draw(self, most: int, rng: random.Random) -> list[str]:
        """Return up to `most` paths at random, without repeats: each level's share is that of its files."""
        drawn: list[str] = []
        for count, kept in self.levels:
            drawn += rng.sample(kept, min(len(kept), max(1, round(most * count / self.count))))
        rng.shuffle(drawn)
        return drawn[:most]


@dataclass(slots=True)
class Listing:
    """What a path holds: pictures, tars, the count of other files; whether all was listed; what couldn't be."""

    pictures: Found = field(default_factory=Found)
    tars: Found = field(default_factory=Found)
    others: float = 0
    exact: bool = True
    troubles: Troubles = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shards:
    """A set of tars: how many, their bytes, their samples (`exact`, or estimated from a few); random ones with their sizes."""

    count: int
    bytes: int
    samples: int
    exact: bool
    sizes: dict[str, int]

    @property
    def mean_sample(self) -> int:
        """The bytes that a sample takes, headers and all."""
        return max(1, self.bytes // max(1, self.samples))


class _Level:
    """The files of one kind in a level's listed folders: their count and a uniform sample of their paths."""

    def __init__(self, rng: random.Random) -> None:
        self.count = self.folders = 0
        self.kept: list[str] = []
        self._rng = rng
        self._last = ""

    def add(self, folder: str, name: str) -> None:
        self.folders += folder != self._last
        self._last = folder
        self.count += 1
        if len(self.kept) < _KEPT:
            self.kept.append(f"{folder}/{name}")
        elif (place := self._rng.randrange(self.count)) < _KEPT:
            self.kept[place] = f"{folder}/{name}"


def look(path: Path, extensions: Collection[str], seconds: float, rng: random.Random) -> Listing:
    """List what `path` (a folder, a tar, a manifest or a picture) holds, in about `seconds`.

    A picture is a file with one of `extensions` (lower case, no dot). Hidden entries and links to folders are passed over.
    """
    if not path.is_dir():
        return _single(path, rng)
    listing = Listing()
    end = time.monotonic() + seconds
    waiting, scale = [str(path)], 1.0
    while waiting:
        rng.shuffle(waiting)
        pictures, tars, below = _Level(rng), _Level(rng), list[str]()
        limit, others, seen = time.monotonic() + max(0.0, end - time.monotonic()) / 2, 0, 0
        for folder in waiting:
            if seen >= _LEAST and time.monotonic() > limit:
                listing.exact = False
                break
            seen += 1
            for name, kind in _entries(folder, listing, end):
                if kind == "folder":
                    below.append(f"{folder}/{name}")
                elif kind in extensions:
                    pictures.add(folder, name)
                elif kind == "tar":
                    tars.add(folder, name)
                else:
                    others += 1
        scale *= len(waiting) / seen
        listing.pictures.add(pictures, scale)
        listing.tars.add(tars, scale)
        listing.others += others * scale
        waiting = below
    return listing


def _single(path: Path, rng: random.Random) -> Listing:
    """Return the listing of one file; a manifest's is that of its shards, anything but a tar's that of a picture."""
    listing = Listing()
    level = _Level(rng)
    if path.name.endswith(manifest_name("")):
        for shard in manifest.read(path).shards:
            if "://" in shard.url:
                listing.troubles.append((shown(shard.url), "a remote shard; only what lies on this machine is measured"))
            else:
                level.add(str(path.parent), shard.url)
        listing.tars.add(level, 1)
        return listing
    level.add(str(path.parent), path.name)
    (listing.tars if path.suffix.lower() == ".tar" else listing.pictures).add(level, 1)
    return listing


def _entries(folder: str, listing: Listing, end: float) -> Iterator[tuple[str, str]]:
    """Yield (name, kind) of what a folder holds; kind is "folder", "other" or the extension. Stops, inexact, when time is up."""
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries, 1):
                if number % _LOOK == 0 and number > _KEPT and time.monotonic() > end:
                    listing.exact = False
                    return
                if not entry.name.startswith("."):
                    yield entry.name, _kind(entry)
    except OSError as error:
        listing.troubles.append((folder, error.strerror or str(error)))


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    with suppress(OSError):  # a link that leads round in circles
        if entry.is_file():
            return entry.name.rpartition(".")[2].lower() if "." in entry.name else "other"
    return "other"


def shards(path: Path, found: Found, rng: random.Random, troubles: Troubles) -> Shards:
    """Return what is known of the tars that were found: from manifests where they name all of them, else estimated."""
    sizes: dict[str, int] = {}
    for name in found.draw(_KEPT, rng):
        try:
            sizes[name] = Path(name).stat().st_size
        except OSError as error:
            troubles.append((name, error.strerror or str(error)))
    if not sizes:
        return Shards(0, 0, 0, False, {})
    count = round(found.count)
    total = sum(sizes.values()) * max(count, len(sizes)) // len(sizes)
    stated = _stated(path, sizes) if len(sizes) >= count else None
    if stated is not None:
        return Shards(len(sizes), sum(sizes.values()), stated, True, sizes)
    counted = [(samples, size) for name in islice(sizes, _SHARDS) for samples, size in _counted(name, sizes[name], troubles)]
    per_byte = sum(samples for samples, _ in counted) / max(1, sum(size for _, size in counted))
    return Shards(count, total, round(total * per_byte), False, sizes)


def _stated(path: Path, sizes: Collection[str]) -> int | None:
    """Return the samples that manifests state for these tars; None where one isn't named, or a manifest can't be read."""
    try:
        made = [manifest.read(file) for file in manifest.find(path) if file.name.endswith(manifest_name(""))]
    except (FormatError, OSError):
        return None
    samples = {shard.name: shard.nsamples for one in made for shard in one.shards}
    names = [Path(name).name for name in sizes]
    return sum(samples[name] for name in names) if all(name in samples for name in names) else None


def _counted(name: str, size: int, troubles: Troubles) -> list[tuple[int, int]]:
    """Return how many samples lie in how many bytes of a tar: by its index, else of its first ones; nothing for a damaged tar."""
    with suppress(OSError, FormatError), Path(index_name(name)).open("rb") as file:
        return [(index.count(file.readline(64).decode("ascii", "replace")), size)]
    records = first_samples(name, troubles)
    if not records:
        return []
    last = records[-1].members[-1]
    return [(len(records), size if len(records) < _SAMPLES else last.offset + tar.padded(last.size))]


def first_samples(name: str, troubles: Troubles) -> Sequence[tar.SampleRecord]:
    """Return the first samples of a tar by its headers; what is wrong with it goes to `troubles`."""
    records: list[tar.SampleRecord] = []
    try:
        with Path(name).open("rb") as file:
            records.extend(islice(tar.samples(file, os.fstat(file.fileno()).st_size, name), _SAMPLES))
    except FormatError as error:
        troubles.append((name, str(error).removeprefix(f"{name}: ")))
    except OSError as error:
        troubles.append((name, error.strerror or str(error)))
    return records
