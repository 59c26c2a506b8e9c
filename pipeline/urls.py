"""Turns what the user points at into shards: a manifest, a folder, a brace pattern, a glob, a tar, or a list of those.

An existing file or folder wins over the pattern that its name could be. Where tars are named and a manifest beside them lists
them, its numbers are used, by file name; either all tars are listed or none. Only names are read here, one listing a folder, and
manifests; no shard is opened.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipeline.addresses import ACCEPTED, local
from pipeline.braces import expand
from pipeline.errors import OptionsError, SourceError
from pipeline.machine import open_regular, uncollected
from pipeline.remotes import find_remote, is_remote
from pipeline.shardset import Shard, ShardSet
from pipeline.splits import MANIFEST_END, choose, choose_one, split_of
from pipeline.stores.folders import Folders, natural, some
from shardify.errors import ShardifyError
from shardify.format.manifest import Manifest, ShardEntry, load
from shardify.format.names import COMPRESSED, PARTIAL, parse_shard_name

if TYPE_CHECKING:
    from pipeline.stores.http import HttpOptions
    from pipeline.stores.objects import ObjectOptions

Source: TypeAlias = str | os.PathLike[str]

_OTHER_JSON = 16  # some tools leave a JSON beside every shard: looking into each would cost a seek a shard
_HEAD_BYTES = 4096
_MAGIC = re.compile(r"[*?\[]")
_MIXED = "local shards and URLs can't be mixed in one set: name one kind, or make two loaders"


def resolve(
    shards: Source | Sequence[Source],
    *,
    split: str | None = None,
    http: HttpOptions | None = None,
    objects: ObjectOptions | None = None,
) -> ShardSet:
    """Return the shards that `shards` points at; `split` chooses among the splits of a folder.

    `http` and `objects` say how servers and object stores are asked.

    Raises SourceError for what isn't there or can't be read, OptionsError for a split that must be named or isn't there.
    """
    texts = list(_texts(shards))
    if remote := [text for text in texts if is_remote(text)]:
        if len(remote) < len(texts):
            raise OptionsError(_MIXED)
        with uncollected():
            return find_remote(texts, {}, split=split, http=http, objects=objects)
    with uncollected():
        search = _Search(split)
        for text in texts:
            search.add(text)
        if search.remote and search.found:
            raise OptionsError(_MIXED)
        if search.remote:
            return find_remote((), search.remote, split=split, http=http, objects=objects)
        search.number()
        search.check()
        return search.result()


def refuse_remote(found: ShardSet, who: str) -> None:
    """Raise OptionsError for a remote set, which `who` can't read."""
    if found.shards[0].url:
        raise OptionsError(f"{found.shards[0].path}: {who} reads local shards only; make_loader reads remote ones")


def _texts(shards: Source | Sequence[Source]) -> Iterator[str]:
    items: object = [shards] if isinstance(shards, str | os.PathLike) else shards
    if not isinstance(items, Sequence) or isinstance(items, bytes):
        raise OptionsError(f"shards is of type {type(shards).__name__}: give {ACCEPTED}")
    if not items:
        raise SourceError(f"shards is an empty list: give {ACCEPTED}")
    for item in items:
        text = os.fspath(item) if isinstance(item, str | os.PathLike) else item
        if not isinstance(text, str):
            raise OptionsError(f"shards holds an item of type {type(item).__name__}: give {ACCEPTED}")
        yield text


