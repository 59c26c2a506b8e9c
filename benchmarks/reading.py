"""Measure `make_loader` against its goals on a hard disk: first epochs, bytes a second, what stays in memory.

    python benchmarks/photos.py P --count 9000
    python benchmarks/reading.py epochs P --home D --server PYTHON [--rounds 5] [--count 9000] [--workers 2 8] [--memory]
                                        [--programs ours stock question]
    python benchmarks/reading.py disk P --home D --server PYTHON [--rounds 5] [--count 9000] [--memory]
    python benchmarks/reading.py keep P --home D --server PYTHON [--rounds 5] [--count 9000] [--times 5]
    python benchmarks/reading.py two P --home D --server PYTHON [--rounds 5] [--count 9000]

D becomes a hard disk in software (drive.py; as root; PYTHON is an interpreter that has mfusepy). The photographs lie on it as loose
files and packed, in 18 shards (about 50 MB of 9,000). Every run is a program of its own, from a cold drive, round after round.

epochs  the problem's transform, batches of 64: the first epoch's time over the second's (from the page cache), worker start
        excluded: ours, stock webdataset, and question.py on the loose files. Then the first batch from the warm page cache.
disk    decode="none": the first epoch's bytes a second for 1, 4 and 16 workers and for 4 ranks at once, over those of
        `dd bs=16M` through the same shards; stock webdataset beside it.
keep    keep_bytes = a third of the set: the second epoch's bytes at the drive over the first's. Then a set of pictures repeated
        --times under other keys, in a memory cgroup of two thirds of its size, with the default keep_bytes.
two     decode="none", 4 workers: the first epoch from one drive, and with every other shard on a second one.

--memory: once more in a memory cgroup (version 1, else it is left out) that has room for what the program itself takes, measured
before, and half the set. Quick: --rounds 1 --count 2000. Prints a table of all runs, the goals with what was reached, and the same
as one line of JSON. Needs a quiet machine: the drive's sleeps are real, and its server takes some of the CPU (`drive_cpu`: of all).

Before each run memory is taken and given back (--touch GiB, 0 for none). A virtual machine may hand memory that nobody used lately
back to its host, and get it again page by page: here 2.7 s of CPU a GB, against 0.35 for memory used again. A first epoch takes fresh
memory for its pages, a second one doesn't; that is the machine's matter, and no disk's or loader's.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cgroup import Cgroup, can_limit
from harddisk import Drive, lay_out
from packing import CONFIG
from runs import Results, run

HERE = Path(__file__).resolve().parent
SHARDS = 18
PROGRAMS = ("ours", "stock", "question")
HEADROOM = 64 * 2**20  # a program's own memory isn't the same to the byte each time
TICK = os.sysconf("SC_CLK_TCK")


class Disk(Drive):
    """The drive, with the sets on it."""

    def cpu_seconds(self) -> float:
        """Return what its server took of the CPU so far."""
        pid = json.loads((self.home / "state.json").read_text())["pid"]
        words = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICK

    def pack(self, photos: Path, count: int, times: int = 1) -> Path:
        """Return the folder on the drive with `count` of the photographs, each `times`, in 18 shards a time; packed where it isn't."""
        out = self.mount / f"shards-{count}x{times}"
        if out.exists():
            return out
        with tempfile.TemporaryDirectory(dir=photos.parent) as scratch:
            source = Path(scratch, "photos")
            size = link(photos, source, count, times)
            sets = [f"shards.size={size // (SHARDS * times) + 1}", "splits={train: 1.0}"]
            given = [part for text in sets for part in ("--set", text)]
            partial = self.mount / "shards.partial"
            shutil.rmtree(partial, ignore_errors=True)
            run([sys.executable, "-m", "shardify", "build", CONFIG, "--source", source, "--out", partial, *given], sync=self.mount)
            partial.rename(out)
        return out


