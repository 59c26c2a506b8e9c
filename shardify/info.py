"""Says what a packed set holds, from its manifests alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardify.errors import FormatError, SettingsError, naming
from shardify.format import manifest
from shardify.format.manifest import Manifest
from shardify.format.names import manifest_name


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """What a split's manifest states; sizes in bytes, `classes` None where labels are used as they are."""

    name: str
    shards: int
    samples: int
    bytes: int
    largest_shard: int
    mean_sample: int
    classes: int | None
    fields: tuple[str, ...]
    skipped: Mapping[str, int]
    opencv: str | None
    digest: str

    @property
    def left_out(self) -> int:
        """How many pictures were skipped, for whatever cause."""
        return sum(self.skipped.values())


def describe(path: Path) -> dict[str, SplitFacts]:
    """Return the facts by split of a folder, or of the one split of a manifest.

    Raises SettingsError where nothing is at `path`, FormatError where no manifest is, StorageError where it can't be read.
    """
    if not path.exists():
        raise SettingsError(f"{path}: no such folder or manifest; point at a packed set")
    with naming(path):
        found = [(file, manifest.read(file)) for file in manifest.find(path)]
    if not found:
        raise FormatError(f"{path}: no {manifest_name('<split>')}; the build didn't end, or this is no packed set")
    return {made.split or file.name: _facts(made) for file, made in found}


def _facts(made: Manifest) -> SplitFacts:
    return SplitFacts(
        name=made.name,
        shards=len(made.shards),
        samples=made.samples,
        bytes=made.bytes,
        largest_shard=max((shard.filesize for shard in made.shards), default=0),
        mean_sample=made.bytes // made.samples if made.samples else 0,
        classes=None if made.classes is None else len(made.classes),
        fields=made.fields,
        skipped={cause: skipped.count for cause, skipped in made.skipped.items()},
        opencv=made.opencv,
        digest=made.digest,
    )
