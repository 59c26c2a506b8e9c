"""The pictures that a loader gives: decoded, augmented, normalized, each with its own label, the user's for good."""

from __future__ import annotations

import logging
import random
import weakref
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from batches import KEYED, draw_all, plain
from packing import PackedSet, jpeg, pack, write_tar

import pipeline
from pipeline import LoaderOptions, make_loader
from pipeline.items import Batch, KeyedBatch


def test_the_same_pictures_for_any_workers(small_set: PackedSet) -> None:
    """Not only the keys: pixels and labels of augmented batches are equal for any number of workers."""
    transform = A.Compose([A.Resize(32, 32), A.Rotate(limit=15), A.ChannelDropout(p=0.5), A.Normalize()])
    runs = []
    for workers in (0, 1, 3):
        with make_loader(small_set.folder, batch_size=32, num_workers=workers, transform=transform) as loader:
            runs.append(list(loader))
    for run in runs[1:]:
        assert all(torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in zip(runs[0], run, strict=True))


def test_labels_belong_to_their_pictures(small_set: PackedSet) -> None:
    """A batch's labels are int64 (B,) and each belongs to its key; pictures are the key's own, in RGB, in [0, 1]."""
    with make_loader(small_set.folder, batch_size=7, num_workers=2, options=KEYED) as loader:
        for images, labels, keys in loader:
            assert labels.dtype == torch.int64
            assert labels.tolist() == [small_set.labels[key] for key in keys]
            assert images.dtype == torch.float32
            assert images.shape[1:] == (3, 48, 64)
            assert images.is_contiguous(memory_format=torch.channels_last)
            for image, key in zip(images, keys, strict=True):
                expected = plain(small_set.pictures[key]).astype(np.float32) / 255
                np.testing.assert_allclose(image.permute(1, 2, 0).numpy(), expected, atol=1e-6)


def test_batch_types(small_set: PackedSet) -> None:
    """A batch is a named tuple of two, with `keys=True` of three."""
    batch = next(iter(make_loader(small_set.folder, batch_size=4, num_workers=0)))
    assert isinstance(batch, Batch)
    assert batch._fields == ("images", "labels")
    keyed = next(iter(make_loader(small_set.folder, batch_size=4, num_workers=0, options=LoaderOptions(keys=True))))
    assert isinstance(keyed, KeyedBatch)
    assert keyed._fields == ("images", "labels", "keys")


@pytest.mark.case("W11")
def test_problems_transform_equals_plain_albumentations(tmp_path: Path) -> None:
    """The problem's transform through the loader equals albumentations on the same picture with the same draws, to 1e-5."""
    packed = pack(tmp_path, 48, 2, make=lambda n: jpeg(n, 90, 120))
    transform = A.Compose([A.Resize(100, 100), A.Rotate(limit=15), A.ChannelDropout(p=0.1), A.Normalize()])
    with make_loader(tmp_path, batch_size=16, num_workers=2, transform=transform, seed=5, options=KEYED) as loader:
        epochs = [list(loader), list(loader)]
    for epoch, batches in enumerate(epochs):
        for images, _labels, keys in batches:
            for image, key in zip(images, keys, strict=True):
                transform.set_random_state(*pipeline.sample_generators(5, epoch, key))
                expected = transform(image=plain(packed.pictures[key]))["image"]
                np.testing.assert_allclose(image.permute(1, 2, 0).numpy(), expected, atol=1e-5)
    first, second = ({k: i for b in e for k, i in zip(b.keys, b.images, strict=True)} for e in epochs)
    assert sum(torch.equal(first[key], second[key]) for key in first) < len(first) * 0.6  # half of Rotate's draws are "no"


