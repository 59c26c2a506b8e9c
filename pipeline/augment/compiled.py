"""Runs an albumentations Compose on a picture alone: the same pixels and draws to the bit, without what other targets cost.

    Compose   one draw against its p, as always; no checks, no dictionaries between the steps
    step      SHORT   computes what a picture needs: one matrix of a rotation instead of the boxes' too, from one product of six
              PLAIN   the transform's own methods, in the order of `BasicTransform.__call__`
              WHOLE   the transform's own call: compositions inside, hooks of its own

What isn't a plain Compose runs as ever. Read off the source of albumentations 2.0.8, the release that is pinned. What Compose and
its transforms are made of is looked at once, before the first picture; limits, p and fill at each one. A SHORT step leaves `params`
alone, which only transforms of others could read; where there are such, no step is SHORT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Protocol

import albumentations as A
import numpy as np
import numpy.typing as npt
from albumentations.augmentations.geometric import functional as geometric
from albumentations.core.transforms_interface import BasicTransform
from albumentations.core.utils import ensure_contiguous_output

from pipeline.augment.crops import crops_first, from_scaled
from pipeline.items import Sides

Step = Callable[[Any], Any]

_READ_RELEASE = "2.0.8"
_CROPS = A.RandomResizedCrop.apply
# A transform whose class has a call of its own is called as a whole, and so is one on which a method was set.
_CALLS = ("__call__", "apply_with_params")
_METHODS = {*_CALLS, "get_params", "get_params_dependent_on_data", "update_transform_params", "should_apply"}
_NAMED = ("interpolation", "fill", "fill_mask")  # what `update_transform_params` passes on of those that have them
# np.allclose's tolerances; the identity's entries are 0 and 1.
_ZERO_TOLERANCE, _ONE_TOLERANCE = 1e-8, 1e-8 + 1e-5


class Run(Protocol):
    """A transform of pictures; `sides`: of the whole, where a picture was decoded at a scale, which only crops allow."""

    crops: bool
    transform: Any

    def __call__(self, picture: Any, sides: Sides | None = None) -> Any:
        """Return what the transform makes of a picture."""
        ...


class Way(Enum):
    """How a step of a Compose is run."""

    SHORT = "short"
    PLAIN = "plain"
    WHOLE = "whole"


class _BesideError(Exception):
    """A step gave something beside the picture, which the steps behind it may look at."""

    def __init__(self, data: Any) -> None:
        self.data = data


def on_pictures(transform: Any) -> Run:
    """Return what equals `transform(image=picture)["image"]` for a transform whose generators were set."""
    if type(transform) is not A.Compose or A.__version__ != _READ_RELEASE:
        return _Ordinary(transform)
    if transform.processors or transform.additional_targets or transform.save_applied_params:
        return _Ordinary(transform)
    if any(callable(getattr(A.Compose, name, None)) for name in vars(transform)):  # a method was set on it
        return _Ordinary(transform)
    return _Program(transform)


def is_own(part: Any) -> bool:
    """Tell whether a transform is albumentations' own, and calls nothing of the user's."""
    return type(part).__module__.startswith("albumentations.") and type(part) is not A.Lambda


class _Ordinary:
    """The transform's own call."""

    crops = False

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, picture: Any, sides: Sides | None = None) -> Any:
        assert sides is None
        return self.transform(image=picture)["image"]


class _Program:
    """The steps of a Compose, each from picture to picture.

    `crops`: whether the first is a crop that can be taken out of a picture that was decoded at a scale.
    """

    def __init__(self, compose: Any) -> None:
        self.transform = compose
        alone = all(is_own(part) for part in parts_of(compose))
        ways = [way(part, alone=alone) for part in compose.transforms]
        self._steps = [_STEPS[how](part) for how, part in zip(ways, compose.transforms, strict=True)]
        self.crops = crops_first(compose) and ways[0] is Way.PLAIN and compose.transforms[0]._key2func["image"].__func__ is _CROPS
        self._crop = from_scaled(compose.transforms[0]) if self.crops else None

    def __reduce__(self) -> tuple[Callable[[Any], Run], tuple[Any]]:
        """Copies and pickles make their steps of their own Compose: a copied step would draw from this one's generators."""
        return on_pictures, (self.transform,)

    def __call__(self, picture: Any, sides: Sides | None = None) -> Any:
        compose = self.transform
        if type(picture) is not np.ndarray:  # Compose says what is wrong with it
            return compose(image=picture)["image"]
        if not compose.py_random.random() < compose.p:  # as it is asked there: of NaN too
            return picture
        at, beside, steps = 0, None, self._steps
        if sides is not None:
            assert self._crop is not None
            picture, steps = self._crop(picture, sides), steps[1:]
        try:
            for at, step in enumerate(steps, len(self._steps) - len(steps)):  # noqa: B007
                picture = step(picture)
        except _BesideError as error:
            beside = error
        return picture if beside is None else self._go_on(at, beside.data)

    def _go_on(self, at: int, data: Any) -> Any:
        """Return what the steps behind the one at `at`, which gave `data`, make of it."""
        self.transform._track_transform_params(self.transform.transforms[at], data)
        for part in self.transform.transforms[at + 1 :]:
            data = part(**data)
            self.transform._track_transform_params(part, data)
        return data["image"]


