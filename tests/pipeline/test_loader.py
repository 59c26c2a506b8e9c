"""The trainer's view: what a user gets from `make_loader`, each promise of it."""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from packing import PackedSet, jpeg, pack
from spawned import process
from torch.utils.data import get_worker_info

import pipeline
from pipeline import LoaderOptions, make_loader
from pipeline.items import Batch, KeyedBatch

KEYED = LoaderOptions(keys=True, last_batch="uneven")


def batches_of(loader: Any) -> list[tuple[str, ...]]:
    return [tuple(batch.keys) for batch in loader]


def plain(data: bytes) -> np.ndarray:
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


@pytest.mark.parametrize("shards", [1, 4, 20])
def test_every_key_once_and_the_same_batches_for_any_workers(tmp_path: Path, shards: int) -> None:
    """Every key comes exactly once an epoch, `len` is exact, and the number of workers changes nothing."""
    packed = pack(tmp_path, 300, shards)
    seen = {}
    for workers in (0, 1, 2, 5):
        with make_loader(tmp_path, batch_size=64, num_workers=workers, options=KEYED) as loader:
            epochs = [batches_of(loader), batches_of(loader)]
            assert [len(epoch) for epoch in epochs] == [len(loader)] * 2 == [5, 5]
        for epoch in epochs:
            assert sorted(key for batch in epoch for key in batch) == sorted(packed.keys)
        seen[workers] = epochs
        assert epochs[0] != epochs[1]
    assert all(epochs == seen[0] for epochs in seen.values())


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


@pytest.mark.parametrize(
    "bad", [lambda image: None, lambda image: image.astype(np.int32), lambda image: image[:0], lambda image: 1 / 0]
)
def test_what_a_transform_may_not_give(small_set: PackedSet, bad: Any) -> None:
    """A transform that fails or gives something unusable is an error that names the sample and the shard."""
    loader = make_loader(small_set.folder, batch_size=4, num_workers=0, transform=bad)
    with pytest.raises(pipeline.TransformError, match=r"train-00000\d\.tar.*'train000\d\d\d'"):
        next(iter(loader))


def draw_all(image: np.ndarray) -> np.ndarray:
    values = (random.random(), np.random.rand(), float(torch.rand(1)))
    return np.full((2, 2, 3), values, np.float32)


