"""Tables: every row as it stands in the file, and all that is wrong with it at once, by row."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gallery import Silent
from hypothesis import given
from hypothesis import strategies as st

from shardify import diskorder, sources
from shardify.config import BuildConfig
from shardify.errors import DataError, SettingsError, ShardifyError, StorageError
from shardify.format.names import is_key
from shardify.items import LEFT_OUT, Items

SHARES = {"train": 0.9, "val": 0.1}


def config(root: Path, splits: dict[str, Any] | None = None, **source: Any) -> BuildConfig:
    """Make the settings of a table with the columns id and label."""
    given = {"kind": "csv", "root": root, "table": "t.csv", "id": "id", "label": "label", "path": "{id}.jpg"} | source
    return BuildConfig.model_validate(
        {"name": "t", "source": given, "splits": splits or SHARES, "shards": {"out": root.parent / "out"}}
    )


def read(root: Path, text: str | bytes, splits: dict[str, Any] | None = None, **source: Any) -> Items:
    """Write t.csv and read it."""
    (root / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return sources.read(config(root, splits, **source))


def problems(root: Path, text: str | bytes, splits: dict[str, Any] | None = None, **source: Any) -> list[str]:
    """Return what is wrong with a table, line by line."""
    with pytest.raises(DataError) as caught:
        read(root, text, splits, **source)
    return list(caught.value.problems)


def names(items: Items) -> list[str]:
    """Return each row's label as the table has it."""
    assert items.classes is not None
    return [items.classes[label] for label in items.labels]


@pytest.mark.case("S08", "S09")
def test_texts_stay_themselves(tmp_path: Path) -> None:
    """Ids that look like numbers and labels that look like nothing are kept letter by letter (S08, S09)."""
    text = "id,label\n0000059611143525,NA\n1234567890e12345,007\n0000000000000e12,None\n-1,nan\n1e5,null\n00,7\n"
    items = read(tmp_path, text)
    assert list(items.keys) == ["0000059611143525", "1234567890e12345", "0000000000000e12", "-1", "1e5", "00"]
    assert items.ids is None
    assert names(items) == ["NA", "007", "None", "nan", "null", "7"]
    assert items.classes == ("007", "7", "NA", "None", "nan", "null")
    assert items.labels.dtype == np.int64
    assert items.root == str(tmp_path)
    assert items.extra is None


@pytest.mark.case("S08")
def test_folders_follow_the_text_of_an_id(tmp_path: Path) -> None:
    """Where all ids of a table look like numbers, characters are still those of the text."""
    ids = ["0000059611143525", "1234567890e12345", "0000000000000e12"]
    items = read(tmp_path, "id,label\n" + "".join(f"{key},1\n" for key in ids), path="{id[0]}/{id[1]}/{id[2]}/{id}.jpg")
    assert list(items.paths) == [f"0/0/0/{ids[0]}.jpg", f"1/2/3/{ids[1]}.jpg", f"0/0/0/{ids[2]}.jpg"]


def test_rows_of_shares_wait_for_the_draw(tmp_path: Path) -> None:
    """Sources don't draw splits: where these are shares, every row is left out so far."""
    items = read(tmp_path, "id,label\na,1\nb,2\n")
    assert items.split_names == ("train", "val")
    assert items.splits.tolist() == [LEFT_OUT, LEFT_OUT]
    assert items.splits.dtype == np.int16


@pytest.mark.case("S09")
def test_labels_as_they_are(tmp_path: Path) -> None:
    """`as_is` takes ASCII integers from 0 up to 2^63 - 1 and has no classes."""
    items = read(tmp_path, f"id,label\na,007\nb,{2**63 - 1}\nc,0\n", labels="as_is")
    assert items.labels.tolist() == [7, 2**63 - 1, 0]
    assert items.classes is None
    bad = ["1.0", "-1", str(2**63), "x", "٣", "1e3", "²", "9" * 5000]
    found = problems(tmp_path, "id,label\n" + "".join(f"k{n},{label}\n" for n, label in enumerate(bad)), labels="as_is")
    assert len(found) == len(bad)
    assert (
        found[0]
        == "t.csv row 2: label '1.0' is no integer from 0 to 2^63 - 1, as labels: as_is needs; labels: index takes any text (column 'label')"
    )