class _Search:
    """Collects shards in the order in which they are named, and the manifests that tell of them."""

    def __init__(self, split: str | None) -> None:
        self._split, self._folders = split, Folders()
        self._chose = False  # among the splits of a folder
        self._shards: list[Shard] = []
        self._used: dict[str, Manifest] = {}
        self.remote: dict[str, Manifest] = {}  # that lie here and list what doesn't

    @property
    def found(self) -> bool:
        """Whether a local shard was named."""
        return bool(self._shards)

    def add(self, text: str) -> None:
        """Add what one text of the user points at."""
        path = str(Path(os.path.expanduser(local(text))).absolute())  # noqa: PTH111  Path's own raises for an unknown user
        if not self._add_existing(path):
            self._add_pattern(path)

    def _add_existing(self, path: str) -> bool:
        kind = self._folders.kind(path)
        if kind == "folder":
            self._add_folder(path)
        elif kind == "file":
            self._add_file(path)
        return kind is not None

    def _add_file(self, path: str) -> None:
        name = path.rpartition("/")[2]
        if _is_tar(name):
            self._shards.append(Shard(path, name))
        elif name.lower().endswith(".json"):
            self._add_manifest(path, _read(path))
        elif name.lower().endswith(COMPRESSED):
            raise SourceError(f"{path}: compressed, so that samples can't be read by offset; unpack it to a plain .tar")
        else:
            raise SourceError(f"{path}: neither a tar nor a manifest; give {ACCEPTED}")

    def _add_manifest(self, path: str, manifest: Manifest) -> None:
        if not manifest.shards:
            raise SourceError(f"{path}: lists no shards; write the set again")
        if any(is_remote(entry.url) for entry in manifest.shards):
            self.remote[path] = manifest
            return
        odd = (entry.name for entry in manifest.shards if not entry.url.endswith(".tar"))
        if squeezed := [name for name in odd if name.lower().endswith(COMPRESSED)]:
            raise SourceError(f"{path}: lists compressed shards, which can't be read by offset: {some(squeezed)}; unpack them")
        self._used[path] = manifest
        folder = path.rpartition("/")[0]
        for entry in manifest.shards:
            if "/" in entry.url or ":" in entry.url or "|" in entry.url or entry.index:
                self._shards.append(_shard(_named_by(path, entry.url), path, entry))
            else:
                made = Shard(f"{folder}/{entry.url}", entry.url, entry.nsamples, entry.filesize or None, entry.sha256)
                self._shards.append(made)

    def _add_folder(self, folder: str) -> None:
        if found := self._manifests(folder):
            splits = {path: manifest.split or split_of(path) for path, manifest in found.items()}
            self._chose = True
            path = choose_one(folder, splits, self._split)
            return self._add_manifest(path, found[path])
        files, folders = self._folders.look(folder) or (frozenset(), frozenset())
        tars = sorted((name for name in files if _is_tar(name) and not name.startswith(".")), key=natural)
        if not tars:
            there = some(sorted(files | folders, key=natural), 3)
            raise SourceError(f"{folder}: no manifest and no tar in it; it {'holds ' + there if there else 'is empty'}")
        named = [parse_shard_name(name) for name in tars]
        splits = {tar: part[0] if part and all(named) else "" for tar, part in zip(tars, named, strict=True)}
        self._chose = True
        self._shards += [Shard(f"{folder}/{name}", name) for name in choose(folder, splits, self._split)]
        return None

    def _manifests(self, folder: str) -> dict[str, Manifest]:
        """Return the manifests in a folder by path: `*shardindex.json`, else the few other JSONs that are wids shard indexes."""
        files, _ = self._folders.look(folder) or (frozenset(), None)
        names = sorted((name for name in files if name.endswith(".json") and not name.startswith(".")), key=natural)
        named = [name for name in names if name.endswith(MANIFEST_END)]
        if not named and len(names) <= _OTHER_JSON:
            named = [name for name in names if _is_wids(f"{folder}/{name}")]
        return {path: _read(path) for name in named for path in [f"{folder}/{name}"]}

    def _add_pattern(self, path: str) -> None:
        base, rest = self._literal_part(path)
        names = expand(rest, path)
        missing = [n for n in names if not self._add_existing(f"{base}/{n}") and not self._add_matches(base, n)]
        if not missing:
            return
        around = self._folders.around(base or "/", missing[0].partition("/")[0])
        if len(missing) > 1:
            raise SourceError(f"{path}: {len(missing)} of its names aren't there: {some(missing)}; {around}")
        looked_for = path if missing == [rest] else f"{path}: {base}/{missing[0]}"
        raise SourceError(f"{looked_for}: {'nothing matches' if _MAGIC.search(missing[0]) else 'not there'}; {around}")

    def _literal_part(self, path: str) -> tuple[str, str]:
        """Split a path into the folders that exist as they are written, and the pattern behind them."""
        parts = path.split("/")
        deepest = 1
        while deepest < len(parts) - 1 and self._folders.kind("/".join(parts[: deepest + 1])) == "folder":
            deepest += 1
        return "/".join(parts[:deepest]), "/".join(parts[deepest:])

    def _add_matches(self, base: str, pattern: str) -> bool:
        """Add what a glob matches: its tars, else its manifests, else its folders; tell whether that is anything."""
        root = Path(base or "/")
        try:
            found = [str(path.relative_to(root)) for path in root.glob(pattern)] if _MAGIC.search(pattern) else []
        except (ValueError, NotImplementedError, RecursionError) as error:
            raise SourceError(f"{base}/{pattern}: no pattern ({error}); '**' stands alone between slashes") from error
        visible = [name for name in sorted(found, key=natural) if not name.startswith(".") and "/." not in name]
        paths = [f"{base}/{name}" for name in visible]
        chosen = [path for path in paths if _is_tar(path)]
        chosen = chosen or [path for path in paths if path.endswith(".json") and _is_wids(path)]
        chosen = chosen or [path for path in paths if self._folders.kind(path) == "folder"]
        if visible and not chosen:
            raise SourceError(f"{base}/{pattern}: matches no tar, manifest or folder, only {some(visible)}")
        for path in chosen:
            self._add_existing(path)
        return bool(chosen)

    def number(self) -> None:
        """Give tars that were named without a manifest the numbers of the manifest beside them."""
        plain: dict[str, set[str]] = {}
        for shard in self._shards:
            if shard.samples is None:
                plain.setdefault(shard.path.rpartition("/")[0], set()).add(shard.name)
        numbers: dict[str, tuple[str, ShardEntry]] = {}
        for folder, names in plain.items():
            listings = [(path, manifest, _beside(manifest)) for path, manifest in self._manifests(folder or "/").items()]
            whole = [listing for listing in listings if names <= listing[2].keys()]
            for path, manifest, entries in whole[:1] or listings:
                if hits := names & entries.keys():
                    self._used[path] = manifest
                    numbers.update((f"{folder}/{name}", (path, entries[name])) for name in hits)
        if numbers:
            self._shards = [_shard(s.path, *numbers[s.path]) if s.path in numbers else s for s in self._shards]

    def check(self) -> None:
        """Refuse shards that are named twice, that aren't there, or are listed only in part; splits and classes that differ."""
        by_folder: dict[str, list[str]] = {}
        for shard in self._shards:
            by_folder.setdefault(shard.path[: -len(shard.name) - 1], []).append(shard.name)
        by_place: dict[str, list[str]] = {}
        for folder, names in by_folder.items():
            by_place.setdefault(os.path.realpath(folder or "/"), []).extend(names)
        again = {place: names for place, names in by_place.items() if len(set(names)) < len(names)}
        if twice := [f"{place}/{name}" for place, names in again.items() for name, count in Counter(names).items() if count > 1]:
            raise SourceError(f"shards are named more than once: {some(twice)}; name each once")
        if missing := self._missing(by_folder):
            raise SourceError("\n".join(missing))
        unlisted = [shard.path for shard in self._shards if shard.samples is None]
        if unlisted and len(unlisted) < len(self._shards):
            raise SourceError(
                f"{len(unlisted)} of {len(self._shards)} tars are in no manifest: {some(unlisted)}; the others are in "
                f"{some(list(self._used))}: leave these out, or name only tars without a manifest"
            )
        if unlisted and (cut := self._unfinished(set(by_folder))):
            raise SourceError(
                f"{some(cut)}: a build that didn't end left this, and no manifest lists the tars beside it: they are "
                "a part of a set; remove them and build again, or remove this file to read them as they are"
            )
        for path, manifest in self._used.items():
            if self._split and manifest.split not in ("", self._split):
                raise OptionsError(f"split={self._split!r}, but {path} is of split {manifest.split!r}: leave one of them out")
        if self._split and not self._chose and not any(manifest.split for manifest in self._used.values()):
            raise OptionsError(
                f"split={self._split!r}, but nothing tells the split of the tars that are named: name their folder or their "
                "manifest, or leave split out"
            )
        _check_classes(self._used)

    def _unfinished(self, folders: set[str]) -> list[str]:
        """Return the unfinished files of a build in folders."""
        listings = {folder: self._folders.look(folder or "/") for folder in folders}
        return [f"{f}/{name}" for f, found in listings.items() if found for name in sorted(found[0]) if name.endswith(PARTIAL)]

    def _missing(self, by_folder: dict[str, list[str]]) -> list[str]:
        lines = []
        for folder, names in ((folder or "/", names) for folder, names in by_folder.items()):
            files = (self._folders.look(folder) or (frozenset(), None))[0]
            if missing := [name for name in names if name not in files]:
                around = self._folders.around(folder, missing[0])
                lines.append(
                    f"{len(missing)} of {len(names)} shards that {some(list(self._used), 3)} lists aren't in {folder}: "
                    f"{some(missing)}; {around}: copy the missing ones, or pack the set again"
                )
        return lines

    def result(self) -> ShardSet:
        """Return the set."""
        found = list(self._used.values())
        names, splits = {m.name: None for m in found}, {m.split: None for m in found}
        folder = self._shards[0].path.rpartition("/")[0].rpartition("/")[2]
        return ShardSet(
            tuple(self._shards),
            found[0].classes if found else None,
            tuple(sorted({name for manifest in found for name in manifest.fields})),
            ", ".join(name for name in names if name) or folder,
            next(iter(splits)) if len(splits) == 1 else self._split or "",
        )


