"""Compiling a tree into a function of a message's properties.

Properties are strings, and are converted to the type of what they are compared with. One that
cannot be converted fails the whole expression, whatever follows it: the message does not match.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any as AnyValue
from typing import assert_never

from msgspec import Struct

from turbopump.errors import InvalidArgument
from turbopump.filters.sql92.conversions import (
    CONVERSIONS,
    ConversionFailed,
    rank,
    shown,
    to_bool,
    to_double,
)
from turbopump.filters.sql92.parser import parse
from turbopump.filters.sql92.tree import (
    All,
    Any,
    Compare,
    Equal,
    Expression,
    In,
    IsNull,
    Negative,
    Not,
    Number,
    Numeric,
    Order,
    Property,
    Text,
    Truth,
)

Properties = Mapping[str, str]
Evaluate = Callable[[Properties], bool | None]

_CACHED_MAX = 100

Ordered = Callable[[AnyValue, AnyValue], bool]
"""Compares two numbers, or two ranks of numbers."""

_ORDERS: dict[Order, tuple[Ordered, Ordered]] = {
    Order.GREATER: (operator.gt, operator.lt),
    Order.GREATER_EQUAL: (operator.ge, operator.le),
    Order.LESS: (operator.lt, operator.gt),
    Order.LESS_EQUAL: (operator.le, operator.ge),
}
"""Each with its reverse, for swapped operands."""


class Sql(Struct, frozen=True):
    """An expression to subscribe with; raises InvalidExpression if it is wrong.

    ::

        Sql("amount > 100 AND region IN ('eu', 'us')")
    """

    expression: str

    def __post_init__(self) -> None:
        if not isinstance(self.expression, str):
            raise InvalidArgument(f"Sql() expects a string, got {self.expression!r}")
        compile_sql(self.expression)


class SqlFilter:
    """A compiled expression."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def result(self, properties: Properties | None) -> bool | None:
        """Return true, false, or None for null; raises ConversionFailed."""
        return self._evaluate(properties or {})

    def matches(self, properties: Properties | None) -> bool:
        """Whether a message is wanted: only if the result is true."""
        try:
            return self._evaluate(properties or {}) is True
        except ConversionFailed:
            return False


@lru_cache(_CACHED_MAX)
def compile_sql(expression: str) -> SqlFilter:
    """Return the filter of an expression; raises InvalidExpression."""
    return SqlFilter(_condition(parse(expression)))


# --- conditions -----------------------------------------------------------------------------------


def _condition(part: Expression) -> Evaluate:
    match part:
        case Property(name):
            # Its string is not a boolean, so it counts as false.
            return lambda properties: False if name in properties else None
        case Truth(value):
            return lambda _: value
        case Not(operand):
            return _not(_condition(operand))
        case IsNull(operand):
            evaluate = _value(operand)
            return lambda properties: evaluate(properties) is None
        case Equal(left, right):
            return _equal(left, right)
        case Compare(left, order, right):
            return _compare(left, order, right)
        case In(name, texts, is_negated):
            return _in(name, texts, is_negated=is_negated)
        case All(terms) | Any(terms):
            return _joined(terms, decides=isinstance(part, Any))
        case Numeric() | Text() | Negative():
            raise AssertionError("expected a condition, got a value")
        case _:
            assert_never(part)


def _joined(terms: tuple[Expression, ...], *, decides: bool) -> Evaluate:
    """AND is decided by the first false, OR by the first true; else a null makes it null."""
    conditions = tuple(map(_condition, terms))

    def evaluate(properties: Properties) -> bool | None:
        undecided: bool | None = not decides
        for condition in conditions:
            value = condition(properties)
            if value is decides:
                return decides
            if value is None:
                undecided = None
        return undecided

    return evaluate


def _not(condition: Evaluate) -> Evaluate:
    def evaluate(properties: Properties) -> bool | None:
        value = condition(properties)
        return None if value is None else not value

    return evaluate


