"""A slave's connection to its master that is opened too late, or ends before its flush."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

import pytest

from turbopump.broker.config import BrokerConfig, ReplicationConfig
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.replication.slave import Follower, MasterConnection
from turbopump.errors import ConnectFailed, WriteFailed
from turbopump.store.config import StoreConfig
from turbopump.supervisor import Watch
from turbopump.testing import virtual_loop, virtual_time


class EmptyLog:
    """The log of a new slave."""

    config = StoreConfig()
    min_offset = written_end = readable_end = 0

    def reopen(self) -> None:
        """Do nothing: it is open."""


class LateNetwork:
    """Stops connecting; the connection may still be established."""

    def __init__(self) -> None:
        self.made: list[MasterConnection] = []

    async def connect(self, host: str, port: int, make: Callable[[], MasterConnection]) -> None:
        self.made.append(make())
        raise ConnectFailed(f"{host}:{port}: no answer within 3000 ms")


class LateTransport(asyncio.Transport):
    """Must not be written to, as it is already closed."""

    is_closed = False

    def write(self, data: object) -> None:
        raise RuntimeError("the handler is closed")

    def close(self) -> None:
        self.is_closed = True


def follower_of(log: EmptyLog, network: LateNetwork | None = None) -> Follower:
    """Return a follower of a master that does not exist."""
    config = BrokerConfig(replication=ReplicationConfig(master_address="10.0.0.1:10912"))
    clock = virtual_loop().clock
    live = LiveConfig(config, clock)
    watch = Watch("heartbeats")
    return Follower(cast("Any", log), live, cast("Any", network), clock, watch, lambda: None)


@pytest.mark.parametrize("loses", [False, True], ids=["is notified of its end", "is not"])
@virtual_time()
async def test_a_connection_established_too_late_is_closed(loses: bool) -> None:
    network = LateNetwork()
    following = asyncio.create_task(follower_of(EmptyLog(), network).run())
    await asyncio.sleep(1)
    [connection], transport = network.made, LateTransport()
    connection.connection_made(transport)
    assert transport.is_closed
    if loses:
        connection.connection_lost(None)
    # Longer than the heartbeat interval: nothing is written to it.
    await asyncio.sleep(30)
    assert len(network.made) > 1
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


@virtual_time()
async def test_a_flush_that_fails_after_the_connection_closed_is_not_an_unhandled_error() -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    connection = MasterConnection(follower_of(EmptyLog()), cast("Any", None))
    flush: Future[None] = Future()
    connection._await_flush(flush)
    waiting = asyncio.create_task(connection.wait_flushed())
    await asyncio.sleep(1)
    flush.set_exception(WriteFailed("flushing the commit log failed"))
    connection.ended.cancel()
    await waiting
    del waiting, flush, connection
    gc.collect()
    assert unhandled == []
