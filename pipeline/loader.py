"""Composes the reader: the plan's tokens go through a DataLoader of `Batches` and the device, behind one `Loader`.

    Steps -> Token -> worker: read_samples -> decode -> augment -> gather -> Batch (uint8, shared memory) -> Finisher -> the loop

A token says all that a worker needs (run, epoch, position, size): workers keep no position, so epochs, early breaks and other
numbers of workers change nothing about a batch.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader

from pipeline.augment import Prepared, prepare
from pipeline.device import Finisher
from pipeline.epoch import Layout, OrderSettings, Steps, Token, window_samples
from pipeline.errors import OptionsError, PipelineError, SourceError, WorkerError
from pipeline.items import Wanted
from pipeline.options import LoaderOptions, check_int
from pipeline.samples import ShardFile, ShardReader, count_samples
from pipeline.urls import ShardSet, resolve
from pipeline.worker import Batches, Recipe, start_worker
from pipeline.world import World, find, usable_cpus
from shardify.format import tar

log = logging.getLogger("pipeline")

_SEED_LIMIT = 2**64 - 1


class _Tokens:
    """The sampler: the tokens of one run, set anew before each epoch."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.run, self.epoch = steps, 0, 0

    def __iter__(self) -> Iterator[Token]:
        steps, run, epoch = self.steps, self.run, self.epoch
        return (steps.token(step, run=run, epoch=epoch) for step in range(len(steps)))

    def __len__(self) -> int:
        return len(self.steps)


class _Workers(DataLoader[Any]):
    """A DataLoader that doesn't warn of more workers than cores: `make_loader` logs a line instead."""

    def check_worker_number_rationality(self) -> None:
        """Say nothing."""


def _identity(batch: Any) -> Any:
    return batch


class _Epoch:
    """One pass over an epoch; ends when another begins on the same loader."""

    def __init__(self, batches: Iterator[Any], finish: Finisher, epoch: int, steps: int) -> None:
        # No reference to the loader: in a cycle torch's iterator would be finalized after its queues, and wait 5 s for each worker.
        self._batches, self._finish = batches, finish
        self._epoch, self._steps, self._done = epoch, steps, 0
        self.ended = self.failed = self.superseded = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self.superseded:
            log.warning(
                "epoch %d: this iteration was ended by a newer iter(loader); make two loaders to iterate twice", self._epoch
            )
        if self.ended:
            raise StopIteration
        try:
            done = self._finish(next(self._batches))
        except StopIteration:
            self.ended = True
            raise
        except BaseException as error:
            self.failed = True
            self.stop()
            if isinstance(error, RuntimeError) and ("DataLoader worker" in str(error) or "DataLoader timed out" in str(error)):
                raise WorkerError(_worker_died(str(error), self._epoch, self._done, self._steps)) from error
            raise
        self._done += 1
        return done

    def supersede(self) -> None:
        """End because another iteration begins; whoever asks for more of this one is told so."""
        self.superseded = not self.ended
        self._end()

    def _end(self) -> None:
        self.ended = True
        self._batches = iter(())

    def stop(self) -> None:
        """End, and stop the workers now: an exception's traceback would hold them for as long as it lives."""
        stop_workers = getattr(self._batches, "_shutdown_workers", None)
        self._end()
        if stop_workers is not None:
            stop_workers()


def _worker_died(text: str, epoch: int, done: int, steps: int) -> str:
    cure = (
        "raise LoaderOptions(timeout=...), or look what the transform waits for"
        if "timed out" in text
        else "a killed worker is often out of memory or of /dev/shm: use fewer workers, a smaller prefetch_factor or batch_size"
    )
    return f"epoch {epoch}, after batch {done} of {steps}: {' '.join(text.split())}; {cure}"


