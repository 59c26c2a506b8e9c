"""The command line: parses, calls, prints; results on stdout, progress and messages on stderr.

Exit codes: 0 fine, 1 a data problem was found, 2 usage or settings, 3 I/O or environment, 130 interrupted.
"""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` and `--version` stay fast.
from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardify import __version__
from shardify.errors import DataError, ShardifyError, StorageError, storage_error
from shardify.interrupts import INTERRUPTS

if TYPE_CHECKING:
    from shardify.config import BuildConfig
    from shardify.space import DiskUse

ENVIRONMENT, INTERRUPTED = 3, 130
SHOWN_PROBLEMS = 20

app = typer.Typer(name="shardify", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The settings, a YAML file.")]
Source = Annotated[str | None, typer.Option(metavar="FOLDER", help="Replaces source.root.")]
Out = Annotated[str | None, typer.Option(metavar="FOLDER|URL", help="Replaces shards.out.")]
Work = Annotated[str | None, typer.Option(metavar="FOLDER", help="Replaces work: where a set for an object store is made.")]
Seed = Annotated[int | None, typer.Option(help="Replaces order.seed.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replaces any setting; may be repeated.")]
SkippedFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Writes all pictures that are left out to a CSV file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]


def main() -> None:
    """Run the command line."""
    if importlib.util.find_spec("fcntl") is None:
        print(f"shardify: {sys.platform} isn't supported: it has no locks of POSIX; use WSL 2 under Windows", file=sys.stderr)
        sys.exit(ENVIRONMENT)
    _open_streams()
    INTERRUPTS.heed()
    for stream in (sys.stdout, sys.stderr):  # names of files may be in no encoding, or in another than the terminal's
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()


def _open_streams() -> None:
    """Have no file opened as stdin, stdout or stderr where one of them is closed: a shard would get its lines."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shardify {__version__}")
        raise typer.Exit


@app.callback()
def _shardify(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Pack images and labels into large tar shards, ordered for streaming.

    Exit codes: 0 fine, 1 a data problem was found, 2 usage or settings, 3 I/O or environment, 130 interrupted.
    """


@app.command()
def build(  # noqa: PLR0913, PLR0917 - a parameter an option
    config: Config,
    source: Source = None,
    out: Out = None,
    work: Work = None,
    seed: Seed = None,
    sets: Sets = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace the set, or what a build that was cut off left, in the output folder."),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a build that was cut off there; without one, begin. Ends with the same bytes."),
    ] = False,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing where a complete set of these settings is (the source isn't read).")
    ] = False,
    skipped: SkippedFile = None,
    as_json: AsJson = False,
) -> None:
    """Pack a source into shards, with indexes, manifests and a card."""
    with _answering(as_json) as answer:
        from shardify import build as builder
        from shardify import console

        settings = _load(config, source, out, work, seed, sets)
        there = builder.find_built(settings) if (if_missing or resume) and not force else None
        if there is not None:
            answer.say(
                f"{settings.shards.out} is there, complete and of these settings: nothing was changed "
                "(the source was not looked at; --force packs it again)"
            )
            answer.give({"splits": there}, lambda: console.show_splits(there))
            return
        with console.progress() as progress:
            report = builder.build(settings, force=force, resume=resume, skipped_to=skipped, progress=progress)
        took = ", ".join(f"{stage} {seconds:,.1f} s" for stage, seconds in report.seconds.items())
        answer.say(*report.notes, *_tell_skipped(report.skipped), f"packed into {settings.shards.out} ({took})")
        answer.give({"splits": report.splits, "seconds": report.seconds}, lambda: console.show_splits(report.splits))


@app.command()
def plan(
    config: Config,
    source: Source = None,
    out: Out = None,
    work: Work = None,
    seed: Seed = None,
    sets: Sets = None,
    skipped: SkippedFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what `build` would write, and all that stands in its way; writes nothing."""
    with _answering(as_json) as answer:
        from shardify import build as builder
        from shardify import console

        settings = _load(config, source, out, work, seed, sets)
        with console.progress() as progress:
            report = builder.plan(settings, skipped_to=skipped, progress=progress)

        def show() -> None:
            console.show_splits(report.splits)
            print("" if report.exact else "sizes are estimates, as pictures are re-encoded\n", end="")
            print("classes:", "labels as they are" if report.classes is None else f"{report.classes:,}")
            print("types:", ", ".join(f"{count:,} {kind}" for kind, count in report.kinds.items()) or "none")
            print(_tell_disk(report.disk, "" if report.exact else "about "))

        answer.say(*report.notes, *_tell_skipped(report.skipped))
        facts: dict[str, Any] = {"exact": report.exact, "classes": report.classes, "types": report.kinds, "skipped": report.skipped}
        facts["disk"] = report.disk
        answer.give({"splits": report.splits, **facts, "notes": report.notes}, show, report.problems)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="FOLDER|MANIFEST", help="A packed set, or one split's manifest.")],
    decode: Annotated[bool, typer.Option("--decode", help="Decode every picture too.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Decode every picture, and name those that aren't whole.")] = False,
    as_json: AsJson = False,
) -> None:
    """Re-read a packed set: sizes, hashes, indexes against tars, keys, labels."""
    with _answering(as_json) as answer:
        from shardify import console
        from shardify import verify as verifier

        _only_here(path)
        with console.progress() as progress:
            verdict = verifier.verify(path, decode=decode, strict=strict, progress=progress)

        def show() -> None:
            console.show_splits(verdict.splits)
            print("" if verdict.problems else f"{path}: fine, all of it fits its manifests\n", end="")

        answer.give({"splits": verdict.splits}, show, verdict.problems)


@app.command()
def index(
    tars: Annotated[list[str], typer.Argument(metavar="TARS...", help="Tars, folders of tars, patterns such as t-{00..99}.tar.")],
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Names the manifest, NAME-shardindex.json (default: as the tars' names say)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write there, not beside the tars.")] = None,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Skip the pictures' bytes, and leave SHA-256 out of the manifest.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave tars that can't be indexed out of the manifest.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace indexes and manifests that say something else.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write indexes and a manifest for tars that others packed; reports damage, unequal fields, repeated keys, split samples."""
    with _answering(as_json) as answer:
        from shardify import console
        from shardify import index as indexer

        _only_here(*tars)
        options = {"headers_only": headers_only, "skip_bad": skip_bad, "force": force}
        with console.progress() as progress:
            found = indexer.index(tars, split=split, out=out, **options, progress=progress)

        def show() -> None:
            console.show_splits(found.splits)
            for path in found.manifests.values():
                print(path)

        answer.say(*found.notes)
        answer.give({"splits": found.splits, "manifests": found.manifests, "notes": found.notes}, show, found.problems)


@app.command()
def info(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A packed set, or one split's manifest.")],
    as_json: AsJson = False,
) -> None:
    """Show a packed set's splits, shards, samples, classes and sizes, as its manifests state them."""
    with _answering(as_json) as answer:
        from shardify import console
        from shardify import info as describer

        _only_here(path)
        splits = describer.describe(path)
        titles = ("split", "shards", "samples", "bytes", "largest shard", "mean sample", "classes", "fields", "skipped")
        rows = [
            (
                name,
                f.shards,
                f.samples,
                f.bytes,
                f.largest_shard,
                f.mean_sample,
                f.classes,
                ",".join(f.fields),
                sum(f.skipped.values()),
            )
            for name, f in splits.items()
        ]
        answer.give({"splits": splits}, lambda: console.show_table(titles, rows))


@app.command()
def doctor(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder of pictures or shards, a tar, or a manifest.")],
    workers: Annotated[int | None, typer.Option(min=0, max=1024, help="Loader processes (default: as many as CPUs).")] = None,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="About how long it may take.")] = 30,
    drop_caches: Annotated[
        bool, typer.Option("--drop-caches", help="As root: empty the whole machine's cache, so that names and inodes are cold too.")
    ] = False,
    transform_ms: Annotated[
        float | None, typer.Option(min=0, help="What your transform takes of a CPU a picture (default: as the README's).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a folder is read as it lies, and how long an epoch takes from it as files and as shards."""
    with _answering(as_json) as answer:
        from shardify import console
        from shardify import doctor as examiner

        _only_here(path)
        transform_seconds = None if transform_ms is None else transform_ms / 1e3
        settings = examiner.Settings(workers, seconds, drop_caches, transform_seconds)
        with console.progress() as progress:
            report = examiner.examine(path, settings, progress)

        def show() -> None:
            for what, found in report.lines():
                print(f"{what:<42}{found}".rstrip())

        answer.say(*report.notes)
        answer.give(report.facts(), show, report.problems)


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to draw; a new or empty folder.")],
    count: Annotated[int, typer.Option(help="How many pictures.")] = 600,
    seed: Annotated[int, typer.Option(help="Another seed draws other pictures.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Draw a small sample set: photo-like JPEGs of ten classes with a table, in the layout of Google Landmarks 2020."""
    with _answering(as_json) as answer:
        from shardify import console
        from shardify import sample as drawer

        with console.progress() as progress:
            drawn = drawer.draw(folder, count=count, seed=seed, progress=progress)
        facts = {"pictures": drawn.pictures, "classes": drawn.classes, "bytes": drawn.bytes, "fresh": drawn.fresh}
        state = "" if drawn.fresh else " (it was there: nothing was changed)"
        answer.give(
            facts, lambda: print(f"{folder}: {drawn.pictures:,} pictures, {drawn.classes} classes, {drawn.bytes:,} bytes{state}")
        )


def _load(
    config: Path, source: str | None, out: str | None, work: str | None, seed: int | None, sets: list[str] | None
) -> BuildConfig:
    from shardify.config import load

    return load(config, source=source, out=out, work=work, seed=seed, sets=tuple(sets or ()))


def _only_here(*paths: str | Path) -> None:
    """Refuse URLs, by name, in commands that read folders."""
    from shardify.config.places import refuse_url

    for path in paths:
        refuse_url(str(path))


def _tell_disk(disk: DiskUse, about: str) -> str:
    spool = f"{about}{disk.spool:,} bytes for the spool, " if disk.spool else "no spool (memory holds all), "
    return f"disk: {about}{disk.output:,} bytes for {disk.written}, {spool}{about}{disk.peak:,} at the peak"


def _tell_skipped(skipped: Mapping[str, int]) -> list[str]:
    counts = ", ".join(f"{count:,} {cause}" for cause, count in skipped.items())
    return [f"left out: {counts} (listed by --skipped FILE)"] if skipped else []


class _Answer:
    """How a command answers: for people, or as JSON."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, *lines: str) -> None:
        """Print remarks to stderr."""
        with suppress(OSError, ValueError):  # a log that is full or gone never costs the work
            for line in filter(None, lines):
                print(line, file=sys.stderr, flush=True)

    def give(self, facts: Mapping[str, Any], show: Callable[[], None], problems: Sequence[str] = ()) -> None:
        """Print the result to stdout, problems with it; exit with 1 where there are some."""
        if self._as_json:
            print(json.dumps({**facts, "problems": list(problems)}, default=_as_dict))
        else:
            show()
            for problem in _shorten(problems):
                print(problem)
        if problems:
            raise typer.Exit(DataError.exit_code)

    def fail(self, error: ShardifyError) -> NoReturn:
        """Print an error, and exit with its code."""
        problems = error.problems if isinstance(error, DataError) else ()
        self.say(f"shardify: {error}", *(f"  {line}" for line in _shorten(problems)), *getattr(error, "__notes__", ()))
        if self._as_json:
            print(json.dumps({"splits": {}, "problems": list(problems) or [str(error)]}))
        raise typer.Exit(error.exit_code)


def _as_dict(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else dict(value)


def _shorten(lines: Sequence[str]) -> list[str]:
    more = len(lines) - SHOWN_PROBLEMS
    return [*lines[:SHOWN_PROBLEMS], *([f"... and {more:,} more (--json lists all)"] if more > 0 else [])]


@contextmanager
def _answering(as_json: bool) -> Iterator[_Answer]:
    """Turn what a command raises into a message and an exit code."""
    answer = _Answer(as_json)
    try:
        yield answer
    except ShardifyError as error:
        answer.fail(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter fails again while it ends
        raise typer.Exit(StorageError.exit_code) from None
    except OSError as error:
        answer.fail(storage_error(error, "standard output"))
    except MemoryError:
        answer.fail(StorageError("out of memory; lower `memory` or encode.workers (--set memory=500MiB)"))
    except KeyboardInterrupt as error:
        _end_interrupted(answer, error)
    except RuntimeError as error:  # what an interrupt makes of a lock that it falls into
        if not INTERRUPTS.came:
            raise
        _end_interrupted(answer, error)


def _end_interrupted(answer: _Answer, error: BaseException) -> NoReturn:
    answer.say("shardify: interrupted", *getattr(error, "__notes__", ()))
    raise typer.Exit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
