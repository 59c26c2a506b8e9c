"""The dataset card beside the shards: a README whose `configs:` block makes the folder loadable with Hugging Face `datasets`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from shardify.format.manifest import Manifest

NAME = "README.md"
_SEAL = "<!-- written by shardify, sha256 of the lines above: {} -->\n"
_SEALED = re.compile(rb"<!-- written by shardify, sha256 of the lines above: ([0-9a-f]{64}) -->\n")


def dump(manifests: Sequence[Manifest]) -> bytes:
    """Return the card of a set, from its splits' manifests in order."""
    text = f"{_configs(manifests)}\n{_body(manifests)}\n".encode()
    return text + _SEAL.format(hashlib.sha256(text).hexdigest()).encode()


def is_ours(data: bytes) -> bool:
    """Tell whether a card stands as some release of shardify wrote it: not another's, not edited."""
    text, _, seal = data.removesuffix(b"\n").rpartition(b"\n")
    sealed = _SEALED.fullmatch(seal + b"\n")
    return sealed is not None and sealed[1].decode() == hashlib.sha256(text + b"\n").hexdigest()


def _configs(manifests: Sequence[Manifest]) -> str:
    """Return the front matter; without it `datasets` guesses, and loads a JSON beside one shard as the data."""
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for manifest in manifests:
        if manifest.shards:  # a pattern that matches nothing is an error there
            # A split's name there is of letters, digits and _.
            lines += [f"  - split: {manifest.split.replace('-', '_')}", f'    path: "{_pattern(manifest, manifests)}"']
    return "\n".join([*lines, "---"]) + "\n" if any(m.shards for m in manifests) else ""


def _pattern(manifest: Manifest, manifests: Sequence[Manifest]) -> str:
    """Return the glob of a split's shards, narrower where another split's name begins like it (`val` and `val-hard`)."""
    shared = any(other.split.startswith(f"{manifest.split}-") for other in manifests)
    return f"{manifest.split}-{'[0-9]' if shared else ''}*.tar"


def _body(manifests: Sequence[Manifest]) -> str:
    first, fields = manifests[0], sorted({field for manifest in manifests for field in manifest.fields})
    rows = [f"| {m.split} | {len(m.shards):,} | {m.samples:,} | {m.bytes:,} |" for m in manifests]
    labels = "labels as they were in the source" if first.classes is None else f"{len(first.classes):,} classes"
    lines = [
        f"# {_plain(first.name)}",
        "",
        f"Images and labels in tar shards (WebDataset layout), {labels}. A sample's fields: {', '.join(fields)}.",
        "",
        "| split | shards | samples | bytes |",
        "|---|--:|--:|--:|",
        *rows,
        "",
        "`<split>-shardindex.json` holds a split's shards with their sizes and SHA-256, and the classes in the order of their",
        "labels; `<split>-<number>.idx` is a shard's index in DALI's layout. `shardify verify` checks the folder.",
    ]
    if len(set(fields) - {"cls", "json"}) > 1:
        lines += ["", "Pictures are of several types, so samples differ in their fields; `datasets` may refuse to load them."]
    return "\n".join(lines) + "\n"


def _plain(name: str) -> str:
    """Return a name on one line, without what Markdown would take for markup."""
    return re.sub(r"([\\`*_<>\[\]#])", r"\\\1", " ".join(name.split()))
