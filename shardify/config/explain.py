"""Puts what the models refuse into words: the setting, what is wrong with it, what is allowed, the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardify.config.models import BuildConfig, CsvSource, Encode, FoldersSource, Order, Resize, Shards, Store
from shardify.format.names import without_secrets

Problem = tuple[tuple[str, ...], str]

# Where each model stands: in pydantic's locations a source has its kind behind its name.
_MODELS: dict[tuple[str, ...], type[BaseModel]] = {
    (): BuildConfig,
    ("source", "csv"): CsvSource,
    ("source", "folders"): FoldersSource,
    ("order",): Order,
    ("encode",): Encode,
    ("encode", "resize"): Resize,
    ("shards",): Shards,
    ("store",): Store,
}
_MUST = {
    "string_type": "must be text (put it in quotes)",
    "path_type": "must be the path of a folder",
    "invalid_key": "keys must be text (put it in quotes)",
} | dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a mapping of settings")
_EXAMPLES: dict[tuple[str, ...], str] = {
    ("name",): ", such as name: my-set",
    ("source",): ", such as source: {kind: folders, root: /data/my-set}",
    ("splits",): ", such as splits: {train: 0.9, val: 0.1}",
    ("shards",): ", such as shards: {out: ../shards/my-set}",
}


def explain(error: ValidationError) -> list[Problem]:
    """Return each problem as (key, text), in the order of the models; the text begins with the key as it is written in --set."""
    found = []
    for details in error.errors(include_url=False):
        location = tuple(str(part) for part in details["loc"])
        key = _key(location)
        if details["type"].startswith("union_tag"):
            key = (*key, "kind")
        text = _text(details, location)
        found.append((key, f"{'.'.join(key)}: {text}" if key else text))
    return found


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the nearest of `names`, one of the same letters in any case first (lable: label, not table); "" where none is near."""
    listed = list(names)
    same = [other for other in listed if sorted(other.lower()) == sorted(name.lower())]
    return next(iter(same or difflib.get_close_matches(name, listed, 1)), "")


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return ", did you mean 'x'?" for the nearest of `names`, or `otherwise` where none is near."""
    close = nearest(name, names)
    return f", did you mean {close!r}?" if close else otherwise


def _key(location: tuple[str, ...]) -> tuple[str, ...]:
    parts = location[:1] + location[2:] if location[:1] == ("source",) and location[:2] in _MODELS else location
    return tuple(part for part in parts if part != "[key]")


def _text(details: ErrorDetails, location: tuple[str, ...]) -> str:
    """Say what is wrong with a value, and what would be right."""
    kind, got, context = details["type"], _short(details["input"]), details.get("ctx", {})
    if kind == "extra_forbidden":
        text = _unknown(location)
    elif kind == "missing":
        text = f"is missing; add it{_EXAMPLES.get(location, '')}"
    elif kind.startswith("union_tag"):
        text = _choice(context.get("tag"), ["csv", "folders"])
    elif kind == "literal_error":
        text = _choice(details["input"], context["expected"].replace("'", "").replace(" or ", ", ").split(", "))
    elif kind == "value_error":
        text = str(context["error"]) + (f", got {got}" if not isinstance(details["input"], dict | BaseModel) else "")
    else:
        text = f"{_MUST.get(kind, details['msg'].replace('Input should', 'must'))}, got {got}"
    return text


def _unknown(location: tuple[str, ...]) -> str:
    """Name the nearest setting of the same mapping, else of any, and all that are allowed here."""
    here, name = location[:-1], location[-1]
    allowed = list(_MODELS[here].model_fields)
    elsewhere = {field: ".".join((*_key(where), field)) for where, model in _MODELS.items() for field in model.model_fields}
    close = nearest(name, allowed) or elsewhere.get(nearest(name, elsewhere))
    if close == ".".join((*_key(here), name)):  # a setting of the other kind of source
        return f"isn't a setting of this kind; allowed are {', '.join(allowed)}"
    hint = f", did you mean {close!r}?" if close else ";"
    return f"unknown setting{hint} Allowed {'in ' + '.'.join(_key(here)) if here else 'here'}: {', '.join(allowed)}"


def _choice(value: object, allowed: list[str]) -> str:
    hint = did_you_mean(str(value), allowed, otherwise=";")
    return f"{'is missing' if value is None else f'got {_short(value)}'}{hint} Allowed: {', '.join(allowed)}"


def _short(value: object) -> str:
    text = without_secrets(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
