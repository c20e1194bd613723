"""Prepared answers to pulls: the same bytes as those made the usual way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import request
from turbopump.wire.framing import encode
from turbopump.wire.headers import PullMessageAnswer
from turbopump.wire.pull_answers import NothingNewAnswers

OFFSETS = st.integers(0, 2**63 - 1)
REMARKS = st.sampled_from(["OFFSET_OVERFLOW_ONE", "NO_MESSAGE_IN_QUEUE", '"minOffset":"0"', "ü"])


@given(st.integers(0, 7), REMARKS, st.integers(0, 2**31 - 1), OFFSETS, OFFSETS, OFFSETS)
def test_the_bytes_are_those_of_an_answer_made_the_usual_way(
    broker_id: int, remark: str, opaque: int, next_offset: int, min_offset: int, max_offset: int
) -> None:
    answer = PullMessageAnswer(
        suggest_which_broker_id=broker_id,
        next_begin_offset=next_offset,
        min_offset=min_offset,
        max_offset=max_offset,
    )
    asked = replace(request(11), opaque=opaque)
    usual = encode(asked.answer(ResponseCode.PULL_NOT_FOUND, answer, remark=remark))
    made = NothingNewAnswers(broker_id, remark)
    assert made.frame(opaque, next_offset, min_offset, max_offset) == usual
