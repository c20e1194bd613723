"""Parsing tokens into a checked tree. NOT and signs bind tightest, then comparisons, =, AND, OR."""

from __future__ import annotations

import sys

from turbopump.errors import InvalidExpression
from turbopump.filters.sql92.tokens import Kind, Token, Tokens, unexpected
from turbopump.filters.sql92.tree import (
    All,
    Any,
    Compare,
    Condition,
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

LENGTH_MAX = 16 * 1024
NESTING_MAX = 100
"""Nested parentheses, signs and NOTs, and links of chains such as ``a = b = c``."""

_OR, _AND, _EQUALITY, _COMPARISON = range(1, 5)
_LEVELS = {
    "OR": _OR,
    "AND": _AND,
    **dict.fromkeys(("=", "<>", "IS"), _EQUALITY),
    **dict.fromkeys((">", ">=", "<", "<=", "BETWEEN", "IN", "NOT"), _COMPARISON),
}
_TRUTHS = {"TRUE": True, "FALSE": False, "NULL": None}
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_INTEGER_DIGITS_MAX = 19
_DOUBLE_MAX = sys.float_info.max


def parse(text: str) -> Expression:
    """Return the tree of an expression; raises InvalidExpression.

    Whatever follows a complete expression is ignored, as RocketMQ does.
    """
    if len(text) > LENGTH_MAX:
        raise InvalidExpression(
            f"the expression must be at most {LENGTH_MAX} characters, got {len(text)}", 0
        )
    return _Parser(Tokens(text)).whole()


class _Parser:
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._nesting = 0
        self._links = 0

    def whole(self) -> Expression:
        position = self._tokens.peek().position
        return _condition(self._expression(_OR), position)

    def _expression(self, lowest: int) -> Expression:
        """Read operands joined by operators that bind at least as tightly as a level."""
        position = self._tokens.peek().position
        left = self._unary()
        links = 0
        # What follows `a IS NULL` and would bind more tightly does not belong to the expression.
        highest = _COMPARISON
        while lowest <= (level := self._level_ahead()) <= highest:
            highest = level
            if level <= _AND:
                left = self._terms(left, level, position)
                continue
            links += 1
            if links > 1:
                # Further operators lie above it in the tree.
                self._links = self._deeper(self._links)
            is_equality = level == _EQUALITY
            left = self._equality(left) if is_equality else self._comparison(left, position)
        return left

    def _level_ahead(self) -> int:
        """Return how tightly the next operator binds; 0 if there is none."""
        token = self._tokens.peek()
        is_operator = token.kind in {Kind.KEYWORD, Kind.SYMBOL}
        return _LEVELS.get(token.text, 0) if is_operator else 0

    def _terms(self, first: Expression, level: int, position: int) -> Expression:
        terms = [_condition(first, position)]
        word = "AND" if level == _AND else "OR"
        while self._tokens.take_if(word):
            position = self._tokens.peek().position
            terms.append(_condition(self._expression(level + 1), position))
        return All(tuple(terms)) if level == _AND else Any(tuple(terms))

    def _equality(self, left: Expression) -> Expression:
        operator = self._tokens.take()
        if operator.text == "IS":
            is_negated = self._tokens.take_if("NOT") is not None
            self._tokens.expect("NULL")
            return Not(IsNull(left)) if is_negated else IsNull(left)
        right = self._expression(_EQUALITY + 1)
        _check_equality(left, right, operator.position)
        equal = Equal(left, right)
        return Not(equal) if operator.text == "<>" else equal

    def _comparison(self, left: Expression, position: int) -> Expression:
        is_negated = self._tokens.take_if("NOT") is not None
        operator = self._tokens.take()
        match operator.text:
            case "BETWEEN":
                return self._between(left, position, is_negated=is_negated)
            case "IN":
                return self._in(left, position, is_negated=is_negated)
            case _ if is_negated:
                raise unexpected(operator, "BETWEEN", "IN")
        return self._compare(left, position, Order(operator.text), *self._operand())

    def _operand(self) -> tuple[Expression, int]:
        position = self._tokens.peek().position
        return self._unary(), position

    def _compare(
        self, left: Expression, left_at: int, order: Order, right: Expression, right_at: int
    ) -> Compare:
        _check_ordered(left, left_at)
        _check_ordered(right, right_at)
        return Compare(left, order, right)

    def _between(self, value: Expression, position: int, *, is_negated: bool) -> Expression:
        low, low_at = self._operand()
        self._tokens.expect("AND")
        high, high_at = self._operand()
        if is_negated:
            below = self._compare(value, position, Order.LESS, low, low_at)
            return Any((below, self._compare(value, position, Order.GREATER, high, high_at)))
        if isinstance(low, Numeric) and isinstance(high, Numeric) and low.value > high.value:
            raise InvalidExpression(
                f"BETWEEN {low.value} AND {high.value} matches nothing: "
                "the first must not exceed the second",
                low_at,
            )
        above = self._compare(value, position, Order.GREATER_EQUAL, low, low_at)
        return All((above, self._compare(value, position, Order.LESS_EQUAL, high, high_at)))

    def _in(self, value: Expression, position: int, *, is_negated: bool) -> In:
        if not isinstance(value, Property):
            raise InvalidExpression("IN expects a property name on its left side", position)
        self._tokens.expect("(")
        texts = [self._string()]
        while self._tokens.take_if(","):
            texts.append(self._string())
        self._tokens.expect(")")
        return In(value.name, frozenset(texts), is_negated)

    def _string(self) -> str:
        token = self._tokens.peek()
        if token.kind is not Kind.STRING:
            raise unexpected(token, "a string in single quotes")
        return _unquoted(self._tokens.take().text)

    def _unary(self) -> Expression:
        outside = self._nesting
        self._nesting = self._deeper(outside)
        try:
            return self._nested()
        finally:
            self._nesting = outside

    def _nested(self) -> Expression:
        tokens = self._tokens
        if tokens.take_if("+"):
            return self._unary()
        if tokens.take_if("-"):
            return Negative(self._unary())
        if tokens.take_if("NOT"):
            position = tokens.peek().position
            return Not(_condition(self._unary(), position))
        if tokens.take_if("("):
            inside = self._expression(_OR)
            tokens.expect(")")
            return inside
        return _primary(tokens.take())

    def _deeper(self, depth: int) -> int:
        if depth >= NESTING_MAX:
            raise InvalidExpression(
                f"the expression nests deeper than {NESTING_MAX} levels",
                self._tokens.peek().position,
            )
        return depth + 1


def _primary(token: Token) -> Expression:
    match token.kind:
        case Kind.IDENTIFIER:
            return Property(token.text)
        case Kind.STRING:
            return Text(_unquoted(token.text))
        case Kind.INTEGER:
            return _integer(token)
        case Kind.FLOAT:
            return _float(token)
        case Kind.KEYWORD if token.text in _TRUTHS:
            return Truth(_TRUTHS[token.text])
        case _:
            raise unexpected(token, "a property name, a constant or (")


def _unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'")


def _integer(token: Token) -> Numeric:
    digits = token.text.rstrip("lL")
    # Checked first: Python refuses to read thousands of digits.
    if len(digits) > _INTEGER_DIGITS_MAX or int(digits) > _INT64_MAX:
        raise InvalidExpression(f"integers must be at most {_INT64_MAX}", token.position)
    value = int(digits)
    return Numeric(value, Number.INT32 if value <= _INT32_MAX else Number.INT64)


def _float(token: Token) -> Numeric:
    value = float(token.text)
    if not 0.0 < value <= _DOUBLE_MAX:
        raise InvalidExpression(
            f"{token.text[:40]} is out of range: expected more than 0 and at most {_DOUBLE_MAX}; "
            "for zero write 0",
            token.position,
        )
    return Numeric(value, Number.DOUBLE)


def _condition(part: Expression, position: int) -> Expression:
    """Check that a part can be true or false; a bare property passes, though it never is true."""
    if isinstance(part, Condition | Property):
        return part
    raise InvalidExpression("expected a condition such as a = 1, found only a value", position)


def _check_ordered(operand: Expression, position: int) -> None:
    match operand:
        case Text() | Truth():
            raise InvalidExpression("only numbers and properties have an order", position)
        case Numeric() | Property() | Negative():
            return
        case _:
            raise InvalidExpression("the result of a condition has no order", position)


def _check_equality(left: Expression, right: Expression, position: int) -> None:
    if Truth(None) in (left, right):
        raise InvalidExpression("NULL equals nothing: write IS NULL or IS NOT NULL", position)
    if isinstance(left, Truth) and isinstance(right, Numeric | Text):
        raise InvalidExpression("TRUE and FALSE equal neither numbers nor strings", position)
