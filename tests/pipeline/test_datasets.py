"""`WebDataset` in place of `wds.WebDataset`: this project's order and bytes under webdataset's methods, for any workers and ranks."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from foreign import mk
from opened import open_below
from packing import PackedSet, pack
from torch.utils.data import DataLoader

import pipeline
from pipeline import WebDataset, blocks, walk
from pipeline.epoch import EpochOrder, Layout, OrderSettings, window_samples
from pipeline.world import World
from shardify.format import index, tar


def key(sample: dict[str, Any]) -> str:
    """Return a sample's key; at the top level, so that workers can be sent it."""
    return str(sample["__key__"])


def keys_of(dataset: Any) -> list[str]:
    return [key(sample) for sample in dataset]


def bare(packed: PackedSet, folder: Path, age: float = 60) -> Path:
    """Copy a set's tars without index and manifest, last changed `age` seconds ago."""
    folder.mkdir()
    for path in packed.folder.glob("*.tar"):
        shutil.copy(path, folder / path.name)
        os.utime(folder / path.name, (time.time() - age,) * 2)
    return folder


@pytest.fixture(params=["indexed", "arriving"])
def any_set(request: pytest.FixtureRequest, small_set: PackedSet, tmp_path: Path) -> Path:
    """The small set with its manifest, and as bare tars."""
    return small_set.folder if request.param == "indexed" else bare(small_set, tmp_path / "bare")


def loader(dataset: Any, workers: int, start: str | None = None, *, persistent: bool = False) -> Any:
    """Return a webdataset loader of a dataset that makes batches itself."""
    return wds.WebLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context=start if workers else None,
    )


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.case("W01")
def test_batches_of_a_block_do_not_depend_on_workers(any_set: Path, small_set: PackedSet, persistent: bool) -> None:
    """With `.batched(block)` batches are the same for 0, 1 and 2 workers, after early breaks too; epochs differ, each is whole."""
    seen = {}
    for workers in (0, 1, 2):
        batches = loader(WebDataset(any_set, block=16).map(key).listed(16), workers, persistent=persistent and workers > 0)
        epochs = [list(batches), list(batches)]
        next(iter(batches))
        epochs.append(list(batches))
        seen[workers] = epochs
        for epoch in epochs:
            assert sorted(key for batch in epoch for key in batch) == sorted(small_set.keys)
            assert [len(batch) for batch in epoch] == [16] * 12 + [8]
        assert len({str(epoch) for epoch in epochs}) == 3
    assert seen[0] == seen[1] == seen[2]


