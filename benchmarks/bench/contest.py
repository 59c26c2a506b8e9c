"""Runs the programs in each place and job, round after round, each with its best number of workers, and keeps what came of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import photographs
import rounds
from environments import absent, python, script
from launch import Outcome, launch
from places import ColdDisk, ColdDrive, PageCache, WebServer, lacking
from programs import COLD, DATASETS, FIRST, LIMIT, PROGRAMS, Program
from records import Results, Run, Trial, epoch_from
from sets import SetError, Sets
from sides import BYTES
from summary import epoch_of, fault, rate

LEAST_PATIENCE_SECONDS, PATIENCE_SECONDS_A_PICTURE = 900.0, 0.3  # loose files on a cold disk took 0.03
FAILED_TRIALS = 2  # of a program's numbers of workers: each may take all of its patience
# What ours sets for itself by mallopt: memory that was mapped is kept. For peers it is set from outside: it isn't loading.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": "2000000000"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    programs: their names, in the order in which they run; workers: of each program but the limit, None to try some, or without a
    search what its authors name, else one a core; writes: how often each set's writing is timed; touch_gib:
    memory that is taken and given back before a run from the emulated disk.
    """

    photos: Path
    count: int
    programs: tuple[str, ...]
    places: tuple[str, ...]
    jobs: tuple[str, ...]
    rounds: int
    epochs: int
    workers: int | None
    quick: bool
    search: bool
    writes: int
    memory: bool
    keep_memory: bool
    work: Path
    home: Path
    server: str
    touch_gib: float
    disk: Path | None


