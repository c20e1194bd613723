"""Distinguishes queues that can no longer be read from those whose broker is unavailable."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from turbopump.client import calls
from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.queue_reader import QueueReader
from turbopump.client.routes import MASTER_ID
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import NetworkError, NoRoute, RemoteError, TurbopumpError
from turbopump.message import MessageQueue
from turbopump.wire.bodies import ClusterInfo
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body

_log = logging.getLogger(__name__)


class Unreadable(Enum):
    """Why a queue can no longer be read; the text follows its name."""

    DELETED = "the topic was deleted"
    CLOSED = "the topic has fewer queues to read now"


async def ask_master(
    session: Session, reader: QueueReader, queue: MessageQueue
) -> Unreadable | None:
    """Ask a queue's master whether it can be read, None if so; raises if no master responds.

    Other sources are not trusted: a name server may have lost a broker temporarily, and a slave may
    not know a new topic yet.
    """
    known, why = None, None
    if session.has_master(queue.broker):
        known = session.address_to_write(queue.broker)
        why = await _ask_broker(known, session, reader, queue)
        if why is not Unreadable.DELETED:
            return why
    # An old address may belong to another broker now.
    address = await master_address(session, queue.broker)
    return why if address == known else await _ask_broker(address, session, reader, queue)


async def _ask_broker(
    address: str, session: Session, reader: QueueReader, queue: MessageQueue
) -> Unreadable | None:
    """Pull at the end of a queue, which is harmless, and interpret the response."""
    inside, timeout_ms = reader.wire_queue(queue), session.config.request_timeout_ms
    end = await calls.max_offset(session, address, inside, timeout_ms)
    header = reader.header_to_pull(queue, end, subscription(inside.topic, "*", 0), 1)
    try:
        await calls.pull_records(session, address, header, timeout_ms)
    except RemoteError as error:
        why = unreadable_reason(queue, error)
        if why is None:
            raise
        return why
    return None


async def master_address(session: Session, broker: str) -> str:
    """Return the address of a master from the first name server that knows it; raises NoRoute."""
    for server in await session.name_servers.addresses():
        command = request(RequestCode.GET_BROKER_CLUSTER_INFO)
        try:
            answer = await session.request(server, command, session.config.request_timeout_ms)
            info = ClusterInfo.decode(whole_body(calls.require_success(answer)))
        except (NetworkError, RemoteError) as error:
            _log.info("name server %s: %s; trying the next one", server, error)
            continue
        data = info.broker_addr_table.get(broker)
        if data is not None and MASTER_ID in data.broker_addrs:
            return data.broker_addrs[MASTER_ID]
    raise NoRoute(f"no name server knows a master of broker {broker!r}")


def unreadable_reason(queue: MessageQueue, error: RemoteError) -> Unreadable | None:
    """Return why a queue cannot be read by a broker's refusal, None if it has another cause."""
    if error.code == ResponseCode.TOPIC_NOT_EXIST:
        return Unreadable.DELETED
    # The code is generic; all brokers use this text.
    is_closed = error.remark.startswith(f"queueId[{queue.queue_id}] is illegal")
    return Unreadable.CLOSED if is_closed else None


def first_of(queues: Sequence[MessageQueue]) -> str:
    """Return a description of queues, of which thousands may have the same problem."""
    return str(queues[0]) + (f" and {len(queues) - 1} more queues" if len(queues) > 1 else "")


class QueueChecks:
    """Checks suspicious queues with their brokers, and remembers the results."""

    def __init__(self, session: Session, reader: QueueReader) -> None:
        self._session = session
        self._reader = reader
        self._refused: dict[MessageQueue, Unreadable] = {}
        self._found: dict[MessageQueue, tuple[int, Unreadable | None]] = {}
        """When each queue was checked, and the result."""

    @property
    def refused(self) -> frozenset[MessageQueue]:
        """Queues whose broker refused a long poll."""
        return frozenset(self._refused)

    def refuse(self, refusals: Mapping[MessageQueue, tuple[Unreadable, str]]) -> None:
        """Record why brokers refused long polls; each cause is logged once per broker."""
        new: dict[tuple[str, Unreadable], list[MessageQueue]] = {}
        for queue, (why, _) in sorted(refusals.items()):
            if self._refused.get(queue) is not why:
                new.setdefault((queue.broker, why), []).append(queue)
                self._refused[queue] = why
                self._found.pop(queue, None)
        for queues in new.values():
            text = refusals[queues[0]][1]
            _log.warning("%s: the broker refuses long polls: %s", first_of(queues), text)

    async def without_deleted(self, queues: Iterable[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Return the queues except deleted ones, which old routes still contain.

        They may be re-created, and are checked once per route interval.
        """
        named = tuple(queues)
        if not any(why is Unreadable.DELETED for _, why in self._found.values()):
            return named
        deleted = [queue for queue in named if self._last(queue) is Unreadable.DELETED]
        await gather_by_key((queue for queue in deleted if not self._is_fresh(queue)), self._probe)
        return tuple(queue for queue in named if self._last(queue) is not Unreadable.DELETED)

    async def find_unreadable(
        self, queues: Iterable[MessageQueue]
    ) -> dict[MessageQueue, Unreadable]:
        """Return the queues that can no longer be read.

        This is checked every time, because it fails queries; that a queue can be read, or that its
        broker is unavailable, is cached.
        """
        named = tuple(queues)
        asked = [
            queue for queue in named if self._last(queue) is not None or not self._is_fresh(queue)
        ]
        await gather_by_key(asked, self._probe)
        found = {queue: self._last(queue) for queue in named}
        return {queue: why for queue, why in found.items() if why is not None}

    def _last(self, queue: MessageQueue) -> Unreadable | None:
        return self._found[queue][1] if queue in self._found else None

    def _is_fresh(self, queue: MessageQueue) -> bool:
        if queue not in self._found:
            return False
        age_ms = self._session.clock.monotonic_ms() - self._found[queue][0]
        return age_ms < self._session.config.route_interval_ms

    async def _probe(self, queue: MessageQueue) -> None:
        """Check a queue; the last result stays valid while no master responds."""
        try:
            why = await ask_master(self._session, self._reader, queue)
        except TurbopumpError as failure:
            _log.info("%s: cannot check whether it can be read: %s", queue, failure)
            why = self._last(queue)
        else:
            if why is None:
                self._refused.pop(queue, None)
                self._reader.back_to_master(queue)
        self._found[queue] = self._session.clock.monotonic_ms(), why