@pytest.mark.case("S09")
def test_all_that_is_wrong_is_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    """One error holds every bad row, with its line and the reason; the good rows aren't in it."""
    text = "id,label,folder\na,1,x\n,1,x\na,2,x\nb,,x\nc,1\nd,1,x,\ne,1,..\nf, ,/etc\n\n\0,1,x\ngood,1,x\n"
    found = problems(tmp_path, text, path="{folder}/{id}.jpg")
    assert found == [
        "t.csv row 3: id is empty",
        "t.csv row 4: id 'a' stands in t.csv row 2 too",
        "t.csv row 5: label is empty (column 'label')",
        "t.csv row 6: 2 fields, the header has 3",
        "t.csv row 7: 4 fields, the header has 3",
        "t.csv row 8: path '../e.jpg' leaves source.root",
        "t.csv row 9: label is empty (column 'label')",
        "t.csv row 9: path '/etc/f.jpg' is absolute; source.path is relative to source.root",
        "t.csv row 11: id '\\x00' holds a NUL",
    ]


@pytest.mark.parametrize(
    "path",
    [
        "../a",
        "a/../../b",
        "a/..",
        "..",
        "/a",
        "\\a",
        "\\\\host\\a",
        "..\\a",
        "a\\..\\b",
        "a/..\\b",
        "C:/a",
        "c:\\a",
        "a/../b",
        "",
        "a/",
    ],
)
def test_a_path_cannot_leave_the_root(tmp_path: Path, path: str) -> None:
    """Absolute paths, steps up and drives are refused with slashes of either kind, wherever the table hides them."""
    found = problems(tmp_path, f"id,label,file\nx,1,{path}\n", path="{file}")
    assert len(found) == 1
    assert found[0].startswith(f"t.csv row 2: path {path!r} ")


@pytest.mark.parametrize("path", ["a..b.jpg", "..a.jpg", "a../b", "é ü.jpg", "a\\b.jpg", "a:b/c", ".hidden", "%s%d{}.jpg", "a/./b"])
def test_odd_paths_below_the_root_are_fine(tmp_path: Path, path: str) -> None:
    """What only looks like a step up is a name, and is kept letter by letter."""
    assert list(read(tmp_path, f'id,label,file\nx,1,"{path}"\n', path="{file}").paths) == [path]


def test_a_step_up_made_of_two_columns_is_found(tmp_path: Path) -> None:
    """The check is on the whole path, not on its parts."""
    found = problems(tmp_path, "id,label,a,b\nx,1,.,./etc\n", path="{a}{b}/{id}.jpg")
    assert found == ["t.csv row 2: path '../etc/x.jpg' leaves source.root"]


def test_templates(tmp_path: Path) -> None:
    """A template takes columns and single characters, counted from either end; %% and doubled braces are themselves."""
    items = read(tmp_path, "id,label\nabcd,5\n", path="100%/{id[0]}/{id[-1]}/{{{label}}}-{id}.jpg")
    assert list(items.paths) == ["100%/a/d/{5}-abcd.jpg"]
    found = problems(tmp_path, "id,label\nab,1\nabc,1\nx,1\n", path="{id[0]}/{id[2]}/{id}{id[-2]}.jpg")
    assert found == [
        "t.csv row 2: id 'ab' is too short for {id[2]} in source.path",
        "t.csv row 4: id 'x' is too short for {id[2]} in source.path",
    ]


@pytest.mark.parametrize("text", ["{id.__class__}", "{id!r}", "{id:>9}", "{0}"])
def test_a_template_reaches_no_attribute(tmp_path: Path, text: str) -> None:
    """Python's format language means nothing here: all of it is the name of a column."""
    with pytest.raises(SettingsError, match=r"source\.path names"):
        read(tmp_path, "id,label\na,1\n", path=text)


def test_wrong_columns_list_those_that_are_there(tmp_path: Path) -> None:
    """A column that isn't there is a settings error with the columns found, the setting and the nearest name."""
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, "ID;lable;url\na;1;x\n", extra=["urls"])
    assert "t.csv has the columns 'ID;lable;url' (separated by ',')" in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, "ID;lable;url\na;1;x\n", delimiter=";", extra=["urls"])
    assert str(caught.value) == (
        "t.csv has the columns 'ID', 'lable', 'url' (separated by ';'), but source.id names 'id', did you mean 'ID'?; "
        "source.label names 'label', did you mean 'lable'?; source.extra names 'urls', did you mean 'url'?"
    )
    with pytest.raises(SettingsError, match="names 'label', which stands there 2 times"):
        read(tmp_path, "id,label,label\na,1,2\n")


