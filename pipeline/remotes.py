"""Turns URLs into shards: a manifest, a tar, a brace pattern, a folder of an object store, or a list of those.

What a URL says is taken as it is, but that a relative name in a manifest is quoted once, for HTTP. Only manifests are fetched here,
and where no manifest tells the size of a shard, its server is asked; no shard is read. No message holds what a URL may hold of
secrets.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urljoin

from pipeline.braces import expand
from pipeline.errors import DeniedError, MissingError, OptionsError, SourceError, UncountedError
from pipeline.shardset import Shard, ShardSet
from pipeline.splits import MANIFEST_END, choose, choose_one, split_of
from pipeline.stores import Findable, Place
from pipeline.stores.folders import natural, some
from pipeline.stores.remote import addressing, finder, kind_of
from pipeline.stores.unpacking import CANT_BE_READ, coding_of, plain_name
from shardify.errors import ShardifyError
from shardify.format.manifest import Manifest, ShardEntry, load
from shardify.format.names import COMPRESSED, index_name, manifest_name, parse_shard_name

if TYPE_CHECKING:
    from pipeline.stores.http import HttpOptions
    from pipeline.stores.objects import ObjectOptions

_log = logging.getLogger(__name__)

_OTHER_JSON, _HEAD_BYTES = 16, 4096  # as in local folders
_MANIFEST_BYTES = 2**30  # a million shards are some 200 MB
_INTERNAL = (".localhost", ".localdomain", ".local", ".internal", ".intranet", ".lan", ".home", ".home.arpa", ".corp")
_WITH_IPV4 = tuple(ipaddress.IPv6Network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96"))
_AT_ONCE = 16  # questions for the size of a shard: of 1,000 shards 20 ms away sequential ones took 20 s


class _NoManifest(Exception):  # noqa: N818  (no error)
    """What came in place of one that need not be there is something else."""


def is_remote(text: str) -> bool:
    """Tell whether a text of the user's is a URL that is read over the network."""
    return kind_of(text) != ""


def find_remote(
    texts: Sequence[str],
    manifests: Mapping[str, Manifest],
    *,
    split: str | None = None,
    http: HttpOptions | None = None,
    objects: ObjectOptions | None = None,
) -> ShardSet:
    """Return the shards that URLs, and manifests that lie here (by path), name.

    Raises SourceError for what isn't there, UncountedError among them for compressed tars without a manifest, OptionsError for
    another split, and for URLs of several kinds of stores.
    """
    listed = [entry.url for manifest in manifests.values() for entry in manifest.shards if is_remote(entry.url)]
    kind, *others = dict.fromkeys(map(kind_of, (*texts, *listed)))
    if others:
        raise OptionsError(f"{kind}:// and {others[0]}:// can't be mixed in one set: name one kind, or make two loaders")
    address = addressing(kind, objects)
    with finder(kind, http, objects) as store:
        search = _Search(store, address, kind, split)
        for path, manifest in manifests.items():
            search.add_local(path, manifest)
        for text in texts:
            search.add(text.strip())
        return search.result()


