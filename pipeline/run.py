"""One pass over an epoch, or over what is left of one: takes batches from the workers, finishes them, and notes what was seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self, TypeVar

from pipeline.arrival import Ended, OpenSteps
from pipeline.device import Begun, Finisher
from pipeline.epoch import Steps
from pipeline.errors import WorkerError
from pipeline.faults import Account, Budget
from pipeline.items import Delivery
from pipeline.options import LoaderOptions
from pipeline.reading import Reading
from pipeline.state import Epochs, Place
from pipeline.stats import Ledger, LoaderStats, batch_bytes
from pipeline.torchloader import lies_ready, stop_workers, worker_error

log = logging.getLogger("pipeline")

E = TypeVar("E", bound=BaseException)

_LONG = 10.0  # seconds of an epoch that is worth a warning
_NAMED = 3  # skipped samples that the log names; stats() has more

NEWER = "a newer iter(loader); make two loaders to iterate twice"


@dataclass(frozen=True, slots=True)
class Leg:
    """What a run goes through: where it begins, its steps, and who makes its batches and reads for them."""

    place: Place
    steps: Steps | OpenSteps
    workers: int
    reading: Reading


@dataclass(frozen=True, slots=True)
class _Taken:
    """A batch that was taken from the workers at `came`; `begun` None where in its place came the epoch's end."""

    delivery: Delivery
    came: float
    begun: Begun | None


