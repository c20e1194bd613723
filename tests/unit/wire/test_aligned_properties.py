"""Properties with the same layout are parsed by column, others are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import at_most
from turbopump.wire.aligned_properties import ROWS_MIN
from turbopump.wire.hashing import string_hash
from turbopump.wire.property_texts import PropertyTexts

ALIKE = "UNIQ_KEY\x01%03d\x02TAGS\x01\x02KEYS\x01a  k-%03d \x02KEYS\x01\x02TAGS\x01é"


def texts_of(form: str, count: int = 40) -> PropertyTexts:
    return PropertyTexts([(form.replace("%03d", f"{at:03}")).encode() for at in range(count)])


def test_values_are_found_in_all_texts_where_they_stand_in_the_first() -> None:
    columns = texts_of(ALIKE.removesuffix("\x02TAGS\x01é")).columns
    assert columns is not None
    assert columns.place("TAGS") is None, "it is empty"
    place = columns.place("KEYS")
    assert place is not None, "empty ones do not count"
    assert columns.first[slice(*place)] == b"a  k-000 "
    constant, varying = columns.words(*place)
    assert columns.hashes(*constant).tolist() == [ord("a")] * 40
    signed = columns.hashes(*varying, "Tö#").view(np.int32)
    assert signed.tolist() == [string_hash(f"Tö#k-{at:03}") for at in range(40)]


@pytest.mark.parametrize("form", [ALIKE, "", "A\x01%03d\0", "A\x01%03d\x7f\x80"])
def test_texts_that_need_a_full_parse(form: str) -> None:
    assert texts_of(form).columns is None


@pytest.mark.parametrize(
    "other",
    [
        b"A\x01 23",
        b"A\x011\x023",
        b"A\x0112\0",
        b"A\x01\xc3\xa43",
        b"B\x01123",
        b"AA123",
        b"B\x011",
    ],
)
@pytest.mark.parametrize("at", [0, 1, 15, 16, 39])
def test_one_text_with_another_layout(other: bytes, at: int) -> None:
    texts = [b"A\x01123"] * 40
    assert PropertyTexts(texts).columns is not None
    texts[at] = other
    assert PropertyTexts(texts).columns is None
    rows = np.array(texts, "S5").view("V5")
    assert PropertyTexts(rows).columns is None or len(other) < 5
    assert PropertyTexts(rows[:0]).columns is None


def test_few_texts_are_not_parsed_by_column() -> None:
    assert texts_of("A\x01%03d", ROWS_MIN - 1).columns is None
    assert texts_of("A\x01%03d", ROWS_MIN).columns is not None


@settings(max_examples=at_most(30))
@given(st.integers(ROWS_MIN, 3 * ROWS_MIN), st.data())
def test_hashes_of_any_part(count: int, data: st.DataObject) -> None:
    letters = st.sampled_from("!5z~")
    rows = data.draw(
        st.lists(st.text(letters, min_size=6, max_size=6), min_size=count, max_size=count)
    )
    columns = PropertyTexts([f"A\x01{row}".encode() for row in rows]).columns
    assert columns is not None
    start = data.draw(st.integers(0, 5))
    end = data.draw(st.integers(start + 1, 6))
    signed = columns.hashes(2 + start, 2 + end, "b").view(np.int32)
    assert signed.tolist() == [string_hash("b" + row[start:end]) for row in rows]


def test_rows_and_their_parts_are_the_same_texts() -> None:
    listed = texts_of("KEYS\x01a %03d")
    rows = PropertyTexts(np.array(listed.parts).view(f"V{len(listed.parts[0])}"))
    assert rows.parts == listed.parts
    assert rows[3:30].parts == listed[3:30].parts == listed.parts[3:30]
    assert rows.spaces() == listed.spaces() == 40
    assert rows.lengths.tolist() == listed.lengths.tolist()
