"""One frame as a value: a request or an answer, with its header in JSON or in the binary form."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec
from msgspec import Struct

from turbopump.core import Frame, PullResponseFrame, SendResponseFrame, TypedFrame
from turbopump.errors import BodyError, HeaderError, InvalidArgument, WireError
from turbopump.wire import lenient_json
from turbopump.wire.codes import VERSION, Language
from turbopump.wire.schema import I32, ExtFields, Header

FLAG_RESPONSE = 0b01
FLAG_ONEWAY = 0b10

Buffer = bytes | bytearray | memoryview
Payload = Buffer | Sequence[Buffer]
"""A body, in one piece or in several that are sent one after the other without being joined."""


class Serialize(IntEnum):
    """The encoding of a frame's header; the frame contains the number."""

    JSON = 0
    ROCKETMQ = 1


_JSON = Serialize.JSON.value


class Command(Struct, frozen=True, gc=False):
    """A request or an answer.

    ``language`` is None if the sender's is unknown. ``ext_fields`` is None if there is no header
    class at all; an empty one is ``{}``, which some peers distinguish.
    """

    code: int
    flag: int = 0
    opaque: int = 0
    language: int | None = Language.PYTHON
    version: int = VERSION
    remark: str | None = None
    ext_fields: ExtFields | None = None
    body: Payload = b""
    serialize: Serialize = Serialize.JSON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def body_length(self) -> int:
        return sum(map(len, body_parts(self.body)))

    def answer(
        self,
        code: int,
        header: Header | ExtFields | None = None,
        *,
        remark: str | None = None,
        body: Payload = b"",
    ) -> Command:
        """Create the answer to this request, in the request's encoding."""
        return answer_to(self, code, header, remark=remark, body=body)


Request = Command | TypedFrame
"""What is served: as a command, or as a frame whose header the core has read."""


Response = Command | SendResponseFrame | PullResponseFrame
"""The answer to a prepared request: as a frame whose header the core has read, if it did."""

RESPONSE_FRAMES: frozenset[type[Frame]] = frozenset({SendResponseFrame, PullResponseFrame})


def answer_to(
    request: Request,
    code: int,
    header: Header | ExtFields | None = None,
    *,
    remark: str | None = None,
    body: Payload = b"",
) -> Command:
    """Create the answer to a request, in the request's encoding."""
    return Command(
        code=code,
        flag=FLAG_RESPONSE,
        opaque=request.opaque,
        remark=remark,
        ext_fields=header.to_ext_fields() if isinstance(header, Header) else header,
        body=body,
        serialize=Serialize(request.serialize),
    )


def command_of(frame: Frame) -> Command:
    """Read a frame's header; the error's position counts from the start of the stream."""
    try:
        return decode_header(frame.header, frame.serialize, frame.body)
    except WireError as error:
        raise error.shifted(frame.position) from error


def as_command(response: Response) -> Command:
    return response if isinstance(response, Command) else command_of(response)


def request(code: int, header: Header | None = None, body: Payload = b"") -> Command:
    """Create a request; the connection that sends it assigns its number."""
    return Command(
        code=code,
        ext_fields=None if header is None else header.to_ext_fields(),
        body=body,
    )


def body_parts(body: Payload) -> Sequence[Buffer]:
    return (body,) if isinstance(body, bytes | bytearray | memoryview) else body


def whole_body(command: Command) -> bytes:
    """Return the body in one piece, which can be kept: it references no larger buffer."""
    body = command.body
    return body if isinstance(body, bytes) else b"".join(body_parts(body))


def encode_header(command: Command) -> bytes:
    """Return the header in the command's own encoding."""
    if command.serialize == _JSON:
        return _encode_json(command)
    return _encode_binary(command)


def decode_header(data: bytes, serialize: int, body: Buffer = b"") -> Command:
    """Read a header; the error's position counts from the header's start."""
    if serialize == _JSON:
        return _decode_json(data, body)
    if serialize == Serialize.ROCKETMQ:
        return _decode_binary(data, body)
    raise HeaderError(f"header encoding {serialize} is neither JSON (0) nor binary (1)")


# --- JSON -----------------------------------------------------------------------------------------


class _JsonHeader(Struct, omit_defaults=True):
    """The JSON form, its members in the order that Java writes them."""

    code: int
    ext_fields: ExtFields | None = msgspec.field(name="extFields", default=None)
    flag: int = msgspec.field(name="flag", default_factory=int)
    language: str | None = None
    opaque: I32 = msgspec.field(name="opaque", default_factory=int)
    remark: str | None = None
    serialize: str | None = msgspec.field(name="serializeTypeCurrentRPC", default=None)
    version: int = msgspec.field(name="version", default_factory=int)


_decode_json_header = msgspec.json.Decoder(_JsonHeader).decode
_encode_json_header = msgspec.json.Encoder().encode
_LANGUAGE_NAMES = {language.value: language.name for language in Language}
_LANGUAGE_NUMBERS: dict[str | None, int] = {language.name: language.value for language in Language}


def _encode_json(command: Command) -> bytes:
    return _encode_json_header(
        _JsonHeader(
            command.code,
            command.ext_fields,
            command.flag,
            None if command.language is None else _LANGUAGE_NAMES.get(command.language),
            command.opaque,
            command.remark,
            "JSON",
            command.version,
        )
    )


