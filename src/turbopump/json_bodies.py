"""Bodies in JSON: values of many types, written and read by msgspec or by classes of their own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import msgspec.inspect

from turbopump.errors import InvalidArgument

_SHOWN_CHARS_MAX = 80
_INSTEAD = (
    "a msgspec Struct, a dataclass, a TypedDict, an attrs class, or a class with model_validate "
    "and model_dump such as a Pydantic model"
)


def shortened(value: object, chars_max: int = _SHOWN_CHARS_MAX) -> str:
    """Return the representation of a value, cut if it is long."""
    if isinstance(value, bytes | str) and len(value) > chars_max:
        unit = "bytes" if isinstance(value, bytes) else "characters"
        return f"{value[:chars_max]!r}… ({len(value)} {unit})"
    text = repr(value)
    return text if len(text) <= 2 * chars_max else f"{text[: 2 * chars_max]}…"


def json_body(value: object) -> bytes:
    """Return a value as JSON; raises InvalidArgument if it has none."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain_model)
    except (
        msgspec.MsgspecError,
        NotImplementedError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise InvalidArgument(f"{shortened(value)} cannot be written as JSON: {error}") from error


def check_json_type(kind: Any) -> None:
    """Raise InvalidArgument for a type whose values have no JSON."""
    try:
        info = msgspec.inspect.type_info(kind)
    except (NameError, TypeError):
        # What cannot be read back, such as one of two Structs, may be written nevertheless.
        return
    for plain in _plain_classes(info, "model_dump", set()):
        # A value of an abstract class is one of another class.
        if not inspect.isabstract(plain) and not getattr(plain, "_is_protocol", False):
            raise InvalidArgument(f"{plain.__name__} cannot be written as JSON; use {_INSTEAD}")


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return what reads values of a type; raises InvalidArgument if none can be read."""
    try:
        hash(kind)
    except TypeError:
        # Annotated with something that cannot be hashed.
        return _new_decoder(kind)
    return _cached_decoder(kind)


def _new_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    try:
        decoder = msgspec.json.Decoder(kind, dec_hook=_model)
    except NameError as error:
        raise InvalidArgument(
            f"{error}; define the types of its fields at the top level of its module"
        ) from error
    except TypeError as error:
        advice = f"; use {_INSTEAD}" if "custom type" in str(error) else ""
        raise InvalidArgument(f"{error}{advice}") from error
    for plain in _plain_classes(msgspec.inspect.type_info(kind), "model_validate", set()):
        raise InvalidArgument(f"{plain.__name__} cannot be read from JSON; use {_INSTEAD}")
    return decoder


_cached_decoder = lru_cache(maxsize=256)(_new_decoder)


def _plain_classes(info: object, method: str, seen: set[int]) -> Iterator[type]:
    """Return the classes in a type that msgspec does not know and that lack a method."""
    if id(info) in seen:
        return
    seen.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType):
        if not hasattr(info.cls, method):
            yield info.cls
    elif isinstance(info, tuple):
        for part in info:
            yield from _plain_classes(part, method, seen)
    elif isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        for name in info.__struct_fields__:
            yield from _plain_classes(getattr(info, name), method, seen)


def _model(kind: Any, value: object) -> object:
    """Decode classes that validate themselves, such as Pydantic models."""
    return kind.model_validate(value)


def _plain_model(value: Any) -> object:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"objects of type {type(value).__name__} are not supported")
