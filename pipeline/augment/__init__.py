"""Applies the user's transform to each sample, under a seed that follows from (seed, epoch, key, occurrence) alone.

This is the door to albumentations. A last standard `Normalize` is taken out of the workers' copy: the device does it for a whole
batch. The user's transform is copied, never changed.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import OptionsError, TransformError
from pipeline.items import Normalization, OnFault, Sample, Sides

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else the import asks the network for a newer version
import albumentations as A
import torch
from albumentations.core.composition import BaseCompose
from albumentations.core.transforms_interface import BasicTransform

from pipeline.augment.compiled import is_own, on_pictures, parts_of
from pipeline.augment.crops import Foresight
from pipeline.augment.hidden import Hidden


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transform ready for the workers.

    apply           what the workers run on each picture, None for nothing
    normalization   a lifted `Normalize`, None where none was lifted
    target          (height, width) that a first `Resize` makes, None where none comes first
    crop            (height, width) that a first `RandomResizedCrop` makes, None where what it draws can't be foreseen
    left            why a `Normalize` stays in the workers, None where none does
    """

    apply: Any
    normalization: Normalization | None = None
    target: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    left: str | None = None


def sample_seed(seed: int, epoch: int, key: str, occurrence: int = 0) -> int:
    """Return the 64-bit seed of a sample's draws; `occurrence` counts its repeats within a padded epoch."""
    text = f"{seed}\0{epoch}\0{occurrence}\0{key}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def sample_generators(seed: int, epoch: int, key: str, occurrence: int = 0) -> tuple[np.random.Generator, random.Random]:
    """Return the generators that a sample's transform draws from: `transform.set_random_state(*sample_generators(...))`."""
    drawn = sample_seed(seed, epoch, key, occurrence)
    return np.random.Generator(np.random.Philox(key=drawn)), random.Random(drawn)


def compose(steps: Any) -> Any:
    """Build a Compose from plain data: a list of names, or of {name: {argument: value}}, as a YAML file holds it.

    Raises OptionsError for an unknown transform (with the nearest name) or argument.
    """
    if not isinstance(steps, list) or not steps:
        raise OptionsError("a transform is a list of steps, such as [{Resize: {height: 400, width: 400}}, Normalize]")
    return A.Compose([_step(step) for step in steps])