def parts_of(transform: Any) -> Iterator[Any]:
    """Yield a transform, and all those within it."""
    yield transform
    for part in getattr(transform, "transforms", ()):
        yield from parts_of(part)


def way(part: Any, *, alone: bool) -> Way:
    """Tell how a step is run; `alone`: no transform of others is in the Compose."""
    kind = type(part)
    if not isinstance(part, BasicTransform) or any(getattr(kind, call) is not getattr(BasicTransform, call) for call in _CALLS):
        return Way.WHOLE
    if part.deterministic or part.replay_mode or _METHODS & vars(part).keys():
        return Way.WHOLE
    if "image" not in part._key2func or not {"image"}.issuperset(part.targets_as_params):
        return Way.WHOLE
    short = alone and kind in (A.Rotate, A.Affine, A.ShiftScaleRotate) and not _resizes(part)
    return Way.SHORT if short and part._key2func["image"] == part.apply else Way.PLAIN


def _resizes(part: Any) -> bool:
    """Tell whether a rotation or an affine gives pictures of other sizes."""
    return bool(part.crop_border if type(part) is A.Rotate else part.fit_output)


def _whole(part: Any) -> Step:
    def step(picture: Any) -> Any:
        data = part(image=picture)
        if type(data) is not dict or len(data) != 1 or data.get("image") is None:
            raise _BesideError(data)
        return data["image"]

    return step


def _plain(part: Any) -> Step:
    kind, apply = type(part), part._key2func["image"]
    draws = kind.get_params is not BasicTransform.get_params
    looks = kind.get_params_dependent_on_data is not BasicTransform.get_params_dependent_on_data
    # A user's transform may get one of the attributes only later, or have parameters of its own.
    known = kind.__module__.startswith("albumentations.") and kind.update_transform_params is BasicTransform.update_transform_params
    named = [name for name in _NAMED if hasattr(part, name)]

    def step(picture: Any) -> Any:
        part.params = {}
        if not part.should_apply(force_apply=False):
            return picture
        data, params = {"image": picture}, part.get_params() if draws else {}
        if known:
            params["shape"] = picture.shape
            for name in named:
                params[name] = getattr(part, name)
        else:
            params = part.update_transform_params(params=params, data=data)
        if looks:
            params.update(part.get_params_dependent_on_data(params=params, data=data))
        part.params = params
        if len(data) != 1 or data["image"] is None:
            raise _BesideError(part.apply_with_params(params, **data))
        return ensure_contiguous_output(apply(ensure_contiguous_output(data["image"]), **params))

    return step


def _short(part: Any) -> Step:
    """Warp by the picture's matrix alone; pictures of one channel or more than four go the plain way."""
    matrix, plain = _rotation if type(part) is A.Rotate else _affine, _plain(part)

    def step(picture: Any) -> Any:
        if type(picture) is not np.ndarray or picture.ndim != 3 or not 2 <= picture.shape[2] <= 4 or not picture.flags.c_contiguous:
            return plain(picture)
        if _resizes(part):  # by now
            return plain(picture)
        if not part.should_apply(force_apply=False):
            return picture
        height, width = size = picture.shape[:2]
        drawn = matrix(part, size)
        if _is_identity(drawn):
            return picture
        return geometric.warp_affine_with_value_extension(
            picture, drawn[:2], (width, height), part.interpolation, part.border_mode, part.fill
        )

    return step


def _rotation(part: Any, size: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Return the matrix of a Rotate.

    Of the six factors that albumentations multiplies three are the identity here, and the first times the rotation is exact. How
    the last product rounds depends on the BLAS: it is left to the same product of the same numbers.
    """
    angle = part.py_random.uniform(*part.limit)
    x, y = geometric.center(size)
    radians = np.deg2rad(angle % 360)
    cosine, sine = np.cos(radians), np.sin(radians)
    drawn: npt.NDArray[np.float64] = np.array([[cosine, sine, x], [-sine, cosine, y], [0, 0, 1]]) @ np.array(
        [[1, 0, -x], [0, 1, -y], [0, 0, 1]]
    )
    return drawn


def _affine(part: Any, size: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Return the matrix of an Affine: drawn in its order."""
    translate, shear = part._get_translate_params(size), part._get_shear_params()
    scale = part._get_scale(part.scale, part.keep_ratio, part.balanced_scale, part.py_random)
    angle = part.py_random.uniform(*part.rotate)
    drawn: npt.NDArray[np.float64] = geometric.create_affine_transformation_matrix(
        translate, shear, scale, angle, geometric.center(size)
    )
    return drawn


def _is_identity(matrix: npt.NDArray[np.float64]) -> bool:
    """Do what `geometric.is_identity_matrix` does by np.allclose, whose last row is (0, 0, 1) anyway."""
    (a, b, c), (d, e, f), _ = matrix.tolist()
    ones = abs(a - 1) <= _ONE_TOLERANCE and abs(e - 1) <= _ONE_TOLERANCE
    return bool(ones and all(abs(entry) <= _ZERO_TOLERANCE for entry in (b, c, d, f)))


_STEPS: dict[Way, Callable[[Any], Step]] = {Way.SHORT: _short, Way.PLAIN: _plain, Way.WHOLE: _whole}
