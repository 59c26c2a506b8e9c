"""One pass over an epoch, or over what is left of one: takes batches from the workers, finishes them, and notes what was seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from pipeline.arrival import Ended, OpenSteps
from pipeline.device import Finisher
from pipeline.epoch import Steps
from pipeline.items import Delivery
from pipeline.reading import Reading
from pipeline.state import Epochs, Place
from pipeline.stats import Ledger, LoaderStats, batch_bytes
from pipeline.torchloader import stop_workers, worker_error

log = logging.getLogger("pipeline")

_LONG = 10.0  # seconds of an epoch that is worth a warning

NEWER = "a newer iter(loader); make two loaders to iterate twice"


@dataclass(frozen=True, slots=True)
class Leg:
    """What a run goes through: where it begins, its steps, and who makes its batches and reads for them."""

    place: Place
    steps: Steps | OpenSteps
    workers: int
    reading: Reading


class Run:
    """An iteration over a loader; ends when another begins.

    It holds no reference to the loader: in a cycle torch's iterator would be finalized after its queues, and wait 5 s for each
    worker.
    """

    def __init__(self, leg: Leg, batches: Iterator[Delivery], finish: Finisher, epochs: Epochs, *, ahead: int) -> None:
        self._leg, self._batches, self._finish, self._epochs, self._ahead = leg, batches, finish, epochs, ahead
        self._ledger = Ledger(leg.workers)
        self._given_at = 0.0
        self.failed = self.ended = self._asked = False
        self._ended_by = ""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._ended_by:
            log.warning("epoch %d: this iteration was ended by %s", self._leg.place.epoch, self._ended_by)
        if self.ended:
            raise StopIteration
        asked_at = self._ask()
        try:
            delivery = next(self._batches)
            if isinstance(delivery.batch, Ended):
                self._finish_arrival(delivery.batch)
            batch = self._finished(delivery, asked_at)
        except StopIteration:
            samples = self._leg.steps.samples or 0
            self._leg.reading.hand_out(samples)  # a rank with one batch fewer than others didn't get there
            self._epochs.see(Place(self._leg.place.epoch, samples))
            self._end()
            raise
        except BaseException as error:
            raised = worker_error(error, self._batches, self._where())
            self.failed = True
            self.stop()
            if raised is not None:
                raise raised from error
            raise
        self._see()
        return batch

    def _finish_arrival(self, ended: Ended) -> NoReturn:
        """End an epoch that nobody counted beforehand: its batches in the workers, all behind the end, are given up."""
        assert isinstance(self._leg.steps, OpenSteps)
        self._leg.steps.end(ended.counts)
        raise StopIteration

    def _ask(self) -> float:
        """Note that a batch is asked for, and return when."""
        now = time.monotonic()
        if self._asked:
            self._ledger.looping += now - self._given_at
        else:
            self._asked = True
            self._epochs.ask()
        return now

    def _finished(self, delivery: Delivery, asked_at: float) -> Any:
        came = time.monotonic()
        batch = self._finish(delivery.batch)
        self._given_at = time.monotonic()
        self._ledger.waiting += came - asked_at
        self._ledger.finishing += self._given_at - came
        self._ledger.add(delivery.spent, came)
        self._ledger.finished_bytes += batch_bytes(batch)
        return batch

    def _see(self) -> None:
        """Note that the batch given last is seen, or the one before it where the trainer fetches one ahead."""
        leg, given = self._leg, self._ledger.batches
        leg.reading.hand_out(leg.steps.position_after(given - 1))
        if given > self._ahead:
            self._epochs.see(Place(leg.place.epoch, leg.steps.position_after(given - 1 - self._ahead)))

    def _where(self) -> str:
        of = "" if self._leg.steps.total is None else f" of {self._leg.steps.total}"
        return f"epoch {self._leg.place.epoch}, after batch {self._ledger.batches}{of}"

    def stats(self) -> LoaderStats:
        """Return what the run did so far."""
        return self._ledger.stats(self._leg.place.epoch, self._leg.steps.total, self._leg.reading.stats())

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
                if stats.network_bound and stats.seconds > _LONG:
                    log.warning("%s", slow_network(stats))
                elif stats.reading.skipped_bytes:
                    log.warning("epoch %d: %s", stats.epoch, _skipped(stats))
        self.ended = True
        self._batches = iter(())

    def stop(self, by: str = "") -> None:
        """End, and stop the workers now: an exception's traceback would hold them for as long as it lives."""
        batches = self._batches
        self.supersede(by)
        stop_workers(batches)


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