def link(photos: Path, to: Path, count: int, times: int) -> int:
    """Link the first `count` photographs of a set into a new one, each `times` under other names; return their bytes."""
    with (photos / "train.csv").open(newline="") as file:
        rows = [(row["id"], row["landmark_id"]) for row in csv.DictReader(file)][:count]
    lines, size = ["id,landmark_id"], 0
    for number in range(times):
        for key, label in rows:
            other = hashlib.md5(f"{key} {number}".encode()).hexdigest()[:16]
            source, target = photos / place(key), to / place(other)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(source)
            size += source.stat().st_size
            lines.append(f"{other},{label}")
    (to / "train.csv").write_text("\n".join(lines) + "\n")
    return size


def place(key: str) -> str:
    """Return a photograph's path in its set."""
    return f"train/{key[0]}/{key[1]}/{key[2]}/{key}.jpg"


def set_bytes(shards: Path) -> int:
    """Return the bytes of a set's shards."""
    return sum(path.stat().st_size for path in shards.glob("*.tar"))


def peer(program: str, shards: Path, disk: Disk, *options: object) -> list[str | Path]:
    """Return the command of one of peers.py's programs."""
    return [sys.executable, HERE / "peers.py", program, shards, "--counters", disk.counters, *map(str, options)]


def measured(command: Sequence[str | Path], disk: Disk, group: Cgroup | None = None) -> tuple[dict[str, Any], float]:
    """Run one of peers.py's programs from a cold drive; return what it says, and the drive's share of all CPUs."""
    disk.cold()
    cpu, began = disk.cpu_seconds(), time.perf_counter()
    found = run(command if group is None else group.within(command)).answer
    share = (disk.cpu_seconds() - cpu) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    return found, share


def limit_of(command: Sequence[str | Path], shards: Path, disk: Disk) -> int:
    """Return the limit of a group in which a program, and half of the set, have room: measures what the program takes itself."""
    disk.cold()
    with Cgroup() as group:
        run(group.within([part for part in command if part != "--wait"]))
    return group.own_peak + HEADROOM + set_bytes(shards) // 2


def add_epochs(what: str, number: int, found: dict[str, Any], share: float, results: Results) -> None:
    """Keep a run of two epochs."""
    first, second = (epoch["seconds"] for epoch in found["epochs"])
    drive = found["epochs"][0]["drive"]
    results.add(
        round=number,
        what=what,
        first=first,
        second=second,
        ratio=first / second,
        first_batch=found["first_batch"],
        requests=drive["requests"],
        seeks=drive["seeks"],
        drive_cpu=share,
        unprefetched=unprefetched(found),
    )


def unprefetched(found: dict[str, Any]) -> int | None:
    """Return how many batches our workers read for themselves."""
    counts = [epoch["stats"]["reading"]["unprefetched"] for epoch in found["epochs"] if epoch["stats"]]
    return sum(counts) if counts else None


def question(photos: Path, workers: int, number: int, disk: Disk, results: Results) -> None:
    """Run the problem's own loader over the loose files."""
    disk.cold()
    cpu, began = disk.cpu_seconds(), time.perf_counter()
    command = [sys.executable, HERE / "question.py", photos, "--workers", workers, "--count", 10**9, "--epochs", 2]
    lines = run([str(part) for part in command]).output.splitlines()
    share = (disk.cpu_seconds() - cpu) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    first, second = (float(line.split()[2]) for line in lines)
    drive = disk.counted()
    results.add(
        round=number,
        what=f"question, {workers} workers",
        first=first,
        second=second,
        ratio=first / second,
        requests=drive["requests"],
        seeks=drive["seeks"],
        drive_cpu=share,
    )


