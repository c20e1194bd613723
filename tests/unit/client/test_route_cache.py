"""What is cached of routes, and which name server is queried."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from turbopump.client.route_cache import NameServers, RouteCache
from turbopump.client.routes import TOPIC_QUEUES_MAX, Route, route_of
from turbopump.errors import ConnectFailed, NoRoute, NotRunning, RemoteError
from turbopump.net.name_server_list import NameServerList
from turbopump.supervisor import Supervisor
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time
from turbopump.wire.bodies import BrokerData, QueueData, TopicRoute
from turbopump.wire.codes import ResponseCode


def found(address: str, broker: str = "a", queues: int = 2) -> TopicRoute:
    return TopicRoute(
        broker_datas=[BrokerData(broker_name=broker, broker_addrs={0: address}, cluster="c")],
        queue_datas=[
            QueueData(broker_name=broker, perm=6, read_queue_nums=queues, write_queue_nums=queues)
        ],
    )


class Known:
    """Name servers that all know the same, and a cache that queries them."""

    def __init__(self, *servers: str) -> None:
        self.topics: dict[str, TopicRoute] = {}
        self.down: set[str] = set()
        self.asked: list[str] = []
        self.changes: list[Route] = []
        self.tasks = Supervisor()
        network, clock = MemoryNetwork().host("10.0.0.9"), virtual_loop().clock
        self.servers = NameServerList(servers or ("ns",), network, clock, self.tasks)
        self.cache = RouteCache(
            NameServers(self.servers, Random(1)), self.ask, self.tasks, self.changes.append
        )

    async def ask(self, server: str, topic: str) -> TopicRoute:
        self.asked.append(server)
        await asyncio.sleep(0.01)
        if server in self.down:
            raise ConnectFailed(f"{server} is down")
        if topic not in self.topics:
            raise RemoteError(ResponseCode.TOPIC_NOT_EXIST, "No topic route info")
        return self.topics[topic]


@virtual_time()
async def test_the_newest_route_decides_a_brokers_address() -> None:
    known = Known()
    known.topics = {"old": found("10.0.0.1:1"), "kept": found("10.0.0.1:1")}
    for topic in ("kept", "old"):
        await known.cache.existing(topic)
    del known.topics["old"]
    known.topics["kept"] = found("10.0.0.2:2")
    await known.cache.refresh_all([])
    assert known.cache.brokers == {"a": {0: "10.0.0.2:2"}}
    assert known.cache.cached("old") is not None, "an unknown topic retains the known route"


@virtual_time()
async def test_a_change_is_reported_once_and_an_equal_answer_never() -> None:
    known = Known()
    known.topics["T"] = found("10.0.0.1:1")
    for _ in range(3):
        await known.cache.refresh("T")
    assert len(known.changes) == 1
    known.topics["T"] = found("10.0.0.1:1", queues=3)
    await known.cache.refresh_all(["T"])
    assert [len(route.readable) for route in known.changes] == [2, 3]


@virtual_time()
async def test_brokers_of_no_topic_are_forgotten() -> None:
    known = Known()
    known.topics["T"] = found("10.0.0.1:1")
    await known.cache.existing("T")
    known.topics["T"] = found("10.0.0.2:1", broker="b")
    await known.cache.refresh_all([])
    assert set(known.cache.brokers) == {"b"}


@virtual_time()
async def test_a_new_topic_borrows_from_its_template_until_it_exists() -> None:
    known = Known()
    with pytest.raises(NoRoute, match="'T' has no queue"):
        await known.cache.to_send("T", 4)
    known.topics["TBW102"] = found("10.0.0.1:1", queues=8)
    assert len((await known.cache.to_send("T", 4)).writable) == 4
    with pytest.raises(NoRoute, match="'T' is not known"):
        await known.cache.existing("T")
    known.topics["T"] = found("10.0.0.1:1", queues=6)
    assert len((await known.cache.existing("T")).readable) == 6
    assert len((await known.cache.to_send("T", 4)).writable) == 6


@virtual_time()
async def test_one_server_is_queried_until_it_fails() -> None:
    known = Known("one", "two", "three")
    known.topics["T"] = found("10.0.0.1:1")
    for _ in range(5):
        await known.cache.refresh("T")
    (first,) = set(known.asked)
    known.down.add(first)
    await asyncio.gather(*(known.cache.refresh(topic) for topic in "TUVW"))
    known.asked.clear()
    await known.cache.refresh("T")
    assert len(known.asked) == 1
    assert known.asked != [first], "the client stays with the one that answered"
    known.down |= {"one", "two", "three"}
    with pytest.raises(ConnectFailed):
        await known.cache.refresh("T")
    await known.cache.refresh_all([])
    assert known.cache.cached("T") is not None


@virtual_time()
async def test_closing_ends_waiters_for_a_route() -> None:
    known = Known()
    waiting = asyncio.create_task(known.cache.existing("T"))
    await asyncio.sleep(0.001)
    await known.tasks.stop()
    with pytest.raises(NotRunning, match="closed while"):
        await waiting


@pytest.mark.parametrize("queues", [2**31 - 1, 65_537, -1, -(2**31)])
@virtual_time()
async def test_absurd_numbers_of_queues_are_ignored(
    queues: int, caplog: pytest.LogCaptureFixture
) -> None:
    known = Known()
    absurd, good = found("10.0.0.1:1", "a", queues), found("10.0.0.2:1", "b", 3)
    known.topics["T"] = TopicRoute(
        broker_datas=[*absurd.broker_datas, *good.broker_datas],
        queue_datas=[*absurd.queue_datas, *good.queue_datas],
    )
    route = await known.cache.existing("T")
    assert [queue.broker for queue in route.readable] == ["b"] * 3
    assert [queue.broker for queue in route.writable] == ["b"] * 3
    assert f"ignored {queues} queues of broker a" in caplog.text


@virtual_time()
async def test_queues_of_all_brokers_together_are_bounded() -> None:
    known = Known()
    known.topics["T"] = TopicRoute(
        queue_datas=[
            QueueData(broker_name=f"b{n}", perm=4, read_queue_nums=65_536, write_queue_nums=1)
            for n in range(1000)
        ]
    )
    assert len((await known.cache.existing("T")).readable) == TOPIC_QUEUES_MAX


def test_absurd_order_configurations_are_ignored() -> None:
    text = "a:2;b:2147483647;c:" + "9" * 5000 + ";d:-1;e:1"
    route = route_of("T", TopicRoute(order_topic_conf=text))
    assert [queue.broker for queue in route.writable] == ["a", "a", "e"]
