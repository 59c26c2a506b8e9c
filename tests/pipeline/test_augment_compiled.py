"""A compiled Compose is the Compose: equal pixels, draws, warnings and errors, for every transform that albumentations has."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from albumentations.augmentations.geometric import functional as geometric
from albumentations.core.transforms_interface import BasicTransform
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.augment import Augmenter, compiled
from pipeline.augment.compiled import Way, on_pictures, way

RANDOM = np.random.default_rng(0)
PICTURES = {
    "RGB": RANDOM.integers(0, 256, (40, 60, 3), dtype=np.uint8),
    "odd": RANDOM.integers(0, 256, (53, 37, 3), dtype=np.uint8),
    "one channel": RANDOM.integers(0, 256, (41, 61, 1), dtype=np.uint8),
    "grey": RANDOM.integers(0, 256, (40, 60), dtype=np.uint8),
    "five channels": RANDOM.integers(0, 256, (32, 33, 5), dtype=np.uint8),
    "float": RANDOM.random((40, 60, 3), dtype=np.float32),
    "a view": RANDOM.integers(0, 256, (40, 60, 4), dtype=np.uint8)[:, ::-1, 2::-1],
    "two channels": RANDOM.integers(0, 256, (40, 60, 2), dtype=np.uint8),
    "four channels": RANDOM.integers(0, 256, (40, 60, 4), dtype=np.uint8),
    "16 bit": RANDOM.integers(0, 2**16, (40, 60, 3), dtype=np.uint16),
    "a strip": RANDOM.integers(0, 256, (3, 60, 3), dtype=np.uint8),  # of one line, cv2 mirrors the border without end
}
ABSTRACT = {"BasicTransform", "DualTransform", "ImageOnlyTransform", "Transform3D"}
KINDS = {
    name: kind
    for name, kind in vars(A).items()
    if isinstance(kind, type) and issubclass(kind, BasicTransform) and name not in ABSTRACT
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AtLeastOneBBoxRandomCrop": {"height": 16, "width": 16},
    "CenterCrop": {"height": 16, "width": 16},
    "CenterCrop3D": {"size": (1, 8, 8)},
    "ConstrainedCoarseDropout": {"mask_indices": [1]},
    "Crop": {"x_max": 20, "y_max": 20},
    "CropAndPad": {"px": (-4, 4)},
    "CropNonEmptyMaskIfExists": {"height": 16, "width": 16},
    "FrequencyMasking": {"freq_mask_range": (2, 8)},
    "GridElasticDeform": {"num_grid_xy": (4, 4), "magnitude": 4},
    "LongestMaxSize": {"max_size": 24},
    "Pad3D": {"padding": 1},
    "PadIfNeeded3D": {"min_zyx": (1, 8, 8)},
    "PiecewiseAffine": {"nb_rows": 2, "nb_cols": 2},
    "RandomCrop": {"height": 16, "width": 16},
    "RandomCrop3D": {"size": (1, 8, 8)},
    "RandomResizedCrop": {"size": (24, 20)},
    "RandomSizedBBoxSafeCrop": {"height": 16, "width": 16},
    "RandomSizedCrop": {"min_max_height": (10, 30), "size": (24, 20)},
    "Resize": {"height": 24, "width": 20},
    "SmallestMaxSize": {"max_size": 24},
    "Superpixels": {"n_segments": 5, "max_size": 16},
    "TextImage": {"font_path": "none.ttf"},
    "TimeMasking": {"time_mask_range": (2, 8)},
    "XYMasking": {"num_masks_x": (1, 3), "mask_x_length": (2, 5)},
}
# What is called as a whole: it takes more than a picture, or no picture.
WHOLE = {
    "CenterCrop3D",
    "CoarseDropout3D",
    "CubicSymmetry",
    "FDA",
    "HistogramMatching",
    "MaskDropout",
    "Mosaic",
    "OverlayElements",
    "Pad3D",
    "PadIfNeeded3D",
    "PixelDistributionAdaptation",
    "RandomCrop3D",
    "RandomCropNearBBox",
    "TextImage",
    "ToTensor3D",
}
SHORT = {"Affine", "Rotate", "ShiftScaleRotate"}


class Outcome(NamedTuple):
    """All that a call can be told apart by: what came out (or the error's type), what became of the given, draws and warnings."""

    pixels: Any
    given: Any
    python: Any
    numpy: str
    warned: list[type[Warning]]


def outcome(transform: Any, make: Callable[[Any], Callable[[Any], Any]], picture: Any, seed: int, calls: int = 2) -> list[Outcome]:
    """Run a copy of a transform on a picture a few times, with one pair of generators."""
    transform = copy.deepcopy(transform)
    bits, python = np.random.Philox(key=seed), random.Random(seed)
    if hasattr(transform, "set_random_state"):
        transform.set_random_state(np.random.Generator(bits), python)
    run, found = make(transform), []
    for _ in range(calls):
        given = picture.copy() if isinstance(picture, np.ndarray) and picture.flags.c_contiguous else picture
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                pixels = told(run(given))
            except Exception as error:
                pixels = type(error)
        found.append(Outcome(pixels, told(given), python.getstate(), str(bits.state), [warning.category for warning in caught]))
    return found


def told(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        result = result.numpy()
    if isinstance(result, np.ndarray):
        return type(result), result.dtype, result.shape, result.flags.c_contiguous, result.tobytes()
    return result


def as_ever(transform: Any) -> Callable[[Any], Any]:
    return lambda picture: transform(image=picture)["image"]


def assert_equal(transform: Any, picture: Any, seed: int = 1) -> None:
    assert outcome(transform, on_pictures, picture, seed) == outcome(transform, as_ever, picture, seed)


def built(name: str, p: float = 1, **arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some say that they are old
        return KINDS[name](**(ARGUMENTS.get(name, {}) | arguments), p=p)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_transform_gives_what_it_gives_by_itself(name: str) -> None:
    """Applied always and by chance, on colour, grey, odd, float and uncontiguous pictures, the errors that some of them are included."""
    for picture in PICTURES.values():
        for p, seed in ((1, 1), (1, 2), (0.5, 3)):
            assert_equal(A.Compose([built(name, p)]), picture, seed)


def test_how_each_transform_is_run() -> None:
    """Those that take more than a picture, or no picture, are called as a whole; a few compute less than by themselves."""
    ways = {name: way(built(name), alone=True) for name in KINDS}
    assert len(ways) > 100
    assert A.__version__ == compiled._READ_RELEASE  # of another release nothing is compiled before these tests have compared it
    assert {name for name, found in ways.items() if found is Way.WHOLE} == WHOLE
    assert {name for name, found in ways.items() if found is Way.SHORT} == SHORT
    for special in (A.Rotate(crop_border=True), A.Affine(fit_output=True), A.SafeRotate()):
        assert way(special, alone=True) is Way.PLAIN
    for composition in (A.Sequential([A.Rotate()]), A.OneOf([A.Rotate()]), A.Compose([A.Rotate()]), len):
        assert way(composition, alone=True) is Way.WHOLE


CHANCES = st.sampled_from([0, 0.3, 1])
NAMES = st.sampled_from(sorted(KINDS.keys() - WHOLE))
LEAVES = st.builds(built, NAMES, CHANCES)
NESTED = st.builds(
    lambda kind, parts, p: kind(parts, p=p),
    st.sampled_from([A.OneOf, A.Sequential, A.Compose, lambda parts, p: A.SomeOf(parts, n=1, p=p)]),
    st.lists(st.builds(built, NAMES, st.sampled_from([0.3, 1])), min_size=1, max_size=3),
    CHANCES,
)
COMPOSES = st.builds(
    lambda parts, p: A.Compose(parts, p=p),
    st.lists(st.one_of(LEAVES, LEAVES, NESTED, st.builds(built, st.sampled_from(sorted(WHOLE)))), max_size=4),
    st.sampled_from([0.3, 1, 1]),
)


@settings(max_examples=60)
@given(transform=COMPOSES, picture=st.sampled_from(sorted(PICTURES)), seed=st.integers(0, 2**64 - 1))
def test_any_pipeline_gives_what_it_gives_by_itself(transform: Any, picture: str, seed: int) -> None:
    """Whatever is composed of whatever, by whatever chance."""
    assert_equal(transform, PICTURES[picture], seed)


ROTATION = {"limit": 180, "p": 1}
WARPS = [
    A.Rotate(**ROTATION),
    A.Rotate(limit=(0, 0), p=1),
    A.Rotate(limit=(360, 360), p=1),
    A.Rotate(limit=(90, 90), p=1),
    A.Rotate(**ROTATION, border_mode=cv2.BORDER_REFLECT_101, interpolation=cv2.INTER_CUBIC),
    A.Rotate(**ROTATION, fill=7.5),
    A.Rotate(**ROTATION, fill=(1, 2, 3)),
    A.Rotate(**ROTATION, fill=(1, 2, 3, 4)),
    A.Rotate(**ROTATION, crop_border=True),
    A.Affine(scale=(0.5, 2), translate_percent=(-0.2, 0.2), rotate=(-90, 90), shear=(-20, 20), p=1),
    A.Affine(scale={"x": (0.5, 1), "y": (1, 2)}, translate_px=(-5, 5), balanced_scale=True, p=1),
    A.Affine(rotate=(-90, 90), fit_output=True, p=1),
    A.Affine(scale=1, rotate=0, shear=0, p=1),
    built("ShiftScaleRotate", border_mode=cv2.BORDER_REFLECT),
]


@pytest.mark.parametrize("number", range(len(WARPS)))
@pytest.mark.parametrize("picture", sorted(PICTURES))
def test_warps_with_every_setting(number: int, picture: str) -> None:
    """Angles, borders, fills, crops, the identity: equal to the last bit."""
    for seed in range(4):
        assert_equal(A.Compose([WARPS[number]]), PICTURES[picture], seed)


@settings(max_examples=300)
@given(angle=st.floats(-720, 720), height=st.integers(1, 5000), width=st.integers(1, 5000))
@example(angle=0.0, height=400, width=400)
@example(angle=-90.0, height=401, width=3)
def test_a_rotation_has_albumentations_own_matrix(angle: float, height: int, width: int) -> None:
    """Both matrices of a rotation are one, bit for bit."""
    own = geometric.create_affine_transformation_matrix(
        {"x": 0, "y": 0}, {"x": 0, "y": 0}, {"x": 1, "y": 1}, angle, geometric.center((height, width))
    )
    rotate = A.Rotate(limit=(angle, angle))
    assert compiled._rotation(rotate, (height, width)).tobytes() == own.tobytes()


NEAR = [0.0, 1e-8, -1e-8, 1.0000001e-8, 1e-5, 1.001e-5, -1.001e-5, 1.0011e-5, 1.0, np.nan, np.inf]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(NEAR) | st.floats(), min_size=6, max_size=6), st.booleans())
def test_the_identity_is_what_allclose_takes_for_it(entries: list[float], added: bool) -> None:
    """To its tolerances, and for what is no number."""
    matrix = np.eye(3)
    matrix[:2] = np.reshape(entries, (2, 3)) + (matrix[:2] if added else 0)
    with np.errstate(all="ignore"):
        assert compiled._is_identity(matrix) == geometric.is_identity_matrix(matrix)


@pytest.mark.parametrize("planted", ["a draw", "a pixel"])
def test_a_wrong_step_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees one draw too many, though the pixels are right, and a matrix that is off by a tenth of a pixel."""
    right = compiled._rotation

    def wrong(part: Any, size: tuple[int, int]) -> Any:
        matrix = right(part, size)
        if planted == "a draw":
            part.py_random.random()
        else:
            matrix[0, 2] += 0.1
        return matrix

    transform = A.Compose([A.Rotate(p=1)])
    assert_equal(transform, PICTURES["RGB"])
    monkeypatch.setattr(compiled, "_rotation", wrong)
    (first, *_), (own, *_) = (outcome(transform, make, PICTURES["RGB"], 1) for make in (on_pictures, as_ever))
    assert (first.pixels != own.pixels) == (planted == "a pixel")
    assert (first.python != own.python) == (planted == "a draw")


class Kin(np.ndarray):
    """A kind of array that isn't numpy's own."""


BOXES = A.BboxParams("pascal_voc", label_fields=["labels"])


@pytest.mark.parametrize(
    "transform",
    [
        A.Compose([]),
        A.Compose([A.Rotate(p=1)], p=0),
        A.Compose([A.Rotate(p=0.5)], p=0.5),
        A.Compose([A.Rotate(p=1)], p=float("nan")),
        A.Compose((A.Rotate(p=1), A.HorizontalFlip(p=1))),
        A.Compose([A.Rotate(p=1)], strict=True),
        A.Compose([A.Rotate(p=1)], is_check_shapes=False),
        A.Compose([A.Rotate(p=1)], save_applied_params=True),
        A.Compose([A.Rotate(p=1)], additional_targets={"second": "image"}),
        A.Compose([A.Rotate(p=1)], additional_targets={"image": "mask"}),
        A.Compose([A.HorizontalFlip(p=1)], bbox_params=BOXES),
        A.Compose([A.Rotate(p=1)], mask_interpolation=cv2.INTER_AREA),
        A.ReplayCompose([A.Rotate(p=1)]),
        A.Sequential([A.Rotate(p=1)], p=1),
        A.OneOf([A.Rotate(p=1), A.HorizontalFlip(p=1)], p=1),
        A.Rotate(p=1),
        A.Compose([A.Rotate(p=1), A.ToTensorV2(), A.HorizontalFlip(p=1)]),
    ],
    ids=lambda transform: " ".join(repr(transform).split())[:60],
)
def test_every_setting_of_a_compose_holds(transform: Any) -> None:
    """Chances, checks, boxes, other targets, other compositions; and pictures that are none get their own errors."""
    for picture in (*PICTURES.values(), None, [[1, 2]], 3, PICTURES["RGB"].view(Kin), np.zeros((0, 5, 3), np.uint8)):
        assert_equal(transform, picture)


class Draws(A.ImageOnlyTransform):
    """A user's transform with draws of its own."""

    def get_params(self) -> dict[str, Any]:
        return {"less": self.py_random.randint(1, 9)}

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        return {"more": int(self.random_generator.integers(1, 9)) + data["image"].shape[0] + len(self.params)}

    def apply(self, img: Any, less: int, more: int, **params: Any) -> Any:
        return np.asfortranarray(img - less + more + len(params))


class Marks(Draws):
    """One that puts something beside the picture, in place of another picture."""

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        data["mark"], data["image"] = 3, data["image"][::-1]
        return {"more": 1}


class Replaces(Draws):
    """One that looks at another picture."""

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        data["image"] = data["image"][::-1]
        return {"more": 1}


class Late(A.ImageOnlyTransform):
    """One that gets an attribute only when it draws."""

    def get_params(self) -> dict[str, Any]:
        self.fill = self.py_random.randint(1, 9)
        return {}

    def apply(self, img: Any, fill: int, **params: Any) -> Any:
        return img + fill


class Calls(A.ImageOnlyTransform):
    """One that has its own call, and gives something beside the picture."""

    def __call__(self, *args: Any, **data: Any) -> Any:
        return {**data, "image": 255 - data["image"], "mark": data.get("mark", 0) + 1}


class Chance(A.HorizontalFlip):
    """One that has its own chance."""

    def should_apply(self, force_apply: bool = False) -> bool:
        return self.py_random.randint(0, 9) > 4


class Reads(A.ImageOnlyTransform):
    """One that looks at what another one drew."""

    def __init__(self, other: Any, p: float = 1) -> None:
        super().__init__(p=p)
        self.other = other

    def apply(self, img: Any, **params: Any) -> Any:
        return img + len(self.other.get_applied_params())


class Fails(A.ImageOnlyTransform):
    """One that fails, by chance."""

    def apply(self, img: Any, **params: Any) -> Any:
        raise LookupError("no")


def rotation_and_reader() -> list[Any]:
    rotate = A.Rotate(p=0.5)
    return [rotate, Reads(rotate)]


def reads_a_mark(**data: Any) -> dict[str, Any]:
    """No transform at all, but Compose would call it."""
    return {"image": data["image"] + data.get("mark", 0)}


def inverted(image: Any, **params: Any) -> Any:
    return 255 - image


def gives_nothing(**data: Any) -> Any:
    return None


def set_on_itself() -> Any:
    flip = A.HorizontalFlip(p=1)
    flip.get_params = gives_a_name
    return flip


def gives_a_name() -> dict[str, Any]:
    return {"name": 1}


def deterministic() -> Any:
    return A.Rotate(p=1).set_deterministic(True)


OWN = [
    [Draws(p=1)],
    [Draws(p=0.5), A.Rotate(p=1), Draws(p=0.5)],
    [Marks(p=1), reads_a_mark, A.Rotate(p=1)],
    [Marks(p=1)],
    [Replaces(p=1), A.Rotate(p=1)],
    [Late(p=1), Late(p=1)],
    [A.Rotate(p=1), Calls(p=1), Calls(p=1), reads_a_mark, A.Rotate(p=1)],
    [Chance(p=1), A.Rotate(p=1)],
    [A.Rotate(p=1), Fails(p=0.5)],
    [reads_a_mark, A.Rotate(p=1)],
    [A.Rotate(p=1), gives_nothing],
    [gives_nothing, A.Rotate(p=1)],
    [set_on_itself(), A.Rotate(p=1)],
    [A.Rotate(p=1), deterministic()],
    [A.Lambda(image=inverted, p=0.5), A.Rotate(p=1)],
    rotation_and_reader(),
]


@pytest.mark.parametrize("number", range(len(OWN)))
def test_transforms_of_the_users_own(number: int) -> None:
    """Whatever they have of their own: parameters, calls, chances, things beside the picture, errors."""
    compose = A.Compose([])
    compose.transforms = OWN[number]
    for picture in PICTURES.values():
        for seed in range(4):
            assert_equal(compose, picture, seed)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda augmenter: pickle.loads(pickle.dumps(augmenter))], ids=["copied", "pickled"]
)
def test_a_copy_draws_by_itself(copied: Callable[[Any], Any]) -> None:
    """A copy of an augmenter that was used gives the same pictures by its own generators, and changes nothing of the first's."""
    augmenter = Augmenter(A.Compose([A.Rotate(p=1), A.RandomCrop(16, 16), A.HorizontalFlip(p=0.5)]), isolated=False)
    right = [augmenter(PICTURES["RGB"], seed).tobytes() for seed in range(8)]
    other = copied(augmenter)
    for seed in range(8):
        assert other(PICTURES["RGB"], seed).tobytes() == right[seed]
        assert augmenter(PICTURES["RGB"], seed).tobytes() == right[seed]


