"""Measure `shardify build` against its goals: on a hard disk, on this machine's disk, in memory, and while it re-encodes.

    python benchmarks/photos.py P --count 9000
    python benchmarks/packing.py drive P --home D --server PYTHON [--rounds 3]
    python benchmarks/packing.py disk P [--rounds 5] [--profile]
    python benchmarks/packing.py memory P
    python benchmarks/packing.py encode P [--rounds 3]

drive   D becomes a hard disk in software (drive.py; as root; PYTHON is an interpreter that has mfusepy). Source and output lie on
        it, each run starts cold and ends when its bytes are on the disk: the naive writer, ours within 200 MB, `cp -r`, ours
        with its default memory, round after round.
disk    page cache warm, nothing re-encoded: ours against `tar -cf` of the same list, both with `sync`. --profile says where ours
        spends its time (needs `pip install py-spy`).
memory  peak PSS of all processes, with 9,000 photographs and with 200,000 small files; what a row costs (rows.py: 10 million of
        them, without files).
encode  `resize: {short_side: 448}` with one process and with two; bytes on the disk before and after.

Prints a table of all runs, the goals with what was reached, and the same as one line of JSON. Quiet machines give quiet numbers:
runs alternate, and ratios are of medians.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harddisk import Drive, lay_out
from runs import Results, Run, run

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "configs" / "glr2020.yaml"
BUDGET = 200_000_000
BESIDES = 350_000_000  # what a build may take beside its budget
SMALL_FILES = 200_000


def build(source: Path, out: Path, *sets: str) -> list[str | Path]:
    """Return the command that packs `source` into `out`."""
    given = [part for text in sets for part in ("--set", text)]
    return [sys.executable, "-m", "shardify", "build", CONFIG, "--source", source, "--out", out, "--json", *given]


def stages(answer: Run) -> dict[str, float]:
    """Return how long each stage of a build took, in seconds."""
    found: dict[str, float] = answer.answer.get("seconds", {})
    return found


def stored(folder: Path) -> int:
    """Return the bytes that a folder's files take on their disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def count_rows(photos: Path) -> int:
    """Return how many pictures a set's table names."""
    with (photos / "train.csv").open(newline="") as file:
        return sum(1 for _ in csv.DictReader(file))


def measure_drive(options: argparse.Namespace, results: Results) -> None:
    """Compare with the naive writer and with `cp -r`, all on one hard disk."""
    with Drive(options.home.resolve(), options.server) as disk:
        source, out = disk.mount / "photos", disk.mount / "out"
        lay_out(options.photos, source)
        limited, free = f"ours, {BUDGET // 10**6} MB", "ours, default memory"
        programs: dict[str, list[str | Path]] = {
            "naive": [sys.executable, HERE / "naive.py", source, out],
            limited: build(source, out, f"memory={BUDGET}"),
            "cp -r": ["cp", "-r", source, out],
            free: build(source, out),
        }
        for number in range(options.rounds):
            for what, command in programs.items():
                shutil.rmtree(out, ignore_errors=True)
                disk.cold()
                done = run(command, sync=disk.mount)
                seconds = done.answer["seconds"] if what == "naive" else done.seconds  # the naive writer's import isn't its fault
                results.add(round=number, what=what, seconds=seconds, **disk.counted(), stages=_stages_of(what, done))
        shutil.rmtree(out)
    ours, naive, copied = (results.median(what, "seconds") for what in (limited, "naive", "cp -r"))
    results.expect(f"{limited}: time / naive writer's", ours / naive, at_most=0.45)
    seeks = results.median(limited, "seeks") / results.median("naive", "seeks")
    results.expect(f"{limited}: read seeks / naive writer's", seeks, at_most=1 / 3)
    results.expect(f"{free}: time / cp -r", results.median(free, "seconds") / copied, at_most=1.5)


def _stages_of(what: str, done: Run) -> dict[str, float] | None:
    return stages(done) if what.startswith("ours") else None


def measure_disk(options: argparse.Namespace, results: Results) -> None:
    """Compare with `tar -cf` where the page cache holds the source."""
    with _scratch(options.work) as work:
        names = work / "list"
        files = sorted(str(path.relative_to(options.photos)) for path in options.photos.glob("train/**/*.jpg"))
        names.write_text("\n".join(files) + "\n")
        programs: dict[str, Callable[[], list[str | Path]]] = {
            "tar": lambda: ["tar", "-C", options.photos, "-cf", work / "out" / "all.tar", "-T", names],
            "ours": lambda: build(options.photos, work / "out" / "set"),
            f"ours, {BUDGET // 10**6} MB": lambda: build(options.photos, work / "out" / "set", f"memory={BUDGET}"),
        }
        for number in range(-1, options.rounds):  # the first round warms the page cache
            for what, command in programs.items():
                shutil.rmtree(work / "out", ignore_errors=True)
                (work / "out").mkdir()
                subprocess.run(["sync", "-f", work], check=True)
                done = run(command(), sync=work)
                if number >= 0:
                    results.add(round=number, what=what, seconds=done.seconds, stages=_stages_of(what, done))
        tarred = results.median("tar", "seconds")
        results.expect("ours: time / tar and sync", results.median("ours", "seconds") / tarred, at_most=2.5)
        if options.profile:
            shutil.rmtree(work / "out")
            profile(build(options.photos, work / "out"), work / "profile")


