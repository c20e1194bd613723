"""An operator's actions and queries while clients run, as plain requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from brokers import Client, views
from compat.clients.peers import DEADLINE_S
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.bodies import GroupConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.headers import CreateTopic, RouteOf
from turbopump.wire.record import MessageView

T = TypeVar("T")

HOLD_MS = 1000
LOOK_AGAIN_S = 0.1


class Operator:
    """Sends requests to one server; each call opens a new connection."""

    def __init__(self, server: str) -> None:
        self._server = server

    def _ask(self, asked: Callable[[Client], Awaitable[T]]) -> T:
        async def connected() -> T:
            async with ConnectionPool(SocketNetwork()) as pool:
                return await asked(Client(pool, self._server))

        return run(connected())

    def create_topic(self, topic: str, queues: int = 4) -> None:
        header = CreateTopic(
            topic=topic,
            default_topic="TBW102",
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=6,
            topic_filter_type="SINGLE_TAG",
        )

        async def create(client: Client) -> None:
            answer = await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
            assert answer.code == ResponseCode.SUCCESS, answer.remark

        self._ask(create)

    def create_group(self, group: str, retries_max: int = 16) -> None:
        """Create a group and its retry topic, as if it had consumed before."""
        body = GroupConfig(group_name=group, retry_max_times=retries_max).encode()

        async def create(client: Client) -> None:
            code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
            answer = await client.ask(code, body=body)
            assert answer.code == ResponseCode.SUCCESS, answer.remark

        self._ask(create)
        self.create_topic(f"%RETRY%{group}", queues=1)

    def wait_for_route(self, topic: str) -> None:
        """Wait until a topic has a route; the server must be a name server.

        A send that creates a topic is answered earlier.
        """

        async def look(client: Client) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    header = RouteOf(topic=topic)
                    answer = await client.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
                    if answer.code == ResponseCode.SUCCESS:
                        return
                    await asyncio.sleep(LOOK_AGAIN_S)

        self._ask(look)

    def messages(self, topic: str, queue_id: int = 0) -> list[MessageView]:
        """Return all messages of a queue."""
        return self._ask(lambda client: client.messages(topic, queue_id))

    def wait_for_message(self, topic: str) -> MessageView:
        """Return the first message of a topic with one queue, as soon as there is one."""

        async def pull(client: Client) -> MessageView:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    answer = await client.pull(topic=topic, hold_ms=HOLD_MS)
                    if answer.code == ResponseCode.SUCCESS:
                        return views(answer)[0]
                    # Pulls cannot wait on a topic that does not exist yet.
                    await asyncio.sleep(LOOK_AGAIN_S)

        return self._ask(pull)
