"""Runs the programs round after round: numbers the photographs, has each set written, finds each one's workers, and keeps all runs."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from environments import absent, python, script
from launch import launch
from places import Driven, Dropped, Served, Warm
from programs import LIMIT, PROGRAMS, WRITERS, Program
from protocol import BATCH, place
from results import Results, fault, rate

WRITING_SECONDS, READING_SECONDS = 1800.0, 900.0  # more is a failure
SHARDS = 18  # of a set, whatever its size: enough for each of 16 workers to have one
TRIED = (1, 2, 4)  # workers


class Contest:
    """The photographs, the sets that were made of them, and the results."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.cores = len(os.sched_getaffinity(0))
        self.home = options.work.resolve() / f"{options.count}"
        self.sets = self.home / "sets"
        self.results = Results(options.results, self._settings())
        self.workers: dict[tuple[str, str], int] = {}

    def _settings(self) -> dict[str, Any]:
        names = ("count", "rounds", "places", "jobs", "workers", "epochs")
        return {name: getattr(self.options, name) for name in names} | {"batch": BATCH}

    def run(self) -> None:
        """Measure all that is here."""
        programs = self._present()
        number_pictures(self.options.photos, self.home / "photos", self.options.count)
        programs = [program for program in programs if self._written(program)]
        for kind in self.options.places:
            with self._place(kind) as where:
                for job in self.options.jobs:
                    self._measure(where, job, self._those(programs, kind, job))

    def _present(self) -> list[Program]:
        """Return the programs that were asked for and can run; note why others can't."""
        found = []
        for name in self.options.peers or PROGRAMS:
            why = absent(PROGRAMS[name])
            if why is None:
                found.append(PROGRAMS[name])
            else:
                self._leave_out(name, why)
        return found

    def _leave_out(self, name: str, why: str) -> None:
        self.results.data["absent"][name] = why
        self.results.save()
        say(f"{name}: left out: {why}")

    def _those(self, programs: list[Program], kind: str, job: str) -> list[Program]:
        """Return the programs that take part in a place and a job, the limit first."""
        chosen = [program for program in programs if job in program.jobs and (kind != "http" or program.remote)]
        limit = [PROGRAMS[LIMIT]] if absent(PROGRAMS[LIMIT]) is None and self._written(PROGRAMS[LIMIT]) else []
        return [*limit, *(program for program in chosen if program.name != LIMIT)]

    def _written(self, program: Program) -> bool:
        """Have a program's set written where it isn't there; tell whether it is there then."""
        name, writer = program.dataset, WRITERS[program.dataset]
        folder, record = self.sets / name, self.sets / f"{name}.json"
        if not (folder.exists() and record.exists()):
            partial = self.sets / f"{name}.partial"
            for old in (partial, folder):
                shutil.rmtree(old, ignore_errors=True)
            self.sets.mkdir(exist_ok=True)
            size = sum(path.stat().st_size for path in (self.home / "photos").rglob("*.jpg")) // SHARDS
            runs_it = python(writer) if absent(writer) is None else Path(sys.executable)
            done = launch(
                [runs_it, script(writer), "write", self.home / "photos", partial, "--shard-bytes", str(size)],
                patience=WRITING_SECONDS,
            )
            if done.answer is None:
                self._leave_out(program.name, f"its set can't be written: {done.error}")
                return False
            partial.rename(folder)
            record.write_text(json.dumps(done.answer))
            say(f"{name}: written in {done.answer['seconds']:.1f} s, {done.answer['bytes'] / 1e6:.1f} MB")
        self.results.data["sets"][name] = json.loads(record.read_text())
        return True

    @contextmanager
    def _place(self, kind: str) -> Iterator[Warm]:
        options = self.options
        made: dict[str, Any] = {
            "warm": lambda: Warm(self.sets),
            "drive": lambda: Driven(self.sets, options.home.resolve(), options.server, options.touch),
            "disk": lambda: Dropped(self.sets, options.disk.resolve() if options.disk else self.home / "cold"),
            "http": lambda: Served(self.sets, self.home / "nginx"),
        }
        with made[kind]() as where:
            yield where

    def _measure(self, where: Warm, job: str, programs: list[Program]) -> None:
        for program in programs:
            where.bring(program.dataset)
            self._find_workers(program, job)
        for number in range(self.options.rounds):
            turned = number % max(1, len(programs))  # each round begins with another one
            for program in programs[turned:] + programs[:turned]:
                self._once(where, job, program, number)
        if where.name == "warm" and self.options.memory:
            for program in programs:
                if program.name != LIMIT:
                    self._once(where, job, program, -1, watch=True)

    def _find_workers(self, program: Program, job: str) -> None:
        """Keep the number of workers with which a program is fastest from the page cache; the limit has one a core."""
        if (program.name, job) in self.workers:
            return
        if program.name == LIMIT or self.options.workers:
            self.workers[program.name, job] = self.options.workers or self.cores
            return
        rates: dict[int, float] = {}
        where = Warm(self.sets)
        for count in TRIED:
            where.ready(program.dataset)
            run = self._launched(where, job, program, count, epochs=2)
            if not fault(run):
                rates[count] = rate(run)
                say(f"{program.name}, {job}, {count} workers: {rates[count]:.0f} images/s")
        self.workers[program.name, job] = max(rates, key=rates.__getitem__) if rates else self.cores
        self.results.data["tuning"].append({"program": program.name, "job": job, "rates": rates})
        self.results.save()

    def _once(self, where: Warm, job: str, program: Program, number: int, *, watch: bool = False) -> None:
        there = Warm(self.sets) if program.warm_only else where
        there.ready(program.dataset)
        workers = self.workers[program.name, job]
        # The limit is what it is once its pictures are in memory.
        epochs = 2 if program.warm_only else 1 if watch else self.options.epochs
        run = self._launched(there, job, program, workers, epochs=epochs, watch=watch)
        what = {"place": where.name, "job": job, "round": number, "program": program.name, "workers": workers}
        self.results.data["runs"].append(run | what)
        self.results.save()
        why = fault(run)
        seconds = "" if why else f"{rate(run):.0f} images/s"
        each = ", ".join(f"{epoch['seconds']:.1f} s" for epoch in run["epochs"])
        memory = f", {run['peak'] / 1e6:.0f} MB" if watch else ""
        say(f"{where.name}, {job}, round {number}: {program.name}: {why or f'{seconds} ({each}){memory}'}")

    def _launched(
        self, where: Warm, job: str, program: Program, workers: int, *, epochs: int, watch: bool = False
    ) -> dict[str, Any]:
        command = [python(program), script(program), "read", *where.arguments(program.dataset), "--count", str(self.options.count)]
        command += ["--job", job, "--workers", str(workers), "--epochs", str(epochs), "--variant", program.variant]
        done = launch(command, patience=READING_SECONDS, watch=watch)
        return {**(done.answer or {"epochs": []}), "error": done.error, "peak": done.peak, "watched": watch}


def number_pictures(photos: Path, out: Path, count: int) -> None:
    """Copy the first `count` pictures of a set, with their numbers as labels."""
    if out.exists():
        return
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with (photos / "train.csv").open(newline="") as file:
        keys = [row["id"] for row in csv.DictReader(file)][:count]
    if len(keys) < count:
        sys.exit(f"{photos}: {len(keys)} pictures, {count} are asked for: draw them with benchmarks/photos.py")
    for key in sorted(keys):
        (partial / place(key)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(photos / place(key), partial / place(key))
    (partial / "train.csv").write_text("id,landmark_id\n" + "".join(f"{key},{number}\n" for number, key in enumerate(keys)))
    partial.rename(out)


def say(text: str) -> None:
    """Tell how it goes."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
