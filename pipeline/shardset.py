"""The shards that the user pointed at, and what their manifests say of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardify.format.manifest import set_digest


@dataclass(frozen=True, slots=True)
class Shard:
    """One tar: its absolute path, its file name, and what a manifest says of it (None and "" where none does).

    `index`: the absolute path of its index, "" where that lies beside the tar.
    Of a remote one `path` is its URL without secrets, which messages may show; `url` and `index_url` are what is asked for.
    `version`: what tells its version from another, its ETag or date, where its server was asked.
    Its index may lie on this machine: then both `index` and `index_url` are its absolute path.
    """

    path: str
    name: str
    samples: int | None = None
    bytes: int | None = None
    sha256: str = ""
    index: str = ""
    url: str = field(default="", repr=False)
    index_url: str = field(default="", repr=False)
    version: str = ""


@dataclass(frozen=True, slots=True)
class ShardSet:
    """The shards of a set in order, and what their manifests say: class names by index (None: labels are used as they are)."""

    shards: tuple[Shard, ...]
    classes: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ()
    name: str = ""
    split: str = ""

    @property
    def samples(self) -> int | None:
        """The number of samples, None where that of a shard isn't known."""
        counts = [shard.samples for shard in self.shards if shard.samples is not None]
        return sum(counts) if len(counts) == len(self.shards) else None

    @property
    def digest(self) -> str:
        """The set's identity in hex, over (shard name, samples, sha256) in order: its manifest's, wherever the set lies."""
        return set_digest((s.name, -1 if s.samples is None else s.samples, s.sha256) for s in self.shards)
