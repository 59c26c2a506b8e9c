"""Turns class folders into items: each picture below root/<class>/ is a sample of that class.

    root/cat/a.jpg        id cat/a, label cat
    root/cat/b/c.JPEG     id cat/b/c, label cat
    root/dog/d.jpg        ids dog/d.jpg and dog/d.png: where two pictures differ by extension only, the ids keep it
    root/dog/d.png

Where splits are texts, each is a folder of its own, root/<text>/<class>/, and classes of one name are one class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np

from shardify.config import BuildConfig, FoldersSource
from shardify.config.explain import did_you_mean
from shardify.errors import DataError, SettingsError
from shardify.items import LEFT_OUT, Items
from shardify.sources.columns import factorize, repeats
from shardify.sources.identity import clashes, to_keys
from shardify.sources.labels import refuse, to_labels
from shardify.sources.texts import Texts
from shardify.sources.walk import EXTENSIONS, Walk

_SPLIT_WORDS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing"))


def read_folders(config: BuildConfig, source: FoldersSource) -> Items:
    """List the class folders of a build; raises DataError where there is nothing to pack or two files give one sample."""
    root = source.root.resolve()
    walk = Walk(str(root), anywhere=source.links == "anywhere")
    folders = _split_folders(config.splits, root) if config.own_tables else [""]
    parts = [walk.pictures(folder) for folder in folders]
    paths = Texts.of(chain(*parts))
    if not all(parts) and not (walk.lost and source.missing == "error"):
        raise DataError(_nothing(root, [folder for folder, part in zip(folders, parts, strict=True) if not part], walk))
    if walk.lost and source.missing == "error":
        raise DataError(
            f"{root}: {len(walk.lost):,} links lead out of source.root, or to nothing; source.links: anywhere follows the former, "
            "source.missing: skip leaves them out",
            [f"{path!r}: {why}" for path, why in sorted(walk.lost.items())],
        )
    numbers, distinct = factorize(
        Texts.of(path[len(f) :].partition("/")[0] for f, part in zip(folders, parts, strict=True) for path in part)
    )
    keys, ids = to_keys(make_ids(paths))
    problems = [f"{paths[row]!r}: {reason}" for row, reason in clashes(keys, ids, lambda row: repr(paths[row]))]
    problems += [f"class folder {name!r}: {reason}" for name in distinct if (reason := refuse(name, source.labels))]
    if problems:
        count = f"{len(problems):,} problem{'s' if len(problems) > 1 else ''}"
        raise DataError(f"{root}: {count}; correct the folders or the settings", problems)
    splits = np.repeat(np.arange(len(parts), dtype=np.int16), [len(part) for part in parts])
    labels, classes = to_labels(numbers, distinct, source.labels)
    return Items(
        root=str(root),
        keys=keys,
        ids=ids,
        paths=paths,
        labels=labels,
        classes=classes,
        split_names=tuple(config.splits),
        splits=splits if config.own_tables else np.full(len(paths), LEFT_OUT, dtype=np.int16),
        notes=tuple(_notes(walk, distinct, config)),
    )


def make_ids(paths: Sequence[str]) -> Texts:
    """Return each path without its extension, but whole where others would have the same id."""
    whole: set[int] = set()
    while True:
        ids = Texts.of(path if row in whole else os.path.splitext(path)[0] for row, path in enumerate(paths))  # noqa: PTH122 - no Path object for each of millions of names
        shared = {row for pair in repeats(ids) for row in pair if ids[row] != paths[row]}
        if not shared:
            return ids
        whole |= shared


def _split_folders(splits: Mapping[str, float | str], root: Path) -> list[str]:
    """Return each split's folder, relative to root and with a slash at its end."""
    there = sorted(path.name for path in root.iterdir() if path.is_dir())
    folders, wrong = [], []
    for name, value in splits.items():
        folder = PurePosixPath(str(value))
        if folder.is_absolute() or ".." in folder.parts:
            wrong.append(f"splits.{name}: {value!r} isn't below source.root")
        elif not (root / folder).is_dir():
            wrong.append(f"splits.{name}: no folder {value!r} there{did_you_mean(str(value), there)}")
        folders.append(f"{folder}/" if folder.parts else "")
    if wrong:
        raise SettingsError(
            f"{root} holds the folders {', '.join(map(repr, there)) or '(none)'}, but {'; '.join(wrong)}; "
            "where these are the classes, let shares draw the splits: splits: {train: 0.9, val: 0.1}"
        )
    return folders


def _left_out(walk: Walk) -> str:
    return ", ".join(f"{cause}: {count:,}" for cause, count in sorted(walk.left_out.items()))


def _nothing(root: Path, folders: Sequence[str], walk: Walk) -> str:
    places = ", ".join(f"{root}/{folder}<class>/" for folder in folders)
    seen = f"{len(walk.classes)} class folders" + (f"; left out: {_left_out(walk)}" if walk.left_out else "")
    return f"no picture found below {places} (extensions {', '.join(sorted(EXTENSIONS))}, in any case); there are {seen}"


def _notes(walk: Walk, distinct: Sequence[str], config: BuildConfig) -> Iterator[str]:
    if walk.left_out:
        yield f"{sum(walk.left_out.values()):,} entries that are no pictures to pack ({_left_out(walk)})"
    empty = sorted(walk.classes - set(distinct))
    if empty:
        yield f"{len(empty):,} class folders hold no picture and are no classes: {', '.join(map(repr, empty[:10]))}"
    if not config.own_tables and _SPLIT_WORDS.issuperset(name.lower() for name in distinct):
        yield f"the classes are named {', '.join(map(repr, sorted(distinct)))}: for splits, write splits: {{train: train, ...}}"
