"""Columns of a table: kept in few bytes and looked at as a whole, with the same results as one text at a time."""

from __future__ import annotations

import csv
import io
import itertools
import pickle
import re
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify import sources
from shardify.config import BuildConfig
from shardify.format.names import is_key
from shardify.sources import blocks, template, texts
from shardify.sources.blocks import Blocks
from shardify.sources.columns import factorize, repeats
from shardify.sources.identity import to_keys
from shardify.sources.plain import split_plain
from shardify.sources.rowlines import RowLines
from shardify.sources.table import read_table
from shardify.sources.template import Paths
from shardify.sources.texts import Texts

ROWS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "rows.py"
any_texts = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=5), max_size=30)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks, spans and batches end after a few bytes, so that small tables have many."""
    monkeypatch.setattr(blocks, "_BLOCK_CHARACTERS", 9)
    monkeypatch.setattr(texts, "_SPAN", 7)
    monkeypatch.setattr(texts, "_BATCH", 3)
    monkeypatch.setattr(template, "_BATCH", 3)


@pytest.mark.usefixtures("small")
class TestTexts:
    @given(any_texts, st.integers(-40, 40), st.integers(-40, 40), st.sampled_from([None, 1, 2, -1]))
    def test_it_is_the_list_of_its_texts(self, given: list[str], start: int, stop: int, step: int | None) -> None:
        """Length, order, indexes from either end and slices are those of a list; lone surrogates come back as they were."""
        column = Texts.of(given)
        assert list(column) == given
        assert len(column) == len(given)
        assert [column[row] for row in range(-len(given), len(given))] == given + given
        assert column[start:stop:step] == given[start:stop:step]
        assert list(pickle.loads(pickle.dumps(column))) == given
        for row in (len(given), -len(given) - 1):
            with pytest.raises(IndexError):
                column[row]

    @given(any_texts, any_texts, st.data())
    def test_rows_can_be_picked_and_columns_joined(self, first: list[str], second: list[str], data: st.DataObject) -> None:
        """`only` is a filter and `joined` a concatenation."""
        wanted = data.draw(st.lists(st.booleans(), min_size=len(first), max_size=len(first)))
        column = Texts.of(first)
        assert list(column.only(np.array(wanted, bool))) == [text for text, keep in zip(first, wanted, strict=True) if keep]
        assert list(Texts.joined([column, Texts.of(second), Texts.of([])])) == first + second

    @given(any_texts)
    def test_blank_texts_are_found(self, given: list[str]) -> None:
        """Empty or white space in any script, and nothing else."""
        given += [" ", "\u3000", " a", "\t\n", "\u2028x"]
        assert list(Texts.of(given).blank()) == [row for row, text in enumerate(given) if not text or text.isspace()]

    def test_a_nul_is_refused(self) -> None:
        """A text with a NUL would become two."""
        with pytest.raises(ValueError, match="NUL"):
            Texts.of(["a", "b\0c"])

    @given(st.lists(st.sampled_from(["a", "b", "ab", "ba", "", "é", "x" * 9]), max_size=20))
    def test_distinct_texts_and_repeats(self, given: list[str]) -> None:
        """Each text has the number of its first row, and each repeat is named with that row."""
        numbers, distinct = factorize(Texts.of(given))
        assert distinct == list(dict.fromkeys(given))
        assert [distinct[number] for number in numbers] == given
        assert numbers.dtype == np.int64
        assert repeats(given) == [(given.index(text), row) for row, text in enumerate(given) if text in given[:row]]

    @given(st.lists(st.text("aZ0-_. é\n", max_size=4) | st.sampled_from(["a" * 90, "a" * 91, "_", "-"]), max_size=9))
    def test_a_column_of_keys_is_kept_as_it_is(self, ids: list[str]) -> None:
        """The look at all bytes at once finds exactly the columns in which each id is a key."""
        column = Texts.of(ids)
        keys, differing = to_keys(column)
        assert (keys is column) == all(map(is_key, ids))
        assert (differing is None) == (keys is column)
        assert all(map(is_key, keys))


@pytest.mark.usefixtures("small")
def test_texts_that_share_a_hash_are_told_apart() -> None:
    """Two texts made to have one hash are two classes and no repeat (the sequence of Thue and Morse, modulo 2^64)."""
    first = "".join("ab"[number.bit_count() % 2] for number in range(2048))
    second = first.translate(str.maketrans("ab", "ba"))
    column = Texts.of([second, first, "c", second, first])
    numbers, distinct = factorize(column)
    assert numbers.tolist() == [0, 1, 2, 0, 1]
    assert distinct == [second, first, "c"]
    assert repeats(column) == [(0, 3), (1, 4)]
    assert repeats(column[:3]) == []


TEMPLATES = [
    "{a}",
    "{a}/{b}",
    "{b}:/{a}",
    "{a[1]}/{a}",
    "{a[-2]}.{b}",
    "..{a}",
    "{a}.",
    "{a}../x",
    "x/{b}/",
    "/{a}",
    "{b[0]}:{a}",
    "d",
]


TEXTS = ["".join(letters) for length in range(4) for letters in itertools.product("a/.:\\é", repeat=length)]
TEXTS += ["a/../a", "a/..a", "a../a", "a\\..\\a"]


@pytest.mark.parametrize("text", TEMPLATES)
def test_wrong_paths_are_found_without_making_the_others(text: str) -> None:
    """What the columns' bytes let pass is what a look at each path lets pass: tried with all texts of up to 3 such letters."""
    parsed = template.parse(text)
    for a, b in itertools.chain(
        zip(TEXTS, itertools.repeat("C")), zip(itertools.repeat("C"), TEXTS), zip(TEXTS, TEXTS[::-1], strict=True)
    ):
        columns = {"a": [a], "b": [b]}
        found = list(Paths(parsed, {"a": Texts.of([a]), "b": Texts.of([b])}, 1).problems())
        assert found == [*parsed.too_short(columns), *template.unsafe(parsed.expand(columns, 1))], (a, b)


