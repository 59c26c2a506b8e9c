"""Re-reads a packed set against its manifests, and reports all that doesn't fit: files, hashes, indexes, keys, labels, pictures."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from shardify import encode, machine
from shardify.config.models import Encode
from shardify.engines import local
from shardify.errors import FormatError, SettingsError, naming
from shardify.format import index, manifest, tar
from shardify.format.manifest import Manifest, ShardEntry
from shardify.format.names import PARTIAL, index_name, is_key, manifest_name, parse_shard_name, shown
from shardify.format.picture import PIXEL_LIMIT
from shardify.items import Progress, SplitSize

_READ_BYTES = 4 * 2**20
_LABEL_LIMIT = 2**63
_PICTURES = frozenset(encode.FIELDS.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a set holds by its manifests, and every problem found, one line each."""

    splits: Mapping[str, SplitSize]
    problems: tuple[str, ...]


def verify(path: Path, *, decode: bool, progress: Progress, strict: bool = False) -> Verdict:
    """Check a set's folder, or the one split of a manifest; with `decode`, decode every picture in processes.

    With `strict` too, and a picture of which the decoder complains is a problem.

    Raises SettingsError where there is nothing at `path`, StorageError where it can't be read.
    """
    if not path.exists():
        raise SettingsError(f"{path}: no such folder or manifest; point at a packed set")
    check = _Check(path.resolve(), progress)
    with naming(path):
        check.run()
        if decode or strict:
            check.decode(strict=strict)
    return Verdict(check.splits, tuple(check.problems))


class _Check:
    """One run over a set: what is known so far, and the problems."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._path = path
        self._folder = path if path.is_dir() else path.parent
        self._progress = progress
        self._manifests: list[tuple[Path, Manifest]] = []
        self._intact: list[Path] = []  # shards whose samples were found
        self._shard_of: dict[str, str] = {}
        self._unread = False  # a manifest couldn't be read
        self.problems: list[str] = []

    @property
    def splits(self) -> dict[str, SplitSize]:
        """What each split's manifest states."""
        return {made.split or file.name: SplitSize(len(made.shards), made.samples, made.bytes) for file, made in self._manifests}

    def run(self) -> None:
        """Check everything but the pictures' pixels."""
        self._read_manifests()
        self._progress.begin("verifying", sum(made.samples for _, made in self._manifests))
        for _, made in self._manifests:
            for entry in made.shards:
                self._check_shard(entry, made)
        if not self._unread:  # what it lists isn't known
            self._find_strays()

    def decode(self, *, strict: bool) -> None:
        """Decode every picture of the shards that are otherwise readable."""
        encode.check_able(Encode(check="strict" if strict else "decode"))
        self._progress.begin("decoding", len(self._shard_of))
        pictures = (picture for shard in self._intact for picture in _pictures(shard))
        run = partial(_decode_one, strict, max([PIXEL_LIMIT, *(_pixels(made) for _, made in self._manifests)]))
        with closing(local.map_ordered(run, pictures, workers=machine.cpus())) as reasons:
            for reason in reasons:
                self._progress.advance(0)
                if reason is not None:
                    self.problems.append(reason)

    def _read_manifests(self) -> None:
        files = manifest.find(self._path)
        if not files:
            self.problems.append(f"{self._path}: no {manifest_name('<split>')}; the build didn't end, or this is no packed set")
        for file in files:
            try:
                made = manifest.read(file)
                self._check_stated(file, made)
            except FormatError as error:
                self.problems.append(str(error))
                self._unread = True
                continue
            self._manifests.append((file, made))
        if len({made.classes for _, made in self._manifests}) > 1:
            names = ", ".join(file.name for file, _ in self._manifests)
            self.problems.append(
                f"{names}: the splits differ in their classes, so a label means different things; build them at once"
            )

    def _check_stated(self, file: Path, made: Manifest) -> None:
        """Compare the digest that a manifest states with its list of shards."""
        stated = json.loads(file.read_bytes()).get("digest", made.digest)
        if stated != made.digest:
            self.problems.append(f"{file.name}: digest is {stated}, and its list of shards makes {made.digest}; it was edited")

    def _check_shard(self, entry: ShardEntry, made: Manifest) -> None:
        name = shown(entry.url)
        if "://" in entry.url:
            self.problems.append(f"{name}: a remote shard isn't verified; download the set and verify the folder")
            return
        path = self._folder / entry.url
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            self.problems.append(f"{name}: listed in the manifest of {made.split!r}, and not there; copy it again")
            return
        if entry.filesize and size != entry.filesize:
            self.problems.append(f"{name}: {size} bytes, and the manifest says {entry.filesize}; copy it again")
        with path.open("rb") as file:
            if entry.sha256 and _sha256(file) != entry.sha256:
                self.problems.append(f"{name}: its sha256 isn't the manifest's; copy it again")
            self._check_samples(file, size, entry, made)

    def _check_samples(self, file: BinaryIO, size: int, entry: ShardEntry, made: Manifest) -> None:
        name = shown(entry.url)
        try:
            records = list(tar.samples(file, size, name))
        except FormatError as error:
            self.problems.append(str(error))
            return
        if len(records) != entry.nsamples:
            self.problems.append(f"{name}: {len(records)} samples, and the manifest says {entry.nsamples}; copy it again")
        index_file = self._folder / (entry.index or index_name(entry.url))
        # A set that we packed has all indexes; of others' tars those whose names have blanks have none; a wids index knows none.
        if (made.fields and not made.indexed) or (made.indexed and index_file.exists()):
            self.problems += _compare_index(index_file, records)
        for record in records:
            self.problems += [f"{name}: sample {record.key!r}: {reason}" for reason in _judge(file, record, made)]
            first = self._shard_of.setdefault(record.key, name)
            if first is not name:
                self.problems.append(f"{name}: key {record.key!r} stands in {first} too; keys must be unique in the whole set")
            self._progress.advance(sum(member.size for member in record.members))
        self._intact.append(self._folder / entry.url)

    def _find_strays(self) -> None:
        """Name shards, indexes and unfinished files that no manifest lists: a reader's pattern would take them in."""
        listed = {entry.name for _, made in self._manifests for entry in made.shards}
        listed |= {index_name(name) for name in listed}
        splits = None if self._path.is_dir() else {made.split for _, made in self._manifests}
        for file in sorted(self._folder.iterdir()):
            shard = parse_shard_name(file.name.removesuffix(PARTIAL).replace(".idx", ".tar"))
            if file.name in listed or file.suffix not in (".tar", ".idx", PARTIAL):
                continue
            if splits is None or (shard is not None and shard[0] in splits):
                self.problems.append(f"{file.name}: no manifest lists it; remove it, or rename it back if it was renamed")


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while data := file.read(_READ_BYTES):
        digest.update(data)
    return digest.hexdigest()


