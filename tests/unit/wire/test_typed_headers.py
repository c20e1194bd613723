"""Headers typed while they are decoded equal those typed afterwards."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import HeaderError
from turbopump.wire import framing
from turbopump.wire.command import Command, decode_header, decode_typed, typed_headers
from turbopump.wire.framing import FrameDecoder
from turbopump.wire.headers import PullMessage, SendMessageV2
from vectors import frames

TYPED = typed_headers({310: SendMessageV2, 320: SendMessageV2, 11: PullMessage})
TEXTS = st.text(max_size=5) | st.sampled_from(["0", "-1", "+7", "true", "FALSE", "null", "1.0", ""])
VALUES = TEXTS | st.integers(-(2**33), 2**33) | st.booleans() | st.none()
FIELDS = st.dictionaries(st.sampled_from("abcdefghijklmnz"), VALUES)
WHOLE = {"a": "group", "b": "Topic", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "17", "h": 0}
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "extFields": FIELDS.map(lambda fields: WHOLE | fields) | st.none(),
        "flag": st.sampled_from([0, 1, "2", None, "x"]),
        "language": st.sampled_from(["JAVA", "PYTHON", "java", "Klingon", 7, None]),
        "opaque": st.sampled_from([5, "6", 2**31, None]),
        "remark": VALUES,
        "version": st.sampled_from([1, "2", None]),
        "serializeTypeCurrentRPC": st.sampled_from(["JSON", None, 0]),
    },
)


def header_of(command: Command) -> object:
    try:
        return SendMessageV2.from_ext_fields(command.ext_fields)
    except HeaderError as error:
        return str(error)


@given(st.sampled_from([310, 320, 11]), MEMBERS)
def test_typed_headers_equal_those_converted_later(code: int, members: dict[str, object]) -> None:
    data = json.dumps({"code": code, **members}, separators=(",", ":")).encode()
    typed = decode_typed(data, TYPED, b"body")
    if typed is None or typed.code == 11:
        return
    usual = decode_header(data, 0, b"body")
    assert typed.ext_fields is None
    if typed.header is None:
        assert not usual.ext_fields
    else:
        assert typed.header == header_of(usual)
    for name in ("code", "flag", "opaque", "language", "version", "remark", "body", "serialize"):
        assert getattr(typed, name) == getattr(usual, name), name


@pytest.mark.parametrize(
    "data",
    [
        b'{"code":310,"code":11,"extFields":{}}',
        b'{"code":310,"extFields":{"a":"1"}}',
        b'{"code":310,"extFields":{"a":"\xff"}}',
        b'{"code":310,"extFields":',
        b'{"code":310,"language":"java"}',
        b'{"flag":0,"code":310}',
        b'{"code":3100}',
        b'{"code":10,"extFields":{}}',
    ],
)
def test_other_headers_are_read_as_usual(data: bytes) -> None:
    assert decode_typed(data, TYPED, b"") is None


def test_frames_of_java_are_typed_while_they_are_read() -> None:
    stream = b"".join(bytes.fromhex(vector["hex"]) for vector in frames())
    typing, usual = FrameDecoder(), FrameDecoder()
    typing.typed = TYPED
    typed = [command for command in typing.feed(stream) if command.header is not None]
    by_place = [
        command
        for command in usual.feed(stream)
        if command.code in (310, 320, 11) and not command.is_response and command.serialize == 0
    ]
    assert typed
    for found, wanted in zip(typed, by_place, strict=True):
        assert found.header is not None
        assert found.header == type(found.header).from_ext_fields(wanted.ext_fields)
        assert (found.opaque, found.body) == (wanted.opaque, wanted.body)


def test_a_frame_that_cannot_be_typed_keeps_its_texts() -> None:
    decoder = FrameDecoder()
    decoder.typed = TYPED
    frame = framing.encode(Command(310, ext_fields={"a": "group"}))
    (command,) = decoder.feed(frame)
    assert (command.header, command.ext_fields) == (None, {"a": "group"})
