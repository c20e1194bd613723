"""Whether a queue can be read no longer, or only its broker is away for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum

from turbopump.client import calls
from turbopump.client.queue_reader import QueueReader
from turbopump.client.routes import MASTER_ID
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import NetworkError, NoRoute, RemoteError, TurbopumpError
from turbopump.message import MessageQueue
from turbopump.spark.reading.retry import gather_by_key
from turbopump.wire.bodies import ClusterInfo
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body

_log = logging.getLogger(__name__)


class Unreadable(Enum):
    """Why a queue can be read no longer, in words that follow it."""

    DELETED = "the topic was deleted"
    CLOSED = "the topic has fewer queues to read now"


async def ask_master(
    session: Session, reader: QueueReader, queue: MessageQueue
) -> Unreadable | None:
    """Ask a queue's master whether it can be read, None if so; raises when no master tells.

    Nobody else is believed: a name server may have lost a broker for a while, and a slave may not
    have heard of a new topic yet.
    """
    known, why = None, None
    if session.has_master(queue.broker):
        known = session.address_to_write(queue.broker)
        why = await _ask_broker(known, session, reader, queue)
        if why is not Unreadable.DELETED:
            return why
    # An address from long ago may be another broker's by now.
    address = await master_address(session, queue.broker)
    return why if address == known else await _ask_broker(address, session, reader, queue)


async def _ask_broker(
    address: str, session: Session, reader: QueueReader, queue: MessageQueue
) -> Unreadable | None:
    """Pull at the end of a queue, which is harmless, and see what the broker says."""
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
    """Return where a master is by the first name server that knows it; raises NoRoute."""
    for server in session.config.nameserver_addresses:
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
    """Tell from a broker's refusal whether the queue is gone; None if it says nothing of that."""
    if error.code == ResponseCode.TOPIC_NOT_EXIST:
        return Unreadable.DELETED
    # The code is for everything; the words are those of all brokers.
    is_closed = error.remark.startswith(f"queueId[{queue.queue_id}] is illegal")
    return Unreadable.CLOSED if is_closed else None


class QueueChecks:
    """Queues that may be readable no longer; their brokers are asked."""

    def __init__(self, session: Session, reader: QueueReader) -> None:
        self._session = session
        self._reader = reader
        self._refused: dict[MessageQueue, str] = {}
        self._found: dict[MessageQueue, tuple[int, Unreadable | None]] = {}
        """When each queue was asked about, and what came out."""

    @property
    def refused(self) -> frozenset[MessageQueue]:
        """Queues whose broker refused to wait for their news."""
        return frozenset(self._refused)

    def refuse(self, queue: MessageQueue, error: RemoteError) -> None:
        """Note that a broker does not wait for news of a queue; the same is logged once."""
        if self._refused.get(queue) == str(error):
            return
        _log.warning("%s: the broker refuses long polls: %s", queue, error)
        self._refused[queue] = str(error)
        self._found.pop(queue, None)

    async def without_deleted(self, queues: Iterable[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Return queues but those found to be deleted: old routes have them still.

        They may come again, and are asked about by the interval of routes.
        """
        named = tuple(queues)
        deleted = [queue for queue in named if self._last(queue) is Unreadable.DELETED]
        await gather_by_key((queue for queue in deleted if not self._is_fresh(queue)), self._look)
        return tuple(queue for queue in named if self._last(queue) is not Unreadable.DELETED)

    async def find_unreadable(
        self, queues: Iterable[MessageQueue]
    ) -> dict[MessageQueue, Unreadable]:
        """Return those of the queues that can be read no longer.

        That is asked every time, since it is a reason to fail; that one can be read, or its broker
        is away, is believed for a while.
        """
        named = tuple(queues)
        asked = [
            queue for queue in named if self._last(queue) is not None or not self._is_fresh(queue)
        ]
        await gather_by_key(asked, self._look)
        found = {queue: self._last(queue) for queue in named}
        return {queue: why for queue, why in found.items() if why is not None}

    def _last(self, queue: MessageQueue) -> Unreadable | None:
        return self._found[queue][1] if queue in self._found else None

    def _is_fresh(self, queue: MessageQueue) -> bool:
        if queue not in self._found:
            return False
        age_ms = self._session.clock.monotonic_ms() - self._found[queue][0]
        return age_ms < self._session.config.route_interval_ms

    async def _look(self, queue: MessageQueue) -> None:
        """Ask about a queue; what was found before counts while nobody tells."""
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
