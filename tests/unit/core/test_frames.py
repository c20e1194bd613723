"""Cutting and typing frames: both versions equal each other and the general decoder."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cores import VERSIONS, mutated, needs_both, outcome, values
from turbopump.errors import FrameError
from turbopump.wire import headers
from turbopump.wire.codes import Language
from turbopump.wire.command import Command, Serialize, decode_header, encode_header
from turbopump.wire.schema import Header
from vectors import case, frames

RECORDED = [bytes.fromhex(vector["hex"]) for vector in frames()]
STREAM = b"".join(RECORDED)
NAMES: dict[str, tuple[type[Header], dict[str, str]]] = {
    "SendFrame": (headers.SendMessageV2, {"flag": "message_flag"}),
    "PullFrame": (headers.PullMessage, {}),
    "SendResponseFrame": (headers.SendMessageAnswer, {}),
    "PullResponseFrame": (headers.PullMessageAnswer, {}),
}
# Of the fields of a send, these have a value although they are missing.
DEFAULTS = {"properties": "", "reconsume_times": 0, "unit_mode": False, "batch": False}


def framed(header: bytes, serialize: int = 0, body: bytes = b"") -> bytes:
    mark = (serialize << 24 | len(header)).to_bytes(4, "big")
    return (4 + len(header) + len(body)).to_bytes(4, "big") + mark + header + body


def typed_decoder(core: Any, **options: Any) -> Any:
    return core.FrameDecoder(**{"typed_requests": True, "typed_responses": True, **options})


def read(core: Any, chunks: list[bytes], **options: Any) -> list[Any]:
    """Return all that a decoder shows of a stream."""
    decoder = typed_decoder(core, **options)
    found: list[Any] = []
    for chunk in chunks:
        taken = decoder.feed(chunk)
        while True:
            try:
                frame = next(taken)
            except StopIteration:
                break
            except FrameError as error:
                found.append((type(error), error.reason, error.position))
                break
            found.append((values(frame), decoder.held_bytes))
        found.append((decoder.pending_bytes, decoder.held_bytes))
    return found


def check(frame: Any) -> None:
    """Demand that the general decoder reads the same from a typed frame."""
    command = decode_header(frame.header, frame.serialize, frame.body)
    for name in ("code", "flag", "opaque", "language", "version", "remark", "body", "serialize"):
        assert getattr(frame, name) == getattr(command, name), name
    kind, renamed = NAMES[type(frame).__name__]
    wanted = kind.from_ext_fields(command.ext_fields)
    assert command.is_response is type(frame).__name__.endswith("ResponseFrame")
    for name in kind.__struct_fields__:
        value = getattr(wanted, name)
        if value is None and kind is headers.SendMessageV2:
            value = DEFAULTS.get(name)
        if name == "properties" and kind is headers.SendMessageV2:
            value = value.encode()
        got = getattr(frame, renamed.get(name, name))
        assert (got, type(got)) == (value, type(value)), name


# --- recorded frames ------------------------------------------------------------------------------


@pytest.mark.parametrize("core", VERSIONS)
def test_recorded_sends_and_pulls_are_typed(core: Any) -> None:
    kinds: Counter[str] = Counter()
    for vector, frame in zip(frames(), RECORDED, strict=True):
        with case(vector["name"]):
            (cut,) = typed_decoder(core).feed(frame)
            kind = type(cut).__name__
            kinds[kind] += 1
            fields = vector["header"].get("extFields") or {}
            if kind != "Frame":
                check(cut)
            else:
                is_signed = "Signature" in fields
                assert vector["flag"] & 1 or vector["code"] not in {11, 310, 320} or is_signed
                assert not {"msgId", "minOffset"} & set(fields) or not vector["flag"] & 1
    assert all(kinds[kind] >= 20 for kind in NAMES), kinds


@pytest.mark.parametrize("core", VERSIONS)
def test_only_the_kinds_that_are_wanted_are_typed(core: Any) -> None:
    def kinds(**options: bool) -> set[str]:
        return {type(frame).__name__ for frame in core.FrameDecoder(**options).feed(STREAM)}

    assert kinds() == {"Frame"}
    assert kinds(typed_requests=True) == {"Frame", "SendFrame", "PullFrame"}
    responses = {"Frame", "SendResponseFrame", "PullResponseFrame"}
    assert kinds(typed_responses=True) == responses


@pytest.mark.parametrize("core", VERSIONS)
def test_plain_frames_keep_everything(core: Any) -> None:
    at = 0
    for frame, cut in zip(RECORDED, core.FrameDecoder().feed(STREAM), strict=True):
        assert framed(cut.header, cut.serialize, bytes(cut.body)) == frame
        assert cut.position == at + 8
        at += len(frame)


@needs_both
@given(st.lists(st.integers(0, len(STREAM)), max_size=60), st.booleans(), st.booleans())
def test_versions_cut_chunks_equally(cuts: list[int], requests: bool, responses: bool) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in pairwise(edges)]
    options = {"typed_requests": requests, "typed_responses": responses}
    first, second = (read(core, chunks, **options) for core in VERSIONS)
    assert first == second


@needs_both
@given(st.data())
def test_versions_read_damaged_streams_equally(data: st.DataObject) -> None:
    some = data.draw(st.lists(st.sampled_from(RECORDED), min_size=1, max_size=4))
    stream = data.draw(mutated(b"".join(some)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    chunks = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]
    options = {"frame_bytes_max": data.draw(st.sampled_from([300, 4000, 2**24, 2**31, 2**62, -1]))}
    first, second = (read(core, chunks, **options) for core in VERSIONS)
    assert first == second


@needs_both
@pytest.mark.slow
@pytest.mark.parametrize("code", [310, 11, 0])
def test_a_frame_that_ends_anywhere(code: int) -> None:
    """Truncated at every byte, and with every length at its limits."""
    frame = next(each for each in RECORDED if b'"code":%d,' % code in each[:30])
    lengths = [each.to_bytes(4, "big") for each in (0, 3, 4, 2**24, 2**31 - 1, 2**31, 2**32 - 1)]
    damaged = [frame[:end] for end in range(len(frame))]
    for at in range(8):
        damaged += [frame[:at] + each + frame[at + 4 :] for each in lengths]
    # The header alone, cut anywhere, in either form.
    (whole,) = VERSIONS[0].FrameDecoder().feed(frame)
    for end in range(len(whole.header)):
        damaged += [framed(whole.header[:end], serialize) for serialize in (0, 1)]
    for each in damaged:
        with case(each.hex()):
            first, second = (read(core, [each]) for core in VERSIONS)
            assert first == second


@needs_both
@given(st.lists(st.integers(0, 200_200), max_size=4), st.integers(65_530, 65_540))
def test_versions_keep_large_bodies_equally(cuts: list[int], size: int) -> None:
    stream = framed(b"{}" * 40, 0, b"x" * size) + framed(b"h" * 66_000, 0, b"y" * size)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[start:end] for start, end in pairwise(edges)]
    first, second = (read(core, chunks) for core in VERSIONS)
    assert first == second


@pytest.mark.parametrize("core", VERSIONS)
def test_a_frame_outlives_decoder_and_chunk(core: Any) -> None:
    recorded = next(frame for frame in RECORDED if b'"code":310' in frame)
    decoder = typed_decoder(core)
    (frame,) = decoder.feed(bytes(recorded))
    (large,) = decoder.feed(framed(b"{}", 0, bytes(range(256)) * 300))
    decoder.clear()
    del decoder
    assert framed(frame.header, frame.serialize, frame.body) == recorded
    assert bytes(large.body) == bytes(range(256)) * 300
    assert isinstance(large.body, memoryview)


@pytest.mark.parametrize("core", VERSIONS)
def test_a_frame_that_began_in_an_earlier_chunk_leaves_the_rest_held(core: Any) -> None:
    frame = framed(b"{}")
    decoder = core.FrameDecoder()
    assert list(decoder.feed(frame[:7])) == []
    taken = decoder.feed(frame[7:] + frame * 2)
    next(taken)
    assert decoder.held_bytes == 2 * len(frame)
    next(taken)
    assert decoder.held_bytes == len(frame)
    assert len(list(taken)) == 1
    assert decoder.held_bytes == 0


@needs_both
def test_two_iterators_at_a_time_do_not_crash() -> None:
    # Which frames they yield is not defined.
    stream = STREAM[:5000]
    for core in VERSIONS:
        decoder = typed_decoder(core)
        for at in range(0, len(stream), 97):
            first, second = decoder.feed(stream[at : at + 97]), decoder.feed(stream[at : at + 31])
            outcome(next, first, None)
            outcome(list, second)
            outcome(list, first)


# --- generated headers ----------------------------------------------------------------------------

ODD_TEXTS = [
    "0",
    "-1",
    "-0",
    "+7",
    "01",
    "1e3",
    "1.0",
    "true",
    "FALSE",
    "null",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "-9223372036854775809",
    "2147483647",
    "-2147483648",
    "2147483648",
]
TEXTS = st.text(max_size=6) | st.sampled_from(
    [*ODD_TEXTS, "", " 1", "a\x01b\x02", "\ud7ff\ue000", '\n"\\/', "\U0001f600", "x" * 100]
)
NUMBERS = st.integers(-(2**31), 2**31 - 1).map(str) | st.sampled_from(["0", "1", "-1"])
LONG = st.integers(-(2**63), 2**63 - 1).map(str)
BOOLEANS = st.sampled_from(["true", "false"])
SENDS = st.fixed_dictionaries(
    {**dict.fromkeys("abc", TEXTS), **dict.fromkeys("defh", NUMBERS), "g": LONG},
    optional={"i": TEXTS, "j": NUMBERS, "k": BOOLEANS, "l": NUMBERS, "m": BOOLEANS, "n": TEXTS},
)
PULLS = st.fixed_dictionaries(
    {
        **dict.fromkeys(["consumerGroup", "topic"], TEXTS),
        **dict.fromkeys(["queueId", "maxMsgNums", "sysFlag"], NUMBERS),
        **dict.fromkeys(["queueOffset", "commitOffset"], LONG),
        **dict.fromkeys(["suspendTimeoutMillis", "subVersion"], LONG),
    },
    optional={
        **dict.fromkeys(["subscription", "expressionType", "bname", "ReqT"], TEXTS),
        "bulkPull": BOOLEANS,
    },
)
SENT = st.fixed_dictionaries(
    {"msgId": TEXTS, "queueId": NUMBERS, "queueOffset": LONG},
    optional={"transactionId": TEXTS, "MSG_REGION": TEXTS, "TRACE_ON": BOOLEANS},
)
PULLED = st.fixed_dictionaries(
    dict.fromkeys(["suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset"], LONG)
)
ODD = dict.fromkeys(("a", "e", "i", "k", "z", "msgId", "queueId", "topic", "Signature"), TEXTS)
KINDS = [(310, 0, SENDS), (320, 2, SENDS), (11, 0, PULLS), (0, 1, SENT), (19, 1, PULLED)]


@st.composite
def ordinary(draw: st.DrawFn) -> tuple[dict[str, Any], bool]:
    """Draw a header, and whether it is certain that it is read as a typed one."""
    code, flag, kind = draw(st.sampled_from(KINDS))
    fields = dict(draw(kind))
    is_certain = draw(st.booleans())
    if not is_certain:
        fields |= draw(st.fixed_dictionaries({}, optional=ODD))
    optional = {"opaque": st.integers(-(2**31), 2**31 - 1), "version": st.integers(0, 500)}
    named = {"language": st.sampled_from([each.name for each in Language]), "remark": TEXTS}
    rest = draw(st.fixed_dictionaries({}, optional={**optional, **named}))
    members = {"code": code, "flag": flag, "extFields": fields, **rest}
    return dict(draw(st.permutations(list(members.items())))), is_certain


def check_both(data: bytes, serialize: int, *, is_certain: bool = False) -> None:
    stream = framed(data, serialize, b"body")
    results = []
    for core in VERSIONS:
        (frame,) = typed_decoder(core).feed(stream)
        if type(frame).__name__ != "Frame":
            check(frame)
        else:
            assert not is_certain
        results.append(values(frame))
    assert all(result == results[0] for result in results)


@given(ordinary(), st.booleans(), st.sampled_from([b"", b"\n", b" \r\n\t"]))
def test_generated_json_headers(
    header: tuple[dict[str, Any], bool], ascii_only: bool, end: bytes
) -> None:
    members, is_certain = header
    text = json.dumps(members, separators=(",", ":"), ensure_ascii=ascii_only)
    is_certain = is_certain and "\U0001f600" not in text and "\\ud" not in text
    check_both(text.encode() + end, 0, is_certain=False if not is_certain else _fits(members))


def _fits(members: dict[str, Any]) -> bool:
    return all(ord(each) < 0x10000 for each in json.dumps(members, ensure_ascii=False))


@given(ordinary())
def test_generated_binary_headers(header: tuple[dict[str, Any], bool]) -> None:
    members, is_certain = header
    command = Command(
        members["code"],
        flag=members["flag"],
        opaque=members.get("opaque", 0),
        version=members.get("version", 0),
        remark=members.get("remark"),
        ext_fields=members["extFields"],
        serialize=Serialize.ROCKETMQ,
    )
    has_empty = "" in members["extFields"].values()
    check_both(encode_header(command), 1, is_certain=is_certain and not has_empty)


SENT_HEADER = b'{"code":0,"flag":1,"extFields":{"msgId":"","queueId":"0","queueOffset":"0"}}'
EDGES = [
    b"",
    b"{}",
    b'{"code":310}',
    b'{"code":310,"code":310}',
    b'{"code":310,"extFields":{},"extFields":{}}',
    b'{"code":-0,"flag":1}',
    SENT_HEADER,
    SENT_HEADER + b"\0",
    SENT_HEADER + b" ",
    b" " + SENT_HEADER,
    SENT_HEADER.replace(b":", b": "),
    SENT_HEADER.replace(b'"queueId":"0"', b'"queueId":"\\u0030"'),
    SENT_HEADER.replace(b'"queueId":"0"', b'"queueId":0'),
    SENT_HEADER.replace(b'"queueId":"0"', b'"queueId":null'),
    SENT_HEADER.replace(b'"msgId":""', b'"msgId":"\\ud800"'),
    SENT_HEADER.replace(b'"msgId":""', b'"msgId":"\xff"'),
    SENT_HEADER.replace(b'"msgId":""', b'"msgId":"\\x"'),
    SENT_HEADER.replace(b'"msgId":""', b'"msgId":null'),
    SENT_HEADER.replace(b"msgId", b"msgI\\u0064"),
    *(
        SENT_HEADER.replace(b'"flag":1', b'"flag":1,' + member)
        for member in (
            b'"language":"J\\u0041VA"',
            b'"language":"java"',
            b'"language":null',
            b'"language":3',
            b'"serializeTypeCurrentRPC":"ROCKETMQ"',
            b'"serializeTypeCurrentRPC":"JSO\\u004e"',
            b'"remark":null',
            b'"remark":1',
            b'"opaque":2147483648',
            b'"opaque":1.0',
            b'"flag":1',
            b'"other":1',
        )
    ),
    *(SENT_HEADER[:at] for at in range(0, len(SENT_HEADER), 3)),
]


def test_edges_of_the_ordinary_form() -> None:
    for data in EDGES:
        with case(data):
            check_both(data, 0)
            check_both(data, 1)
            check_both(data, 7)


PARTS = [*rb"\ \u0001 \ud83d\ude00 , : null 1 - } {".split(), b'"', b"\0\0"]


@given(st.data())
def test_damaged_headers(data: st.DataObject) -> None:
    (frame,) = VERSIONS[0].FrameDecoder().feed(data.draw(st.sampled_from(RECORDED)))
    header = bytearray(frame.header)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(header)))
        part = data.draw(st.binary(max_size=2) | st.sampled_from(PARTS))
        header[at : at + data.draw(st.integers(0, 6))] = part
    check_both(bytes(header), frame.serialize)


@example(b'{"code":310,"extFields":{')
@given(st.binary(max_size=60))
def test_arbitrary_headers(data: bytes) -> None:
    check_both(data, 0)
    check_both(data, 1)


@needs_both
@given(st.lists(st.binary(max_size=40), max_size=3), st.integers(0, 3), st.integers(0, 200))
def test_frames_in_a_buffer_are_the_same(parts: list[bytes], at: int, edited: int) -> None:
    plain, compiled = VERSIONS
    responses = plain.PullResponses(0, 0, "FOUND")
    frames = [responses.frame(7, 320, 0, 999, len(part)) + part for part in parts]
    data = bytearray(b"xyz" + b"".join(frames) + b"rest")
    data[edited % len(data)] ^= 0x15

    def read(core: Any, end: int) -> Any:
        found = outcome(core.read_response, memoryview(data), at, end)
        if not isinstance(found, tuple) or isinstance(found[0], str):
            return found
        frame, *places = found
        return values(frame), places

    for end in range(len(data) + 2):
        assert read(compiled, end) == read(plain, end)
