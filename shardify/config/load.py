"""Turns a settings file and its overrides into a checked BuildConfig, or into one error that lists all that is wrong.

    YAML -> overrides (--source, --out, --work, --seed, --set) -> absolute paths -> models

A path in the file is relative to the file; a path in an override is relative to the current folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardify.config import yaml12
from shardify.config.explain import explain
from shardify.config.models import BuildConfig
from shardify.config.places import is_url
from shardify.errors import SettingsError, StorageError
from shardify.format.names import without_secrets

_PATHS: tuple[tuple[str, ...], ...] = (("source", "root"), ("shards", "out"), ("spool",), ("work",), ("store", "ca"))


@dataclass(frozen=True, slots=True)
class _Override:
    """One setting given on the command line, and the text that gave it."""

    key: tuple[str, ...]
    value: Any
    said: str


def load(
    path: Path,
    *,
    source: str | None = None,
    out: str | None = None,
    work: str | None = None,
    seed: int | None = None,
    sets: Sequence[str] = (),
) -> BuildConfig:
    """Read a settings file; the others replace source.root, shards.out, work, order.seed and (`sets`: "key=value") any key.

    Raises SettingsError, which lists every problem with its line or its argument.
    """
    data, lines = yaml12.parse(_read(path), str(path))
    if not isinstance(data, dict):
        raise SettingsError(
            f"{path}: {'empty' if data is None else 'no mapping'}; a settings file holds lines such as 'name: glr2020'"
        )
    overrides = [_parse_set(text) for text in sets]
    named = ((("source", "root"), source, "--source"), (("shards", "out"), out, "--out"), (("work",), work, "--work"))
    numbers = ((("order", "seed"), seed, "--seed"),)
    overrides += [
        _Override(key, value, without_secrets(f"{option} {value}"))
        for key, value, option in (*named, *numbers)
        if value is not None
    ]
    for override in overrides:
        data = _with(data, override.key, override)
    for key in _PATHS:
        given = _given(overrides, key)
        data = _with_absolute(data, key, Path.cwd() if given else path.absolute().parent)
    try:
        return BuildConfig.model_validate(data)
    except ValidationError as error:
        problems = explain(error)
        raise SettingsError("\n".join(f"{_place(path, lines, overrides, key)}: {text}" for key, text in problems)) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such settings file; see configs/ for examples") from None
    except IsADirectoryError:
        raise SettingsError(f"{path}: a folder, not a settings file; name the YAML file in it") from None
    except OSError as error:
        raise StorageError(f"{path}: can't be read ({error.strerror}); check the file and its permissions") from error


def _parse_set(text: str) -> _Override:
    dotted, equals, value = text.partition("=")
    key = tuple(dotted.strip().split("."))
    if not equals or not all(key):
        raise SettingsError(f"--set {text}: no key=value; write for example --set shards.size=8MiB")
    try:
        said = without_secrets(f"--set {text}")
        return _Override(key, yaml12.parse(value, said)[0], said)
    except SettingsError as error:
        raise SettingsError(f"{error}, or put the value in quotes: --set '{dotted}=\"...\"'") from error


def _with(data: Any, key: tuple[str, ...], override: _Override) -> Any:
    """Return a copy of `data` in which `key` has the override's value; mappings on the way are made where there is none."""
    if not key:
        return override.value
    if data is None:
        data = {}
    if not isinstance(data, dict):
        above = ".".join(override.key[: -len(key)])
        raise SettingsError(f"{override.said}: {above} is {data!r}, which has no keys; set {above} itself")
    return data | {key[0]: _with(data.get(key[0]), key[1:], override)}


def _given(overrides: Sequence[_Override], key: tuple[str, ...]) -> _Override | None:
    """Find the last override that set `key`, a mapping around it, or something within it."""
    return next((o for o in reversed(overrides) if key[: len(o.key)] == o.key or o.key[: len(key)] == key), None)


def _with_absolute(data: Mapping[str, Any], key: tuple[str, ...], base: Path) -> dict[str, Any]:
    """Return `data` with the path at `key` made absolute; what isn't a path is left to the models' own checks."""
    value = data.get(key[0])
    if len(key) > 1:
        return {**data, key[0]: _with_absolute(value, key[1:], base)} if isinstance(value, dict) else dict(data)
    if not isinstance(value, str) or not value or "\0" in value or (key == ("out",) and is_url(value)):
        return dict(data)
    try:
        path = Path(value).expanduser() if value.startswith("~") else Path(value)
        return {**data, key[0]: (base / path).resolve()}
    except (OSError, RuntimeError) as error:
        raise SettingsError(f"{key[0]}: {value!r} leads nowhere ({error}); correct the path") from error


def _place(path: Path, lines: yaml12.Lines, overrides: Sequence[_Override], key: tuple[str, ...]) -> str:
    """Say where `key` was given: the argument, else the line of it or of what stands around it."""
    override = _given(overrides, key)
    if override is not None:
        return override.said
    line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
    return str(path) if line is None else f"{path} line {line}"
