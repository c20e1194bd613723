"""Registration with name servers that start, stop, hang, reject and forget; in virtual time."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from broker_parts import IDENTITY, FakeFile
from turbopump.broker.config import AccessConfig, BrokerConfig, RegistrationConfig
from turbopump.broker.registration import Registration, permitted
from turbopump.broker.topics import Topics
from turbopump.net.connection import Connection
from turbopump.net.pool import ConnectionPool
from turbopump.net.router import Handler, Router
from turbopump.net.server import Server, ServerConfig
from turbopump.supervisor import Supervisor
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time, wait_until
from turbopump.wire import headers
from turbopump.wire.bodies import BrokerRegistration, KeyValues, TopicConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.registration import decode_compressed

HOSTS = ("10.0.0.1", "10.0.0.2")
NAMES = tuple(f"{host}:9876" for host in HOSTS)


class FakeNameServer:
    """Records the registrations it receives."""

    def __init__(self, network: MemoryNetwork, host: str) -> None:
        self.told: list[Command] = []
        self.at_s: list[float] = []
        self.code = ResponseCode.SUCCESS
        self.body = b""
        self.changed = False
        self.hangs = False
        handlers: dict[int, Handler] = {
            RequestCode.REGISTER_BROKER: self.serve,
            RequestCode.UNREGISTER_BROKER: self.serve,
            RequestCode.QUERY_DATA_VERSION: self.serve,
        }
        self._network, self._host, self._router = network, host, Router(handlers)
        self._server: Server | None = None

    async def start(self) -> None:
        config = ServerConfig(host=self._host, port=9876)
        network = self._network.host(self._host)
        self._server = Server(network, self._router, config, clock=virtual_loop().clock)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.drain(0)
            self._server = None

    def serve(self, request: Command, _peer: Connection) -> Command | None:
        self.told.append(request)
        self.at_s.append(virtual_loop().time())
        if self.hangs:
            return None
        if request.code == RequestCode.QUERY_DATA_VERSION:
            answer = headers.DataVersionAnswer(changed=self.changed)
            return request.answer(ResponseCode.SUCCESS, answer)
        return request.answer(self.code, headers.RegisterBrokerAnswer(), body=self.body)

    def registered_topics(self) -> list[set[str]]:
        """Return the topics of each registration, without the broker's own."""
        own = {"TBW102", "BenchmarkTest", "broker-a", "OFFSET_MOVED_EVENT", "SELF_TEST_TOPIC"}
        own |= {"DefaultCluster", "DefaultCluster_REPLY_TOPIC", "SCHEDULE_TOPIC_XXXX"}
        return [set(body.topic_config_serialize_wrapper.topic_config_table) - own
                for body in map(registered, self.told)]  # fmt: skip

    def is_whole(self, place: int) -> bool:
        table = registered(self.told[place]).topic_config_serialize_wrapper
        return "TBW102" in table.topic_config_table


def registered(command: Command) -> BrokerRegistration:
    header = headers.RegisterBroker.from_ext_fields(command.ext_fields)
    body = whole_body(command)
    assert header.body_crc32 == zlib.crc32(body) & 0x7FFFFFFF
    return decode_compressed(body) if header.compressed else BrokerRegistration.decode(body)


class World:
    """A broker's topics, its registration, and two name servers."""

    def __init__(self, **settings: Any) -> None:
        self.network = MemoryNetwork()
        self.servers = [FakeNameServer(self.network, host) for host in HOSTS]
        config = RegistrationConfig(name_servers=NAMES, **settings)
        self.config = BrokerConfig(identity=IDENTITY, registration=config)
        self.topics = Topics(self.config.topics, IDENTITY, FakeFile())
        self.pool = ConnectionPool(self.network.host("10.0.0.9"), clock=virtual_loop().clock)
        self.registration = Registration(
            config=self.config,
            topics=self.topics,
            pool=self.pool,
            address="10.0.0.9:10911",
            ha_address="10.0.0.9:10912",
            name_servers=NAMES,
        )
        self.topics.listen(self.registration.topic_changed)
        self.work = Supervisor()

    async def start(self) -> None:
        self.registration.start(self.work)
        await self.registration.wait_tried()


@asynccontextmanager
async def world(*, started: bool = True, **settings: Any) -> AsyncIterator[World]:
    made = World(**settings)
    try:
        if started:
            for server in made.servers:
                await server.start()
            await made.start()
        yield made
    finally:
        await made.work.stop()
        await made.pool.close()
        for server in made.servers:
            await server.stop()


