"""Whether a broker still has the messages that were read from a queue before.

A master that loses its newest messages in a power failure reuses their offsets for new messages. So
may a slave that is promoted before it has copied everything. A consumer that has read the old
messages would skip the new ones. So when it moves to another replica, or has lost its connection,
it compares the last message that it has with the one at the same offset. Its filter may have
skipped unknown messages behind that one: there, nothing may match now either.

Positions are committed to a master only over a connection over which it was compared.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from turbopump.client import calls
from turbopump.client.calls import Found, NothingMatched, OffsetIllegal, PullOutcome
from turbopump.client.replicas import Replica, is_refused
from turbopump.client.routes import MASTER_ID
from turbopump.errors import DamagedMessage, TurbopumpError
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire.headers import PullMessage
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import PULL_SUBSCRIPTION

if TYPE_CHECKING:
    from turbopump.client.session import Session

_log = logging.getLogger(__name__)

_CLOCK_SKEW_MS = 60_000
"""The clock skew between brokers up to which new messages are found by timestamp."""
_PASSED_OVER_MAX = 10_000
"""About how many messages a comparison may have to search for new matches."""


class Source(NamedTuple):
    """The source of a queue's messages: a connection to an address, 0 if there is none."""

    address: str
    connection: int


class StoredMessage(NamedTuple):
    """What distinguishes a message from others with the same offset."""

    queue_offset: QueueOffset
    physical_offset: int
    store_timestamp_ms: int
    body_crc: int

    @classmethod
    def of(cls, message: MessageView) -> StoredMessage:
        return cls(
            message.queue_offset,
            message.physical_offset,
            message.store_timestamp_ms,
            message.body_crc,
        )


class LastPulled(NamedTuple):
    """How far a queue was pulled, and from where."""

    source: Source
    message: StoredMessage | None
    """The newest message that was pulled."""
    since: QueueOffset
    """From here on, up to the end, nothing matched."""
    end: QueueOffset
    """Where the next pull starts."""

    @property
    def is_far_behind(self) -> bool:
        """Whether a newer message is needed to compare with.

        What was skipped since this one is too much to check, or was skipped by another filter.
        """
        has_gap = self.message is not None and self.message.queue_offset + 1 < self.since
        return has_gap or self.end - self.since > _PASSED_OVER_MAX

    def with_other_filter(self) -> LastPulled:
        """Return a copy for a filter that may match messages that the last one skipped."""
        return self._replace(since=self.end)


def last_pulled(
    before: LastPulled | None, source: Source, asked: QueueOffset, outcome: PullOutcome
) -> LastPulled | None:
    """Return how far a queue was pulled once the outcome of a pull was accepted."""
    if isinstance(outcome, OffsetIllegal):
        # The rest depends on where pulling continues.
        return before
    if isinstance(outcome, Found) and outcome.messages:
        newest = StoredMessage.of(outcome.messages[-1])
        since = QueueOffset(newest.queue_offset + 1)
        return LastPulled(source, newest, since, outcome.next_offset)
    if before is None:
        return LastPulled(source, None, asked, outcome.next_offset)
    return before._replace(source=source, end=outcome.next_offset)


class Place(NamedTuple):
    """The queue, the group that reads it, and the replica it reads from."""

    session: Session
    replica: Replica
    group: str
    queue: MessageQueue
    timeout_ms: int
    next_match: Callable[[QueueOffset], Awaitable[PullOutcome]]
    """Pulls one matching message from an offset on, without waiting for one."""


async def continued(
    place: Place, last: LastPulled, asked: QueueOffset, outcome: PullOutcome
) -> PullOutcome:
    """Return the outcome of a pull over another connection, if that has the same messages.

    Otherwise return that the offset is illegal; the one to continue at is not beyond the first
    message that differs.
    """
    replica = place.replica
    if asked < outcome.min_offset:
        return outcome
    is_short = isinstance(outcome, OffsetIllegal) or outcome.max_offset < asked
    if is_short and (not replica.is_master or is_refused(outcome, asked)):
        # It lags.
        return outcome
    offset = await _first_to_read(place, last)
    if offset is None:
        return outcome
    text = "%s at %s has other messages than %s had: pulling goes back to %d"
    _log.warning(text, place.queue, replica.address, last.source.address, offset)
    # Its slaves may still have the messages that it lost, and would be read alternately with it.
    place.session.keep_to_master(place.queue.broker)
    return OffsetIllegal(offset, outcome.min_offset, outcome.max_offset, MASTER_ID)


