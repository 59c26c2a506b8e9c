"""Transforms are copied, lifted and seeded as promised."""

from __future__ import annotations

import copy
import functools
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2

from pipeline.augment import Augmenter, compose, prepare, sample_generators, sample_seed
from pipeline.errors import OptionsError

PICTURE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("transform", "lifted", "left"),
    [
        (A.Compose([A.Resize(8, 8), A.Normalize()]), True, 1),
        (A.Compose([A.Resize(8, 8), A.Normalize(), ToTensorV2()]), True, 1),
        (A.Compose([A.Resize(8, 8), ToTensorV2()]), False, 1),
        (A.Compose([A.Normalize()]), True, 0),
        (A.Normalize(), True, 0),
        (A.Normalize(mean=0.5, std=0.5), True, 0),
        (A.Compose([A.Resize(8, 8), A.Normalize(p=0.5)]), False, 2),
        (A.Compose([A.Normalize(), A.HorizontalFlip()]), False, 2),
        (A.Compose([A.Resize(8, 8), A.Normalize()], p=0.5), False, 2),
        (A.Compose([A.Resize(8, 8), A.Normalize(normalization="image")]), False, 2),
        (A.Compose([A.Resize(8, 8), A.OneOf([A.Normalize()])]), False, 2),
    ],
)
def test_only_a_last_standard_normalize_is_lifted(transform: Any, lifted: bool, left: int) -> None:
    """A last standard Normalize with p=1, ToTensorV2 after it or not, is lifted; any other stays and is named."""
    prepared = prepare(transform)
    assert (prepared.normalization is not None) == lifted
    assert (0 if prepared.apply is None else len(getattr(prepared.apply, "transforms", [prepared.apply]))) == left
    says = prepared.left is not None
    assert says == (not lifted and any(isinstance(t, A.Normalize | A.OneOf) for t in getattr(transform, "transforms", [])))


def test_lifted_values() -> None:
    """scale and bias are Normalize's own formula."""
    normalize = A.Normalize(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), max_pixel_value=200)
    lifted = prepare(normalize).normalization
    assert lifted is not None
    np.testing.assert_allclose(PICTURE * lifted.scale + lifted.bias, normalize(image=PICTURE)["image"], atol=1e-5)


def test_target_is_a_first_resize() -> None:
    """The scaled decode's target is a first Resize with p=1, and nothing else."""
    assert prepare(A.Compose([A.Resize(8, 9), A.HorizontalFlip()])).target == (8, 9)
    assert prepare(A.Resize(8, 9)).target == (8, 9)
    for other in (
        A.Compose([A.HorizontalFlip(), A.Resize(8, 9)]),
        A.Compose([A.Resize(8, 9, p=0.5)]),
        A.Compose([A.RandomCrop(8, 9)]),
    ):
        assert prepare(other).target is None


def test_sample_seed_is_pinned() -> None:
    """A sample's seed follows from seed, epoch, key and occurrence alone, in every release: each of them changes it."""
    assert sample_seed(0, 0, "a") == 8880863500195573514
    assert (
        len({sample_seed(*given) for given in [(0, 0, "a", 0), (1, 0, "a", 0), (0, 1, "a", 0), (0, 0, "b", 0), (0, 0, "a", 1)]})
        == 5
    )


@pytest.mark.case("W12")
def test_nested_transforms_share_one_generator() -> None:
    """All transforms of a nested Compose draw from the same two generators, so that they don't decide together."""
    transform = prepare(A.Compose([A.OneOf([A.HorizontalFlip(), A.VerticalFlip()]), A.Sequential([A.Transpose()])])).apply
    Augmenter(transform, isolated=True)(PICTURE, 1)
    leaves = [leaf for part in transform.transforms for leaf in part.transforms]
    assert len({id(part.py_random) for part in leaves}) == 1
    assert len({id(part.random_generator) for part in leaves}) == 1


