"""Finds the tars that the user names, and says what belongs to each: its split, its index's place, their names in a manifest.

    train-{000..127}.tar, folder, a.tar  ->  tars in order  ->  a Target a split: manifest, tars, indexes

Only names are looked at here; no tar is opened and nothing is written.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import braceexpand

from shardify.errors import SettingsError
from shardify.format.names import COMPRESSED, index_name, is_split, manifest_name, split_of

_EXPANSIONS = 1_000_000  # braceexpand makes all names at once: more is a slip, and would take minutes
_DIGITS = 18  # of a number in a pattern; more is no count of tars
_SHOWN = 5
_RANGE = re.compile(r"\{(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?([0-9]+))?\}")
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Tar:
    """One tar and the place of its index; `url` and `index_url` name them in the manifest ("": the index lies beside the tar)."""

    path: Path
    index: Path
    url: str
    index_url: str


@dataclass(frozen=True, slots=True)
class Target:
    """One split: the place of its manifest, and its tars in order."""

    split: str
    manifest: Path
    tars: tuple[Tar, ...]


def find(texts: Sequence[str]) -> list[Path]:
    """Return the tars that `texts` name: files as given, a folder's in natural order, braces and globs as a shell expands them.

    Raises SettingsError with everything that can't be used: what isn't there, isn't a tar, or is named twice.
    """
    found: list[Path] = []
    wrong: list[str] = []
    for text in texts:
        named = list(_named(text))
        found += [path for path in named if _is_tar(path)]
        wrong += [_reason(path, text) for path in named if not _is_tar(path)]
    times = Counter(_real(path) for path in found)
    wrong += [f"{path}: named {count} times; name it once" for path, count in times.items() if count > 1]
    if wrong:
        more = len(wrong) - _SHOWN
        raise SettingsError("; ".join(wrong[:_SHOWN]) + (f"; and {more:,} more like these" if more > 0 else ""))
    return found


def arrange(paths: Sequence[Path], *, split: str | None, out: Path | None) -> list[Target]:
    """Return a target for each split of `paths`: all in `split`, or by the names where those tell.

    Indexes lie beside the tars and the manifest in the deepest folder that holds all of them; with `out` both lie there, indexes
    in the same folders as the tars. Raises SettingsError where names tell no split, or nothing but the root holds all tars.
    """
    splits = [split] * len(paths) if split is not None else _splits(paths)
    if odd := sorted({name for name in splits if not is_split(name)}):
        raise SettingsError(f"{odd[0]!r} can't name a split: letters, digits, - and _, at most 60; name it by --split")
    if urls := [str(path) for path in paths if "?" in path.name]:
        raise SettingsError(f"{_some(urls)}: a reader takes what follows a question mark for a URL's query; rename it")
    folders = [_real(path).parent for path in paths]
    common = Path(os.path.commonpath(folders))
    if out is None and common == Path(common.anchor) and len(set(folders)) > 1:
        raise SettingsError(
            f"the tars lie in {_some([str(f) for f in dict.fromkeys(folders)])}: say by --out where the manifest goes"
        )
    base = common if out is None else out.resolve()
    tars = [_place(path, folder, common, None if out is None else base) for path, folder in zip(paths, folders, strict=True)]
    return [
        Target(name, base / manifest_name(name), tuple(tar for tar, own in zip(tars, splits, strict=True) if own == name))
        for name in dict.fromkeys(splits)
    ]


def _place(path: Path, folder: Path, common: Path, out: Path | None) -> Tar:
    if out is None:
        return Tar(path, path.with_name(index_name(path.name)), (folder.relative_to(common) / path.name).as_posix(), "")
    place = out / folder.relative_to(common) / index_name(path.name)
    url = Path(os.path.relpath(folder, out), path.name).as_posix()
    return Tar(path, place, url, "" if place.parent == folder else place.relative_to(out).as_posix())


def _real(path: Path) -> Path:
    """Return a tar's path through real folders; its own name stays, as that of a link into a cache of blobs says what it is."""
    return path.parent.resolve() / path.name


def _splits(paths: Sequence[Path]) -> list[str]:
    """Return each tar's split by its name."""
    names = [split_of(path.stem) for path in paths]
    if len(paths) == 1 and not names[0]:
        return [paths[0].stem]
    if nameless := [path.name for path, name in zip(paths, names, strict=True) if not name]:
        raise SettingsError(f"{_some(nameless)}: the names don't say which split this is; name it, such as --split train")
    return names


def _named(text: str) -> Iterator[Path]:
    """Yield what a text names, whether it is there or not."""
    if _is_there(text):
        return _existing(Path(text))
    groups = _RANGE.findall(text)
    far = any(len(number) > _DIGITS for group in groups for number in group)
    if far or math.prod(abs(int(a) - int(b)) // max(1, int(step or 1)) + 1 for a, b, step in groups) > _EXPANSIONS:
        raise SettingsError(f"{text[:200]}: gives more than {_EXPANSIONS:,} names; name the folder instead")
    try:
        return (path for name in list(braceexpand.braceexpand(text, escape=False)) for path in _existing_or_matching(name))
    except ValueError as error:
        raise SettingsError(f"{text}: isn't there, and as a pattern its braces don't pair; write {{000..009}}") from error


def _is_there(name: str) -> bool:
    return os.path.exists(name)  # noqa: PTH110 - Path's own raises for a pattern that is longer than a name may be


def _existing_or_matching(name: str) -> Iterator[Path]:
    if _is_there(name):
        return _existing(Path(name))
    matches = glob.glob(name, recursive=True) if _MAGIC.search(name) else []  # noqa: PTH207 - Path's own raises for a**
    return iter([Path(match) for match in sorted(matches, key=_natural) if _is_tar(Path(match))] or [Path(name)])


def _existing(path: Path) -> Iterator[Path]:
    """Yield a file itself, or a folder's tars; the folder itself where it holds none."""
    if not path.is_dir():
        return iter([path])
    tars = [file for file in path.iterdir() if _is_tar(file) and not file.name.startswith(".")]
    return iter(sorted(tars, key=lambda file: _natural(file.name)) or [path])


def _is_tar(path: Path) -> bool:
    return path.name.lower().endswith(".tar") and os.path.isfile(path)  # noqa: PTH113 - as in _is_there


def _reason(path: Path, text: str) -> str:
    """Say why a path is no tar to index."""
    if not _is_there(str(path)):
        return f"{path}: not there" + (f" (from {text})" if str(path) != text else "")
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir())
        if squeezed := [name for name in inside if name.lower().endswith(COMPRESSED)]:
            return f"{path}: holds compressed files ({_some(squeezed)}) and no .tar; unpack them to plain tars"
        return f"{path}: no .tar in it; it {'holds ' + _some(inside) if inside else 'is empty'}"
    if path.name.lower().endswith(COMPRESSED):
        return f"{path}: compressed, so that samples can't be read by offset; unpack it to a plain .tar"
    if not path.is_file():
        return f"{path}: not a regular file; copy it to one"
    return f"{path}: not called .tar, and readers go by that; rename it or leave it out"


def _natural(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Return the key that sorts numbers in names by value: 2.tar before 10.tar."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part], name


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
