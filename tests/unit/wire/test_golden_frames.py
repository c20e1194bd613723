"""Every frame recorded from Apache RocketMQ is decoded as described and re-encoded exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from header_catalogue import REQUEST_HEADERS, RESPONSE_HEADERS
from turbopump.wire import framing, lenient_json
from turbopump.wire.batch import decode_batch, encode_batch
from turbopump.wire.bodies import BrokerRegistration, QueueOffsetRows
from turbopump.wire.catalogue import REQUEST_BODIES, RESPONSE_BODIES, BodyKind
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import Command, Serialize
from turbopump.wire.record import decode_records
from turbopump.wire.schema import Body, Header
from vectors import Vector, case, frames

FRAMES = frames()
UNDECLARED_FIELDS = {"ReqT", "AccessKey", "Signature"}
"""Added by hooks to any request; headers ignore them."""


def command_of(vector: Vector) -> Command:
    return framing.decode(bytes.fromhex(vector["hex"]))


def asked_code(vector: Vector) -> int | None:
    """Return the request's code, also of a response; None where it has no name."""
    if vector["kind"] != "response":
        return int(vector["code"])
    known = vector["answers"] in RequestCode.__members__
    return RequestCode[vector["answers"]] if known else None


def test_each_is_read_as_described_and_written_back() -> None:
    assert FRAMES
    for vector in FRAMES:
        with case(vector["name"]):
            command = command_of(vector)
            _check_header(vector, command)
            _check_code_name(vector)
            _check_typed_header(vector, command)
            assert framing.encode(command).hex() == vector["hex"]


def _check_header(vector: Vector, command: Command) -> None:
    header = vector["header"]
    language = header["language"]
    expected = language if isinstance(language, int) else Language[language]

    assert command.code == vector["code"]
    assert command.opaque == vector["opaque"]
    assert command.flag == vector["flag"]
    assert command.serialize is Serialize[vector["serialize"]]
    assert command.version == header["version"]
    assert command.language == expected
    assert command.remark == header.get("remark")
    # The binary form cannot distinguish no fields from an empty set of them.
    assert (command.ext_fields or {}) == (header.get("extFields") or {})


def _check_code_name(vector: Vector) -> None:
    if vector["kind"] == "response":
        assert ResponseCode(vector["code"]).name == vector["codeName"]
    elif vector["codeName"] != "?":
        assert RequestCode(vector["code"]).name == vector["codeName"]
    else:
        assert vector["code"] not in frozenset(RequestCode)


def _check_typed_header(vector: Vector, command: Command) -> None:
    """Check that the typed header keeps every field."""
    sent = dict(command.ext_fields or {})
    header_class = _header_class(vector, command)
    if header_class is None:
        assert not sent.keys() - UNDECLARED_FIELDS
        return
    kept = header_class.from_ext_fields(sent).to_ext_fields()
    assert kept.items() <= sent.items()
    assert not sent.keys() - kept.keys() - UNDECLARED_FIELDS


def _header_class(vector: Vector, command: Command) -> type[Header] | None:
    code = asked_code(vector)
    if code is None:
        return None
    if vector["kind"] != "response":
        return REQUEST_HEADERS.get(code)
    answer = RESPONSE_HEADERS.get(code)
    if answer is not None and command.ext_fields:
        required = {"msgId", "nextBeginOffset", "offset", "indexLastUpdateTimestamp"}
        failed = command.code != ResponseCode.SUCCESS and not required & command.ext_fields.keys()
        return answer.__base__ if failed and answer.__base__ is not Header else answer
    return None


def test_each_body_is_of_its_declared_kind() -> None:
    with_body = [vector for vector in FRAMES if command_of(vector).body]
    assert with_body
    for vector in with_body:
        with case(vector["name"]):
            _check_body(vector)


def _check_body(vector: Vector) -> None:
    body = command_of(vector).body
    assert isinstance(body, bytes)
    code = asked_code(vector)
    assert code is not None
    bodies = RESPONSE_BODIES if vector["kind"] == "response" else REQUEST_BODIES
    kind: type[Body] | BodyKind = bodies[code]
    if vector["name"].startswith("reset_offset_list_form.RESET"):
        kind = QueueOffsetRows
    match kind:
        case BodyKind.RECORDS:
            records = list(decode_records(body))
            offsets = [record.physical_offset for record in records]
            assert str(offsets) in vector["body_note"]
        case BodyKind.BATCH:
            assert encode_batch(decode_batch(body)) == body
        case BodyKind.REGISTRATION:
            _check_json_body(BrokerRegistration, body)
        case BodyKind():
            assert body
        case _:
            _check_json_body(kind, body)


def _check_json_body(kind: type[Body], body: bytes) -> None:
    value = kind.decode(body)
    assert _comparable(lenient_json.loads(value.encode())) == _comparable(lenient_json.loads(body))
    assert kind.decode(value.encode(bare_keys=True)) == value
    assert kind.decode(value.encode(bare_keys=False)) == value


def _comparable(value: Any) -> Any:
    """Normalise keys: integers and objects as texts, objects with their names sorted."""
    if isinstance(value, Mapping):
        return {_key(key): _comparable(item) for key, item in value.items()}
    return [_comparable(item) for item in value] if isinstance(value, list) else value


def _key(key: Any) -> str:
    if isinstance(key, str) and key.startswith("{"):
        key = lenient_json.loads(key)
    return lenient_json.dumps(dict(sorted(key.items()))) if isinstance(key, Mapping) else str(key)
