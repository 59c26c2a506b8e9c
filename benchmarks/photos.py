#!/usr/bin/env python3
"""Make a folder of real photographs laid out like Google Landmarks 2020, for measuring on: OUT/train/a/b/c/<16 hex>.jpg, OUT/train.csv.

    photos.py OUT [--count 2000]

The pictures are crops (800x600 or 600x800, about 100 KB each, JPEG quality 78 to 91) of the photographs in Debian's freely
licensed wallpaper packages, which it downloads with `apt-get download`. train.csv has `id,landmark_id`; a label names the source
photograph (about 190 sparse numbers, as in the real set). The same count, Debian and OpenCV give the same pictures.
Needs Debian (`apt-get update` first), opencv and numpy: run it with an interpreter that has them. They are for measuring: none of them belongs in a repository.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import cv2
import numpy as np

PACKAGES = (
    "gnome-backgrounds",
    "plasma-workspace-wallpapers",
    "mate-backgrounds",
    "ukui-wallpapers",
    "lomiri-wallpapers-20.04",
    "lomiri-wallpapers-16.04",
)


def crops(task: tuple[int, str, int, str]) -> list[tuple[str, int]]:
    index, source, count, out = task
    cv2.setNumThreads(1)
    rng = np.random.default_rng(index)
    picture = cv2.imread(source)
    if picture is None or min(picture.shape[:2]) < 700:
        return []
    height, width = picture.shape[:2]
    rows = []
    for k in range(count):
        w, h = (800, 600) if rng.random() < 0.7 else (600, 800)
        most = min(height / h, width / w)
        scale = rng.uniform(min(0.45, most), min(2.2, most))
        cw, ch = int(w * scale), int(h * scale)
        x, y = rng.integers(0, width - cw + 1), rng.integers(0, height - ch + 1)
        crop = cv2.resize(picture[y : y + ch, x : x + cw], (w, h), interpolation=cv2.INTER_AREA).astype(np.float32)
        crop = crop * rng.uniform(0.8, 1.15) + rng.normal(0, rng.uniform(2, 7), crop.shape[:2])[..., None]
        crop = np.clip(crop, 0, 255).astype(np.uint8)
        if rng.random() < 0.5:
            crop = crop[:, ::-1]
        name = hashlib.md5(f"{index}-{k}".encode()).hexdigest()[:16]
        folder = Path(out, "train", name[0], name[1], name[2])
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{name}.jpg"), crop, [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(78, 92))])
        rows.append((name, 1000 + 37 * index))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        raise SystemExit(f"{options.out} isn't empty")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=scratch, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(
                f"the photographs come from Debian's packages, and those can't be had: {error}; run `apt-get update`, or make a folder "
                "of this layout from pictures of your own and name it (make bench PHOTOS=FOLDER)"
            ) from error
        for package in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, scratch], check=True)
        sources = sorted(str(p) for p in Path(scratch).rglob("*.jp*g") if p.stat().st_size > 150_000)
        each = options.count // len(sources) * 5 // 4 + 2
        with ProcessPoolExecutor() as pool:
            rows = [
                row for made in pool.map(crops, [(i, s, each, str(options.out)) for i, s in enumerate(sources)]) for row in made
            ]
    random.Random(0).shuffle(rows)
    for name, _ in rows[options.count :]:
        Path(options.out, "train", name[0], name[1], name[2], f"{name}.jpg").unlink()
    rows = rows[: options.count]
    Path(options.out, "train.csv").write_text("id,landmark_id\n" + "".join(f"{i},{label}\n" for i, label in rows))
    if len(rows) < options.count:
        raise SystemExit(f"only {len(rows)} of {options.count} photographs could be made")
    print(f"{len(rows)} photographs, {len({label for _, label in rows})} labels in {options.out}")


if __name__ == "__main__":
    main()
