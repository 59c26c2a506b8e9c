"""Runs an examination: what is there -> how fast it is read, cold -> what the CPU takes -> what an epoch takes."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from shardify import machine
from shardify.doctor import contents, decoding, forecast, gauge, medium
from shardify.doctor.forecast import Curve, Epoch, Machine
from shardify.doctor.gauge import Reads, Span, Stream
from shardify.doctor.report import Cpu, Disk, Holding, Report
from shardify.errors import SettingsError, naming
from shardify.items import Progress

SECONDS = 30.0
DEEP = 16
_MOST = 2048  # pieces that a measurement reads at most, and workers that it reads like
_LOOKED_AT = 64  # pictures that are decoded, over and over; files whose pages are counted
_WINDOW = 32 * 2**20  # bytes that a sequential reader reads in one turn
_PLACES = 8  # turns of it


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured for.

    workers            processes that load (0: the trainer's own); None: as many as CPUs
    seconds            about how long it may take
    drop_caches        whether the whole machine's cache is emptied, so that names and inodes are cold too
    transform_seconds  what a picture's transform and delivery take of a CPU; None: what the problem's take
    """

    workers: int | None = None
    seconds: float = SECONDS
    drop_caches: bool = False
    transform_seconds: float | None = None


def examine(path: Path, settings: Settings, progress: Progress, rng: random.Random | None = None) -> Report:
    """Measure `path` (a folder, a tar, a manifest or a picture) and forecast its epochs.

    Raises SettingsError where nothing is there and where caches may not be dropped, StorageError where it can't be looked into,
    FormatError for a manifest that is none.
    """
    with naming(path):
        if not path.exists():
            raise SettingsError(f"{path}: no such file or folder; point at a folder of pictures or shards")
        if settings.drop_caches:
            gauge.drop_caches()  # it fails now rather than after the listing
        return _Examination(path, settings, progress, rng or random.Random()).run()