def profile(command: list[str | Path], to: Path) -> None:
    """Run a build under py-spy; print which of our functions the time goes to, alone and with what they call (waiting counts)."""
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if spy is None:
        sys.exit("--profile needs py-spy: pip install py-spy")
    options = ["--rate", "200", "--format", "raw", "--idle", "--nonblocking", "--subprocesses", "--output", str(to)]
    run([spy, "record", *options, "--", *command])
    alone: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for line in to.read_text().splitlines():
        frames, _, count = line.rpartition(" ")
        stack = [frame.rpartition(":")[0] + ")" for frame in frames.split(";") if "(shardify/" in frame] or ["(starting)"]
        alone[stack[-1]] += int(count)
        for frame in set(stack):
            within[frame] += int(count)
    total = alone.total()
    for title, counter in (("alone, with what it calls of others", alone), ("with all that it calls", within)):
        print(f"\nshare of the time, {title}:")
        for frame, samples in counter.most_common(20):
            print(f"{samples / total:7.1%}  {frame}")


def measure_memory(options: argparse.Namespace, results: Results) -> None:
    """Look at the peak memory of builds of few large files, many small ones, and few small ones."""
    with _scratch(options.work) as work:
        sets = {f"{count_rows(options.photos):,} photographs": options.photos}
        for count in (SMALL_FILES, SMALL_FILES // 100):
            sets[f"{count:,} small files"] = work / str(count)
            run([sys.executable, HERE / "tiny.py", work / str(count), "--count", str(count)])
        photographs, many, few = sets
        for name, memory in ((photographs, BUDGET), (many, BUDGET), (many, 4_000_000), (few, 4_000_000)):
            done = run(build(sets[name], work / "out", f"memory={memory}"), watch=True)
            results.add(what=name, memory=memory, peak=done.peak, seconds=done.seconds)
            shutil.rmtree(work / "out")
    for row in results.rows[:2]:
        results.expect(f"{row['what']}: peak MB within {BUDGET / 1e6:.0f} MB", row["peak"] / 1e6, at_most=(BUDGET + BESIDES) / 1e6)
    rows = SMALL_FILES - SMALL_FILES // 100
    results.expect("bytes a row", (results.rows[2]["peak"] - results.rows[3]["peak"]) / rows)


def measure_encode(options: argparse.Namespace, results: Results) -> None:
    """Compare one process with two where pictures are made smaller."""
    pictures, before = count_rows(options.photos), stored(options.photos)
    with _scratch(options.work) as work:
        for number in range(options.rounds):
            for workers in (1, 2):
                sets = ("encode.resize={short_side: 448}", f"encode.workers={workers}")
                done = run(build(options.photos, work / "out", *sets), sync=work)
                rate = pictures / done.seconds
                sizes = {"bytes_before": before, "bytes_after": stored(work / "out")}
                what = f"{workers} process{'es' if workers > 1 else ''}"
                results.add(round=number, what=what, seconds=done.seconds, images_a_second=rate, **sizes, stages=stages(done))
                shutil.rmtree(work / "out")
    one, two = results.median("1 process", "images_a_second"), results.median("2 processes", "images_a_second")
    results.expect("images/s of two processes / of one", two / one, at_least=1.8)
    results.expect("bytes on the disk after / before", sizes["bytes_after"] / before)


@contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    """Give an empty folder, and remove it at the end."""
    work.mkdir(parents=True)
    try:
        yield work.resolve()
    finally:
        shutil.rmtree(work)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    programs: dict[str, Callable[[Any, Results], None]] = {
        "drive": measure_drive,
        "disk": measure_disk,
        "memory": measure_memory,
        "encode": measure_encode,
    }
    made = {verb: verbs.add_parser(verb) for verb in programs}
    for verb, sub in made.items():
        sub.add_argument("photos", type=Path)
        if verb != "drive":
            sub.add_argument("--work", type=Path, default=Path("packing-scratch"), help="a new folder, removed at the end")
        sub.add_argument("--rounds", type=int, default={"disk": 5}.get(verb, 3))
    made["drive"].add_argument("--home", type=Path, required=True, help="where the disk's image lies")
    made["drive"].add_argument("--server", default=sys.executable, help="an interpreter that has mfusepy")
    made["disk"].add_argument("--profile", action="store_true")
    options = parser.parse_args()
    results = Results(options.verb)
    programs[options.verb](options, results)
    results.show()


if __name__ == "__main__":
    main()
