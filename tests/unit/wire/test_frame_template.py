from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import WireError
from turbopump.wire.frame_template import FrameTemplate, Numbers, VaryingFields
from turbopump.wire.framing import decode
from turbopump.wire.headers import PullMessage

FIELDS = {
    "consumerGroup": "g",
    "topic": 'a"queueOffset":"7"',
    "queueId": "0",
    "queueOffset": "320",
    "maxMsgNums": "32",
    "sysFlag": "4",
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subVersion": "0",
}


def read_numbers(frame: bytes) -> Numbers:
    command = decode(frame)
    header = PullMessage.from_ext_fields(command.ext_fields)
    return header.queue_offset, header.max_msg_nums, command.opaque


VARYING = VaryingFields(
    (
        re.compile(rb'"queueOffset":"([0-9]+)'),
        re.compile(rb'"maxMsgNums":"([0-9]+)'),
        re.compile(rb'"opaque":([0-9]+)'),
    ),
    read_numbers,
)


def framed(header: bytes) -> bytes:
    return (len(header) + 4).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header


def pull(
    offset: object = "320",
    count: object = "32",
    opaque: object = 100,
    *,
    end: str = "",
    begin: str = "",
    separators: tuple[str, str] = (",", ":"),
) -> bytes:
    """Return a pull whose fields are followed by some text, and its other members preceded by."""
    fields = json.dumps(
        FIELDS | {"queueOffset": offset, "maxMsgNums": count}, separators=separators
    )
    rest = json.dumps({"flag": 0, "opaque": opaque}, separators=separators)[1:]
    return framed(f'{{"code":11,{begin}"extFields":{fields[:-1]}{end}}},{rest}'.encode())


def usual(frame: bytes) -> Numbers | None:
    try:
        return VARYING.read(frame)
    except WireError:
        return None


def test_numbers_are_read_without_the_texts_around_them() -> None:
    sample, other = pull(), pull("999", "10", 123)
    alike = FrameTemplate.from_sample(sample, other, VARYING)
    assert alike is not None
    assert alike.numbers(b"before" + other, 6) == (999, 10, 123)
    assert alike.numbers(other, 1) is None
    assert alike.numbers(other[:-1]) is None


@pytest.mark.parametrize(
    "other",
    [
        pull("1320"),
        pull("-20"),
        pull("032"),
        pull("3 0"),
        pull("+20"),
        pull("3_0"),
        pull("٣"),
        pull(opaque=99),
        pull().replace(b'"opaque":100', b'"opaque":010'),
        pull().replace(b'"opaque":100', b'"opaque":1e2'),
        pull().replace(b'"queueId":"0"', b'"queueId":"1"'),
        pull()[:-1] + b"]",
    ],
)
def test_what_differs_in_anything_else_is_not_alike(other: bytes) -> None:
    alike = FrameTemplate.from_sample(pull(), pull("999"), VARYING)
    assert alike is not None
    assert alike.numbers(other) is None
    assert FrameTemplate.from_sample(pull(), other, VARYING) is None


@pytest.mark.parametrize(
    "how",
    [
        {"end": ',"queueOffset":"320"'},
        {"end": ',"queueOffset":"999"'},
        {"end": ',"queueOffset":"888"'},
        {"offset": "1" * 20},
        {"offset": "1" * 5000, "end": ',"queueOffset":"320"'},
        {"end": ',"queue\\u004fffset":"320"'},
        {"end": ',"maxMsgNums" : "32"'},
        {"begin": '"opaque":100,'},
        {"begin": '"other":{"opaque":100},'},
        {"begin": '"other":{"queueOffset":"320"},'},
        {"separators": (", ", ": ")},
        {"offset": 320},
        {"count": "9999999999"},
        {"opaque": 2**31 - 1},
    ],
)
def test_numbers_that_stand_elsewhere_too_or_are_too_large_are_read_the_usual_way(
    how: dict[str, Any],
) -> None:
    assert FrameTemplate.from_sample(pull(**how), pull(**how), VARYING) is None


NUMBERS = st.one_of(
    st.integers(-5, 10**12).map(str),
    st.integers(-5, 10**12),
    st.sampled_from(["", "007", "+7", "x", "1.0", 1.0, None, "99999999999999999999"]),
)
PULLS = st.builds(
    pull,
    NUMBERS,
    NUMBERS,
    st.one_of(st.integers(-5, 2**32), NUMBERS),
    end=st.sampled_from(["", "", ',"queueOffset":"11"', ',"max\\u004dsgNums":"5"', ',"a":"ü"']),
    begin=st.sampled_from(["", "", '"opaque":7,', '"other":{"opaque":7},']),
    separators=st.sampled_from([(",", ":"), (",", ":"), (", ", ": ")]),
)


@given(PULLS, PULLS, st.binary(min_size=1, max_size=3), st.integers(8, 400))
def test_all_that_is_alike_is_read_as_usual(
    sample: bytes, other: bytes, edit: bytes, at: int
) -> None:
    edited = sample[:at] + edit + sample[at + len(edit) :]
    for each in (sample, other, edited[: len(sample)]):
        alike = FrameTemplate.from_sample(sample, each, VARYING)
        if alike is not None:
            assert alike.numbers(each) == usual(each) is not None
            assert alike.numbers(sample) in (usual(sample), None)


DIGITS = st.text("0123456789", min_size=1, max_size=19)


@given(DIGITS, DIGITS, DIGITS, st.data())
def test_other_digits_are_read_as_usual(
    offset: str, count: str, opaque: str, data: st.DataObject
) -> None:
    texts = (offset, count, opaque)
    others = [data.draw(st.text("0123456789", min_size=len(t), max_size=len(t))) for t in texts]
    sample, other = (
        framed(pull(first, second)[8:].replace(b'"opaque":100', f'"opaque":{third}'.encode()))
        for first, second, third in (texts, others)
    )
    alike = FrameTemplate.from_sample(sample, other, VARYING)
    if alike is not None:
        assert alike.numbers(other) == usual(other) is not None
