from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import HeaderError, InvalidArgument
from turbopump.wire import framing
from turbopump.wire.codes import Language, ResponseCode, release
from turbopump.wire.command import Command, Serialize, decode_header, encode_header, request
from turbopump.wire.headers import NoFields, OffsetAnswer, ViewMessage

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
filled_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
i16 = st.integers(-(2**15), 2**15 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
commands = st.builds(
    Command,
    code=i16,
    flag=i32,
    opaque=i32,
    language=st.sampled_from([language.value for language in Language]),
    version=i16,
    remark=st.none() | filled_texts,
    ext_fields=st.none() | st.dictionaries(filled_texts, filled_texts, min_size=1, max_size=5),
    body=st.binary(max_size=50),
    serialize=st.sampled_from(Serialize),
)


@given(commands)
def test_round_trip(command: Command) -> None:
    assert framing.decode(framing.encode(command)) == command


@given(st.dictionaries(texts, texts, max_size=5))
def test_json_keeps_empty_texts(fields: dict[str, str]) -> None:
    command = Command(code=1, ext_fields=fields, remark="")
    assert framing.decode(framing.encode(command)) == command


def test_the_binary_form_reads_empty_texts_as_missing() -> None:
    command = Command(
        code=1, ext_fields={"a": "", "b": "c"}, remark="", serialize=Serialize.ROCKETMQ
    )
    read = framing.decode(framing.encode(command))
    assert read.ext_fields == {"b": "c"}
    assert read.remark is None


def test_responses_use_the_encoding_of_the_request() -> None:
    for serialize in Serialize:
        asked = Command(code=33, opaque=-7, serialize=serialize, ext_fields={"offset": "1"})
        answer = asked.answer(ResponseCode.SUCCESS, OffsetAnswer(offset=5), body=b"x")
        assert answer.is_response
        assert (answer.opaque, answer.serialize, answer.body) == (-7, serialize, b"x")
        assert answer.ext_fields == {"offset": "5"}


def test_no_header_and_an_empty_header_are_distinguished() -> None:
    asked = request(15)
    assert asked.ext_fields is None
    assert b"extFields" not in encode_header(asked.answer(0))
    assert b'"extFields":{}' in encode_header(asked.answer(0, NoFields()))


def test_request_carries_its_header() -> None:
    assert request(33, ViewMessage(offset=12)).ext_fields == {"offset": "12"}


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ('"java"', 0),
        ('"Go"', 9),
        ("12", 12),
        ('"COBOL"', None),
        ("99", None),
        ("null", None),
        ("true", None),
        ("[1]", None),
    ],
)
def test_languages_in_any_form(text: str, language: int | None) -> None:
    header = f'{{"code":1,"flag":0,"language":{text},"opaque":3,"version":1}}'
    assert decode_header(header.encode(), Serialize.JSON).language == language


def test_odd_json_that_peers_send() -> None:
    header = b"""{"code":310,"extFields":{"d":4,"k":false,"x":1.5,"l":null,"e":""},
        "language":"CPP","opaque":7,"unknown":[1],"serializeTypeCurrentRPC":"JSON"}\n """
    command = decode_header(header, Serialize.JSON)
    assert command.ext_fields == {"d": "4", "k": "false", "x": "1.5", "e": ""}
    assert (command.version, command.flag, command.remark) == (0, 0, None)


def test_members_that_are_null_or_of_another_type() -> None:
    header = b'{"code":1,"flag":null,"version":null,"opaque":null,"remark":7,"extFields":null}'
    command = decode_header(header, Serialize.JSON)
    assert (command.flag, command.version, command.opaque) == (0, 0, 0)
    assert (command.remark, command.ext_fields) == ("7", None)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (b'{"code":9,"extFields":{"a":' + b"[" * 900 + b"]" * 900 + b"}}", "nested deeper"),
        ('{"code":9,"language":1,1:2\u0661}'.encode(), "expected ',' or '}'"),
        (b'{"code":1e999}', "out of range"),
        (b"", "truncated"),
        (b"[1]", "not a JSON object"),
        (b'{"flag":0}', "missing required field `code`"),
        (b'{"code":"x"}', "Expected `int`"),
        (b'{"code":1,"opaque":4294967296}', "opaque"),
        (b'{"code":1,"extFields":[]}', "extFields"),
        (b'{"code":1,"remark":"\xff"}', "UTF-8"),
        (b"{" * 500, "object keys must be strings"),
    ],
)
def test_unreadable_json_headers(header: bytes, complaint: str) -> None:
    with pytest.raises(HeaderError, match=complaint):
        decode_header(header, Serialize.JSON)


BINARY = encode_header(
    Command(code=1, remark="hi", ext_fields={"a": "b"}, serialize=Serialize.ROCKETMQ)
)


@pytest.mark.parametrize("length", range(len(BINARY)))
def test_cut_binary_headers(length: int) -> None:
    with pytest.raises(HeaderError):
        decode_header(BINARY[:length], Serialize.ROCKETMQ)


def test_binary_header_with_a_wrong_length_inside() -> None:
    broken = BINARY[:-5] + (100).to_bytes(4, "big") + BINARY[-1:]
    with pytest.raises(HeaderError, match="text of 100 bytes, but 1 are left"):
        decode_header(broken, Serialize.ROCKETMQ)


def test_unknown_language_number_in_the_binary_form() -> None:
    unknown = BINARY[:2] + b"\x7f" + BINARY[3:]
    assert decode_header(unknown, Serialize.ROCKETMQ).language is None


def test_values_too_large_for_a_binary_header_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="code 40000 does not fit into a binary header"):
        encode_header(Command(code=40000, serialize=Serialize.ROCKETMQ))
    long_name = Command(code=1, ext_fields={"n" * 40000: "v"}, serialize=Serialize.ROCKETMQ)
    with pytest.raises(InvalidArgument, match="longer than 32767 bytes"):
        encode_header(long_name)


def test_version_numbers() -> None:
    assert release(4, 9, 8) == 409
    assert release(4, 5, 2) == 317
    assert release(4, 9, 4) == 401
    assert release(5, 0, 0) == 413
