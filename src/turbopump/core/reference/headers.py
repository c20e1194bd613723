"""Headers of the ordinary form, in JSON or in the binary form.

The ordinary form is what clients and brokers write: no blanks except at the end, no member twice,
no member that is not known here, fields that are strings, numbers in their shortest form, and only
escapes that stand for one character. Whatever else a peer may write is left to the general decoder
in `turbopump.wire.command`, which agrees with this one on all that this one reads.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from json import loads
from typing import Any

from msgspec import Struct

JSON = 0
BINARY = 1

LANGUAGES = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY"),
    *("OTHER", "HTTP", "GO", "PHP", "OMS", "RUST"),
)
"""The names of languages in JSON headers; their numbers are those of the binary form."""

_I32_MAX = 2**31 - 1
_I64_MAX = 2**63 - 1
_INTEGER = r"(?:0|-?[1-9][0-9]{0,18}+)"
_AS_INTEGER = re.compile(_INTEGER)


class Fields(dict[str, str]):
    """The fields of a header by name; the methods raise ValueError for what is unusual."""

    def are_within(self, names: Collection[str]) -> bool:
        return all(name in names for name in self)

    def text(self, name: str) -> str:
        if name not in self:
            raise ValueError("a field is missing")
        return self[name]

    def optional_text(self, name: str) -> str | None:
        return self.get(name)

    def i32(self, name: str) -> int:
        return _integer(self.text(name), _I32_MAX)

    def optional_i32(self, name: str) -> int | None:
        return None if name not in self else _integer(self[name], _I32_MAX)

    def i64(self, name: str) -> int:
        return _integer(self.text(name), _I64_MAX)

    def optional_boolean(self, name: str) -> bool | None:
        text = self.get(name)
        if text not in {None, "true", "false"}:
            raise ValueError("neither true nor false")
        return None if text is None else text == "true"


class Header(Struct, frozen=True):
    code: int
    flag: int
    opaque: int
    language: int | None
    version: int
    remark: str | None
    fields: Fields


def read_header(data: bytes, serialize: int) -> Header | None:
    """Read a header; None if its form is not the ordinary one."""
    try:
        if serialize == JSON:
            return _read_json(data)
        return _read_binary(data) if serialize == BINARY else None
    except ValueError:
        return None


def _integer(text: str, most: int) -> int:
    value = int(text) if _AS_INTEGER.fullmatch(text) else None
    if value is None or not -most - 1 <= value <= most:
        raise ValueError("not a number in its shortest form, or out of range")
    return value


# --- JSON -----------------------------------------------------------------------------------------

_PLAIN = r'[^"\\\x00-\x1f]*+'
_ESCAPE = r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})'
_STRING = f'"{_PLAIN}(?:{_ESCAPE}{_PLAIN})*"'
_NAME = r'"[A-Za-z_]+"'
_FIELD = f"{_NAME}:{_STRING}"
_FIELDS = rf"\{{(?:{_FIELD}(?:,{_FIELD})*)?\}}"
_MEMBER = f"{_NAME}:(?:{_STRING}|{_INTEGER}|{_FIELDS})"
_HEADER = re.compile(rf"\{{{_MEMBER}(?:,{_MEMBER})*\}}[ \t\r\n]*")


def _read_json(data: bytes) -> Header:
    text = data.decode()
    if not _HEADER.fullmatch(text):
        raise ValueError("not in the ordinary form")
    members = _without_repetition(loads(text, object_pairs_hook=list))
    header = Header(
        code=_member(members, "code"),
        flag=_member(members, "flag", 0),
        opaque=_member(members, "opaque", 0),
        language=_language(members.pop("language", None)),
        version=_member(members, "version", 0),
        remark=_text(members.pop("remark", None)),
        fields=Fields(_without_repetition(members.pop("extFields", []))),
    )
    if members.pop("serializeTypeCurrentRPC", "JSON") != "JSON" or members:
        raise ValueError("other members")
    return header


def _without_repetition(members: Any) -> dict[str, Any]:
    if not isinstance(members, list) or len(dict(members)) < len(members):
        raise ValueError("a member twice")
    return dict(members)


def _member(members: dict[str, Any], name: str, default: int | None = None) -> int:
    value = members.pop(name, default)
    if not isinstance(value, int) or not -_I32_MAX - 1 <= value <= _I32_MAX:
        raise ValueError("not a number, or out of range")
    return value


def _language(name: Any) -> int | None:
    return None if name is None else LANGUAGES.index(name)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ValueError("not a text")


# --- binary ---------------------------------------------------------------------------------------

_FIXED = struct.Struct(">hbhiii")


def _read_binary(data: bytes) -> Header:
    if len(data) < _FIXED.size:
        raise ValueError("too short")
    code, language, version, opaque, flag, _ = _FIXED.unpack_from(data)
    # The length of the remark is the last of these.
    remark, at = _sized_text(data, _FIXED.size - 4, 4)
    if _length(data, at, 4) != len(data) - at - 4:
        raise ValueError("fields that do not end with the header")
    return Header(
        code=code,
        flag=flag,
        opaque=opaque,
        language=language if 0 <= language < len(LANGUAGES) else None,
        version=version,
        remark=remark or None,
        fields=_binary_fields(data, at + 4),
    )


def _binary_fields(data: bytes, at: int) -> Fields:
    fields = Fields()
    while at < len(data):
        name, at = _sized_text(data, at, 2)
        value, at = _sized_text(data, at, 4)
        if not name or not value or name in fields:
            raise ValueError("no name or value, or a field twice")
        fields[name] = value
    return fields


def _sized_text(data: bytes, at: int, length_bytes: int) -> tuple[str, int]:
    length = _length(data, at, length_bytes)
    at += length_bytes
    if not 0 <= length <= len(data) - at:
        raise ValueError("a text that does not end within the header")
    return data[at : at + length].decode(), at + length


def _length(data: bytes, at: int, length_bytes: int) -> int:
    if len(data) - at < length_bytes:
        raise ValueError("no length")
    return int.from_bytes(data[at : at + length_bytes], "big", signed=True)
