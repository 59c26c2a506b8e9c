"""What a faulty sample costs: the epoch by default; under `on_error="skip"` a place that another one of its batch takes, counted."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import pytest
from packing import jpeg, pack

import pipeline
from pipeline import LoaderOptions, SkippedError, make_loader
from pipeline.faults import Account, Budget, Faults, is_of_the_system
from pipeline.items import Skip

BAD = {
    "cut": lambda n: jpeg(n)[: len(jpeg(n)) // 3],
    "html": lambda _: b"<html>no picture</html>",
    "empty": lambda _: b"",
    "zeros": lambda _: bytes(3000),
}
COUNT, SHARDS, BATCH = 64, 4, 8


def skipping(**more: Any) -> LoaderOptions:
    return LoaderOptions(**{"on_error": "skip", "keys": True, "lanes": 2, "window_bytes": 8 * 2**10, "max_skipped": 0.5, **more})


def epoch_of(folder: Path, *, workers: int = 0, transform: Any = None, epoch: int = 0, **more: Any) -> tuple[list[Any], Any]:
    """Return an epoch's batches as (images, labels, keys), and what the loader says of it."""
    options = skipping(**more)
    with make_loader(folder, batch_size=BATCH, num_workers=workers, transform=transform, options=options) as loader:
        loader.set_epoch(epoch)
        batches = [
            (batch.images if isinstance(batch.images, list) else batch.images.numpy().copy(), batch.labels.tolist(), batch.keys)
            for batch in loader
        ]
        return batches, loader.stats()