class Loader:
    """Iterates over training batches, an epoch for each `iter`; made by `make_loader`.

    Each `iter(loader)` begins the next epoch, after an early `break` too, and ends the iteration before: a peek by
    `next(iter(loader))` uses an epoch up. `len(loader)` is the exact number of batches of an epoch. A batch is the user's for
    good: its memory isn't used again while a tensor over it lives.
    """

    def __init__(
        self, shards: ShardSet, dataset: Batches, steps: Steps, start: Callable[[_Tokens], DataLoader[Any]], finish: Finisher
    ) -> None:
        self._set, self._steps, self._finish = shards, steps, finish
        self._loader: DataLoader[Any] | None
        self._tokens = _Tokens(steps)
        self._start, self._loader = start, None
        self._closed = False
        self._next_epoch = 0
        self._current: _Epoch | None = None
        self.dataset = dataset

    @property
    def batch_size(self) -> int:
        """Samples of a full batch."""
        return self._steps.batch_size

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The class names by index; None where the set has no manifest, or its labels are used as they are."""
        return self._set.classes

    @property
    def num_classes(self) -> int | None:
        """The number of classes; None where `classes` is."""
        return None if self._set.classes is None else len(self._set.classes)

    def __len__(self) -> int:
        return len(self._steps)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (0 or more) the one that the next `iter` begins."""
        check_int("epoch", epoch, 0, _SEED_LIMIT)
        self._next_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise PipelineError("this loader is closed; make another one")
        _refuse_ranks(find())  # torch.distributed may have been initialized since
        if self._current is not None:
            self._current.supersede()
        if self._loader is None or (self._current is not None and self._current.failed):
            self._loader = self._start(self._tokens)
        self._tokens.run += 1
        self._finish.forget()
        self._tokens.epoch = self._next_epoch
        self._next_epoch += 1
        self._current = _Epoch(iter(self._loader), self._finish, self._tokens.epoch, len(self._steps))
        return self._current

    def close(self) -> None:
        """End the iteration and the workers, and close the shards; a second call does nothing."""
        if self._current is not None:
            self._current.stop()
        self._current = self._loader = None
        self._closed = True
        self.dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def make_loader(
    shards: Any,
    *,
    batch_size: int,
    transform: Callable[..., Any] | None = None,
    num_workers: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    device: str | torch.device | None = None,
    options: LoaderOptions | None = None,
) -> Loader:
    """Return a loader of training batches `(images, labels)` from packed shards.

    `shards`: a manifest, a folder, a brace pattern, a glob, or a list of those. `transform`: an albumentations transform, or any
    callable from an RGB uint8 array (H, W, 3) to an array (H, W, C) or a tensor (C, H, W), uint8 or float32; it is copied.
    `num_workers`: processes (None: as many as the CPUs this process may use; 0: none). `seed`: of the order and all draws.
    `device`: where batches go (None: the CPU).

    Images are (B, C, H, W) in channels-last memory: float32, normalized where the transform ends with a standard `A.Normalize`,
    else in [0, 1] (floats that a transform gives stay as they are); labels are int64 (B,).
    The same seed gives the same batches for any number of workers.

    Raises OptionsError for an argument that can't be used, SourceError for shards that aren't there.
    """
    options = LoaderOptions() if options is None else options
    _check_arguments(options, batch_size, num_workers, shuffle, seed, transform)
    world = find()
    _refuse_ranks(world)
    found = resolve(shards, split=options.split)
    _check_classes(found, options)
    files, counts = _count(found)
    layout = Layout(counts, _order_settings(files, counts, options, shuffle, seed))
    last = options.last_batch or ("drop" if shuffle else "uneven")
    steps = Steps(samples=layout.samples, batch_size=batch_size, last_batch=last)
    prepared = prepare(transform)
    if prepared.left:
        log.info(
            "A.%s: normalizing stays in the workers; a last standard A.Normalize(p=1) would be done once a batch", prepared.left
        )
    wanted = Wanted(options.image_fields, options.label_field, options.label_name, options.decode != "none")
    recipe = Recipe(
        wanted, prepared, prepared.target if options.decode == "auto" else None, seed, options.keys, options.prefetch_factor
    )
    reader = ShardReader(files, wanted)
    dataset = Batches(layout, reader, recipe)
    place = _device(device)
    cpus = usable_cpus()
    workers = max(1, cpus // world.local_world_size) if num_workers is None else num_workers
    if workers:
        _check_pickles(prepared, options)
    if workers > cpus:
        log.info("%d workers on %d usable CPUs: more than decoding can use", workers, cpus)
    start = lambda tokens: _torch_loader(dataset, tokens, workers, options)  # noqa: E731
    return Loader(found, dataset, steps, start, Finisher(place, prepared.normalization, options.dtype))


def _check_arguments(
    options: LoaderOptions, batch_size: int, num_workers: int | None, shuffle: bool, seed: int, transform: Any
) -> None:
    if not isinstance(options, LoaderOptions):
        raise OptionsError(f"options={options!r}: a pipeline.LoaderOptions(...)")
    check_int("batch_size", batch_size, 1)
    check_int("seed", seed, 0, _SEED_LIMIT)
    if num_workers is not None:
        check_int("num_workers", num_workers, 0)
    if not isinstance(shuffle, bool):
        raise OptionsError(f"shuffle={shuffle!r}: True or False")
    if transform is not None and options.decode == "none":
        raise OptionsError(
            "transform with decode='none': the bytes aren't decoded, so nothing can be transformed; leave one of them out"
        )


def _refuse_ranks(world: World) -> None:
    if world.world_size > 1:
        raise OptionsError(
            f"this process is rank {world.rank} of {world.world_size}, and this release reads for one process only "
            "(each rank would get the whole set); start one process, or unset RANK and WORLD_SIZE"
        )


def _check_classes(found: ShardSet, options: LoaderOptions) -> None:
    if options.classes is None:
        return
    wanted = tuple(options.classes)
    if found.classes is None:
        raise OptionsError(
            f"classes were given, and {found.name or 'the set'} has no class names to compare them with; leave classes out"
        )
    if found.classes == wanted:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(wanted, found.classes, strict=False)) if a != b), min(len(wanted), len(found.classes))
    )
    ours, theirs = (f"{names[at]!r}" if at < len(names) else "nothing" for names in (wanted, found.classes))
    raise OptionsError(
        f"{found.name or 'the set'} numbers its {len(found.classes)} classes otherwise than the {len(wanted)} given: class {at} is "
        f"{theirs} here and {ours} there; pack both splits in one build, so that they share one mapping"
    )


