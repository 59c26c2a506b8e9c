"""Where a worker's time goes: an epoch of `make_loader` under py-spy, the share of decoding and transforming among it.

    pip install py-spy
    python benchmarks/profiling.py SHARDS --count 9000 [--workers 2] [--job problem]

SHARDS is a set that `python benchmarks/bench run` keeps (data/bench/9000/sets/shards). Samples are of threads that run, not of those
that wait, and of worker processes alone; read them from a warm page cache. Prints the shares of our functions, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKER = "(pipeline/worker.py"
WORK = {"decode": "_decoded (pipeline/decode.py", "transform": "(pipeline/augment"}  # marks of our innermost function


def shares(stacks: Iterable[str]) -> tuple[dict[str, float], Counter[str]]:
    """Return the shares of decoding, transforming and the rest in workers' samples, and the samples by our innermost function.

    `stacks`: py-spy's raw format, "outermost;...;innermost COUNT" with frames "name (file:line)".
    """
    counts: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        if WORKER not in stack:
            continue
        # Stages are generators, each inside the next: only the innermost of our frames says what is done.
        innermost = [frame.rpartition(":")[0] + ")" for frame in stack.split(";") if "(pipeline/" in frame][-1]
        counts[next((name for name, mark in WORK.items() if mark in innermost), "rest")] += int(count)
        alone[innermost] += int(count)
    total = counts.total() or 1
    return {name: counts[name] / total for name in (*WORK, "rest")}, alone


def main() -> None:
    """Run the epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--job", default="problem")
    options = parser.parse_args()
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if spy is None:
        sys.exit("this needs py-spy: pip install py-spy")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "stacks")
        read = [HERE / "bench" / "with_ours.py", "read", options.shards, "--count", options.count, "--job", options.job]
        read += ["--workers", options.workers, "--epochs", 2]
        record = [spy, "record", "--rate", "200", "--format", "raw", "--nonblocking", "--subprocesses", "--output", out, "--"]
        command = [str(word) for word in (*record, sys.executable, *read)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found, alone = shares(out.read_text().splitlines())
    total = alone.total() or 1
    for name, count in alone.most_common(20):
        print(f"{count / total:7.1%}  {name}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
