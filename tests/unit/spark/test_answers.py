from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import TurbopumpError
from turbopump.spark.reading.answers import Answer, AnswerReader, UnusualAnswer
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, Serialize
from turbopump.wire.framing import encode
from turbopump.wire.headers import PullMessageAnswer


def answer(
    number: int = 100, following: int = 320, limits: tuple[int, int] = (0, 999), body: bytes = b"r"
) -> bytes:
    place = PullMessageAnswer(
        suggest_which_broker_id=0,
        next_begin_offset=following,
        min_offset=limits[0],
        max_offset=limits[1],
    )
    return encode(
        Command(0, opaque=number).answer(ResponseCode.SUCCESS, place, remark="FOUND", body=body)
    )


def read_all(reader: AnswerReader, frames: list[bytes]) -> list[Answer | int | str]:
    """Return what is read of frames that lie one behind the other, in a buffer with old bytes."""
    data = memoryview(bytearray(b"".join(frames) + frames[0]))
    end, at = len(data) - len(frames[0]), 0
    found: list[Answer | int | str] = []
    while at < end:
        try:
            found.append(each := reader.read(data, at, end))
        except (TurbopumpError, UnusualAnswer) as error:
            return [*found, str(error)]
        if isinstance(each, int):
            break
        at = each.end
    return found


class Usual(AnswerReader):
    """Reads every answer the usual way."""

    def read(self, data: memoryview, at: int, end: int) -> Answer | int:
        return self._read_usual(data, at, end)


def test_answers_that_are_alike_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, usual = AnswerReader(), Usual._read_usual
    read_at: list[int] = []

    def noted(self: AnswerReader, data: memoryview, at: int, end: int) -> Answer | int:
        read_at.append(at)
        return usual(self, data, at, end)

    monkeypatch.setattr(AnswerReader, "_read_usual", noted)
    frames = [answer(100 + n, 320 + n, body=bytes(n)) for n in range(9)]
    found = read_all(reader, [*frames, answer(limits=(0, 1000)), answer()[:-1]])
    ends = [sum(map(len, frames[: n + 1])) for n in range(9)]
    assert found[:9] == [Answer(100 + n, 320 + n, ends[n] - n, ends[n]) for n in range(9)]
    # Two to see that they are alike, one whose limits are others, one that is not whole.
    assert read_at == [0, ends[0], ends[8], ends[8] + len(answer(limits=(0, 1000)))]


SMALL = st.integers(-3, 12_000)
FRAMES = st.one_of(
    st.builds(answer, SMALL, SMALL, st.sampled_from([(0, 999), (0, 1000)]), st.binary(max_size=9)),
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
        assert read_all(AnswerReader(), changed) == read_all(Usual(), changed)


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
    assert read_all(AnswerReader(), frames) == read_all(Usual(), frames)
