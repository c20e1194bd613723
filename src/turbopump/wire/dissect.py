"""Frames as JSON for people and scripts, and back; the core of ``python -m turbopump.wire``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from turbopump.errors import BodyError, FrameError, HeaderError, WireError
from turbopump.wire import lenient_json, registration
from turbopump.wire.batch import BatchEntry, decode_batch, encode_batch
from turbopump.wire.bodies import BrokerRegistration
from turbopump.wire.catalogue import REQUEST_BODIES, RESPONSE_BODIES, BodyKind
from turbopump.wire.codes import VERSION, Language
from turbopump.wire.command import FLAG_RESPONSE, Command, Serialize, whole_body
from turbopump.wire.framing import FrameDecoder, encode
from turbopump.wire.properties import decode as decode_properties
from turbopump.wire.properties import encode as encode_properties
from turbopump.wire.record import FIXED_BYTES, MAGIC, MAGIC_V2, MessageView, decode_records
from turbopump.wire.schema import I32, Body

Fields = dict[str, Any]

_OPAQUES_MAX = 65536


class Dissector:
    """Turns frames into JSON values; remembers requests, to know the bodies of their answers."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}

    def frames(self, data: bytes) -> Iterator[Fields]:
        """Parse whole frames, one after the other."""
        decoder = FrameDecoder()
        for command in decoder.feed(data):
            yield self.fields(command)
        if decoder.pending_bytes:
            whole = len(data) - decoder.pending_bytes
            raise FrameError(f"the last {decoder.pending_bytes} bytes are not a whole frame", whole)

    def fields(self, command: Command) -> Fields:
        """Return one frame as a JSON value; ``body`` is present only if its kind is known."""
        body = whole_body(command)
        found: Fields = {
            "code": command.code,
            "flag": command.flag,
            "opaque": command.opaque,
            "language": None if command.language is None else Language(command.language).name,
            "version": command.version,
            "remark": command.remark,
            "extFields": command.ext_fields,
            "serialize": command.serialize.name,
            "body_hex": body.hex(),
        }
        kind = self._kind(command)
        if body and kind is not BodyKind.MESSAGE:
            content = _content(kind, body, command.ext_fields or {})
            if content is not None:
                found["body"] = content
        return found

    def _kind(self, command: Command) -> type[Body] | BodyKind | None:
        if command.flag & FLAG_RESPONSE:
            asked = self._asked.pop(command.opaque, None)
            return None if asked is None else RESPONSE_BODIES.get(asked)
        if len(self._asked) >= _OPAQUES_MAX:
            # Requests whose answers are not in the input would accumulate.
            self._asked.clear()
        self._asked[command.opaque] = command.code
        return REQUEST_BODIES.get(command.code)


def message_fields(view: MessageView) -> Fields:
    return {
        "topic": view.topic,
        "queueId": view.queue_id,
        "queueOffset": view.queue_offset,
        "physicalOffset": view.physical_offset,
        "size": view.size,
        "tags": view.tags,
        "keys": view.keys,
        "properties": view.properties,
        "bodyHex": view.body.hex(),
        "msgId": view.offset_id,
        "uniqKey": view.unique_key,
        "flag": view.flag,
        "sysFlag": view.sys_flag,
        "bornTimestamp": view.born_timestamp_ms,
        "bornHost": str(view.born_host),
        "storeTimestamp": view.store_timestamp_ms,
        "storeHost": str(view.store_host),
        "reconsumeTimes": view.reconsume_times,
        "preparedTransactionOffset": view.prepared_transaction_offset,
    }


def _content(
    kind: type[Body] | BodyKind | None, body: bytes, ext_fields: Mapping[str, str]
) -> object | None:
    """Parse a body; one of the wrong kind is guessed from its bytes alone."""
    try:
        if isinstance(kind, BodyKind):
            return _READERS[kind](body, ext_fields)
        if kind is not None:
            kind.decode(body)
            return _json(body)
    except WireError:
        pass
    return _guessed(body)


def _guessed(body: bytes) -> object | None:
    magic = int.from_bytes(body[4:8], "big")
    try:
        if len(body) >= FIXED_BYTES and magic in {MAGIC, MAGIC_V2}:
            return _records(body)
        return _json(body) if body[:1] in {b"{", b"["} else None
    except WireError:
        return None


def _json(body: bytes) -> object:
    # Written and read again, so that keys which are not strings become strings.
    return msgspec.json.decode(lenient_json.dumps(lenient_json.loads(body)))


def _records(body: bytes) -> list[Fields]:
    return [message_fields(view) for view in decode_records(body)]


def _batch(body: bytes) -> list[Fields]:
    return [
        {
            "flag": entry.flag,
            "properties": decode_properties(entry.properties.decode("utf-8", "replace")),
            "bodyHex": entry.body.hex(),
        }
        for entry in decode_batch(body)
    ]


def _registration(body: bytes, ext_fields: Mapping[str, str]) -> object:
    if ext_fields.get("compressed", "").lower() == "true":
        return _json(registration.decode_compressed(body).encode())
    BrokerRegistration.decode(body)
    return _json(body)


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace")