class _Search:
    """Collects shards in the order in which they are named, and the manifests that tell of them."""

    def __init__(self, store: Findable, address: Callable[[str], Place], kind: str, split: str | None) -> None:
        self._store, self._split, self._address, self._kind = store, split, address, kind
        self._chose = False  # among the splits of a folder
        self._shards: list[Shard] = []
        self._versions: dict[str, str] = {}  # of shards that no manifest tells of
        self._used: dict[str, Manifest] = {}  # by what may be shown of their URLs
        self._beside: dict[str, Manifest | None] = {}  # what lies beside tars, by its URL

    def add(self, text: str) -> None:
        """Add what one text of the user points at."""
        shown = str(self._address(text))
        self._address(text).check()
        name = _name(text)
        if not name or (self._kind != "http" and "{" not in text and not name.lower().endswith((".json", ".tar", *COMPRESSED))):
            self._add_folder(text.rstrip("/") + "/", shown)
            return
        if name.lower().endswith(".json"):
            self._add_manifest(text, shown)
            return
        urls = list(expand(text, shown)) if "{" in text else [text]
        for url in urls:
            self._check_name(url)
        self._shards += self._numbered(urls)

    def add_local(self, path: str, manifest: Manifest) -> None:
        """Add what a manifest lists that lies here: its user's own, so that it may name any server."""
        self._used[path] = manifest
        for entry in manifest.shards:
            if not is_remote(entry.url):
                raise SourceError(f"{path}: lists local shards and URLs; list one kind, or make two sets of them")
            self._check_name(entry.url)
            if _queried(entry.url) and not entry.index:
                raise SourceError(
                    f"{path}: {self._address(entry.url)}: a query may sign its URL alone, so its index can't be asked for beside "
                    f'it: add "index": "{_index_name(_file_name(entry.url))}", a file beside this manifest, or a URL of its own'
                )
            index = _index_of(path, entry.index) or _beside(entry.url, _index_name(_name(entry.url)))
            self._shards.append(self._shard(entry.url, index, entry))

    def _check_name(self, url: str) -> None:
        name = _name(url).lower()
        if coding_of(name):
            return
        if name.endswith(COMPRESSED):
            raise SourceError(f"{self._address(url)}: {CANT_BE_READ}")
        if not name.endswith(".tar"):
            raise SourceError(f"{self._address(url)}: neither a tar nor a manifest (.json); name one of these")

    def _add_folder(self, folder: str, shown: str) -> None:
        """Add what a local folder of these names would give: the manifest of its split, else its tars."""
        names = self._store.names(folder)
        if not names:
            raise MissingError(f"{shown}: there is nothing in it, or no such folder; is the URL right, and the upload complete?")
        self._chose = True
        jsons = sorted((name for name in names if name.endswith(".json") and not name.startswith(".")), key=natural)
        named = [name for name in jsons if name.endswith(MANIFEST_END)]
        if not named and len(jsons) <= _OTHER_JSON:
            named = [name for name in jsons if (names[name].size or 0) <= _MANIFEST_BYTES and b"wids" in self._head(folder + name)]
        if found := {folder + name: self._fetch(folder + name, str(self._address(folder + name))) for name in named}:
            url = choose_one(shown, {url: manifest.split or split_of(url) for url, manifest in found.items()}, self._split)
            self._add_manifest(url, str(self._address(url)), found[url])
            return
        shown_names = [name for name in sorted(names, key=natural) if not name.startswith(".")]
        tars, packed = (
            [name for name in shown_names if name.lower().endswith(".tar")],
            [name for name in shown_names if coding_of(name)],
        )
        if tars and packed:
            raise SourceError(
                f"{shown}: holds plain tars and compressed ones ({some(packed, 3)}), and no manifest; name those that are meant, "
                "such as .../train-{000..127}.tar"
            )
        tars = tars or packed
        if not tars:
            raise SourceError(f"{shown}: no manifest and no tar in it; it holds {some(sorted(names, key=natural), 3)}")
        parsed = [parse_shard_name(plain_name(name)) for name in tars]
        splits = {tar: part[0] if part and all(parsed) else "" for tar, part in zip(tars, parsed, strict=True)}
        for name in choose(shown, splits, self._split):
            self._versions[self._address(folder + name).identity] = names[name].validator
            self._shards.append(self._shard(folder + name, folder + _index_name(name), None, names[name].size or 0))

    def _head(self, url: str) -> bytes:
        """Return the beginning of a small file, as what other tools leave beside shards is."""
        return self._store.fetch(url, _MANIFEST_BYTES)[:_HEAD_BYTES]

    def _add_manifest(self, url: str, shown: str, manifest: Manifest | None = None) -> None:
        manifest = self._fetch(url, shown) if manifest is None else manifest
        if not manifest.shards:
            raise SourceError(f"{shown}: lists no shards; write the set again")
        self._used[shown] = manifest
        for entry in manifest.shards:
            self._shards.append(self._listed(url, shown, entry))

    def _listed(self, manifest: str, shown: str, entry: ShardEntry) -> Shard:
        """Return a shard that a manifest lists; raises SourceError where it leads to where a stranger's manifest mustn't."""
        url = self._named_by(manifest, shown, entry.url)
        index = self._named_by(manifest, shown, entry.index) if entry.index else _beside(url, _index_name(_name(url)))
        self._check_name(url)
        return self._shard(url, index, entry)

    def _named_by(self, manifest: str, shown: str, name: str) -> str:
        if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", name):
            name = _beside(manifest, name)  # `//host/path` is another host's too
        there = self._address(name)
        if self._kind != "http":
            if kind_of(name) != self._kind or there.host != self._address(manifest).host:
                raise SourceError(f"{shown}: names {there}: a manifest in an object store may name objects of that store only")
            return name
        if kind_of(name) != "http":
            raise SourceError(f"{shown}: names {there}: a manifest over HTTP may name URLs of HTTP only")
        if there.host != self._address(manifest).host and _is_internal(there.host):
            raise SourceError(
                f"{shown}: names {there}, which is within this network and not where the manifest lies; if that is meant, name the "
                "shards themselves"
            )
        return name

    def _shard(self, url: str, index: str, entry: ShardEntry | None, size: int = 0) -> Shard:
        address = self._address(url)
        address.check()
        path, name = address.identity, _file_name(url)
        shown_index = self._address(index).identity if is_remote(index) else index
        if coding_of(name):
            _check_counted(path, entry)
        if entry is not None:
            return Shard(path, name, entry.nsamples, entry.filesize, entry.sha256, shown_index, url, index)
        return Shard(path, name, None, size, "", shown_index, url, index)

    def _ask_for_sizes(self) -> None:
        """Ask servers for the sizes that no manifest tells, many at once; raises what is wrong with the first shard of them."""
        unknown = [number for number, shard in enumerate(self._shards) if not shard.bytes]
        pool = ThreadPoolExecutor(_AT_ONCE if self._kind == "http" else 1)  # a finder is for one thread
        try:
            for number, size in zip(unknown, pool.map(self._size, [self._shards[n].url for n in unknown]), strict=True):
                self._shards[number] = replace(self._shards[number], bytes=size)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # the others' answers don't matter once one has failed

    def _size(self, url: str) -> int:
        found = self._store.look(url)
        self._versions[self._address(url).identity] = found.validator
        size = found.size
        if size is None:
            raise SourceError(f"{self._address(url)}: its server doesn't say how long it is; serve it with a Content-Length")
        return size

    def _numbered(self, urls: Sequence[str]) -> list[Shard]:
        """Return tars with the numbers of the manifest beside them, where there is one that lists them all."""
        splits = {parsed[0] for url in urls if (parsed := parse_shard_name(plain_name(_file_name(url))))}
        folders = {_beside(url, "") for url in urls}
        if len(splits) == len(folders) == 1 and not _queried(urls[0]):
            beside = _beside(urls[0], manifest_name(splits.pop()))
            shown = str(self._address(beside))
            if beside not in self._beside:  # asked for once, however many tars are listed
                try:
                    self._beside[beside] = self._fetch(beside, shown, optional=True)
                except (MissingError, DeniedError):
                    self._beside[beside] = None
                except _NoManifest:
                    self._beside[beside] = None
                    _log.warning("%s: a page came in place of a manifest; the tars are read without one", shown)
            manifest = self._beside[beside]
            entries = {} if manifest is None else {entry.name: entry for entry in manifest.shards}
            if manifest is not None and all(_file_name(url) in entries for url in urls):
                self._used[shown] = manifest
                return [self._shard(u, _beside(u, _index_name(_name(u))), entries[_file_name(u)]) for u in urls]
        return [self._shard(url, "" if _queried(url) else _beside(url, _index_name(_name(url))), None) for url in urls]

    def _fetch(self, url: str, shown: str, *, optional: bool = False) -> Manifest:
        """Return a manifest; raises _NoManifest for a page in place of an `optional` one: some answer each path so."""

        def is_json(head: bytes) -> bool:
            is_json = head.lstrip()[:1] in (b"{", b"[")
            if optional and not is_json:
                raise _NoManifest
            return is_json

        data = self._store.fetch(url, _MANIFEST_BYTES, expect=is_json)
        try:
            return load(data, shown)
        except ShardifyError as error:
            raise SourceError(str(error)) from error

    def result(self) -> ShardSet:
        """Return the set; raises SourceError for shards that are named twice, listed only in part, or whose classes differ."""
        self._ask_for_sizes()
        found = list(self._used.values())
        if twice := [path for path, count in Counter(shard.path for shard in self._shards).items() if count > 1]:
            raise SourceError(f"shards are named more than once: {some(twice)}; name each once")
        unlisted = [shard.path for shard in self._shards if shard.samples is None]
        if unlisted and len(unlisted) < len(self._shards):
            raise SourceError(
                f"{len(unlisted)} of {len(self._shards)} tars are in no manifest: {some(unlisted)}; the others are in "
                f"{some(list(self._used))}: leave these out, or name only tars without a manifest"
            )
        for shown, manifest in self._used.items():
            if manifest.classes != found[0].classes:
                raise SourceError(
                    f"{shown} numbers its classes otherwise than {next(iter(self._used))}: their labels can't be mixed; pack both "
                    "in one build, so that they share one mapping"
                )
            if self._split and manifest.split not in ("", self._split):
                raise OptionsError(f"split={self._split!r}, but {shown} is of split {manifest.split!r}: leave one of them out")
        if self._split and not self._chose and not any(manifest.split for manifest in found):
            raise OptionsError(f"split={self._split!r}, but nothing tells the split of what is named: leave split out")
        names, splits = {m.name: None for m in found}, {m.split: None for m in found}
        return ShardSet(
            tuple(replace(s, version=self._versions[s.path]) if s.path in self._versions else s for s in self._shards),
            found[0].classes if found else None,
            tuple(sorted({name for manifest in found for name in manifest.fields})),
            ", ".join(name for name in names if name) or self._shards[0].path.rpartition("/")[0].rpartition("/")[2],
            next(iter(splits)) if len(splits) == 1 else self._split or "",
        )


