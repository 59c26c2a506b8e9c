"""Composes the reader: the plan's tokens go through a DataLoader of `Batches` and the device, behind one `Loader`.

    Steps -> Token -> worker: read_samples -> decode -> augment -> gather -> Batch (uint8, shared memory) -> Finisher -> the loop

A token says all that a worker needs (run, epoch, position, size): workers keep no position, so epochs, early breaks, resumes and
other numbers of workers or ranks change nothing about a batch, and none of them needs a message.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from pipeline.arrival import ArrivalSettings, OpenSteps
from pipeline.augment import prepare
from pipeline.classes import check_classes
from pipeline.device import Finisher, find_device
from pipeline.epoch import Layout, Steps
from pipeline.errors import PipelineError
from pipeline.items import Delivery, Wanted
from pipeline.machine import usable_cpus
from pipeline.options import LastBatch, LoaderOptions, check_arguments
from pipeline.ranks import compare, default_store, lanes_hint, name_of_caller, steps_hint
from pipeline.reading import Arrival, Reading, cache_of
from pipeline.run import NEWER, Leg, Run
from pipeline.samples import ShardReader
from pipeline.shardset import ShardSet
from pipeline.state import Epochs, Place, identify
from pipeline.stats import LoaderStats
from pipeline.survey import Survey, check_counted, count_all, layout_of, recount, survey, with_counts
from pipeline.torchloader import Tokens, check_pickles, lost_workers, start_loader, stop_loader, worker_error
from pipeline.urls import resolve
from pipeline.walk import Arrivals
from pipeline.worker import Batches, Recipe
from pipeline.world import World, check_unchanged, find

log = logging.getLogger("pipeline")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What `make_loader` composes a loader of; `workers` None: as many as the CPUs that a rank may use."""

    found: ShardSet
    known: Survey
    order: ArrivalSettings
    make: Callable[[Survey, Layout | None], Batches]
    finish: Finisher
    batch_size: int
    last_batch: LastBatch
    workers: int | None
    options: LoaderOptions
    name: str  # the same on all ranks


