"""What a property's text means when compared with a number or a boolean; the rules are Java's."""

from __future__ import annotations

import math
import re

from turbopump.filters.sql92.tree import Number

_INTEGER = re.compile(r"[+-]?\d+")
_INTEGER_LENGTH_MAX = 4000
"""Python refuses to parse much longer ones, which could only be leading zeros."""

_INT32_DIGITS = 9
_INT64_DIGITS = 18
"""Numbers of up to this many digits always fit, if they have no sign."""

_DOUBLE = re.compile(
    r"""
    (?P<decimal> [+-]? (?:[0-9]+\.?[0-9]* | \.[0-9]+) (?:[eE][+-]?[0-9]+)? ) [fFdD]?
    | (?P<hexadecimal> [+-]? 0[xX] (?:[0-9a-fA-F]+\.?[0-9a-fA-F]* | \.[0-9a-fA-F]+)
        [pP][+-]?[0-9]+ ) [fFdD]?
    | (?P<special> [+-]? (?:NaN | Infinity) )
    """,
    re.VERBOSE,
)
_BLANKS = "".join(map(chr, range(33)))
_SHOWN_MAX = 40


class ConversionFailed(Exception):
    """A property cannot be converted to the type of the constant that it is compared with."""


def to_bool(text: str) -> bool:
    return text.lower() == "true"


def to_int32(text: str) -> int:
    if len(text) <= _INT32_DIGITS and text.isascii() and text.isdigit():
        return int(text)
    return _to_integer(text, Number.INT32, 1 << 31)


def to_int64(text: str) -> int:
    if len(text) <= _INT64_DIGITS and text.isascii() and text.isdigit():
        return int(text)
    return _to_integer(text, Number.INT64, 1 << 63)


def _to_integer(text: str, kind: Number, limit: int) -> int:
    if len(text) <= _INTEGER_LENGTH_MAX and _INTEGER.fullmatch(text):
        number = int(text)
        if -limit <= number < limit:
            return number
    raise _failed(text, kind)


def to_double(text: str) -> float:
    """Parse a double; blanks around it, a suffix and hexadecimal digits are accepted."""
    match = _DOUBLE.fullmatch(text.strip(_BLANKS))
    if match is None:
        raise _failed(text, Number.DOUBLE)
    hexadecimal = match["hexadecimal"]
    if hexadecimal is None:
        return float(match["decimal"] or match["special"])
    try:
        return float.fromhex(hexadecimal)
    except OverflowError:
        return -math.inf if hexadecimal.startswith("-") else math.inf


def rank(number: float) -> tuple[bool, float, float]:
    """Return a sort key that orders doubles as Java does: NaN above all, -0.0 below 0.0."""
    if math.isnan(number):
        return True, 0.0, 0.0
    return False, number, math.copysign(1, number)


CONVERSIONS = {Number.INT32: to_int32, Number.INT64: to_int64, Number.DOUBLE: to_double}


def shown(text: str) -> str:
    """Return a text as errors show it."""
    return repr(text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "…")


def _failed(text: str, kind: Number) -> ConversionFailed:
    return ConversionFailed(f"expected {kind.value}, found {shown(text)}")