def test_equal_seeds_equal_pictures() -> None:
    """One seed gives one picture, whatever came before."""
    augmenter = Augmenter(prepare(A.Compose([A.Affine(rotate=(-90, 90)), A.GaussNoise(p=1)])).apply, isolated=True)
    first = augmenter(PICTURE, 7)
    assert not np.array_equal(augmenter(PICTURE, 8), first)
    np.testing.assert_array_equal(augmenter(PICTURE, 7), first)


def test_generators_are_what_the_workers_seed_in_place() -> None:
    """`sample_generators` draws what the augmenter draws for the same sample, from both of its generators, call after call."""
    transform = A.Compose([A.GaussNoise(p=1), A.Affine(rotate=(-90, 90), p=0.5)])
    augmenter = Augmenter(prepare(transform).apply, isolated=True)
    for key in "abc":
        transform.set_random_state(*sample_generators(1, 2, key))
        np.testing.assert_array_equal(augmenter(PICTURE, sample_seed(1, 2, key)), transform(image=PICTURE)["image"])


def test_lambda_in_a_compose_is_seeded_too() -> None:
    """A transform of the user's own inside a Compose may draw from numpy's global state: that is seeded too, and restored."""
    transform = A.Compose([A.Lambda(image=noisy)])
    augmenter = Augmenter(prepare(transform).apply, isolated=True)
    before = np.random.get_state()[1].tolist()
    np.testing.assert_array_equal(augmenter(PICTURE, 3), augmenter(PICTURE, 3))
    assert np.random.get_state()[1].tolist() == before


def noisy(image: np.ndarray, **_: Any) -> np.ndarray:
    return np.random.randint(0, 256, image.shape, dtype=np.uint8)


def test_compose_from_plain_data() -> None:
    """A YAML list of steps builds the same Compose as Python does."""
    built = compose([{"Resize": {"height": 8, "width": 9}}, "HorizontalFlip", {"Normalize": None}])
    assert [type(part).__name__ for part in built.transforms] == ["Resize", "HorizontalFlip", "Normalize"]
    assert built.transforms[0].width == 9
    nested = compose([{"OneOf": {"transforms": ["HorizontalFlip", "VerticalFlip"], "p": 1}}])
    assert [type(part).__name__ for part in nested.transforms[0].transforms] == ["HorizontalFlip", "VerticalFlip"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"Rezize": {}}], "did you mean Resize"),
        ([{"ChannelDropout": {"fill_value": 5}}], "fill_value"),
        ([{"Resize": {"height": -1, "width": 2}}], "Resize"),
        ([{"Resize": {}}], "Resize"),
        ([], "list of steps"),
        ({"Resize": {}}, "list of steps"),
        ([3], "3"),
        ([{"Resize": {"heigth": 3, "width": 2}}], "no argument 'heigth' .did you mean 'height'"),
        ([{"OneOf": {"transforms": [{"Rezize": {}}]}}], "did you mean Resize"),
    ],
)
@pytest.mark.case("A04")
def test_wrong_steps_are_errors(steps: Any, message: str) -> None:
    """An unknown step or argument is an error; albumentations itself would only warn."""
    with pytest.raises(OptionsError, match=message):
        compose(steps)


