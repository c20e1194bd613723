"""A slave's connection that is made later than it was waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest

from turbopump.broker.config import BrokerConfig
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.replication.config import ReplicationConfig
from turbopump.broker.replication.slave import Follower, MasterConnection
from turbopump.errors import ConnectFailed
from turbopump.testing import virtual_loop, virtual_time


class EmptyLog:
    """The log of a new slave."""

    min_offset = written_end = readable_end = 0


class LateNetwork:
    """Gives up connecting; the connection may be made nevertheless."""

    def __init__(self) -> None:
        self.made: list[MasterConnection] = []

    async def connect(self, host: str, port: int, make: Callable[[], MasterConnection]) -> None:
        self.made.append(make())
        raise ConnectFailed(f"{host}:{port}: no answer within 3000 ms")


class LateTransport(asyncio.Transport):
    """Must not be written to, as it is closed already."""

    is_closed = False

    def write(self, data: object) -> None:
        raise RuntimeError("the handler is closed")

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("loses", [False, True], ids=["is told of its end", "is not"])
@virtual_time()
async def test_a_connection_that_is_made_too_late_is_closed(loses: bool) -> None:
    config = BrokerConfig(replication=ReplicationConfig(master_address="10.0.0.1:10912"))
    network, clock = LateNetwork(), virtual_loop().clock
    live = LiveConfig(config, clock)
    follower = Follower(cast("Any", EmptyLog()), live, cast("Any", network), clock, lambda: None)
    following = asyncio.create_task(follower.run())
    await asyncio.sleep(1)
    [connection], transport = network.made, LateTransport()
    connection.connection_made(transport)
    assert transport.is_closed
    if loses:
        connection.connection_lost(None)
    # Longer than heartbeats take: nothing is written to it.
    await asyncio.sleep(30)
    assert len(network.made) > 1
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
