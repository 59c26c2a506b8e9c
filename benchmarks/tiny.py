"""Make a folder of very many very small JPEGs in the layout of Google Landmarks 2020: OUT/train/a/b/c/<16 hex>.jpg, OUT/train.csv.

    python benchmarks/tiny.py OUT [--count 200000]

For measuring what a row costs, where the pictures themselves cost nothing: each is the same grey square with its number as a
comment, under 500 bytes.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import cv2
import numpy as np

LABELS = 1000


def square() -> bytes:
    """Return a small JPEG."""
    return bytes(cv2.imencode(".jpg", np.full((16, 16, 3), 127, np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 50])[1].tobytes())


def commented(picture: bytes, comment: bytes) -> bytes:
    """Return a JPEG with a comment segment put right after its start marker."""
    return picture[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + picture[2:]


def make(out: Path, count: int) -> None:
    """Write the pictures and their table; the folder must be new."""
    out.mkdir(parents=True)
    picture, names = square(), [hashlib.md5(b"%d" % number).hexdigest()[:16] for number in range(count)]
    for folder in {name[:3] for name in names}:
        (out / "train" / folder[0] / folder[1] / folder[2]).mkdir(parents=True)
    for name in names:
        (out / "train" / name[0] / name[1] / name[2] / f"{name}.jpg").write_bytes(commented(picture, name.encode()))
    rows = "".join(f"{name},{1000 + 37 * (number % LABELS)}\n" for number, name in enumerate(names))
    (out / "train.csv").write_text("id,landmark_id\n" + rows)


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=200_000)
    options = parser.parse_args()
    make(options.out, options.count)


if __name__ == "__main__":
    main()
