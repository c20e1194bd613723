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
from turbopump.wire.frame_template import FrameTemplate, VaryingFields
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


def read_all(frames: list[bytes], *, usual: bool = False) -> list[PullResponse | int | str]:
    """Return what is read of frames that lie one behind the other, in a buffer with old bytes."""
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


def test_answers_that_are_alike_are_read_in_a_row() -> None:
    frames = [answer(100 + n, 320 + n, body=bytes(n)) for n in range(9)]
    ends = [sum(map(len, frames[: n + 1])) for n in range(9)]
    expected = [PullResponse(100 + n, 320 + n, ends[n] - n, ends[n]) for n in range(9)]
    others = answer(limits=(0, 1000)), answer()[:-1]
    data = memoryview(b"".join((*frames, *others)))
    reader = PullResponseReader()
    # Two, to see that they are alike.
    for number in range(2):
        assert list(reader.row(data, expected[number].start, len(data))) == []
        assert reader.read(data, sum(map(len, frames[:number])), len(data)) == expected[number]
    assert list(reader.row(data, ends[1], len(data))) == expected[2:]
    assert list(reader.row(data, ends[1], ends[4] - 1)) == expected[2:4]
    assert list(reader.row(data, ends[8], len(data))) == [], "its numbers are longer"
    assert list(reader.row(data, ends[8] + len(others[0]), len(data))) == [], "it is not whole"


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_a_queue_that_is_written_to_meanwhile_gives_answers_that_are_alike(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    made = noted_samples(monkeypatch)
    frames = [answer(100 + n, 320 + n, (n // every, 500 + n // every)) for n in range(10)]
    assert [each.number for each in read_all(frames)[:-1]] == [*range(100, 110)]  # type: ignore[union-attr]
    assert made == [frames[1][4:-1]]


def test_layouts_that_come_in_turn_are_known_when_they_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = noted_samples(monkeypatch)
    frames = [answer(100 + n, 320 + n, (0, 10 ** (n % 2))) for n in range(10)]
    assert len(read_all(frames)) == 11
    assert made == [frames[2][4:-1], frames[3][4:-1]]


def test_layouts_that_never_come_again_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    made = noted_samples(monkeypatch)
    frames = [answer(100 + n, 320 + n, (0, 10**n)) for n in range(10)]
    assert len(read_all(frames)) == 11
    assert made == []


def noted_samples(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the list of those that others are compared with."""
    samples: list[bytes] = []
    from_sample = FrameTemplate.from_sample

    def noted(sample: bytes, other: bytes, varying: VaryingFields) -> FrameTemplate | None:
        samples.append(sample)
        return from_sample(sample, other, varying)

    monkeypatch.setattr(FrameTemplate, "from_sample", noted)
    return samples


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
