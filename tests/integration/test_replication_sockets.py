"""Replication over real sockets, on a broker's own event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from brokers import SMALL_STORE, Client
from log_replicas import assert_same_log
from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig, IdentityConfig, ReplicationConfig, Role
from turbopump.broker.replication.slave import LinkState
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.testing import wait_until
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.headers import SendMessageV2


def identity(role: Role, broker_id: int) -> IdentityConfig:
    return IdentityConfig(broker_name="a", role=role, broker_id=broker_id, port=0)


async def send(client: Client, body: bytes) -> Command:
    header = SendMessageV2(
        producer_group="pg",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=0,
        flag=0,
    )
    return await client.ask(RequestCode.SEND_MESSAGE_V2, header, body, timeout_ms=20_000)


@pytest.mark.slow
def test_a_sync_master_and_a_slave_that_restarts(tmp_path: Path) -> None:
    async def replicate() -> None:
        config = BrokerConfig(
            directory=tmp_path / "master",
            identity=identity(Role.SYNC_MASTER, 0),
            store=SMALL_STORE,
        )
        async with Broker(config) as master, ConnectionPool(SocketNetwork()) as pool:
            client = Client(pool, master.address)
            ha_address = master.replication.ha_address
            copy = BrokerConfig(
                directory=tmp_path / "slave",
                identity=identity(Role.SLAVE, 1),
                replication=ReplicationConfig(master_address=ha_address),
                store=SMALL_STORE,
            )
            for number in range(2):
                async with Broker(copy) as slave:
                    await wait_until(lambda: master.replication.slaves.following)
                    body = b"%d" % number * 100_000
                    answers = await asyncio.gather(*(send(client, body) for _ in range(100)))
                    assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
                    await wait_until(lambda: slave.store.readable_end == master.store.written_end)
                    assert slave.replication.master_link is not None
                    assert slave.replication.master_link.state is LinkState.IN_SYNC
                    assert_same_log(master, slave)
                assert (await send(client, b"alone")).code in {
                    ResponseCode.SLAVE_NOT_AVAILABLE,
                    ResponseCode.FLUSH_SLAVE_TIMEOUT,
                }
        assert master.store.written_end > 2 * SMALL_STORE.segment_bytes

    run(replicate())