@pytest.mark.usefixtures("small")
@given(st.sampled_from(TEMPLATES), st.lists(st.tuples(st.sampled_from(TEXTS), st.sampled_from(TEXTS)), max_size=9))
def test_paths_are_the_list_of_the_expanded_template(text: str, rows: list[tuple[str, str]]) -> None:
    """Paths are made when asked for, one by one, as a slice or in turn; what is wrong with them is found in each row."""
    columns = {"a": [a for a, _ in rows], "b": [b for _, b in rows]}
    parsed = template.parse(text)
    paths = Paths(parsed, {name: Texts.of(column) for name, column in columns.items()}, len(rows))
    expanded = parsed.expand(columns, len(rows))
    assert sorted(paths.problems()) == sorted([*parsed.too_short(columns), *template.unsafe(expanded)])
    assert list(paths) == expanded
    assert [paths[row] for row in range(-len(rows), len(rows))] == expanded * 2
    assert paths[1:-1] == expanded[1:-1]
    for row in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            paths[row]


lines = st.lists(
    st.lists(st.sampled_from(["a", "", "b c", "é", '"q"', '"x,y"', '"l\nm"', '"c\r"', '"open', "1\0", "\u2028\x0b"]), max_size=4)
)


@pytest.mark.usefixtures("small")
@given(lines, st.sampled_from(["\n", "\r\n", "\r"]), st.booleans(), st.integers(1, 4))
def test_blocks_change_nothing(rows: list[list[str]], end: str, ended: bool, width: int) -> None:
    """A table that is read in blocks, with or without a parser, gives the rows, lines and problems of the csv module."""
    text = "".join(",".join(row) + end for row in [[f"c{n}" for n in range(width)], *rows])
    text = text if ended else text.removesuffix(end)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_text(text, encoding="utf-8", newline="")
        table = read_table(Path(file.name), "t", {f"c{n}": "" for n in range(width)})
    kept, begin, wrong, line = [], [], [], 2
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    next(reader)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error:
            wrong.append(line)
        else:
            nul = any("\0" in text for text in row[:width])
            if len(row) == width and not nul:
                kept.append(row)
                begin.append(line)
            elif row:
                wrong += [line] * (sum("\0" in text for text in row) if len(row) == width else 1)
        line = reader.line_num + 1
    assert [list(row) for row in zip(*table.columns.values(), strict=True)] == kept
    assert [table.lines[row] for row in range(len(table))] == begin
    assert sorted(line for line, _ in table.problems) == wrong or (not kept and not wrong)


