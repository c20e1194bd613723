"""Prepared responses to pulls: the same bytes as those encoded the usual way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import request
from turbopump.wire.framing import encode
from turbopump.wire.headers import PullMessageAnswer
from turbopump.wire.prepared_frames import PullResponseFrames

OFFSETS = st.integers(0, 2**63 - 1)
REMARKS = st.sampled_from(["OFFSET_OVERFLOW_ONE", "NO_MESSAGE_IN_QUEUE", '"minOffset":"0"', "ü"])


CODES = st.sampled_from([ResponseCode.PULL_NOT_FOUND, ResponseCode.SUCCESS])
OPAQUES = st.integers(-(2**31), 2**31 - 1)
BODIES = st.binary(max_size=9)


@given(CODES, st.integers(0, 7), REMARKS, OPAQUES, st.tuples(OFFSETS, OFFSETS, OFFSETS), BODIES)
def test_the_bytes_equal_those_of_a_response_encoded_the_usual_way(
    code: ResponseCode,
    broker_id: int,
    remark: str,
    opaque: int,
    offsets: tuple[int, int, int],
    body: bytes,
) -> None:
    answer = PullMessageAnswer(
        suggest_which_broker_id=broker_id,
        next_begin_offset=offsets[0],
        min_offset=offsets[1],
        max_offset=offsets[2],
    )
    asked = replace(request(11), opaque=opaque)
    usual = encode(asked.answer(code, answer, remark=remark, body=body))
    made = PullResponseFrames(code, broker_id, remark)
    assert made.frame(opaque, *offsets, body_bytes=len(body)) + body == usual