@pytest.mark.case("A08")
def test_import_asks_no_network() -> None:
    """albumentations' look for a newer version is off before it is imported, here and in processes that are started from here."""
    code = (
        "import os, sys; asked = []\n"
        "sys.addaudithook(lambda event, _: asked.append(event) if event in {'socket.connect', 'socket.getaddrinfo'} else None)\n"
        "import pipeline.augment; print(asked, os.environ['NO_ALBUMENTATIONS_UPDATE'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NO_ALBUMENTATIONS_UPDATE"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[] 1"


INSIDE = A.Compose([A.RandomCrop(20, 20), A.HorizontalFlip(p=0.5)])
RANDOM = np.random.default_rng(4)


def named(image: Any) -> Any:
    """Use a Compose and a generator of the module."""
    return INSIDE(image=image)["image"] + RANDOM.integers(0, 9, dtype=np.uint8)


def closed(transform: Any) -> Any:
    """Return a function that holds a transform."""

    def apply(image: Any) -> Any:
        return transform(image=image)["image"]

    return apply


class Held:
    """Holds a transform in a list."""

    def __init__(self, transform: Any) -> None:
        self.steps = [{"first": transform}]

    def __call__(self, image: Any) -> Any:
        return self.steps[0]["first"](image=image)["image"]


class Strange(A.ImageOnlyTransform):
    """A transform of the user's own, with a Compose inside."""

    def __init__(self, inner: Any) -> None:
        super().__init__(p=1)
        self.inner = inner

    def apply(self, img: Any, **_: Any) -> Any:
        """Apply the one inside."""
        return self.inner(image=img)["image"]


HIDING: dict[str, Any] = {
    "named": lambda: named,
    "closed": lambda: closed(A.Compose([A.RandomCrop(20, 20)])),
    "default": lambda: lambda image, t=INSIDE: t(image=image)["image"],
    "partial": lambda: functools.partial(lambda t, image: t(image=image)["image"], A.Compose([A.RandomCrop(20, 20)])),
    "held": lambda: Held(A.Compose([A.RandomCrop(20, 20)])),
    "bound": lambda: Held(A.RandomCrop(20, 20)).__call__,
    "within a Compose": lambda: A.Compose([Strange(A.Compose([A.RandomCrop(20, 20)]))]),
    "Lambda": lambda: A.Compose([A.Lambda(image=lambda image, **_: INSIDE(image=image)["image"])]),
    "RandomState": lambda: functools.partial(lambda r, image: image + np.uint8(r.randint(100)), np.random.RandomState(1)),
    "random.Random": lambda: functools.partial(lambda r, image: image + np.uint8(r.randrange(100)), random.Random(1)),
    "torch.Generator": lambda: functools.partial(
        lambda g, image: image + torch.randint(100, (1,), generator=g).numpy().astype("uint8"), torch.Generator()
    ),
}


@pytest.mark.parametrize("how", HIDING)
def test_what_a_callable_hides_is_seeded_for_the_sample(how: str) -> None:
    """A transform or a generator inside a function or an object draws by the sample's seed, in whatever order samples come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply = HIDING[how]()
    first, other = (Augmenter(prepare(apply).apply, isolated=isolated) for isolated in (False, True))
    drawn = {seed: first(PICTURE.copy(), seed).copy() for seed in range(12)}
    for seed in reversed(range(12)):
        np.testing.assert_array_equal(other(PICTURE.copy(), seed), drawn[seed])
    assert len({picture.tobytes() for picture in drawn.values()}) > 1


def test_without_workers_what_is_hidden_goes_on_as_before() -> None:
    """The user's own Compose and generators draw on as if the loader weren't there."""
    rng, compose_of_user = (
        np.random.default_rng(7),
        A.Compose([A.RandomCrop(20, 20), A.OneOf([A.HorizontalFlip(), A.VerticalFlip()])]),
    )
    compose_of_user.set_random_seed(5)
    twin = copy.deepcopy(compose_of_user)

    def apply(image: Any) -> Any:
        return compose_of_user(image=image)["image"] + rng.integers(0, 9, dtype=np.uint8)

    augmenter = Augmenter(apply, isolated=True)
    for seed in range(5):
        augmenter(PICTURE, seed)
    assert rng.integers(2**40) == np.random.default_rng(7).integers(2**40)
    for _ in range(5):
        np.testing.assert_array_equal(compose_of_user(image=PICTURE)["image"], twin(image=PICTURE)["image"])


class Many(list[str]):
    """Counts how many of its items were asked for."""

    asked = 0

    def __iter__(self) -> Iterator[str]:
        for item in super().__iter__():
            self.asked += 1
            yield item


def test_what_holds_a_lot_is_not_searched_through() -> None:
    """Of a callable's long list of paths a few are looked at."""
    paths = Many(["a/path.jpg"] * 50_000)
    Augmenter(lambda image, paths=paths: image + np.uint8(len(paths) % 2), isolated=False)(PICTURE, 1)
    assert 0 < paths.asked <= 2001
