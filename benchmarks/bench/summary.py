"""Makes of a benchmark's runs one line for each program in a place and job: medians, ratios within a round, or the reason why not."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from processes import Memory
from programs import FIRST, LIMIT, OURS, PROGRAMS
from records import Epoch, Run
from sides import BYTES

SKIPPED = 0.25  # of an epoch's batches, before its steady state
CHECKED = 500  # pictures below which the shares of rotated ones and of dropped channels are chance
ROTATED, DROPPED, ORDERED = (0.3, 0.8), (0.04, 0.2), 0.5


@dataclass(frozen=True, kw_only=True)
class Line:
    """A program in one place and job, medians over its rounds; None where there is nothing to show, `why` says the cause.

    rate: images a second of the whole epoch that the place is about: the first from cold disks, the last from the page cache.
    steady: of that epoch after its first quarter of batches; what a loader had decoded by then flatters it.
    share: of the limit's rate, from its runs before and after; of programs that do the same work.
    lead: ours / this one, in the same round.
    first, second: seconds of the first and the last epoch; first_batch: from before the loader is made.
    cpu: milliseconds of all processes a picture, of that epoch.
    memory: at its peak.
    seeks, busy: of the emulated drive in the first epoch, and its seconds.
    made: how the place was made cold, where that wasn't the same each time or isn't what is expected.
    """

    program: str
    workers: int
    why: str | None = None
    rate: float | None = None
    steady: float | None = None
    share: float | None = None
    lead: float | None = None
    first: float | None = None
    second: float | None = None
    first_batch: float | None = None
    cpu: float | None = None
    memory: Memory | None = None
    seeks: float | None = None
    busy: float | None = None
    made: str = ""


def lines(runs: Iterable[Run], place: str, job: str) -> list[Line]:
    """Return a line for each program that ran in a place, the limit first, then the fastest, what failed last."""
    here = [run for run in runs if run.place == place and run.job == job]
    found = [_line(name, here, place) for name in dict.fromkeys(run.program for run in here)]
    return sorted(found, key=lambda line: (line.program != LIMIT, line.rate is None, -(line.rate or 0)))


def _line(name: str, here: Sequence[Run], place: str) -> Line:
    runs = [run for run in here if run.program == name]
    timed = [run for run in runs if run.round is not None]
    why = next((cause for run in timed if (cause := fault(run))), None)
    if why is not None or not timed:
        return Line(program=name, workers=runs[0].workers, why=why or "it wasn't timed")
    chosen = [epoch_of(run, place) for run in timed]
    watched = [run.memory for run in runs if run.memory is not None and not fault(run)]
    two = all(len(run.epochs) > 1 for run in timed)
    drives = [run.epochs[0].drive for run in timed if run.epochs[0].drive]
    return Line(
        program=name,
        workers=timed[0].workers,
        rate=statistics.median(map(rate, chosen)),
        steady=_median(steady(epoch) for epoch in chosen),
        share=_median(share(run, here, place) for run in timed) if _comparable(name) else None,
        lead=_median(lead(run, here, place) for run in timed) if name not in (LIMIT, OURS) else None,
        first=statistics.median(run.epochs[0].seconds for run in timed),
        second=statistics.median(run.epochs[-1].seconds for run in timed) if two else None,
        first_batch=None if name == LIMIT else _median(run.epochs[0].arrivals[0] for run in timed),
        cpu=_median(1000 * epoch.cpu / epoch.samples for epoch in chosen if epoch.cpu),
        memory=max(watched, key=lambda memory: memory.held) if watched else None,
        seeks=_median(drive["seeks"] for drive in drives),
        busy=_median(drive["seek_s"] + drive["transfer_s"] for drive in drives),
        made="; ".join(dict.fromkeys(run.made for run in timed if run.made)),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _comparable(name: str) -> bool:
    return name != LIMIT and (name not in PROGRAMS or PROGRAMS[name].work == "same")


def epoch_of(run: Run, place: str) -> Epoch:
    """Return the epoch that a place is about: from a cold disk or a server the first, from the page cache the last.

    The limit's pictures are in memory wherever it runs, so it is the last of its own.
    """
    return run.epochs[0] if place in FIRST and run.program != LIMIT else run.epochs[-1]


def rate(epoch: Epoch) -> float:
    """Return images a second of an epoch, from its start on: what is decoded into a buffer before the first batch counts."""
    return epoch.samples / epoch.seconds


def steady(epoch: Epoch) -> float | None:
    """Return images a second after the first quarter of an epoch's batches; None where there are too few."""
    skipped = int(len(epoch.sizes) * SKIPPED)
    if not 0 < skipped < len(epoch.sizes):
        return None
    seconds = epoch.seconds - epoch.arrivals[skipped - 1]
    return sum(epoch.sizes[skipped:]) / seconds if seconds > 0 else None


def share(run: Run, here: Sequence[Run], place: str) -> float | None:
    """Return a run's rate by the limit's: the mean of its last run before and its first after, as far as there are such."""
    limits = [n for n, other in enumerate(here) if other.program == LIMIT and other.round is not None and not fault(other)]
    at = bisect.bisect(limits, next(n for n, other in enumerate(here) if other is run))
    beside = [rate(epoch_of(here[n], place)) for n in limits[max(0, at - 1) : at + 1]]
    return rate(epoch_of(run, place)) / statistics.mean(beside) if beside else None


def lead(run: Run, here: Sequence[Run], place: str) -> float | None:
    """Return ours by a run's rate, of the same round."""
    for other in here:
        if other.program == OURS and other.round == run.round and not fault(other):
            return rate(epoch_of(other, place)) / rate(epoch_of(run, place))
    return None


def fault(run: Run) -> str | None:
    """Say why a run has no number: it failed, or didn't deliver each picture once an epoch, shuffled and as the job has it."""
    if run.error:
        return run.error
    if not run.epochs:
        return "it gave no epoch"
    found = ((number, _epoch_fault(epoch, run)) for number, epoch in enumerate(run.epochs))
    return next((f"epoch {number}: {why}" for number, why in found if why), None)


def _epoch_fault(epoch: Epoch, run: Run) -> str | None:
    if epoch.missing or epoch.doubled:
        return f"{epoch.missing} pictures didn't come, {epoch.doubled} came more than once"
    if run.program == LIMIT:
        return None  # it looks at no picture but a few, in order
    if epoch.in_order > ORDERED:
        return f"not shuffled: {epoch.in_order:.0%} of the pictures came in the order in which they were written"
    if epoch.repeated > ORDERED:
        return f"not shuffled anew: {epoch.repeated:.0%} of the pictures came where they came in the epoch before"
    return None if run.job == BYTES else _work_fault(epoch, run)


def _work_fault(epoch: Epoch, run: Run) -> str | None:
    less = run.program in PROGRAMS and PROGRAMS[run.program].work == "less"
    if run.job != "problem" or less or epoch.samples < CHECKED:
        return None
    if not ROTATED[0] <= epoch.black_corners <= ROTATED[1]:
        return f"{epoch.black_corners:.0%} of the pictures have the black corner of a rotation, about half should"
    if not DROPPED[0] <= epoch.dropped_channels <= DROPPED[1]:
        return f"{epoch.dropped_channels:.0%} of the pictures have a dropped channel, about 10% should"
    return None
