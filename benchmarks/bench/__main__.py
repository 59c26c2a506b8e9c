"""Measures ours, its peers and the limit on the same photographs, fairly, and shows what came out.

    python benchmarks/bench setup [grain litdata ...]      install the peers, each in an environment of its own (.venv-bench)
    python benchmarks/bench run PHOTOS [--quick] [--peers ours grain] [--places warm drive] [--jobs problem] [--rounds 5]
    python benchmarks/bench show RESULTS.json              print the tables, draw the figures beside the file

PHOTOS is a set of benchmarks/photos.py. Each program has its own set, of its own writer (kept in --work), and runs as a program of its
own, round after round, each round beginning with another one, the limit program after every third. Every epoch is checked: each
picture once, in an order of its own, transformed as the job has it, else the number isn't shown. From the page cache the last of
--epochs epochs counts, from a cold disk or a server the first. Memory is watched in a run of its own. Without --workers each
program has in each place the number with which it was fastest there.

Places: warm (the page cache), drive (a hard disk in software, drive.py; needs root, and --server with mfusepy), disk (a folder on a
real disk, --disk), http (nginx on this machine).

--quick: 2,000 photographs, one epoch from a cold disk, one round, job "problem", no second settings of the question (SquashFS, memory).

Exit codes: 0 all that was asked for has a number; 1 some hasn't, or an installation failed; 2 the arguments, the photographs or the
room don't do; 130 interrupted. What was measured until then is in the file, and is shown.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import environments
import records
from contest import Contest, Settings, say
from machine import machine
from photographs import PhotographsError
from places import lacking
from programs import ENVIRONMENTS, PROGRAMS
from protocol import BATCH
from records import Results
from rounds import shards
from sides import JOBS
from tables import PLACES, failures, tables

RESULTS = Path(__file__).resolve().parent.parent / "results"
DEFAULTS = {"count": (9000, 2000), "rounds": (5, 1), "epochs": (2, 1), "writes": (5, 1)}  # full, quick


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    setup = verbs.add_parser("setup", help="install the peers")
    setup.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; none: all")
    run = verbs.add_parser("run", help="measure")
    run.add_argument("photos", type=Path)
    run.add_argument("--quick", action="store_true", help="see above")
    run.add_argument("--peers", nargs="+", choices=PROGRAMS, metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; none: all")
    run.add_argument("--places", nargs="+", choices=PLACES, help="none: warm, drive (or disk), http")
    run.add_argument("--jobs", nargs="+", choices=JOBS, help="none: all; bytes reads only, from cold disks")
    run.add_argument("--rounds", type=positive, help="5, quick 1")
    run.add_argument("--epochs", type=positive, help="of each run: 2, quick 1")
    run.add_argument("--workers", type=positive, help="of each program but the limit, which has one a core; none: the best of some")
    run.add_argument("--no-search", dest="search", action="store_false", help="the number that its authors name, else one a core")
    run.add_argument("--count", type=positive, help="photographs: 9,000, quick 2,000")
    run.add_argument("--writes", type=positive, help="how often the writing of each set is timed: 5, quick 1")
    run.add_argument("--work", type=Path, default=Path("data/bench"), help="where sets are kept")
    run.add_argument("--home", type=Path, help="where the image of the disk in software lies (below --work)")
    run.add_argument("--server", default=sys.executable, help="an interpreter that has mfusepy")
    run.add_argument(
        "--touch", type=float, default=1, help="GiB of memory that are taken and given back before a run from that disk"
    )
    run.add_argument("--disk", type=Path, help="a folder on a real disk, for the place 'disk'")
    run.add_argument("--results", type=Path, help="a new file (benchmarks/results/DATETIME[-quick].json)")
    run.add_argument("--no-memory", dest="memory", action="store_false", help="leave out the runs that watch the memory")
    run.add_argument(
        "--plain-malloc", dest="keep_memory", action="store_false", help="don't tell the peers' allocator to keep its memory"
    )
    show = verbs.add_parser("show", help="print tables, draw figures")
    show.add_argument("results", type=Path)
    show.add_argument("--no-plots", dest="plots", action="store_false")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def settings_of(options: argparse.Namespace) -> Settings:
    """Fill in what wasn't given."""
    quick = options.quick
    numbers = {name: getattr(options, name) or values[quick] for name, values in DEFAULTS.items()}
    cold = "disk" if options.disk or lacking("drive", options.server) else "drive"
    everyone = tuple(name for name, program in PROGRAMS.items() if program.quick or not quick)
    return Settings(
        photos=options.photos,
        programs=tuple(dict.fromkeys(options.peers or everyone)),
        places=tuple(options.places or ((cold,) if quick else ("warm", cold, "http"))),
        jobs=tuple(options.jobs or (("problem",) if quick else JOBS)),
        workers=options.workers,
        quick=quick,
        search=options.search and not quick,
        memory=options.memory and not quick,
        keep_memory=options.keep_memory,
        work=options.work,
        home=options.home or options.work / "drive",
        server=options.server,
        touch_gib=options.touch,
        disk=options.disk,
        **numbers,
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and show what came out, interrupted or not."""
    settings = settings_of(options)
    path = options.results or RESULTS / (time.strftime("%Y-%m-%dT%H%M%S") + ("-quick" if settings.quick else "") + ".json")
    if path.exists():
        say(f"{path} is there already, and isn't written over: name another file by --results")
        return 2
    told = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    more = {"batch": BATCH, "shards": shards(len(os.sched_getaffinity(0)))}
    results = Results(machine=machine(settings.work if settings.work.exists() else Path()), settings=told | more)

    def save() -> None:
        try:
            results.save(path)
        except OSError as error:  # the disk is full: what was measured is shown at the end all the same
            say(f"{path} can't be written: {error}")

    began, code = time.monotonic(), 0
    try:
        Contest(settings, results, save=save, say=say).run()
    except KeyboardInterrupt:
        say("interrupted: what was measured until now follows")
        code = 130
    except (PhotographsError, OSError) as error:
        say(str(error))
        code = 2
    if results.runs:
        say(f"{time.monotonic() - began:.0f} s; {path}")
        show(results, path, plots=True)
    asked = [name for name in results.absent if name in (options.peers or ()) or name.startswith("place ")]
    return code or int(bool(failures(results.runs) or asked or not results.runs))


def show(results: Results, path: Path, *, plots: bool) -> None:
    """Print the tables of results, and draw their figures beside the file."""
    print("\n\n".join(tables(results)), flush=True)
    if not plots:
        return
    try:
        import plots as figures  # noqa: PLC0415  (matplotlib is an extra's)
    except ImportError as error:
        say(f"no figures: {error}; pip install -e '.[bench]'")
        return
    for file in figures.draw(results, path.with_suffix("")):
        say(f"drawn: {file}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return the exit code."""
    options = parse(arguments)
    if options.verb == "setup":
        failed = environments.set_up(options.names)
        for name, why in failed.items():
            say(f"{name}: {why}")
        return int(bool(failed))
    if options.verb == "show":
        try:
            results = records.load(options.results)
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"{options.results}: no results of this version of the benchmark: {error}")
            return 2
        show(results, options.results, plots=options.plots)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
