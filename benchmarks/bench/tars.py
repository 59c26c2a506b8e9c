"""Writes webdataset's tars with its ShardWriter, for the peers that read them."""

from pathlib import Path

import webdataset as wds
from protocol import Plan, rows


def write_tars(photos: Path, out: Path, plan: Plan) -> None:
    """Write the pictures in the table's shuffled order."""
    pictures = rows(photos)
    out.mkdir()
    with wds.ShardWriter(f"{out}/shard-%06d.tar", maxcount=plan.samples(len(pictures)), verbose=0) as writer:
        for path, label in pictures:
            writer.write({"__key__": path.stem, "jpg": path.read_bytes(), "cls": label})