def test_shapes_of_csv(tmp_path: Path) -> None:
    """BOM, CR LF, old Mac lines, blank lines, quoted delimiters and line breaks, and a missing last line end are all read."""
    plain = "id,label\na,1\nb,2\n"
    for text in (
        b"\xef\xbb\xbf" + plain.encode(),
        plain.replace("\n", "\r\n").encode(),
        plain.replace("\n", "\r").encode(),
        plain[:-1],
    ):
        items = read(tmp_path, text)
        assert (list(items.keys), names(items)) == (["a", "b"], ["1", "2"])
    items = read(tmp_path, '\n\n"id",label\n\na,"x,""y"""\n\nb,"two\nlines"\n\n')
    assert names(items) == ['x,"y"', "two\nlines"]
    assert list(read(tmp_path, "id\tlabel\na\t1\n", delimiter="\t").keys) == ["a"]
    assert list(read(tmp_path, "id\na\n\nb\n", label="id").keys) == ["a", "b"]


def test_a_row_number_is_the_line_in_the_file(tmp_path: Path) -> None:
    """Blank lines and quoted line breaks count, so that an editor finds the row."""
    assert problems(tmp_path, '\nid,label\n\na,"1\r\n2\n3"\n\nb,\n"c\n",1,1\nd,\n') == [
        "t.csv row 8: label is empty (column 'label')",
        "t.csv row 9: 3 fields, the header has 2",
        "t.csv row 11: label is empty (column 'label')",
    ]


def test_broken_quotes_are_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    """A row that is no CSV costs that row, not those behind it; a quote never closed names the row where it opens."""
    found = problems(tmp_path, 'id,label\n"a"x,1\nb,\nc,"1\nd,1\n')
    assert [line.partition(": ")[::2] for line in found] == [
        ("t.csv row 2", "no valid CSV (',' expected after '\"')"),
        ("t.csv row 3", "label is empty (column 'label')"),
        ("t.csv row 4", "no valid CSV (unexpected end of data)"),
    ]
    long = problems(tmp_path, 'id,label\na,"1\n' + "b,1\n" * 40000 + "z,\n")
    assert long[0] == "t.csv row 2: no valid CSV (field larger than field limit (131072); is a quote not closed?)"
    assert long[-1] == "t.csv row 40003: label is empty (column 'label')"


def test_rows_that_are_all_too_long_are_no_index_column(tmp_path: Path) -> None:
    """The first column never turns into something else where each row has a comma too many."""
    assert problems(tmp_path, "id,label\na,1,\nb,2,\n") == [
        "t.csv row 2: 3 fields, the header has 2",
        "t.csv row 3: 3 fields, the header has 2",
    ]


def test_encodings(tmp_path: Path) -> None:
    """The encoding set is used; a wrong one is named with the line, and UTF-16 and UTF-32 by their names."""
    text = "id,label\na,Zürich\nb,Genève\n"
    assert names(read(tmp_path, text.encode("latin-1"), encoding="latin-1")) == ["Zürich", "Genève"]
    assert names(read(tmp_path, text.encode("utf-16"), encoding="utf-16")) == ["Zürich", "Genève"]
    assert names(read(tmp_path, text.encode("utf-8-sig"), encoding="UTF8")) == ["Zürich", "Genève"]
    for data, encoding, said in [
        (text.encode("latin-1"), "utf-8", r"t\.csv line 2: not utf-8 .*; set source\.encoding, for example to latin-1"),
        (text.encode(), "ascii", r"t\.csv line 2: not ascii"),
        (text.encode("utf-16"), "utf-8", r"not utf-8, but UTF-16 .*; set source\.encoding: utf-16"),
        (text.encode("utf-32"), "utf-8", r"not utf-8, but UTF-32 .*; set source\.encoding: utf-32"),
        (b"\0\0\xfe\xff" + text.encode("utf-32-be"), "utf-8", r"not utf-8, but UTF-32 .*; set source\.encoding: utf-32"),
        (text.encode("utf-32"), "utf-16", r"NUL characters, as UTF-16 or UTF-32 .*; set source\.encoding"),
        (text.encode("utf-16") + b"\0", "UTF_16", r"not UTF_16 \("),
        (text.encode("utf-16-le"), "latin-1", r"NUL characters, as UTF-16 .*; set source\.encoding"),
        (text.encode("latin-1"), "utf-16", r"not utf-16"),
        (
            ("id,l\na,1\nb,2\n".encode("utf-16-le") + b"\x00\xdc" + ",3\n".encode("utf-16-le")),
            "utf-16-le",
            r"line 4: not utf-16-le .*encoding$",
        ),
    ]:
        with pytest.raises(SettingsError, match=said):
            read(tmp_path, data, encoding=encoding)


