"""Whether a queue can be read no longer, or only its broker is away for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum

from turbopump.client.calls import require_success
from turbopump.client.reading import QueueReader
from turbopump.client.route_cache import NameServers
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import NetworkError, NoRoute, RemoteError, TurbopumpError
from turbopump.message import MessageQueue
from turbopump.spark.reading.patience import of_each
from turbopump.wire.bodies import ClusterInfo
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body

_log = logging.getLogger(__name__)


class Unreadable(Enum):
    """Why a queue can be read no longer, in words that follow it."""

    DELETED = "the topic was deleted"
    CLOSED = "the topic has fewer queues to read now"


async def why_unreadable(
    session: Session, queue: MessageQueue, error: NoRoute | RemoteError
) -> Unreadable | None:
    """Tell from what a pull failed with whether the queue is gone; None if that says nothing.

    Without a route its topic was deleted if the broker is there: a broker tells name servers of
    all its topics.
    """
    if isinstance(error, RemoteError):
        return why_refused(queue, error)
    servers = NameServers(session.config.nameserver_addresses, session.random)
    command = request(RequestCode.GET_BROKER_CLUSTER_INFO)
    timeout_ms = session.config.request_timeout_ms
    answer = await servers.ask(lambda address: session.request(address, command, timeout_ms))
    there = ClusterInfo.decode(whole_body(require_success(answer))).broker_addr_table
    return Unreadable.DELETED if queue.broker in there else None


def why_refused(queue: MessageQueue, error: RemoteError) -> Unreadable | None:
    """Tell from a broker's refusal whether the queue is gone; None if it says nothing of that."""
    if error.code == ResponseCode.TOPIC_NOT_EXIST:
        return Unreadable.DELETED
    # The code is for everything; the words are those of all brokers.
    is_closed = error.remark.startswith(f"queueId[{queue.queue_id}] is illegal")
    return Unreadable.CLOSED if is_closed else None


class Doubts:
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
        _log.warning("%s: the broker does not wait for news: %s", queue, error)
        self._refused[queue] = str(error)
        self._found.pop(queue, None)

    def accept(self, queue: MessageQueue) -> None:
        """Note that a broker waits for news of a queue."""
        self._refused.pop(queue, None)

    async def without_deleted(self, queues: Iterable[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Return queues but those found to be deleted: old routes have them still.

        They may come again, and are asked about by the interval of routes.
        """
        named = tuple(queues)
        deleted = [queue for queue in named if self._last(queue) is Unreadable.DELETED]
        await of_each((queue for queue in deleted if not self._is_fresh(queue)), self._look)
        return tuple(queue for queue in named if self._last(queue) is not Unreadable.DELETED)

    async def settled(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, Unreadable]:
        """Return those of the queues that can be read no longer.

        That is asked every time, since it is a reason to fail; that one can be read, or its broker
        is away, is believed for a while.
        """
        named = tuple(queues)
        asked = [
            queue for queue in named if self._last(queue) is not None or not self._is_fresh(queue)
        ]
        await of_each(asked, self._look)
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
        why = await self._ask(queue)
        self._found[queue] = self._session.clock.monotonic_ms(), why
        if why is None:
            self.accept(queue)

    async def _ask(self, queue: MessageQueue) -> Unreadable | None:
        """Pull at the end of a queue, which is harmless, and see what its broker says."""
        self._reader.back_to_master(queue)
        everything = subscription(self._reader.known_as(queue.topic), "*", 0)
        try:
            end = await self._reader.max_offset(queue)
            await self._reader.pull_records(queue, end, everything, 1, is_held=False)
        except (NoRoute, RemoteError) as error:
            return await self._certainly(queue, error)
        except NetworkError:
            return None
        return None

    async def _certainly(
        self, queue: MessageQueue, error: NoRoute | RemoteError
    ) -> Unreadable | None:
        if isinstance(error, RemoteError) and not self._session.has_master(queue.broker):
            # A slave may not have heard of a new topic yet.
            return None
        try:
            return await why_unreadable(self._session, queue, error)
        except TurbopumpError as failure:
            _log.info("%s: whether it was deleted is not known: %s", queue, failure)
            return None