@pytest.mark.case("I08", "I09", "I12")
def test_pictures_of_every_make_in_one_batch(tmp_path: Path) -> None:
    """Grey, transparent and misnamed pictures go through a transform of three channels and stack; alpha is dropped."""
    made = {
        "grey": cv2.imencode(".jpg", np.full((16, 24), 90, np.uint8)),
        "clear": cv2.imencode(".png", np.full((16, 24, 4), (10, 20, 200, 0), np.uint8)),
        "png": cv2.imencode(".png", np.full((16, 24, 3), (30, 60, 120), np.uint8)),
    }
    write_tar(tmp_path / "a-000000.tar", [(key, [("jpg", data.tobytes()), ("cls", b"0")]) for key, (_, data) in made.items()])
    options = LoaderOptions(dtype="uint8", keys=True)
    loader = make_loader(tmp_path, batch_size=3, num_workers=0, transform=A.Compose([A.ChannelDropout(p=1)]), options=options)
    (batch,) = loader
    assert batch.images.shape == (3, 3, 16, 24)
    colors = {"grey": (90, 90, 90), "clear": (200, 20, 10), "png": (120, 60, 30)}
    for image, key in zip(batch.images, batch.keys, strict=True):
        channels = [channel.unique().tolist() for channel in image]
        assert channels.count([0]) == 1
        assert all(channel in ([0], [color]) for channel, color in zip(channels, colors[key], strict=True))


def test_two_transforms_draw_independently(tmp_path: Path) -> None:
    """HorizontalFlip and VerticalFlip of one Compose agree as often as two coins do, not always."""

    def corner(number: int) -> bytes:
        picture = np.zeros((16, 16, 3), np.uint8)
        picture[:8, :8] = 255
        return cv2.imencode(".jpg", picture)[1].tobytes()

    pack(tmp_path, 400, 3, make=corner)
    flips = A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)])
    loader = make_loader(tmp_path, batch_size=50, num_workers=0, transform=flips)
    corners = torch.cat([images[:, 0, [4, 4, 12, 12], [4, 12, 4, 12]].argmax(1) for images, _ in loader])
    counts = torch.bincount(corners, minlength=4)
    assert counts.min() > 65, counts  # 100 each expected; all on two corners if both shared their draws


def test_transform_is_copied_and_never_reseeded(small_set: PackedSet) -> None:
    """The user's transform keeps its parts and its random state."""
    transform = A.Compose([A.Resize(16, 16), A.HorizontalFlip(p=0.5), A.Normalize()], seed=3)
    before = transform.random_generator.bit_generator.state, transform.py_random.getstate()
    list(make_loader(small_set.folder, batch_size=50, num_workers=0, transform=transform))
    assert len(transform.transforms) == 3
    assert (transform.random_generator.bit_generator.state, transform.py_random.getstate()) == before


def test_normalize_that_cannot_be_lifted_stays_and_says_so(small_set: PackedSet, caplog: pytest.LogCaptureFixture) -> None:
    """A Normalize with p < 1, or another kind, is done in the workers as it stands, and a log line says so."""
    transform = A.Compose([A.Resize(16, 16), A.Normalize(normalization="image")])
    with caplog.at_level(logging.INFO, logger="pipeline"):
        loader = make_loader(small_set.folder, batch_size=8, num_workers=0, transform=transform, options=KEYED)
    assert "Normalize" in caplog.text
    images, _, keys = next(iter(loader))
    expected = transform(image=plain(small_set.pictures[keys[0]]))["image"]
    np.testing.assert_allclose(images[0].permute(1, 2, 0).numpy(), expected, atol=1e-5)


def test_uint8_gives_the_bytes(small_set: PackedSet) -> None:
    """dtype="uint8" gives the augmented bytes, and a lifted Normalize is left out."""
    options = LoaderOptions(dtype="uint8", keys=True)
    for workers in (0, 1):
        loader = make_loader(
            small_set.folder, batch_size=8, num_workers=workers, transform=A.Compose([A.Normalize()]), options=options
        )
        images, _, keys = next(iter(loader))
        assert images.dtype == torch.uint8
        assert not images.is_shared()
        np.testing.assert_array_equal(images[0].permute(1, 2, 0).numpy(), plain(small_set.pictures[keys[0]]))