def _check_counted(path: str, entry: ShardEntry | None) -> None:
    """Raise UncountedError for a compressed tar of which nobody knows what it holds, as only reading it through tells."""
    if entry is None or not entry.filesize or not entry.sha256:
        known = "in no manifest" if entry is None else "in a manifest that doesn't say size and sha256 of what it unpacks to"
        raise UncountedError(
            f"{path}: compressed, and {known}: its samples can't be counted without reading it through; run `python -m pipeline "
            "index` with the URLs of the set once, and point at the manifest that it writes"
        )


def _index_name(name: str) -> str:
    """Return how a tar's index is called: a compressed one's as if it were plain."""
    return index_name(plain_name(name))


def _index_of(manifest: str, index: str) -> str:
    """Return where the index lies that a manifest on this machine names: at a URL, else beside the manifest or below."""
    return index if not index or is_remote(index) else os.path.join(os.path.dirname(manifest), index)  # noqa: PTH118, PTH120


def _name(url: str) -> str:
    """Return the last part of a URL's path, quoted as it is."""
    return _path(url).rpartition("/")[2]


def _file_name(url: str) -> str:
    """Return the last part of a URL's path, as a folder would list it."""
    return unquote(_name(url)) if kind_of(url) == "http" else _name(url)


def _path(url: str) -> str:
    """Return a URL without query and fragment; a key may hold what looks like these."""
    return re.split("[?#]", url, maxsplit=1)[0] if kind_of(url) == "http" else url


def _queried(url: str) -> bool:
    """Tell whether a URL has a query, which signs it alone."""
    return kind_of(url) == "http" and "?" in url


def _beside(url: str, name: str) -> str:
    """Return the URL of a name beside another: without that one's query, which signs it alone."""
    if kind_of(url) != "http":
        return url.rpartition("/")[0] + "/" + name
    try:
        quoted = quote(name, safe="/%", errors="surrogateescape")
    except UnicodeEncodeError:  # half of a character
        quoted = quote(name, safe="/%", errors="surrogatepass")
    return urljoin(_path(url), quoted or ".")


def _is_internal(host: str) -> bool:
    """Tell whether a host is one that only this network knows."""
    host = host.strip("[]").rstrip(".")
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        try:  # 127.1 and 0x7f000001 are addresses too
            found = ipaddress.ip_address(socket.inet_aton(host))
        except OSError:
            return "." not in host or host.endswith(_INTERNAL)
    if isinstance(found, ipaddress.IPv6Address):
        behind = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if any(found in net for net in _WITH_IPV4) else None
        inner = found.ipv4_mapped or found.sixtofour or behind
        return not found.is_global or found.is_multicast or (inner is not None and not inner.is_global)
    return not found.is_global or found.is_multicast
