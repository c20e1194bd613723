from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import TurbopumpError
from turbopump.spark.reading.pull_responses import (
    PullResponse,
    PullResponseReader,
    UnexpectedResponse,
)
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, Serialize
from turbopump.wire.framing import encode
from turbopump.wire.headers import PullMessageAnswer


def answer(
    number: int = 100,
    following: int = 320,
    limits: tuple[int, int] = (0, 999),
    body: bytes = b"r",
    remark: str = "FOUND",
) -> bytes:
    place = PullMessageAnswer(
        suggest_which_broker_id=0,
        next_begin_offset=following,
        min_offset=limits[0],
        max_offset=limits[1],
    )
    return encode(
        Command(0, opaque=number).answer(ResponseCode.SUCCESS, place, remark=remark, body=body)
    )


def read_all(frames: list[bytes], *, usual: bool = False) -> list[PullResponse | int | str]:
    """Return what is read from adjacent frames, in a buffer with old bytes."""
    data = memoryview(bytearray(b"".join(frames) + frames[0]))
    end, at = len(data) - len(frames[0]), 0
    reader = PullResponseReader()
    found: list[PullResponse | int | str] = []
    while True:
        for each in () if usual else reader.row(data, at, end):
            found.append(each)
            at = each.end
        try:
            found.append(other := reader.read(data, at, end))
        except (TurbopumpError, UnexpectedResponse) as error:
            return [*found, str(error)]
        if isinstance(other, int):
            return found
        at = other.end


def test_responses_of_the_same_layout_are_read_in_a_row() -> None:
    frames = [answer(100 + n, 320 + n, body=bytes(n)) for n in range(9)]
    ends = [sum(map(len, frames[: n + 1])) for n in range(9)]
    expected = [PullResponse(100 + n, 320 + n, ends[n] - n, ends[n]) for n in range(9)]
    others = answer(limits=(0, 1000)), answer()[:-1]
    data = memoryview(b"".join((*frames, *others)))
    reader = PullResponseReader()
    assert reader.row(data, 0, len(data)) == []
    assert reader.read(data, 0, len(data)) == expected[0]
    longer = PullResponse(100, 320, len(data) - len(others[1]) - 1, len(data) - len(others[1]))
    assert reader.row(data, ends[0], len(data)) == [*expected[1:], longer]
    assert reader.row(data, ends[0], ends[4] - 1) == expected[1:4]
    assert reader.row(data, longer.end, len(data)) == [], "it is incomplete"


def usual_reads(monkeypatch: pytest.MonkeyPatch, frames: list[bytes]) -> int:
    """Return how many frames are not read in a row, and check that all are read."""
    calls = 0
    read = PullResponseReader.read

    def counted(self: PullResponseReader, *where: Any) -> PullResponse | int:
        nonlocal calls
        calls += 1
        return read(self, *where)

    monkeypatch.setattr(PullResponseReader, "read", counted)
    assert len(read_all(frames)) == len(frames) + 1
    return calls - 1


def test_numbers_of_any_length_have_the_same_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [answer(10**n, 10 ** (2 * n), (n, 10**n)) for n in range(9)]
    assert usual_reads(monkeypatch, frames) == 1


def test_alternating_layouts_are_recognised_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = [answer(100 + n, remark=f"FOUND {n % 3}") for n in range(12)]
    assert usual_reads(monkeypatch, frames) == 3


def test_few_layouts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [answer(100 + n, remark=f"FOUND {n % 10}") for n in range(20)]
    assert usual_reads(monkeypatch, frames) == 20


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        (b'"opaque":', b'"other":{"opaque":7},"opaque":'),
        (b'"opaque":', b'"opaque":7,"opaque":'),
        (b'"extFields":{', b'"extFields":{"nextBeginOffset":"7",'),
        (b'"nextBeginOffset":"320"', b'"nextBeginOffset":"7","next\\u0042eginOffset":"320"'),
        (b'"nextBeginOffset":"320"', b'"nextBeginOffset":320'),
        (b'"minOffset":"0"', b'"minOffset":"-1"'),
        (b'"minOffset":"0"', b'"minOffset" : "0"'),
        (b'"opaque":100', b'"opaque":2147483647'),
    ],
)
def test_numbers_that_stand_elsewhere_too_are_read_the_usual_way(
    monkeypatch: pytest.MonkeyPatch, text: bytes, instead: bytes
) -> None:
    header = answer()[8:-1]
    assert text in header
    odd = header.replace(text, instead)
    frame = (len(odd) + 5).to_bytes(4, "big") + len(odd).to_bytes(4, "big") + odd + b"r"
    assert read_all([frame] * 3) == read_all([frame] * 3, usual=True)
    assert usual_reads(monkeypatch, [frame] * 3) == 3


SMALL = st.integers(-3, 12_000)
LIMITS = st.sampled_from([(0, 999), (5, 998), (0, 1000), (-1, 0)])
FRAMES = st.one_of(
    st.builds(answer, SMALL, SMALL, LIMITS, st.binary(max_size=9)),
    st.builds(
        lambda code, flag, fields, serialize: encode(
            Command(code, flag, 100, ext_fields=fields, serialize=serialize)
        ),
        st.sampled_from([0, 0, 19]),
        st.integers(0, 3),
        st.sampled_from(
            [
                {
                    "suggestWhichBrokerId": broker_id,
                    "nextBeginOffset": text,
                    "minOffset": "0",
                    "maxOffset": "9",
                }
                for text in ("320", "032", "-20", "x")
                for broker_id in "01"
            ]
        ),
        st.sampled_from(Serialize),
    ),
)


@given(st.lists(FRAMES, min_size=1, max_size=8), st.integers(0, 5000), st.binary(max_size=2))
def test_all_are_read_as_usual(frames: list[bytes], at: int, edit: bytes) -> None:
    for changed in (frames, [*[answer()] * 3, *frames], [answer(), answer(), edited(at, edit)]):
        assert read_all(changed) == read_all(changed, usual=True)


def edited(at: int, edit: bytes) -> bytes:
    frame = answer(body=bytes(40))
    at %= len(frame)
    return frame[:at] + edit + frame[at + len(edit) :]


@pytest.mark.parametrize(
    "length", [0, 3, 8, len(answer()) - 6, len(answer()) - 4, len(answer()) - 3, -1, 1 << 30]
)
def test_lengths_are_checked_as_usual(length: int) -> None:
    wrong = length.to_bytes(4, "big", signed=True) + answer()[4:]
    frames = [answer(), answer(), wrong]
    assert read_all(frames) == read_all(frames, usual=True)