class Contest:
    """The programs, their sets, and the results so far; `save` is called after each run."""

    def __init__(self, settings: Settings, results: Results, *, save: Callable[[], None], say: Callable[[str], None]) -> None:
        self._settings, self._results, self._save, self._say = settings, results, save, say
        self._cores = len(os.sched_getaffinity(0))
        self._home = settings.work.resolve() / f"{settings.count}"
        self._photos = self._home / "photos"
        shards = rounds.shards(self._cores)
        self._sets = Sets(self._home / "sets", self._photos, shards=shards, times=settings.writes, say=say)
        self._workers: dict[tuple[str, str, str], int] = {}

    def run(self) -> None:
        """Measure all that is here; raises PhotographsError, and OSError where there is no room."""
        programs = self._present()
        photographs.number(self._settings.photos, self._photos, self._settings.count)
        check_room(self._home, photographs.total_bytes(self._photos), {program.dataset for program in programs})
        programs = [program for program in programs if self._written(program)]
        limit = PROGRAMS[LIMIT] if self._written(PROGRAMS[LIMIT]) else None
        programs = [program for program in programs if program.name != LIMIT]
        for name in self._settings.places:
            self._measure_place(name, programs, limit)

    def _present(self) -> list[Program]:
        """Return the programs that were asked for and can run; note why others can't."""
        reasons = {name: absent(PROGRAMS[name]) for name in self._settings.programs}
        for name, why in reasons.items():
            if why is not None:
                self._leave_out(name, why)
        return [PROGRAMS[name] for name, why in reasons.items() if why is None]

    def _leave_out(self, name: str, why: str) -> None:
        self._results.absent[name] = why
        self._save()
        self._say(f"{name}: left out: {why}")

    def _written(self, program: Program) -> bool:
        """Tell whether a program's set is there, after having it written where it wasn't."""
        try:
            self._results.sets[program.dataset] = self._sets.ensure(program.dataset)
        except SetError as error:
            self._leave_out(program.name, str(error))
            return False
        self._save()
        return True

    def _measure_place(self, name: str, programs: Sequence[Program], limit: Program | None) -> None:
        """Measure all jobs in a place; one that can't be had, or fails, is noted, and the next comes."""
        why = lacking(name, self._settings.server)
        if why is not None:
            return self._leave_out(f"place {name}", why)
        try:
            with self._place(name) as place:
                for job in self._settings.jobs:
                    those = [program for program in programs if program.takes_part(name, job)]
                    beside = limit if job in PROGRAMS[LIMIT].jobs else None
                    if (those or (beside and LIMIT in self._settings.programs)) and (job != BYTES or name in COLD):
                        self._measure(place, job, those, beside)
        except (OSError, SystemExit, AssertionError, subprocess.CalledProcessError) as error:
            self._leave_out(f"place {name}", f"it failed: {error}")

    def _place(self, name: str) -> PageCache:
        settings, sets = self._settings, self._sets.folder
        made: dict[str, Callable[[], PageCache]] = {
            "warm": lambda: PageCache(sets),
            "drive": lambda: ColdDrive(sets, settings.home.resolve(), settings.server, settings.touch_gib),
            "disk": lambda: ColdDisk(sets, settings.disk.resolve() if settings.disk else self._home / "cold"),
            "http": lambda: WebServer(sets, self._home / "nginx"),
        }
        return made[name]()

    def _measure(self, place: PageCache, job: str, programs: Sequence[Program], limit: Program | None) -> None:
        """Find each program's workers, run the rounds, then once more for the memory; who failed isn't run again."""
        going = [program for program in programs if self._held(place, job, program)]
        for program in [*going, *([limit] if limit else [])]:
            self._workers[program.name, place.name, job] = self._best(place, job, program)
        every = rounds.QUICK_LIMIT_EVERY if self._settings.quick else rounds.LIMIT_EVERY
        for number in range(self._settings.rounds):
            for program in rounds.order(going, limit, number, every):
                if program in going or program is limit:
                    run = self._once(place, job, program, number)
                    if fault(run) and program in going:
                        going.remove(program)
        for program in going if self._settings.memory else ():
            self._once(place, job, program, None)

    def _held(self, place: PageCache, job: str, program: Program) -> bool:
        """Bring a program's set to a place; where it has no room there the program has no number."""
        try:
            place.hold(program.dataset)
        except (OSError, subprocess.CalledProcessError) as error:
            why = f"its set can't be brought there: {error}"
            self._keep(Run(place=place.name, job=job, round=0, program=program.name, workers=0, error=why))
            return False
        return True

    def _best(self, place: PageCache, job: str, program: Program) -> int:
        """Return the number of workers with which a program is fastest in a place; the limit has one a core."""
        if program.name == LIMIT:
            return self._cores
        if self._settings.workers or not self._settings.search:
            return self._settings.workers or program.threads or self._cores
        rates: dict[int, float] = {}
        failed = 0
        for count in rounds.tried(self._cores, program.threads):
            run = self._run(place, job, program, number=0, workers=count, epochs=1 if place.name in FIRST else 2)
            why = fault(run)
            told = why or f"{rate(epoch_of(run, place.name)):.0f} images/s"
            self._say(f"{place.name}, {job}: {program.name} with {count} workers: {told}")
            if why is None:
                rates[count] = rate(epoch_of(run, place.name))
            failed += why is not None
            if failed == FAILED_TRIALS:
                break
        self._results.trials.append(Trial(place=place.name, job=job, program=program.name, rates=rates))
        self._save()
        return max(rates, key=rates.__getitem__, default=self._cores)

    def _once(self, place: PageCache, job: str, program: Program, number: int | None) -> Run:
        """Run a program as it counts; a `number` of None watches its memory."""
        # The limit is what it is once its pictures are in memory.
        epochs = 2 if program.in_memory else self._settings.epochs
        workers = self._workers[program.name, place.name, job]
        run = self._run(place, job, program, number=number, workers=workers, epochs=epochs)
        self._keep(run)
        return run

    def _keep(self, run: Run) -> None:
        self._results.runs.append(run)
        self._save()
        each = ", ".join(f"{epoch.seconds:.1f} s" for epoch in run.epochs)
        told = fault(run) or f"{rate(epoch_of(run, run.place)):.0f} images/s ({each})"
        held = f", {run.memory.held / 1e6:.0f} MB" if run.memory else ""
        when = "memory" if run.round is None else f"round {run.round}"
        self._say(f"{run.place}, {run.job}, {when}: {run.program}: {told}{held}")

    def _run(self, place: PageCache, job: str, program: Program, *, number: int | None, workers: int, epochs: int) -> Run:
        there = PageCache(self._sets.folder) if program.in_memory else place
        made = there.prepare(program.dataset)
        command = [python(program), script(program), "read", *there.arguments(program.dataset), "--count", self._settings.count]
        command += ["--job", job, "--workers", workers, "--epochs", epochs, "--variant", program.variant]
        patience = max(LEAST_PATIENCE_SECONDS, PATIENCE_SECONDS_A_PICTURE * self._settings.count)
        kept = {} if program.own_malloc or not self._settings.keep_memory else KEEP_MEMORY
        done = launch([str(part) for part in command], patience=patience, watch=number is None, environment=kept)
        if done.answer is not None:
            self._results.versions[program.environment or "own"] = done.answer["versions"]
        return made_run(done, place=place.name, job=job, number=number, program=program.name, workers=workers, made=made)


def made_run(done: Outcome, *, place: str, job: str, number: int | None, program: str, workers: int, made: str) -> Run:
    """Return the run that an outcome is."""
    epochs = tuple(map(epoch_from, (done.answer or {}).get("epochs", ())))
    known = {"place": place, "job": job, "round": number, "program": program, "workers": workers, "made": made}
    return Run(**known, epochs=epochs, error=done.error, memory=done.memory)


def check_room(folder: Path, photos_bytes: int, datasets: set[str]) -> None:
    """Raise OSError where the sets that aren't there yet, and a copy of each for a cold place, don't fit below a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in datasets if name in DATASETS and not (folder / "sets" / name).exists()]
    wanted, free = photos_bytes * 2 * len(missing), shutil.disk_usage(folder).free
    if wanted > free:
        raise OSError(
            f"{folder}: {wanted / 1e9:.1f} GB are needed for {len(missing)} sets and their copies, {free / 1e9:.1f} are free; "
            "ask for fewer photographs (--count, make COUNT=) or programs, or name another folder (--work)"
        )


def say(text: str) -> None:
    """Tell on stderr how it goes."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
