"""A split's manifest: a valid wids shard index (version 1) with our own keys added.

Everything in it follows from the input and the settings: no time, host, absolute path, budget or process count. A set's digest
is a hash over (shard name, samples, sha256) in order, never over URLs, so that a resume survives a move.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardify.errors import FormatError
from shardify.format.names import manifest_name

FORMAT_VERSION = 1
SKIPPED_KEYS = 100
_KIND = "wids-shard-index-v1"
_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
MOST_SAMPLES, MOST_BYTES = 2**40, 2**53  # of a shard: what is more is no number of anyone's
_HEADER, _SLACK = 512, 10**6  # bytes that a sample takes at least; samples of a file whose size is wrong by mistake


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard: file name or URL relative to the manifest, samples, size in bytes, sha256 in hex ("" where unknown).

    `index`: its index's, in the same way, where that doesn't lie beside the shard.
    """

    url: str = field(repr=False)  # it may be signed
    nsamples: int
    filesize: int
    sha256: str
    index: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """The shard's file name, without folder and query."""
        return self.url.split("?", 1)[0].rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Skipped:
    """How many samples a cause cost, or were repaired, and the first keys (at most 100)."""

    count: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A split: its shards in order, its classes by index (None: labels are used as they are), and the settings that decide bytes.

    `fields` are the fields that samples have, sorted (under `types: keep` not every sample has each); `opencv` is its version
    when pictures were re-encoded, else None; `skipped` is by cause, `repaired` what got its end mark back. `indexed`: the shards
    are others', and what packing promises (the grammar of keys, the picture first, a label) isn't said of them.
    """

    name: str
    split: str
    shards: tuple[ShardEntry, ...]
    classes: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ("cls", "jpg")
    settings: Mapping[str, Any] = field(default_factory=dict)
    opencv: str | None = None
    skipped: Mapping[str, Skipped] = field(default_factory=dict)
    repaired: Skipped = Skipped(0, ())
    indexed: bool = False

    @property
    def samples(self) -> int:
        """The number of samples of the split."""
        return sum(shard.nsamples for shard in self.shards)

    @property
    def bytes(self) -> int:
        """The size of the split's shards in bytes."""
        return sum(shard.filesize for shard in self.shards)

    @property
    def digest(self) -> str:
        """The set's identity in hex, over (shard name, samples, sha256) in order."""
        return set_digest((shard.name, shard.nsamples, shard.sha256) for shard in self.shards)