class Run:
    """An iteration over a loader; ends when another begins.

    Where the device finishes batches beside the trainer, one that lies ready is taken and begun before the one before it is given.
    It counts as any other once it is given: nothing that a state says, or a prefetcher is told, knows of it.

    It holds no reference to the loader: in a cycle torch's iterator would be finalized after its queues, and wait 5 s for each
    worker.
    """

    def __init__(self, leg: Leg, batches: Iterator[Delivery], finish: Finisher, epochs: Epochs, options: LoaderOptions) -> None:
        self._leg, self._batches, self._finish, self._epochs, self._ahead = leg, batches, finish, epochs, options.ahead
        budget = Budget(options.max_skipped if options.on_error == "skip" else None)
        self._ledger = Ledger(leg.workers)
        self._account = Account(budget, leg.place.epoch, _samples_of(leg.steps))
        self._given_at = 0.0
        self.failed = self.ended = self._asked = False
        self._ended_by = ""
        self._next: _Taken | Exception | None = None  # taken ahead, or what that raised

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._ended_by:
            log.warning("epoch %d: this iteration was ended by %s", self._leg.place.epoch, self._ended_by)
        if self.ended:
            raise StopIteration
        self._ask()
        try:
            batch = self._give(self._taken())
            self._look_ahead()
        except StopIteration:
            samples = self._leg.steps.samples or 0
            self._leg.reading.hand_out(samples)  # a rank with one batch fewer than others didn't get there
            self._epochs.see(Place(self._leg.place.epoch, samples))
            self._end()
            raise
        except BaseException as error:
            raised = self._failure(error)
            self.stop()
            if raised is not error:
                raise raised from error
            raise
        self._see()
        return batch

    def _finish_arrival(self, ended: Ended) -> NoReturn:
        """End an epoch that nobody counted beforehand: its batches in the workers, all behind the end, are given up."""
        assert isinstance(self._leg.steps, OpenSteps)
        self._leg.steps.end(ended.counts)
        raise StopIteration

    def _ask(self) -> None:
        """Note that a batch is asked for."""
        if self._asked:
            self._ledger.looping += time.monotonic() - self._given_at
        else:
            self._asked = True
            self._epochs.ask()

    def _taken(self) -> _Taken:
        """Return the batch that comes next, taken ahead or now; raises what that raised."""
        found, self._next = self._next, None
        if isinstance(found, Exception):
            raise found
        return self._take() if found is None else found

    def _take(self) -> _Taken:
        """Take a batch from the workers, and begin to finish it: then its slot may be used again."""
        asked_at = time.monotonic()
        delivery = next(self._batches)
        came = time.monotonic()
        self._ledger.waiting += came - asked_at
        begun = None if isinstance(delivery.batch, Ended) else self._finish.begin(delivery.batch)
        self._ledger.finishing += time.monotonic() - came
        return _Taken(delivery, came, begun)

    def _look_ahead(self) -> None:
        """Take the batch behind the one that is about to be given, if that needs no waiting; it raises at its own turn."""
        if self._finish.overlaps and lies_ready(self._batches):
            try:
                self._next = self._take()
            except Exception as error:
                self._next = self._failure(error)
                stop_workers(self._batches)
        self._given_at = time.monotonic()

    def _give(self, taken: _Taken) -> Any:
        """Return a batch for the trainer, and count it."""
        if taken.begun is None:
            self._finish_arrival(taken.delivery.batch)
        began = time.monotonic()
        batch = self._finish.hand_over(taken.begun)
        self._ledger.finishing += time.monotonic() - began
        self._ledger.add(taken.delivery.spent, taken.came, unread=sum(skip.cause == "shard" for skip in taken.delivery.skips))
        self._account.add(taken.delivery.skips, self._ledger.samples)
        self._ledger.finished_bytes += batch_bytes(batch)
        return batch

    def _see(self) -> None:
        """Note that the batch given last is seen, or the one before it where the trainer fetches one ahead."""
        leg, given = self._leg, self._ledger.batches
        leg.reading.hand_out(leg.steps.position_after(given - 1))
        if given > self._ahead:
            self._epochs.see(Place(leg.place.epoch, leg.steps.position_after(given - 1 - self._ahead)))

    def _failure(self, error: E) -> E | WorkerError:
        """Note that the run has failed, and return what is to be raised: the exception, or what explains it."""
        self.failed = True
        raised = worker_error(error, self._batches, self._where())
        return error if raised is None else raised

    def _where(self) -> str:
        of = "" if self._leg.steps.total is None else f" of {self._leg.steps.total}"
        return f"epoch {self._leg.place.epoch}, after batch {self._ledger.batches}{of}"

    def stats(self) -> LoaderStats:
        """Return what the run did so far."""
        return self._ledger.stats(self._leg.place.epoch, self._leg.steps.total, self._leg.reading.stats(), self._account.stats())

    def hand_over(self, place: Place) -> tuple[Leg, Iterator[Delivery]] | None:
        """End, and return what is to be read, where that begins at `place` and nobody asked for a batch; else None."""
        if self._asked or self.ended or place != self._leg.place:
            return None
        left = self._leg, self._batches
        self._ended_by, self.ended, self._batches = NEWER, True, iter(())
        return left

    def supersede(self, by: str) -> None:
        """End because of something else; whoever asks for more of this iteration is told what."""
        if not self.ended:
            self._ended_by = by
        self._end()

    def _end(self) -> None:
        if not self.ended:
            self._leg.reading.end()
            if self._asked:
                stats = self.stats()
                log.info("%s", stats.summary())
                if stats.skipped.samples:
                    log.warning("epoch %d: %s; the first: %s", stats.epoch, stats.skipped, "; ".join(stats.skipped.first[:_NAMED]))
                if stats.network_bound and stats.seconds > _LONG:
                    log.warning("%s", slow_network(stats))
                elif stats.reading.skipped_bytes:
                    log.warning("epoch %d: %s", stats.epoch, _skipped(stats))
        self.ended = True
        self._batches, self._next = iter(()), None

    def stop(self, by: str = "") -> None:
        """End, and stop the workers now: an exception's traceback would hold them for as long as it lives."""
        batches = self._batches
        self.supersede(by)
        stop_workers(batches)


def _samples_of(steps: Steps | OpenSteps) -> int | None:
    """Return about how many samples of a whole epoch come to this rank, None where nobody counted them."""
    return steps.samples // steps.world_size if isinstance(steps, Steps) else None


def slow_network(stats: LoaderStats) -> str:
    """Return what to do where the network keeps the trainer waiting."""
    fetched, reading = stats.medium_bytes or 0, stats.reading
    failed = f", {reading.retries} requests were repeated" if reading.retries else ""
    kept = ""
    if reading.kept_share < 1:
        kept = f"; {reading.kept_share:.0%} of the set stays in the cache folder; a larger LoaderOptions(cache_bytes=) keeps more"
    if reading.skipped_bytes:
        failed += f", and {_skipped(stats)}"
    return (
        f"epoch {stats.epoch} waited for the network {stats.stages['loop'].waiting_seconds / stats.seconds:.0%} of its time "
        f"({fetched / stats.seconds / 1e6:.0f} MB/s came{failed}){kept}; LoaderOptions(connections=) sets how much is fetched at "
        "once, smaller pictures (a resize at packing) need less"
    )


def _skipped(stats: LoaderStats) -> str:
    return (
        f"{stats.reading.skipped_bytes / 1e6:.1f} MB came that nobody wanted, as a server can't begin in the middle of a shard (no "
        "Range): serve the shards by one that can"
    )
