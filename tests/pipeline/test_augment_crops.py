"""Random resized crops of pictures that are decoded at a scale: the same draws as of whole ones, and nearly the same pixels."""

from __future__ import annotations

import random
import struct
from functools import partial
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import jpeg, pack

from pipeline import LoaderOptions, make_loader
from pipeline.augment import Augmenter, prepare
from pipeline.augment.crops import Foresight
from pipeline.decode import decode_for_crop, decode_image

TARGET = (32, 24)


def composed(*parts: Any, **given: Any) -> Any:
    """Return what the workers run of a Compose."""
    return prepare(A.Compose([*parts], **given)).apply


def with_orientation(data: bytes, orientation: int) -> bytes:
    exif = b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + struct.pack(">H", orientation) + bytes(6)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]


@given(height=st.integers(1, 3000), width=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_the_crop_is_foreseen(height: int, width: int, seed: int) -> None:
    """What is drawn before decoding is what albumentations draws for the whole picture, also where its ten tries fail."""
    parts = A.RandomResizedCrop((8, 8), scale=(0.01, 1.0), ratio=(0.2, 5.0)), A.HorizontalFlip(p=0.5)
    told = A.Compose([*parts], save_applied_params=True)
    told.set_random_state(np.random.Generator(np.random.Philox(key=seed)), random.Random(seed))
    picture = np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (height, width, 3))
    left, top, right, bottom = dict(told(image=picture)["applied_transforms"])["RandomResizedCrop"]["crop_coords"]
    assert Foresight(composed(*parts))((height, width), seed) == (bottom - top, right - left)


@pytest.mark.parametrize(
    ("transform", "crop"),
    [
        (A.Compose([A.RandomResizedCrop(TARGET)]), TARGET),
        (A.Compose([A.RandomResizedCrop(TARGET), A.Normalize()]), TARGET),
        (A.Compose([A.RandomResizedCrop(TARGET, p=0.5)]), None),
        (A.Compose([A.RandomResizedCrop(TARGET)], p=0.5), None),
        (A.Compose([A.HorizontalFlip(), A.RandomResizedCrop(TARGET)]), None),
        (A.Compose([A.OneOf([A.RandomResizedCrop(TARGET)])]), None),
        (A.Compose([A.RandomResizedCrop(TARGET)], additional_targets={"image2": "image"}), None),
        (A.ReplayCompose([A.RandomResizedCrop(TARGET)]), None),
        (A.RandomResizedCrop(TARGET), None),
        (A.Compose([A.RandomSizedCrop((8, 20), TARGET)]), None),
    ],
)
def test_crops_that_can_be_foreseen(transform: Any, crop: tuple[int, int] | None) -> None:
    """A first RandomResizedCrop that is always taken, of a Compose that runs on pictures alone; no other."""
    assert prepare(transform).crop == crop


def test_a_crop_of_the_users_own_is_not_foreseen() -> None:
    """A class derived from it may look at the pixels, and so may a method that was set on it."""

    class Own(A.RandomResizedCrop):  # type: ignore[misc]  # albumentations has no types
        """Draws as it likes."""

    assert prepare(A.Compose([Own(TARGET)])).crop is None
    changed = A.RandomResizedCrop(TARGET)
    changed.get_params_dependent_on_data = lambda params, data: {"crop_coords": (0, 0, 9, 9)}
    assert prepare(A.Compose([changed])).crop is None


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("sides", [(640, 480), (301, 611), (255, 257)])
def test_scaled_crops_are_nearly_those_of_whole_pictures(sides: tuple[int, int], orientation: int) -> None:
    """Smooth pictures differ by little, whichever way up; the flips behind the crop are the same; the scaled one is no smaller."""
    data = with_orientation(jpeg(3, *sides), orientation)
    whole, scaled, off = decode_image(data), 0, list[float]()
    augmenter = Augmenter(composed(A.RandomResizedCrop(TARGET, scale=(0.1, 1.0)), A.HorizontalFlip(p=0.5)), isolated=False)
    foresight = Foresight(augmenter._apply.transform)
    for seed in range(40):
        picture, full = decode_for_crop(data, TARGET, partial(foresight, seed=seed))
        expected = augmenter(whole, seed).astype(int)
        got = augmenter(picture, seed, full).astype(int)
        assert got.shape == (*TARGET, 3)
        off.append(float(np.abs(got - expected).mean()))
        if full is None:
            np.testing.assert_array_equal(got, expected)
            continue
        scaled += 1
        assert full == whole.shape[:2] and picture.shape[0] < full[0]
        crop = foresight(full, seed)
        assert crop[0] * picture.shape[0] >= TARGET[0] * full[0] and crop[1] * picture.shape[1] >= TARGET[1] * full[1]
    assert scaled > 20
    assert max(off) < 9 and np.mean(off) < 4.5  # a color changes all over within 4 pixels, and the crop is off by half a pixel


def test_what_is_no_larger_is_decoded_whole() -> None:
    """A small crop, a small picture, another format: nothing is scaled."""
    assert decode_for_crop(jpeg(1, 640, 480), TARGET, lambda _sides: (63, 47))[1] is None
    assert decode_for_crop(jpeg(1, 63, 480), TARGET, lambda sides: sides)[1] is None
    done, png = cv2.imencode(".png", np.zeros((640, 480, 3), np.uint8))
    assert done and decode_for_crop(png.tobytes(), TARGET, lambda sides: sides)[1] is None
    assert decode_for_crop(jpeg(1, 640, 480), TARGET, lambda _sides: (64, 48))[1] == (640, 480)


def test_a_loader_crops_scaled_pictures_alike_in_any_number_of_workers(tmp_path: Path) -> None:
    """decode="auto" differs little from "full", and not at all between numbers of workers."""
    pack(tmp_path, 24, 2, make=lambda n: jpeg(n, 240, 320))
    transform = A.Compose([A.RandomResizedCrop((40, 40), scale=(0.3, 1.0)), A.HorizontalFlip(), A.Normalize()])
    got = []
    for decode, workers in (("full", 0), ("auto", 0), ("auto", 2)):
        options = LoaderOptions(decode=decode, last_batch="uneven")  # type: ignore[arg-type]
        with make_loader(tmp_path, batch_size=24, num_workers=workers, transform=transform, options=options) as loader:
            got.append([next(iter(loader)) for _ in range(2)])
    for full, auto, workers in zip(*got, strict=True):
        assert torch.equal(full.labels, auto.labels)
        assert torch.equal(auto.images, workers.images)
        assert 0 < (full.images - auto.images).abs().mean() < 0.08
