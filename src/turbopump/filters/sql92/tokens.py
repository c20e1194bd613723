"""Splitting an expression into tokens, one at a time and the longest that fits."""

from __future__ import annotations

import re
from enum import Enum

from msgspec import Struct

from turbopump.errors import InvalidExpression


class Kind(Enum):
    """The kind of a token; the value is its name in errors."""

    KEYWORD = "keyword"
    IDENTIFIER = "property name"
    INTEGER = "integer"
    FLOAT = "number"
    STRING = "string"
    SYMBOL = "operator"
    END = "end of expression"


class Token(Struct, frozen=True):
    """``text`` is as written, keywords in upper case; positions count characters from 0."""

    kind: Kind
    text: str
    position: int

    def __str__(self) -> str:
        return self.kind.value if self.kind is Kind.END else repr(self.text)


_KEYWORDS = frozenset({"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"})

# (?!): Python 3.11.2 loses its place if the last alternative fails after consuming something.
_COMMENT = r"/\*(?:[^*]|\*(?!/)|(?!))*+\*/|(?!)"
_SKIPPED = re.compile(rf"(?:[ \t\n\r\f]|--[^\n\r]*+[\n\r]|{_COMMENT})*+")
_SKIPPED_IN_LAST_LINE = re.compile(rf"(?:[ \t\f]|{_COMMENT})*+")
"""A line comment needs its line end: without one, its dashes are minus signs, as in RocketMQ.
Searching for the end at each of them would take quadratic time."""

_TOKEN = re.compile(
    r"""
      (?P<FLOAT>   (?:[0-9]+\.[0-9]* | \.[0-9]+) (?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+ )
    | (?P<INTEGER> (?:0|[1-9][0-9]*)[lL]? )
    | (?P<STRING>  '(?:''|[^'])*+' )
    | (?P<IDENTIFIER> [A-Za-z_$][A-Za-z0-9_$]* )
    | (?P<SYMBOL>  <> | >= | <= | [=<>(),+-] )
    """,
    re.VERBOSE,
)


class Tokens:
    """The tokens of a text, with lookahead.

    Text after the last token requested is never read, so garbage there goes unnoticed, as in
    RocketMQ.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._ahead: list[Token] = []
        self._position = 0
        self._last_line_end = max(text.rfind("\n"), text.rfind("\r"))

    def peek(self, ahead: int = 0) -> Token:
        """Return a token ahead without taking it."""
        while len(self._ahead) <= ahead:
            self._ahead.append(self._cut())
        return self._ahead[ahead]

    def take(self) -> Token:
        """Return the next token and advance."""
        self.peek()
        return self._ahead.pop(0)

    def take_if(self, *texts: str) -> Token | None:
        """Take the next token if it is one of some keywords or operators."""
        token = self.peek()
        is_wanted = token.kind in {Kind.KEYWORD, Kind.SYMBOL} and token.text in texts
        return self.take() if is_wanted else None

    def expect(self, text: str) -> None:
        """Take a keyword or an operator, or raise."""
        if self.take_if(text) is None:
            raise unexpected(self.peek(), text)

    def _cut(self) -> Token:
        start = self._skip_blanks()
        if start == len(self._text):
            self._position = start
            return Token(Kind.END, "", start)
        match = _TOKEN.match(self._text, start)
        if match is None:
            raise _unreadable(self._text, start)
        self._position = match.end()
        assert match.lastgroup is not None
        kind, text = Kind[match.lastgroup], match.group()
        if kind is Kind.IDENTIFIER and text.upper() in _KEYWORDS:
            return Token(Kind.KEYWORD, text.upper(), start)
        return Token(kind, text, start)

    def _skip_blanks(self) -> int:
        """Return where the next token begins."""
        is_last_line = self._position > self._last_line_end
        skipped = _SKIPPED_IN_LAST_LINE if is_last_line else _SKIPPED
        match = skipped.match(self._text, self._position)
        return self._position if match is None else match.end()


def unexpected(found: Token, *expected: str) -> InvalidExpression:
    """Return the error for an unexpected token."""
    return InvalidExpression(f"expected {' or '.join(expected)}, found {found}", found.position)


def _unreadable(text: str, position: int) -> InvalidExpression:
    rest = text[position : position + 2]
    if rest.startswith("'"):
        return InvalidExpression("the string has no closing quote", position)
    if rest == "/*":
        return InvalidExpression("the comment has no end, */", position)
    hint = {"!": "; for 'not equal' write <>", '"': "; strings have single quotes"}
    found = rest[0]
    return InvalidExpression(f"{found!r} is not part of SQL92{hint.get(found, '')}", position)
