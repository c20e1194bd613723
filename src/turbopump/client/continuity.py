"""Whether a broker has the same messages as when, or where, a queue was read before.

A master that loses its newest messages with the power gives their offsets to new messages. So may a
slave that is promoted before it has copied everything. A consumer that has read the old messages
would skip the new ones: when it moves to another replica, or has lost its connection, it compares
the last message that it has with the one at the same offset.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

from turbopump.client import calls
from turbopump.client.calls import Caller, Found, OffsetIllegal, PullOutcome
from turbopump.client.replicas import Replica, is_refused
from turbopump.client.routes import MASTER_ID
from turbopump.errors import DamagedMessage
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire.headers import PullMessage
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import PULL_SUBSCRIPTION

_log = logging.getLogger(__name__)

_CLOCK_SKEW_MS = 60_000
"""How far the clocks of two brokers may differ for new messages to be found by their time."""


class Source(NamedTuple):
    """What a queue was read from: a connection to an address, 0 if there is none."""

    address: str
    connection: int


class LastPulled(NamedTuple):
    """The newest message that was pulled of a queue, and from where."""

    source: Source
    queue_offset: QueueOffset
    physical_offset: int
    store_timestamp_ms: int
    body_crc: int

    @classmethod
    def of(cls, source: Source, message: MessageView) -> LastPulled:
        return cls(
            source,
            message.queue_offset,
            message.physical_offset,
            message.store_timestamp_ms,
            message.body_crc,
        )


def last_pulled(
    before: LastPulled | None, source: Source, outcome: PullOutcome
) -> LastPulled | None:
    """Return the last message after a pull that was accepted."""
    if isinstance(outcome, Found) and outcome.messages:
        return LastPulled.of(source, outcome.messages[-1])
    return None if before is None else before._replace(source=source)


class Reader(Caller, Protocol):
    """Reads from the replicas of brokers: a `Session`."""

    def keep_to_master(self, broker: str) -> None:
        """Read from the master for a while, as long as it can be reached."""
        ...


class Place(NamedTuple):
    """Which queue is read, by which group, from which replica."""

    caller: Reader
    replica: Replica
    group: str
    queue: MessageQueue
    timeout_ms: int


async def continued(
    place: Place, last: LastPulled, asked: QueueOffset, outcome: PullOutcome
) -> PullOutcome:
    """Return the outcome of a pull over another connection, if the same messages are there.

    Otherwise the offset is illegal there: the one to continue at is not beyond the first message
    that differs.
    """
    replica = place.replica
    if asked < outcome.min_offset:
        return outcome
    is_short = isinstance(outcome, OffsetIllegal) or outcome.max_offset < asked
    if is_short and (not replica.is_master or is_refused(outcome, asked)):
        # It lags.
        return outcome
    if not is_short and await _has(place, last):
        return outcome
    text = "%s at %s has other messages than %s had: the last common one is searched by time"
    _log.warning(text, place.queue, replica.address, last.source.address)
    # Its slaves may still have the messages that it lost, and would be read in turn with it.
    place.caller.keep_to_master(place.queue.broker)
    offset = await _restart_offset(place, last)
    return OffsetIllegal(offset, outcome.min_offset, outcome.max_offset, MASTER_ID)


async def _has(place: Place, last: LastPulled) -> bool:
    """Whether a replica has the last message, as far as can be said."""
    queue = place.queue
    header = PullMessage(
        consumer_group=place.group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=last.queue_offset,
        max_msg_nums=1,
        sys_flag=PULL_SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription=EVERYTHING,
        sub_version=0,
        broker_name=queue.broker,
    )
    try:
        outcome = await calls.pull(place.caller, place.replica.address, header, place.timeout_ms)
    except DamagedMessage:
        return True
    if isinstance(outcome, Found) and outcome.messages:
        found = outcome.messages[0]
        # A later one: this one has expired, or cannot be read.
        is_later = found.queue_offset > last.queue_offset
        return is_later or LastPulled.of(last.source, found) == last
    return last.queue_offset < outcome.max_offset


async def _restart_offset(place: Place, last: LastPulled) -> QueueOffset:
    """Return where to continue on a replica with other messages.

    All that both have was stored before the last message, all that differs after it, by the clock
    of another machine.
    """
    since_ms = max(0, last.store_timestamp_ms - _CLOCK_SKEW_MS)
    found = await calls.offset_at(
        place.caller, place.replica.address, place.queue, since_ms, place.timeout_ms
    )
    return min(found, last.queue_offset)
