"""Both cores encode the same rows, whatever the columns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores import both, outcome
from turbopump.core.reference.rows import (
    ListColumn,
    RowColumns,
    RowStyle,
    TextColumn,
    encode_rows,
)

PIECES = ["a", "Z", "\u00fc", " ", "\t", "\u3000", "\x1c", "\x01", "\x02", "\u4e2d", "~", "\x7f"]
TEXTS = st.none() | st.text(st.sampled_from(PIECES), max_size=5) | st.just("created")
RAW = TEXTS.map(lambda text: None if text is None else text.encode()) | st.binary(max_size=3)
NAMES = st.sampled_from([b"n", b"name", b"TAGS", b"WAIT", b"SPARK_ROW"]) | RAW
STYLES = st.builds(
    RowStyle,
    st.sampled_from([4, 100]),
    st.none() | st.just(b"query/7/"),
    st.just(b"SPARK_ROW"),
    st.booleans(),
    st.sampled_from([frozenset(), frozenset({b"TAGS"})]),
    st.just(frozenset({b"WAIT", b"SPARK_ROW"})),
)


def bits(values: Sequence[object]) -> bytes | None:
    if None not in values:
        return None
    whole = sum((value is not None) << at for at, value in enumerate(values))
    return whole.to_bytes(len(values) // 8 + 1, "little")


def text_column(values: Sequence[bytes | None], first: int = 0) -> TextColumn:
    offsets = array("i", [0])
    for value in values:
        offsets.append(offsets[-1] + len(value or b""))
    data = b"".join(value or b"" for value in values)
    return TextColumn(bits(values), offsets.tobytes(), data, first)


def list_column(values: Sequence[Sequence[object] | None], first: int = 0) -> ListColumn:
    offsets = array("i", [0])
    for value in values:
        offsets.append(offsets[-1] + len(value or ()))
    return ListColumn(bits(values), offsets.tobytes(), first)


def flat(values: Sequence[Sequence[Any] | None]) -> list[Any]:
    return [each for value in values for each in value or ()]


@st.composite
def columns(draw: st.DrawFn) -> RowColumns:
    first = draw(st.integers(0, 2))

    def many(kind: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(kind, min_size=7, max_size=7))

    found = RowColumns(text_column(many(st.binary(max_size=6)), first))
    if draw(st.booleans()):
        found = found._replace(tags=text_column(many(RAW), first))
    if draw(st.booleans()):
        found = found._replace(keys=text_column(many(RAW), first))
    elif draw(st.booleans()):
        lists = many(st.none() | st.lists(RAW, max_size=3))
        found = found._replace(keys=text_column(flat(lists)), key_lists=list_column(lists, first))
    if draw(st.booleans()):
        maps = many(st.none() | st.lists(st.tuples(NAMES, RAW), max_size=3))
        found = found._replace(
            names=text_column([name for name, _ in flat(maps)]),
            values=text_column([value for _, value in flat(maps)]),
            maps=list_column(maps, first),
        )
    return found


@given(columns(), STYLES, st.integers(0, 70_000), st.dictionaries(st.integers(0, 5), st.binary()))
def test_rows_are_the_same(
    given_columns: RowColumns, style: RowStyle, first: int, texts: dict[int, bytes]
) -> None:
    arguments: Any = (given_columns, 5, first, b"0AF1", first, style, texts)
    plain, compiled = both()
    assert compiled.encode_rows(*arguments) == plain.encode_rows(*arguments)


@given(columns(), st.data())
def test_inconsistent_columns_are_the_same_errors(
    given_columns: RowColumns, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([n for n in RowColumns._fields if getattr(given_columns, n)]))
    column = getattr(given_columns, name)
    part = data.draw(st.sampled_from(["offsets", "validity", "first", "data"]))
    if part == "first":
        column = column._replace(first=data.draw(st.integers(-3, 9)))
    elif getattr(column, part, None):
        raw = getattr(column, part)
        raw = bytearray(raw[: data.draw(st.integers(0, len(raw)))])
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        column = column._replace(**{part: bytes(raw)})
    style = RowStyle(100, b"q/", b"SPARK_ROW", True, frozenset(), frozenset())
    arguments: tuple[Any, ...] = (
        given_columns._replace(**{name: column}),
        5,
        0,
        b"0AF1",
        0,
        style,
        {},
    )
    plain, compiled = both()
    expected = outcome(lambda: plain.encode_rows(*arguments))
    assert outcome(lambda: compiled.encode_rows(*arguments)) == expected


def test_many_properties_and_long_ones() -> None:
    style = RowStyle(100, None, b"SPARK_ROW", False, frozenset(), frozenset())
    many = [(b"name%d" % number, b"v") for number in range(60)]
    maps = [many, [*many, many[3]], [(b"long", b"x" * 40_000)], []]
    given_columns = RowColumns(
        text_column([b"1"] * 4),
        names=text_column([name for name, _ in flat(maps)]),
        values=text_column([value for _, value in flat(maps)]),
        maps=list_column(maps),
    )
    for core in both():
        ends, data, special = core.encode_rows(given_columns, 4, 0, b"", 0xFFFF, style, {})
        assert special == [1, 2]
        assert ends[1] == ends[2] == ends[3] < ends[4] == len(data)
        assert b"UNIQ_KEY\x010002\x02WAIT\x01true" in data
    assert encode_rows(given_columns, 1, 0, b"", 1, style, {0: b"a\x01b"})[1].endswith(
        b"\0\3a\x01b"
    )


def test_columns_of_other_kinds_are_errors() -> None:
    _, compiled = both()
    style = RowStyle(100, None, b"SPARK_ROW", False, frozenset(), frozenset())
    bodies, lists = text_column([b"1"]), list_column([[b"a"]])
    columns: Any = RowColumns
    wrong: Any
    for wrong, count in (
        (columns(None), 1),
        (columns(lists), 1),
        (columns(bodies, tags=lists), 1),
        (columns(bodies), -1),
    ):
        with pytest.raises((AttributeError, ValueError)):
            compiled.encode_rows(wrong, count, 0, b"", 0, style, {})