def _step(step: Any) -> Any:
    name, arguments = next(iter(step.items())) if isinstance(step, dict) and len(step) == 1 else (step, {})
    arguments = dict(arguments or {})
    known = getattr(A, name, None) if isinstance(name, str) else None
    if isinstance(known, type) and issubclass(known, BaseCompose):
        arguments["transforms"] = [_step(part) for part in arguments.get("transforms") or ()]
    elif not (isinstance(known, type) and issubclass(known, BasicTransform)):
        near = difflib.get_close_matches(str(name), [n for n in dir(A) if n[0].isupper()], n=1)
        raise OptionsError(
            f"{name!r} is no transform of albumentations {A.__version__}" + (f"; did you mean {near[0]}?" if near else "")
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an argument that albumentations doesn't know only warns there
            return known(**arguments)
    except Exception as error:
        raise OptionsError(
            f"{name}: {_unknown(known, arguments) or ' '.join(str(error).partition('For further')[0].split())}"
        ) from error


def _unknown(known: Any, arguments: dict[str, Any]) -> str | None:
    """Name an argument that a transform doesn't have, with the nearest that it has."""
    has = [*getattr(getattr(known, "InitSchema", None), "model_fields", ())]
    wrong = next((name for name in arguments if has and name not in has), None)
    near = difflib.get_close_matches(wrong, has, n=1) if wrong else []
    return wrong and f"no argument {wrong!r}" + (f" (did you mean {near[0]!r}?)" if near else f"; it has {', '.join(has)}")


def prepare(transform: Callable[..., Any] | None) -> Prepared:
    """Copy a transform for the workers and lift a last standard `Normalize` out of the copy.

    Raises OptionsError for what is no transform, and for arguments that albumentations ignored.
    """
    if transform is None:
        return Prepared(None)
    if not callable(transform) or isinstance(transform, type):
        raise OptionsError(f"transform={transform!r}: an albumentations transform, a callable that takes an image, or None")
    try:
        copied = copy.deepcopy(transform)
    except Exception as error:
        raise OptionsError(f"transform can't be copied ({type(error).__name__}: {error}); workers need their own copy") from error
    if not isinstance(copied, BasicTransform | BaseCompose):
        return Prepared(copied)
    _refuse_ignored(copied)
    return _lift(copied)


def _refuse_ignored(transform: Any) -> None:
    """Raise where an argument was unknown to albumentations, which only warns and then trains with other augmentations."""
    for part in parts_of(transform):
        if ignored := getattr(part, "invalid_args", None):
            raise OptionsError(
                f"{type(part).__name__}({', '.join(ignored)}=...): albumentations {A.__version__} doesn't know "
                f"{'this argument' if len(ignored) == 1 else 'these arguments'} and ignores it; use its name in this release"
            )


def _lift(transform: Any) -> Prepared:
    """Take a trailing [Normalize][, ToTensorV2] out of a transform that this module owns."""
    parts = list(transform.transforms) if type(transform) is A.Compose and transform.p >= 1 else [transform]
    normalization = None
    if parts and _is_tensor(parts[-1]):
        parts.pop()
    if parts and _lifts(parts[-1]):
        normalization = _normalization(parts.pop())
    left = next(
        (f"{type(p).__name__} (not the last standard one with p=1)" for p in parts for p in parts_of(p) if _is_normalize(p)), None
    )
    if not parts:
        return Prepared(None, normalization)
    if type(transform) is A.Compose and transform.p >= 1:
        transform.transforms = type(transform.transforms)(parts)
    height, width = parts[0].size if on_pictures(transform).crops else (0, 0)
    return Prepared(transform, normalization, _target(parts[0]), (int(height), int(width)) if height else None, left)


def _is_tensor(part: Any) -> bool:
    return type(part).__name__ == "ToTensorV2" and isinstance(part, BasicTransform) and part.p >= 1


def _is_normalize(part: Any) -> bool:
    return isinstance(part, A.Normalize)


def _lifts(part: Any) -> bool:
    return type(part) is A.Normalize and part.p >= 1 and part.normalization == "standard" and np.size(part.mean_np) in (1, 3)


def _normalization(part: Any) -> Normalization:
    """Write (value - mean) * denominator, as albumentations computes it, as value * scale + bias."""
    scale = np.atleast_1d(np.asarray(part.denominator, np.float64))
    bias = -np.atleast_1d(np.asarray(part.mean_np, np.float64)) * scale
    return Normalization(scale.astype(np.float32), bias.astype(np.float32))


def _target(first: Any) -> tuple[int, int] | None:
    return (first.height, first.width) if type(first) is A.Resize and first.p >= 1 else None


class Augmenter:
    """Runs a prepared transform on one picture at a time; lives in one process.

    `isolated`: restore the global random states after each picture (without workers they are the trainer's own).
    """

    def __init__(self, apply: Any, *, isolated: bool) -> None:
        self._apply = apply
        self._known = isinstance(apply, BasicTransform | BaseCompose)
        # A transform of the user's own inside a Compose may draw from the global states.
        self._globals = not self._known or not all(map(is_own, parts_of(apply)))
        self._isolated = isolated
        # One pair of generators for all transforms: by `set_random_seed` each has the same seed, and they decide together.
        # It is seeded anew in place for each sample: making both costs 0.25 ms with cold caches, this 0.05.
        self._bits, self._random = np.random.Philox(key=0), random.Random(0)
        self._start = _as_lists(self._bits.state)
        self._foresight: Foresight | None = None
        self._pair = np.random.Generator(self._bits), self._random
        strange = [] if not self._globals else [p for p in parts_of(apply) if not is_own(p)] if self._known else [apply]
        # Of a transform of the user's own, what it holds: it draws itself from the pair.
        inside = [vars(part) for part in strange] if self._known else strange
        if self._known:
            apply.set_random_state(*self._pair)
            self._apply = on_pictures(apply)
        self._hidden = Hidden(inside, but=self._pair) if strange else None

    def crops(self, seed: int, epoch: int) -> Callable[[Sample], Callable[[Sides], Sides]]:
        """Return what tells of a sample how large its crop will be, of a transform that begins with one."""
        if self._foresight is None:
            self._foresight = Foresight(self._apply.transform)
        foresight = self._foresight

        def of(sample: Sample) -> Callable[[Sides], Sides]:
            return lambda sides: foresight(sides, sample_seed(seed, epoch, sample["__key__"], sample["__occurrence__"]))

        return of

    def __call__(self, picture: Any, seed: int, sides: Sides | None = None) -> Any:
        """Return what the transform makes of a picture under `seed`; `sides`: of the whole, where it was decoded at a scale."""
        if not self._globals:
            return self._run(picture, seed, sides)
        if not self._isolated:
            _seed_globals(seed)
            return self._run_strange(picture, seed, sides)
        before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
        try:
            _seed_globals(seed)
            return self._run_strange(picture, seed, sides)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.random.set_rng_state(before[2])

    def _run_strange(self, picture: Any, seed: int, sides: Sides | None) -> Any:
        """Run it with what it hides seeded too."""
        if not self._hidden:
            return self._run(picture, seed, sides)
        with self._hidden.seeded(seed, self._pair, restore=self._isolated):
            return self._run(picture, seed, sides)

    def _run(self, picture: Any, seed: int, sides: Sides | None) -> Any:
        if self._known or self._hidden:
            self._random.seed(seed)
            self._start["state"]["key"][0] = seed
            self._bits.state = self._start
        return self._apply(picture) if sides is None else self._apply(picture, sides)


def _as_lists(state: Any) -> Any:
    """Return a generator's state with lists for arrays, which numpy takes over in half the time (19 instead of 36 us, cold)."""
    if isinstance(state, dict):
        return {name: _as_lists(part) for name, part in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _seed_globals(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


def augment(samples: Iterable[Sample], *, augmenter: Augmenter, seed: int, epoch: int, fault: OnFault) -> Iterator[Sample]:
    """Replace each sample's "image" by what the transform makes of it.

    `fault` is given a TransformError with the sample's shard and key.
    """
    for sample in samples:
        drawn = sample_seed(seed, epoch, sample["__key__"], sample["__occurrence__"])
        try:
            sample["image"] = augmenter(sample["image"], drawn, sample.pop("__sides__", None))
        except MemoryError:
            raise
        except Exception as error:
            shape = getattr(sample["image"], "shape", None)
            raised = TransformError(
                f"{sample['__url__']}: sample {sample['__key__']!r}, {shape}: the transform failed: {type(error).__name__}: {error}"
            )
            raised.__cause__ = error
            fault(raised, sample["__place__"], "transform")
            continue
        yield sample
