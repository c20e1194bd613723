from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import at_most, in_long_runs
from stored_rows import entries, expected, numbered, rows_of
from turbopump.spark.records.property_columns import same_layout

FROM_PROPERTIES = ["msgId", "tags", "keys", "properties"]


@st.composite
def same_length(draw: st.DrawFn) -> list[bytes]:
    """Draw texts that are equal except for a few bytes, which may be anywhere."""
    parts = draw(st.lists(entries | st.sampled_from(["KEYS\x01k1", "TAGS\x01t", "KEYS\x01k22"])))
    text = "\x02".join(parts).encode()
    found = [bytearray(text) for _ in range(draw(st.sampled_from([1, 2, 31, 32, 33, 70])))]
    places = st.tuples(st.integers(0, len(found) - 1), st.integers(0, max(0, len(text) - 1)))
    other = st.sampled_from(b"xyz0") | st.sampled_from(b"x\0\1\2\x03\x7f\x80\xc3\xff")
    for row, at in draw(st.lists(places, max_size=6)) if text else ():
        found[row][at] = draw(other)
    return [bytes(one) for one in found]


def check_same_length(texts: list[bytes]) -> None:
    data = numbered(texts)
    assert rows_of(data, FROM_PROPERTIES) == [
        {name: one[name] for name in FROM_PROPERTIES} for one in expected(data)
    ]


@given(same_length())
@settings(max_examples=at_most(25), deadline=None)
def test_properties_of_the_same_length(texts: list[bytes]) -> None:
    check_same_length(texts)


@pytest.mark.slow
@given(same_length())
@settings(max_examples=in_long_runs(1000), deadline=None)
def test_many_properties_of_the_same_length(texts: list[bytes]) -> None:
    check_same_length(texts)


@pytest.mark.parametrize(
    ("text", "other", "is_laid_out"),
    [
        ("KEYS\x01ab\x02TAGS\x01t", "KEYS\x01xy\x02TAGS\x01u", True),
        ("KEYS\x01ab\x02\x02TAGS\x01t\x02", "KEYS\x01xy\x02\x02TAGS\x01u\x02", True),
        ("WAIT\x01ab\x02WAIT\x01cd", "WAIT\x01ab\x02WAIT\x01ce", True),
        ("WAIT\x01ab\x02WAIT\x01cd", "WAIT\x01ax\x02WAIT\x01cd", False),
        ("KEYS\x01ab\x02TAGS\x01t", "KEYS\x01ab\x02TAGT\x01t", False),
        ("KEYS\x01ab\x02TAGS\x01t", "KEYS\x01a\x02TAGS\x01tt", False),
        ("KEYS\x01abcde", "KEYS\x01a\x02b\x01c", False),
        ("KEYS\x01abc", "KEYS\x01a\x01c", False),
        ("KEYS\x01a\x01c", "KEYS\x01a\x01d", False),
        ("WAIT\x01a\x01b\x02WAIT\x01cd", "WAIT\x01a\x01b\x02WAIT\x01ce", True),
        ("KEYS\x01\x02a\x01b", "KEYS\x01\x02a\x01c", False),
        ("KEYS\x01b\x02junk", "KEYS\x01c\x02junk", False),
        ("KEYS\x01ß", "KEYS\x01ü", False),
        ("\x02\x02", "\x02\x02", False),
    ],
)
def test_which_texts_are_of_the_same_layout(text: str, other: str, *, is_laid_out: bool) -> None:
    for rows in (1, 40):
        texts = [text.encode()] * rows + [other.encode()]
        check_same_length(texts)
        width = len(texts[0])
        found = same_layout(np.array(texts).view(f"V{width}"))
        assert (found is not None) is is_laid_out