def _property_lines(body: bytes) -> dict[str, str]:
    lines = (line.partition("=") for line in _text(body).splitlines() if "=" in line)
    return {name: value for name, _, value in lines}


_READERS: dict[BodyKind, Callable[[bytes, Mapping[str, str]], object]] = {
    BodyKind.BATCH: lambda body, _: _batch(body),
    BodyKind.RECORDS: lambda body, _: _records(body),
    BodyKind.REGISTRATION: _registration,
    BodyKind.PROPERTIES: lambda body, _: _property_lines(body),
    BodyKind.SOURCE: lambda body, _: _text(body),
}


class FrameFields(Struct, forbid_unknown_fields=True):
    """A frame as JSON, for `assemble`; everything but the code has a default."""

    code: I32
    flag: I32 = 0
    opaque: I32 = 0
    language: str | None = "PYTHON"
    version: I32 = VERSION
    remark: str | None = None
    ext_fields: dict[str, str] | None = field(name="extFields", default=None)
    serialize: Literal["JSON", "ROCKETMQ"] = "JSON"
    body_hex: str | None = None
    body: Any = None


def assemble(text: str) -> bytes:
    """Build a frame from its JSON; ``body_hex`` takes precedence over ``body``."""
    try:
        fields = msgspec.json.decode(text, type=FrameFields)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HeaderError(str(error), _position(str(error), text)) from error
    language = fields.language
    if language is not None and language not in Language.__members__:
        names = ", ".join(Language.__members__)
        place = _member_position(text, "language")
        raise HeaderError(f"language {language!r} is none of {names}", place)
    return encode(
        Command(
            code=fields.code,
            flag=fields.flag,
            opaque=fields.opaque,
            language=None if language is None else Language[language],
            version=fields.version,
            remark=fields.remark,
            ext_fields=fields.ext_fields,
            body=_body_bytes(fields, text),
            serialize=Serialize[fields.serialize],
        )
    )


def _body_bytes(fields: FrameFields, text: str) -> bytes:
    if fields.body_hex is not None:
        try:
            return bytes.fromhex(fields.body_hex)
        except ValueError as error:
            place = _member_position(text, "body_hex")
            raise FrameError(f"body_hex: {_hex_reason(fields.body_hex)[0]}", place) from error
    if fields.body is None:
        return b""
    kind = None if fields.flag & FLAG_RESPONSE else REQUEST_BODIES.get(fields.code)
    try:
        return _written(kind, fields.body)
    except BodyError as error:
        raise BodyError(error.reason, _member_position(text, "body")) from error
    except RecursionError as error:
        raise BodyError("nested too deep", _member_position(text, "body")) from error


def _written(kind: type[Body] | BodyKind | None, body: Any) -> bytes:
    """Encode a body from its JSON, where that is complete."""
    match kind, body:
        case BodyKind.PROPERTIES, dict():
            return "".join(f"{name}={value}\n" for name, value in body.items()).encode()
        case BodyKind.BATCH, list():
            return encode_batch(map(_batch_entry, body))
        case BodyKind.REGISTRATION, dict():
            return _checked_json(BrokerRegistration, body)
        case (None, dict() | list()):
            return lenient_json.dumps(body).encode()
        case (type(), dict()):
            return _checked_json(kind, body)
        case _:
            raise BodyError("this kind of body cannot be built from JSON; give body_hex")


def _batch_entry(value: object) -> BatchEntry:
    try:
        fields = msgspec.convert(value, _BatchFields)
        text = encode_properties(fields.properties)
        return BatchEntry(bytes.fromhex(fields.body_hex), text.encode(), fields.flag)
    except (msgspec.ValidationError, ValueError) as error:
        raise BodyError(f"message of a batch: {error}") from error


class _BatchFields(Struct, rename="camel", forbid_unknown_fields=True):
    body_hex: str
    properties: dict[str, str] = {}
    flag: I32 = 0


def _checked_json(kind: type[Body], body: dict[str, Any]) -> bytes:
    # Keys that were objects before they had to be strings become objects again.
    value = lenient_json.with_object_keys(body)
    kind.from_value(value)
    return lenient_json.dumps(value, bare_keys=True).encode()


def parse_hex(text: str) -> bytes:
    """Parse hex digits; the error counts bytes, two digits each."""
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise FrameError(*_hex_reason(text)) from error


def _hex_reason(text: str) -> tuple[str, int]:
    """Return what is wrong with hex digits, and at which byte."""
    digits = "".join(text.split())
    wrong = next((at for at, c in enumerate(digits) if c not in _HEX_DIGITS), len(digits))
    found = f"{digits[wrong]!r} is not a hex digit" if wrong < len(digits) else "half a byte"
    return found, wrong // 2


_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


def _position(reason: str, text: str) -> int:
    """Find the byte of a msgspec error, which names a number, a member, or the end."""
    if "byte " in reason or "truncated" in reason:
        return lenient_json.error_position(reason, text)
    named = re.search(r"\$\.(\w+)|unknown field `(\w+)`", reason)
    return _member_position(text, named[1] or named[2]) if named else 0


def _member_position(text: str, member: str) -> int:
    at = text.find(f'"{member}"')
    return len(text[: max(at, 0)].encode("utf-8", "replace"))