class _Examination:
    """One run: how much time each part may take, and what can't be read."""

    def __init__(self, path: Path, settings: Settings, progress: Progress, rng: random.Random) -> None:
        self._path, self._settings, self._progress, self._rng = path, settings, progress, rng
        self._troubles: contents.Troubles = []
        self._notes: list[str] = []
        self._medium = medium.find(path)
        cpus = machine.cpus()
        self._machine = Machine(cpus if settings.workers is None else settings.workers, cpus, 0.0)
        self._workers = min(max(1, self._machine.workers), _MOST // 8)
        self._depths = sorted({1, self._workers, DEEP})
        parts = len(self._depths) * (2 if settings.drop_caches else 1) + 4  # evict, forward, samples, decode
        self._part = settings.seconds * 5 / 6 / parts

    def run(self) -> Report:
        """Measure all that can be measured here."""
        report = Report(str(self._path), self._machine.workers, self._medium, problems=decoding.opencv_problems())
        report.holding, paths = self._look()
        report.cached = medium.cached_share(paths[:_LOOKED_AT])
        report.holding, spans = self._pieces(report.holding, paths)
        if spans:
            report.disk = self._read(report.holding, spans)
            report.cpu = self._decode(report.holding, spans)
            report.epochs = self._foretell(report)
        report.problems += self._problems(report, bool(spans))
        report.notes += self._notes + _remarks(report)
        return report

    def _look(self) -> tuple[Holding, list[str]]:
        """Return what is there, and random paths of it: tars where there are any, else pictures."""
        from shardify.sources.walk import EXTENSIONS  # noqa: PLC0415  (brings pandas: `--help` stays fast)

        self._progress.begin("looking around", 0)
        listing = contents.look(self._path, EXTENSIONS, self._settings.seconds / 6, self._rng)
        self._troubles += listing.troubles
        if listing.tars.count:
            found = contents.shards(self._path, listing.tars, self._rng, self._troubles)
            kind = "shards" if found.bytes else "nothing"
            exact = found.exact and listing.exact
            if listing.pictures.count:
                self._notes.append(f"{listing.pictures.count:,.0f} pictures that lie beside the shards were left out")
            return Holding(kind, found.samples, found.bytes, 0, found.count, exact), list(found.sizes)
        pictures = listing.pictures
        holding = Holding("files", round(pictures.count), 0, round(pictures.folders), exact=listing.exact)
        return (holding if pictures.count else Holding("nothing", exact=listing.exact)), pictures.draw(_MOST, self._rng)

    def _pieces(self, holding: Holding, paths: Sequence[str]) -> tuple[Holding, list[Span]]:
        """Return random pieces to read, out of the page cache: pictures, or of tars as many bytes as a sample has."""
        whole = gauge.evict(paths, self._part, self._troubles)
        some = [span.path for span in whole[:_LOOKED_AT]]
        if not self._medium.is_memory and medium.cached_share(some):
            gauge.write_back()
            gauge.evict_again(whole)
            if left := medium.cached_share(some):
                self._notes.append(
                    f"{left:.0%} of what is read here stays in memory (programs use it): the disk is slower than that"
                )
        if holding.kind == "shards":
            return holding, _cut(whole, holding.mean_bytes, self._rng)
        mean = sum(span.size for span in whole) // max(1, len(whole))
        return replace(holding, bytes=mean * holding.pictures), whole

    def _read(self, holding: Holding, spans: Sequence[Span]) -> Disk:
        stream, packed = self._forward(holding, spans)
        data, cold = list[Reads](), list[Reads]()
        for depth in (depth for depth in self._depths if depth <= len(spans)):
            self._progress.begin(f"reading at random, {depth} at once", 0)
            if self._settings.drop_caches:
                gauge.drop_caches()
                if found := gauge.read_random(spans, depth, self._part):
                    cold.append(found)
                    spans = spans[: max(DEEP, len(found.seconds))]  # the names and inodes of these are in memory now
            gauge.evict_again(spans)
            if found := gauge.read_random(spans, depth, self._part):
                data.append(found)
        pieces = _cut(packed, holding.mean_bytes, self._rng) or spans
        gauge.evict_again(pieces)
        samples = gauge.read_random(pieces, self._workers, self._part, whole=True)
        return Disk(tuple(data), tuple(cold), samples, stream)

    def _forward(self, holding: Holding, spans: Sequence[Span]) -> tuple[Stream | None, list[Span]]:
        """Read forward; returns also where shards lie: the tars, for files a part of the disk, nothing where that is closed."""
        self._progress.begin("reading forward", 0)
        if holding.kind == "shards":
            packed = [Span(path, 0, Path(path).stat().st_size) for path in dict.fromkeys(span.path for span in spans)]
        else:
            packed = [found] if (found := gauge.on_disk(spans[:_LOOKED_AT], holding.bytes)) else []
        windows = _cut(packed, _WINDOW, self._rng)[:_PLACES] or gauge.in_disk_order(spans)
        gauge.evict_again(windows)
        source = "shards" if holding.kind == "shards" else "disk" if packed else "files"
        return gauge.read_forward(windows, self._part, source), packed

    def _decode(self, holding: Holding, spans: Sequence[Span]) -> Cpu | None:
        """Return what a picture costs here with as many threads as will work at once; None where nothing decodes."""
        self._progress.begin("decoding", 0)
        pictures = [data for data in self._pictures(holding, spans) if decoding.megapixels(data)]
        cpus = self._machine.cpus
        decode = decoding.decode_seconds(pictures, min(self._workers, cpus), self._part / 2)
        if decode is None:
            return None
        stated = self._settings.transform_seconds
        each = decode * len(pictures) / sum(map(decoding.megapixels, pictures))
        transform = each * forecast.TRANSFORM_MEGAPIXELS if stated is None else stated
        return Cpu(cpus, decode, transform, stated is not None)

    def _pictures(self, holding: Holding, spans: Sequence[Span]) -> Iterator[bytes]:
        if holding.kind == "shards":
            paths = list(dict.fromkeys(span.path for span in spans))[:2]
            spans = [
                Span(path, member.offset, member.size)
                for path in paths
                for record in contents.first_samples(path, self._troubles)
                for member in [max(record.members, key=lambda m: m.size)]  # the picture, wherever in the sample it stands
            ]
        return gauge.read_each(spans[:_LOOKED_AT])

    def _foretell(self, report: Report) -> dict[str, Epoch]:
        """Return the epochs by name, as far as the measurements reach."""
        disk, cpu, holding = report.disk, report.cpu, report.holding
        if cpu is None or not disk.data or not holding.pictures:
            return {}
        ours = replace(self._machine, cpu_seconds=cpu.seconds)
        plain = replace(self._machine, cpu_seconds=cpu.seconds * forecast.PLAIN_COST)
        data = Curve(tuple((reads.depth, reads.per_second) for reads in disk.data))
        alone, names = disk.data[0].per_second, 0.0
        asked = {1: alone} | ({disk.samples.depth: disk.samples.per_second} if disk.samples else {})
        requests = Curve(tuple(asked.items()))
        if disk.cold and holding.kind == "files":
            names = forecast.name_seconds(disk.cold[0].seconds, 1 / alone, holding.pictures, holding.folders)
        files = forecast.cold_files(data, requests, names / holding.pictures, self._workers)
        epochs = {
            "files": forecast.read_one_by_one(holding.pictures, files, plain),
            "shards": forecast.read_one_by_one(holding.pictures, requests, ours),
        }
        if disk.stream:  # a prefetcher reads them forward, whatever the workers ask for
            ahead = disk.stream.bytes_per_second / holding.mean_bytes
            epochs["shards"] = forecast.read_ahead(holding.pictures, ahead, ours)
        warm = {"files_warm": forecast.warm(holding.pictures, plain), "shards_warm": forecast.warm(holding.pictures, ours)}
        return epochs | warm

    def _problems(self, report: Report, readable: bool) -> list[str]:
        """Return what is wrong: nothing to measure, nothing that decodes, and each cause of trouble with its first file."""
        problems: list[str] = []
        if report.holding.kind == "nothing":
            problems.append(f"{self._path}: no picture and no tar that can be read is here; nothing could be measured")
        elif not readable:
            problems.append(f"{self._path}: nothing that was tried could be read")
        elif not report.holding.pictures:
            problems.append(f"{self._path}: no sample was found in the tars that were looked into")
        elif report.cpu is None:
            problems.append(f"{self._path}: none of the pictures that were tried decodes; no epoch can be foretold")
        causes: dict[str, list[str]] = {}
        for path, cause in self._troubles:
            causes.setdefault(cause, []).append(path)
        for cause, paths in causes.items():
            problems.append(f"{paths[0]}: {cause}" + (f" (and {len(paths) - 1:,} more like it)" if len(paths) > 1 else ""))
        return problems


def _cut(spans: Sequence[Span], size: int, rng: random.Random) -> list[Span]:
    """Return random pieces of `size` bytes of files, none twice, each file's share by its bytes."""
    firsts = [0, *accumulate(max(1, span.size // size) for span in spans)]
    pieces = list[Span]()
    for place in rng.sample(range(firsts[-1]), min(_MOST, firsts[-1])):
        number = bisect_right(firsts, place) - 1
        span = spans[number]
        pieces.append(Span(span.path, span.offset + (place - firsts[number]) * size, min(size, span.size)))
    return pieces


def _remarks(report: Report) -> list[str]:
    """Return what the reader of the figures must know."""
    if not report.disk.data:
        return []
    lies_on, holding, stream = report.medium, report.holding, report.disk.stream
    room, cpus = machine.available_memory(), machine.cpus()
    files = holding.kind == "files"
    found = {
        "names and inodes were in memory while files were read: a first epoch as files takes longer after a restart or where "
        "memory is short; --drop-caches (as root) measures that too": files and not report.disk.cold and not lies_on.is_memory,
        "as files is a lower bound: there are no names and inodes here that would have to be found": not files,
        "the disk may read forward faster than that: loose files don't show it (as root the disk itself is read)": stream
        is not None
        and stream.source == "files"
        and not lies_on.is_memory,
        "files lie in memory here: nothing is cold": lies_on.is_memory,
        "a server or another process may hold files in a memory of its own, which can't be emptied from here: a first epoch may "
        "take longer": lies_on.has_own_cache,
        f"the set ({holding.bytes / 1e9:,.1f} GB) doesn't fit the memory available ({room / 1e9:,.1f} GB): every epoch takes as "
        "long as the first": holding.bytes > room and not lies_on.is_memory,
        "counts are estimates: not all folders were listed, or no manifest says what the shards hold": not holding.exact,
        f"{report.workers} workers on {cpus} CPUs wait for the disk side by side, but compute in turn": report.workers > cpus,
    }
    return [text for text, applies in found.items() if applies]
