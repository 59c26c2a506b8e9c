"""The command line of the reading side: `python -m pipeline preview`, `python -m pipeline index`, `python -m pipeline cache`."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pipeline.errors import OptionsError, PipelineError, RemoteError, SourceError

if TYPE_CHECKING:
    from pipeline.stores.cache import Cache

_SHOWN_PROBLEMS = 20

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Look at packed shards as a trainer sees them."
)


@app.command()
def preview(
    shards: Annotated[str, typer.Argument(help="A manifest, a folder, a brace pattern, a glob or a URL.")],
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("sheet.png"),
    transform: Annotated[
        Path | None, typer.Option(help="A YAML list of albumentations steps, such as `- Resize: {height: 400, width: 400}`.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many samples to show.")] = 16,
    epoch: Annotated[int, typer.Option(help="The epoch whose first samples to show.")] = 0,
    seed: Annotated[int, typer.Option(help="The seed of order and draws, as make_loader's.")] = 0,
    split: Annotated[str | None, typer.Option(help="The split of a folder that holds several.")] = None,
) -> None:
    """Draw the first pictures of an epoch, raw beside augmented, with key and class under each."""
    from pipeline.preview import contact_sheet  # noqa: PLC0415  (--help needs no torch)

    if out.suffix.lower() != ".png":
        raise OptionsError(f"--out {out}: the sheet is a PNG; give it a name that ends with .png")
    steps = None if transform is None else _load(transform)
    data = contact_sheet(shards, count=count, transform=steps, seed=seed, epoch=epoch, split=split)
    out.write_bytes(data)
    typer.echo(f"{out}: {len(data)} bytes")


@app.command()
def index(
    tars: Annotated[
        list[str],
        typer.Argument(metavar="URLS...", help="Tars, patterns such as http://nas/t-{00..99}.tar, @FILE or - for lists."),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Write there.")] = Path(),
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Names the manifest, NAME-shardindex.json (default: as the tars' names say)."),
    ] = None,
    connections: Annotated[int, typer.Option(min=1, max=64, help="How many tars to read at once.")] = 4,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave tars that can't be indexed out of the manifest.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace indexes and manifests that say something else.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read tars behind URLs once, and write their indexes and a manifest that make_loader takes; goes on where it was cut off."""
    from pipeline.index import index as read_all  # noqa: PLC0415

    found = read_all(tars, out=out, split=split, connections=connections, skip_bad=skip_bad, force=force, stream=sys.stderr)
    for note in found.notes:
        typer.echo(note, err=True)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        for name, size in found.splits.items():
            typer.echo(f"{name}: {size.shards:,} tars ({size.read:,} read now), {size.samples:,} samples, {size.bytes:,} bytes")
        for line in (*found.manifests.values(), *_shorten(found.problems)):
            typer.echo(line)
    if found.problems:
        raise typer.Exit(1)


_cache = typer.Typer(no_args_is_help=True, help="The folder that remote shards are fetched into.")
app.add_typer(_cache, name="cache")
_Dir = Annotated[Path | None, typer.Option("--dir", help="The folder, where LoaderOptions(cache_dir=...) named another one.")]


@_cache.command()
def info(folder: _Dir = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what the folder holds of each set, the one that was used longest ago first: what goes first."""
    cache = _opened(folder)
    held = cache.sets()
    if as_json:
        typer.echo(json.dumps({"folder": str(cache.folder), "limit": cache.limit, "sets": [asdict(each) for each in held]}))
        return
    typer.echo(f"{cache.folder}: {sum(each.bytes for each in held) / 1e6:,.1f} MB; by default at most {cache.limit / 1e6:,.0f} MB")
    for each in held:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used_ns / 1e9))
        reading, of = ", being read" if each.reading else "", f"{each.where or 'a set'} ({each.set[:16]})"
        typer.echo(f"{each.bytes / 1e6:12,.1f} MB in {each.objects:,} objects of {of}, used last {used}{reading}")


@_cache.command()
def clear(folder: _Dir = None) -> None:
    """Remove all that no living process reads."""
    cache = _opened(folder)
    freed = cache.clear()
    left = sum(each.bytes for each in cache.sets())
    stays = f", {left / 1e6:,.1f} MB are being read and stay" if left else ""
    typer.echo(f"{cache.folder}: {freed / 1e6:,.1f} MB removed{stays}")


def _opened(folder: Path | None) -> Cache:
    """Open a cache folder that is there."""
    from pipeline.stores.cache import Cache, folder_of  # noqa: PLC0415

    place = folder_of(folder)
    if folder is not None and not place.is_dir():
        what = "isn't a folder" if place.exists() else "nothing was fetched into it, or there is no such folder"
        _fail(f"{place}: {what}; name the one that LoaderOptions(cache_dir=...) names by --dir", 3)
    try:
        return Cache(place)
    except SourceError as error:
        _fail(str(error).replace("give LoaderOptions(cache_dir=...)", "name another one by --dir"), 3)


def _load(path: Path) -> Any:
    """Build the transform that a YAML file lists."""
    import yaml  # noqa: PLC0415

    from pipeline.augment import compose  # noqa: PLC0415

    try:
        return compose(yaml.safe_load(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise OptionsError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise OptionsError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OptionsError as error:
        raise OptionsError(f"{path}: {error}") from error


def _shorten(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN_PROBLEMS
    return [*lines[:_SHOWN_PROBLEMS], *([f"... and {more:,} more (--json lists all)"] if more > 0 else [])]


def main() -> None:
    """Run the command line; exit 0 fine, 1 bad shards or samples, 2 usage, 3 I/O or environment, 130 interrupted."""
    try:
        app()
    except OptionsError as error:
        _fail(str(error), 2)
    except RemoteError as error:
        _fail(str(error), 3)
    except PipelineError as error:
        _fail(str(error), 1)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free some room and run it again: what was done isn't done twice" if full else ""
        _fail(f"{error.filename or 'I/O'}: {error.strerror or error}{advice}", 3)
    except ModuleNotFoundError as error:
        _fail(f"{error}; pip install 'shardify[train]' (in a clone: pip install -c constraints.txt -e '.[train]')", 3)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
