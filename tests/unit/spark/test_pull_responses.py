from __future__ import annotations

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


def read_all(frames: list[bytes], *, shown: bool = False) -> list[PullResponse | int | str]:
    """Return what is read from adjacent frames, in a buffer with old bytes."""
    data = memoryview(bytearray(b"".join(frames) + frames[0]))
    end, at = len(data) - len(frames[0]), 0
    # What hooks see is read as all other responses are.
    reader = PullResponseReader(show=(lambda _: None) if shown else None)
    found: list[PullResponse | int | str] = []
    while True:
        try:
            found.append(other := reader.read(data, at, end))
        except (TurbopumpError, UnexpectedResponse) as error:
            return [*found, str(error)]
        if isinstance(other, int):
            return found
        at = other.end


def test_responses_are_read_where_they_are() -> None:
    frames = [answer(100 + n, 320 + n, body=bytes(n)) for n in range(9)]
    ends = [sum(map(len, frames[: n + 1])) for n in range(9)]
    expected = [PullResponse(100 + n, 320 + n, ends[n] - n, ends[n]) for n in range(9)]
    assert read_all(frames) == [*expected, ends[-1] + 8]
    data = memoryview(frames[8])
    assert PullResponseReader().read(data, 0, len(data) - 1) == len(data), "it is incomplete"


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
def test_unusual_headers(text: bytes, instead: bytes) -> None:
    header = answer()[8:-1]
    assert text in header
    odd = header.replace(text, instead)
    frame = (len(odd) + 5).to_bytes(4, "big") + len(odd).to_bytes(4, "big") + odd + b"r"
    assert read_all([frame] * 3) == read_all([frame] * 3, shown=True)


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
def test_all_are_read_as_hooks_see_them(frames: list[bytes], at: int, edit: bytes) -> None:
    for changed in (frames, [*[answer()] * 3, *frames], [answer(), answer(), edited(at, edit)]):
        assert read_all(changed) == read_all(changed, shown=True)


def edited(at: int, edit: bytes) -> bytes:
    frame = answer(body=bytes(40))
    at %= len(frame)
    return frame[:at] + edit + frame[at + len(edit) :]


@pytest.mark.parametrize(
    "length", [0, 3, 8, len(answer()) - 6, len(answer()) - 4, len(answer()) - 3, -1, 1 << 30]
)
def test_lengths_are_checked(length: int) -> None:
    wrong = length.to_bytes(4, "big", signed=True) + answer()[4:]
    frames = [answer(), answer(), wrong]
    assert read_all(frames) == read_all(frames, shown=True)
