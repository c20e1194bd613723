"""Sessions: routes, heartbeats, members, sharing, and requests of brokers."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from clusters import BROKERS, Cluster, Recorder, cluster
from turbopump.client import calls
from turbopump.client.config import ClientConfig
from turbopump.client.members import ConsumerMember, ProducerMember
from turbopump.client.producer import Producer
from turbopump.client.session import Session
from turbopump.client.shared_sessions import client_config, shared_session
from turbopump.client.subscriptions import subscription
from turbopump.errors import ForkedClient, InvalidArgument, NoRoute, NotRunning, RemoteError
from turbopump.message import Message, MessageQueue
from turbopump.testing import run_virtual, virtual_time, wait_until
from turbopump.wire.bodies import ConsumerData, ConsumerStatus, ConsumeType, Heartbeat, RunningInfo
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.headers import ConsumerStatusOf, RunningInfoOf


class Reader(ConsumerMember):
    """A consumer that only records what the session reports."""

    def __init__(self, group: str = "g", topic: str = "T") -> None:
        self.group = group
        self.topic = topic
        self.changes: list[str] = []

    def heartbeat_data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.PUSH,
            subscription_data_set=[subscription(self.topic, "a || b", 1)],
        )

    def members_changed(self) -> None:
        self.changes.append("members")

    def route_changed(self, topic: str) -> None:
        self.changes.append(topic)

    def progress(self, topic: str) -> dict[MessageQueue, int]:
        return {MessageQueue(topic, "a", 0): 5}


async def make_topic(world: Cluster, topic: str = "T") -> None:
    async with Producer("maker", session=world.session("10.0.1.9")) as producer:
        for queue in await producer.queues(topic):
            await producer.send(Message(topic, b"x"), to=queue)


def heartbeats(recorder: Recorder) -> list[Heartbeat]:
    commands = recorder.of(RequestCode.HEART_BEAT)
    return [Heartbeat.decode(whole_body(command)) for command in commands]


# --- routes ---------------------------------------------------------------------------------------


@virtual_time()
async def test_concurrent_callers_share_one_route_request(tmp_path: Path) -> None:
    recorder = Recorder()
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with world.session(hooks=[recorder]) as session:
            routes = await asyncio.gather(*(session.route("T") for _ in range(10)))
            assert all(route == routes[0] for route in routes)
            assert len(routes[0].readable) == 4
            await session.route("T")
            assert len(recorder.of(RequestCode.GET_ROUTEINFO_BY_TOPIC)) == 1


@virtual_time()
async def test_new_brokers_are_noticed_without_a_restart(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, world.session() as session:
        await make_topic(world)
        reader = Reader()
        await session.route("T")
        await session.join(reader)
        await world.start_broker("b")
        await world.make_topic("T", "b")
        await wait_until(lambda: "T" in reader.changes, 60)
        route = await session.route("T")
        assert {queue.broker for queue in route.readable} == {"a", "b"}
        assert session.address_to_write("b") == "10.0.0.2:10911"


@virtual_time()
async def test_the_next_name_server_is_queried_when_one_is_down(tmp_path: Path) -> None:
    async with cluster(tmp_path, nameservers=3) as world, world.session() as session:
        await make_topic(world)
        for host in ("ns0", "ns1"):
            world.network.refuse(host)
            world.network.cut(host)
        assert (await session.route("T")).readable
        world.network.refuse("ns2")
        world.network.cut("ns2")
        assert (await session.route("T")).readable, "the known route is retained"


@virtual_time()
async def test_an_unknown_topic_and_broker_are_named(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, world.session() as session:
        with pytest.raises(NoRoute, match="'nowhere'"):
            await session.route("nowhere")
        with pytest.raises(NoRoute, match="'z'"):
            session.address_to_write("z")
        with pytest.raises(NoRoute, match="'z'"):
            session.replica_to_read("z")


# --- heartbeats and members -----------------------------------------------------------------------


@virtual_time()
async def test_heartbeats_send_all_groups_to_all_brokers_every_30_s(tmp_path: Path) -> None:
    recorder = Recorder()
    async with cluster(tmp_path, BROKERS) as world:
        await make_topic(world)
        async with world.session(hooks=[recorder]) as session:
            await session.route("T")
            await session.join(Reader())
            async with Producer("pg", session=session):
                await asyncio.sleep(0.5)
                recorder.requests.clear()
                await asyncio.sleep(95)
                beats = heartbeats(recorder)
                assert 6 <= len(beats) <= 8
                addresses = set(recorder.addresses_of(RequestCode.HEART_BEAT))
                assert addresses == {"10.0.0.1:10911", "10.0.0.2:10911"}
                groups = [each.group_name for each in beats[0].producer_data_set]
                assert groups == ["CLIENT_INNER_PRODUCER", "pg"]
                (consumer,) = beats[0].consumer_data_set
                assert consumer.subscription_data_set[0].tags_set == ["a", "b"]
                assert beats[0].client_id == session.client_id == "10.0.1.1@test"


@virtual_time()
async def test_new_topics_of_known_brokers_cause_no_heartbeats(tmp_path: Path) -> None:
    recorder = Recorder()
    async with (
        cluster(tmp_path) as world,
        Producer("pg", session=world.session(hooks=[recorder])) as producer,
    ):
        await producer.send(Message("T", b"x"))
        await asyncio.sleep(0.5)
        # One as the first request on the connection, and one that is answered.
        assert len(heartbeats(recorder)) == 2
        for number in range(20):
            await producer.send(Message(f"T{number}", b"x"))
        await asyncio.sleep(0.4)
        assert len(heartbeats(recorder)) == 2


@virtual_time()
async def test_a_new_connection_to_a_broker_begins_with_a_heartbeat(tmp_path: Path) -> None:
    recorder = Recorder()
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with world.session(hooks=[recorder]) as session:
            await session.route("T")
            await session.join(Reader())
            address = session.address_to_write("a")
            for _ in range(5):
                assert world.network.cut("10.0.1.1", "10.0.0.1") == 1
                await asyncio.sleep(0.1)
                recorder.requests.clear()
                asked = [calls.consumer_ids(session, address, "g", 1000) for _ in range(3)]
                assert await asyncio.gather(*asked) == [[session.client_id]] * 3
                codes = [command.code for _, command in recorder.requests]
                assert codes == [
                    RequestCode.HEART_BEAT,
                    *[RequestCode.GET_CONSUMER_LIST_BY_GROUP] * 3,
                ]


@virtual_time()
async def test_sessions_without_members_and_name_servers_get_no_heartbeat_first(
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with world.session(hooks=[recorder]) as session:
            await session.route("T")
            await calls.min_offset(
                session, session.address_to_write("a"), MessageQueue("T", "a", 0), 1000
            )
            # The one that all sessions send to brokers that they learn of.
            assert len(heartbeats(recorder)) == 1
            await session.join(Reader())
            assert world.network.cut("10.0.1.1") == 2
            await asyncio.sleep(0.1)
            recorder.requests.clear()
            await session.refresh_route("T")
            assert [command.code for _, command in recorder.requests] == [
                RequestCode.GET_ROUTEINFO_BY_TOPIC
            ]


def test_a_session_belongs_to_one_event_loop() -> None:
    session = Session(ClientConfig("127.0.0.1:9876"))

    async def start() -> None:
        await session.start()

    async def use() -> None:
        with pytest.raises(NotRunning, match="another event loop"):
            await session.request("127.0.0.1:1", request(1), 100)

    run_virtual(start())
    run_virtual(use())


@virtual_time()
async def test_members_are_registered_immediately_and_removed_when_they_leave(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with world.session("10.0.1.1") as one, world.session("10.0.1.2") as other:
            first, second = Reader(), Reader()
            for session, reader in ((one, first), (other, second)):
                await session.route("T")
                await session.join(reader)
            address = one.address_to_write("a")
            ids = await calls.consumer_ids(one, address, "g", 1000)
            assert sorted(ids) == [one.client_id, other.client_id]
            await wait_until(lambda: "members" in first.changes)
            await other.leave(second)
            assert await calls.consumer_ids(one, address, "g", 1000) == [one.client_id]


@virtual_time()
async def test_a_group_is_in_a_session_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, world.session() as session:
        await session.join(Reader())
        with pytest.raises(InvalidArgument, match="has a consumer of group 'g' already"):
            await session.join(Reader())
        async with Producer("pg", session=session):
            other = Producer("pg", session=session)
            with pytest.raises(InvalidArgument, match="has a producer of group 'pg' already"):
                await other.start()


@virtual_time()
async def test_the_last_user_ends_a_session(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        session = world.session()
        first, second = Producer("p1", session=session), Producer("p2", session=session)
        async with first:
            async with second:
                pass
            assert session.is_running
            await first.send(Message("T", b"x"))
        assert not session.is_running
        with pytest.raises(NotRunning):
            await session.route("T")
        assert world.network.open_connections == 2, "only the broker's to the name server is left"


@virtual_time()
async def test_members_with_equal_settings_share_a_session_until_groups_collide() -> None:
    config = ClientConfig("127.0.0.1:9876")
    producer = ProducerMember()
    producer.group = "pg"
    one = shared_session(config, producer)
    assert shared_session(config, producer) is not one, "one that is not running is not shared"
    async with one:
        one = shared_session(config, producer)
        async with one:
            assert shared_session(config, Reader()) is one
            await one.join(producer)
            twin = ProducerMember()
            twin.group = "pg"
            other = shared_session(config, twin)
            assert other is not one
            assert other.client_id != one.client_id
            assert shared_session(ClientConfig("127.0.0.1:9877"), twin) is not one


def test_sessions_do_not_keep_their_event_loop_in_memory() -> None:
    async def share() -> ref[asyncio.AbstractEventLoop]:
        async with shared_session(ClientConfig("127.0.0.1:9876"), ProducerMember()):
            return ref(asyncio.get_running_loop())

    loop = run_virtual(share())
    gc.collect()
    assert loop() is None


@virtual_time()
async def test_two_members_of_a_group_starting_together_have_separate_sessions() -> None:
    config = ClientConfig("127.0.0.1:9876")
    async with shared_session(config, Reader("first")) as shared:
        one, other = Reader(), Reader()
        assert shared_session(config, one) is shared
        assert shared_session(config, other) is not shared
        assert shared_session(config, one) is shared
        await shared.join(one)
        await shared.leave(one)
        assert shared_session(config, other) is shared


@virtual_time()
async def test_a_named_instance_is_one_session_and_a_collision_an_error() -> None:
    config = ClientConfig("127.0.0.1:9876", instance="mine")
    first, second = ProducerMember(), ProducerMember()
    first.group = second.group = "pg"
    async with shared_session(config, first) as session:
        await session.join(first)
        assert shared_session(config, second) is session


def test_a_clients_cluster_is_configured_in_exactly_one_way() -> None:
    with pytest.raises(InvalidArgument, match="pass one of nameserver"):
        client_config("127.0.0.1:9876", "", ClientConfig("127.0.0.1:9876"), None)


# --- settings -------------------------------------------------------------------------------------


def test_the_environment_names_the_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with pytest.raises(InvalidArgument, match="NAMESRV_ADDR"):
        ClientConfig()
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876; 10.0.0.2:9876")
    assert ClientConfig().nameserver_addresses == ("10.0.0.1:9876", "10.0.0.2:9876")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"nameserver": "nowhere"}, "nowhere"),
        ({"namespace": "a b"}, "namespace must .* got 'a b'"),
        ({"namespace": 5}, "namespace must be a string, got 5"),
        ({"instance": "a@b"}, "instance must .* got 'a@b'"),
        ({"host": " "}, "host must .* got ' '"),
        ({"request_timeout": 0}, "request_timeout must be .*, got 0"),
        ({"route_interval": 0}, "route_interval must be .*, got 0"),
        ({"heartbeat_interval": 0}, "heartbeat_interval must be .*, got 0"),
        ({"persist_interval": 0}, "persist_interval must be .*, got 0"),
        (
            {"request_hooks": [1]},
            "request_hooks must be .* before_request and after_response, got 1",
        ),
        ({"requests_in_flight_max": 0}, "requests_in_flight_max must be .*, got 0"),
    ],
)
def test_settings_are_checked(config: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        ClientConfig(**{"nameserver": "127.0.0.1:9876", **config})


@virtual_time()
async def test_hooks_of_the_configuration_see_every_request(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        recorder = Recorder()
        session = world.session(request_hooks=[recorder])
        async with Producer("pg", session=session) as producer:
            await producer.send(Message("T", b"x"))
    codes = {command.code for _, command in recorder.requests}
    assert {
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.HEART_BEAT,
        RequestCode.SEND_MESSAGE_V2,
    } <= codes


class Forgetful(Recorder):
    """Does not return the request."""

    def before_request(self, address: str, command: Command) -> Command:
        super().before_request(address, command)
        return None  # type: ignore[return-value]


@virtual_time()
async def test_hooks_must_return_the_request(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        session = world.session(request_hooks=[Forgetful()])
        async with Producer("pg", session=session) as producer:
            with pytest.raises(
                InvalidArgument, match=r"Forgetful\.before_request must return .* None"
            ):
                await producer.send(Message("T", b"x"))


def test_a_client_id_consists_of_address_and_process() -> None:
    session = Session(ClientConfig("127.0.0.1:9876"))
    address, _, instance = session.client_id.partition("@")
    assert address.count(".") == 3
    assert instance.startswith(f"{os.getpid()}#")


# --- requests of brokers --------------------------------------------------------------------------


@virtual_time()
async def test_operators_see_running_consumers_through_the_broker(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, world.session() as session:
        await make_topic(world)
        await session.route("T")
        await session.join(Reader())
        address = session.address_to_write("a")
        async with world.session("10.0.1.5") as operator:
            asked = RunningInfoOf(consumer_group="g", client_id=session.client_id)
            command = request(RequestCode.GET_CONSUMER_RUNNING_INFO, asked)
            answer = calls.require_success(await operator.request(address, command, 15_000))
            info = RunningInfo.decode(whole_body(answer))
            assert [each.sub_string for each in info.subscription_set] == ["a || b"]
            status = ConsumerStatusOf(topic="T", group="g")
            command = request(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, status)
            answer = calls.require_success(await operator.request(address, command, 15_000))
            table = ConsumerStatus.decode(whole_body(answer)).consumer_table
            assert table == {session.client_id: {MessageQueue("T", "a", 0): 5}}


# --- fork -----------------------------------------------------------------------------------------


@virtual_time()
async def test_a_forked_child_cannot_use_its_parents_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as world, world.session() as session:
        with monkeypatch.context() as child:
            child.setattr("turbopump.machine.process._process_id", session.pid + 1)
            with pytest.raises(ForkedClient, match="after the fork"):
                await session.start()
            with pytest.raises(ForkedClient, match="after the fork"):
                await session.request("10.0.0.1:1", request(1), 100)


def test_errors_state_whether_they_are_retryable() -> None:
    assert NoRoute("x").retriable
    assert not ForkedClient("x").retriable
    assert RemoteError(14, "").retriable
