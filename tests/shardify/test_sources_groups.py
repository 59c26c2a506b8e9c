"""Groups: samples of one group stay in one split, whichever way the splits are made."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify import order, sources
from shardify.config import BuildConfig
from shardify.errors import DataError, SettingsError
from shardify.items import Items
from shardify.sources.groups import across_splits
from shardify.sources.texts import Texts


def read(root: Path, tables: dict[str, str], splits: dict[str, Any], **settings: Any) -> Items:
    """Write the tables, read them with the column `shoot` as the group, and draw the splits where these are shares."""
    for name, text in tables.items():
        (root / name).write_text(text)
    source = {"kind": "csv", "root": root, "table": "t.csv", "id": "id", "label": "label", "path": "{id}.jpg", "group": "shoot"}
    source |= {name: value for name, value in settings.items() if name in ("split", "group")}
    config = BuildConfig.model_validate(
        {
            "name": "t",
            "source": source,
            "splits": splits,
            "shards": {"out": root / "out"},
            "order": {"seed": settings.get("seed", 0)},
        }
    )
    items = sources.read(config)
    if config.shares is None:
        return items
    assert items.groups is not None
    drawn = order.draw_splits(items.groups, config.shares, config.splits_seed)
    return Items(**{name: getattr(items, name) for name in Items.__slots__} | {"splits": drawn})


def problems(root: Path, tables: dict[str, str], splits: dict[str, Any], **settings: Any) -> list[str]:
    """Return what is wrong with the tables, line by line."""
    with pytest.raises(DataError) as caught:
        read(root, tables, splits, **settings)
    return list(caught.value.problems)


def splits_of(items: Items) -> dict[str, set[int]]:
    """Return the splits in which each group lies."""
    assert items.groups is not None
    found = defaultdict(set)
    for group, split in zip(items.groups, items.splits.tolist(), strict=True):
        found[group].add(split)
    return found


def table(groups: list[str]) -> str:
    """Make a table of one row for each group given."""
    return "id,label,shoot\n" + "".join(f"i{row},{row % 3},{group}\n" for row, group in enumerate(groups))


def test_shares_are_of_groups(tmp_path: Path) -> None:
    """A group lies in one split; groups, not samples, are drawn by the shares; ids draw nothing."""
    groups = [f"g{number}" for number in range(400) for _ in range(1 + 20 * (number == 7))]
    items = read(tmp_path, {"t.csv": table(groups)}, {"train": 0.8, "val": 0.2})
    lies = splits_of(items)
    assert all(len(found) == 1 for found in lies.values())
    assert 55 <= sum(found == {1} for found in lies.values()) <= 105
    by_group = dict(zip(groups, order.draw_splits(groups, [0.8, 0.2], 0).tolist(), strict=True))
    assert {group: found.pop() for group, found in lies.items()} == by_group


def test_neither_more_rows_nor_another_order_move_a_group(tmp_path: Path) -> None:
    """Rows that are added, also to a group, leave each group where it was, and so does order.seed."""
    groups, shares = [f"g{number}" for number in range(100)], {"train": 0.5, "val": 0.3}
    before = splits_of(read(tmp_path, {"t.csv": table(groups)}, shares))
    after = splits_of(read(tmp_path, {"t.csv": table(["new", *groups[50:], *groups, "newer"])}, shares, seed=9))
    assert {group: after[group] for group in groups} == before
    assert {frozenset(found) for found in before.values()} == {frozenset({split}) for split in (0, 1, -1)}


def test_an_empty_group_is_an_error_of_its_row(tmp_path: Path) -> None:
    """A row without a group isn't put in a group of all such rows."""
    text = "id,label,shoot\na,1,g\nb,1,\nc,1, \nd,1,h\n"
    assert problems(tmp_path, {"t.csv": text}, {"train": 1.0}) == [
        "t.csv row 3: group is empty (column 'shoot')",
        "t.csv row 4: group is empty (column 'shoot')",
    ]


def test_a_group_in_two_splits_of_a_column(tmp_path: Path) -> None:
    """All groups that a column of splits parts are named, with the rows; those of rows that no split takes don't matter."""
    text = "id,label,shoot,part\na,1,g,tr\nb,1,h,va\nc,1,g,te\nd,1,h,va\n"
    splits = {"train": "tr", "val": "va"}
    items = read(tmp_path, {"t.csv": text}, splits, split="part")
    assert items.groups is not None
    assert list(items.groups) == ["g", "h", "h"]
    text += "e,1,g,va\nf,1,g,va\ng,1,,va\nh,1,h,tr\ni,1,,tr\n"
    assert problems(tmp_path, {"t.csv": text}, splits, split="part") == [
        "t.csv row 6: group 'g' is in split val here, in split train in t.csv row 2; a group stays in one split",
        "t.csv row 8: group is empty (column 'shoot')",
        "t.csv row 9: group 'h' is in split train here, in split val in t.csv row 3; a group stays in one split",
        "t.csv row 10: group is empty (column 'shoot')",
    ]


def test_a_group_in_two_tables(tmp_path: Path) -> None:
    """A group that two splits' own tables share is named with both tables."""
    tables = {"t.csv": "id,label,shoot\na,1,g\nb,1,h\n", "v.csv": "shoot,id,label\nx,c,1\nh,d,1\nh,e,1\n"}
    assert problems(tmp_path, tables, {"train": "t.csv", "val": "v.csv"}) == [
        "v.csv row 3: group 'h' is in split val here, in split train in t.csv row 3; a group stays in one split"
    ]


def test_the_column_of_groups(tmp_path: Path) -> None:
    """It may be a column used for something else too, and one that isn't there is a settings error."""
    items = read(tmp_path, {"t.csv": "id,label,shoot\na,1,g\nb,2,g\n"}, {"train": 1.0}, group="label")
    assert items.groups is not None
    assert list(items.groups) == ["1", "2"]
    with pytest.raises(SettingsError, match=r"source\.group names 'shot', did you mean 'shoot'\?"):
        read(tmp_path, {"t.csv": "id,label,shoot\na,1,g\n"}, {"train": 1.0}, group="shot")


@given(st.lists(st.tuples(st.sampled_from("abc "), st.integers(-1, 2)), max_size=12))
def test_exactly_the_parted_groups_are_found(rows: list[tuple[str, int]]) -> None:
    """One problem for each split beyond a group's first; rows that no split takes and empty groups give none."""
    groups, splits = [group for group, _ in rows], np.array([split for _, split in rows], np.int16)
    found = list(across_splits(Texts.of(groups), splits, ["x", "y", "z"], str))
    lies = defaultdict(set)
    for group, split in rows:
        lies[group] |= {split} - {-1}
    assert len(found) == sum(max(0, len(lies[group]) - 1) for group in "abc")
    assert all(splits[row] not in (-1, splits[groups.index(groups[row])]) or -1 in splits for row, _ in found)
    assert [row for row, _ in found] == sorted(row for row, _ in found)
