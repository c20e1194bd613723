"""Prepared send requests: the same bytes as those encoded the usual way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from turbopump.errors import InvalidArgument
from turbopump.wire.command import FLAG_ONEWAY, Buffer, request
from turbopump.wire.framing import FRAME_BYTES_MAX, encode
from turbopump.wire.headers import PullMessage, SendMessage, SendMessageV2
from turbopump.wire.prepared_requests import PullRequest, SendKind, SendRequest, send_kind

NAMES = st.text(max_size=12) | st.sampled_from(
    ["%d%%s", '"e":"0"', '"opaque":0', "\x01\x02", "é\\"]
)
NUMBERS = st.integers(-(2**31), 2**31 - 1)


HEADERS = st.builds(
    SendMessageV2,
    producer_group=NAMES,
    topic=NAMES,
    default_topic=st.just("TBW102"),
    default_topic_queue_nums=st.integers(1, 64),
    queue_id=NUMBERS,
    sys_flag=NUMBERS,
    born_timestamp=st.integers(0, 2**62),
    flag=NUMBERS,
    properties=NAMES,
    reconsume_times=st.just(0),
    unit_mode=st.just(False),
    max_reconsume_times=st.none(),
    batch=st.booleans(),
    broker_name=NAMES,
)
BODIES = st.binary(max_size=20) | st.sampled_from([b"x" * 5000, bytearray(b"abc")])


@given(HEADERS, BODIES, st.integers(0, 2**31 - 1), st.sampled_from([0, FLAG_ONEWAY]))
def test_the_bytes_are_those_of_a_request_encoded_the_usual_way(
    header: SendMessage, body: Buffer, opaque: int, flag: int
) -> None:
    usual = replace(request(320 if header.batch else 310, header, body), opaque=opaque, flag=flag)
    kind = SendKind(header)
    numbers = (header.queue_id, header.sys_flag, header.born_timestamp, header.flag)
    made = SendRequest(kind, *numbers, header.properties or "", body)
    assert b"".join(made.frame_parts(opaque, flag, FRAME_BYTES_MAX)) == encode(usual)
    assert replace(made.command(), opaque=opaque, flag=flag) == usual


def test_a_long_body_is_not_copied() -> None:
    body = b"x" * 100_000
    made = SendRequest(send_kind("g", "T", "b", 4, False), 0, 0, 0, 0, "", body)
    assert made.frame_parts(1, 0, FRAME_BYTES_MAX)[1] is body


def test_properties_that_are_not_unicode_are_rejected() -> None:
    kind = send_kind("g", "T", "b", 4, False)
    made = SendRequest(kind, 0, 0, 0, 0, "name\x01\ud800", b"x")
    with pytest.raises(InvalidArgument, match="properties must be UTF-8 text"):
        made.frame_parts(1, 0, FRAME_BYTES_MAX)


def test_a_frame_above_the_limit_is_rejected() -> None:
    made = SendRequest(send_kind("g", "T", "b", 4, False), 0, 0, 0, 0, "", b"x" * 900)
    assert made.frame_parts(1, 0, 2000)
    with pytest.raises(InvalidArgument, match="a frame must be at most 1000 bytes, got"):
        made.frame_parts(1, 0, 1000)


@given(
    st.builds(
        PullMessage,
        consumer_group=NAMES,
        topic=NAMES,
        queue_id=NUMBERS,
        queue_offset=st.integers(0, 2**62),
        max_msg_nums=NUMBERS,
        sys_flag=NUMBERS,
        commit_offset=st.integers(0, 2**62),
        suspend_timeout_millis=st.integers(0, 2**62),
        subscription=st.none() | NAMES,
        sub_version=st.integers(0, 2**62),
        expression_type=st.none() | NAMES,
        bulk_pull=st.none() | st.booleans(),
        broker_name=st.none() | NAMES,
    ),
    st.integers(0, 2**31 - 1),
)
def test_pulls_are_those_that_are_encoded_the_usual_way(header: PullMessage, opaque: int) -> None:
    usual = encode(replace(request(11, header), opaque=opaque))
    assert b"".join(PullRequest(header).frame_parts(opaque, 0, FRAME_BYTES_MAX)) == usual
    with pytest.raises(InvalidArgument, match="a frame must be at most 100 bytes, got"):
        PullRequest(header).frame_parts(opaque, 0, 100)
