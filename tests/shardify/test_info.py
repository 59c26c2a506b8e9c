"""Info: what the manifests state, and nothing else is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from packing import pack

from shardify.errors import FormatError, SettingsError
from shardify.info import describe


def test_facts(tmp_path: Path) -> None:
    """Splits, shards, samples, classes and sizes come from the manifests: the tars needn't be there."""
    pack(tmp_path, 12, 3)
    pack(tmp_path, 4, 1, split="val", classes=None)
    sizes = [path.stat().st_size for path in tmp_path.glob("train-*.tar")]
    for path in tmp_path.glob("*.tar"):
        path.unlink()
    facts = describe(tmp_path)
    assert list(facts) == ["train", "val"] and list(describe(tmp_path / "val-shardindex.json")) == ["val"]
    train = facts["train"]
    assert (train.shards, train.samples, train.classes, train.fields) == (3, 12, 5, ("cls", "jpg"))
    assert (train.bytes, train.largest_shard, train.mean_sample) == (sum(sizes), max(sizes), sum(sizes) // 12)
    assert facts["val"].classes is None and facts["val"].left_out == 0


def test_where_there_is_no_set(tmp_path: Path) -> None:
    """A path that isn't there, and a folder without manifests, are told apart."""
    with pytest.raises(SettingsError, match="no such folder or manifest"):
        describe(tmp_path / "none")
    with pytest.raises(FormatError, match=r"no <split>-shardindex\.json"):
        describe(tmp_path)