def with_bad(folder: Path, bad: dict[int, Callable[[int], bytes]]) -> Any:
    return pack(folder, COUNT, SHARDS, make=lambda n: bad[n](n) if n in bad else jpeg(n))


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_picture_is_replaced_and_counted(tmp_path: Path, kind: str) -> None:
    """Batches stay full, the bad keys don't come, a good one of the batch comes twice, and the loader tells how many and why."""
    packed = with_bad(tmp_path, {5: BAD[kind], 40: BAD[kind]})
    batches, stats = epoch_of(tmp_path)
    assert [len(keys) for *_, keys in batches] == [BATCH] * (COUNT // BATCH)
    seen = [key for *_, keys in batches for key in keys]
    assert set(seen) == set(packed.keys) - {"train000005", "train000040"}
    for *_, labels, keys in batches:
        assert labels == [packed.labels[key] for key in keys]  # a replacement has the label of the one that it is
    assert (stats.skipped.samples, stats.skipped.causes, stats.samples) == (2, {"picture": 2}, COUNT)
    assert sorted("train000005" in reason or "train000040" in reason for reason in stats.skipped.first) == [True, True]
    assert "2 skipped (picture 2)" in stats.summary()


def test_by_default_nothing_is_skipped(tmp_path: Path) -> None:
    """The first bad picture ends the epoch."""
    with_bad(tmp_path, {5: BAD["cut"]})
    with make_loader(tmp_path, batch_size=BATCH, num_workers=0) as loader, pytest.raises(pipeline.DecodeError, match="train000005"):
        list(loader)


def test_the_same_batches_for_any_number_of_workers(tmp_path: Path) -> None:
    """Which sample stands in, and its draws, follow from the batch alone."""
    with_bad(tmp_path, dict.fromkeys((1, 2, 3, 17, 30, 63), BAD["html"]))
    transform = A.Compose([A.Rotate(limit=30, p=1), A.Resize(24, 24)])
    (alone, _), (two, stats) = (epoch_of(tmp_path, workers=workers, transform=transform) for workers in (0, 2))
    assert stats.skipped.samples == 6
    for left, right in zip(alone, two, strict=True):
        assert left[1:] == right[1:]
        assert np.array_equal(left[0], right[0])


@pytest.mark.case("R09")
def test_a_resume_counts_what_was_skipped(tmp_path: Path) -> None:
    """With every third picture left out, and batches made ahead, a state saved after the third batch goes on with the fourth (R09)."""
    with_bad(tmp_path, dict.fromkeys(range(0, COUNT, 3), BAD["html"]))
    expected = [keys for *_, keys in epoch_of(tmp_path)[0]]
    options = skipping(prefetch_factor=4)
    with make_loader(tmp_path, batch_size=BATCH, num_workers=2, options=options) as loader:
        running = iter(loader)
        assert [next(running).keys for _ in range(3)] == expected[:3]
        state = loader.state_dict()
    with make_loader(tmp_path, batch_size=BATCH, num_workers=2, options=options) as loader:
        loader.load_state_dict(state)
        assert [batch.keys for batch in loader] == expected[3:]


def test_a_replacement_is_another_draw_of_the_nearest_good_sample(tmp_path: Path) -> None:
    """The one that stands in isn't the same picture twice, and is at the next place that is good."""
    packed = with_bad(tmp_path, dict.fromkeys(range(0, 64, 9), BAD["html"]))
    transform = A.Compose([A.RandomResizedCrop((24, 24), scale=(0.2, 0.6), p=1)])
    bad = {f"train{n:06d}" for n in range(0, 64, 9)}
    with make_loader(tmp_path, batch_size=BATCH, num_workers=0, options=skipping(decode="none", on_error="raise")) as loader:
        wanted = [batch.keys for batch in loader]
    batches, _ = epoch_of(tmp_path, transform=transform)
    replaced = 0
    for (images, labels, keys), asked in zip(batches, wanted, strict=True):
        good = [at for at, key in enumerate(asked) if key not in bad]
        for at, key in enumerate(asked):
            nearest = min(good, key=lambda other, at=at: (abs(other - at), other))
            assert keys[at] == (key if key not in bad else asked[nearest])
            assert labels[at] == packed.labels[keys[at]]
            if key in bad:
                replaced += 1
                assert not np.array_equal(images[at], images[nearest])
    assert replaced == len(bad)


def test_a_bad_label_is_a_cause_of_its_own(tmp_path: Path) -> None:
    """Labels that are no number are counted apart from pictures."""
    from packing import write_tar

    samples = [(f"k{n:02d}", [("jpg", jpeg(n)), ("cls", b"x" if n == 7 else b"1")]) for n in range(32)]
    write_tar(tmp_path / "a-000000.tar", samples)
    _, stats = epoch_of(tmp_path)
    assert stats.skipped.causes == {"label": 1}
    assert "'k07'" in stats.skipped.first[0]


def test_a_transform_that_fails_on_a_picture(tmp_path: Path) -> None:
    """It is left out as a picture is that can't be decoded, where that is allowed."""
    pack(tmp_path, COUNT, SHARDS)
    with make_loader(tmp_path, batch_size=1, num_workers=0, options=LoaderOptions(dtype="uint8", keys=True)) as loader:
        marks = {batch.keys[0]: int(batch.images.sum()) for batch in loader}
    chosen = sorted(marks)[3]

    def refuse(image: Any) -> Any:
        if int(image.sum()) == marks[chosen]:
            raise ValueError("no eyes in it")
        return image

    batches, stats = epoch_of(tmp_path, transform=refuse)
    assert stats.skipped.causes == {"transform": 1}
    assert "no eyes in it" in stats.skipped.first[0]
    assert {key for *_, keys in batches for key in keys} == set(marks) - {chosen}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.case("T03")
def test_a_cut_shard_costs_its_samples(tmp_path: Path, workers: int) -> None:
    """Samples of a shard that is shorter than its manifest says are replaced, each counted; without a budget for it that is an error."""
    packed = pack(tmp_path, COUNT, SHARDS)
    path = tmp_path / "train-000001.tar"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    batches, stats = epoch_of(tmp_path, workers=workers)
    lost = {key for key in packed.keys if 16 <= int(key[-6:]) < 32}
    assert {key for *_, keys in batches for key in keys} == set(packed.keys) - lost
    assert (stats.skipped.causes, stats.samples) == ({"shard": len(lost)}, COUNT)
    with pytest.raises(SkippedError, match=r"max_skipped=0.1.* allows 6; the first: .*train-000001.tar"):
        epoch_of(tmp_path, workers=workers, max_skipped=0.1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.case("T03")
def test_a_cut_tar_without_an_index_is_an_error(tmp_path: Path, workers: int) -> None:
    """Nobody knows how many samples it lost: whatever may be skipped, that ends the epoch."""
    pack(tmp_path, COUNT, SHARDS)
    for path in (*tmp_path.glob("*.idx"), *tmp_path.glob("*.json")):
        path.unlink()
    path = tmp_path / "train-000001.tar"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(pipeline.SourceError, match=r"train-000001.tar.* cut"):
        epoch_of(tmp_path, workers=workers)


def test_above_the_budget_the_epoch_ends(tmp_path: Path) -> None:
    """A count or a share; exactly as many as allowed are skipped."""
    with_bad(tmp_path, dict.fromkeys((3, 20, 50), BAD["cut"]))
    for allowed in (3, 3 / COUNT, 0.5):
        assert epoch_of(tmp_path, max_skipped=allowed)[1].skipped.samples == 3
    for allowed in (2, 2.9 / COUNT, 0, 0.0):
        with pytest.raises(SkippedError, match=r"skipped \(picture [123]\) of the \d+ samples so far.*max_skipped="):
            epoch_of(tmp_path, max_skipped=allowed)


def test_a_batch_with_nothing_good_is_fatal(tmp_path: Path) -> None:
    """Nothing can stand in: whatever the budget, the error names the first of them."""
    pack(tmp_path, 16, 1, make=lambda _: b"<html>")
    with pytest.raises(SkippedError, match=r"none of the 8 samples of a batch .* HTML"):
        epoch_of(tmp_path, max_skipped=1.0)


def test_the_end_of_an_epoch_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning says how many were skipped and names the first; another epoch counts anew."""
    with_bad(tmp_path, {5: BAD["cut"]})
    with caplog.at_level(logging.WARNING, "pipeline"), make_loader(tmp_path, batch_size=BATCH, options=skipping()) as loader:
        for _ in range(2):
            list(loader)
            assert loader.stats().skipped.samples == 1
    assert caplog.text.count("1 skipped (picture 1); the first: ") == 2
    assert "train000005" in caplog.text


def test_bytes_are_never_bad_pictures(tmp_path: Path) -> None:
    """With `decode="none"` nothing is looked into; only what can't be read is skipped."""
    packed = with_bad(tmp_path, {5: BAD["html"]})
    batches, stats = epoch_of(tmp_path, decode="none")
    assert stats.skipped.samples == 0
    assert sorted(key for *_, keys in batches for key in keys) == sorted(packed.keys)


def test_scaled_decoding_replaces_too(tmp_path: Path) -> None:
    """The crop of the one that stands in is foreseen by its own draw."""
    pack(tmp_path, 32, 1, make=lambda n: b"" if n == 9 else jpeg(n, 240, 320))
    transform = A.Compose([A.RandomResizedCrop((32, 32), scale=(0.5, 1.0))])
    found = [epoch_of(tmp_path, decode="auto", transform=transform, workers=workers) for workers in (0, 1)]
    assert [stats.skipped.samples for _, stats in found] == [1, 1]
    for left, right in zip(found[0][0], found[1][0], strict=True):
        assert np.array_equal(left[0], right[0])


def test_ranks_stay_equal(tmp_path: Path) -> None:
    """Each rank has as many full batches as without faults."""
    with_bad(tmp_path, dict.fromkeys((0, 1, 2, 3, 31), BAD["zeros"]))
    counts = []
    for rank in range(2):
        options = {"rank": rank, "world_size": 2}
        batches, _ = epoch_of(tmp_path, **options)
        counts.append([len(keys) for *_, keys in batches])
    assert counts[0] == counts[1] == [BATCH] * (COUNT // BATCH // 2)


class BrokenError(Exception):
    """An error of the user's own."""


@pytest.mark.parametrize(
    ("error", "system"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (MemoryError(), True),
        (OSError("image file is truncated (3 bytes not processed)"), False),  # as Pillow says it
        (BrokenError(), False),
        (ValueError("x"), False),
    ],
)
def test_errors_of_the_system_are_never_skipped(error: Exception, *, system: bool) -> None:
    """Not where they are the cause of another error either."""
    outer = pipeline.DecodeError("a picture")
    outer.__cause__ = error
    assert (is_of_the_system(error), is_of_the_system(outer)) == (system, system)
    faults = Faults(skip=True)
    if system:
        with pytest.raises(pipeline.DecodeError):
            faults.take(outer, 0, "picture")
    else:
        faults.take(outer, 0, "picture")
        assert faults.skips == [Skip("picture", "a picture")]


def test_what_an_error_was_not_raised_from_does_not_count() -> None:
    """A transform may try a file, and say of the sample what it finds when that isn't there."""
    try:
        try:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        except OSError:
            raise ValueError("no mask") from None
    except ValueError as error:
        assert not is_of_the_system(error)
    try:
        try:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        except OSError:
            raise ValueError("crop too large")  # noqa: B904
    except ValueError as error:
        assert not is_of_the_system(error)


@pytest.mark.parametrize("hundredths", range(101))
def test_a_share_is_what_it_says(hundredths: int) -> None:
    """Floating point loses none: 0.29 of 100 are 29."""
    assert Budget(hundredths / 100).allows(100) == hundredths


def test_no_room_for_a_picture_is_the_systems() -> None:
    """OpenCV has its own error for that."""
    import cv2

    with pytest.raises(cv2.error) as caught:
        cv2.resize(np.zeros((2, 2, 3), np.uint8), (0, 0))
    assert not is_of_the_system(caught.value)
    caught.value.code = cv2.Error.StsNoMem
    assert is_of_the_system(caught.value)


def test_what_nobody_counted_has_a_share_of_what_was_seen() -> None:
    """At least of a thousand: one bad sample among the first ten isn't a tenth of a set."""
    account = Account(Budget(0.01), 0, None)
    account.add([Skip("picture", f"r{n}") for n in range(10)], 64)
    with pytest.raises(SkippedError):
        account.add([Skip("picture", "r10")], 128)
    account = Account(Budget(0.01), 0, None)
    account.add([], 5000)
    account.add([Skip("picture", "r")] * 50, 5064)
    assert account.stats().causes == {"picture": 50}
    assert len(account.stats().first) == 20


@pytest.mark.parametrize(
    "given",
    [
        {"on_error": "ignore"},
        {"on_error": True},
        {"max_skipped": -1},
        {"max_skipped": 1.5},
        {"max_skipped": True},
        {"max_skipped": float("nan")},
        {"max_skipped": "1%"},
        {"max_skipped": None},
    ],
)
def test_options_that_say_nothing(given: dict[str, Any]) -> None:
    """Misspelled policies and budgets are refused."""
    with pytest.raises(pipeline.OptionsError, match=next(iter(given))):
        LoaderOptions(**given)
