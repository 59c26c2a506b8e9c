"""Measure how soon the first batch comes over a slow link: large shards on a server of 20 MB/s, by a token bucket in it.

    python benchmarks/link.py [--rate 20e6] [--shards 4] [--rounds 5] [--workers 0 2]

Writes shards of 128 MiB (samples of 100 KB) into a temporary folder. Each round begins with an empty cache folder. "standing" is from
the moment at which the first worker waits for its samples, "all" from `iter`, with the processes' start.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import Results, run

SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"
SHARD_SAMPLES = 2**27 // 102_400  # 100 KB and their headers in 128 MiB
GOAL_SECONDS = 1.5

READ = """
import json, sys, threading, time
from pipeline import LoaderOptions, make_loader

def watch(loader, stood):
    while not stood:
        block = loader._reading and loader._reading.block
        if block and block.wants(block.run):
            stood.append(time.monotonic())
        time.sleep(0.001)

options = LoaderOptions(decode="none", cache_dir=sys.argv[2])
with make_loader(sys.argv[1], batch_size=64, num_workers=int(sys.argv[3]), options=options) as loader:
    began, stood = time.monotonic(), []
    watcher = threading.Thread(target=watch, args=(loader, stood), daemon=True)
    watcher.start()
    batches = iter(loader)
    images, _ = next(batches)
    done = time.monotonic()
    watcher.join()
    fetched = loader.stats().reading.medium_bytes
    print(json.dumps({"standing": done - stood[0], "all": done - began, "fetched_mb": fetched / 1e6}))
"""


def main() -> None:
    """Run the rounds and print what they came to."""
    sys.path.insert(0, str(SUPPORT))
    from residence import big_set  # noqa: PLC0415  (of the tests)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20e6)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    options = parser.parse_args()
    results = Results("link")
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = Path(scratch, "set"), Path(scratch, "cache")
        big_set(folder, options.shards * SHARD_SAMPLES, options.shards, 100_000)
        command = [sys.executable, str(SUPPORT / "faulty.py"), str(folder), "--rate", str(options.rate)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = f"{server.stdout.readline().strip()}/train-shardindex.json"
            for number in range(options.rounds):
                for workers in options.workers:
                    found = run([sys.executable, "-c", READ, url, str(cache), str(workers)]).answer
                    results.add(round=number, what=f"{workers} workers", **found)
                    shutil.rmtree(cache)
            server.communicate("")
    for workers in options.workers:
        what = f"{workers} workers"
        results.expect(f"{what}: seconds from standing to the first batch", results.median(what, "standing"), at_most=GOAL_SECONDS)
    results.show()


if __name__ == "__main__":
    main()