async def offset_to_commit(
    place: Place, last: LastPulled, compared: Source | None, position: QueueOffset
) -> tuple[Source | None, QueueOffset | None]:
    """Return the connection over which a master was compared, and what to commit over it.

    That is the position, a lower one if the master has other messages before it, or None if the
    connection was lost again.
    """
    session, address = place.session, place.replica.address
    # The first comparison may have to connect.
    for _ in range(2):
        source = session.source(address)
        if source.connection and source == compared:
            return compared, position
        first = await _first_to_read(place, last)
        if source.connection and session.source(address) == source:
            return (source, position) if first is None else (compared, min(position, first))
    return compared, None


async def last_pulled_at_start(place: Place, start: QueueOffset) -> LastPulled:
    """Return what to compare if the connection is lost before the first response to a pull."""
    last = LastPulled(place.session.source(place.replica.address), None, start, start)
    return last if start == 0 else await caught_up(place, last)


async def caught_up(place: Place, last: LastPulled) -> LastPulled:
    """Read the message before the next offset, matching or not, to compare with later."""
    offset = QueueOffset(last.end - 1)
    try:
        outcome = await _pull_any(place, offset)
    except TurbopumpError:
        return last
    found = outcome.messages[0] if isinstance(outcome, Found) and outcome.messages else None
    is_same = place.session.source(place.replica.address) == last.source
    if found is None or found.queue_offset != offset or not is_same:
        return last
    return last._replace(message=StoredMessage.of(found), since=last.end)


async def _first_to_read(place: Place, last: LastPulled) -> QueueOffset | None:
    """Return where to continue on a replica with other messages, or None if it has the same."""
    message = last.message
    if message is not None and not await _has(place, message):
        return await _offset_by_time(place, message)
    return last.since if await _has_new_match(place, last) else None


async def _has(place: Place, message: StoredMessage) -> bool:
    """Whether a replica has a message, as far as it can be determined."""
    try:
        outcome = await _pull_any(place, message.queue_offset)
    except DamagedMessage:
        return True
    if isinstance(outcome, Found) and outcome.messages:
        found = outcome.messages[0]
        # A later one: this one has expired, or cannot be read.
        is_later = found.queue_offset > message.queue_offset
        return is_later or StoredMessage.of(found) == message
    if _may_be_replaced(outcome, message.queue_offset):
        return False
    return message.queue_offset < outcome.max_offset


def _may_be_replaced(outcome: PullOutcome, offset: QueueOffset) -> bool:
    """Whether a slave serves nothing at an offset, since it has removed messages there.

    Only its master knows whether those at this offset now are the same.
    """
    is_removed = is_refused(outcome, offset) and outcome.min_offset <= offset
    # What is damaged or has expired in its copy is not what differs.
    return is_removed and not (isinstance(outcome, NothingMatched) and outcome.has_gap)


async def _has_new_match(place: Place, last: LastPulled) -> bool:
    """Whether a new message matches where none did, or may: the queue is shorter, or was cut."""
    offset = last.since
    while offset < last.end:
        try:
            outcome = await place.next_match(offset)
        except DamagedMessage as error:
            offset = QueueOffset(error.next_offset)
            continue
        if outcome.max_offset < last.end or _may_be_replaced(outcome, offset):
            return True
        if isinstance(outcome, Found) and outcome.messages:
            return outcome.messages[0].queue_offset < last.end
        if outcome.next_offset <= offset:
            # Slaves respond this way.
            return False
        offset = outcome.next_offset
    return False


async def _pull_any(place: Place, offset: QueueOffset) -> PullOutcome:
    """Pull one message of any kind; raises DamagedMessage."""
    queue = place.queue
    header = PullMessage(
        consumer_group=place.group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        max_msg_nums=1,
        sys_flag=PULL_SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription=EVERYTHING,
        sub_version=0,
        broker_name=queue.broker,
    )
    return await calls.pull(place.session, place.replica.address, header, place.timeout_ms)


async def _offset_by_time(place: Place, message: StoredMessage) -> QueueOffset:
    """Return where to continue on a replica that does not have the last message.

    Messages that both have were stored before the last message, and those that differ after it, by
    the clock of another machine.
    """
    since_ms = max(0, message.store_timestamp_ms - _CLOCK_SKEW_MS)
    found = await calls.offset_at(
        place.session, place.replica.address, place.queue, since_ms, place.timeout_ms
    )
    return min(found, message.queue_offset)