class Loader:
    """Iterates over training batches, an epoch for each `iter`; made by `make_loader`.

    Each `iter(loader)` begins the next epoch, after an early `break` too, and ends the iteration before: a peek by
    `next(iter(loader))` uses an epoch up, so peek on all ranks or on none. `len(loader)` is the exact number of an epoch's batches.
    A batch is the user's for good: its memory isn't used again while a tensor over it lives.

    `state_dict()` says how far the trainer is, at any step; after `load_state_dict()` the next `iter` goes on there, under other
    numbers of workers and ranks and another batch size too. Ranks are found at the first `len`, `iter` or `state_dict`: a loader
    may be made before the process group.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known = parts.known
        self._layout = layout_of(parts.known, parts.order) if parts.known.counted else None
        self.dataset = parts.make(parts.known, self._layout)
        self._identity = identify(parts.known.digest, parts.order, None if parts.known.arrives else self._layout)
        self._open: OpenSteps | None = None  # of an epoch that nobody counted
        if self._layout is not None:  # what leaves one process no step leaves none to several: an error now, not at the first iter
            self._steps(self._layout, 0, World())
        self._epochs, self._tokens = Epochs(), Tokens()
        self._world: World | None = None
        self._reading: Reading | None = None
        self._arriving: Reading | None = None  # of the first epoch of remote shards that nobody counted
        self._loader: DataLoader[Delivery] | None = None
        self._current: Run | None = None
        self._comparisons = self._attempts = 0
        self._compared = self._warned = self._closed = False

    @property
    def batch_size(self) -> int:
        """Samples of a full batch of this rank."""
        return self._parts.batch_size

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The class names by index; None where the set has no manifest, or its labels are used as they are."""
        return self._parts.found.classes

    @property
    def num_classes(self) -> int | None:
        """The number of classes; None where `classes` is."""
        return None if self.classes is None else len(self.classes)

    def __len__(self) -> int:
        known = self._seen()
        check_counted(known, "len")
        if self._current is None or self._current.ended:  # learning would end an epoch that is being read
            self._learn(known)
        layout = layout_of(known, self._parts.order) if self._layout is None else self._layout
        return len(self._steps(layout, 0, self._join()))

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (0 or more) the one that the next `iter` begins; the loaded one goes on where its state says."""
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the trainer is, in plain numbers and texts; a batch counts once it is handed over."""
        self._join()
        return self._identity.save(self._epochs.seen)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter` go on where a state says; ends an iteration that goes on.

        Raises OptionsError, naming both sides, for the state of another set, seed or order.
        """
        place = self._identity.restore(state)
        if self._current is not None:
            self._current.supersede("load_state_dict(); iterate anew to go on where that state says")
        self._epochs.load(place)
        self._compared = False  # ranks may have loaded different states

    def stats(self) -> LoaderStats:
        """Return what each stage did in the epoch that is read, or was read last; as text it is a table.

        Raises PipelineError before the first `iter`.
        """
        if self._current is None:
            raise PipelineError("nothing was read yet: stats() tells of the epoch that is read, or was read last")
        return self._current.stats()

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise PipelineError("this loader is closed; make another one")
        world, options = self._join(), self._parts.options
        if options.rank is None:
            check_unchanged(world)
        self._learn(self._seen())
        if world.world_size > 1:
            check_counted(self._known, "reading in several ranks")
        place = self._epochs.begin(lambda position: self._ends(position, world))
        if place.epoch:  # only the first epoch is read as it arrives: which samples come when depends on nothing else
            self._learn(count_all(self._known))
        self._compare(world, place)
        left = self._current.hand_over(place) if self._current is not None else None
        leg, batches = self._begin(world, place) if left is None else left
        self._warn_of_steps(leg.steps)
        self._current = Run(leg, batches, self._parts.finish, self._epochs, options)
        return self._current

    def _seen(self) -> Survey:
        """Return the set with what is known of its shards by now, from the epoch that was read or from the cache folder."""
        ended = None if self._open is None else self._open.counts
        return recount(self._known) if ended is None or self._known.counted else with_counts(self._known, ended)

    def _learn(self, known: Survey) -> None:
        """Take over how many samples the shards hold; once all are counted, workers begin anew with the layout that follows."""
        if known is self._known or not known.counted:
            self._known = known
            return
        if self._current is not None:
            self._current.supersede(NEWER)
        self.dataset.close()
        self._close_readings()
        self._known, self._layout = known, layout_of(known, self._parts.order)
        made = self._parts.make(known, self._layout)
        made.world_size = self.dataset.world_size
        self.dataset, self._loader = made, None

    def _ends(self, position: int, world: World) -> bool:
        """Tell whether no step is left from a position on; only where an epoch began must nobody have counted the samples."""
        if position and self._layout is None:
            self._learn(count_all(self._known))
        return self._layout is not None and self._steps(self._layout, position, world).ended

    def _steps(self, layout: Layout, start: int, world: World) -> Steps:
        parts = self._parts
        return Steps(
            samples=layout.samples,
            batch_size=parts.batch_size,
            last_batch=parts.last_batch,
            world_size=world.world_size,
            rank=world.rank,
            start=min(start, layout.samples),  # a last batch may have been short, which nobody knew then
        )

    def _join(self) -> World:
        """Find the world when it is needed first."""
        if self._world is None:
            options = self._parts.options
            given = None if options.rank is None or options.world_size is None else (options.rank, options.world_size)
            self._world = find(given=given)
            self.dataset.world_size = self._world.world_size
            order = self._parts.order
            if self._world.rank == 0 and order.shuffle and (hint := lanes_hint(order.lanes, self._world.world_size)):
                log.info("%s", hint)
        return self._world

    def _compare(self, world: World, place: Place) -> None:
        """Compare with the other ranks what each of them is about to read: at the first iter, and at the first after a load.

        Where not all ranks came, those that did compare again at their next iter.
        """
        parts, options = self._parts, self._parts.options
        store = None if self._compared or options.rank is not None or world.world_size == 1 else default_store()
        if store is not None:
            settings = {name: getattr(options, name) for name in ("decode", "dtype", "image", "label")}
            claim = {**self._identity.facts(), "batch_size": parts.batch_size, "last_batch": parts.last_batch, **settings}
            name = f"{parts.name}-{self._comparisons}"
            self._attempts += 1
            claim |= place._asdict()
            self._compared = compare(store, name, claim, rank=world.rank, world_size=world.world_size, attempt=self._attempts)
            if self._compared:
                self._comparisons, self._attempts = self._comparisons + 1, 0

    def _warn_of_steps(self, steps: Steps | OpenSteps) -> None:
        """Say once, on rank 0, that ranks have unequal steps."""
        if self._warned or not isinstance(steps, Steps) or steps.rank:
            return
        last = steps.world_size - 1
        if hint := steps_hint(len(steps), len(dataclasses.replace(steps, rank=last)), last):
            log.warning("%s", hint)
            self._warned = True

    def _begin(self, world: World, place: Place) -> tuple[Leg, Iterator[Delivery]]:
        """End the iteration before, and let workers begin another."""
        if self._current is not None:
            self._current.supersede(NEWER)
            if self._current.failed:
                self._loader = None
        if self._loader is not None and (lost := lost_workers(self._loader)):
            # torch said so by an exception in the loop's body, if anyone asked it to.
            log.warning("worker %s ended since the epoch before: epoch %d begins with new ones", ", ".join(lost), place.epoch)
            stop_loader(self._loader)
            self._loader = None
        known, options = self._known, self._parts.options
        if self._reading is None:
            self._reading = Reading(self._layout, known.files, options, world, self._growth(world), known.digest)
            self.dataset.block = self._reading.block
        arrives = known.arrives and not place.epoch
        if arrives and self._arriving is None and known.files[0].url:
            arrival = Arrival(self._parts.order, max(1, self._workers(world)))
            self._arriving = Reading(None, known.files, options, world, name=known.digest, arrival=arrival)
            self.dataset.arrival_block = self._arriving.block
            if self._loader is not None:
                stop_loader(self._loader)  # its workers know nothing of that
            self._loader = None
        if self._arriving is not None and not arrives:
            self._arriving.close()  # what it holds of the cache folder is others' now
            self._arriving = self.dataset.arrival_block = None
        if self._loader is None:
            self._loader = self._start(world)
        steps: Steps | OpenSteps
        if self._layout is not None:
            steps, self._open = self._steps(self._layout, place.position, world), None
        else:
            steps = self._open = OpenSteps(self._parts.batch_size, self._parts.last_batch, place.position)
        self._tokens.begin(place.epoch, steps)
        self._parts.finish.forget()
        # Workers of a local set that arrives read ahead as they find samples.
        reading = (self._arriving or Reading(None, known.files, options, world)) if arrives else self._reading
        reading.begin(self._tokens.run, *place, steps.wrapped)
        try:
            batches = iter(self._loader)
        except BaseException as error:
            reading.end()
            stopped, self._loader = stop_loader(self._loader), None
            dead = worker_error(error, stopped, f"at the start of epoch {place.epoch}")
            if dead is None:
                raise
            raise dead from error
        return Leg(place, steps, self._loader.num_workers, reading), batches

    def _close_readings(self) -> None:
        for reading in filter(None, (self._reading, self._arriving)):
            reading.close()
        self._reading = self._arriving = None

    def _start(self, world: World) -> DataLoader[Delivery]:
        return start_loader(self.dataset, self._tokens, self._workers(world), self._parts.options)

    def _workers(self, world: World) -> int:
        workers = self._parts.workers
        return max(1, usable_cpus() // world.local_world_size) if workers is None else workers

    def _growth(self, world: World) -> int:
        """Return about how much memory the workers will take, which don't run yet."""
        files, batch_size, method = self._known.files, self._parts.batch_size, self._parts.options.multiprocessing_context
        samples = 0 if self._layout is None else self._layout.samples
        mean = sum(file.size for file in files) / samples if samples else 0.0
        forked = (method or multiprocessing.get_start_method()) == "fork"
        return self._workers(world) * self.dataset.worker_bytes(batch_size, mean, forked=forked)

    def close(self) -> None:
        """End the iteration and the workers, and close the shards; a second call does nothing."""
        if self._current is not None:
            self._current.stop("close()")
        self._close_readings()
        self.dataset.block = self.dataset.arrival_block = None
        self._loader = None
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

    `shards`: a manifest, a folder, a brace pattern, a glob (of local shards), a URL (http, https, s3, gs, az), or a list of those.
    `batch_size`: of each rank. `transform`: an albumentations transform, or any callable from an RGB uint8 array (H, W, 3) to an
    array (H, W, C) or a tensor (C, H, W), uint8 or float32; it is copied. `num_workers`: processes (None: as many as the CPUs that
    this rank may use; 0: none). `seed`: of the order and all draws. `device`: where batches go (None: the CPU).

    Images are (B, C, H, W) in channels-last memory: float32 (or `LoaderOptions(dtype=)`), normalized where the transform ends with
    a standard `A.Normalize`, else in [0, 1] (floats that a transform gives stay as they are); labels are int64 (B,).
    The same seed gives the same batches for any number of workers, and for any number of ranks of the same global batch.

    Raises OptionsError for an argument that can't be used, SourceError for shards that aren't there.
    """
    options = LoaderOptions() if options is None else options
    check_arguments(options, batch_size=batch_size, num_workers=num_workers, shuffle=shuffle, seed=seed, transform=transform)
    found = resolve(shards, split=options.split, http=options.http, objects=options.objects)
    cache = cache_of(found, options)
    check_classes(found, options)
    order = ArrivalSettings(seed=seed, lanes=options.lanes, window_bytes=options.window_bytes, shuffle=shuffle)
    last_batch = options.last_batch or ("drop" if shuffle else "uneven")
    make, finish = _stages(order, last_batch, transform, device, options, num_workers, cache)
    return Loader(
        Parts(
            found=found,
            known=survey(found),
            order=order,
            make=make,
            finish=finish,
            batch_size=batch_size,
            last_batch=last_batch,
            workers=num_workers,
            options=options,
            name=name_of_caller(),
        )
    )


def _stages(
    order: ArrivalSettings,
    last_batch: LastBatch,
    transform: Callable[..., Any] | None,
    device: str | torch.device | None,
    options: LoaderOptions,
    workers: int | None,
    cache: str,
) -> tuple[Callable[[Survey, Layout | None], Batches], Finisher]:
    """Return what works on batches: a function that makes the workers' stages for a set, and the trainer's last one."""
    prepared = prepare(transform)
    if prepared.left:
        log.info("A.%s: normalizing stays in the workers; a last standard A.Normalize(p=1) is done once a batch", prepared.left)
    if workers != 0:
        check_pickles(prepared, options)
    if workers is not None and workers > (cpus := usable_cpus()):
        log.info("%d workers on %d usable CPUs: more than decoding can use", workers, cpus)
    pixels = options.decode != "none"
    wanted = Wanted(options.image_fields, options.label_field, options.label_name, pixels, options.max_pixels)
    target, crop = (prepared.target, prepared.crop) if options.decode == "auto" else (None, None)
    told = options.keys, options.prefetch_factor, last_batch, options.on_error == "skip"
    recipe = Recipe(wanted, prepared, target, crop, order.seed, *told)

    def make(known: Survey, layout: Layout | None) -> Batches:
        arrivals = Arrivals(known.files, order) if known.arrives else None
        return Batches(layout, ShardReader(known.files, wanted, cache), recipe, arrivals)

    return make, Finisher(find_device(device), prepared.normalization, options.dtype)