def test_uint8_with_a_float_transform_is_an_error(small_set: PackedSet) -> None:
    """dtype="uint8" can't be had from a transform that gives floats; the message says what to do."""
    transform = A.Compose([A.Normalize(normalization="min_max")])
    loader = make_loader(small_set.folder, batch_size=8, num_workers=0, transform=transform, options=LoaderOptions(dtype="uint8"))
    with pytest.raises(pipeline.TransformError, match=r"float32.*A\.Normalize"):
        next(iter(loader))


def test_decode_none_yields_bytes(small_set: PackedSet) -> None:
    """decode="none" yields the files' bytes, untouched, with labels."""
    for workers in (0, 2):
        loader = make_loader(small_set.folder, batch_size=8, num_workers=workers, options=LoaderOptions(decode="none", keys=True))
        for images, labels, keys in loader:
            assert images == [small_set.pictures[key] for key in keys]
            assert labels.tolist() == [small_set.labels[key] for key in keys]


def test_decode_auto_differs_little_and_only_where_it_may(tmp_path: Path) -> None:
    """decode="auto" decodes at a fraction where the transform begins with a resize to half or less; else it equals "full"."""
    pack(tmp_path, 16, 1, make=lambda n: jpeg(n, 240, 320))
    got = {}
    for decode in ("full", "auto"):
        for size in (60, 200):
            options = LoaderOptions(decode=decode, last_batch="uneven")  # type: ignore[arg-type]
            transform = A.Compose([A.Resize(size, size)])
            got[decode, size] = next(
                iter(make_loader(tmp_path, batch_size=16, num_workers=0, transform=transform, options=options))
            ).images
    assert torch.equal(got["full", 200], got["auto", 200])
    assert not torch.equal(got["full", 60], got["auto", 60])
    assert (got["full", 60] - got["auto", 60]).abs().mean() < 0.02


def test_a_batch_is_the_users_for_good(small_set: PackedSet) -> None:
    """Batches that are kept never change, in each dtype and with any transform; memory of dropped ones is used again."""
    for dtype, transform in (("float32", None), ("uint8", None), ("float32", A.Compose([A.ToFloat()]))):
        options = LoaderOptions(dtype=dtype, keys=True)  # type: ignore[arg-type]
        with make_loader(small_set.folder, batch_size=8, num_workers=2, transform=transform, options=options) as loader:
            kept, copies = [], []
            for batch in loader:
                kept.append(batch.images[1:, :1])  # a view is enough to hold the memory
                copies.append(batch.images[1:, :1].clone())
            assert len(kept) == 25
            assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    with make_loader(small_set.folder, batch_size=8, num_workers=0) as loader:
        places = {images.data_ptr() for images, _ in loader}
    assert len(places) <= 3


