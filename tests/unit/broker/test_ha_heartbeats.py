"""Heartbeats between master and slave continue after a failure, which is logged and reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from brokers import BROKER_HOST, config_at, running_broker
from turbopump.broker.broker import Broker
from turbopump.broker.config import IdentityConfig, ReplicationConfig, Role
from turbopump.broker.replication.master import SlaveConnection
from turbopump.broker.replication.slave import LinkState, MasterConnection
from turbopump.machine.files import REAL_FILES
from turbopump.supervisor import summary
from turbopump.testing import MemoryNetwork, virtual_machine, virtual_time, wait_until

SLAVE_HOST = "10.0.0.2"
SILENT_S = 60
"""Three times as long as a peer may be silent."""


@asynccontextmanager
async def master_and_slave(tmp_path: Path) -> AsyncIterator[tuple[Broker, Broker]]:
    network = MemoryNetwork()
    identity = IdentityConfig(
        broker_name="broker-a", broker_id=1, role=Role.SLAVE, bind_host=SLAVE_HOST, port=10911
    )
    replication = ReplicationConfig(master_address=f"{BROKER_HOST}:10912")
    config = config_at(tmp_path / "slave", identity=identity, replication=replication)
    machine = virtual_machine(REAL_FILES, seed=2)
    async with (
        running_broker(tmp_path / "master", network) as (master, _),
        Broker(config, network.host(SLAVE_HOST), machine) as slave,
    ):
        await wait_until(lambda: state_of(slave) is LinkState.IN_SYNC)
        yield master, slave


def state_of(slave: Broker) -> LinkState:
    link = slave.replication.master_link
    assert link is not None
    return link.state


def link_of(slave: Broker) -> MasterConnection | None:
    assert slave.replication.follower is not None
    return slave.replication.follower._connection


def failures_of(broker: Broker) -> str:
    return summary(broker._work.watches)["backgroundFailures"]


def failing_once(original: object, monkeypatch: pytest.MonkeyPatch, method: str) -> list[int]:
    """Let a method of a class fail the first time; return a list that grows with each call."""
    right, calls = getattr(original, method), list[int]()

    def wrong(self: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise LookupError("a bug")
        right(self)

    monkeypatch.setattr(original, method, wrong)
    return calls


@virtual_time()
async def test_a_master_continues_its_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with master_and_slave(tmp_path) as (master, slave):
        calls = failing_once(SlaveConnection, monkeypatch, "tick")
        connection = link_of(slave)
        await asyncio.sleep(SILENT_S)
        assert len(calls) > 10
        # Without heartbeats, the slave would have closed it.
        assert link_of(slave) is connection
        assert failures_of(master) == (
            "heartbeats to slaves: 1 failures, the last LookupError('a bug')"
        )
    assert "heartbeats to slaves failed and is started again" in caplog.text
    assert "heartbeats to slaves works again after 1 failures" in caplog.text


@virtual_time()
async def test_a_slave_continues_its_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with master_and_slave(tmp_path) as (master, slave):
        calls = failing_once(MasterConnection, monkeypatch, "_beat")
        [connected] = master.replication.slaves._connected
        await asyncio.sleep(SILENT_S)
        assert len(calls) > 10
        # Without heartbeats, the master would have closed it.
        assert list(master.replication.slaves._connected) == [connected]
        assert failures_of(slave) == (
            "heartbeats to the master: 1 failures, the last LookupError('a bug')"
        )
    assert "heartbeats to the master failed and is started again" in caplog.text


@virtual_time()
async def test_a_heartbeat_failing_for_one_slave_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with master_and_slave(tmp_path) as (master, slave):
        connection = link_of(slave)
        broken = SlaveConnection(master.replication.slaves)
        monkeypatch.setattr(broken, "tick", lambda: 1 / 0)
        # Before the other one, in the order of ticks.
        connected = master.replication.slaves._connected
        others = list(connected)
        connected.clear()
        connected.update(dict.fromkeys([broken, *others]))
        await asyncio.sleep(SILENT_S)
        assert link_of(slave) is connection
        assert "ZeroDivisionError" in failures_of(master)
        del connected[broken]


@virtual_time()
async def test_work_is_named_after_the_role(tmp_path: Path) -> None:
    async with master_and_slave(tmp_path) as (master, slave):
        names = [{watch.name for watch in broker._work.watches} for broker in (master, slave)]
    assert "heartbeats to slaves" in names[0] - names[1]
    assert "heartbeats to the master" in names[1] - names[0]