def _check_pickles(prepared: Prepared, options: LoaderOptions) -> None:
    """Raise OptionsError for a transform that can't be sent to workers which don't start by fork."""
    method = options.multiprocessing_context or multiprocessing.get_start_method(allow_none=True)
    if (method or multiprocessing.get_all_start_methods()[0]) == "fork":
        return
    try:
        pickle.dumps(prepared)
    except Exception as error:
        raise OptionsError(
            f"workers that don't start by fork get the transform pickled, and this one can't be ({error}); make it a function of a "
            "module or an albumentations transform, or set LoaderOptions(multiprocessing_context='fork') or num_workers=0"
        ) from error


def _count(found: ShardSet) -> tuple[list[ShardFile], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the shards as workers know them, and their samples; counts those of which no manifest tells."""
    files = [
        ShardFile(shard.path, count_samples(shard.path) if shard.samples is None else shard.samples, shard.bytes or 0, shard.index)
        for shard in found.shards
    ]
    for file, shard in zip(files, found.shards, strict=True):
        if file.samples == 0 and (shard.samples is None or file.size > len(tar.END)):
            raise SourceError(
                f"{file.path}: holds no sample, and no manifest says so (a file of zeros, or an index of another tar?); "
                "copy or pack it again, or leave it out"
            )
    return files, np.array([file.samples for file in files], np.int64)


def _order_settings(files: Sequence[ShardFile], counts: Any, options: LoaderOptions, shuffle: bool, seed: int) -> OrderSettings:
    total = sum(file.size or _size(file.path) for file in files)
    window = window_samples(options.window_bytes, total, int(counts.sum()))
    return OrderSettings(seed=seed, lanes=options.lanes, window=window, shuffle=shuffle)


def _size(path: str) -> int:
    from pathlib import Path  # noqa: PLC0415

    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise SourceError(f"{path}: can't be read ({error.strerror})") from error


def _device(device: str | torch.device | None) -> torch.device:
    try:
        found = torch.device("cpu" if device is None else device)
        if found.type == "cuda" and not torch.cuda.is_available():
            raise OptionsError(f"device={str(device)!r}: torch {torch.__version__} finds no usable CUDA device here")
        return found
    except (RuntimeError, TypeError) as error:
        raise OptionsError(f"device={device!r}: {str(error).splitlines()[0]}") from error


def _torch_loader(dataset: Batches, tokens: _Tokens, workers: int, options: LoaderOptions) -> DataLoader[Any]:
    """Return the DataLoader that hands tokens to workers; it draws from a generator of its own, so the trainer's stays as it is."""
    several: dict[str, Any] = {}
    if workers:
        several = {
            "prefetch_factor": options.prefetch_factor,
            "persistent_workers": options.persistent_workers,
            "multiprocessing_context": options.multiprocessing_context,
            "timeout": options.timeout,
        }
    return _Workers(
        dataset,
        batch_size=None,
        sampler=tokens,
        num_workers=workers,
        collate_fn=_identity,
        worker_init_fn=start_worker,
        generator=torch.Generator(),
        **several,
    )
