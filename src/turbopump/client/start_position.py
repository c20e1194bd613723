"""Where to start in a queue that the group has not consumed from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from turbopump.errors import InvalidArgument
from turbopump.message import QueueOffset
from turbopump.wire.bodies import ConsumeFrom
from turbopump.wire.names import RETRY_PREFIX

StartFrom = Literal["last", "first"] | datetime
"""The end of each queue, its beginning, or messages stored since a point in time."""


@dataclass(frozen=True, slots=True)
class At:
    """At this offset."""

    offset: QueueOffset


@dataclass(frozen=True, slots=True)
class AtEnd:
    """After the newest message, wherever it is."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """At the first message stored since then."""

    timestamp_ms: int


Start = At | AtEnd | AtTime


def start_in(topic: str, stored: QueueOffset | None, start_from: StartFrom) -> Start:
    """Decide where to start; the group's committed offset always takes precedence."""
    if stored is not None and stored >= 0:
        return At(stored)
    is_retry = topic.startswith(RETRY_PREFIX)
    if start_from == "first":
        return At(QueueOffset(0))
    if start_from == "last":
        # Messages in the retry topic failed before and must be retried.
        return At(QueueOffset(0)) if is_retry else AtEnd()
    if isinstance(start_from, datetime):
        return AtEnd() if is_retry else AtTime(round(start_from.timestamp() * 1000))
    raise InvalidArgument(_refusal(start_from))


def consume_from(start_from: StartFrom) -> ConsumeFrom:
    """Return the protocol's value; raises InvalidArgument for anything else."""
    if start_from == "first":
        return ConsumeFrom.FIRST_OFFSET
    if start_from == "last":
        return ConsumeFrom.LAST_OFFSET
    if isinstance(start_from, datetime):
        _require_utc_time(start_from)
        return ConsumeFrom.TIMESTAMP
    raise InvalidArgument(_refusal(start_from))


def _require_utc_time(start_from: datetime) -> None:
    """Refuse times without a UTC equivalent, such as the first hours of year 1 in the east."""
    try:
        start_from.astimezone(UTC).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidArgument(
            f'start_from must be a time that UTC can express, got {start_from!r}; use "first" for '
            'everything, or "last"'
        ) from None


def _refusal(value: object) -> str:
    return f'start_from must be "last", "first" or a datetime, got {value!r}'
