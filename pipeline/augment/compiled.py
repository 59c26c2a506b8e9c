"""Runs an albumentations Compose on a picture alone: the same pixels, draws and errors, without what other targets cost.

    Compose   one draw against its p, as always; no checks, no dictionaries between the steps
    step      SHORT   computes what a picture needs: one matrix of a rotation instead of the boxes' too, from one product of six
              PLAIN   the transform's own methods, in the order of `BasicTransform.__call__`
              WHOLE   the transform's own call: compositions inside, hooks of its own

What isn't a plain Compose runs as ever. Read off the source of albumentations 2.0.8, the release that is pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import albumentations as A
import numpy as np
import numpy.typing as npt
from albumentations.augmentations.geometric import functional as geometric
from albumentations.core.transforms_interface import BasicTransform
from albumentations.core.utils import ensure_contiguous_output

Step = Callable[[Any], Any]

_READ = "2.0.8"
# Whoever has a call of its own is called as a whole; so is who had one of the methods set on itself.
_CALLS = ("__call__", "apply_with_params")
_METHODS = {*_CALLS, "get_params", "get_params_dependent_on_data", "update_transform_params", "should_apply"}
_NAMED = ("interpolation", "fill", "fill_mask")  # what `update_transform_params` passes on of those that have them
# np.allclose's tolerances; the identity's entries are 0 and 1.
_ZERO, _ONE = 1e-8, 1e-8 + 1e-5


class Way(Enum):
    """How a step of a Compose is run."""

    SHORT = "short"
    PLAIN = "plain"
    WHOLE = "whole"


class _BesideError(Exception):
    """A step gave something beside the picture, which the steps behind it may look at."""

    def __init__(self, data: Any) -> None:
        self.data = data


def on_pictures(transform: Any) -> Step:
    """Return what equals `transform(image=picture)["image"]` for a transform whose generators were set."""
    if type(transform) is not A.Compose or A.__version__ != _READ:
        return lambda picture: transform(image=picture)["image"]
    if transform.processors or transform.additional_targets or transform.save_applied_params:
        return lambda picture: transform(image=picture)["image"]
    return _Program(transform)


class _Program:
    """The steps of a Compose, each from picture to picture."""

    def __init__(self, compose: Any) -> None:
        self._compose = compose
        self._steps = [_STEPS[way(part)](part) for part in compose.transforms]

    def __call__(self, picture: Any) -> Any:
        compose, at = self._compose, 0
        if type(picture) is not np.ndarray:  # Compose says what is wrong with it
            return compose(image=picture)["image"]
        if compose.py_random.random() >= compose.p:
            return picture
        try:
            for at, step in enumerate(self._steps, 1):  # noqa: B007
                picture = step(picture)
        except _BesideError as beside:
            data = beside.data
            for part in compose.transforms[at:]:
                data = part(**data)
            return data["image"]
        return picture


def way(part: Any) -> Way:
    """Tell how a step is run."""
    kind = type(part)
    if not isinstance(part, BasicTransform) or any(getattr(kind, call) is not getattr(BasicTransform, call) for call in _CALLS):
        return Way.WHOLE
    if part.deterministic or part.replay_mode or _METHODS & vars(part).keys():
        return Way.WHOLE
    if "image" not in part._key2func or not {"image"}.issuperset(part.targets_as_params):
        return Way.WHOLE
    short = (kind is A.Rotate and not part.crop_border) or (kind in (A.Affine, A.ShiftScaleRotate) and not part.fit_output)
    return Way.SHORT if short and part._key2func["image"] == part.apply else Way.PLAIN


def _whole(part: Any) -> Step:
    def step(picture: Any) -> Any:
        data = part(image=picture)
        if type(data) is not dict or len(data) != 1 or "image" not in data:
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
        if len(data) != 1:
            raise _BesideError(part.apply_with_params(params, **data))
        return ensure_contiguous_output(apply(ensure_contiguous_output(data["image"]), **params))

    return step


def _short(part: Any) -> Step:
    """Warp by the picture's matrix alone; pictures of one channel or more than four go the plain way."""
    matrix, plain = _rotation if type(part) is A.Rotate else _affine, _plain(part)

    def step(picture: Any) -> Any:
        if type(picture) is not np.ndarray or picture.ndim != 3 or not 2 <= picture.shape[2] <= 4 or not picture.flags.c_contiguous:
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
    return bool(
        abs(a - 1) <= _ONE and abs(e - 1) <= _ONE and abs(b) <= _ZERO and abs(c) <= _ZERO and abs(d) <= _ZERO and abs(f) <= _ZERO
    )


_STEPS: dict[Way, Callable[[Any], Step]] = {Way.SHORT: _short, Way.PLAIN: _plain, Way.WHOLE: _whole}