def _decode_json(data: bytes, body: Buffer) -> Command:
    try:
        header = _decode_json_header(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        header = _decode_odd_json(data)
    language = header.language
    return Command(
        header.code,
        header.flag,
        header.opaque,
        _LANGUAGE_NUMBERS[language] if language in _LANGUAGE_NUMBERS else _odd_language(language),
        header.version,
        header.remark,
        header.ext_fields,
        body,
    )


def _decode_odd_json(data: bytes) -> _JsonHeader:
    """Read what fastjson accepts beyond strict JSON: other value types, unknown languages."""
    try:
        value = lenient_json.loads(data, references=False)
    except BodyError as error:
        raise HeaderError(error.reason, error.position) from error
    if not isinstance(value, dict):
        raise HeaderError("header is not a JSON object")
    present = {key: item for key, item in value.items() if item is not None}
    fields = present.get("extFields")
    if isinstance(fields, dict):
        present["extFields"] = {
            str(name): _as_text(item) for name, item in fields.items() if item is not None
        }
    if "remark" in present:
        present["remark"] = _as_text(present["remark"])
    present["language"] = _language_name(present.get("language"))
    try:
        return msgspec.convert(present, _JsonHeader, strict=False)
    except msgspec.ValidationError as error:
        raise HeaderError(f"header: {error}") from error


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else lenient_json.dumps(value)


def _language_name(value: object) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return _LANGUAGE_NAMES.get(value)
    return value if isinstance(value, str) else None


def _odd_language(name: str | None) -> int | None:
    return None if name is None else _LANGUAGE_NUMBERS.get(name.upper())


# --- binary ---------------------------------------------------------------------------------------

_FIXED = struct.Struct(">hbhiii")
_LENGTH = struct.Struct(">i")
_NAME_LENGTH = struct.Struct(">h")
_I16_MAX = 0x7FFF
_I32_MAX = 0x7FFF_FFFF


def _encode_binary(command: Command) -> bytes:
    language = Language.OTHER if command.language is None else command.language
    remark = (command.remark or "").encode()
    _check_fits(command)
    entries: list[bytes] = []
    for name, value in (command.ext_fields or {}).items():
        name_bytes, value_bytes = name.encode(), value.encode()
        if len(name_bytes) > _I16_MAX:
            raise InvalidArgument(f"field name {name[:20]!r}… is longer than {_I16_MAX} bytes")
        entries += (
            _NAME_LENGTH.pack(len(name_bytes)),
            name_bytes,
            _LENGTH.pack(len(value_bytes)),
            value_bytes,
        )
    fields = b"".join(entries)
    fixed = _FIXED.pack(
        command.code, language, command.version, command.opaque, command.flag, len(remark)
    )
    return b"".join((fixed, remark, _LENGTH.pack(len(fields)), fields))


def _check_fits(command: Command) -> None:
    for name, value, most in (
        ("code", command.code, _I16_MAX),
        ("version", command.version, _I16_MAX),
        ("opaque", command.opaque, _I32_MAX),
        ("flag", command.flag, _I32_MAX),
    ):
        if not -most - 1 <= value <= most:
            raise InvalidArgument(f"{name} {value} does not fit into a binary header")


def _decode_binary(data: bytes, body: Buffer) -> Command:
    if len(data) < _FIXED.size + _LENGTH.size:
        raise HeaderError(f"binary header of {len(data)} bytes is too short", len(data))
    code, language, version, opaque, flag, remark_length = _FIXED.unpack_from(data)
    remark, at = _text(data, _FIXED.size, remark_length)
    if len(data) - at < _LENGTH.size:
        raise HeaderError("header ends before the length of its fields", at)
    (fields_length,) = _LENGTH.unpack_from(data, at)
    at += _LENGTH.size
    if fields_length != len(data) - at:
        raise HeaderError(f"fields of {fields_length} bytes, but {len(data) - at} are left", at - 4)
    return Command(
        code,
        flag,
        opaque,
        language if language in _LANGUAGE_NAMES else None,
        version,
        remark or None,
        _binary_fields(data, at) if fields_length else None,
        body,
        Serialize.ROCKETMQ,
    )


def _binary_fields(data: bytes, at: int) -> ExtFields:
    fields: ExtFields = {}
    while at < len(data):
        name, at = _sized_text(data, at, _NAME_LENGTH)
        value, at = _sized_text(data, at, _LENGTH)
        if name and value:
            # In this form an empty value is a missing one.
            fields[name] = value
    return fields


def _sized_text(data: bytes, at: int, length: struct.Struct) -> tuple[str, int]:
    if len(data) - at < length.size:
        raise HeaderError("header ends inside its fields", at)
    return _text(data, at + length.size, length.unpack_from(data, at)[0])


def _text(data: bytes, at: int, length: int) -> tuple[str, int]:
    end = at + length
    if length < 0 or end > len(data):
        raise HeaderError(f"text of {length} bytes, but {len(data) - at} are left", at)
    try:
        return str(data[at:end], "utf-8"), end
    except UnicodeDecodeError as error:
        raise HeaderError("text is not UTF-8", at + error.start) from error
