"""Life cycle of a broker: name servers that do not answer, addresses, a failed start."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from brokers import BROKER_HOST, SMALL_STORE, client_of, config_at, running_broker
from netkit import RawPeer, never
from turbopump.broker.broker import Broker
from turbopump.broker.config import IdentityConfig, RegistrationConfig
from turbopump.broker.stats import Stats
from turbopump.errors import InvalidArgument, ListenFailed, ServerFailed
from turbopump.machine.files import REAL_FILES
from turbopump.net.connection import Connection
from turbopump.net.deadlines import Deadlines
from turbopump.net.router import Router
from turbopump.net.server import Server, ServerConfig
from turbopump.store.store import Store
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_machine, virtual_time, wait_until
from turbopump.wire import headers
from turbopump.wire.bodies import KeyValues, TopicConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Serialize, request, whole_body
from turbopump.wire.framing import encode
from turbopump.wire.hosts import split_address


@virtual_time()
async def test_a_silent_name_server_holds_up_neither_start_nor_stop(tmp_path: Path) -> None:
    network = MemoryNetwork()
    silent = Server(
        network.host("10.0.0.2"),
        Router(unknown=never),
        ServerConfig(host="10.0.0.2", port=9876),
        clock=virtual_loop().clock,
    )
    registration = RegistrationConfig(name_servers=("10.0.0.2:9876",))
    async with silent:
        started_s = virtual_loop().time()
        async with running_broker(tmp_path, network, registration=registration) as (_, client):
            assert virtual_loop().time() - started_s < 1
            assert (await client.send()).code == ResponseCode.SUCCESS
            stopping_s = virtual_loop().time()
        assert virtual_loop().time() - stopping_s < 2


@virtual_time()
async def test_a_port_in_use_leaves_nothing_behind(tmp_path: Path) -> None:
    network = MemoryNetwork()
    config = config_at(tmp_path)
    taken = Server(
        network.host(BROKER_HOST),
        Router(),
        ServerConfig(host=BROKER_HOST, port=10911),
        clock=virtual_loop().clock,
    )
    async with taken:
        with pytest.raises(ListenFailed):
            await Broker(config, network.host(BROKER_HOST), virtual_machine(REAL_FILES)).start()
    async with running_broker(tmp_path, network) as (_, client):
        assert (await client.send()).code == ResponseCode.SUCCESS


@virtual_time()
async def test_an_advertised_host_that_does_not_exist(tmp_path: Path) -> None:
    network = MemoryNetwork()
    identity = IdentityConfig(bind_host=BROKER_HOST, advertised_host="no such host", port=0)
    broker = Broker(
        config_at(tmp_path, identity=identity),
        network.host(BROKER_HOST),
        virtual_machine(REAL_FILES),
    )
    with pytest.raises(InvalidArgument, match="brokerIP1 'no such host' cannot be resolved"):
        await broker.start()


@virtual_time()
async def test_clients_connecting_through_another_address_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identity = IdentityConfig(
        broker_name="broker-a", bind_host=BROKER_HOST, advertised_host="192.0.2.7", port=10911
    )
    network = MemoryNetwork()
    with caplog.at_level(logging.WARNING):
        async with Broker(
            config_at(tmp_path, identity=identity),
            network.host(BROKER_HOST),
            virtual_machine(REAL_FILES),
        ) as broker:
            assert broker.address == "192.0.2.7:10911"
            opened = [await dial(network) for _ in range(2)]
            await asyncio.sleep(0.1)
            for connection in opened:
                connection.close()
    warnings = [record.message for record in caplog.records if "brokerIP1" in record.message]
    assert len(warnings) == 1
    assert (
        "reached this broker at 10.0.0.1, but routes tell clients to use 192.0.2.7" in warnings[0]
    )


async def dial(network: MemoryNetwork) -> Connection:
    deadlines = Deadlines(virtual_loop().clock)
    return await network.host("10.0.0.9").connect(
        BROKER_HOST, 10911, lambda: Connection(Router(), deadlines)
    )


@virtual_time()
async def test_no_false_alarm_for_names_of_the_same_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with running_broker(tmp_path) as (_, client):
            await client.send()
    assert not [record for record in caplog.records if "brokerIP1" in record.message]


@virtual_time()
async def test_a_broker_stops_when_it_can_no_longer_keep_its_guarantees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise LookupError("a bug")

    async def run() -> None:
        async with running_broker(tmp_path) as (broker, client):
            assert (await client.send()).code == ResponseCode.SUCCESS
            monkeypatch.setattr(broker.store, "tick", fail)
            await asyncio.sleep(600)

    with pytest.raises(ServerFailed, match="store maintenance keeps failing"):
        await run()
    assert "LookupError: a bug" in caplog.text
    monkeypatch.undo()
    async with running_broker(tmp_path) as (broker, _):
        assert broker.queue_end("T", 0) == 1, "closed in order, and nothing lost"


@virtual_time()
async def test_background_work_and_its_failures_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Stats) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(Stats, "sample", fail)
    async with running_broker(tmp_path) as (_, client):
        await asyncio.sleep(12)
        answer = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        told = KeyValues.decode(whole_body(answer)).table
    assert {"offsets", "retention", "store maintenance"} <= set(told["backgroundWork"].split(", "))
    assert told["backgroundFailures"] == "statistics: 1 failures, the last LookupError('a bug')"


@virtual_time()
async def test_writes_are_counted_by_the_time_they_take(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await asyncio.gather(*(client.send() for _ in range(20)))
        answer = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        told = KeyValues.decode(whole_body(answer)).table
    assert told["putMessageDistributeTime"].startswith("[<=0ms]:20 [0~10ms]:0 ")


@pytest.mark.parametrize("is_reset", [False, True])
@virtual_time()
async def test_commits_of_a_client_that_closes_before_its_responses(
    tmp_path: Path, is_reset: bool
) -> None:
    count = 500 if is_reset else 4000
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, _client):
        topic = TopicConfig(topic_name="T", read_queue_nums=count, write_queue_nums=count)
        await broker.state.topics.update(topic)
        host, port = split_address(broker.address)
        peer = await network.host("leaving").connect(host, port, RawPeer)
        for queue_id in range(count):
            commit = headers.UpdateConsumerOffset(
                consumer_group="g", topic="T", queue_id=queue_id, commit_offset=0
            )
            command = request(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
            peer.transport.write(encode(replace(command, serialize=Serialize.ROCKETMQ)))
        if is_reset:
            # Only what has left the client can be executed.
            assert not peer.transport.get_write_buffer_size()
            peer.transport.abort()
        else:
            peer.transport.close()
        await wait_until(lambda: len(broker.state.offsets.of_topic("g", "T")) == count)


STEPS: dict[str, Callable[[Broker], tuple[object, str]]] = {
    "background work": lambda broker: (broker._work, "stop"),
    "unfinished sends": lambda broker: (broker.path.durability, "settle"),
    "name servers": lambda broker: (broker._registration, "unregister"),
    "connections": lambda broker: (broker._pool, "close"),
    "clients": lambda broker: (broker._server, "drain"),
    "tables": lambda broker: (broker.state.offsets.saving, "try_save"),
}


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_close_cancelled_at_any_step_releases_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, is_begun: bool
) -> None:
    @virtual_time()
    async def check() -> None:
        network = MemoryNetwork()
        broker = Broker(
            config_at(tmp_path),
            network.host(BROKER_HOST),
            virtual_machine(REAL_FILES),
        )
        await broker.start()
        async with client_of(network, broker.address) as client:
            assert (await client.send()).code == ResponseCode.SUCCESS
            broker.state.offsets.commit("g", "T", 0, 7)
            closing = asyncio.create_task(broker.close())
            owner, name = STEPS[step](broker)
            own = getattr(owner, name)

            async def cancelled(*args: Any) -> None:
                closing.cancel()
                if is_begun:
                    await own(*args)
                await asyncio.sleep(0)

            monkeypatch.setattr(owner, name, cancelled)
            with pytest.raises(asyncio.CancelledError):
                await closing
        with Store.open(tmp_path, SMALL_STORE, machine=virtual_machine(REAL_FILES)) as store:
            assert store.queue_range("T", 0)[1] == 1
        saved = json.loads((tmp_path / "config" / "consumerOffset.json").read_text())
        assert saved["offsetTable"] == {"T@g": {"0": 7}}

    check()


@virtual_time()
async def test_closing_over_a_slow_disk_leaves_no_timer(tmp_path: Path) -> None:
    network = MemoryNetwork()
    broker = Broker(config_at(tmp_path), network.host(BROKER_HOST), virtual_machine(REAL_FILES))
    await broker.start()
    await broker.close()
    # What happens to a message that is stored while the broker closes.
    broker._arrived([])
    await asyncio.sleep(0)
    assert virtual_loop().timers_pending == 0


@virtual_time()
async def test_changed_retention_takes_effect_while_the_broker_runs(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        for _ in range(4):
            assert (
                await client.send(bytes(SMALL_STORE.segment_bytes // 3))
            ).code == ResponseCode.SUCCESS
        broker.store.flush()
        await asyncio.sleep(2 * 3600)
        assert broker.store.retain(at_any_hour=True).segments == 0
        changed = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"fileReservedTime=1")
        assert changed.code == ResponseCode.SUCCESS
        assert broker.store.retain(at_any_hour=True).segments > 0
        assert broker.store.min_offset > 0