def _compare_index(path: Path, records: list[tar.SampleRecord]) -> list[str]:
    """Compare a shard's index with what its tar holds, sample by sample."""
    remedy = "build the set again, or copy the index again"
    try:
        listed = index.load(path.read_bytes(), path.name)
    except FileNotFoundError:
        return [f"{path.name}: not there, and its shard is; {remedy}"]
    except FormatError as error:
        return [str(error)]
    if len(listed) != len(records):
        return [f"{path.name}: {len(listed)} samples, and the tar holds {len(records)}; {remedy}"]
    wrong = [line for line, pair in enumerate(zip(listed, records, strict=True), 2) if pair[0] != pair[1]]
    return [f"{path.name} line {line}: not what the tar holds there, {records[line - 2].key!r}; {remedy}" for line in wrong]


def _judge(file: BinaryIO, record: tar.SampleRecord, made: Manifest) -> Iterator[str]:
    """Yield what is wrong with a sample: its key, its fields, its label, its json."""
    if made.fields and not made.indexed:
        if not is_key(record.key):
            yield "its key isn't of letters, digits, - and _, at most 90"
        texts = set(record.fields) - _PICTURES
        if record.fields[0] not in _PICTURES & set(made.fields) or texts != set(made.fields) - _PICTURES:
            yield f"its fields are {', '.join(record.fields)}, and the manifest says {', '.join(made.fields)}"
        elif len(record.fields) != len(texts) + 1:
            yield f"it has several pictures ({', '.join(record.fields)})"
    for field, member in zip(record.fields, record.members, strict=True):
        if field == "cls":
            yield from _judge_label(_content(file, member), made.classes)
        elif field == "json":
            yield from _judge_json(_content(file, member))


def _content(file: BinaryIO, member: tar.Member) -> bytes:
    file.seek(member.offset)
    return file.read(member.size)


def _judge_label(text: bytes, classes: tuple[str, ...] | None) -> Iterator[str]:
    if not text.isdigit() or len(text) > 19:
        yield f"its label {text[:40]!r} isn't an ASCII integer from 0 on"
        return
    limit = _LABEL_LIMIT if classes is None else len(classes)
    if int(text) >= limit:
        yield f"its label {int(text)} is none of the {limit} classes"


def _judge_json(text: bytes) -> Iterator[str]:
    try:
        if isinstance(json.loads(text), dict):
            return
    except (ValueError, RecursionError):
        pass
    yield "its json isn't a JSON object"


def _pictures(shard: Path) -> Iterator[tuple[Path, tar.Member]]:
    with shard.open("rb") as file:
        for record in tar.samples(file, os.fstat(file.fileno()).st_size, shard.name):
            for field, member in zip(record.fields, record.members, strict=True):
                if field in _PICTURES:
                    yield shard, member


def _pixels(made: Manifest) -> int:
    """Return how many pixels a picture of a set may have, 0 where its settings don't say."""
    settings = made.settings.get("encode")
    pixels = settings.get("pixels") if isinstance(settings, dict) else None
    return pixels if isinstance(pixels, int) else 0


def _decode_one(strict: bool, pixels: int, picture: tuple[Path, tar.Member]) -> str | None:
    """Decode one picture, in a process of its own; returns what is wrong with it."""
    shard, member = picture
    with shard.open("rb") as file:
        data = _content(file, member)
    try:
        encode.check_decodes(data, strict=strict, pixels=pixels)
    except FormatError as error:
        return f"{shard.name}: {member.name}: {error}"
    return None
