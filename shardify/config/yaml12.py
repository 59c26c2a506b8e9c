"""Reads YAML by the scalar rules of version 1.2, and knows the line of every key.

PyYAML follows version 1.1, where `no` is false, 010 is eight, 1:30 is ninety and 2020-01-01 is a date, and it takes the last of two
equal keys in silence. Here these are a text, ten, a text and a text, and a key twice is an error.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from shardify.errors import SettingsError

Lines = dict[tuple[str, ...], int]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - yaml reads it from the class


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _construct_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    """Return a text; JSON writes what lies beyond 16 bits as two halves, which are one character."""
    text = str(loader.construct_scalar(node))
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16") if not text.isascii() else text
    except UnicodeDecodeError:
        raise yaml.constructor.ConstructorError(problem="half of a character", problem_mark=node.start_mark) from None


_RESOLVERS = (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?[0-9]{1,4000}|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", "<<", ["<"]),
)
for _kind, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)


def parse(text: str | bytes, name: str) -> tuple[Any, Lines]:
    """Return a document's data and the line (from 1) of each key by its path; raises SettingsError with `name` and line."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: Lines = {}
        _survey(node, (), lines, ())
        return (None if node is None else loader.construct_document(node)), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = name if mark is None else f"{name} line {mark.line + 1}"
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise SettingsError(f"{place}: {said or 'no valid YAML'}; correct the YAML") from error
    except yaml.reader.ReaderError as error:
        raise SettingsError(f"{name}: no YAML text ({error.reason} at position {error.position}); write it as UTF-8") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"{name}: no valid YAML ({str(error).splitlines()[0]}); correct the YAML") from error


def _survey(node: yaml.Node | None, path: tuple[str, ...], lines: Lines, above: tuple[yaml.Node, ...]) -> None:
    """Note the line of each key below `node`; refuse a key twice, and a value that holds itself."""
    if any(node is outer for outer in above):
        raise yaml.constructor.ConstructorError(problem="an alias to what it stands in", problem_mark=above[-1].start_mark)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _survey(item, path, lines, (*above, node))
    elif isinstance(node, yaml.MappingNode):
        _check_keys(node)
        for key, value in node.value:
            below = (*path, str(key.value))
            lines[below] = key.start_mark.line + 1
            _survey(value, below, lines, (*above, node))


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