def measure_epochs(options: argparse.Namespace, results: Results) -> None:
    """Compare first epochs with second ones."""
    with Disk(options.home.resolve(), options.server, options.touch * 2**30) as disk:
        shards = disk.pack(options.photos, options.count)
        loose = disk.mount / f"photos-{options.count}"
        if not loose.exists() and "question" in options.programs:
            with tempfile.TemporaryDirectory(dir=options.photos.parent) as scratch:
                link(options.photos, Path(scratch, "photos"), options.count, 1)
                lay_out(Path(scratch, "photos"), loose)
        for workers in options.workers:
            peers = [name for name in ("ours", "stock") if name in options.programs]
            commands = {name: peer(name, shards, disk, "--workers", workers) for name in peers}
            for number in range(options.rounds):
                for name, command in commands.items():
                    found, share = measured(command, disk)
                    add_epochs(f"{name}, {workers} workers", number, found, share, results)
                    warm_start(name, workers, number, shards, disk, results)
                if "question" in options.programs:
                    question(loose, workers, number, disk, results)
            expect_epochs(workers, options, results)
            if options.memory and can_limit():
                within_memory(commands, workers, shards, disk, options, results)


def warm_start(name: str, workers: int, number: int, shards: Path, disk: Disk, results: Results) -> None:
    """Measure how soon the first batch comes where the page cache holds the set."""
    for shard in shards.glob("*.tar"):
        shard.read_bytes()
    found = run(peer(name, shards, disk, "--workers", workers, "--epochs", 1, "--batches", 1)).answer
    results.add(round=number, what=f"{name}, {workers} workers, warm", first_batch=found["first_batch"])


def expect_epochs(workers: int, options: argparse.Namespace, results: Results) -> None:
    """Compare with the goals."""
    mine, stocks, asked = (f"{name}, {workers} workers" for name in ("ours", "stock", "question"))
    ratio = results.median(mine, "ratio")
    results.expect(f"{mine}: first epoch / second", ratio, at_most=1.06)
    if "stock" in options.programs:
        results.expect(f"{mine}: first / second, over stock webdataset's", ratio / results.median(stocks, "ratio"), at_most=1.0)
    if "question" in options.programs:
        speedup = results.median(asked, "first") / results.median(mine, "first")
        results.expect(f"{mine}: the question's first epoch / ours ({options.count} pictures)", speedup, at_least=4)
    late = results.median(mine, "first_batch") - results.median(f"{mine}, warm", "first_batch")
    results.expect(f"{mine}: first batch, seconds later than warm", late, at_most=1.0)


def within_memory(
    commands: dict[str, list[str | Path]], workers: int, shards: Path, disk: Disk, options: argparse.Namespace, results: Results
) -> None:
    """Measure epochs once more where only half of the set fits beside the program."""
    limits = {name: limit_of(command, shards, disk) for name, command in commands.items()}
    for number in range(options.rounds):
        for name, command in commands.items():
            what = f"{name}, {workers} workers, half in memory"
            with Cgroup(limits[name]) as group:
                try:
                    found, share = measured(command, disk, group)
                except SystemExit as error:
                    if name == "ours":
                        raise
                    results.add(round=number, what=what, died=str(error).splitlines()[-1])  # it took more than the time before
                    continue
            add_epochs(what, number, found, share, results)
    mine, stocks = (f"{name}, {workers} workers, half in memory" for name in ("ours", "stock"))
    ratio = results.median(mine, "ratio")
    results.expect(f"{mine}: first epoch / second", ratio, at_most=1.06)
    if any(row["what"] == stocks and "ratio" in row for row in results.rows):
        results.expect(f"{mine}: first / second, over stock webdataset's", ratio / results.median(stocks, "ratio"), at_most=1.0)
    warm = results.median(f"ours, {workers} workers", "second")
    results.expect(f"{mine}: second epoch / second with all in memory", results.median(mine, "second") / warm)


def dd(shards: Path, disk: Disk, number: int, results: Results) -> None:
    """Measure the drive's own speed through the shards."""
    disk.cold()
    began = time.perf_counter()
    for shard in sorted(shards.glob("*.tar")):
        subprocess.run(["dd", f"if={shard}", "of=/dev/null", "bs=16M", "status=none"], check=True)
    seconds = time.perf_counter() - began
    drive = disk.counted()
    results.add(
        round=number,
        what="dd",
        seconds=seconds,
        mb_s=set_bytes(shards) / seconds / 1e6,
        seeks=drive["seeks"],
        requests=drive["requests"],
        read_mb=drive["bytes"] / 1e6,
    )