def test_a_block_is_split_without_a_parser_only_where_nothing_needs_one() -> None:
    """Plain rows are split, whatever their line ends; a quote, a NUL, a blank line, another length or half a line needs the parser."""
    assert_split = [
        ("a,b\nc,é\n", ["a", "c"], ["b", "é"]),
        ("a,b\r\n,\r\n", ["a", ""], ["b", ""]),
        ("\x0b,\u2028\n", ["\x0b"], ["\u2028"]),
    ]
    for block, first, second in assert_split:
        split = split_plain(block, 2, ",", [1, 0])
        assert split is not None
        assert split[0] == len(first)
        assert [column.tobytes().decode().split("\0")[:-1] for column in split[1]] == [second, first]
    for block in (
        '"a",b\n',
        "a,b\n\n",
        "a,b\nc\n",
        "a,b\nc,d,e\n",
        "a\nb,c,d\n",
        "a,b,c\nd\n",
        "a,b",
        "a,b\r\nc,d\n",
        "a,b\rc,d\n",
        "a,\0\n",
        "\n",
    ):
        assert split_plain(block, 2, ",", [0]) is None
    assert split_plain("a" * 131073 + ",b\n", 2, ",", [0]) is None
    assert split_plain("a§b\n", 2, "§", [0]) is None


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@given(st.lists(st.text("ab", max_size=30)))
@pytest.mark.usefixtures("small")
def test_blocks_are_whole_lines(end: str, given: list[str]) -> None:
    """Blocks hold a file's text, and none ends inside a line or between CR and LF."""
    text = "".join(line + end for line in given)
    source = Blocks(io.StringIO(text, newline=""))
    taken = list(iter(source.take, ""))
    assert "".join(taken) == text
    assert all(block.endswith(end) for block in taken)
    assert all(len(block) <= 4 * (9 + 32) for block in taken)


@given(st.lists(st.integers(1, 4), max_size=30), st.data())
def test_lines_of_rows(gaps: list[int], data: st.DataObject) -> None:
    """Each row's line comes back, also those of rows that are picked out."""
    begin = np.cumsum(gaps, dtype=np.int64).tolist()
    kept = RowLines()
    for line in begin:
        kept.add(line)
    kept.add(1000, 3)
    begin += [1000, 1001, 1002]
    assert [kept[row] for row in range(len(kept))] == begin
    wanted = data.draw(st.lists(st.booleans(), min_size=len(begin), max_size=len(begin)))
    picked = kept.only(np.array(wanted, bool))
    assert [picked[row] for row in range(len(picked))] == [line for line, keep in zip(begin, wanted, strict=True) if keep]


def test_a_row_stays_small(tmp_path: Path) -> None:
    """A row of a 16-digit id, a class and a path costs less than 60 bytes, all of its texts included; as objects it took 219."""
    rows = 20_000
    (tmp_path / "t.csv").write_text(
        "id,label\n" + "".join(f"{row * 0x9E3779B97F4A7C15 % 2**64:016x},{row % 999}\n" for row in range(rows))
    )
    source = {"kind": "csv", "root": tmp_path, "table": "t.csv", "id": "id", "label": "label", "path": "{id[0]}/{id[1]}/{id}.jpg"}
    config = BuildConfig.model_validate({"name": "t", "source": source, "splits": {"a": 1.0}, "shards": {"out": tmp_path / "out"}})
    sources.read(config)  # what is imported or made once isn't a row's
    tracemalloc.start()
    try:
        items = sources.read(config)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(items) == rows
    assert held / rows < 60


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_million_rows_fit_in_4_gb() -> None:
    """10 million rows go through sources and order in less than 4 GB (measured: 0.9)."""
    command = [sys.executable, str(ROWS), "10000000", "--mode", "stratified"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout
    found = re.search(
        r"^10,000,000 rows in 10,000,000 slots, 80,000 classes\npeak RSS ([\d,]+) MB; (\d+) bytes a row", printed, re.MULTILINE
    )
    assert found is not None, printed
    assert int(found[1].replace(",", "")) < 4000
    assert int(found[2]) < 150