def set_digest(shards: Iterable[tuple[str, int, str]]) -> str:
    """Return the hex digest of an iterable of (shard name, samples, sha256)."""
    digest = hashlib.sha256()
    for name, nsamples, sha256 in shards:
        digest.update(f"{name}\0{nsamples}\0{sha256}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def dump(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, one shard a line."""
    head = {"__kind__": _KIND, "wids_version": 1, "name": manifest.name}
    own = {
        "format_version": FORMAT_VERSION,
        "split": manifest.split,
        "samples": manifest.samples,
        "bytes": manifest.bytes,
        "digest": manifest.digest,
        "fields": list(manifest.fields),
        "classes": None if manifest.classes is None else list(manifest.classes),
        "settings": manifest.settings,
        "opencv": manifest.opencv,
        "skipped": {cause: _skipped_json(skipped) for cause, skipped in sorted(manifest.skipped.items())},
    }
    if manifest.repaired.count:
        own["repaired"] = _skipped_json(manifest.repaired)
    if manifest.indexed:
        own["indexed"] = True
    shards = [_entry_json(shard) for shard in manifest.shards]
    lines = [f"{json.dumps(k)}: {to_json(v)}" for k, v in {**head, **own}.items()]
    listed = ",\n".join(to_json(s) for s in shards)
    return ("{\n" + ",\n".join(lines) + ',\n"shardlist": [\n' + listed + "\n]\n}\n").encode()


def _skipped_json(skipped: Skipped) -> dict[str, Any]:
    return {"count": skipped.count, "keys": list(skipped.keys)}


def _entry_json(shard: ShardEntry) -> dict[str, Any]:
    own = {"url": shard.url, "nsamples": shard.nsamples, "filesize": shard.filesize, "sha256": shard.sha256}
    return own | ({"index": shard.index} if shard.index else {})


def to_json(value: Any, *, sort_keys: bool = False) -> str:
    """Return JSON that can be read where it can be: escaped only where a text holds half a character (undecodable file names)."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=sort_keys)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, sort_keys=sort_keys)
    return text


def read(path: Path) -> Manifest:
    """Load the manifest at `path`; raises FormatError as `load` does, OSError where it can't be read."""
    return load(path.read_bytes(), str(path))


def find(path: Path) -> list[Path]:
    """Return the paths of a folder's manifests, by name, or `path` itself where it is no folder; raises OSError."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.name.endswith(manifest_name("")))


def load(data: bytes, name: str = "manifest") -> Manifest:
    """Parse a manifest, or a wids shard index of others (its missing keys keep their defaults).

    Raises FormatError with the key for anything malformed, for sums that its list of shards doesn't make, and for a newer version
    of the format.
    """
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name}: not JSON ({error}); it was cut or is no manifest: copy or write it again") from error
    if not isinstance(raw, dict) or raw.get("wids_version") != 1:
        raise FormatError(f'{name}: no wids shard index ("wids_version": 1 is missing); point at a <split>-shardindex.json')
    version = _typed(raw, "format_version", int, FORMAT_VERSION, name)
    if version > FORMAT_VERSION:
        raise FormatError(f"{name}: written in format {version}, and this release reads up to {FORMAT_VERSION}; upgrade shardify")
    made = Manifest(
        name=_typed(raw, "name", str, "", name),
        split=_typed(raw, "split", str, "", name),
        shards=tuple(_entries(_typed(raw, "shardlist", list, None, name), name)),
        classes=None if raw.get("classes") is None else _texts(raw, "classes", name),
        fields=_texts(raw, "fields", name),
        settings=_typed(raw, "settings", dict, {}, name),
        opencv=None if raw.get("opencv") is None else _typed(raw, "opencv", str, None, name),
        skipped={cause: _skipped(item, name) for cause, item in _typed(raw, "skipped", dict, {}, name).items()},
        repaired=_skipped(_typed(raw, "repaired", dict, {}, name), name),
        indexed=raw.get("indexed", False) is True,
    )
    for key, found in (("samples", made.samples), ("bytes", made.bytes)):
        if raw.get(key, found) != found:
            raise FormatError(
                f"{name}: {key} is {raw[key]}, and its list of shards makes {found}; it was cut or edited: copy it again"
            )
    return made


def _skipped(item: Any, name: str) -> Skipped:
    return Skipped(_typed(item, "count", int, 0, name), _texts(item, "keys", name))


def _typed(raw: Any, key: str, kind: type, default: Any, name: str) -> Any:
    if not isinstance(raw, dict) or (key not in raw and default is None):
        raise FormatError(f"{name}: {key!r} is missing; copy or write the manifest again")
    value = raw.get(key, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise FormatError(f"{name}: {key!r} is {type(value).__name__}, not {kind.__name__}; copy or write the manifest again")
    return value


def _texts(raw: Any, key: str, name: str) -> tuple[str, ...]:
    texts = _typed(raw, key, list, [], name)
    if not all(isinstance(text, str) for text in texts):
        raise FormatError(f"{name}: {key!r} holds something other than texts; copy or write the manifest again")
    return tuple(texts)


def _is_undecoded(url: str) -> bool:
    """Tell whether a text is a file name of this machine that isn't UTF-8, as Python has it."""
    try:
        url.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _entries(items: list[Any], name: str) -> Iterator[ShardEntry]:
    """Yield the entries of a list; key by key, for a message that names it, only where something is wrong."""
    for number, item in enumerate(items):
        if type(item) is dict and type(url := item.get("url")) is str and url:
            samples, size = item.get("nsamples"), item.get("filesize", 0)
            sha256, index = item.get("sha256", ""), item.get("index", "")
            if (
                type(samples) is type(size) is int
                and 0 <= samples <= _most_samples(size)
                and 0 <= size <= MOST_BYTES
                and type(sha256) is type(index) is str
                and (not sha256 or _SHA256.fullmatch(sha256))
                and url.isprintable()
            ):
                yield ShardEntry(url, samples, size, sha256.lower(), index)
                continue
        yield _entry(item, f"{name}: shardlist[{number}]")


def _most_samples(size: int) -> int:
    """Return how many samples a shard of so many bytes (0: unknown) may claim: what is more would be made room for."""
    return size // _HEADER + _SLACK if size else MOST_SAMPLES


def _entry(item: Any, where: str) -> ShardEntry:
    url, sha256 = _typed(item, "url", str, None, where), _typed(item, "sha256", str, "", where)
    nsamples, filesize = _typed(item, "nsamples", int, None, where), _typed(item, "filesize", int, 0, where)
    if not url or nsamples < 0 or filesize < 0:
        raise FormatError(f"{where}: needs a url, and no negative numbers; copy or write the manifest again")
    if nsamples > _most_samples(filesize) or filesize > MOST_BYTES:
        raise FormatError(f"{where}: {nsamples} samples in {filesize} bytes is more than a shard holds; write the manifest again")
    if "\0" in url or "\0" in item.get("index", ""):
        raise FormatError(f"{where}: a url holds a NUL, which no name has; write the manifest again")
    if sha256 and not _SHA256.fullmatch(sha256):
        raise FormatError(f"{where}: a sha256 has 64 hexadecimal digits, and this one is {sha256[:80]!r}; write the manifest again")
    if any("\ud800" <= sign <= "\udfff" for sign in item["url"]) and not _is_undecoded(item["url"]):
        raise FormatError(f"{where}: the url holds half a character; write the manifest again")
    return ShardEntry(url, nsamples, filesize, sha256.lower(), _typed(item, "index", str, "", where))