def _named_by(manifest: str, url: str) -> str:
    """Return the absolute path of what a manifest names."""
    where = local(url, f"{manifest}: ") if ":" in url or "|" in url else url
    return where if where.startswith("/") else f"{manifest.rpartition('/')[0]}/{where}"


def _shard(path: str, manifest: str, entry: ShardEntry) -> Shard:
    index = _named_by(manifest, entry.index) if entry.index else ""
    return Shard(path, path.rpartition("/")[2], entry.nsamples, entry.filesize or None, entry.sha256, index)


def _beside(manifest: Manifest) -> dict[str, ShardEntry]:
    """Return a manifest's shards by file name, but those of folders below its own."""
    return {entry.name: entry for entry in manifest.shards if "/" not in entry.url or ":" in entry.url or entry.url[0] == "/"}


def _read(path: str) -> Manifest:
    try:
        with open(open_regular(path), "rb") as file:  # noqa: PTH123
            return load(file.read(), path)
    except OSError as error:
        raise SourceError(f"{path}: can't be read ({error.strerror})") from error
    except ShardifyError as error:
        raise SourceError(str(error)) from error


def _is_wids(path: str) -> bool:
    """Tell whether a JSON is a wids shard index, by its head."""
    try:
        with open(open_regular(path), "rb") as file:  # noqa: PTH123
            return b"wids" in file.read(_HEAD_BYTES)
    except OSError:
        return False


def _is_tar(name: str) -> bool:
    return name.lower().endswith(".tar")


def _check_classes(used: dict[str, Manifest]) -> None:
    first = next(iter(used), "")
    for path, manifest in used.items():
        if manifest.classes != used[first].classes:
            raise SourceError(
                f"{path} numbers its classes otherwise than {first}: their labels can't be mixed; pack both in one build, "
                "so that they share one mapping"
            )
