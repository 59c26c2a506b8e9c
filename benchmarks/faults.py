"""Read a set from a server that goes wrong, with pipeline and with stock webdataset: what each lost, doubled, or hung on.

    python benchmarks/faults.py [--seconds 40] > docs/FAULTS.md

240 samples of 20 KB in four shards. The fault strikes the first reply for the second shard, and every fourth one for any shard after
it; the same server then serves the rest well. webdataset reads by its documented `WebDataset(urls)`, an external curl (it needs one),
with the error handler that it has by default and with `warn_and_continue`. What takes longer than `--seconds` is ended as a hang.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from faulty import HTML, Fault, Faulty, Request  # noqa: E402  (of the tests)

COUNT, SHARDS, SIZE = 240, 4, 20_000
HALF = COUNT // SHARDS * SIZE // 2

FAULTS: dict[str, Fault] = {
    "nothing": Fault(),
    "body cut, with Content-Length": Fault(cut=HALF),
    "body cut between two samples, without Content-Length": Fault(cut=22_016 * 20, length=False),
    "body cut within a sample, without Content-Length": Fault(cut=HALF, length=False),
    "chunked body cut": Fault(cut=HALF, chunked=True),
    "connection reset": Fault(cut=HALF, reset=True),
    "no reply": Fault(raw=b""),
    "stall for good": Fault(cut=HALF, stall=3600),
    "500": Fault(status=500),
    "503 with Retry-After": Fault(status=503, retry_after="1"),
    "slow start": Fault(delay=2.0),
    "206 with a wrong Content-Range": Fault(content_range="bytes 1-2/3"),
    "no ranges": Fault(ranges=False),
    "gzip encoding": Fault(gzip=True),
    "HTML with 200": Fault(body=HTML, kind="text/html"),
    "empty 200": Fault(body=b""),
    "another version midway": Fault(etag='"new"'),
}

OURS = """
import hashlib, json, sys
from pipeline import HttpOptions, LoaderOptions, make_loader
http = HttpOptions(idle_seconds=3)
options = LoaderOptions(decode="none", keys=True, last_batch="uneven", window_bytes=2**18, cache_dir=sys.argv[2], http=http)
seen = []
try:
    with make_loader(sys.argv[1] + "/train-shardindex.json", batch_size=16, num_workers=2, options=options) as loader:
        for images, _, keys in loader:
            seen += [(key, hashlib.sha256(image).hexdigest()) for key, image in zip(keys, images)]
    error = ""
except Exception as caught:
    error = type(caught).__name__
print(json.dumps({"seen": seen, "error": error}))
"""
STOCK = """
import hashlib, json, sys, warnings
import webdataset as wds
warnings.simplefilter("ignore")
handler = wds.warn_and_continue if sys.argv[3] else wds.reraise_exception
seen = []
try:
    for sample in wds.WebDataset(sys.argv[1] + "/train-{000000..000003}.tar", shardshuffle=False, handler=handler):
        seen.append((sample["__key__"], hashlib.sha256(sample["jpg"]).hexdigest() if "jpg" in sample else ""))
    error = ""
except Exception as caught:
    error = type(caught).__name__
print(json.dumps({"seen": seen, "error": error}))
"""


def script(fault: Fault) -> Callable[[Request], Fault | None]:
    """Return what strikes the second shard's first reply, and every fourth one after it."""
    struck = [-1]

    def strike(request: Request) -> Fault | None:
        if request.method == "GET" and request.target.endswith(".tar") and (struck[0] >= 0 or "000001" in request.target):
            struck[0] += 1
            return fault if struck[0] % 4 == 0 else None
        return None

    return strike


def tell(program: str, fault: Fault, folder: Path, right: dict[str, str], more: tuple[str, float]) -> str:
    """Run a program on a server with a fault, and say what came of it."""
    with tempfile.TemporaryDirectory() as cache, Faulty(folder, script(fault)) as server:
        command = [sys.executable, "-c", program, server.origin, cache, more[0]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                output, _ = process.communicate(timeout=more[1])
            except subprocess.TimeoutExpired:
                process.kill()
                return f"**hung** ({more[1]:.0f} s)"
    found: dict[str, Any] = json.loads(output)
    keys = [key for key, _ in found["seen"]]
    said = [f"{found['error']} after {len(keys)} samples"] if found["error"] else []
    if lost := COUNT - len(set(keys)):
        said += [] if found["error"] else [f"**lost {lost}**, {'with a warning' if more[0] else 'in silence'}"]
    if doubled := len(keys) - len(set(keys)):
        said.append(f"**{doubled} doubled**")
    if wrong := sum(digest != right.get(key) for key, digest in found["seen"]):
        said.append(f"**{wrong} wrong**")
    return ", ".join(said) or "exact"


def main() -> None:
    """Read with each program on each fault, and print the table."""
    import hashlib  # noqa: PLC0415

    from residence import big_set  # noqa: PLC0415  (of the tests)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    seconds = parser.parse_args().seconds
    print("# What faults cost\n")
    print(
        "One epoch of 240 samples from a server that goes wrong at times (`benchmarks/faults.py` made this table). `webdataset` is the"
    )
    print(
        "stock package, by `WebDataset(urls)`: an external curl, which tries again what fails before the body comes. Of another version only"
    )
    print("the ETag differs here, so that webdataset's bytes are right by luck.\n")
    print("| fault | pipeline | webdataset | webdataset, warn_and_continue |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        packed = big_set(Path(scratch, "set"), COUNT, SHARDS, SIZE)
        right = {key: hashlib.sha256(data).hexdigest() for key, data in packed.pictures.items()}
        for name, fault in FAULTS.items():
            cells = [
                tell(program, fault, packed.folder, right, (how, seconds))
                for program, how in ((OURS, ""), (STOCK, ""), (STOCK, "continue"))
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
