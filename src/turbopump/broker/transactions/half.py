"""Half messages: what is known of one, what to do with it next, and the records made from it.

Pure. The records are those of Apache RocketMQ, so a store with open transactions can move between
the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from msgspec import Struct
from msgspec.structs import replace

from turbopump.broker.message_writer import Draft, draft_like, record_of
from turbopump.errors import InvalidArgument
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.outcomes import Appended
from turbopump.wire import properties as names
from turbopump.wire.hosts import Host
from turbopump.wire.ids import parse_offset_id
from turbopump.wire.names import (
    CHECKED_TOO_OFTEN_TOPIC,
    HALF_OPERATIONS_TOPIC,
    HALF_TOPIC,
    RETRY_PREFIX,
)
from turbopump.wire.record import MessageView, Record
from turbopump.wire.sysflag import Transaction, with_transaction

QUEUE_ID = 0
"""Half messages and operations have one queue each."""

_REMOVE_TAG = "d"

Identity = tuple[str, int, Host]
"""Unique key, time and sender: the same for all copies of a half message and for its final one.

The unique key alone is not enough: a producer that sends a message object twice uses it twice.
"""


class Half(Struct, frozen=True):
    """A half message that is neither committed nor rolled back."""

    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    group: str
    """Of its producers."""
    born_ms: int
    stored_ms: int
    checks: int
    """How often its producers were asked."""
    immunity_ms: int | None
    """No check before this age; None if the message does not say."""
    identity: Identity | None
    is_copy: bool
    """Whether an earlier one is still in the queue, which its producer may name."""


class Rules(Struct, frozen=True):
    """When half messages are checked, and for how long."""

    timeout_ms: int
    checks_max: int
    reserved_ms: int


class Verdict(Enum):
    """What to do with a half message."""

    WAIT = auto()
    CHECK = auto()
    """Store a copy with the new number of checks, and ask a producer about that copy."""
    RENEW = auto()
    """Store a copy, so that the messages before it need not be kept or read again."""
    ABANDON = auto()


def verdict(
    half: Half, now_ms: int, rules: Rules, *, has_producer: bool, is_crowded: bool
) -> Verdict:
    """Decide about a half message whose transaction has not ended.

    ``is_crowded`` says that most messages after the oldest open one have ended. Without a producer
    nothing counts as a check, since none was asked.
    """
    age_ms = now_ms - min(half.born_ms, half.stored_ms)
    if half.checks >= rules.checks_max or age_ms > rules.reserved_ms:
        return Verdict.ABANDON
    immunity_ms = rules.timeout_ms if half.immunity_ms is None else half.immunity_ms
    # One from the future was stored before the clock was set back.
    if not 0 <= age_ms < immunity_ms and has_producer:
        return Verdict.CHECK
    # Before its segment of the log is deleted.
    is_old = now_ms - half.stored_ms > rules.reserved_ms // 2
    return Verdict.RENEW if is_crowded or is_old else Verdict.WAIT


def half_of(view: MessageView) -> Half:
    """Read a record of the half topic."""
    named = view.properties
    immunity_s = _number(named.get(names.CHECK_IMMUNITY_TIME_S))
    is_copy = (
        names.TRANSACTION_CHECK_TIMES in named or names.TRANSACTION_PREPARED_QUEUE_OFFSET in named
    )
    return Half(
        queue_offset=view.queue_offset,
        physical_offset=view.physical_offset,
        group=named.get(names.PRODUCER_GROUP, ""),
        born_ms=view.born_timestamp_ms,
        stored_ms=view.store_timestamp_ms,
        checks=_number(named.get(names.TRANSACTION_CHECK_TIMES)) or 0,
        immunity_ms=None if immunity_s is None else immunity_s * 1000,
        identity=identity_of(view),
        is_copy=is_copy,
    )


def identity_of(view: MessageView) -> Identity | None:
    """Return a message's identity; None if it has no unique key."""
    key = view.unique_key
    return None if key is None else (key, view.born_timestamp_ms, view.born_host)


def is_another(view: MessageView, message_id: str) -> bool:
    """Whether a producer means another half message, which a power failure took from this place.

    It says so by another unique key. Ids of other forms, and offset ids of this broker, which some
    clients may send instead, are not compared.
    """
    key = view.unique_key
    if key is None or len(message_id) != len(key) or message_id.upper() == key.upper():
        return False
    try:
        return parse_offset_id(message_id)[0] != view.store_host
    except InvalidArgument:
        return False