def test_plain_callables_are_seeded_for_each_sample(small_set: PackedSet) -> None:
    """random, numpy and torch are seeded for the sample: equal for any workers, unlike between samples and epochs."""
    runs = []
    for workers in (0, 2):
        with make_loader(small_set.folder, batch_size=20, num_workers=workers, transform=draw_all) as loader:
            runs.append([torch.cat([images[:, :, 0, 0] for images, _ in loader]) for _epoch in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert len(torch.unique(torch.cat(runs[0]), dim=0)) == 400


def test_the_trainers_random_state_is_untouched(small_set: PackedSet) -> None:
    """Neither building a loader nor a pass over it draws from or seeds the trainer's generators, with and without workers."""
    for workers in (0, 2):
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()
        with make_loader(small_set.folder, batch_size=20, num_workers=workers, transform=draw_all) as loader:
            list(loader)
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]
        assert torch.equal(torch.random.get_rng_state(), before[2])


def test_each_iter_is_the_next_epoch_even_after_a_break(small_set: PackedSet) -> None:
    """An early break ends the epoch; the next iter begins the next one; set_epoch picks; a peek uses one up."""
    for workers, persistent in ((0, True), (2, True), (2, False)):
        options = LoaderOptions(keys=True, last_batch="uneven", persistent_workers=persistent)
        with make_loader(small_set.folder, batch_size=16, num_workers=workers, options=options) as loader:
            epochs = [batches_of(loader) for _ in range(4)]
            loader.set_epoch(1)
            for batch in loader:
                assert tuple(batch.keys) == epochs[1][0]
                break
            assert batches_of(loader) == epochs[2]
            assert tuple(next(iter(loader)).keys) == epochs[3][0]
            loader.set_epoch(0)
            assert batches_of(loader) == epochs[0]


def test_a_second_iter_ends_the_first(small_set: PackedSet, caplog: pytest.LogCaptureFixture) -> None:
    """Two iterations over one loader never mix: the first one ends when the second begins, and asked again says why."""
    for workers in (0, 2):
        with make_loader(small_set.folder, batch_size=16, num_workers=workers, options=KEYED) as loader:
            first = iter(loader)
            next(first)
            second = batches_of(loader)
            with caplog.at_level(logging.WARNING, logger="pipeline"):
                assert list(first) == []
            assert "ended by a newer iter" in caplog.text
            caplog.clear()
            assert sorted(k for b in second for k in b) == sorted(small_set.keys)


@pytest.mark.parametrize(("last", "steps", "sizes"), [("drop", 6, {30}), ("pad", 7, {30}), ("uneven", 7, {30, 20})])
def test_last_batch(small_set: PackedSet, last: Any, steps: int, sizes: set[int]) -> None:
    """Drop leaves 200 mod 30 out, pad repeats under other draws, uneven ends short; `len` is exact."""
    options = LoaderOptions(keys=True, last_batch=last)
    with make_loader(small_set.folder, batch_size=30, num_workers=2, options=options, transform=draw_all) as loader:
        batches = list(loader)
        assert len(loader) == len(batches) == steps
    assert {len(b.keys) for b in batches} == sizes
    keys = [key for batch in batches for key in batch.keys]
    assert len(set(keys)) == (180 if last == "drop" else 200)
    if last == "pad":
        drawn = torch.cat([batch.images[:, :, 0, 0] for batch in batches])
        assert len(torch.unique(drawn, dim=0)) == 210


def test_defaults_of_last_batch(small_set: PackedSet) -> None:
    """The default is drop when shuffling, uneven otherwise."""
    assert len(make_loader(small_set.folder, batch_size=30, num_workers=0)) == 6
    assert len(make_loader(small_set.folder, batch_size=30, num_workers=0, shuffle=False)) == 7


def test_zero_steps_is_an_error_with_the_numbers(small_set: PackedSet) -> None:
    """A batch larger than the set leaves no step: an error at once, not an empty epoch."""
    with pytest.raises(pipeline.OptionsError, match=r"200.*256"):
        make_loader(small_set.folder, batch_size=256)


def test_unshuffled_is_storage_order(small_set: PackedSet) -> None:
    """shuffle=False gives the samples as they are stored, each epoch."""
    with make_loader(small_set.folder, batch_size=64, num_workers=2, shuffle=False, options=LoaderOptions(keys=True)) as loader:
        for _epoch in range(2):
            assert [key for batch in loader for key in batch.keys] == small_set.keys


def test_seeds_give_other_orders(small_set: PackedSet) -> None:
    """Another seed is another order, the same seed the same one."""
    one, same, other = (
        batches_of(make_loader(small_set.folder, batch_size=20, num_workers=0, seed=s, options=KEYED)) for s in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize("shards", [1, 4, 20])
def test_epochs_are_unlike_each_other(tmp_path: Path, shards: int) -> None:
    """Over 20 pairs of epochs first batches overlap at most 1.5 times chance, and rank correlation is at most 0.15 (rms)."""
    packed = pack(tmp_path, 640, shards, make=lambda n: b"\xff\xd8" + n.to_bytes(4, "big") * 64)
    options = LoaderOptions(keys=True, decode="none", last_batch="uneven", window_bytes=32 * 1024)
    loader = make_loader(tmp_path, batch_size=64, num_workers=0, options=options)
    place = {key: i for i, key in enumerate(packed.keys)}
    epochs = [np.array([place[key] for batch in loader for key in batch.keys]) for _ in range(21)]
    pairs = list(zip(epochs, epochs[1:], strict=False))
    overlap = np.mean([len(set(a[:64]) & set(b[:64])) for a, b in pairs])
    assert overlap <= 1.5 * 64 * 64 / 640
    correlation = [np.corrcoef(np.argsort(a), np.argsort(b))[0, 1] for a, b in pairs]
    assert math.sqrt(np.mean(np.square(correlation))) <= 0.15


def test_classes(tmp_path: Path) -> None:
    """The loader tells the classes; a val set that numbers them otherwise is an error that names the first that differs."""
    pack(tmp_path / "s", 20, 1)
    pack(tmp_path / "s", 20, 1, split="val", first=100)
    pack(tmp_path / "other", 20, 1, split="val", classes=("a", "c", "b", "d", "e"))
    train = make_loader(tmp_path / "s", batch_size=4, num_workers=0, options=LoaderOptions(split="train"))
    assert train.classes == ("a", "b", "c", "d", "e")
    assert train.num_classes == 5
    make_loader(tmp_path / "s", batch_size=4, num_workers=0, options=LoaderOptions(split="val", classes=train.classes))
    with pytest.raises(pipeline.OptionsError, match=r"class 1 is 'c' here and 'b' there"):
        make_loader(tmp_path / "other", batch_size=4, num_workers=0, options=LoaderOptions(classes=train.classes))


def test_two_splits_and_none_named(tmp_path: Path) -> None:
    """A folder with two splits and none named is an error that names both."""
    pack(tmp_path, 20, 1)
    pack(tmp_path, 20, 1, split="val", first=100)
    with pytest.raises(pipeline.PipelineError, match=r"train.*val.*split"):
        make_loader(tmp_path, batch_size=4)


def test_no_labels_and_labels_in_json(small_set: PackedSet, tmp_path: Path) -> None:
    """label=None gives None; label="json:name" reads a number from the sample's json."""
    assert next(iter(make_loader(small_set.folder, batch_size=4, num_workers=0, options=LoaderOptions(label=None)))).labels is None
    from packing import write_tar

    write_tar(tmp_path / "j-000000.tar", [(f"k{i}", [("jpg", jpeg(i)), ("json", b'{"height": %d}' % (i * 10))]) for i in range(8)])
    options = LoaderOptions(label="json:height", keys=True)
    for _images, labels, keys in make_loader(tmp_path, batch_size=4, num_workers=0, options=options):
        assert labels.tolist() == [int(key[1:]) * 10 for key in keys]


def test_unindexed_tars_of_others(tmp_path: Path) -> None:
    """Tars without index and manifest are read too: classes are unknown, everything else as ever."""
    packed = pack(tmp_path, 40, 3)
    for path in [*tmp_path.glob("*.idx"), *tmp_path.glob("*.json")]:
        path.unlink()
    with make_loader(str(tmp_path / "train-{000000..000002}.tar"), batch_size=8, num_workers=2, options=KEYED) as loader:
        assert sorted(key for batch in loader for key in batch.keys) == sorted(packed.keys)
        assert loader.classes is None
        assert loader.num_classes is None


def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    """A shard shorter than its manifest says is an error with both sizes, from workers too."""
    pack(tmp_path, 40, 1)
    path = tmp_path / "train-000000.tar"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2)
    for workers in (0, 1):
        with make_loader(tmp_path, batch_size=8, num_workers=workers) as loader, pytest.raises(pipeline.ShardError) as caught:
            list(loader)
        assert str(size) in str(caught.value)
        assert str(size // 2) in str(caught.value)
        assert "train-000000.tar" in str(caught.value)


def test_an_undecodable_picture_is_named(tmp_path: Path) -> None:
    """A picture that can't be decoded names shard, offset, key, field, the cause and the next step, from workers too."""
    pack(tmp_path, 8, 1, make=lambda n: b"<html>no picture</html>" if n == 3 else jpeg(n))
    for workers in (0, 1):
        with make_loader(tmp_path, batch_size=8, num_workers=workers) as loader, pytest.raises(pipeline.DecodeError) as caught:
            list(loader)
        for part in ("train-000000.tar", "at byte", "'train000003'", "jpg", "HTML", "verify --decode"):
            assert part.lower() in str(caught.value).lower()


def test_a_killed_worker_is_an_error_not_a_hang(small_set: PackedSet) -> None:
    """A worker that dies raises WorkerError in the trainer, with what to do."""
    with make_loader(small_set.folder, batch_size=8, num_workers=1, transform=die) as loader, pytest.raises(pipeline.WorkerError):
        list(loader)


def die(image: np.ndarray) -> np.ndarray:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
    return image


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_start_methods_give_the_same_batches(small_set: PackedSet, method: Any) -> None:
    """fork, forkserver and spawn give the same batches: nothing works by fork alone."""
    transform = A.Compose([A.Resize(16, 16), A.HorizontalFlip(p=0.5), A.Normalize()])
    expected = list(make_loader(small_set.folder, batch_size=50, num_workers=0, transform=transform))
    options = LoaderOptions(multiprocessing_context=method)
    with make_loader(small_set.folder, batch_size=50, num_workers=1, transform=transform, options=options) as loader:
        got = list(loader)
    assert all(torch.equal(a.images, b.images) for a, b in zip(expected, got, strict=True))


def test_the_dataset_can_be_pickled(small_set: PackedSet) -> None:
    """What goes to workers needs no lambda pickled, after use in this process too."""
    loader = make_loader(small_set.folder, batch_size=50, num_workers=0, transform=A.Compose([A.Resize(8, 8), A.Normalize()]))
    list(loader)
    assert len(pickle.loads(pickle.dumps(loader.dataset))) == 200


@pytest.mark.parametrize(("method", "number"), [("fork", 0), ("forkserver", 1), ("spawn", 2)])
def test_workers_start_as_asked_and_stay(small_set: PackedSet, method: Any, number: int) -> None:
    """`multiprocessing_context` decides how workers start; persistent ones are the same in each epoch, others are not."""
    for persistent in (True, False):
        options = LoaderOptions(multiprocessing_context=method, persistent_workers=persistent)
        with make_loader(small_set.folder, batch_size=100, num_workers=1, transform=process, options=options) as loader:
            seen = [{int(v) for images, _ in loader for v in images.double().unique().tolist()} for _epoch in range(2)]
        assert {value % 4 for epoch in seen for value in epoch} == {number}
        assert (seen[0] == seen[1]) == persistent


def slow(image: np.ndarray) -> np.ndarray:
    import time

    time.sleep(30)
    return image


def test_timeout(small_set: PackedSet) -> None:
    """`timeout` ends a wait for workers with a WorkerError that names the option."""
    options = LoaderOptions(timeout=1)
    with (
        make_loader(small_set.folder, batch_size=8, num_workers=1, transform=slow, options=options) as loader,
        pytest.raises(pipeline.WorkerError, match=r"timed out after 1.*LoaderOptions\(timeout"),
    ):
        next(iter(loader))


def test_prefetch_factor(small_set: PackedSet) -> None:
    """A worker makes `prefetch_factor` batches ahead of the one that is asked for, and no more."""
    for ahead in (1, 3):
        options = LoaderOptions(prefetch_factor=ahead)
        with make_loader(small_set.folder, batch_size=8, num_workers=1, options=options) as loader:
            next(iter(loader))
            assert loader._loader is not None
            assert loader._loader.prefetch_factor == ahead


def test_a_lambda_needs_fork_and_says_so(small_set: PackedSet) -> None:
    """A transform that can't be pickled is an OptionsError under spawn, with the cures."""
    options = LoaderOptions(multiprocessing_context="spawn")
    with pytest.raises(pipeline.OptionsError, match=r"num_workers=0"):
        make_loader(small_set.folder, batch_size=8, num_workers=1, transform=lambda image: image, options=options)


@pytest.mark.parametrize("given", [{"lanes": 1}, {"lanes": 3}, {"window_bytes": 1}, {"window_bytes": 20_000}])
def test_lanes_and_window_decide_the_order(small_set: PackedSet, given: dict[str, int]) -> None:
    """The order that a loader gives is that of `epoch.py` for its lanes and window, by the set's mean sample."""
    from pipeline.epoch import EpochOrder, Layout, OrderSettings, window_samples

    options = LoaderOptions(keys=True, last_batch="uneven", decode="none", **given)  # type: ignore[arg-type]
    got = [
        key for batch in make_loader(small_set.folder, batch_size=64, num_workers=0, seed=3, options=options) for key in batch.keys
    ]
    window = window_samples(options.window_bytes, sum(p.stat().st_size for p in small_set.folder.glob("*.tar")), 200)
    settings = OrderSettings(seed=3, lanes=options.lanes, window=window)
    shard, index = EpochOrder(Layout([50] * 4, settings), 0).locate(np.arange(200))
    assert got == [small_set.keys[s * 50 + i] for s, i in zip(shard.tolist(), index.tolist(), strict=True)]


def test_image_names_the_field(tmp_path: Path) -> None:
    """`image` picks the field that holds the picture."""
    from packing import write_tar

    fields = [("jpg", b"j"), ("png", b"p"), ("cls", b"1")]
    write_tar(tmp_path / "a-000000.tar", [(f"k{i}", fields) for i in range(4)])
    for image, expected in (("jpg;png", b"j"), ("png;jpg", b"p"), ("png", b"p")):
        options = LoaderOptions(image=image, decode="none")
        assert next(iter(make_loader(tmp_path, batch_size=4, num_workers=0, options=options))).images == [expected] * 4


def test_batches_go_to_the_device(small_set: PackedSet) -> None:
    """Images and labels are on the device that was asked for, normalized there."""
    images, labels = next(iter(make_loader(small_set.folder, batch_size=4, num_workers=1, device="meta")))
    assert images.device.type == labels.device.type == "meta"
    assert images.shape == (4, 3, 48, 64)


def open_in(folder: Path) -> list[str]:
    """Return the files below a folder that this process holds open."""
    import contextlib
    import os

    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return [path for path in found if path.startswith(str(folder))]


def test_close_closes_the_shards(tmp_path: Path) -> None:
    """`close` leaves no shard open."""
    pack(tmp_path, 40, 2)
    with make_loader(tmp_path, batch_size=20, num_workers=0) as loader:
        next(iter(loader))
        assert open_in(tmp_path)
    assert open_in(tmp_path) == []


def test_a_failed_epoch_leaves_no_worker(small_set: PackedSet) -> None:
    """After an exception of a worker none is left, even while the exception is held; the next iter starts anew."""
    loader = make_loader(small_set.folder, batch_size=8, num_workers=2, transform=fail_once)
    with pytest.raises(pipeline.TransformError) as caught:
        list(loader)
    assert multiprocessing.active_children() == []
    assert caught.value is not None
    with pytest.raises(pipeline.TransformError):
        next(iter(loader))
    loader.close()


def fail_once(image: np.ndarray) -> np.ndarray:
    raise ValueError("no")


def test_a_world_that_grows_later_is_refused(small_set: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader built before the process group is asked again at each iter: never the whole set on each rank."""
    loader = make_loader(small_set.folder, batch_size=8, num_workers=0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pipeline.OptionsError, match="rank 1 of 2"):
        iter(loader)


def threads(image: np.ndarray) -> np.ndarray:
    return np.full((1, 1, 1), cv2.getNumThreads() * 100 + torch.get_num_threads(), np.float32)


def test_workers_use_one_thread(small_set: PackedSet) -> None:
    """cv2 and torch use one thread in each worker, and the trainer's settings stay."""
    restored = cv2.getNumThreads()
    cv2.setNumThreads(2)
    cv2.resize(np.zeros((3000, 3000, 3), np.uint8), (2000, 2000))  # its threads run when the worker is forked
    before = cv2.getNumThreads(), torch.get_num_threads()
    with make_loader(small_set.folder, batch_size=8, num_workers=1, transform=threads) as loader:
        assert next(iter(loader)).images.unique().tolist() == [101]
    assert (cv2.getNumThreads(), torch.get_num_threads()) == before
    cv2.setNumThreads(restored)


def in_worker(image: np.ndarray) -> np.ndarray:
    info = get_worker_info()
    return np.full((1, 1, 1), -1 if info is None else info.num_workers, np.float32)


def test_num_workers_default_and_above_cores(small_set: PackedSet, caplog: pytest.LogCaptureFixture) -> None:
    """The default is the usable CPUs; more than that is a log line of ours, not torch's warning (warnings are errors here)."""
    from pipeline.world import usable_cpus

    with make_loader(small_set.folder, batch_size=8, transform=in_worker) as loader:
        assert next(iter(loader)).images.unique().tolist() == [usable_cpus()]
    with caplog.at_level(logging.INFO, logger="pipeline"):
        many = make_loader(small_set.folder, batch_size=8, num_workers=usable_cpus() + 1)
    assert "usable CPUs" in caplog.text
    with many:
        next(iter(many))  # torch would warn now


def test_a_world_above_one_is_refused(small_set: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until ranks are read, a world above 1 is an error, never the whole set on each rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pipeline.OptionsError, match="rank 0 of 2"):
        make_loader(small_set.folder, batch_size=8)


def test_close_and_with(small_set: PackedSet) -> None:
    """After `close` no worker is left, and a further iter says that the loader is closed; a second close does nothing."""
    with make_loader(small_set.folder, batch_size=8, num_workers=2) as loader:
        next(iter(loader))
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []
    loader.close()
    with pytest.raises(pipeline.PipelineError, match="closed"):
        iter(loader)


def test_attributes_that_frameworks_read(small_set: PackedSet) -> None:
    """`batch_size` and a `dataset` with a length are there."""
    loader = make_loader(small_set.folder, batch_size=8, num_workers=0)
    assert loader.batch_size == 8
    assert len(loader.dataset) == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"shuffle": 1}, "shuffle=1"),
        ({"transform": 3}, "transform=3"),
        ({"transform": A.Normalize}, "transform="),
        ({"device": "gpu"}, "device='gpu'"),
        pytest.param({"device": "cuda"}, "no usable CUDA", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one")),
        ({"options": {"keys": True}}, "LoaderOptions"),
        ({"transform": A.Normalize(), "options": LoaderOptions(decode="none")}, "decode='none'"),
    ],
)
def test_arguments_are_checked_at_once(small_set: PackedSet, arguments: dict[str, Any], message: str) -> None:
    """A wrong argument is an OptionsError (a ValueError) at the call, with its name and what was given."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make_loader(small_set.folder, **{"batch_size": 4, **arguments})


def test_arguments_that_albumentations_ignores_are_an_error(small_set: PackedSet) -> None:
    """An old argument name only warns in albumentations, and training would run with other augmentations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transform = A.Compose([A.OneOf([A.ChannelDropout(fill_value=5)])])
    with pytest.raises(pipeline.OptionsError, match=r"ChannelDropout\(fill_value"):
        make_loader(small_set.folder, batch_size=4, transform=transform)


