"""Pack a table of pictures as one does without a thought for the disk: webdataset's ShardWriter, rows shuffled, each file read in turn.

    python benchmarks/naive.py PHOTOS OUT [--maxsize BYTES]

PHOTOS is what photos.py makes. Prints {"seconds": ...}: from the table to the last shard on the disk (`sync` of OUT's file
system), without the 2 s that importing webdataset takes.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import time
from pathlib import Path

import webdataset as wds


def pack(photos: Path, out: Path, maxsize: int) -> None:
    """Write all pictures of `photos` in shuffled order into shards of about `maxsize` bytes."""
    with (photos / "train.csv").open(newline="") as file:
        rows = [(row["id"], row["landmark_id"]) for row in csv.DictReader(file)]
    classes = {label: number for number, label in enumerate(sorted({label for _, label in rows}))}
    random.Random(0).shuffle(rows)
    out.mkdir(parents=True)
    with wds.ShardWriter(str(out / "train-%06d.tar"), maxsize=maxsize, verbose=0) as writer:
        for key, label in rows:
            data = (photos / "train" / key[0] / key[1] / key[2] / f"{key}.jpg").read_bytes()
            writer.write({"__key__": key, "jpg": data, "cls": classes[label]})


def main() -> None:
    """Pack, and print how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--maxsize", type=int, default=128 * 2**20)
    options = parser.parse_args()
    start = time.perf_counter()
    pack(options.photos, options.out, options.maxsize)
    subprocess.run(["sync", "-f", str(options.out)], check=True)
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