def copied(half: Half, at: Appended, checks: int) -> Half:
    """Return what is known of a copy that was just stored."""
    return replace(
        half,
        queue_offset=at.queue_offset,
        physical_offset=at.physical_offset,
        stored_ms=at.store_timestamp_ms,
        checks=checks,
        is_copy=True,
    )


def first_offset_of(view: MessageView) -> QueueOffset | None:
    """Return the offset of the first copy, if a copy says so."""
    found = _number(view.properties.get(names.TRANSACTION_PREPARED_QUEUE_OFFSET))
    return None if found is None else QueueOffset(found)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


# --- records --------------------------------------------------------------------------------------


def is_half(properties: Mapping[str, str], topic: str) -> bool:
    """Whether a message sent to a topic is a half message.

    Failed messages that a consumer sends again keep the property of their committed original.
    """
    says_so = properties.get(names.TRANSACTION_PREPARED, "").lower() == "true"
    return says_so and not topic.startswith(RETRY_PREFIX)


def half_draft(draft: Draft, group: str) -> Draft:
    """Divert a message to the half topic. A delay counts from the commit on."""
    kept = {
        names.PRODUCER_GROUP: draft.properties.get(names.PRODUCER_GROUP, group),
        names.REAL_TOPIC: draft.topic,
        names.REAL_QUEUE_ID: str(draft.queue_id),
    }
    return replace(
        draft,
        topic=HALF_TOPIC,
        queue_id=QUEUE_ID,
        properties={**draft.properties, **kept},
        sys_flag=with_transaction(draft.sys_flag, Transaction.NONE),
    )


def final_draft(view: MessageView) -> Draft:
    """Return the committed message; raises KeyError or ValueError if it does not say its queue."""
    named = view.properties
    if names.DELAY in named:
        # As Apache RocketMQ: delayed ones are rendered again, and lose it then.
        named = {key: value for key, value in named.items() if key != names.TRANSACTION_PREPARED}
    topic, queue_id = named[names.REAL_TOPIC], int(named[names.REAL_QUEUE_ID])
    draft = draft_like(view, topic, queue_id, named)
    return replace(draft, sys_flag=with_transaction(view.sys_flag, Transaction.COMMIT))


def copy_of(view: MessageView, checks: int) -> Record:
    """Return a copy of a half message whose producers were asked ``checks`` times.

    Unlike Apache RocketMQ's copies that wait out their immunity, it does not name the first copy:
    there an operation for the first one ends all copies, and here every replaced copy gets one.
    """
    named = {**view.properties, names.TRANSACTION_CHECK_TIMES: str(checks)}
    return record_of(draft_like(view, HALF_TOPIC, QUEUE_ID, named))


def abandoned(view: MessageView) -> Record:
    """Return the record that keeps an abandoned half message for operators."""
    return record_of(draft_like(view, CHECKED_TOO_OFTEN_TOPIC, QUEUE_ID, view.properties))


def operation(half: QueueOffset, now_ms: int, broker: Host) -> Record:
    """Return the record that marks a half message as done."""
    return record_of(
        Draft(
            topic=HALF_OPERATIONS_TOPIC,
            queue_id=QUEUE_ID,
            properties={names.WAIT: "true", names.TAGS: _REMOVE_TAG},
            body=b"%d" % half,
            born_timestamp_ms=now_ms,
            born_host=broker,
            store_host=broker,
        )
    )


def ended_by(body: bytes) -> QueueOffset | None:
    """Return the offset of the half message that an operation marks as done."""
    text = body.decode("ascii", "replace")
    return QueueOffset(int(text)) if text.isdecimal() else None


def question(
    view: MessageView, checks: int, queue_offset: QueueOffset, physical_offset: PhysicalOffset
) -> bytes:
    """Return a half message as its producer knows it, at the place of its new copy."""
    named = {**view.properties, names.TRANSACTION_CHECK_TIMES: str(checks), names.WAIT: "false"}
    topic = named.get(names.REAL_TOPIC, view.topic)
    queue_id = _number(named.get(names.REAL_QUEUE_ID)) or 0
    record = record_of(draft_like(view, topic, queue_id, named))
    return record.encode(queue_offset, physical_offset, view.store_timestamp_ms)
