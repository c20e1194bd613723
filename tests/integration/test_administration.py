"""Operators, clients, a broker on its real store, and name servers; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from brokers import BROKER_HOST, Client, config_at
from turbopump.broker.broker import Broker
from turbopump.broker.config import RegistrationConfig
from turbopump.machine.files import REAL_FILES
from turbopump.message import MessageQueue
from turbopump.nameserver import NameServer, NameServerConfig
from turbopump.net.connection import Connection
from turbopump.net.pool import ConnectionPool
from turbopump.net.router import Router
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_machine, virtual_time, wait_until
from turbopump.wire import bodies, headers
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.schema import Header

NAMES_HOST = "10.0.0.2"
NAMES = f"{NAMES_HOST}:9876"
BROKER = f"{BROKER_HOST}:10911"
OK = ResponseCode.SUCCESS


class Member(Client):
    """A consumer that records the broker's requests."""

    def __init__(self, network: MemoryNetwork, host: str) -> None:
        self.asked: list[Command] = []
        pushed = (40, 220, 307)
        router = Router(dict.fromkeys(pushed, self._serve))
        super().__init__(
            ConnectionPool(network.host(host), router=router, clock=virtual_loop().clock), BROKER
        )
        self.client_id = f"{host}@1"

    def _serve(self, command: Command, _peer: Connection) -> Command:
        self.asked.append(command)
        return command.answer(OK, remark="from the client", body=b"{}")

    def codes(self) -> list[int]:
        return [command.code for command in self.asked]

    async def beat(self, group: str = "g", topic: str = "T") -> None:
        subscription = bodies.Subscription(topic=topic, sub_string="*", sub_version=1)
        data = bodies.ConsumerData(group_name=group, subscription_data_set=[subscription])
        body = bodies.Heartbeat(client_id=self.client_id, consumer_data_set=[data])
        answer = await self.ask(RequestCode.HEART_BEAT, body=body.encode())
        assert answer.code == OK, answer.remark


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.network = MemoryNetwork()
        self.clock = virtual_loop().clock
        self.operator = Client(
            ConnectionPool(self.network.host("10.0.0.8"), clock=self.clock), BROKER
        )
        self._pools = [self.operator.pool]

    def name_server(self) -> NameServer:
        config = NameServerConfig(
            host=NAMES_HOST,
            port=9876,
            order_message_enable=True,
            kv_config_path=self.directory / "kv.json",
        )
        return NameServer(config, self.network.host(NAMES_HOST), virtual_machine(REAL_FILES))

    def broker(self) -> Broker:
        config = config_at(
            self.directory / "store", registration=RegistrationConfig(name_servers=(NAMES,))
        )
        return Broker(
            config,
            self.network.host(BROKER_HOST),
            virtual_machine(REAL_FILES, seed=1),
        )

    def member(self, host: str) -> Member:
        made = Member(self.network, host)
        self._pools.append(made.pool)
        return made

    async def close(self) -> None:
        for pool in self._pools:
            await pool.close()

    async def names(self, code: int, header: Header) -> Command:
        return await self.operator.pool.request(NAMES, request(code, header), 3000)

    async def route(self, topic: str) -> bodies.TopicRoute | None:
        asked = headers.RouteOf(topic=topic)
        answer = await self.names(RequestCode.GET_ROUTEINFO_BY_TOPIC, asked)
        return bodies.TopicRoute.decode(whole_body(answer)) if answer.code == OK else None

    async def perm(self, topic: str) -> int | None:
        route = await self.route(topic)
        return None if route is None else route.queue_datas[0].perm

    async def create(self, topic: str, queues: int = 2) -> None:
        header = headers.CreateTopic(
            topic=topic,
            default_topic="TBW102",
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=6,
            topic_filter_type="SINGLE_TAG",
        )
        answer = await self.operator.ask(
            RequestCode.UPDATE_AND_CREATE_TOPIC, header, timeout_ms=10_000
        )
        assert answer.code == OK, answer.remark

    async def send(self, count: int) -> None:
        for _ in range(count):
            assert (await self.operator.send()).code == OK

    async def committed(self, queue_id: int = 0) -> int:
        header = headers.QueryConsumerOffset(consumer_group="g", topic="T", queue_id=queue_id)
        return await self.operator.offset(RequestCode.QUERY_CONSUMER_OFFSET, header)

    async def commit(self, offset: int, queue_id: int = 0) -> None:
        header = headers.UpdateConsumerOffset(
            consumer_group="g", topic="T", queue_id=queue_id, commit_offset=offset
        )
        answer = await self.operator.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header)
        assert answer.code == OK


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    made = World(directory)
    try:
        yield made
    finally:
        await made.close()


# --- routes ---------------------------------------------------------------------------------------