def test_workers_that_are_spawned(small_set: PackedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned workers, new ones for each epoch, read what one process reads, of the rank of the trainer that starts them."""
    folder = bare(small_set, tmp_path / "bare")
    list(WebDataset(folder))  # now they are counted, which ranks need
    monkeypatch.setattr(blocks, "find", lambda: World(1, 2))  # as torch.distributed says here, and nobody to the workers
    expected = loader(WebDataset(folder, block=16).map(key).listed(16), 0)
    batches = loader(WebDataset(folder, block=16).map(key).listed(16), 2, "spawn")
    assert [list(batches) for _ in range(2)] == [list(expected) for _ in range(2)]


@pytest.mark.slow
def test_workers_of_a_forkserver(small_set: PackedSet) -> None:
    """Workers of a forkserver that persist read what one process reads; `set_epoch` in the trainer reaches them."""
    dataset = WebDataset(small_set.folder, block=16)
    batches = loader(dataset.map(key).listed(16), 2, "forkserver", persistent=True)
    expected = WebDataset(small_set.folder, block=16).map(key).listed(16)
    found = [list(batches), list(batches)]
    assert found == [list(expected), list(expected)]
    dataset.set_epoch(0)
    assert list(batches) == found[0]


@pytest.mark.case("W08")
def test_in_torchs_own_loader(any_set: Path, small_set: PackedSet) -> None:
    """torch's DataLoader, which makes the batches itself, gets each sample once from any number of workers (W03, W08)."""
    for workers in (0, 2):
        found = [key for batch in DataLoader(WebDataset(any_set).map(key), batch_size=7, num_workers=workers) for key in batch]
        assert sorted(found) == sorted(small_set.keys)
    few = pack(any_set.parent / f"few-{any_set.name}", 2, 2)
    assert sorted(DataLoader(WebDataset(few.folder).map(key), batch_size=None, num_workers=2)) == sorted(few.keys)


@pytest.mark.case("W03", "W08")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("block", [1, 5])
def test_more_workers_than_shards(tmp_path: Path, block: int) -> None:
    """Four workers give the ten samples of two shards once each, with five samples a block two of them have nothing to do (W03, W08)."""
    packed = pack(tmp_path, 10, 2)
    dataset = WebDataset(tmp_path, block=block).map(key)
    assert sorted(DataLoader(dataset, batch_size=None, num_workers=4)) == sorted(packed.keys)


@pytest.mark.case("W01", "W02")
def test_eight_shards_of_one_sample(tmp_path: Path) -> None:
    """Without a seed epochs differ, in each run alike; epochs of four samples are never the same four, but the parts of whole ones (W01, W02)."""
    pack(tmp_path, 8, 8)
    runs = []
    for _ in range(2):
        dataset = WebDataset(tmp_path)
        runs.append([keys_of(dataset) for _ in range(3)])
    assert runs[0] == runs[1]
    assert len({str(epoch) for epoch in runs[0]}) == 3
    halves = WebDataset(tmp_path).with_epoch(4)
    four = [keys_of(halves) for _ in range(6)]
    assert [one + other for one, other in zip(four[::2], four[1::2], strict=True)] == runs[0]


def test_the_order_is_the_loaders(small_set: PackedSet) -> None:
    """Samples come in the order of `make_loader`'s epochs, for the same seed and lanes; or as they are stored."""
    options = pipeline.LoaderOptions(keys=True, last_batch="uneven", decode="none", lanes=4, window_bytes=20_000)
    with pipeline.make_loader(small_set.folder, batch_size=9, num_workers=0, seed=3, options=options) as batches:
        expected = [[key for batch in batches for key in batch.keys] for _ in range(2)]
    dataset = WebDataset(small_set.folder, seed=3, lanes=4, window_bytes=20_000)
    assert [keys_of(dataset) for _ in range(2)] == expected
    assert keys_of(WebDataset(small_set.folder, shuffle=False)) == small_set.keys


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_samples_are_stock_webdatasets(small_set: PackedSet, tmp_path: Path) -> None:
    """A sample is what stock webdataset yields for it: key, URL, path, fields in lower case, bytes; indexed and arriving."""
    mk(tmp_path / "a.tar", [("d/A.JPG", b"j"), ("d/A.seg.png", b"s"), ("d/A.cls", b"1"), ("d/b.v2.cls", b"2")])
    for source in ([str(path) for path in sorted(small_set.folder.glob("*.tar"))], [str(tmp_path / "a.tar")]):
        stock = list(wds.WebDataset(source, shardshuffle=False))
        gc.collect()  # it leaves the tars open
        assert list(WebDataset("::".join(source), shuffle=False)) == stock


def test_webdatasets_methods(small_set: PackedSet) -> None:
    """A chain as programs write it for wds.WebDataset: decode, rename, select, map, to_tuple, map_tuple, shuffle, batched."""
    dataset = (
        WebDataset(small_set.folder, block=8)
        .select(lambda sample: sample["cls"] != b"0")
        .decode(only="cls")
        .rename(image="jpg;png", label="cls")
        .map_dict(label=lambda label: label + 100)
        .shuffle(20)
        .to_tuple("__key__", "image", "label")
        .map_tuple(str, len)
        .batched(8)
    )
    found = {k: (size, label) for keys, sizes, labels in dataset for k, size, label in zip(keys, sizes, labels, strict=True)}
    assert found == {k: (len(small_set.pictures[k]), label + 100) for k, label in small_set.labels.items() if label}


def test_shuffling_behind_it_is_repeatable(small_set: PackedSet) -> None:
    """`.shuffle(n)` draws by seed, epoch and worker: runs are equal, epochs and seeds differ, and a user's own seed is kept."""

    def run(seed: int = 0, **options: Any) -> list[list[str]]:
        dataset = WebDataset(small_set.folder, seed=seed, shuffle=False).shuffle(50, **options).map(key)
        return [list(dataset) for _ in range(2)]

    first = run()
    assert run() == first and first[0] != first[1] and run(1) != first and sorted(first[0]) == sorted(small_set.keys)
    own = WebDataset(small_set.folder, shuffle=False).shuffle(50, seed=5).map(key)
    assert list(own) == list(own)
    assert keys_of(WebDataset(small_set.folder, shuffle=False).shuffle(0)) == small_set.keys


def test_fields(small_set: PackedSet) -> None:
    """`fields` reads these alone; one that a sample lacks is an error that names the sample and what it has."""
    sample = next(iter(WebDataset(small_set.folder, fields="CLS")))
    assert set(sample) == {"__key__", "__url__", "__local_path__", "cls"}
    with pytest.raises(pipeline.ShardError, match=r"sample '.*' \(at byte \d+\) lacks png; it has jpg, cls"):
        next(iter(WebDataset(small_set.folder, fields=["jpg", "png"])))
    with pytest.raises(pipeline.OptionsError, match="fields"):
        WebDataset(small_set.folder, fields="jpg;;cls")


@pytest.mark.parametrize("field", ["pkl", "pickle", "pyd", "pth", "a.pkl", "pkl.gz"])
@pytest.mark.parametrize("method", ["decode", "decode with webdataset's own functions", "xdecode"])
def test_pickles_are_never_loaded(tmp_path: Path, field: str, method: str) -> None:
    """A field that webdataset would unpickle is an error that names it, and what is in it doesn't run."""
    import gzip

    struck = tmp_path / "struck"
    data = pickle.dumps(Bomb(str(struck)))
    mk(tmp_path / "a.tar", [(f"a.{field}", gzip.compress(data) if field.endswith("gz") else data)])
    dataset = WebDataset(tmp_path / "a.tar")
    own = wds.autodecode.basichandlers
    chains: dict[str, Callable[[], Any]] = {
        "decode": dataset.decode,
        "decode with webdataset's own functions": lambda: dataset.decode(own, post=[own]),
        "xdecode": lambda: dataset.xdecode(must_decode=not field.endswith("gz")),
    }
    if method == "xdecode" and field.endswith("gz"):
        assert isinstance(next(iter(chains[method]()))[field], bytes)
    else:
        with pytest.raises(pipeline.DecodeError, match="pickles in shards are never loaded"):
            next(iter(chains[method]()))
    assert not struck.exists()
    mine = dataset.decode(lambda name, data: len(data) if name.endswith((".pkl", ".gz", field)) else None)
    assert isinstance(next(iter(mine))[field], int)  # a function of the user's own may do what it likes


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


@pytest.mark.case("I15")
def test_decoding_errors_say_where(tmp_path: Path) -> None:
    """An undecodable field is an error with shard, key, field and cause, where webdataset's own says nothing (I15)."""
    mk(tmp_path / "a.tar", [("a.cls", b"3.0")])
    with pytest.raises(pipeline.DecodeError, match=r"a\.tar: sample 'a', cls: ValueError: invalid literal") as caught:
        list(WebDataset(tmp_path / "a.tar").decode())
    assert str(pipeline.DecodeError(str(caught.value))) == str(caught.value)
    assert list(WebDataset(tmp_path / "a.tar").decode(handler=wds.ignore_and_continue)) == []


def test_what_decode_decodes(tmp_path: Path) -> None:
    """Texts, numbers, json and arrays are decoded as webdataset does it."""
    array = io.BytesIO()
    np.save(array, np.arange(3))
    mk(tmp_path / "a.tar", [("a.txt", b"t"), ("a.cls", b"3"), ("a.json", b"[1]"), ("a.npy", array.getvalue())])
    (sample,) = WebDataset(tmp_path / "a.tar").decode()
    assert (sample["txt"], sample["cls"], sample["json"], sample["npy"].tolist()) == ("t", 3, [1], [0, 1, 2])


@pytest.mark.parametrize(
    "name", ["shardshuffle", "nodesplitter", "resampled", "handler", "cache_dir", "empty_check", "select_files"]
)
def test_webdatasets_keywords_are_refused_by_name(small_set: PackedSet, name: str) -> None:
    """Each keyword of wds.WebDataset that means nothing here is an error that says what to use instead."""
    with pytest.raises(pipeline.OptionsError, match=f"'{name}' as wds.WebDataset has: "):
        WebDataset(small_set.folder, **{name: None})


def test_every_keyword_of_webdataset_is_known(small_set: PackedSet) -> None:
    """No keyword of the installed webdataset is unknown here; a slip names the nearest one."""
    import inspect

    for name in inspect.signature(wds.WebDataset.__init__).parameters:
        if name not in ("self", "urls", "seed"):
            with pytest.raises(pipeline.OptionsError, match=r"as wds\.WebDataset has"):
                WebDataset(small_set.folder, **{name: 1})
    with pytest.raises(pipeline.OptionsError, match="did you mean 'shuffle'"):
        WebDataset(small_set.folder, shufle=True)
    with pytest.raises(pipeline.OptionsError, match="block=0"):
        WebDataset(small_set.folder, block=0)


@pytest.mark.parametrize(("world", "block"), [(2, 8), (3, 5), (4, 16)])
@pytest.mark.case("W05")
def test_ranks_share_an_epoch(small_set: PackedSet, monkeypatch: pytest.MonkeyPatch, world: int, block: int) -> None:
    """Ranks get equally many samples, none twice; only the epoch's last N mod (ranks x block) are left out (W04, W05)."""
    settings = OrderSettings(window=window_samples(32 * 2**20, size_of(small_set), 200))
    shards, indices = EpochOrder(Layout([50] * 4, settings), 0).locate(np.arange(200))
    order = [small_set.keys[shard * 50 + at] for shard, at in zip(shards, indices, strict=True)]
    used = 200 - 200 % (world * block)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    for workers in (0, 2):
        found = []
        for rank in range(world):
            monkeypatch.setenv("RANK", str(rank))
            dataset = WebDataset(small_set.folder, block=block)
            assert len(dataset) == used // world
            found.append([k for batch in loader(dataset.map(key).listed(block), workers) for k in batch])
        for rank, keys in enumerate(found):
            expected = [order[g] for g in range(used) if g % world == rank]
            assert keys == expected


def copied(dataset: WebDataset) -> WebDataset:
    return copy.deepcopy(dataset)


def pickled(dataset: WebDataset) -> WebDataset:
    other: WebDataset = pickle.loads(pickle.dumps(dataset))
    return other


def of_length(dataset: WebDataset) -> WebDataset:
    return dataset.with_epoch(100)


@pytest.mark.parametrize("made", [copied, pickled, of_length])
def test_ranks_are_found_when_they_are_needed(
    small_set: PackedSet, monkeypatch: pytest.MonkeyPatch, made: Callable[[WebDataset], WebDataset]
) -> None:
    """A dataset that was made, copied, pickled or given a length before its launcher's variables are set reads its rank's part."""
    dataset = made(WebDataset(small_set.folder, block=10))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for workers in (0, 2):
        dataset.set_epoch(0)
        assert sorted(loader(dataset.map(key), workers)) == sorted(keys_of(WebDataset(small_set.folder, block=10)))


def read_as_rank(dataset: WebDataset, rank: int, results: Any) -> None:
    """Read three epochs as a rank of two, by workers."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    batches = loader(dataset.map(key), 2, "fork")
    results.put((rank, [list(batches) for _ in range(3)]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_get_one_dataset(small_set: PackedSet, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are forked or spawned with one dataset each read their part of the same epochs, from the one set before on."""
    dataset = WebDataset(small_set.folder, block=10)
    dataset.set_epoch(1)
    context = multiprocessing.get_context(method)
    results: Any = context.SimpleQueue()
    ranks = [context.Process(target=read_as_rank, args=(dataset, rank, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(results.get() for _ in ranks)
    for process in ranks:
        process.join()
    whole = WebDataset(small_set.folder)
    whole.set_epoch(1)
    for epoch in range(3):
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("RANK", "0")
        expected = keys_of(whole)
        assert sorted(found[0][epoch] + found[1][epoch]) == sorted(expected)
        assert sorted(found[0][epoch]) == sorted(expected[0::2])


def size_of(packed: PackedSet) -> int:
    return sum(path.stat().st_size for path in packed.folder.glob("*.tar"))


def test_too_few_blocks_for_all_ranks(small_set: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that can't get a block each are an error with the numbers, in the words of a `WebDataset`."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = WebDataset(small_set.folder, block=64)
    for ask in (len, next):
        with pytest.raises(
            pipeline.OptionsError, match=r"200 samples, .* 64 on 4 ranks \(together 256\); .*smaller block"
        ) as caught:
            ask(dataset if ask is len else iter(dataset))
        assert "last_batch" not in str(caught.value) and "batch_size" not in str(caught.value)


def test_length(small_set: PackedSet) -> None:
    """`len` is the samples of an epoch; behind stages it isn't known, unless it is told; it stays through methods and pickles."""
    dataset = WebDataset(small_set.folder)
    assert len(dataset) == 200
    staged = dataset.map(key).batched(16)
    with pytest.raises(TypeError, match="with_length"):
        len(staged)
    told = staged.with_length(13)
    assert len(told) == len(pickle.loads(pickle.dumps(told))) == len(list(told)) == 13
    assert len(loader(told, 1).pipeline[0]) == 13


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.case("W02", "W07")
def test_with_epoch_goes_on(small_set: PackedSet, workers: int) -> None:
    """`with_epoch(n)` gives n samples over all workers, and each epoch goes on where the one before ended (W02, W07)."""
    dataset = WebDataset(small_set.folder, block=8).with_epoch(60)
    batches = loader(dataset.map(key).listed(8), workers)
    epochs = [[k for batch in batches for k in batch] for _ in range(7)]
    assert [len(epoch) for epoch in epochs] == [60] * 7 and len(dataset) == 60
    whole = WebDataset(small_set.folder)
    assert [k for epoch in epochs for k in epoch] == [*keys_of(whole), *keys_of(whole), *keys_of(whole)][:420]
    for wrong in (lambda: WebDataset(small_set.folder).batched(8).with_epoch(3), lambda: dataset.with_epoch(nbatches=3)):
        with pytest.raises(pipeline.OptionsError, match="right behind"):
            wrong()


def test_with_epoch_in_the_first_epoch_of_bare_tars(small_set: PackedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs that are parts of the first one go on where the one before ended, without looking through the tars again."""
    folder = bare(small_set, tmp_path / "bare")
    whole = keys_of(WebDataset(folder))
    dataset = WebDataset(folder).with_epoch(50)
    read: list[str] = []
    read_index = walk.read_index
    monkeypatch.setattr(walk, "read_index", lambda path, index: (read.append(path), read_index(path, index))[1])
    assert [keys_of(dataset) for _ in range(4)] == [whole[at : at + 50] for at in range(0, 200, 50)]
    assert len(read) == 4


@pytest.mark.case("W07")
def test_repeat_goes_on_for_ever(small_set: PackedSet) -> None:
    """`.repeat()` yields epoch after epoch, each in its own order; `.repeat(2)` ends."""
    dataset = WebDataset(small_set.folder).map(key)
    whole = [list(dataset), list(dataset)]
    assert list(WebDataset(small_set.folder).repeat(2).map(key)) == whole[0] + whole[1]
    endless = iter(WebDataset(small_set.folder).repeat().map(key))
    assert [next(endless) for _ in range(450)][:400] == whole[0] + whole[1]


def test_a_trainer_that_seeds_torch_anew(small_set: PackedSet) -> None:
    """Workers of successive epochs aren't taken for one another where the trainer seeds torch before each."""
    batches = loader(WebDataset(small_set.folder, block=16).map(key).listed(16), 2)
    epochs = []
    for _ in range(3):
        torch.manual_seed(0)
        epochs.append([k for batch in batches for k in batch])
    assert len({str(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == sorted(small_set.keys) for epoch in epochs)


@pytest.mark.case("V01")
def test_pickles_for_every_setting(any_set: Path) -> None:
    """A dataset goes through pickle, as spawned workers and other libraries need, and reads the same from its epoch on (V01)."""
    dataset = WebDataset(any_set, block=4).shuffle(10).decode().to_tuple("__key__", "cls").batched(4)
    next(iter(dataset))
    other = pickle.loads(pickle.dumps(dataset))
    assert [str(batch) for batch in other] == [str(batch) for batch in dataset]


@pytest.mark.case("P01")
def test_closing(any_set: Path) -> None:
    """After `close`, or a `with`, no file is open; 20 epochs with early breaks leave none open either (P01, P06)."""
    gc.collect()  # what other tests left
    before = open_below(any_set)
    with WebDataset(any_set) as dataset:
        for _ in range(20):
            next(iter(dataset))
            dataset.set_epoch(0)
        assert open_below(any_set) <= before + 2 * 4  # each shard for its samples and its headers
    assert open_below(any_set) == before


def test_after_closing(small_set: PackedSet) -> None:
    """A second `close` does nothing; whatever else is asked of a closed dataset is an error in words."""
    dataset = WebDataset(small_set.folder)
    staged = dataset.map(key)
    dataset.close()
    dataset.close()
    asks: list[Callable[[], Any]] = [
        lambda: iter(dataset),
        lambda: len(dataset),
        lambda: dataset.set_epoch(1),
        lambda: dataset.with_epoch(3),
        lambda: iter(dataset.map(key)),
    ]
    for ask in asks:
        with pytest.raises(pipeline.PipelineError, match="this WebDataset is closed; make another one"):
            ask()
    assert len(list(staged)) == 200  # a dataset of its own, of the same source
    staged.close()


# Tars that nobody counted.


def opened(monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """Return a list that grows by each tar that is opened for its headers."""
    read: list[str] = []
    headers = walk.headers
    monkeypatch.setattr(walk, "headers", lambda path: (read.append(path), headers(path))[1])
    return read


def test_start_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 tars without an index none is opened before the first sample is asked for, and then one a lane."""
    packed = pack(tmp_path / "set", 120, 40)
    read = opened(monkeypatch)
    dataset = WebDataset(bare(packed, tmp_path / "bare"), window_bytes=1000)
    assert read == []
    next(iter(dataset))
    assert len(read) == 8


def test_the_order_does_not_depend_on_what_is_remembered(small_set: PackedSet, tmp_path: Path, cache_folder: Path) -> None:
    """Epochs have the same order in a first run, in a second one that finds all tars remembered, and where nothing can be."""
    folder = bare(small_set, tmp_path / "bare")
    runs = []
    for _ in range(2):
        dataset = WebDataset(folder, seed=4)
        runs.append([keys_of(dataset) for _ in range(3)])
    assert len(list(cache_folder.rglob("*.z"))) == 4
    shutil.rmtree(cache_folder)
    cache_folder.parent.chmod(0o500)
    cache_folder.touch() if os.getuid() == 0 else None  # root writes everywhere, but not below a file
    dataset = WebDataset(folder, seed=4)
    runs.append([keys_of(dataset) for _ in range(3)])
    assert runs[0] == runs[1] == runs[2]
    assert len({str(epoch) for epoch in runs[0]}) == 3


def test_an_epoch_cut_short_changes_nothing(small_set: PackedSet, tmp_path: Path) -> None:
    """After a first epoch that ended early, or was passed over, the next one is the one that it always is."""
    folder = bare(small_set, tmp_path / "bare")
    broken = WebDataset(folder)
    next(iter(broken))
    chosen = WebDataset(folder)
    chosen.set_epoch(1)
    whole = WebDataset(folder)
    keys_of(whole)
    assert keys_of(broken) == keys_of(chosen) == keys_of(whole)


@pytest.mark.parametrize("also", ["len", "iter", "a copy", "a closed copy"])
def test_nothing_cuts_off_an_iteration(small_set: PackedSet, tmp_path: Path, also: str) -> None:
    """What else is asked of a dataset leaves an iteration that goes on as it is, whatever becomes known of the tars meanwhile."""
    folder = bare(small_set, tmp_path / "bare")
    whole = keys_of(WebDataset(folder, window_bytes=1000))
    shutil.rmtree(os.environ["XDG_CACHE_HOME"])
    dataset = WebDataset(folder, window_bytes=1000)
    running = iter(dataset)
    found = [key(next(running)) for _ in range(20)]
    list(WebDataset(folder))  # now the cache folder knows them all
    if also == "len":
        assert len(dataset) == 200
    elif also == "iter":
        assert len(keys_of(dataset)) == 200
    else:
        other = copy.deepcopy(dataset)
        next(iter(other))
        if also == "a closed copy":
            other.close()
    assert found + keys_of(running) == whole


def test_an_iteration_of_a_closed_dataset_is_an_error(small_set: PackedSet, tmp_path: Path) -> None:
    """An iteration that goes on when its dataset is closed never looks like one that has ended, and leaves no file open."""
    folder = bare(small_set, tmp_path / "bare")
    dataset = WebDataset(folder, window_bytes=1000)
    running = iter(dataset)
    next(running)
    dataset.close()
    assert open_below(folder) == 0
    with pytest.raises(pipeline.PipelineError, match="closed"):
        list(running)
    assert open_below(folder) == 0


def test_what_needs_counts_says_so(small_set: PackedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`len`, `with_epoch` and several ranks name `shardify index` while the tars aren't counted, and work once they are."""
    folder = bare(small_set, tmp_path / "bare")
    dataset = WebDataset(folder)
    for name, ask in (
        ("len", lambda: len(dataset)),
        ("with_epoch", lambda: next(iter(WebDataset(folder).with_epoch(3)))),
    ):
        with pytest.raises(pipeline.UncountedError, match=rf"{name} needs .* 4 of 4 tars .*`shardify index {folder}`"):
            ask()
    assert len(list(dataset)) == 200  # `list` asks for a length, and takes no for an answer
    assert len(dataset) == len(WebDataset(folder)) == 200
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        found.append(keys_of(WebDataset(folder, block=10)))
    assert sorted(found[0] + found[1]) == sorted(small_set.keys)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with pytest.raises(pipeline.UncountedError, match="reading in several ranks needs"):
        keys_of(WebDataset(folder))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.case("T01", "T02", "T06")
def test_damage_in_the_middle_is_an_error(small_set: PackedSet, tmp_path: Path, workers: int) -> None:
    """A tar that is cut, at a member's edge too, holds nothing, or has a wrong bit in a header ends the epoch with an error (T01, T02, T06)."""
    folder = bare(small_set, tmp_path / "bare")
    path = folder / "train-000002.tar"
    whole = path.read_bytes()
    header = index.load((small_set.folder / "train-000002.idx").read_bytes())[25].members[0].offset - tar.BLOCK
    flipped = whole[:header] + bytes([whole[header] ^ 1]) + whole[header + 1 :]
    for data in (whole[:-1024], whole[: len(whole) // 2], bytes(10240), flipped):
        path.write_bytes(data)
        with pytest.raises(pipeline.ShardError, match=r"train-000002\.tar"):
            list(DataLoader(WebDataset(folder).map(key), batch_size=None, num_workers=workers))


def test_a_sample_that_has_a_field_in_two_cases(tmp_path: Path) -> None:
    """Fields that lower case makes equal are an error that names the sample."""
    mk(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.JPG", b"2")])
    with pytest.raises(pipeline.ShardError, match=r"sample 'a'.*differ only by case"):
        list(WebDataset(tmp_path / "a.tar"))
