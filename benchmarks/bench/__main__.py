"""Measures ours, its peers and the limit on the same photographs, fairly, and shows what came out.

    python benchmarks/bench setup [grain litdata ...]      install the peers, each in an environment of its own (.venv-bench)
    python benchmarks/bench run PHOTOS [--quick] [--peers ours grain] [--places warm drive] [--jobs problem] [--rounds 5]
    python benchmarks/bench show RESULTS.json              print the tables, draw the figures beside the file

PHOTOS is a set of benchmarks/photos.py. Each program has its own set, of its own writer (kept in --work), and runs as a program of its
own, round after round, the limit program first in each. Every epoch is checked: each picture once, else the number isn't shown. In
each run there are --epochs epochs: in a warm place the last one counts, in a cold one the first is compared with it. Memory (PSS of
all processes) is watched in a run of its own. Without --workers each program has the number with which it was fastest.

--quick: one epoch from a cold disk, one round, all programs that are here. The cold disk is the one in software (drive.py) where
this is root and --server has mfusepy, else a folder whose pages are dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import environments
from contest import Contest, say
from programs import ENVIRONMENTS, PROGRAMS
from results import PLACES, tables
from sides import SIDES

RESULTS = Path(__file__).resolve().parent.parent / "results"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    setup = verbs.add_parser("setup")
    setup.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; none: all")
    run = verbs.add_parser("run")
    run.add_argument("photos", type=Path)
    run.add_argument("--quick", action="store_true")
    run.add_argument(
        "--peers", nargs="*", choices=PROGRAMS, default=[], metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; none: all"
    )
    run.add_argument("--places", nargs="+", choices=PLACES)
    run.add_argument("--jobs", nargs="+", choices=SIDES)
    run.add_argument("--rounds", type=int)
    run.add_argument("--epochs", type=int)
    run.add_argument("--workers", type=int, help="of each program; the limit has one a core without it")
    run.add_argument("--count", type=int, default=2000, help="photographs")
    run.add_argument("--work", type=Path, default=Path("data/bench"), help="where sets are kept")
    run.add_argument("--home", type=Path, help="where the image of the disk in software lies (default: below --work)")
    run.add_argument("--server", default=sys.executable, help="an interpreter that has mfusepy")
    run.add_argument(
        "--touch", type=float, default=1, help="GiB of memory that are taken and given back before a run from that disk"
    )
    run.add_argument("--disk", type=Path, help="a folder on a real disk, for the place 'disk'")
    run.add_argument("--results", type=Path, help="the file to write (default: benchmarks/results/DATETIME[-quick].json)")
    run.add_argument("--no-memory", dest="memory", action="store_false")
    show = verbs.add_parser("show")
    show.add_argument("results", type=Path)
    show.add_argument("--no-plots", dest="plots", action="store_false")
    return parser.parse_args()


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """Fill in what wasn't given."""
    quick, cores = options.quick, len(os.sched_getaffinity(0))
    options.home = options.home or options.work / "drive"
    options.places = options.places or ([cold_place(options)] if quick else ["warm", cold_place(options)])
    options.jobs = options.jobs or (["problem"] if quick else list(SIDES))
    options.rounds = options.rounds or (1 if quick else 5)
    options.epochs = options.epochs or (1 if quick else 2)
    options.workers = options.workers or (cores if quick else None)
    options.memory = options.memory and not quick
    name = time.strftime("%Y-%m-%dT%H%M") + ("-quick" if quick else "")
    options.results = options.results or RESULTS / f"{name}.json"
    return options


def cold_place(options: argparse.Namespace) -> str:
    """Return the disk in software where it can be started, else a folder."""
    if options.disk or os.getuid() or not Path("/dev/fuse").exists():
        return "disk"
    probe = subprocess.run([options.server, "-c", "import mfusepy"], capture_output=True, check=False)
    return "disk" if probe.returncode else "drive"


def show(path: Path, *, plots: bool) -> None:
    """Print the tables of a file, and draw its figures."""
    data = json.loads(path.read_text())
    print("\n\n".join(tables(data)))
    if plots:
        try:
            import plots as figures  # noqa: PLC0415  (matplotlib is an extra's)
        except ImportError as error:
            sys.exit(f"no figures: {error}; pip install -e '.[bench]'")
        for file in figures.draw(data, path.with_suffix("")):
            say(f"drawn: {file}")


def main() -> int:
    """Run what was asked for."""
    options = parse()
    if options.verb == "setup":
        failed = environments.set_up(options.names)
        for name, why in failed.items():
            say(f"{name}: {why}")
        return 0
    if options.verb == "show":
        show(options.results, plots=options.plots)
        return 0
    contest = Contest(complete(options))
    began = time.monotonic()
    contest.run()
    say(f"{time.monotonic() - began:.0f} s; {contest.results.path}")
    show(contest.results.path, plots=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
