"""Where a read begins or ends, as a user says it: ``earliest``, a time, offsets. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue
from turbopump.spark.option_values import timestamp_ms

LATEST_OFFSET = -1
EARLIEST_OFFSET = -2
"""What users of the Kafka connector write for the ends of a queue."""

_FORMS = (
    "earliest, latest, group, group with a fallback such as group,earliest, a timestamp such as "
    "2026-01-31T08:00:00Z, milliseconds since 1970, or "
    'JSON such as {"orders": {"broker-a": {"0": 17, "1": -2}}}'
)


@dataclass(frozen=True, slots=True)
class Earliest:
    """At the oldest message that a broker still has."""


@dataclass(frozen=True, slots=True)
class Latest:
    """After the newest message."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """At the first message stored at a time or after it."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class OfGroup:
    """Where the group has come to, and where to begin if that is nowhere; None is as without it."""

    otherwise: Earliest | Latest | AtTime | None = None


@dataclass(frozen=True, slots=True)
class Explicit:
    """At offsets, as (topic, broker, queue, offset); the broker is empty if there is only one."""

    entries: tuple[tuple[str, str, int, int], ...]


Position = Earliest | Latest | OfGroup | AtTime | Explicit

_WORDS: Mapping[str, Position] = {
    "earliest": Earliest(),
    "latest": Latest(),
    "group": OfGroup(),
}


def parse_position(name: str, text: str) -> Position:
    """Read the value of an option; raises InvalidArgument, which names the option."""
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


def _entries(name: str, text: str) -> Iterable[tuple[str, str, int, int]]:
    for topic, below in _object(name, text, _parsed(name, text)).items():
        for key, value in _object(name, text, below).items():
            if isinstance(value, int):
                yield topic, "", *_offset(name, text, key, value)
            else:
                for queue, offset in _object(name, text, value).items():
                    yield topic, key, *_offset(name, text, queue, offset)


def _parsed(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgument(
            f"option {name} must be {_FORMS}, got invalid JSON: {error}"
        ) from None


def _object(name: str, text: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"option {name} must be {_FORMS}, got {text!r}")
    return value


def _offset(name: str, text: str, queue: str, offset: object) -> tuple[int, int]:
    is_number = isinstance(offset, int) and not isinstance(offset, bool)
    if not queue.isdecimal() or not is_number or int(str(offset)) < EARLIEST_OFFSET:
        raise InvalidArgument(
            f"option {name} must map queue numbers to offsets, 0 or more, -1 for the latest or -2 "
            f"for the earliest: got {queue!r} at {offset!r} in {text!r}"
        )
    return int(queue), int(str(offset))


def offsets_named(
    name: str, position: Explicit, queues: Iterable[MessageQueue]
) -> dict[MessageQueue, int]:
    """Return the offsets by queue; raises InvalidArgument if one is of no queue that is read."""
    known = sorted(queues)
    found: dict[MessageQueue, int] = {}
    for topic, broker, number, offset in position.entries:
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
        found[fitting[0]] = offset
    return found
