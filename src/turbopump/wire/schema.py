"""How headers and bodies are declared, and the one codec for each.

A subclass is frozen, takes keywords only, and lists its fields in snake_case; on the wire they are
camelCase unless ``field(name=...)`` says otherwise. Headers are sent as strings, bodies as JSON;
None is omitted from both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import astuple
from msgspec.structs import fields as struct_fields

from turbopump.errors import BodyError, HeaderError
from turbopump.wire import lenient_json

I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

ExtFields = dict[str, str]


class Header(Struct, frozen=True, rename="camel", kw_only=True, gc=False):
    """The typed fields of a request or an answer."""

    def to_ext_fields(self) -> ExtFields:
        """Return the fields as strings for the wire."""
        return {
            name: value if value.__class__ is str else _TEXT[value.__class__](value)
            for name, value in zip(self.__struct_encode_fields__, astuple(self), strict=True)
            if value is not None
        }

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str] | None) -> Self:
        """Read the fields; unknown ones are ignored, errors name the invalid or missing one."""
        given = ext_fields or {}
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError:
            return cls._from_odd_texts(given)

    @classmethod
    def _from_odd_texts(cls, given: Mapping[str, str]) -> Self:
        """Read strings as Java's parsers do: anything but "true" is false, and +1 is a number."""
        texts = dict(given)
        for field in struct_fields(cls):
            text = texts.get(field.encode_name)
            if text is not None and field.type in _BOOLEANS:
                texts[field.encode_name] = "true" if text.lower() == "true" else "false"
            elif text is not None and text[:1] == "+" and field.type not in _TEXTS:
                texts[field.encode_name] = text[1:]
        try:
            return msgspec.convert(texts, cls, strict=False)
        except msgspec.ValidationError as error:
            raise HeaderError(f"{cls.__name__}: {_reason(error, given)}") from error


class Body(Struct, frozen=True, rename="camel", kw_only=True):
    """A JSON body."""

    def encode(self, *, bare_keys: bool = False) -> bytes:
        """Return the JSON; ``bare_keys`` writes integer and object keys as Java peers do."""
        return lenient_json.dumps(_without_none(self), bare_keys=bare_keys).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read the JSON, standard or Java's; unknown members are ignored."""
        return cls.from_value(parsed(data))

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Convert JSON that was already parsed.

        A null member counts as missing: the Go client writes empty lists so.
        """
        try:
            return msgspec.convert(value, cls, strict=False)
        except msgspec.ValidationError:
            pass
        try:
            return msgspec.convert(_without_none(value), cls, strict=False)
        except msgspec.ValidationError as error:
            raise BodyError(f"{cls.__name__}: {error}") from error


def parsed(data: bytes) -> object:
    """Parse the JSON of a body, standard or Java's, for `Body.from_value`."""
    value = lenient_json.loads(data)
    return lenient_json.with_object_keys(value) if _QUOTED_OBJECT in data else value


_QUOTED_OBJECT = b'"{\\"'
"""The start of an object used as a key when the writer had to produce standard JSON."""

_SHOWN_CHARS_MAX = 200

_BOOLEANS: tuple[Any, ...] = (bool, bool | None)
_TEXTS: tuple[Any, ...] = (str, str | None)

_TEXT: dict[type, Callable[[Any], str]] = {
    int: str,
    float: str,
    bool: ("false", "true").__getitem__,
}


def _reason(error: msgspec.ValidationError, ext_fields: Mapping[str, str]) -> str:
    reason = str(error)
    name = reason.rpartition("$.")[2].rstrip("`")
    if name not in ext_fields:
        return reason
    return f"{reason}, which is {ext_fields[name][:_SHOWN_CHARS_MAX]!r}"


def _without_none(value: Any) -> Any:
    """Turn structs into mappings without None; keys that are structs stay as they are."""
    if isinstance(value, Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        members = ((name, getattr(value, attribute)) for name, attribute in names)
        return {name: _without_none(member) for name, member in members if member is not None}
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple | frozenset | set):
        return [_without_none(item) for item in value]
    return value