def _in(name: str, texts: frozenset[str], *, is_negated: bool) -> Evaluate:
    def evaluate(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else (text in texts) is not is_negated

    return evaluate


# --- comparisons ----------------------------------------------------------------------------------


def _compare(left: Expression, order: Order, right: Expression) -> Evaluate:
    """Choose the comparison when compiling: only property values are unknown then."""
    a, b = _folded(left), _folded(right)
    compare, reverse = _ORDERS[order]
    match a, b:
        case (Property(name), Numeric()):
            return _property_order(name, compare, b)
        case (Numeric(), Property(name)):
            return _property_order(name, reverse, a)
        case (Property(name), Property(other)):
            return _properties_order(name, compare, other)
        case (Numeric(), Numeric()):
            constant = compare(_widened(a, b), _widened(b, a))
            return lambda _: constant
        case _:
            # A sign before anything but a number makes it null.
            return lambda _: None


def _property_order(name: str, order: Ordered, constant: Numeric) -> Evaluate:
    convert, number = CONVERSIONS[constant.kind], constant.value
    if constant.kind is Number.DOUBLE:
        # The constant is neither NaN nor a zero, so ranks matter only for NaN, which is above all.
        order = _nan_above_all(order)

    def evaluate(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else order(convert(text), number)

    return evaluate


def _nan_above_all(order: Ordered) -> Ordered:
    nan_result = order(1, 0)
    # Only NaN differs from itself.
    return lambda a, b: order(a, b) if a == a else nan_result


def _properties_order(name: str, order: Ordered, other: str) -> Evaluate:
    def evaluate(properties: Properties) -> bool | None:
        a, b = properties.get(name), properties.get(other)
        if a is None or b is None:
            return None
        return order(rank(to_double(a)), rank(to_double(b)))

    return evaluate


def _folded(part: Expression) -> Expression | None:
    """Return a part with its sign applied to the number; None for signs before anything else."""
    if not isinstance(part, Negative):
        return part
    operand = _folded(part.operand)
    return Numeric(-operand.value, operand.kind) if isinstance(operand, Numeric) else None


def _widened(number: Numeric, other: Numeric) -> int | float:
    return float(number.value) if other.kind is Number.DOUBLE else number.value


# --- equality -------------------------------------------------------------------------------------

Value = str | bool | Numeric | None


def _equal(left: Expression, right: Expression) -> Evaluate:
    """Compare two values: null equals null, and otherwise makes the result null or false."""
    match left, _folded(right):
        case (Property(name), Text(text)):
            return _property_equals(name, str, text)
        case (Property(name), Numeric(number, kind)):
            return _property_equals(name, CONVERSIONS[kind], number)
    left_value, right_value = _value(left), _value(right)

    def evaluate(properties: Properties) -> bool | None:
        a, b = left_value(properties), right_value(properties)
        if a is None:
            return True if b is None else None
        return False if b is None else _are_equal(a, b)

    return evaluate


def _property_equals(name: str, convert: Callable[[str], object], constant: object) -> Evaluate:
    """The most frequent kind by far."""

    def evaluate(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else convert(text) == constant

    return evaluate


def _value(part: Expression) -> Callable[[Properties], Value]:
    folded = _folded(part)
    match folded:
        case Property(name):
            return lambda properties: properties.get(name)
        case Text(text):
            return lambda _: text
        case Numeric() | None:
            return lambda _: folded
        case _:
            return _condition(folded)


def _are_equal(a: str | bool | Numeric, b: str | bool | Numeric) -> bool:
    match a, b:
        case (str(), bool()):
            return to_bool(a) is b
        case (bool(), str()):
            # RocketMQ converts strings only on the left side.
            raise ConversionFailed(f"a condition is compared with {shown(b)}: swap the two")
        case (Numeric(), str()):
            return bool(a.value == CONVERSIONS[a.kind](b))
        case (str(), Numeric()):
            return bool(CONVERSIONS[b.kind](a) == b.value)
        case (Numeric(), Numeric()):
            return _widened(a, b) == _widened(b, a)
        case _:
            return type(a) is type(b) and a == b
