"""A name server and its peers, over the in-memory network in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from msgspec.structs import replace

from nameserver_peers import (
    TIMEOUT_MS,
    Peer,
    config_at,
    name_server_on,
    peer_on,
    registration,
    registration_body,
)
from turbopump.errors import ConnectFailed, StoreDamaged
from turbopump.nameserver import NameServer
from turbopump.testing import MemoryNetwork, virtual_time
from turbopump.wire import headers
from turbopump.wire.bodies import ClusterInfo, DataVersion, KeyValues, TopicList, TopicRoute
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.hashing import body_crc
from turbopump.wire.registration import encode_compressed

Code = RequestCode


async def route_of(peer: Peer, server: NameServer, topic: str) -> TopicRoute:
    answer = await peer.ask(server, Code.GET_ROUTEINFO_BY_TOPIC, headers.RouteOf(topic=topic))
    assert answer.code == ResponseCode.SUCCESS
    return TopicRoute.decode(whole_body(answer))


# --- brokers register and leave -------------------------------------------------------------------


@virtual_time()
async def test_broker_disappears_after_120_s_of_silence(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as broker,
        peer_on(network) as client,
    ):
        await broker.register(server)
        # Keep the connection in use, or the broker would be removed first because it is idle.
        for _ in range(12):
            await asyncio.sleep(9.9)
            await broker.topics(server)
            assert await client.has_route(server)
        await asyncio.sleep(15)
        assert not await client.has_route(server)


@virtual_time()
async def test_broker_that_registers_every_30_s_stays(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as broker,
        peer_on(network) as client,
    ):
        for _ in range(120):
            await broker.register(server)
            await asyncio.sleep(30)
            assert await client.has_route(server)


@virtual_time()
async def test_broker_that_only_queries_its_version_stays(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as broker,
        peer_on(network) as client,
    ):
        await broker.register(server)
        identity = broker.registration()
        for _ in range(10):
            await asyncio.sleep(30)
            same = DataVersion(counter=1)
            answer = await broker.ask(server, Code.QUERY_DATA_VERSION, identity, same.encode())
            assert answer.ext_fields == {"changed": "false"}
            assert DataVersion.decode(whole_body(answer)) == same
        assert await client.has_route(server)


@virtual_time()
async def test_silent_broker_loses_its_connection(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as broker:
        await broker.register(server)
        connection = await broker.pool.connection(server.address)
        for _ in range(13):
            await asyncio.sleep(9.9)
            if connection.is_open:
                await broker.topics(server)
        assert not connection.is_open


@virtual_time()
async def test_closed_connection_removes_the_broker_immediately(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as broker,
        peer_on(network) as client,
    ):
        await broker.register(server)
        assert await client.has_route(server)
        network.cut(broker.host)
        await asyncio.sleep(0.01)
        assert not await client.has_route(server)


@virtual_time()
async def test_old_connection_of_a_reconnected_broker_may_close(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network, "b") as broker,
        peer_on(network) as client,
    ):
        async with peer_on(network, "b") as broker_before:
            await broker_before.register(server)
            await broker.register(server)
        await asyncio.sleep(0.01)
        assert await client.has_route(server)


@virtual_time()
async def test_broker_that_moves_leaves_nothing_behind(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as broker:
        for port in range(1000, 1100):
            header = replace(broker.registration(), broker_addr=f"{broker.host}:{port}")
            await broker.ask(server, Code.REGISTER_BROKER, header, registration_body(T=6))
        route = await route_of(broker, server, "T")
        assert route.broker_datas[0].broker_addrs == {0: f"{broker.host}:1099"}
        assert list(server._connections) == [f"{broker.host}:1099"]


@virtual_time()
async def test_a_displaced_broker_has_to_connect_and_register_everything_again(
    tmp_path: Path,
) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as first,
        peer_on(network) as second,
    ):
        await first.register(server)
        before = await first.pool.connection(server.address)
        await second.register(server)
        await asyncio.sleep(1)
        # A broker registers only what has changed over the connection of its last registration.
        assert await first.pool.connection(server.address) is not before


@virtual_time()
async def test_idle_connection_removes_the_broker(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as broker,
        peer_on(network) as client,
    ):
        await broker.register(server)
        await asyncio.sleep(121)
        assert not await client.has_route(server)


@virtual_time()
async def test_unregistering_removes_immediately(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as master,
        peer_on(network) as slave,
        peer_on(network) as client,
    ):
        await master.register(server)
        answer = await slave.register(server, broker_id=1)
        assert answer.ext_fields == {
            "masterAddr": f"{master.host}:10911",
            "haServerAddr": f"{master.host}:10912",
        }
        await master.ask(server, Code.UNREGISTER_BROKER, master.registration())
        route = await route_of(client, server, "T")
        assert route.broker_datas[0].broker_addrs == {1: f"{slave.host}:10911"}
        await slave.ask(server, Code.UNREGISTER_BROKER, slave.registration(broker_id=1))
        assert not await client.has_route(server)


@virtual_time()
async def test_one_way_registration(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as broker,
    ):
        connection = await broker.pool.connection(server.address)
        body = registration_body(T=6)
        connection.oneway(request(Code.REGISTER_BROKER, broker.registration(), body))
        assert await broker.has_route(server)


@virtual_time()
async def test_name_servers_are_independent_of_each_other(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path, "ns1")) as one,
        name_server_on(network, config_at(tmp_path, "ns2")) as two,
        peer_on(network) as broker,
        peer_on(network) as client,
    ):
        await broker.register(one)
        entry = headers.KvEntry(namespace="n", key="k", value="v")
        await client.ask(one, Code.PUT_KV_CONFIG, entry)
        assert await client.has_route(one)
        assert not await client.has_route(two)
        key = headers.KvKey(namespace="n", key="k")
        assert (await client.ask(two, Code.GET_KV_CONFIG, key)).code == ResponseCode.QUERY_NOT_FOUND
        await broker.register(two)
        network.cut(broker.host, "ns1")
        await asyncio.sleep(0.01)
        assert not await client.has_route(one)
        assert await client.has_route(two)


@virtual_time()
async def test_restart_forgets_routes_and_keeps_key_values(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        await peer.register(server)
        entry = headers.KvEntry(namespace="n", key="k", value="v")
        await peer.ask(server, Code.PUT_KV_CONFIG, entry)
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        assert not await peer.has_route(server)
        answer = await peer.ask(server, Code.GET_KV_CONFIG, headers.KvKey(namespace="n", key="k"))
        assert answer.ext_fields == {"value": "v"}


@virtual_time()
async def test_compare_and_set_of_a_key_value(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        first = headers.KvEntry(namespace="n", key="k", value="1", compare=True)
        assert (await peer.ask(server, Code.PUT_KV_CONFIG, first)).code == ResponseCode.SUCCESS
        answer = await peer.ask(server, Code.PUT_KV_CONFIG, first)
        assert answer.code == ResponseCode.KV_VALUE_DIFFERS
        assert answer.remark == "the value of k in n is not the expected one"
        second = headers.KvEntry(namespace="n", key="k", value="2", compare=True, expected="1")
        assert (await peer.ask(server, Code.PUT_KV_CONFIG, second)).code == ResponseCode.SUCCESS
        key = headers.KvKey(namespace="n", key="k", compare=True)
        answer = await peer.ask(server, Code.GET_KV_CONFIG, key)
        assert answer.ext_fields == {"value": "2", "compares": "true"}


# --- forms of requests and answers ----------------------------------------------------------------


@virtual_time()
async def test_compressed_registration(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as broker:
        body = encode_compressed(registration(T=4))
        header = broker.registration(compressed=True, crc=body_crc(body))
        assert (await broker.ask(server, Code.REGISTER_BROKER, header, body)).code == 0
        assert (await route_of(broker, server, "T")).queue_datas[0].perm == 4


@virtual_time()
async def test_registration_of_an_old_broker_is_its_topics_alone(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as broker:
        body = registration(T=4).topic_config_serialize_wrapper.encode()
        old = replace(request(Code.REGISTER_BROKER, broker.registration(), body), version=36)
        assert (await broker.pool.request(server.address, old, TIMEOUT_MS)).code == 0
        assert (await route_of(broker, server, "T")).queue_datas[0].perm == 4


@pytest.mark.parametrize("version", [36, 409])
@virtual_time()
async def test_registration_without_a_body_has_no_topics(tmp_path: Path, version: int) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as broker:
        empty = replace(request(Code.REGISTER_BROKER, broker.registration()), version=version)
        assert (await broker.pool.request(server.address, empty, TIMEOUT_MS)).code == 0
        assert await broker.topics(server) == b'{"topicList":[]}'
        info = await broker.ask(server, Code.GET_BROKER_CLUSTER_INFO)
        assert ClusterInfo.decode(whole_body(info)).cluster_addr_table == {"c": ["a"]}


@virtual_time()
async def test_route_in_the_form_that_the_client_reads(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        await peer.register(server, "bröker😀")

        async def route_text(version: int, accept: bool | None = None) -> bytes:
            header = headers.RouteOf(topic="T", accept_standard_json_only=accept)
            asked = replace(request(Code.GET_ROUTEINFO_BY_TOPIC, header), version=version)
            return whole_body(await peer.pool.request(server.address, asked, TIMEOUT_MS))

        bare, quoted = b'"brokerAddrs":{0:"', b'"brokerAddrs":{"0":"'
        name, escaped = '"bröker😀"'.encode(), b'"br\\u00f6ker\\ud83d\\ude00"'
        assert bare in await route_text(317)
        assert name in await route_text(400)
        plain = TopicRoute.decode(await route_text(317))
        for text in (await route_text(401), await route_text(317, True)):
            assert quoted in text
            assert escaped in text
            assert TopicRoute.decode(text) == plain


@virtual_time()
async def test_order_configuration_reaches_brokers_and_clients(tmp_path: Path) -> None:
    network = MemoryNetwork()
    config = config_at(tmp_path, is_ordered=True)
    async with name_server_on(network, config) as server, peer_on(network) as peer:
        assert whole_body(await peer.register(server, T=6, U=6)) == b""
        entry = headers.KvEntry(namespace="ORDER_TOPIC_CONFIG", key="T", value="a:16")
        await peer.ask(server, Code.PUT_KV_CONFIG, entry)
        table = KeyValues.decode(whole_body(await peer.register(server))).table
        assert table == {"T": "a:16"}
        assert (await route_of(peer, server, "T")).order_topic_conf == "a:16"
        assert (await route_of(peer, server, "U")).order_topic_conf is None


@virtual_time()
async def test_settings_are_read_and_changed_remotely(tmp_path: Path) -> None:
    network = MemoryNetwork()
    path = tmp_path / "namesrv.conf"
    path.write_text("# ours\norderMessageEnable=false\n")
    config = dataclasses.replace(config_at(tmp_path), config_store_path=path)
    async with name_server_on(network, config) as server, peer_on(network) as peer:
        body = b"orderMessageEnable=true\n"
        assert (await peer.ask(server, Code.UPDATE_NAMESRV_CONFIG, body=body)).code == 0
        assert b"orderMessageEnable=true\n" in whole_body(
            await peer.ask(server, Code.GET_NAMESRV_CONFIG)
        )
    assert path.read_text() == "# ours\norderMessageEnable=true\n"


@virtual_time()
async def test_settings_without_a_file_change_in_memory(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        await peer.register(server)
        entry = headers.KvEntry(namespace="ORDER_TOPIC_CONFIG", key="T", value="a:16")
        await peer.ask(server, Code.PUT_KV_CONFIG, entry)
        assert (await route_of(peer, server, "T")).order_topic_conf is None
        await peer.ask(server, Code.UPDATE_NAMESRV_CONFIG, body=b"orderMessageEnable=true")
        assert (await route_of(peer, server, "T")).order_topic_conf == "a:16"


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        (b"kvConfigPath=/etc/passwd", ResponseCode.NO_PERMISSION, "kvConfigPath"),
        (b"configStorePath=/x", ResponseCode.NO_PERMISSION, "configStorePath"),
        (b"configBlackList=", ResponseCode.NO_PERMISSION, "configBlackList"),
        (b"rocketmqHome=/x", ResponseCode.NO_PERMISSION, "rocketmqHome"),
        (b"listenPort=1", ResponseCode.NO_PERMISSION, "listenPort"),
        (b"orderMessageEnable=perhaps", ResponseCode.SYSTEM_ERROR, "true or false"),
        (b"unheardOf=1", ResponseCode.SYSTEM_ERROR, "unheardOf"),
        (b"nonsense", ResponseCode.SYSTEM_ERROR, "key=value"),
        (b"\xff=1", ResponseCode.SYSTEM_ERROR, "utf-8"),
    ],
)
@virtual_time()
async def test_settings_that_cannot_be_changed(
    tmp_path: Path, body: bytes, code: int, named: str
) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        answer = await peer.ask(server, Code.UPDATE_NAMESRV_CONFIG, body=body)
        assert answer.code == code
        assert named in (answer.remark or "")


# --- life cycle -----------------------------------------------------------------------------------


@virtual_time()
async def test_connecting_fails_after_the_server_has_stopped(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with peer_on(network) as peer:
        async with name_server_on(network, config_at(tmp_path)) as server:
            address = server.address
            connection = await peer.pool.connection(address)
        await connection.wait_closed()
        with pytest.raises(ConnectFailed):
            await peer.pool.connection(address)
        assert network.open_connections == 0


@virtual_time()
async def test_an_error_in_the_users_block_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with name_server_on(MemoryNetwork(), config_at(tmp_path)):
            raise LookupError("mine")


@virtual_time()
async def test_cancelling_ends_it(tmp_path: Path) -> None:
    network = MemoryNetwork()

    async def serve() -> None:
        async with name_server_on(network, config_at(tmp_path)):
            await asyncio.sleep(1000)

    task = asyncio.create_task(serve())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not network.listeners


@virtual_time()
async def test_damaged_key_values_prevent_the_start(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    config.kv_config_path.parent.mkdir()
    config.kv_config_path.write_text("{")
    network = MemoryNetwork()
    with pytest.raises(StoreDamaged):
        async with name_server_on(network, config):
            pass
    assert not network.listeners


@virtual_time()
async def test_topic_lists(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as broker,
        peer_on(network) as other,
    ):
        await broker.register(server, "a", T=6, U=6)
        await other.register(server, "b", T=6)
        lists = {
            Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: ["T", "U"],
            Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: ["c", "a", "b"],
            Code.GET_UNIT_TOPIC_LIST: [],
        }
        for code, expected in lists.items():
            found = TopicList.decode(whole_body(await broker.ask(server, code)))
            assert found.topic_list == expected
        header = headers.DeleteTopicInNameServer(topic="T", cluster_name="")
        await broker.ask(server, Code.DELETE_TOPIC_IN_NAMESRV, header)
        asked = headers.ClusterName(cluster="c")
        answer = await broker.ask(server, Code.GET_TOPICS_BY_CLUSTER, asked)
        assert TopicList.decode(whole_body(answer)).topic_list == ["U"]
