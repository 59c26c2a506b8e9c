"""Measure remote shards: a real nginx on loopback, read by make_loader, by curl, and the same shards from the local disk.

    python benchmarks/remote.py SHARDS [--rounds 5] [--workers 2] [--connections 1 4 16]

SHARDS is a folder with one split. decode="none", batches of 64, one epoch from an empty cache folder each time, interleaved with
`curl` of all shards into files, and with two epochs from the folder: with the page cache dropped before (root only), as in a first
epoch, and with all of it in memory. Rates count from the first batch on, which comes once the workers stand. Needs nginx and curl.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runs import Results, run

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

READ = """
import sys, time, json
from pipeline import LoaderOptions, make_loader
options = LoaderOptions(decode="none", last_batch="uneven", cache_dir=sys.argv[2], connections=int(sys.argv[4]))
with make_loader(sys.argv[1], batch_size=64, num_workers=int(sys.argv[3]), options=options) as loader:
    batches = iter(loader)
    began = time.monotonic()
    next(batches)
    first = time.monotonic()
    size = sum(sum(map(len, images)) for images, _ in batches)
    print(json.dumps({"first": first - began, "seconds": time.monotonic() - first, "bytes": size}))
"""


def main() -> None:
    """Run the rounds and print what they came to."""
    from nginx import nginx  # noqa: PLC0415  (of the tests)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    shards = options.shards.resolve()
    tars, results = sorted(shards.glob("*.tar")), Results("remote")
    states = ("dropped", "warm") if os.geteuid() == 0 else ("warm",)
    (manifest,) = shards.glob("*-shardindex.json")
    with tempfile.TemporaryDirectory(dir=shards.parent) as scratch, nginx(shards, Path(scratch, "nginx")) as origin:
        for number in range(options.rounds):
            for connections in options.connections:
                cache = Path(scratch, "cache")
                url = f"{origin}/{manifest.name}"
                command = [sys.executable, "-c", READ, url, str(cache), str(options.workers), str(connections)]
                found = run(command).answer
                results.add(
                    round=number, what=f"ours, {connections} connections", mb_s=found["bytes"] / found["seconds"] / 1e6, **found
                )
                shutil.rmtree(cache)
            began = time.perf_counter()
            for tar in tars:
                subprocess.run(["curl", "-sf", "-o", Path(scratch, tar.name), f"{origin}/{tar.name}"], check=True)
            seconds, size = time.perf_counter() - began, sum(tar.stat().st_size for tar in tars)
            results.add(round=number, what="curl", mb_s=size / seconds / 1e6, seconds=seconds, bytes=size)
            for tar in tars:
                Path(scratch, tar.name).unlink()
            for state in states:
                if state == "dropped":
                    subprocess.run(["sync"], check=True)
                    Path("/proc/sys/vm/drop_caches").write_text("3")
                found = run([sys.executable, "-c", READ, str(shards), "-", str(options.workers), "4"]).answer
                what = f"local, page cache {state}"
                results.add(round=number, what=what, mb_s=found["bytes"] / found["seconds"] / 1e6, **found)
    for state in states:
        slower = min(results.median("curl", "mb_s"), results.median(f"local, page cache {state}", "mb_s"))
        for connections in options.connections:
            what = f"ours, {connections} connections"
            results.expect(
                f"{what}: bytes a second / the slower of curl and local ({state})",
                results.median(what, "mb_s") / slower,
                at_least=0.9,
            )
    results.show()


if __name__ == "__main__":
    main()