def read_once(
    what: str, number: int, commands: Sequence[list[str | Path]], shards: Path, disk: Disk, results: Results, group: Cgroup | None
) -> None:
    """Let programs read one epoch at once, from a cold drive; seconds are from the first's start to the last's end."""
    disk.cold()
    programs = [
        subprocess.Popen(
            [str(part) for part in (command if group is None else group.within(command))],
            env=os.environ | ({"RANK": str(rank), "WORLD_SIZE": str(len(commands))} if len(commands) > 1 else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    for program in programs:
        program.stdout.readline()  # type: ignore[union-attr]
    outputs = []
    for program in programs:
        program.stdin.write("\n")  # type: ignore[union-attr]
        program.stdin.flush()  # type: ignore[union-attr]
    for program in programs:
        outputs.append(program.communicate()[0])
        if program.returncode:
            sys.exit(f"{what}: exit code {program.returncode}")
    found = [json.loads(output)["epochs"][0] for output in outputs]
    seconds = max(e["ended"] for e in found) - min(e["ended"] - e["seconds"] for e in found)
    drive = disk.counted()
    results.add(
        round=number,
        what=what,
        seconds=seconds,
        mb_s=set_bytes(shards) / seconds / 1e6,
        seeks=drive["seeks"],
        requests=drive["requests"],
        read_mb=drive["bytes"] / 1e6,
        unprefetched=sum(e["stats"]["reading"]["unprefetched"] for e in found) if found[0]["stats"] else None,
        samples=sum(e["samples"] for e in found),
    )


def measure_disk(options: argparse.Namespace, results: Results) -> None:
    """Compare bytes a second with dd's."""
    with Disk(options.home.resolve(), options.server, options.touch * 2**30) as disk:
        shards = disk.pack(options.photos, options.count)
        programs: dict[str, list[list[str | Path]]] = {}
        for name in ("ours", "stock"):
            for workers in (1, 4, 16):
                programs[f"{name}, {workers} workers"] = [once(name, workers, shards, disk)]
        programs["ours, 4 ranks"] = [once("ours", 1, shards, disk)] * 4
        for number in range(options.rounds):
            dd(shards, disk, number, results)
            for what, commands in programs.items():
                read_once(what, number, commands, shards, disk, results, None)
        expect_disk([what for what in programs if what.startswith("ours")], results)
        if options.memory and can_limit():
            limited = {what: limit_of(commands[0], shards, disk) for what, commands in programs.items() if len(commands) == 1}
            for number in range(options.rounds):
                for what, limit in limited.items():
                    with Cgroup(limit) as group:
                        read_once(f"{what}, half in memory", number, programs[what], shards, disk, results, group)
            expect_disk([f"{what}, half in memory" for what in limited if what.startswith("ours")], results)


def once(name: str, workers: int, shards: Path, disk: Disk) -> list[str | Path]:
    """Return the command that reads the files' bytes in one epoch."""
    return peer(name, shards, disk, "--workers", workers, "--epochs", 1, "--decode", "none", "--wait")


def expect_disk(names: Sequence[str], results: Results) -> None:
    """Compare with the goal."""
    for what in names:
        results.expect(f"{what}: bytes a second / dd's", results.median(what, "mb_s") / results.median("dd", "mb_s"), at_least=0.95)


def measure_keep(options: argparse.Namespace, results: Results) -> None:
    """Look at what the second epoch reads."""
    with Disk(options.home.resolve(), options.server, options.touch * 2**30) as disk:
        shards = disk.pack(options.photos, options.count)
        third = set_bytes(shards) // 3
        command = peer("ours", shards, disk, "--decode", "none", "--keep-bytes", third)
        for number in range(options.rounds):
            add_kept("keep_bytes a third", number, measured(command, disk)[0], results)
        ratio = results.median("keep_bytes a third", "again")
        results.expect("keep_bytes a third: second epoch's bytes at the drive / first's", ratio, at_most=0.72)
        if not can_limit():
            return
        many = disk.pack(options.photos, options.count, options.times)
        command, what = peer("ours", many, disk, "--decode", "none"), f"{options.times} times the set"
        for number in range(options.rounds):
            with Cgroup(set_bytes(many) * 2 // 3) as group:
                add_kept(what, number, measured(command, disk, group)[0], results)
        rows = [row for row in results.rows if row["what"] == what]
        results.expect(f"{what}: batches read by workers", max(row["unprefetched"] for row in rows), at_most=0)
        excess = results.median(what, "again") / (1 - results.median(what, "kept_share"))
        results.expect(f"{what}: second epoch's bytes / first's, over 1 - the kept share", excess, at_most=1.08)


def measure_two(options: argparse.Namespace, results: Results) -> None:
    """Compare one drive with two that share the set."""
    home, touch = options.home.resolve(), options.touch * 2**30
    with Disk(home, options.server, touch) as disk, Disk(home.with_name(f"{home.name}-2"), options.server, 0) as second:
        shards, half, spread = disk.pack(options.photos, options.count), second.mount / "half", disk.mount / "spread"
        for folder in (half, spread):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        for path in sorted(shards.iterdir()):
            source = path
            if path.suffix in (".tar", ".idx") and int(path.stem.rpartition("-")[2]) % 2:
                source = Path(shutil.copyfile(path, half / path.name))
            (spread / path.name).symlink_to(source)
        os.sync()
        for number in range(options.rounds):
            dd(shards, disk, number, results)
            for what, folder in (("one drive", shards), ("two drives", spread)):
                second.cold()
                read_once(what, number, [once("ours", 4, folder, disk)], folder, disk, results, None)
                results.rows[-1]["read_mb_2"] = second.counted()["bytes"] / 1e6
    results.expect("two drives: bytes a second / one's", results.median("two drives", "mb_s") / results.median("one drive", "mb_s"))


def add_kept(what: str, number: int, found: dict[str, Any], results: Results) -> None:
    """Keep a run, by its bytes at the drive."""
    first, second = (epoch["drive"]["bytes"] for epoch in found["epochs"])
    seconds = {f"epoch_{n}": epoch["seconds"] for n, epoch in enumerate(found["epochs"])}
    results.add(
        round=number,
        what=what,
        first_mb=first / 1e6,
        second_mb=second / 1e6,
        again=second / first,
        kept_share=found["epochs"][1]["stats"]["reading"]["kept_share"],
        unprefetched=unprefetched(found),
        **seconds,
    )


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    programs: dict[str, Callable[[Any, Results], None]] = {
        "epochs": measure_epochs,
        "disk": measure_disk,
        "keep": measure_keep,
        "two": measure_two,
    }
    for verb in programs:
        sub = verbs.add_parser(verb)
        sub.add_argument("photos", type=Path)
        sub.add_argument("--home", type=Path, required=True, help="where the disk's image lies")
        sub.add_argument("--server", default=sys.executable, help="an interpreter that has mfusepy")
        sub.add_argument("--rounds", type=int, default=5)
        sub.add_argument("--count", type=int, default=9000, help="photographs")
        sub.add_argument("--touch", type=float, default=6, help="GiB of memory that are taken and given back before each run")
        if verb == "epochs":
            sub.add_argument("--workers", type=int, nargs="+", default=[2, 8])
            sub.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
        if verb in ("epochs", "disk"):
            sub.add_argument("--memory", action="store_true")
        if verb == "keep":
            sub.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    options.photos = options.photos.resolve()
    results = Results(options.verb)
    programs[options.verb](options, results)
    results.show()


if __name__ == "__main__":
    main()