@virtual_time()
async def test_the_broker_registers_everywhere_at_the_start_and_every_30_seconds() -> None:
    async with world() as w:
        await asyncio.sleep(91)
        for server in w.servers:
            assert len(server.told) == 4
            assert [round(b - a) for a, b in zip(server.at_s, server.at_s[1:], strict=False)] == (
                [30, 30, 30]
            )
            assert all(server.is_whole(place) for place in range(4))
        header = headers.RegisterBroker.from_ext_fields(w.servers[0].told[0].ext_fields)
        assert (header.broker_addr, header.ha_server_addr) == ("10.0.0.9:10911", "10.0.0.9:10912")
        assert (header.broker_name, header.broker_id) == ("broker-a", 0)


@virtual_time()
async def test_a_changed_topic_is_registered_immediately_and_alone() -> None:
    async with world() as w:
        topic = TopicConfig(topic_name="T")
        await w.topics.update(topic)
        started_s = virtual_loop().time()
        await w.registration.announce(topic)
        assert virtual_loop().time() - started_s < 0.1
        for server in w.servers:
            assert server.registered_topics()[1:] == [{"T"}]
            assert not server.is_whole(1)
            body = registered(server.told[1]).topic_config_serialize_wrapper
            assert body.data_version == w.topics.data_version
        await asyncio.sleep(31)
        assert all(server.is_whole(-1) for server in w.servers)


@virtual_time()
async def test_automatically_created_topics_are_registered_without_waiting() -> None:
    async with world() as w:
        for name in "ABC":
            w.topics.create_by_send(name, "TBW102", 4)
        await asyncio.sleep(1)
        for server in w.servers:
            assert set().union(*server.registered_topics()[1:]) == {"A", "B", "C"}
            assert len(server.told) <= 4


@virtual_time()
async def test_a_returning_name_server_gets_a_full_registration() -> None:
    async with world() as w:
        first, second = w.servers
        await first.stop()
        await asyncio.sleep(1)
        w.topics.create_by_send("T", "TBW102", 4)
        await asyncio.sleep(1)
        assert second.registered_topics()[-1] == {"T"}
        assert not second.is_whole(-1)
        await first.start()
        await asyncio.sleep(20)
        assert first.is_whole(-1), "a partial registration would hide the rest from it"
        assert first.registered_topics()[-1] == {"T"}


@virtual_time()
async def test_other_changes_than_of_a_topic_cause_a_full_registration() -> None:
    async with world() as w:
        await w.topics.update(TopicConfig(topic_name="T"))
        await asyncio.sleep(1)
        await w.topics.delete("T")
        await w.topics.update(TopicConfig(topic_name="U"))
        await asyncio.sleep(1)
        assert all(server.is_whole(-1) for server in w.servers)
        assert w.servers[0].registered_topics()[-1] == {"U"}


@virtual_time()
async def test_a_name_server_that_hangs_does_not_delay_the_others() -> None:
    async with world(timeout_ms=6000) as w:
        hanging, other = w.servers
        hanging.hangs = True
        topic = TopicConfig(topic_name="T")
        await w.topics.update(topic)
        started_s = virtual_loop().time()
        await w.registration.announce(topic)
        assert 2.9 < virtual_loop().time() - started_s < 3.1, "tools time out after five"
        assert other.at_s[-1] - started_s < 0.1
        w.topics.create_by_send("U", "TBW102", 4)
        await asyncio.sleep(0.1)
        assert other.registered_topics()[-1] == {"U"}


@virtual_time()
async def test_unreachable_name_servers_are_logged_once_and_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "turbopump.broker")
    async with world(started=False) as w:
        await w.start()
        await asyncio.sleep(300)
        warnings = [r for r in caplog.records if r.levelname == "WARNING"]
        assert {host for host in HOSTS for r in warnings if host in r.getMessage()} == set(HOSTS)
        assert len(warnings) == 2
        for server in w.servers:
            await server.start()
        await wait_until(lambda: all(server.told for server in w.servers), 30)
        assert sum("registered with" in r.getMessage() for r in caplog.records) == 2


@virtual_time()
async def test_a_name_server_that_rejects_does_not_fail_the_broker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world(started=False) as w:
        for server in w.servers:
            await server.start()
        w.servers[0].code = ResponseCode.SYSTEM_ERROR
        w.servers[1].body = b"garbage"
        await w.start()
        assert "code 1" in caplog.text
        assert len([r for r in caplog.records if r.name.startswith("turbopump.broker")]) == 2


