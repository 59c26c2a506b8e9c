"""What an examination found, as nouns, and in words for people or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from shardify.doctor.forecast import Epoch
from shardify.doctor.gauge import Reads, Stream
from shardify.doctor.medium import Medium

EPOCHS = {  # name -> in words
    "files": "first, as files: a plain loader",
    "shards": "first, as shards: make_loader",
    "files_warm": "from memory, as files: a plain loader",
    "shards_warm": "from memory, as shards: make_loader",
}
_SOURCES = {"shards": "reading shards forward", "disk": "reading the disk itself", "files": "reading files in the disk's order"}


@dataclass(frozen=True, slots=True)
class Holding:
    """What lies there: kind ("files", "shards", "nothing"); pictures, and their bytes (of shards: the tars').

    `folders` hold pictures, `shards` are tars; `exact`, or estimated from a part.
    """

    kind: str
    pictures: int = 0
    bytes: int = 0
    folders: int = 0
    shards: int = 0
    exact: bool = True

    @property
    def mean_bytes(self) -> int:
        """The bytes of a picture (of shards: of a sample, headers and all)."""
        return max(1, self.bytes // max(1, self.pictures))


@dataclass(frozen=True, slots=True)
class Disk:
    """How it is read; what couldn't be measured is () or None.

    data     random reads by depth, the data alone cold (names and inodes were in memory)
    cold     the same with names and inodes cold too
    samples  a picture's bytes in one request, as many at once as there are workers
    stream   reading forward
    """

    data: tuple[Reads, ...] = ()
    cold: tuple[Reads, ...] = ()
    samples: Reads | None = None
    stream: Stream | None = None


@dataclass(frozen=True, slots=True)
class Cpu:
    """What a picture costs in seconds of a CPU: decoding, measured; the transform with its delivery, stated or assumed."""

    cpus: int
    decode_seconds: float
    transform_seconds: float
    transform_stated: bool

    @property
    def seconds(self) -> float:
        """What a picture costs through make_loader."""
        return self.decode_seconds + self.transform_seconds


@dataclass(slots=True)
class Report:
    """All that was found; `cached` is a share, `epochs` are by name (EPOCHS), `problems` are what is wrong, a line each."""

    path: str
    workers: int
    medium: Medium
    holding: Holding = Holding("nothing")
    cached: float | None = None
    disk: Disk = field(default_factory=Disk)
    cpu: Cpu | None = None
    epochs: dict[str, Epoch] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return all of it but the problems, ready for JSON; rates are a second, sizes bytes, times seconds, shares 0 to 1."""
        disk, cpu = self.disk, self.cpu
        return {
            "path": self.path,
            "workers": self.workers,
            "holds": asdict(self.holding) | {"mean_bytes": self.holding.mean_bytes},
            "medium": asdict(self.medium) | {"kind": self.medium.kind},
            "cached": self.cached,
            "random_reads": [_facts(reads) for reads in disk.data],
            "random_reads_names_cold": [_facts(reads) for reads in disk.cold],
            "sample_reads": _facts(disk.samples) if disk.samples else None,
            "sequential": asdict(disk.stream) if disk.stream else None,
            "cpu": asdict(cpu) | {"seconds": cpu.seconds} if cpu else None,
            "epochs": {name: asdict(epoch) for name, epoch in self.epochs.items()},
            "notes": self.notes,
        }

    def lines(self) -> list[tuple[str, str]]:
        """Return it as (what, in words)."""
        about = "" if self.holding.exact else "about "
        lines = [(self.path, ""), ("holds", about + _holds(self.holding)), ("lies on", _lies_on(self.medium))]
        if self.disk.data:
            lines.append(("in memory now", "unknown (other users' files)" if self.cached is None else f"{self.cached:.0%} of it"))
            state = "all in memory" if self.medium.is_memory else "data cold, names and inodes in memory"
            lines.append(("random reads", f"{_rates(self.disk.data)}: {state}"))
        if self.disk.cold:
            lines.append(("", f"{_rates(self.disk.cold)}: all cold"))
        if stream := self.disk.stream:
            lines.append(("sequential", f"{stream.bytes_per_second / 1e6:,.0f} MB/s, {_SOURCES[stream.source]}"))
        if cpu := self.cpu:
            whence = "as stated" if cpu.transform_stated else "assumed: what Resize 400, Rotate and Normalize take on this CPU"
            decoding = f"{cpu.decode_seconds * 1e3:.1f} ms a picture to decode (measured)"
            lines.append(("CPU", f"{decoding}, {cpu.transform_seconds * 1e3:.1f} to transform and deliver ({whence})"))
            lines.append(("", f"{cpu.cpus} CPUs, {self.workers} workers"))
        if self.epochs:
            lines.append(("", ""))
        for name, epoch in self.epochs.items():
            speed = f"{epoch.per_second:,.0f} pictures/s, limited by the {epoch.limit}"
            lines.append((EPOCHS[name], f"{duration(epoch.seconds)} ({speed})"))
        return lines


def _facts(reads: Reads) -> dict[str, Any]:
    return {"depth": reads.depth, "per_second": reads.per_second, "mean_bytes": reads.mean_bytes, "reads": len(reads.seconds)}


def _holds(holding: Holding) -> str:
    if holding.kind == "nothing":
        return "nothing that can be measured"
    where = f"{holding.folders:,} folders" if holding.kind == "files" else f"{holding.shards:,} shards"
    return f"{holding.pictures:,} pictures in {where}, {holding.bytes / 1e9:,.2f} GB, {holding.mean_bytes / 1e3:,.0f} kB each"


def _lies_on(medium: Medium) -> str:
    disk = f", disk {medium.disk}" if medium.disk else ""
    return f"{medium.kind}: {medium.filesystem or 'unknown'} of {medium.source or 'unknown'} at {medium.mount or 'unknown'}{disk}"


def _rates(reads: tuple[Reads, ...]) -> str:
    return ", ".join(f"{one.per_second:,.0f}/s at depth {one.depth}" for one in reads)


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    first = next(i for i, (size, _) in enumerate(units) if whole >= size)
    return " ".join(
        f"{whole % (units[i - 1][0] if i else whole + 1) // size} {unit}"
        for i, (size, unit) in enumerate(units)
        if first <= i <= first + 1
    )
