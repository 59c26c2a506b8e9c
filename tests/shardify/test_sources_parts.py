"""Parts of the sources: path templates, the order of classes, and which files are missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardify.errors import SettingsError
from shardify.sources import template
from shardify.sources.labels import as_integer, order_classes


@pytest.mark.parametrize(
    "text", ["{id", "id}", "{}", "{id.__class__}{", "{id!r}}", "{id[x]}", "{id[0]", "{id[0][1]}", "{id[]}", "{{id}", "{id[1:2]}"]
)
def test_a_template_that_is_not_understood_is_refused(text: str) -> None:
    """Half a brace or another index is an error that shows how to write it."""
    with pytest.raises(SettingsError, match=r"at character \d+; write \{column\}"):
        template.parse(text)


@given(
    st.lists(st.tuples(st.text("ab%{}", max_size=4), st.sampled_from(["", "{id}", "{id[0]}"])), max_size=5),
    st.text("xyz", min_size=1),
)
def test_expansion_is_plain_substitution(pieces: list[tuple[str, str]], text: str) -> None:
    """A template gives its texts and the columns' texts, side by side."""
    source = "".join(plain.replace("{", "{{").replace("}", "}}") + field for plain, field in pieces)
    wanted = "".join(plain + {"": "", "{id}": text, "{id[0]}": text[0]}[field] for plain, field in pieces)
    assert template.parse(source).expand({"id": [text, text]}, 2) == [wanted, wanted]


@pytest.mark.parametrize(
    ("labels", "ordered"),
    [
        (["10", "9", "b", "a", "007", "7", "B", "-3"], ["-3", "007", "7", "9", "10", "B", "a", "b"]),
        (["1.0", "1", "٣", "é", "z", "+5", " 2"], ["1", " 2", "+5", "1.0", "z", "é", "٣"]),
        (["9" * 5000, "1" + "0" * 5000, "2"], ["2", "9" * 5000, "1" + "0" * 5000]),
    ],
)
def test_classes_are_ordered_by_value_then_by_text(labels: list[str], ordered: list[str]) -> None:
    """ASCII integers come by value, equal values and all else by text; no number of digits is too many."""
    assert list(order_classes(labels)) == ordered


@given(st.lists(st.one_of(st.text(max_size=4), st.integers().map(str)), unique=True))
def test_the_class_order_depends_on_the_set_of_labels_alone(labels: list[str]) -> None:
    """Rows in another order give the same indices."""
    assert order_classes(labels) == order_classes(labels[::-1])
    assert sorted(order_classes(labels)) == sorted(labels)


@given(st.text(max_size=25))
def test_an_integer_label_is_never_misread(text: str) -> None:
    """What as_integer accepts is that number."""
    value = as_integer(text)
    assert value is None or (text.isascii() and int(text) == value and 0 <= value < 2**63)