def test_tables_without_rows(tmp_path: Path) -> None:
    """An empty file and a header alone are errors that say so, and so is a table that isn't there."""
    with pytest.raises(DataError, match=r"t\.csv: empty"):
        read(tmp_path, "\n\n")
    assert problems(tmp_path, "id,label\n\n") == ["t.csv row 2: no row below the header"]
    for table in ("none.csv", ".", "t.csv/x"):
        with pytest.raises(SettingsError, match="no such table"):
            sources.read(config(tmp_path, table=table))
    for root in ("none", "t.csv"):
        with pytest.raises(SettingsError, match=r"source\.root .*: no such folder; .*--source"):
            sources.read(config(tmp_path / root))


@pytest.mark.case("N01")
def test_ids_that_are_no_keys(tmp_path: Path) -> None:
    """Dots, slashes, blanks and unicode become unique keys, and then each sample's json has its id (N01)."""
    ids = ["IMG.2020.01", "IMG.2020.02", "a/b", "a b", "\u00e9", "e\u0301", "_x", "ok", "x" * 200, "A", "a"]
    items = read(tmp_path, "id,label\n" + "".join(f"{i},1\n" for i in ids))
    assert list(items.ids or ()) == ids
    assert len(set(items.keys)) == len(ids)
    assert all(is_key(key) for key in items.keys)
    assert items.keys[7] == "ok"
    assert items.metadata(0) == {"id": "IMG.2020.01"}
    assert items.metadata(7) == {"id": "ok"}


@pytest.mark.case("N08")
def test_two_ids_that_give_one_key_are_refused(tmp_path: Path) -> None:
    """An id that equals another's key can't take its place."""
    key = read(tmp_path, "id,label\na.b,1\n").keys[0]
    found = problems(tmp_path, f"id,label\na.b,1\nc,1\n{key},1\nc,2\nc,3\n")
    assert found == [
        f"t.csv row 4: id {key!r} has the same key ({key}) as id 'a.b' in t.csv row 2",
        "t.csv row 5: id 'c' stands in t.csv row 3 too",
        "t.csv row 6: id 'c' stands in t.csv row 3 too",
    ]


def test_extra_columns_go_into_the_metadata(tmp_path: Path) -> None:
    """Extra columns are kept as text, in the order of the settings, beside the id where ids aren't keys."""
    text = "id,label,url,size\na,1,http://x/1,007\nb,1,,NA\n"
    items = read(tmp_path, text, extra=["size", "url"])
    assert items.extra is not None
    assert len(items.extra) == 2
    assert [dict(row) for row in items.extra[0:2]] == [{"size": "007", "url": "http://x/1"}, {"size": "NA", "url": ""}]
    assert items.metadata(1) == {"size": "NA", "url": ""}
    with pytest.raises(IndexError):
        items.extra[2]
    assert list(items.extra[-1].values()) == ["NA", ""]
    items = read(tmp_path, text.replace("a,1", "a.b,1"), extra=["id", "url"])
    assert items.metadata(0) == {"id": "a.b", "url": "http://x/1"}


