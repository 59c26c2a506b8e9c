"""Pictures that follow from a number, and sets of them packed by the format's own functions."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np

from shardify.format import index, manifest, names, tar


def jpeg(number: int, height: int = 48, width: int = 64) -> bytes:
    """Return a JPEG whose every pixel follows from `number`."""
    rng = np.random.default_rng(number)
    small = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    picture = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
    done, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 90])
    assert done
    return data.tobytes()


@dataclass
class PackedSet:
    """A packed set: its folder, and what lies in it by key."""

    folder: Path
    pictures: dict[str, bytes] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The keys in storage order."""
        return list(self.pictures)


def write_tar(path: Path, samples: Sequence[tuple[str, Sequence[tuple[str, bytes]]]]) -> list[tar.SampleRecord]:
    """Write (key, [(field, bytes), ...]) as a tar of our format; return what its index holds."""
    out = io.BytesIO()
    records = []
    for key, parts in samples:
        members = []
        for name, data in parts:
            out.write(tar.header(f"{key}.{name}", len(data)))
            members.append(tar.Member(f"{key}.{name}", out.tell(), len(data)))
            out.write(data.ljust(tar.padded(len(data)), b"\0"))
        records.append(tar.SampleRecord(key, tuple(n for n, _ in parts), tuple(members)))
    out.write(tar.END)
    path.write_bytes(out.getvalue())
    return records


def pack(
    folder: Path,
    count: int,
    shards: int,
    *,
    split: str = "train",
    first: int = 0,
    classes: tuple[str, ...] | None = ("a", "b", "c", "d", "e"),
    make: Callable[[int], bytes] = jpeg,
) -> PackedSet:
    """Pack `count` pictures (numbers from `first` on) into `shards` shards with index and manifest; labels count the classes."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = PackedSet(folder)
    entries = []
    for shard in range(shards):
        samples = []
        for number in range(count * shard // shards, count * (shard + 1) // shards):
            key, data, label = f"{split}{first + number:06d}", make(first + number), number % 5
            packed.pictures[key], packed.labels[key] = data, label
            samples.append((key, [("jpg", data), ("cls", b"%d" % label)]))
        path = folder / names.shard_name(split, shard)
        (folder / names.index_name(path.name)).write_bytes(index.dump(write_tar(path, samples)))
        raw = path.read_bytes()
        entries.append(manifest.ShardEntry(path.name, len(samples), len(raw), hashlib.sha256(raw).hexdigest()))
    whole = manifest.Manifest("test", split, tuple(entries), classes=classes)
    (folder / names.manifest_name(split)).write_bytes(manifest.dump(whole))
    return packed


def pack_counts(folder: Path, counts: Sequence[int]) -> None:
    """Pack shards of the given numbers of samples, keys s<shard>-<number>, with a manifest; 0 makes an empty shard."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for shard, count in enumerate(counts):
        samples = [(f"s{shard}-{i}", [("jpg", b"%d" % i), ("cls", b"0")]) for i in range(count)]
        path = folder / names.shard_name("train", shard)
        (folder / names.index_name(path.name)).write_bytes(index.dump(write_tar(path, samples)))
        entries.append(manifest.ShardEntry(path.name, count, path.stat().st_size, f"{shard:064x}"))
    whole = manifest.Manifest("counts", "train", tuple(entries), classes=("a",))
    (folder / names.manifest_name("train")).write_bytes(manifest.dump(whole))
