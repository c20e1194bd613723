"""The frames that the core writes: the bytes of those encoded the usual way, in both versions."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cores import VERSIONS, needs_both, outcome
from turbopump.errors import InvalidArgument
from turbopump.message import PhysicalOffset
from turbopump.wire.codes import VERSION, Language
from turbopump.wire.command import Command, Serialize, request
from turbopump.wire.framing import FRAME_BYTES_MAX, HEADER_BYTES_MAX, encode
from turbopump.wire.headers import (
    BrokerTraits,
    PullMessage,
    PullMessageAnswer,
    SendMessageAnswer,
    SendMessageV2,
)
from turbopump.wire.hosts import host
from turbopump.wire.ids import offset_id
from turbopump.wire.names import TEMPLATE_TOPIC
from vectors import frames

TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        "%d%%s",
        '"e":"0"',
        '"opaque":0',
        "\x01\x02",
        "é\\/",
        "\x00\x08\x1f\x7f\u2028\U0001f600",
        "x" * 3000,
    ]
)
I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
OFFSETS = st.integers(0, 2**63 - 1)
SERIALIZE = st.sampled_from(Serialize)
BODIES = st.binary(max_size=20) | st.sampled_from(
    [b"x" * 4096, b"x" * 4097, bytearray(b"abc"), memoryview(b"abcdef")[1:4]]
)


@pytest.mark.parametrize("core", VERSIONS)
def test_constants_are_those_of_the_wire(core: Any) -> None:
    assert core.VERSION == VERSION
    assert tuple(each.name for each in sorted(Language)) == core.LANGUAGES
    assert core.FRAME_BYTES_MAX == FRAME_BYTES_MAX
    assert core.HEADER_BYTES_MAX == HEADER_BYTES_MAX
    assert TEMPLATE_TOPIC == "TBW102"


SENDS = st.builds(
    SendMessageV2,
    producer_group=TEXTS,
    topic=TEXTS,
    default_topic=st.just("TBW102") | TEXTS,
    default_topic_queue_nums=I32,
    queue_id=I32,
    sys_flag=I32,
    born_timestamp=I64,
    flag=I32,
    properties=TEXTS,
    reconsume_times=st.just(0),
    unit_mode=st.booleans(),
    batch=st.booleans(),
    broker_name=TEXTS | st.none(),
)


@given(SENDS, BODIES, I32, st.sampled_from([0, 2]), st.booleans())
def test_send_requests(header: Any, body: Any, opaque: int, flag: int, as_bytes: bool) -> None:
    code = 320 if header.batch else 310
    usual = encode(replace(request(code, header, body), opaque=opaque, flag=flag))
    for core in VERSIONS:
        template = core.SendTemplate(
            header.producer_group,
            header.topic,
            header.broker_name,
            default_topic_queue_nums=header.default_topic_queue_nums,
            is_batch=header.batch,
            unit_mode=header.unit_mode,
            default_topic=header.default_topic,
        )
        numbers = header.queue_id, header.sys_flag, header.born_timestamp, header.flag
        properties = header.properties.encode() if as_bytes else header.properties
        parts = template.frame(opaque, *numbers, properties, flag, body, FRAME_BYTES_MAX)
        assert b"".join(parts) == usual
        assert template.code == code
        if len(body) > 4096:
            assert parts[1] is body
        else:
            assert len(parts) == 1


def template_of(core: Any) -> Any:
    return core.SendTemplate("g", "T", "b", default_topic_queue_nums=4)


@pytest.mark.parametrize("properties", ["a\x01\ud800", b"a\x01\xff", b"\xed\xa0\x80", b"\xc3"])
def test_properties_that_are_not_utf8(properties: Any) -> None:
    found = {
        outcome(template_of(core).frame, 1, 0, 0, 0, 0, properties, 0, b"x", 2000)
        for core in VERSIONS
    }
    ((kind, text, _),) = found
    assert kind == "InvalidArgument"
    assert text.startswith("tags, keys and properties must be UTF-8 text: 'utf-8' codec can't")


@pytest.mark.parametrize("core", VERSIONS)
def test_a_send_above_the_limit_is_rejected(core: Any) -> None:
    template = template_of(core)
    (frame,) = template.frame(1, 0, 0, 0, 0, "", 0, b"x" * 900, 2000)
    limit = len(frame) - 4
    assert template.frame(1, 0, 0, 0, 0, "", 0, b"x" * 900, limit) == [frame]
    with pytest.raises(InvalidArgument, match=f"at most {limit - 1} bytes, got {limit}"):
        template.frame(1, 0, 0, 0, 0, "", 0, b"x" * 900, limit - 1)


@pytest.mark.parametrize("core", VERSIONS)
def test_names_that_are_not_utf8_are_rejected(core: Any) -> None:
    with pytest.raises(UnicodeEncodeError):
        core.SendTemplate("g", "T\ud800", "b", default_topic_queue_nums=4)
    with pytest.raises(UnicodeEncodeError):
        core.PullResponses(0, 1, "\ud800")


TRAITS = st.builds(BrokerTraits, region=TEXTS | st.none(), trace_on=st.booleans() | st.none())
HOSTS = st.sampled_from([host("10.20.30.40", 10911), host("::1", 65535)])


@given(TRAITS, HOSTS, I32, st.lists(OFFSETS, min_size=1, max_size=40), I32, I64, SERIALIZE)
def test_send_responses(
    traits: BrokerTraits,
    store: Any,
    opaque: int,
    positions: list[int],
    queue_id: int,
    offset: int,
    serialize: Serialize,
) -> None:
    answer = SendMessageAnswer(
        region=traits.region,
        trace_on=traits.trace_on,
        msg_id=",".join(offset_id(store, PhysicalOffset(each)) for each in positions),
        queue_id=queue_id,
        queue_offset=offset,
    )
    usual = encode(Command(310, opaque=opaque, serialize=serialize).answer(0, answer))
    for core in VERSIONS:
        responses = core.SendResponses(traits.to_ext_fields(), store.ip, store.port)
        for given_as in (positions, array("q", positions), tuple(positions)):
            made = responses.batch_frame(opaque, given_as, queue_id, offset, serialize)
            assert made == usual
        if len(positions) == 1:
            assert responses.frame(opaque, positions[0], queue_id, offset, serialize) == usual


@pytest.mark.parametrize("core", VERSIONS)
def test_many_send_responses(core: Any) -> None:
    stream = b"".join(bytes.fromhex(vector["hex"]) for vector in frames())
    requests = [
        frame
        for frame in core.FrameDecoder(typed_requests=True).feed(stream)
        if type(frame).__name__ == "SendFrame"
    ]
    assert {request.flag & 2 for request in requests} == {0, 2}
    responses = core.SendResponses({"MSG_REGION": "r"}, b"\x7f\0\0\1", 10911)
    positions: list[Any] = [
        [at, at + 100] if request.batch else at for at, request in enumerate(requests)
    ]
    numbers = range(len(requests))
    wanted = [
        responses.batch_frame(
            request.opaque, at if isinstance(at, list) else [at], queue, queue, request.serialize
        )
        for request, at, queue in zip(requests, positions, numbers, strict=True)
        if not request.flag & 2
    ]
    assert responses.frames(requests, positions, numbers, numbers) == b"".join(wanted)
    with pytest.raises(ValueError, match="zip"):
        responses.frames(requests, positions[1:], numbers, numbers)


PULLS = st.builds(
    PullMessage,
    consumer_group=TEXTS,
    topic=TEXTS,
    queue_id=I32,
    queue_offset=I64,
    max_msg_nums=I32,
    sys_flag=I32,
    commit_offset=I64,
    suspend_timeout_millis=I64,
    subscription=TEXTS | st.none(),
    sub_version=I64,
    expression_type=TEXTS | st.none(),
    bulk_pull=st.booleans() | st.none(),
    broker_name=TEXTS | st.none(),
)


@given(PULLS, I32)
def test_pull_requests(header: PullMessage, opaque: int) -> None:
    usual = encode(replace(request(11, header), opaque=opaque))
    for core in VERSIONS:
        requests = core.PullRequests(
            header.consumer_group,
            header.topic,
            sys_flag=header.sys_flag,
            commit_offset=header.commit_offset,
            suspend_timeout_ms=header.suspend_timeout_millis,
            subscription=header.subscription,
            sub_version=header.sub_version,
            expression_type=header.expression_type,
            bulk_pull=header.bulk_pull,
            broker=header.broker_name,
        )
        numbers = header.queue_id, header.queue_offset, header.max_msg_nums
        assert requests.frame(opaque, *numbers) == usual


@given(
    st.sampled_from([0, 19, 20, 21]),
    I64,
    st.none() | TEXTS,
    I32,
    st.tuples(I64, I64, I64),
    st.binary(max_size=9),
    SERIALIZE,
)
def test_pull_responses(
    code: int,
    broker_id: int,
    remark: str | None,
    opaque: int,
    offsets: tuple[int, int, int],
    body: bytes,
    serialize: Serialize,
) -> None:
    answer = PullMessageAnswer(
        suggest_which_broker_id=broker_id,
        next_begin_offset=offsets[0],
        min_offset=offsets[1],
        max_offset=offsets[2],
    )
    asked = Command(11, opaque=opaque, serialize=serialize)
    usual = encode(asked.answer(code, answer, remark=remark, body=body))
    for core in VERSIONS:
        made = core.PullResponses(code, broker_id, remark)
        assert made.frame(opaque, *offsets, len(body), serialize) + body == usual


@needs_both
def test_objects_that_were_not_initialized_raise() -> None:
    compiled = VERSIONS[1]
    for kind, arguments in (
        (compiled.SendTemplate, (1, 0, 0, 0, 0, "", 0, b"", 100)),
        (compiled.SendResponses, (1, 0, 0, 0)),
        (compiled.PullRequests, (1, 0, 0, 0)),
        (compiled.PullResponses, (1, 0, 0, 0)),
    ):
        with pytest.raises(InvalidArgument, match="must be initialized"):
            kind.__new__(kind).frame(*arguments)
