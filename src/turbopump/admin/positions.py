"""Positions in a queue: earliest, latest, a time, an offset."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from turbopump.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Earliest:
    """Before the oldest message that is still there."""


@dataclass(frozen=True, slots=True)
class Latest:
    """After the newest message."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first message stored at or after a time; without a zone it is local time."""

    moment: datetime

    @property
    def epoch_ms(self) -> int:
        return round(self.moment.timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class AtOffset:
    """At an offset; a queue that does not reach that far is at its nearest end."""

    offset: int

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise InvalidArgument(f"offset must be 0 or more, got {self.offset}")


Position = Earliest | Latest | AtTime | AtOffset


@dataclass(frozen=True, slots=True)
class Last:
    """The position of the last ``count`` messages of a topic."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InvalidArgument(f"count must be at least 1, got {self.count}")


Start = Position | Last
"""Where reading begins."""
