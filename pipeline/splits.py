"""PURE: chooses among the splits of a folder, wherever that lies."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from pipeline.errors import OptionsError
from pipeline.stores.folders import natural, some

MANIFEST_END = "shardindex.json"


def choose(folder: str, splits: Mapping[str, str], asked: str | None) -> list[str]:
    """Return those names whose split was asked for; all, where there is but one split. Raises OptionsError for any other."""
    names = sorted(set(splits.values()), key=natural)
    if asked in names or (len(names) == 1 and asked is None):
        return [name for name, split in splits.items() if asked in (None, split)]
    shown = some([name or "(one without a name)" for name in names])
    if asked is None:
        raise OptionsError(
            f"{folder} holds the splits {shown}: name one by LoaderOptions(split=...) or --split, or point at its files"
        )
    near = difflib.get_close_matches(asked, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise OptionsError(f"{folder} has no split {asked!r}{hint}; it holds {shown}")


def choose_one(folder: str, splits: Mapping[str, str], asked: str | None) -> str:
    """Return the manifest of the split that was asked for; raises OptionsError where there are several."""
    path, *more = choose(folder, splits, asked)
    if more:
        raise OptionsError(f"{folder} holds several manifests of split {splits[path]!r}: name one of {some([path, *more])}")
    return path


def split_of(manifest: str) -> str:
    """Return the split that a manifest's file name tells, "" for none."""
    return manifest.rpartition("/")[2].removesuffix(MANIFEST_END).rstrip("-")
