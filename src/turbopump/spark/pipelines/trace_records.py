"""Message trace records: what clients recorded about sending and consuming.

A trace message holds many records, each terminated by 0x02, with fields separated by 0x01. Missing
fields are written as ``null``. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
    """The kind of a record."""

    SENT = "Pub"
    BEGUN = "SubBefore"
    DONE = "SubAfter"
    TRANSACTION_ENDED = "EndTransaction"
    UNREADABLE = "unreadable"
    """Of an unknown kind, or with invalid fields: counted, not guessed."""


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
        match fields[0]:
            case Kind.SENT:
                return _sent(fields)
            case Kind.BEGUN:
                return _begun(fields)
            case Kind.DONE:
                return _done(fields)
            case Kind.TRANSACTION_ENDED:
                return _transaction_ended(fields)
    except (ValueError, IndexError):
        pass
    return TraceRecord(Kind.UNREADABLE)


def _sent(fields: Sequence[str]) -> TraceRecord:
    # Old clients omit the offset id, new ones append their host; success is at a fixed distance.
    if len(fields) < 13:
        raise ValueError(fields)
    return TraceRecord(
        Kind.SENT,
        msg_id=_text(fields[5]),
        time_ms=int(fields[1]),
        group=_text(fields[3]),
        topic=_text(fields[4]),
        tags=_text(fields[6]),
        cost_ms=int(fields[10]),
        is_success=_truth(fields[12] if len(fields) == 13 else fields[13]),
        body_bytes=int(fields[9]),
    )


def _begun(fields: Sequence[str]) -> TraceRecord:
    return TraceRecord(
        Kind.BEGUN,
        msg_id=_text(fields[5]),
        time_ms=int(fields[1]),
        group=_text(fields[3]),
        request_id=_text(fields[4]),
        retries=int(fields[6]),
    )


def _done(fields: Sequence[str]) -> TraceRecord:
    return TraceRecord(
        Kind.DONE,
        msg_id=_text(fields[2]),
        time_ms=int(fields[7]) if len(fields) > 7 and fields[7] not in _NONE else None,
        group=_text(fields[8]) if len(fields) > 8 else None,
        request_id=_text(fields[1]),
        cost_ms=int(fields[3]),
        is_success=_truth(fields[4]),
    )


def _transaction_ended(fields: Sequence[str]) -> TraceRecord:
    return TraceRecord(
        Kind.TRANSACTION_ENDED,
        msg_id=_text(fields[5]),
        time_ms=int(fields[1]),
        group=_text(fields[3]),
        topic=_text(fields[4]),
        tags=_text(fields[6]),
    )


def _text(field: str) -> str | None:
    return None if field in _NONE else field


def _truth(field: str) -> bool:
    if field not in ("true", "false"):
        raise ValueError(field)
    return field == "true"
