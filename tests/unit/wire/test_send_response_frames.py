from __future__ import annotations

from array import array
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import request
from turbopump.wire.framing import encode
from turbopump.wire.headers import BrokerTraits, SendMessageAnswer
from turbopump.wire.hosts import Host, host
from turbopump.wire.ids import offset_id
from turbopump.wire.prepared_frames import SendResponseFrames

REGIONS = (
    st.none()
    | st.text(max_size=20)
    | st.sampled_from(['"msgId":""', '"opaque":0', '"{}%s', "eu%b"])
)
HOSTS = st.sampled_from([host("10.20.30.40", 10911), host("::1", 1)])
POSITIONS = st.integers(0, 2**63 - 1)


@given(
    st.builds(BrokerTraits, region=REGIONS, trace_on=st.none() | st.booleans()),
    HOSTS,
    st.integers(0, 2**31 - 1),
    POSITIONS,
    st.integers(0, 2**31 - 1),
    POSITIONS,
)
def test_the_bytes_equal_those_of_a_response_encoded_the_usual_way(
    traits: BrokerTraits, store_host: Host, opaque: int, position: int, queue: int, offset: int
) -> None:
    at = PhysicalOffset(position)
    answer = SendMessageAnswer(
        region=traits.region,
        trace_on=traits.trace_on,
        msg_id=offset_id(store_host, at),
        queue_id=queue,
        queue_offset=offset,
    )
    usual = encode(replace(request(310), opaque=opaque).answer(ResponseCode.SUCCESS, answer))
    made = SendResponseFrames(traits.to_ext_fields(), store_host)
    assert made.frame(opaque, at, queue, QueueOffset(offset)) == usual
    assert made.batch_frame(opaque, [at], queue, QueueOffset(offset)) == usual


@given(HOSTS, st.lists(POSITIONS, min_size=1, max_size=5))
def test_the_bytes_of_batches_equal_those_of_a_response_encoded_the_usual_way(
    store_host: Host, positions: list[int]
) -> None:
    traits = BrokerTraits(region="%d", trace_on=True).to_ext_fields()
    offsets = [PhysicalOffset(position) for position in positions]
    ids = ",".join(offset_id(store_host, offset) for offset in offsets)
    fields = SendMessageAnswer.fields_of(traits, ids, 3, 7)
    usual = encode(replace(request(320), opaque=9).answer(ResponseCode.SUCCESS, fields))
    made = SendResponseFrames(traits, store_host)
    assert made.batch_frame(9, offsets, 3, QueueOffset(7)) == usual
    assert made.batch_frame(9, cast(Any, array("q", positions)), 3, QueueOffset(7)) == usual