@virtual_time()
async def test_a_bug_ends_registration_with_no_name_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    note, bugs = Registration.note_ordered, [LookupError("a bug")] * 2

    def fail(self: Registration, server: str, names: Iterable[str]) -> None:
        if server.startswith(HOSTS[0]) and bugs:
            raise bugs.pop()
        note(self, server, names)

    async with world() as w:
        for server in w.servers:
            server.body = KeyValues(table={"T": "broker-a:4"}).encode()
        monkeypatch.setattr(Registration, "note_ordered", fail)
        await asyncio.sleep(200)
        for server in w.servers:
            told_s = [at_s for at_s in server.at_s if at_s > 100]
            assert len(told_s) >= 3, "every 30 s again, and both of them"
        assert not bugs
    name = f"registration with {HOSTS[0]}:9876"
    assert caplog.text.count(f"{name} failed and is started again") == 2
    assert [watch.name for watch in w.work.watches if watch.failures] == [name]


@virtual_time()
async def test_ordered_topics_come_from_the_name_servers() -> None:
    async with world() as w:
        await w.topics.update(TopicConfig(topic_name="T"))
        await w.topics.update(TopicConfig(topic_name="U"))
        w.servers[0].body = KeyValues(table={"T": "broker-a:4"}).encode()
        w.servers[1].body = KeyValues(table={"U": "broker-a:4"}).encode()
        await asyncio.sleep(31)
        assert {t.topic_name for t in w.topics.table.values() if t.order} == {"T", "U"}
        w.servers[1].body = KeyValues(table={}).encode()
        await asyncio.sleep(31)
        assert {t.topic_name for t in w.topics.table.values() if t.order} == {"T"}


@virtual_time()
async def test_without_force_the_name_servers_version_is_queried_first() -> None:
    async with world(forced=False) as w:
        server = w.servers[0]
        await asyncio.sleep(31)
        assert [command.code for command in server.told] == [
            RequestCode.REGISTER_BROKER,
            RequestCode.QUERY_DATA_VERSION,
        ]
        server.changed = True
        await asyncio.sleep(30)
        assert [command.code for command in server.told[2:]] == [
            RequestCode.QUERY_DATA_VERSION,
            RequestCode.REGISTER_BROKER,
        ]


@virtual_time()
async def test_the_compressed_form() -> None:
    async with world(compressed=True) as w:
        assert w.servers[0].is_whole(0)


@virtual_time()
async def test_a_change_of_permission_registers_all_topics() -> None:
    async with world() as w:
        access = AccessConfig(permission=4)
        w.registration.config = replace(w.config, access=access)
        w.registration.announce_all()
        await asyncio.sleep(1)
        table = registered(w.servers[0].told[-1]).topic_config_serialize_wrapper
        assert {topic.perm for topic in table.topic_config_table.values()} == {4}
        assert table.data_version.counter == 1, "otherwise name servers would ignore it"


@virtual_time()
async def test_unregistering_contacts_all_name_servers_and_waits_briefly() -> None:
    async with world() as w:
        w.servers[0].hangs = True
        started_s = virtual_loop().time()
        await w.registration.unregister()
        assert virtual_loop().time() - started_s < 3.1
        for server in w.servers:
            assert server.told[-1].code == RequestCode.UNREGISTER_BROKER
            header = headers.BrokerIdentity.from_ext_fields(server.told[-1].ext_fields)
            assert header.broker_addr == "10.0.0.9:10911"


@virtual_time()
async def test_without_name_servers_nothing_waits() -> None:
    topics = Topics(BrokerConfig().topics, IDENTITY, FakeFile())
    async with ConnectionPool(MemoryNetwork().host("10.0.0.9")) as pool:
        registration = Registration(
            config=BrokerConfig(identity=IDENTITY),
            topics=topics,
            pool=pool,
            address="10.0.0.9:10911",
            ha_address="10.0.0.9:10912",
            name_servers=(),
        )
        work = Supervisor()
        registration.start(work)
        await registration.wait_tried()
        await registration.announce(TopicConfig(topic_name="T"))
        registration.announce_all()
        await registration.unregister()


def test_a_brokers_permission_limits_all_topics() -> None:
    topics = {"T": TopicConfig(topic_name="T", read_queue_nums=3, perm=6, order=True)}
    assert permitted(topics, AccessConfig()) == topics
    assert permitted(topics, AccessConfig(permission=4)) == {
        "T": TopicConfig(topic_name="T", read_queue_nums=3, perm=4)
    }