@pytest.mark.case("P09")
def test_shuffling_holds_no_decoded_pictures(small_set: PackedSet) -> None:
    """Batches hold samples of all shards, and yet no more pictures than two batches are there at any time: what is mixed is a plan (P09)."""
    alive: set[int] = set()
    most = 0

    def watched(image: np.ndarray) -> np.ndarray:
        nonlocal most
        made = image.copy()
        alive.add(id(made))
        weakref.finalize(made, alive.discard, id(made))
        most = max(most, len(alive))
        return made

    options = LoaderOptions(keys=True, dtype="uint8")
    with make_loader(small_set.folder, batch_size=8, num_workers=0, transform=watched, options=options) as loader:
        shards = [len({small_set.keys.index(key) // 50 for key in batch.keys}) for batch in loader]
    assert np.mean(shards) > 3  # of 4
    assert 0 < most <= 16


@pytest.mark.parametrize("persistent", [True, False])
def test_slots_never_mix_batches(small_set: PackedSet, persistent: bool) -> None:
    """Over epochs cut short at every step, with batches of two sizes, each picture is its key's own when it is handed over."""
    options = LoaderOptions(keys=True, last_batch="uneven", dtype="uint8", persistent_workers=persistent, prefetch_factor=1)
    with make_loader(small_set.folder, batch_size=30, num_workers=2, options=options) as loader:
        for stop in [*range(1, 8), 7]:
            for step, (images, _labels, keys) in enumerate(loader, 1):
                for image, key in zip(images, keys, strict=True):
                    np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), plain(small_set.pictures[key]))
                if step == stop:
                    break


def test_pictures_of_two_types_name_both_and_the_cure(small_set: PackedSet) -> None:
    """A Normalize that is done by half of the time leaves bytes beside floats: that is said, not that sizes differ."""
    transform = A.Compose([A.Resize(8, 8), A.Normalize(p=0.5)])
    loader = make_loader(small_set.folder, batch_size=50, num_workers=0, transform=transform)
    with pytest.raises(
        pipeline.PipelineError, match=r"two types in one batch: .*(uint8.*float32|float32.*uint8); .*A\.Normalize\(p=1\)"
    ):
        list(loader)


@pytest.mark.parametrize("value", [np.int64(4), torch.tensor(4)])
def test_whole_numbers_of_other_libraries_are_named_as_such(small_set: PackedSet, value: Any) -> None:
    """They are whole numbers; what is wanted is Python's."""
    with pytest.raises(pipeline.OptionsError, match=r"batch_size=.*: a whole number, 1 or more, as Python's int: int\(x\)"):
        make_loader(small_set.folder, batch_size=value, num_workers=0)


def test_pictures_of_unequal_size_name_both_and_the_cure(tmp_path: Path) -> None:
    """The first batch that can't be stacked names two keys, their sizes, and what to do."""
    pack(tmp_path, 20, 1, make=lambda n: jpeg(n, 40 + 8 * (n % 2), 64))
    for workers in (0, 1):
        with make_loader(tmp_path, batch_size=10, num_workers=workers) as loader, pytest.raises(pipeline.TransformError) as caught:
            next(iter(loader))
        text = str(caught.value)
        assert "40x64" in text
        assert "48x64" in text
        assert text.count("train0000") >= 2
        assert "A.Resize" in text


def gray_floats(image: np.ndarray) -> np.ndarray:
    return image.mean(axis=2).astype(np.float32) / 255


def test_plain_callables(small_set: PackedSet) -> None:
    """Any callable will do: arrays (H, W, C) or (H, W), tensors (C, H, W), uint8 or float32."""
    for transform, channels in (
        (gray_floats, 1),
        (lambda image: torch.from_numpy(image).permute(2, 0, 1), 3),
        (lambda image: torch.from_numpy(image).permute(2, 0, 1).float() / 255, 3),
    ):
        images, _, keys = next(iter(make_loader(small_set.folder, batch_size=4, num_workers=0, transform=transform, options=KEYED)))
        assert images.shape == (4, channels, 48, 64)
        picture = plain(small_set.pictures[keys[0]])
        expected = gray_floats(picture)[..., None] if channels == 1 else picture.astype(np.float32) / 255
        np.testing.assert_allclose(images[0].permute(1, 2, 0).numpy(), expected, atol=1e-6)


def nothing_left(image: np.ndarray, **_: Any) -> np.ndarray:
    return image[:0]


@pytest.mark.parametrize(
    "bad",
    [
        lambda image: None,
        lambda image: image.astype(np.int32),
        lambda image: image[:0],
        lambda image: 1 / 0,
        A.Compose([A.Lambda(image=nothing_left), A.Resize(8, 8)]),
    ],
)
@pytest.mark.case("A02", "A10")
def test_what_a_transform_may_not_give(small_set: PackedSet, bad: Any) -> None:
    """A transform that fails or gives something unusable is an error that names the sample and the shard."""
    loader = make_loader(small_set.folder, batch_size=4, num_workers=0, transform=bad)
    with pytest.raises(pipeline.TransformError, match=r"train-00000\d\.tar.*'train000\d\d\d'"):
        next(iter(loader))


@pytest.mark.case("W13")
def test_plain_callables_are_seeded_for_each_sample(small_set: PackedSet) -> None:
    """random, numpy and torch are seeded for the sample: equal for any workers, unlike between samples and epochs."""
    runs = []
    for workers in (0, 2):
        with make_loader(small_set.folder, batch_size=20, num_workers=workers, transform=draw_all) as loader:
            runs.append([torch.cat([images[:, :, 0, 0] for images, _ in loader]) for _epoch in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert len(torch.unique(torch.cat(runs[0]), dim=0)) == 400


GENERATOR = np.random.default_rng(0)


def rolled(image: np.ndarray) -> np.ndarray:
    """Draw from a generator of the module, which forked workers have a copy of each."""
    return np.roll(image, tuple(GENERATOR.integers(0, 48, 2)), (0, 1))


@pytest.mark.case("W11", "W13")
@pytest.mark.parametrize("transform", [A.Compose([A.RandomCrop(20, 20)]), rolled], ids=["Compose", "generator"])
def test_draws_follow_from_seed_epoch_and_key_alone(tmp_path: Path, transform: Any) -> None:
    """Of one picture under 24 keys each sample has its own draws in each epoch, the same for any forked workers and any ranks (W11, W13)."""
    pack(tmp_path, 24, 2, make=lambda _number: jpeg(1))

    def drawn(workers: int, rank: int = 0, size: int = 1) -> dict[tuple[int, str], bytes]:
        options = LoaderOptions(keys=True, dtype="uint8", rank=rank, world_size=size, multiprocessing_context="fork")
        torch.manual_seed(0)  # as all ranks of a trainer may
        found = {}
        with make_loader(tmp_path, batch_size=4 // size, num_workers=workers, transform=transform, options=options) as loader:
            for epoch in range(2):
                for images, _labels, keys in loader:
                    found.update({(epoch, key): image.numpy().tobytes() for image, key in zip(images, keys, strict=True)})
        return found

    whole = drawn(0)
    assert len(whole) == 48
    assert len(set(whole.values())) > 40  # by chance two may be equal
    assert drawn(2) == whole
    assert drawn(1, 0, 2) | drawn(1, 1, 2) == whole


def test_the_trainers_random_state_is_untouched(small_set: PackedSet) -> None:
    """Neither building a loader nor a pass over it draws from or seeds the trainer's generators, with and without workers."""
    for workers in (0, 2):
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()
        with make_loader(small_set.folder, batch_size=20, num_workers=workers, transform=draw_all) as loader:
            list(loader)
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]
        assert torch.equal(torch.random.get_rng_state(), before[2])


def test_batches_go_to_the_device(small_set: PackedSet) -> None:
    """Images and labels are on the device that was asked for, normalized there."""
    images, labels = next(iter(make_loader(small_set.folder, batch_size=4, num_workers=1, device="meta")))
    assert images.device.type == labels.device.type == "meta"
    assert images.shape == (4, 3, 48, 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_gives_what_the_cpu_gives(small_set: PackedSet) -> None:
    """On a GPU batches are the same, on the device."""
    transform = A.Compose([A.Resize(32, 32), A.Normalize()])
    cpu = next(iter(make_loader(small_set.folder, batch_size=16, num_workers=1, transform=transform)))
    gpu = next(iter(make_loader(small_set.folder, batch_size=16, num_workers=1, transform=transform, device="cuda")))
    assert gpu.images.is_cuda
    assert gpu.images.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(gpu.images.cpu(), cpu.images, atol=1e-5, rtol=0)
    assert torch.equal(gpu.labels.cpu(), cpu.labels)


def test_an_empty_compose(small_set: PackedSet) -> None:
    """A Compose of nothing is a transform that does nothing."""
    assert next(iter(make_loader(small_set.folder, batch_size=4, num_workers=0, transform=A.Compose([])))).images.shape == (
        4,
        3,
        48,
        64,
    )


def test_bytes_are_no_picture(small_set: PackedSet) -> None:
    """A transform that gives bytes, for some samples or all, is an error: no row of a batch is left undefined."""
    loader = make_loader(small_set.folder, batch_size=8, num_workers=0, transform=lambda image: image.tobytes())
    with pytest.raises(pipeline.TransformError, match="gave bytes"):
        next(iter(loader))
