"""Tag expressions: ``*`` for everything, or tags joined by ``||``.

The broker compares hashes, which a consume queue keeps of each message, so that no message has to
be read; two tags may share a hash. The client compares the tags themselves.
"""

from __future__ import annotations

from msgspec import Struct

from turbopump.errors import InvalidArgument
from turbopump.wire.hashing import string_hash

EVERYTHING = "*"
TAG = "TAG"
SQL92 = "SQL92"

_OR = "||"


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