def test_public_names() -> None:
    """The public surface is this list, each name is there, and importing the package loads nothing heavy."""
    assert pipeline.__all__ == sorted(pipeline.__all__)
    assert all(getattr(pipeline, name) is not None for name in pipeline.__all__)
    code = "import sys, pipeline; print([m for m in ('torch', 'numpy', 'cv2', 'webdataset', 'albumentations', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_without_the_extra_the_message_names_the_command() -> None:
    """Without torch, `pipeline.make_loader` says which command installs it."""
    code = "import sys; sys.modules['torch'] = None\nimport pipeline\ntry: pipeline.make_loader\nexcept ModuleNotFoundError as e: print(e)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "pip install 'shardify[train]'" in out


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


def test_a_loader_that_nobody_closed_leaves_no_descriptor(tmp_path: Path) -> None:
    """A loader that is collected gives its descriptors back, without `close`, whether its epoch ended or not."""
    import gc

    pack(tmp_path, 40, 2)
    for whole in (True, False):
        loader = make_loader(tmp_path, batch_size=10, num_workers=0)
        for _batch in loader:
            assert open_in(tmp_path)
            if not whole:
                break
        del loader
        gc.collect()
        assert open_in(tmp_path) == []


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


@pytest.mark.parametrize("size", [10_240, 20_480])
def test_a_shard_of_zeros_is_an_error(tmp_path: Path, size: int) -> None:
    """A tar without a sample among good ones is an error that names it, with and without an index (T06)."""
    from packing import write_tar

    write_tar(tmp_path / "a-000000.tar", [("k", [("jpg", jpeg(0)), ("cls", b"0")])])
    (tmp_path / "a-000001.tar").write_bytes(bytes(size))
    with pytest.raises(pipeline.SourceError, match=r"a-000001\.tar: holds no sample"):
        make_loader(tmp_path, batch_size=1)
    (tmp_path / "a-000001.idx").write_text("v1.2 0\n")
    with pytest.raises(pipeline.SourceError, match=r"a-000001\.tar: holds no sample"):
        make_loader(tmp_path, batch_size=1)


