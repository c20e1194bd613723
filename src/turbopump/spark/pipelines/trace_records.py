"""Message trace records: what clients recorded about sending and consuming.

A trace message holds many records, each terminated by 0x02, with fields separated by 0x01. Missing
fields are written as ``null``. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from turbopump.errors import InvalidArgument

RECORD_END = "\x02"
FIELD_END = "\x01"

_NONE = ("null", "")


def no_trace_topic(topic: str) -> InvalidArgument:
    """Return the error for a missing trace topic, with how to enable tracing."""
    return InvalidArgument(
        f"trace topic {topic!r} does not exist, so message tracing is off: set "
        "traceTopicEnable=true on the brokers and restart them, and switch tracing on in the "
        "RocketMQ clients (in Java, the argument enableMsgTrace=true of DefaultMQProducer and "
        "DefaultMQPushConsumer); if the clients write to another topic, pass its name"
    )


class Kind(StrEnum):
    SENT = "Pub"
    BEGUN = "SubBefore"
    DONE = "SubAfter"
    TRANSACTION_ENDED = "EndTransaction"
    UNREADABLE = "unreadable"
    """Of an unknown kind, or with invalid fields: counted, not guessed."""


_LAYOUTS: Mapping[Kind, str] = {
    Kind.SENT: "- time_ms - group topic msg_id tags - - body_bytes cost_ms",
    Kind.BEGUN: "- time_ms - group request_id msg_id retries",
    Kind.DONE: "- request_id msg_id cost_ms is_success - - time_ms? group",
    Kind.TRANSACTION_ENDED: "- time_ms - group topic msg_id tags",
}
"""The fields of each kind in their order: a dash if it is not read, ``?`` for a number that may be
missing."""
_DONE_FIELDS_MIN = 5


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One recorded action of a client; None for fields that its kind lacks."""

    kind: Kind
    msg_id: str | None = None
    time_ms: int | None = None
    group: str | None = None
    topic: str | None = None
    tags: str | None = None
    request_id: str | None = None
    """Joins the start and the end of one call of a listener."""

    cost_ms: int | None = None
    is_success: bool | None = None
    retries: int | None = None
    """How often the message was consumed before."""

    body_bytes: int | None = None


def parsed(body: bytes | None) -> Iterator[TraceRecord]:
    """Parse the records of one trace message, which has no body if that cannot be decoded."""
    if body is None:
        yield TraceRecord(Kind.UNREADABLE)
        return
    for text in body.decode("utf-8", errors="replace").split(RECORD_END):
        if text:
            yield _record(text.split(FIELD_END))


def _record(fields: Sequence[str]) -> TraceRecord:
    try:
        kind = Kind(fields[0])
        names = _LAYOUTS[kind].split()
        found: dict[str, Any] = {
            name.rstrip("?"): _READERS.get(name, _text)(field)
            for name, field in zip(names, fields, strict=False)
            if name != "-"
        }
        if kind is Kind.SENT:
            # Old clients omit the offset id, new ones append their host.
            found["is_success"] = _truth(fields[12] if len(fields) == 13 else fields[13])
        # Old clients end a record of this kind after the field behind its success.
        if len(fields) < (_DONE_FIELDS_MIN if kind is Kind.DONE else len(names)):
            return TraceRecord(Kind.UNREADABLE)
        return TraceRecord(kind, **found)
    except (ValueError, IndexError, KeyError):
        return TraceRecord(Kind.UNREADABLE)


def _text(field: str) -> str | None:
    return None if field in _NONE else field


def _truth(field: str) -> bool:
    if field not in ("true", "false"):
        raise ValueError(field)
    return field == "true"


_READERS: Mapping[str, Callable[[str], object]] = {
    "time_ms": int,
    "time_ms?": lambda field: None if field in _NONE else int(field),
    "cost_ms": int,
    "retries": int,
    "body_bytes": int,
    "is_success": _truth,
}
