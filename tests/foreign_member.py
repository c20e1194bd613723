"""A group member that behaves like the Java and Go clients, in virtual time.

It sends a heartbeat only every 30 s, even after a reconnect, and pulls with the subscription that
the broker has stored. The queues it gains and loses are recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from turbopump.client.allocation import allocated, average
from turbopump.errors import NetworkError
from turbopump.message import MessageQueue
from turbopump.net.connection import Connection
from turbopump.net.pool import ConnectionPool
from turbopump.net.pool_config import PoolConfig
from turbopump.net.router import Router
from turbopump.testing import MemoryNetwork, virtual_loop
from turbopump.wire import headers
from turbopump.wire.bodies import (
    ConsumeFrom,
    ConsumerData,
    ConsumerIds,
    ConsumeType,
    Heartbeat,
    LockedQueues,
    LockQueues,
    MessageModel,
    Subscription,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.sysflag import PULL_SUSPEND

HEARTBEAT_S = 30
REBALANCE_S = 20
AFTER_ERROR_S = 3
HOLD_MS = 15_000


@dataclass
class ForeignMember:
    """One client; ``first_s`` is the time of its first heartbeat, from which the others follow."""

    network: MemoryNetwork
    host: str
    broker: str
    queues: tuple[MessageQueue, ...]
    group: str = "g"
    is_go: bool = False
    """Whether it treats an error as an empty list, as the Go client does."""
    is_orderly: bool = False
    owned: set[MessageQueue] = field(default_factory=set)
    moves: list[tuple[float, str, MessageQueue]] = field(default_factory=list)
    pull_codes: list[int] = field(default_factory=list)
    refused_locks: list[MessageQueue] = field(default_factory=list)
    beats: int = 0
    _pulls: dict[MessageQueue, asyncio.Task[None]] = field(default_factory=dict)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def client_id(self) -> str:
        return f"{self.host}@java"

    @asynccontextmanager
    async def running(self, first_s: float = 0) -> AsyncIterator[ForeignMember]:
        """Run until the block ends, or until `die`; leave the group at the end."""
        router = Router({RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._notified})
        # It retries immediately, which is harder on the broker than any backoff.
        config = PoolConfig(backoff_first_ms=1, backoff_max_ms=1)
        host, clock = self.network.host(self.host), virtual_loop().clock
        self._pool = ConnectionPool(host, config, router=router, clock=clock)
        self._work = [
            asyncio.create_task(self._beat(first_s)),
            asyncio.create_task(self._balance_always(first_s)),
            asyncio.create_task(self._renew_always()),
        ]
        try:
            yield self
        finally:
            self._stop()
            await self.leave()
            await self._pool.close()

    async def die(self) -> None:
        """Stop without leaving the group."""
        self._stop()
        await self._pool.close()

    async def leave(self) -> None:
        """Unregister, as `shutdown` does, whatever the broker knows of this connection."""
        header = headers.UnregisterClient(client_id=self.client_id, consumer_group=self.group)
        await self._try(RequestCode.UNREGISTER_CLIENT, header)

    def _stop(self) -> None:
        for task in (*self._work, *self._pulls.values()):
            task.cancel()

    # --- periodic work ----------------------------------------------------------------------------

    async def _beat(self, first_s: float) -> None:
        await asyncio.sleep(first_s)
        while True:
            self.beats += 1
            await self._try(RequestCode.HEART_BEAT, body=self._heartbeat().encode())
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self) -> Heartbeat:
        data = ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.PUSH,
            message_model=MessageModel.CLUSTERING,
            consume_from_where=ConsumeFrom.FIRST_OFFSET,
            subscription_data_set=[
                Subscription(topic=topic, sub_string="*", sub_version=1)
                for topic in sorted({queue.topic for queue in self.queues})
            ],
        )
        return Heartbeat(client_id=self.client_id, consumer_data_set=[data])

    async def _balance_always(self, first_s: float) -> None:
        await asyncio.sleep(first_s + 0.1)
        while True:
            self._wanted.clear()
            await self._balance()
            try:
                async with asyncio.timeout(REBALANCE_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    def _notified(self, request: Command, _: Connection) -> None:
        self.wake()

    def wake(self) -> None:
        """Rebalance now; the next rebalance is 20 s later."""
        self._wanted.set()

    async def _balance(self) -> None:
        asked = headers.ConsumerGroup(consumer_group=self.group)
        answer = await self._try(RequestCode.GET_CONSUMER_LIST_BY_GROUP, asked)
        if answer is None or answer.code != ResponseCode.SUCCESS:
            if not self.is_go:
                return
            members = []
        else:
            members = ConsumerIds.decode(whole_body(answer)).consumer_id_list
        share = set(allocated(average, self.queues, members, self.client_id))
        for queue in sorted(self.owned - share):
            self._move("lost", queue)
            self.owned.discard(queue)
            self._pulls.pop(queue).cancel()
        for queue in sorted(share - self.owned):
            if not self.is_orderly or await self._lock([queue]):
                self._move("gained", queue)
                self.owned.add(queue)
                self._pulls[queue] = asyncio.create_task(self._pull(queue))

    async def _renew_always(self) -> None:
        while self.is_orderly:
            await asyncio.sleep(REBALANCE_S)
            await self._lock(sorted(self.owned))

    async def _lock(self, queues: Sequence[MessageQueue]) -> bool:
        """Lock or renew; like the Go client, never unlock lost queues."""
        body = LockQueues(client_id=self.client_id, consumer_group=self.group, queues=list(queues))
        answer = await self._try(RequestCode.LOCK_BATCH_MQ, body=body.encode())
        if answer is None or answer.code != ResponseCode.SUCCESS:
            return False
        locked = LockedQueues.decode(whole_body(answer)).queues
        self.refused_locks += [queue for queue in queues if queue not in locked]
        return set(queues) <= set(locked)

    async def _pull(self, queue: MessageQueue) -> None:
        header = headers.PullMessage(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=0,
            max_msg_nums=32,
            sys_flag=PULL_SUSPEND,
            commit_offset=0,
            suspend_timeout_millis=HOLD_MS,
            subscription=None,
            sub_version=1,
        )
        while True:
            answer = await self._try(RequestCode.PULL_MESSAGE, header, timeout_ms=30_000)
            if answer is not None:
                self.pull_codes.append(answer.code)
            await asyncio.sleep(AFTER_ERROR_S)

    def _move(self, what: str, queue: MessageQueue) -> None:
        self.moves.append((asyncio.get_running_loop().time(), what, queue))

    async def _try(
        self, code: int, header: Any = None, body: bytes = b"", timeout_ms: int = 3000
    ) -> Command | None:
        asked: Coroutine[Any, Any, Command] = self._pool.request(
            self.broker, request(code, header, body), timeout_ms
        )
        try:
            return await asked
        except NetworkError:
            return None