@pytest.mark.case("S06")
def test_each_split_with_its_own_table(tmp_path: Path) -> None:
    """Tables of splits share one mapping of classes, and ids are unique over all of them (S06)."""
    (tmp_path / "val.csv").write_text("label,id\nd,v1\nb,v2\n")
    (tmp_path / "t.csv").write_text("id,label\na,a\nb,b\nc,c\n")
    splits = {"train": "t.csv", "val": "val.csv"}
    items = sources.read(config(tmp_path, splits, table=None))
    assert items.splits.tolist() == [0, 0, 0, 1, 1]
    assert items.classes == ("a", "b", "c", "d")
    assert names(items) == ["a", "b", "c", "d", "b"]
    assert sources.unseen_classes(items) == ("split val: 1 of its classes (1 samples) have no sample in train",)
    (tmp_path / "val.csv").write_text("label,id\nd,b\n,v2\nd\n")
    assert problems(tmp_path, "id,label\na,a\nb,\nb,b\n", splits) == [
        "t.csv row 3: label is empty (column 'label')",
        "t.csv row 4: id 'b' stands in t.csv row 3 too",
        "val.csv row 2: id 'b' stands in t.csv row 3 too",
        "val.csv row 3: label is empty (column 'label')",
        "val.csv row 4: 1 field, the header has 2",
    ]
    (tmp_path / "val.csv").write_text("key,id\nd,b\n")
    with pytest.raises(SettingsError, match=r"val\.csv has the columns 'key', 'id'"):
        sources.read(config(tmp_path, splits))
    (tmp_path / "val.csv").write_text("label,id\n")
    assert problems(tmp_path, "id,label\na,a\n", splits) == ["val.csv row 1: no row below the header"]


def test_a_column_names_the_splits(tmp_path: Path) -> None:
    """Values of source.split name splits; rows of others are left out unchecked and counted, as test sets have no labels."""
    text = "id,label,part\na,1,tr\nb,2,va\nc,,te\nc,,te\nd,1,tr\ne,,\n"
    items = read(tmp_path, text, {"val": "va", "train": "tr"}, split="part")
    assert list(items.keys) == ["a", "b", "d"]
    assert items.split_names == ("val", "train")
    assert items.splits.tolist() == [1, 0, 1]
    assert items.notes == ("t.csv: 3 rows left out, as no split takes their part ('te': 2, '': 1)",)
    assert problems(tmp_path, text + "f,,va\n", {"val": "va", "train": "tr"}, split="part") == [
        "t.csv row 8: label is empty (column 'label')"
    ]
    with pytest.raises(SettingsError, match=r"splits\.train: no row of t\.csv has 'train' in column 'part', did you mean 'tra'\?"):
        read(tmp_path, "id,label,part\na,1,tra\nb,1,va\n", {"train": "train", "val": "va"}, split="part")


def test_a_column_that_names_no_splits_is_not_listed_whole(tmp_path: Path) -> None:
    """A column of ids taken for the splits gives a short message."""
    with pytest.raises(SettingsError, match=r"It holds: 'x0000': 1, .* and 4,980 others$") as caught:
        read(tmp_path, "id,label\n" + "".join(f"x{n:04},1\n" for n in range(5000)), {"train": "train"}, split="id")
    assert len(str(caught.value)) < 400


@pytest.mark.usefixtures("no_root")
@pytest.mark.case("S12")
def test_a_folder_that_cannot_be_listed_is_a_storage_error() -> None:
    """A closed folder isn't taken for missing files, nor for an empty source (S12)."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "a")
        folder.mkdir(mode=0)
        with pytest.raises(StorageError, match="a: can't be listed"):
            diskorder.survey(root, ["a/x.jpg"], np.arange(1), Silent())
        with pytest.raises(StorageError, match="a: can't be listed"):
            sources.read(config(folder))
        with pytest.raises(StorageError, match="can't be read"):
            sources.read(config(Path(root), table="a/t.csv"))
        source = {"kind": "folders", "root": root}
        folders = {"name": "t", "source": source, "splits": SHARES, "shards": {"out": "out"}}
        with pytest.raises(StorageError, match="a/: can't be listed"):
            sources.read(BuildConfig.model_validate(folders))


@given(
    st.binary(max_size=80)
    | st.lists(st.sampled_from([b"id", b"label", b"a", b",", b'"', b"\n", b"\r", b"\0", b"\xff", b"1", b"..", b"/"])).map(b"".join),
    st.sampled_from(["utf-8", "utf-16", "latin-1", "utf-7", "cp932"]),
)
def test_no_table_brings_another_error(data: bytes, encoding: str) -> None:
    """Whatever bytes a table holds, it is read or refused with one of our own errors."""
    with tempfile.TemporaryDirectory() as root, suppress(ShardifyError):
        read(Path(root), b"id,label\n" + data, encoding=encoding)
    with tempfile.TemporaryDirectory() as root, suppress(ShardifyError):
        read(Path(root), data, encoding=encoding)
