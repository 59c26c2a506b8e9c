"""Finds what draws at random inside a callable of the user's: transforms and generators that it holds, or names as globals.

albumentations' transforms and numpy's generators have states of their own, which seeding `random`, numpy and torch doesn't reach.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from albumentations.core.composition import BaseCompose
from albumentations.core.transforms_interface import BasicTransform

_MOST = 2000  # things that are looked at, in all and of those that one thing holds: whoever holds more than that holds data
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PLAIN = (type, types.ModuleType, str, bytes, int, float, complex, np.ndarray, np.generic, torch.Tensor, torch.nn.Module)

Pair: TypeAlias = tuple[np.random.Generator, random.Random]


class Hidden:
    """The transforms and generators in a callable; `but`: generators that are seeded elsewhere."""

    def __init__(self, things: Iterable[Any], but: Iterable[Any] = ()) -> None:
        known = set(map(id, but))
        found = [thing for thing in _found(things) if id(thing) not in known]
        self._transforms = [thing for thing in found if not isinstance(thing, _GENERATORS)]
        self._generators = [thing for thing in found if isinstance(thing, _GENERATORS)]

    def __bool__(self) -> bool:
        return bool(self._transforms or self._generators)

    @contextmanager
    def seeded(self, seed: int, pair: Pair, *, restore: bool) -> Iterator[None]:
        """Let all draw what follows from a seed, the transforms from one pair of generators; afterwards as before, if asked to."""
        before = [(part, part.random_generator, part.py_random) for part in self._parts()] if restore else []
        states = [_state(thing) for thing in self._generators] if restore else []
        for transform in self._transforms:
            transform.set_random_state(*pair)
        for generator in self._generators:
            _seed(generator, seed)
        try:
            yield
        finally:
            for part, numpys, pythons in before:
                part.random_generator, part.py_random = numpys, pythons
            for generator, state in zip(self._generators, states, strict=False):
                _set_state(generator, state)

    def _parts(self) -> Iterator[Any]:
        waiting = list(self._transforms)
        while waiting:
            part = waiting.pop()
            yield part
            waiting += [inner for inner in getattr(part, "transforms", ()) if isinstance(inner, BasicTransform | BaseCompose)]


def _found(things: Iterable[Any]) -> list[Any]:
    """Return the transforms and generators among things and in what they hold, outermost first."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = deque(things)
    kept = list[Any]()  # what is made on the way, so that no other thing gets its identity
    while waiting and len(seen) < _MOST:
        thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kept.append(thing)
        if isinstance(thing, (BasicTransform, BaseCompose, *_GENERATORS)):
            found.append(thing)
        else:
            waiting += (one for one in islice(_held(thing), _MOST) if one is not None and not isinstance(one, _PLAIN))
    return found


def _held(thing: Any) -> Iterable[Any]:
    """Return what a thing holds in which a transform may be."""
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        return [*_cells(thing), *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), *_named(thing)]
    if isinstance(thing, dict):
        return thing.values()
    if isinstance(thing, list | tuple | set | frozenset):
        return thing
    slots = [getattr(thing, name, None) for kind in type(thing).__mro__ for name in _slots(kind)]
    calls = [vars(kind).get("__call__") for kind in type(thing).__mro__]
    own = [call for call in calls if isinstance(call, types.FunctionType)]
    return [*getattr(thing, "__dict__", {}).values(), *slots, *own]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue


def _named(function: types.FunctionType) -> Iterator[Any]:
    """Yield the globals that a function names; of other functions those of its own module."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        for name in code.co_names:
            thing = function.__globals__.get(name)
            if not isinstance(thing, types.FunctionType) or thing.__globals__ is function.__globals__:
                yield thing


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    else:
        generator.seed(seed)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
