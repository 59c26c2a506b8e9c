"""Parquet tables: the same items as the same table in CSV, and what is wrong with columns, rows and files told as there."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from shardify import sources
from shardify.config import BuildConfig
from shardify.errors import DataError, SettingsError

IDS = ["0000059611143525", "1234567890e12345", "0000000000000e12", "NA", "a b", "é"]


def config(root: Path, table: str, **source: Any) -> BuildConfig:
    """Return settings for a table."""
    base = {"kind": "csv", "root": str(root), "table": table, "id": "id", "label": "label", "path": "{id}.jpg"}
    return BuildConfig.model_validate(
        {"name": "n", "source": base | source, "splits": {"train": 0.5, "val": 0.5}, "shards": {"out": str(root / "out")}}
    )


def written(root: Path, **columns: Any) -> None:
    """Write t.parquet in row groups of two."""
    parquet.write_table(pa.table(columns), root / "t.parquet", row_group_size=2)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=["string", "large", "dictionary"]
)
@pytest.mark.case("S08", "S09")
def test_the_same_items_as_a_csv(tmp_path: Path, kind: Any) -> None:
    """Ids of digits, of digits with an e, and missing-value words stay the text that they are (S08, S09)."""
    labels = [*["NA", "null", "7", "07", "7", ""][:5], "x,y"]
    written(tmp_path, id=pa.array(IDS).cast(kind), other=pa.array([1.5] * 6), label=pa.array(labels).cast(kind))
    rows = "".join(f'{key},"{label}"\n' for key, label in zip(IDS, labels, strict=True))
    (tmp_path / "t.csv").write_text("id,label\n" + rows)
    one, other = (sources.read(config(tmp_path, name, extra=["label"])) for name in ("t.parquet", "t.csv"))
    assert (list(one.keys), list(one.paths), one.classes) == (list(other.keys), list(other.paths), other.classes)
    np.testing.assert_array_equal(one.labels, other.labels)
    assert [one.metadata(row) for row in range(6)] == [other.metadata(row) for row in range(6)]


def test_integers_are_read_as_their_digits(tmp_path: Path) -> None:
    """Of any width, up to 2^63 - 1 as a label."""
    written(tmp_path, id=pa.array([1, 2, 3], pa.int8()), label=pa.array([0, 5, 2**63 - 1], pa.uint64()))
    items = sources.read(config(tmp_path, "t.parquet", labels="as_is"))
    assert (list(items.keys), items.labels.tolist()) == (["1", "2", "3"], [0, 5, 2**63 - 1])


def test_all_that_is_wrong_is_reported_by_row(tmp_path: Path) -> None:
    """Nulls, NULs, empty and repeated ids are one error, with rows counted from 1 over all row groups."""
    ids = ["a", None, "b", "c\0d", "a", ""]
    written(tmp_path, id=pa.array(ids), label=pa.array(["x", None, None, "x", "x", "x"]))
    with pytest.raises(DataError) as caught:
        sources.read(config(tmp_path, "t.parquet"))
    assert list(caught.value.problems) == [
        "t.parquet row 2: id is null",
        "t.parquet row 2: label is null",
        "t.parquet row 3: label is null",
        "t.parquet row 4: id 'c\\x00d' holds a NUL",
        "t.parquet row 5: id 'a' stands in t.parquet row 1 too",
        "t.parquet row 6: id is empty",
    ]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"id": pa.array(["a"]), "lable": pa.array(["b"])}, "source.label names 'label', did you mean 'lable'"),
        (
            {"id": pa.array([1.0]), "label": pa.array(["b"])},
            "source.id names 'id', whose type is double: write it as text or integers",
        ),
        ({"id": pa.array([b"a"]), "label": pa.array(["b"])}, "whose type is binary"),
        ({"id": pa.array([["a"]]), "label": pa.array([True])}, "whose type is bool"),
    ],
)
def test_columns_that_cannot_be_read(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    """A misspelled column, and one whose texts would depend on how a number is written, are refused by name."""
    written(tmp_path, **columns)
    with pytest.raises(SettingsError, match=said):
        sources.read(config(tmp_path, "t.parquet"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """None there, empty, text, cut anywhere, damaged in the middle: our own errors, with the table's name."""
    with pytest.raises(SettingsError, match="no such table"):
        sources.read(config(tmp_path, "t.parquet"))
    written(tmp_path, id=pa.array([f"{n:05d}" for n in range(3000)]), label=pa.array(["x"] * 3000))
    whole, path = (tmp_path / "t.parquet").read_bytes(), tmp_path / "t.parquet"
    for data in (
        b"",
        b"id,label\na,b\n",
        whole[:-1],
        whole[: len(whole) // 2],
        whole[len(whole) // 2 :],
        b"PAR1" + bytes(100) + b"PAR1",
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"t\.parquet: can't be read as Parquet"):
            sources.read(config(tmp_path, "t.parquet"))
    rng = np.random.default_rng(0)
    for at in rng.integers(4, len(whole), 300).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(DataError, SettingsError):
            sources.read(config(tmp_path, "t.parquet"))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install; CSV needs nothing of it."""
    written(tmp_path, id=pa.array(["a"]), label=pa.array(["b"]))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SettingsError, match=r"pip install 'shardify\[parquet\]'"):
        sources.read(config(tmp_path, "t.parquet"))