def test_what_a_rotation_was_told_later_holds() -> None:
    """A limit, a chance and a crop that are set between two pictures count from the next one on."""
    for attribute, value in (("limit", (90, 90)), ("p", 0.0), ("fill", 9), ("crop_border", True)):
        found = []
        for make in (on_pictures, as_ever):
            rotate = A.Rotate(limit=(30, 30), p=1)
            compose = A.Compose([rotate], seed=1)
            run = make(compose)
            first = run(PICTURES["RGB"]).tobytes()
            setattr(rotate, attribute, value)
            found.append((first, run(PICTURES["RGB"]).tobytes()))
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]


def test_what_is_run_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a plain Compose of the release that was read is taken apart, on which no method was set."""
    plain = A.Compose([A.Rotate(p=1)])
    assert isinstance(on_pictures(plain), compiled._Program)
    changed = A.Compose([A.Rotate(p=1)])
    changed.preprocess = print
    others = [
        changed,
        A.Compose([A.HorizontalFlip(p=1)], bbox_params=BOXES),
        A.Compose([A.Rotate(p=1)], additional_targets={"second": "image"}),
        A.Compose([A.Rotate(p=1)], save_applied_params=True),
        A.ReplayCompose([A.Rotate(p=1)]),
        A.OneOf([A.Rotate(p=1)]),
    ]
    assert all(isinstance(on_pictures(other), compiled._Ordinary) for other in others)
    monkeypatch.setattr(A, "__version__", "2.0.9")
    assert isinstance(on_pictures(plain), compiled._Ordinary)