@virtual_time()
async def test_topics_are_routed_as_soon_as_they_are_created(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.name_server(), w.broker():
        assert await w.route("TBW102") is not None
        await w.create("Made")
        assert await w.route("Made") is not None
        assert (await w.operator.send(topic="Auto")).code == OK
        await asyncio.sleep(0.1)
        route = await w.route("Auto")
        assert route is not None
        assert route.broker_datas[0].broker_addrs == {0: BROKER}
        assert await w.route("TBW102") is not None, "other topics are still registered"


@virtual_time()
async def test_a_restarted_name_server_learns_everything_again(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.name_server():
            broker = w.broker()
            await broker.start()
            await w.create("T")
        await asyncio.sleep(60)
        # No name server is running to register this one.
        assert (await w.operator.send(topic="Meanwhile")).code == OK
        async with w.name_server():
            await asyncio.sleep(20)
            for topic in ("T", "Meanwhile", "TBW102"):
                assert await w.route(topic) is not None, topic
            await broker.close()
            assert await w.route("T") is None, "the broker has unregistered"


@virtual_time()
async def test_a_permission_removed_from_the_broker_shows_in_all_routes(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.name_server(), w.broker():
        await w.create("T")
        answer = await w.operator.ask(
            RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=4\n"
        )
        assert answer.code == OK
        await asyncio.sleep(0.1)
        assert await w.perm("T") == 4
        await w.operator.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=6\n")
        await asyncio.sleep(0.1)
        assert await w.perm("T") == 6


@virtual_time()
async def test_ordered_topics_come_from_the_name_server(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.name_server(), w.broker() as broker:
        await w.create("T")
        entry = headers.KvEntry(namespace="ORDER_TOPIC_CONFIG", key="T", value="broker-a:2")
        assert (await w.names(RequestCode.PUT_KV_CONFIG, entry)).code == OK
        await asyncio.sleep(31)
        topic = broker.state.topics.find("T")
        assert topic is not None
        assert topic.order


# --- groups ---------------------------------------------------------------------------------------


@virtual_time()
async def test_members_are_notified_of_each_other(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.broker() as broker:
        first, second = w.member("10.0.0.11"), w.member("10.0.0.12")
        await first.beat()
        await wait_until(lambda: first.codes() == [40])
        await second.beat()
        await wait_until(lambda: first.codes() == [40, 40])
        await second.beat()
        await asyncio.sleep(1)
        assert (first.codes(), second.codes()) == ([40, 40], [40])
        assert broker.state.topics.find("%RETRY%g") is not None
        w.network.cut("10.0.0.12")
        await wait_until(lambda: first.codes() == [40, 40, 40])
        answer = await first.ask(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP, headers.ConsumerGroup(consumer_group="g")
        )
        ids = bodies.ConsumerIds.decode(whole_body(answer)).consumer_id_list
        assert ids == ["10.0.0.11@1"]


@virtual_time()
async def test_a_silent_member_is_removed_within_130_seconds(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.broker() as broker:
        silent, loud = w.member("10.0.0.11"), w.member("10.0.0.12")
        await silent.beat()

        async def keep_alive() -> None:
            while True:
                await loud.beat()
                # Something other than heartbeats keeps the connection busy.
                await silent.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
                await asyncio.sleep(30)

        beating = asyncio.create_task(keep_alive())
        await asyncio.sleep(119)
        assert len(broker.state.consumers.members("g")) == 2
        await asyncio.sleep(12)
        assert [m.client_id for m in broker.state.consumers.members("g")] == ["10.0.0.12@1"]
        beating.cancel()
        await asyncio.wait([beating])


@virtual_time()
async def test_running_and_stopped_groups_can_be_reset(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.broker():
        await w.create("T")
        for _ in range(5):
            assert (await w.operator.send()).code == OK
        for queue_id, offset in ((0, 4), (1, 0)):
            await w.commit(offset, queue_id)
        reset = headers.ResetOffset(topic="T", group="g", timestamp=0, is_force=True)
        stopped = await w.operator.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)
        assert stopped.code == ResponseCode.CONSUMER_NOT_ONLINE
        member = w.member("10.0.0.11")
        await member.beat()
        answer = await w.operator.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)
        table = bodies.QueueOffsets.decode(whole_body(answer)).offset_table
        assert table[MessageQueue("T", "broker-a", 0)] == 0
        await wait_until(lambda: 220 in member.codes())
        newest = headers.ResetOffset(topic="T", group="g", timestamp=-1, is_force=True)
        answer = await w.operator.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, newest)
        table = bodies.QueueOffsets.decode(whole_body(answer)).offset_table
        assert table[MessageQueue("T", "broker-a", 0)] == 5


@virtual_time()
async def test_a_clients_internal_state_is_shown(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.broker():
        member = w.member("10.0.0.11")
        await member.beat()
        asked = headers.RunningInfoOf(consumer_group="g", client_id=member.client_id)
        answer = await w.operator.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, asked)
        assert (answer.code, answer.remark) == (OK, "from the client")
        w.network.stop_reading("10.0.0.11")
        started_s = virtual_loop().time()
        answer = await w.operator.ask(
            RequestCode.GET_CONSUMER_RUNNING_INFO, asked, timeout_ms=15_000
        )
        assert answer.code == ResponseCode.CONSUME_MSG_TIMEOUT
        assert 10 <= virtual_loop().time() - started_s < 10.2


# --- persistence ----------------------------------------------------------------------------------


@virtual_time()
async def test_topics_groups_and_offsets_survive_a_broker_restart(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.broker():
            await w.create("T", 3)
            group = bodies.GroupConfig(group_name="g", retry_max_times=2)
            answer = await w.operator.ask(
                RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group.encode()
            )
            assert answer.code == OK
            await w.send(7)
            await w.commit(7)
        async with w.broker() as broker:
            topic = broker.state.topics.find("T")
            assert topic is not None
            assert topic.write_queue_nums == 3
            assert broker.state.groups.table["g"] == group
            assert await w.committed() == 7


@virtual_time()
async def test_offsets_are_on_disk_within_five_seconds(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.broker():
        await w.create("T")
        await w.send(7)
        await w.commit(7)
        await asyncio.sleep(5.5)
        path = tmp_path / "store" / "config" / "consumerOffset.json"
        assert bodies.ConsumerOffsets.decode(path.read_bytes()).offset_table == {"T@g": {0: 7}}


@virtual_time()
async def test_a_recreated_topic_starts_at_offset_zero(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.broker() as broker:
        await w.create("T")
        await w.operator.send()
        delete = headers.TopicName(topic="T")
        answer = await w.operator.ask(RequestCode.DELETE_TOPIC_IN_BROKER, delete)
        assert answer.code == OK
        assert broker.queue_end("T", 0) == 0
        await w.create("T")
        answer = await w.operator.send()
        assert headers.SendMessageAnswer.from_ext_fields(answer.ext_fields).queue_offset == 0


# --- inspection -----------------------------------------------------------------------------------


@virtual_time()
async def test_progress_and_limits_on_the_real_store(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.broker():
        await w.create("T")
        stored_ms = []
        for _ in range(3):
            await w.operator.send()
            stored_ms.append(virtual_loop().clock.now_ms())
            await asyncio.sleep(10)
        await w.commit(2)
        queue = MessageQueue("T", "broker-a", 0)
        answer = await w.operator.ask(
            RequestCode.GET_TOPIC_STATS_INFO, headers.TopicName(topic="T")
        )
        limits = bodies.TopicStats.decode(whole_body(answer)).offset_table[queue]
        assert (limits.min_offset, limits.max_offset) == (0, 3)
        assert abs(limits.last_update_timestamp - stored_ms[2]) < 10
        answer = await w.operator.ask(
            RequestCode.GET_CONSUME_STATS, headers.ConsumeStatsOf(consumer_group="g")
        )
        progress = bodies.ConsumeStats.decode(whole_body(answer)).offset_table[queue]
        assert (progress.broker_offset, progress.consumer_offset) == (3, 2)
        assert abs(progress.last_timestamp - stored_ms[1]) < 10
        answer = await w.operator.ask(
            RequestCode.QUERY_CONSUME_TIME_SPAN, headers.TopicAndGroup(topic="T", group="g")
        )
        span = bodies.ConsumeTimeSpans.decode(whole_body(answer)).consume_time_span_set[0]
        assert 9_900 < span.delay_time < 10_100


@virtual_time()
async def test_units_statistics_and_runtime_on_the_real_store(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.broker():
        await w.create("T")
        for tag in ("a", "b", "c"):
            await w.operator.send(named={"TAGS": tag})
        asked = headers.ConsumeQueuePart(topic="T", queue_id=0, index=1, count=10)
        answer = await w.operator.ask(RequestCode.QUERY_CONSUME_QUEUE, asked)
        page = bodies.ConsumeQueuePage.decode(whole_body(answer))
        assert [unit.tags_code for unit in page.queue_data] == [ord("b"), ord("c")]
        await asyncio.sleep(11)
        item = headers.StatsItem(stats_name="TOPIC_PUT_NUMS", stats_key="T")
        answer = await w.operator.ask(RequestCode.VIEW_BROKER_STATS_DATA, item)
        assert bodies.BrokerStats.decode(whole_body(answer)).stats_minute.sum == 3
        answer = await w.operator.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        table = bodies.KeyValues.decode(whole_body(answer)).table
        assert table["msgPutTotalTodayNow"] == "3"
        assert int(table["earliestMessageTimeStamp"]) > 0
        assert float(table["putTps"].split(" ")[0]) == 0.3