def test_a_stale_index_is_an_error(tmp_path: Path) -> None:
    """An index that lists less than its tar holds, or a sample twice, hides samples: an error that names the tar."""
    pack(tmp_path, 60, 1)
    (tmp_path / "train-shardindex.json").unlink()
    index = tmp_path / "train-000000.idx"
    lines = index.read_text().splitlines()
    for wrong in (["v1.2 20", *lines[1:21]], [lines[0], *lines[1:60], lines[1]]):
        index.write_text("\n".join(wrong) + "\n")
        with pytest.raises(pipeline.ShardError, match=r"train-000000\.tar.*index is of another tar"):
            list(make_loader(tmp_path, batch_size=4, num_workers=0))


def test_a_set_of_which_a_build_left_a_part_is_refused(tmp_path: Path) -> None:
    """Tars beside an unfinished one and without a manifest are a part of a set: an error, not a smaller set."""
    pack(tmp_path, 60, 3)
    (tmp_path / "train-shardindex.json").unlink()
    (tmp_path / "train-000003.tar.partial").write_bytes(b"x")
    for pointed in (tmp_path, f"{tmp_path}/train-*.tar"):
        with pytest.raises(pipeline.SourceError, match=r"train-000003\.tar\.partial: a build that didn't end"):
            make_loader(pointed, batch_size=4)


def test_a_manifest_that_lost_shards_is_an_error(tmp_path: Path) -> None:
    """A manifest whose list is shorter than the samples it states is refused."""
    import json

    pack(tmp_path, 60, 3)
    path = tmp_path / "train-shardindex.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "shardlist": raw["shardlist"][:2]}))
    with pytest.raises(pipeline.SourceError, match=r"samples is 60, and its list of shards makes 40"):
        make_loader(tmp_path, batch_size=4)
