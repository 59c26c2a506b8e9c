"""The card: what Hugging Face reads from it, and how ours is told from another's."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml

from shardify.format import card
from shardify.format.manifest import Manifest, ShardEntry

TRAIN = Manifest("set", "train", (ShardEntry("train-000000.tar", 4, 20480, "ab" * 32),), classes=("a", "b"))
VAL = replace(TRAIN, split="val", shards=(ShardEntry("val-000000.tar", 1, 4096, "cd" * 32),))


def data_files(*manifests: Manifest) -> Any:
    """Return the front matter's data files by split."""
    _, front, _ = card.dump(manifests).decode().split("---\n", 2)
    return {entry["split"]: entry["path"] for entry in yaml.safe_load(front)["configs"][0]["data_files"]}


def test_the_front_matter() -> None:
    """The card begins with the block that makes the folder loadable, a pattern for each split (FORMATS.md)."""
    begin = '---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: "train-*.tar"\n'
    assert card.dump([TRAIN]).decode().startswith(begin + "---\n")
    assert data_files(TRAIN, VAL) == {"train": "train-*.tar", "val": "val-*.tar"}


def test_patterns_keep_splits_apart() -> None:
    """Where a split's name begins like another's, each pattern still matches its own shards only; `-` is no letter there."""
    hard = replace(VAL, split="val-hard", shards=(ShardEntry("val-hard-000000.tar", 1, 4096, ""),))
    patterns = data_files(VAL, hard)
    assert set(patterns) == {"val", "val_hard"}
    names = ("val-000000.tar", "val-hard-000000.tar")
    assert [[fnmatch(name, pattern) for name in names] for pattern in patterns.values()] == [[True, False], [False, True]]


def test_an_empty_split_has_no_pattern() -> None:
    """A pattern that matches nothing would break the load of the others."""
    assert data_files(TRAIN, replace(VAL, shards=())) == {"train": "train-*.tar"}


def test_it_states_the_numbers_and_warns() -> None:
    """The card names the set, its sizes and classes; a set of several types of picture is warned of."""
    text = card.dump([TRAIN, VAL]).decode()
    assert "# set" in text and "| train | 1 | 4 | 20,480 |" in text and "2 classes" in text
    assert "several types" not in text
    assert "several types" in card.dump([replace(TRAIN, fields=("cls", "jpg", "png"))]).decode()
    assert "# a \\[b\\](c) \\<i\\>" in card.dump([replace(TRAIN, name="a [b](c)\n<i>")]).decode()


@pytest.mark.parametrize(
    "change", [lambda d: d + b"My notes.\n", lambda d: d.replace(b"4", b"5", 1), lambda d: b"", lambda d: d[:-30]]
)
def test_only_an_untouched_card_is_ours(change: Any) -> None:
    """A card that someone edited, or wrote, is theirs."""
    data = card.dump([TRAIN, VAL])
    assert card.is_ours(data)
    assert not card.is_ours(change(data))
