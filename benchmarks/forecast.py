"""Check `shardify doctor`'s forecast against real first epochs on a hard disk in software (benchmarks/drive.py; needs root).

    python benchmarks/photos.py P --count 9000
    shardify build configs/glr2020.yaml --source P --out S
    python benchmarks/forecast.py --photos P --shards S --drive DIR [--workers 2] [--rounds 3] [--python INTERPRETER]

Puts both on the drive at DIR (started where it isn't; what lies there already is taken as it is). In each round, for files and for
shards: `doctor --drop-caches`, then one epoch from a cold drive, of question.py and of make_loader with the same transform. Prints
forecast, measured and their ratio, and exits with 1 where the median ratio is off by more than 25 %.
INTERPRETER runs the drive's server: one that has mfusepy (default: this one).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ALLOWED = 0.25


def output(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True, cwd=HERE.parent).stdout


class Drive:
    """The emulated drive: started where it isn't, filled once, made cold before each epoch."""

    def __init__(self, home: Path, interpreter: str) -> None:
        self.mount = home / "mnt"
        self._home, self._command = home, (interpreter, HERE / "drive.py")
        if not self.mount.is_mount():
            output(*self._command, "up", home)

    def put(self, source: Path, name: str) -> Path:
        """Copy a folder onto the drive, unless it is there."""
        target = self.mount / name
        if not target.exists():
            shutil.copytree(source, self.mount / f"{name}.copying")
            os.sync()
            (self.mount / f"{name}.copying").rename(target)
        return target

    def cool(self) -> None:
        """Forget what is cached of the drive."""
        output(*self._command, "cold", self._home)

    def stats(self) -> str:
        """Return what the drive did since it was made cold."""
        found = json.loads(output(*self._command, "stats", self._home))
        return (
            f"{found['requests']:,.0f} requests, {found['seeks']:,.0f} seeks, {found['seek_s'] + found['transfer_s']:.1f} s at work"
        )


def forecast(path: Path, name: str, workers: int) -> float:
    """Return the seconds that doctor foretells for an epoch (a forecast with a problem in it is none)."""
    command = (sys.executable, "-m", "shardify", "doctor", path, "--workers", str(workers), "--drop-caches", "--json")
    return float(json.loads(output(*command))["epochs"][name]["seconds"])


def seconds(program: str) -> float:
    """Return the first epoch's seconds that a program prints."""
    return float(re.findall(r"epoch 0: ([\d.]+) s", program)[0])


def measure_files(photos: Path, workers: int) -> float:
    arguments = (photos, "--workers", str(workers), "--epochs", "1", "--count", "1000000000")
    return seconds(output(sys.executable, HERE / "question.py", *arguments))


def measure_shards(shards: Path, workers: int) -> float:
    manifests = sorted(shards.glob("*-shardindex.json"))
    arguments = (*manifests, "--workers", str(workers), "--ours", "float32")
    return seconds(output(sys.executable, HERE / "warm.py", "-", *arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("photos", "shards", "drive"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    drive = Drive(options.drive.resolve(), options.python)
    photos, shards = drive.put(options.photos, "photos"), drive.put(options.shards, "shards")
    ratios: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name, path, measure in (("files", photos, measure_files), ("shards", shards, measure_shards)):
            foretold = forecast(path, name, options.workers)
            drive.cool()
            measured = measure(path, options.workers)
            ratios.setdefault(name, []).append(foretold / measured)
            figures = f"forecast {foretold:.1f} s, measured {measured:.1f} s, ratio {foretold / measured:.2f}"
            print(f"round {number}, {name}, {options.workers} workers: {figures}; drive: {drive.stats()}", flush=True)
        whole = forecast(photos, "shards", options.workers)
        ratios.setdefault("shards, foretold from the files", []).append(whole / measured)
        print(f"round {number}, shards foretold from the files: {whole:.1f} s, ratio {whole / measured:.2f}", flush=True)
    for name, found in ratios.items():
        print(f"{name}: median ratio {statistics.median(found):.2f}, {min(found):.2f} to {max(found):.2f}")
    if any(abs(statistics.median(found) - 1) > ALLOWED for found in ratios.values()):
        sys.exit(f"a forecast is off by more than {ALLOWED:.0%}")


if __name__ == "__main__":
    main()
