"""Start and end positions as users specify them: ``earliest``, a time, offsets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue
from turbopump.spark.option_values import timestamp_ms

LATEST_OFFSET = -1
EARLIEST_OFFSET = -2
"""The names that users of the Kafka connector write for the ends of a queue."""

_FORMS = (
    "earliest, latest, group, group with a fallback such as group,earliest, a timestamp such as "
    "2026-01-31T08:00:00Z, milliseconds since 1970, or "
    'JSON such as {"orders": {"broker-a": {"0": 17, "1": -2, "2": "2026-01-31T08:00:00Z"}}}'
)

_TIME_FORMS = (
    "offsets as numbers and timestamps as quoted text, such as "
    '{"orders": {"0": 17, "1": "2026-01-31T08:00:00Z"}}'
)


@dataclass(frozen=True, slots=True)
class Earliest:
    """At the oldest message that a broker still has."""


@dataclass(frozen=True, slots=True)
class Latest:
    """After the newest message."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """At the first message stored at or after a time."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class OfGroup:
    """At the group's committed offset, or else at this position; None means the usual default."""

    otherwise: Earliest | Latest | AtTime | None = None


@dataclass(frozen=True, slots=True)
class Explicit:
    """At (topic, broker, queue, offset or time); the broker is empty if there is only one."""

    entries: tuple[tuple[str, str, int, int | AtTime], ...]


_Json: TypeAlias = dict[str, dict[str, int | str | dict[str, int | str]]]
Position = Earliest | Latest | OfGroup | AtTime | Explicit

_WORDS: Mapping[str, Position] = {
    "earliest": Earliest(),
    "latest": Latest(),
    "group": OfGroup(),
}


def parse_position(name: str, text: str) -> Position:
    """Parse the value of an option; raises InvalidArgument, which names the option."""
    plain = text.strip()
    if (word := _WORDS.get(plain.lower())) is not None:
        return word
    first, comma, rest = plain.partition(",")
    if comma and first.strip().lower() == "group":
        otherwise = parse_position(name, rest)
        if isinstance(otherwise, OfGroup | Explicit):
            raise InvalidArgument(f"option {name} must be {_FORMS}, got {text!r}")
        return OfGroup(otherwise)
    if plain.startswith("{"):
        return Explicit(tuple(_entries(name, plain)))
    return AtTime(timestamp_ms(name, plain, _FORMS))


def has_time(position: Position) -> bool:
    """Whether a position depends on when messages were stored."""
    match position:
        case AtTime() | OfGroup(AtTime()):
            return True
        case Explicit(entries):
            return any(isinstance(place, AtTime) for *_, place in entries)
        case _:
            return False


def _entries(name: str, text: str) -> Iterable[tuple[str, str, int, int | AtTime]]:
    try:
        topics = msgspec.json.decode(text, type=_Json)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"option {name} must be {_FORMS}, got {text!r}: {error}") from None
    for topic, below in topics.items():
        for key, value in below.items():
            if isinstance(value, dict):
                for queue, place in value.items():
                    yield topic, key, *_place(name, text, queue, place)
            else:
                yield topic, "", *_place(name, text, key, value)


def _place(name: str, text: str, queue: str, place: int | str) -> tuple[int, int | AtTime]:
    if not queue.isdecimal() or (isinstance(place, int) and place < EARLIEST_OFFSET):
        raise InvalidArgument(
            f"option {name} must map queue numbers to offsets, 0 or more, -1 for the latest, -2 "
            f"for the earliest, or to quoted timestamps: got {queue!r} at {place!r} in {text!r}"
        )
    if isinstance(place, int):
        return int(queue), place
    return int(queue), AtTime(timestamp_ms(name, place.strip(), _TIME_FORMS))


def offsets_named(
    name: str, position: Explicit, queues: Iterable[MessageQueue]
) -> dict[MessageQueue, int | AtTime]:
    """Return offsets or times by queue; raises InvalidArgument for a queue that is not read."""
    known = sorted(queues)
    found: dict[MessageQueue, int | AtTime] = {}
    for topic, broker, number, place in position.entries:
        fitting = [
            queue
            for queue in known
            if queue.topic == topic and queue.queue_id == number and broker in ("", queue.broker)
        ]
        if len(fitting) != 1:
            what = f"queue {number} of topic {topic!r}" + (f" on {broker!r}" if broker else "")
            why = (
                "is on several brokers; specify one" if fitting else "does not exist or is not read"
            )
            there = ", ".join(map(str, known)) or "none"
            raise InvalidArgument(f"option {name}: {what} {why}; queues are {there}")
        found[fitting[0]] = place
    return found
