"""The parts of an expression, as the parser leaves them: checked and frozen."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class Number(Enum):
    """How a numeric constant is compared, and what a property compared with it must look like."""

    INT32 = "a 32-bit integer"
    INT64 = "a 64-bit integer"
    DOUBLE = "a number"


class Order(Enum):
    """A comparison that needs numbers."""

    GREATER = ">"
    GREATER_EQUAL = ">="
    LESS = "<"
    LESS_EQUAL = "<="


class Property(Struct, frozen=True):
    """The value of a message property, always a string; null when the message lacks it."""

    name: str


class Numeric(Struct, frozen=True):
    """A numeric constant as written."""

    value: int | float
    kind: Number


class Text(Struct, frozen=True):
    """A string constant."""

    value: str


class Truth(Struct, frozen=True):
    """TRUE, FALSE or NULL."""

    value: bool | None


class Negative(Struct, frozen=True):
    """A minus sign: null for everything but numbers."""

    operand: Expression


class Not(Struct, frozen=True):
    operand: Expression


class Equal(Struct, frozen=True):
    left: Expression
    right: Expression


class IsNull(Struct, frozen=True):
    operand: Expression


class Compare(Struct, frozen=True):
    left: Expression
    order: Order
    right: Expression


class In(Struct, frozen=True):
    """Whether a property is one of some texts, or none of them."""

    name: str
    texts: frozenset[str]
    is_negated: bool


class All(Struct, frozen=True):
    """Terms joined by AND. One list, however many: a chain nests no deeper than a pair."""

    terms: tuple[Expression, ...]


class Any(Struct, frozen=True):
    """Terms joined by OR."""

    terms: tuple[Expression, ...]


Condition = Truth | Not | Equal | IsNull | Compare | In | All | Any
"""Parts whose value is true, false or null."""

Expression = Property | Numeric | Text | Negative | Condition
