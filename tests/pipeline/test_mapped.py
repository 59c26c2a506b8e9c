"""`ShardDataset`: any sample by number or key, from few open files, in workers too."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import mk
from opened import open_below
from packing import PackedSet, pack
from torch.utils.data import DataLoader, RandomSampler, Subset

import pipeline
from pipeline import ShardDataset


def pair(sample: dict[str, Any]) -> tuple[str, int]:
    """Return a sample's key and label."""
    return sample["__key__"], int(sample["cls"])


def test_by_number(small_set: PackedSet) -> None:
    """Numbers count in storage order, negative ones from the end; numpy's will do; beyond the ends there is nothing."""
    dataset = ShardDataset(small_set.folder / "train-shardindex.json")
    assert len(dataset) == 200 and dataset.classes == ("a", "b", "c", "d", "e")
    assert [sample["__key__"] for sample in dataset] == small_set.keys
    for number in (0, 49, 50, 199, -1, -200, np.int64(77)):
        sample = dataset[number]
        key = small_set.keys[number]
        assert (sample["__key__"], sample["jpg"], int(sample["cls"])) == (key, small_set.pictures[key], small_set.labels[key])
    for number in (200, -201):
        with pytest.raises(IndexError, match=f"sample {number} of 200"):
            dataset[number]
    with pytest.raises(TypeError):
        dataset[1.5]  # type: ignore[call-overload]


def test_slices_are_lists(small_set: PackedSet) -> None:
    """A slice gives the list of its samples, as a list's does."""
    dataset = ShardDataset(small_set.folder, transform=pair)
    for chosen in (slice(3), slice(48, 52), slice(-2, None), slice(None, None, -60), slice(300, 400)):
        assert [key for key, _ in dataset[chosen]] == small_set.keys[chosen]


def test_by_key(small_set: PackedSet) -> None:
    """A key leads to its sample and its number; one that isn't there is a KeyError, one that stands twice an error with both places."""
    dataset = ShardDataset(small_set.folder)
    key = small_set.keys[123]
    assert dataset.index(key) == 123 and dataset[key]["jpg"] == small_set.pictures[key]
    assert key in dataset and "nobody" not in dataset and 5 not in dataset
    with pytest.raises(KeyError, match="no sample of 200 has the key 'nobody'"):
        dataset["nobody"]


def test_a_key_in_two_shards(tmp_path: Path) -> None:
    """A key that stands in two shards of others names neither of them."""
    pack(tmp_path / "one", 3, 1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    dataset = ShardDataset([tmp_path / "one", tmp_path / "two"])
    key = dataset[1]["__key__"]
    with pytest.raises(pipeline.ShardError, match=rf"2 samples have the key '{key}': 1 in .*one.*, 4 in .*two"):
        dataset[key]


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_dataloader(small_set: PackedSet, workers: int) -> None:
    """A torch DataLoader with its samplers reads every sample once, with workers too, and through subsets."""
    dataset = ShardDataset(small_set.folder, transform=pair)
    batches = DataLoader(dataset, batch_size=16, sampler=RandomSampler(dataset), num_workers=workers)
    found = {k: int(label) for keys, labels in batches for k, label in zip(keys, labels, strict=True)}
    assert found == small_set.labels
    some = DataLoader(Subset(dataset, [5, 3, 180, 3]), batch_size=4, num_workers=workers)
    assert [keys for keys, _ in some] == [tuple(small_set.keys[n] for n in (5, 3, 180, 3))] or [list(keys) for keys, _ in some] == [
        [small_set.keys[n] for n in (5, 3, 180, 3)]
    ]


def test_a_batch_is_read_in_storage_order(small_set: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a batch are read as they are stored, each once, and given in the order asked for."""
    read: list[tuple[int, int]] = []
    dataset = ShardDataset(small_set.folder, transform=lambda sample: sample["__key__"])
    raw = dataset._reader.read
    monkeypatch.setattr(dataset._reader, "read", lambda shard, at: (read.append((shard, at)), raw(shard, at))[1])
    wanted = [150, 3, 150, 60]
    assert dataset.__getitems__(wanted) == [small_set.keys[number] for number in wanted]
    assert read == [(0, 3), (1, 10), (3, 0)]


@pytest.mark.parametrize("transform", [None, dict, lambda sample: sample.update(seen=sample.get("seen", 0) + 1) or sample])
def test_a_sample_that_is_wanted_twice(small_set: PackedSet, transform: Any) -> None:
    """Each wanted entry is transformed by itself: none is another's object, or has been changed by another's transform."""
    dataset = ShardDataset(small_set.folder, transform=transform)
    one, other = dataset.__getitems__([7, 7])
    assert one == other == dataset[7] and one is not other


def test_pickles_and_files(tmp_path: Path) -> None:
    """It goes through pickle, holds few files open however many shards are used, and none after `close`."""
    packed = pack(tmp_path, 200, 200)
    dataset = ShardDataset(tmp_path)
    assert [sample["__key__"] for sample in dataset] == packed.keys
    assert 0 < open_below(tmp_path) <= 64
    dataset.close()
    assert open_below(tmp_path) == 0
    assert pickle.loads(pickle.dumps(dataset))[packed.keys[7]] == dataset[7]


def test_shards_that_nobody_counted(tmp_path: Path) -> None:
    """Tars with neither manifest nor index are an error that says what to do: numbers need counts."""
    mk(tmp_path / "a.tar", [("a.jpg", b"1")])
    with pytest.raises(pipeline.UncountedError, match=rf"ShardDataset needs .*`shardify index {tmp_path}`"):
        ShardDataset(tmp_path)


def test_arguments(small_set: PackedSet) -> None:
    """Fields can be chosen; what can't be used is an error."""
    assert set(ShardDataset(small_set.folder, fields=["cls"])[0]) == {"__key__", "__url__", "__local_path__", "cls"}
    with pytest.raises(pipeline.OptionsError, match="transform=3"):
        ShardDataset(small_set.folder, transform=3)  # type: ignore[arg-type]
    with pytest.raises(pipeline.OptionsError, match="no split 'val'"):
        ShardDataset(small_set.folder, split="val")
