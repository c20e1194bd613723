"""Tag expressions: ``*`` for everything, or tags joined by ``||``.

The broker compares hashes, which a consume queue keeps of each message, so that no message has to
be read; two tags may share a hash. The client compares the tags themselves.
"""

from __future__ import annotations

import re

from msgspec import Struct

from turbopump.errors import InvalidArgument
from turbopump.filters.sql92 import compile_sql
from turbopump.wire.hashing import string_hash

EVERYTHING = "*"
TAG = "TAG"
SQL92 = "SQL92"

_OR = "||"
_SQL_MARK = re.compile(r"[<>=]|\s(?:AND|OR|IN|IS|BETWEEN)\b", re.IGNORECASE)
_SEPARATOR = re.compile(r"\s*(?:[,;|]|&&|\s&\s)\s*")
_ENCLOSING = "'\"()[]{}"
_INSTEAD = "write tags such as 'created || paid', or '*' for every message"


class TagFilter(Struct, frozen=True):
    """Wanted tags and their hashes, in the order of the expression."""

    everything: bool
    tags: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()


def parse_tags(expression: str | None) -> TagFilter:
    """Read a tag expression; None and empty mean everything, only blanks between bars nothing."""
    if not expression or expression == EVERYTHING:
        return TagFilter(everything=True)
    pieces = [piece for piece in expression.split(_OR) if piece]
    if not pieces:
        raise InvalidArgument(f"tag expression {expression!r} has no tag: expected a || b, or *")
    tags = dict.fromkeys(piece.strip() for piece in pieces if piece.strip())
    return TagFilter(
        everything=False, tags=tuple(tags), codes=tuple(dict.fromkeys(map(string_hash, tags)))
    )


def wanted_tags(expression: object, what: str) -> TagFilter:
    """Parse a user's subscription to a topic; ``what`` names it in errors.

    Peers may send an expression without any tag, which matches no message. Users do not write one
    on purpose, and a consumer with it would skip everything and commit that.
    """
    if expression is not None and not isinstance(expression, str):
        raise InvalidArgument(f"{what} is {expression!r}: {_INSTEAD}")
    if expression and not expression.replace(_OR, "").strip():
        raise InvalidArgument(f"{what} is {expression!r}, which has no tag: {_INSTEAD}")
    wanted = parse_tags(expression)
    if expression and _is_sql(expression):
        raise InvalidArgument(
            f"{what} is {expression!r}, which is SQL92, not tags: pass Sql({expression!r});"
            f" for a tag of that name, write {expression + ' ' + _OR!r}"
        )
    # Two bars at the end are for tags that look like a slip; a star is none.
    if wanted.tags == (EVERYTHING,) or not (expression or "").rstrip().endswith(_OR):
        _check_slips(wanted.tags, f"{what} is {expression!r}", expression or "")
    return wanted


def _check_slips(tags: tuple[str, ...], found: str, expression: str) -> None:
    """Reject tags that hardly any message has: others were meant, and all would be skipped."""
    for tag in tags:
        if EVERYTHING in tag:
            raise InvalidArgument(
                f"{found}, which asks for a tag named {tag!r}, since {EVERYTHING} has a meaning "
                f"only by itself: {_INSTEAD}"
            )
        if _SEPARATOR.search(tag) or tag[0] in _ENCLOSING:
            parts = (
                part.strip(_ENCLOSING + " ") for each in tags for part in _SEPARATOR.split(each)
            )
            meant = f" {_OR} ".join(dict.fromkeys(filter(None, parts)))
            raise InvalidArgument(
                f"{found}, which asks for a tag named {tag!r}: "
                f"{f'write {meant!r}' if meant else _INSTEAD};"
                f" if a tag has that name, write {f'{expression} {_OR}'!r}"
            )


def _is_sql(expression: str) -> bool:
    """Whether an expression compiles as SQL92; many tags do, so it must have an operator too."""
    if _OR in expression or not _SQL_MARK.search(expression):
        return False
    try:
        compile_sql(expression)
    except InvalidArgument:
        return False
    return True
