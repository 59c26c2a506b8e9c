"""The loader under frameworks: the calls that Lightning, accelerate and Transformers make on a loader of another kind, in their order."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from packing import PackedSet
from torch.utils.data import DataLoader

from pipeline import Loader, LoaderOptions, make_loader


@runtime_checkable
class Stateful(Protocol):
    """What Lightning and accelerate take to be resumable."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def load(packed: PackedSet, **options: Any) -> Loader:
    """A loader of 200 samples in 8 steps, by one worker."""
    return make_loader(packed.folder, batch_size=25, num_workers=1, options=LoaderOptions(keys=True, decode="none", **options))


def epochs_of(packed: PackedSet, count: int) -> list[list[list[str]]]:
    """The first epochs, undisturbed."""
    with load(packed) as loader:
        return [[list(batch.keys) for batch in loader] for _ in range(count)]


class LightningFit:
    """Trainer.fit of Lightning 2.6, as far as it touches the loader: fit_loop.setup_data, its fetcher, checkpoint_connector."""

    def __init__(self, loader: Loader, states: list[dict[str, Any]], fetched: int = 0, epoch: int = 0) -> None:
        assert not isinstance(loader, DataLoader)  # one of those would be rebuilt with another sampler
        iter(loader)  # _check_dataloader_iterable
        self.length = len(loader)
        assert isinstance(loader, Stateful)
        assert not hasattr(loader, "_iterator")  # reset to None by _shutdown_workers_and_reset_iterator
        for state in states:
            loader.load_state_dict(state)
        self.loader, self.batches, self.fetched, self.epoch = loader, iter(loader), fetched, epoch

    def run(self, epochs: int, stop: int | None = None) -> list[list[list[str]]]:
        """Fetch by the length alone: Lightning never asks behind the last batch of a loader that has one."""
        seen = []
        while self.epoch < epochs:
            steps: list[list[str]] = []
            while self.fetched < self.length:
                steps.append(list(next(self.batches).keys))
                self.fetched += 1
                if self.fetched == stop:
                    self.checkpoint = [self.loader.state_dict()], self.fetched, self.epoch
            seen.append(steps)
            self.fetched, self.epoch = 0, self.epoch + 1
            if self.epoch < epochs:
                self.batches = iter(self.loader)
        return seen


@pytest.mark.parametrize("stop", [3, 8])
def test_lightning_fits_and_resumes(small_set: PackedSet, stop: int) -> None:
    """Lightning's epoch e is the loader's; a checkpoint of any step, the last one too, goes on with the step behind it."""
    expected = epochs_of(small_set, 3)
    with load(small_set) as loader:
        fit = LightningFit(loader, [])
        assert fit.run(1, stop) == expected[:1]
        assert fit.run(1) == []
    state, fetched, epoch = fit.checkpoint
    if fetched == 8:  # epoch_progress counts the epoch as done
        fetched, epoch = 0, 1
    with load(small_set) as loader:
        resumed = LightningFit(loader, state, fetched, epoch).run(3)
    assert [batch for steps in resumed for batch in steps] == [batch for steps in expected for batch in steps][stop:]


def test_accelerate_prepares_checkpoints_and_looks_ahead(small_set: PackedSet) -> None:
    """accelerate leaves the loader alone, saves it as a custom object, and its own loop fetches a batch ahead."""
    expected = epochs_of(small_set, 1)[0]
    with load(small_set, ahead=1) as loader, load(small_set) as other:
        assert not isinstance(loader, torch.utils.data.DataLoader | torch.nn.Module | torch.optim.Optimizer)  # _prepare_one
        assert all(
            callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")
        )  # register_for_checkpointing
        batches = iter(loader)  # DataLoaderShard.__iter__
        held = next(batches)
        for step in range(1, 9):
            following = next(batches, None)
            assert list(held.keys) == expected[step - 1]
            other.load_state_dict(loader.state_dict())
            assert [list(batch.keys) for batch in other][: 8 - step] == (expected[step:] if step < 8 else [])
            held = following


def test_transformers_reads_sizes_and_sets_epochs(small_set: PackedSet) -> None:
    """transformers.Trainer reads `dataset` and `batch_size`, takes the length, and calls `set_epoch` before each epoch."""
    expected = epochs_of(small_set, 2)
    with load(small_set) as loader:
        assert isinstance(loader, Iterable | Sized)
        assert (loader.batch_size, len(loader.dataset), len(loader)) == (25, 200, 8)
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert [list(batch.keys) for batch in loader] == expected[epoch]


def test_the_wrapper_for_transformers(small_set: PackedSet) -> None:
    """The documented wrapper gives dicts, which `Trainer._prepare_input` can rebuild, and passes on what else Trainer asks for."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    names: dict[str, Any] = {}
    exec(textwrap.dedent(text[text.index("      class Inputs:") : text.index("\n## Statistics")]), names)
    expected = epochs_of(small_set, 2)[1]
    with load(small_set) as loader:
        inputs = names["Inputs"](loader)
        assert (inputs.batch_size, len(inputs.dataset), len(inputs)) == (25, 200, 8)
        inputs.set_epoch(1)
        for batch, keys in zip(inputs, expected, strict=True):
            assert type(batch)(dict(batch.items())) == batch
            assert batch["labels"].tolist() == [small_set.labels[key] for key in keys]
            assert batch["pixel_values"] == [small_set.pictures[key] for key in keys]
