"""Requests recorded with Apache RocketMQ's name server, replayed in order: same answers."""

from __future__ import annotations

from pathlib import Path

from msgspec import to_builtins

from nameserver_peers import TIMEOUT_MS, Peer, config_at, name_server_on, peer_on
from turbopump.nameserver import NameServer
from turbopump.settings import parse_properties
from turbopump.testing import MemoryNetwork, virtual_time
from turbopump.wire import framing, headers
from turbopump.wire.bodies import BrokerRegistration, DataVersion, TopicConfig, TopicConfigTable
from turbopump.wire.catalogue import RESPONSE_BODIES, BodyKind
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from vectors import Vector, frames

CODES = {
    *range(100, 107),
    *(205, 206, 216, 219, 224, 304, 311, 312, 313, 318, 319, 322, 327),
}

SLAVE_COMES, SLAVE_GOES = "broker_register_slave.request", "broker_unregister_slave.request"
MOVED_BEFORE = {
    "route_with_slave.request": SLAVE_COMES,
    "register_broker_read_only_route.request": SLAVE_GOES,
}
"""The two frames recorded out of order, by the frame that followed them."""


def topic(name: str, queues: int, perm: int = 6) -> TopicConfig:
    return TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)


UNRECORDED = {
    "topic_list.request": [
        topic(name, 1)
        for name in (
            *("%RETRY%cg_reply", "%RETRY%cg_badsql", "%RETRY%cg_new_group", "%DLQ%cg_pull"),
            *("%RETRY%cg_order", "%RETRY%cg_push", "%RETRY%cg_sql", "%RETRY%cg_broadcast"),
            *("%RETRY%cg_lite", "%RETRY%cg_pull"),
        )
    ],
    "bin_route.request": [topic("BinTopic", 2)],
    "route_with_slave.request": [topic("HaTopic", 4)],
    "register_broker_read_only_route.request": [topic("SyncTopic", 1, perm=4)],
    "acl_route.request": [topic("AclTopic", 2)],
}
"""Registered in between by requests that were not recorded, by the frame that followed."""


def recorded_requests() -> list[Vector]:
    """Return the requests to the name server in the order they were sent."""
    asked = {
        vector["name"]: vector
        for vector in frames()
        if vector["kind"] != "response" and vector["code"] in CODES
    }
    moved = MOVED_BEFORE.values()
    ordered = []
    for name, vector in asked.items():
        if name in MOVED_BEFORE:
            ordered.append(asked[MOVED_BEFORE[name]])
        if name not in moved:
            ordered.append(vector)
    return ordered


def recorded_answer(asked: Vector) -> Command | None:
    name = asked["name"].replace(".request", ".response")
    found = [vector for vector in frames() if vector["name"] == name]
    return command(found[0]) if asked["kind"] == "request" else None


def command(vector: Vector) -> Command:
    return framing.decode(bytes.fromhex(vector["hex"]))


def body_of(answer: Command) -> bytes:
    assert isinstance(answer.body, bytes)
    return answer.body


def test_every_kind_of_request_was_recorded() -> None:
    assert {vector["code"] for vector in recorded_requests()} == CODES


@virtual_time()
async def test_responses_equal_those_of_apache_rocketmq(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as peer,
    ):
        for place, vector in enumerate(recorded_requests()):
            await register_unrecorded(peer, server, vector["name"], version=1000 + place)
            await replay(peer, server, vector)


async def register_unrecorded(peer: Peer, server: NameServer, name: str, version: int) -> None:
    topics = UNRECORDED.get(name)
    if topics is None:
        return
    header = headers.RegisterBroker(
        broker_name="broker-a",
        broker_addr="10.20.30.40:10911",
        cluster_name="DefaultCluster",
        broker_id=0,
        ha_server_addr="10.20.30.40:10912",
    )
    table = TopicConfigTable(
        data_version=DataVersion(counter=version),
        topic_config_table={each.topic_name: each for each in topics},
    )
    body = BrokerRegistration(topic_config_serialize_wrapper=table).encode()
    answer = await peer.ask(server, RequestCode.REGISTER_BROKER, header, body)
    assert answer.code == ResponseCode.SUCCESS


async def replay(peer: Peer, server: NameServer, vector: Vector) -> None:
    golden = recorded_answer(vector)
    if golden is None:
        connection = await peer.pool.connection(server.address)
        connection.oneway(command(vector))
        return
    ours = await peer.pool.request(server.address, command(vector), TIMEOUT_MS)
    assert (vector["name"], ours.code) == (vector["name"], golden.code)
    assert (vector["name"], ours.ext_fields) == (vector["name"], golden.ext_fields)
    assert ours.serialize is golden.serialize
    assert (ours.remark is None) == (golden.remark is None)
    assert_same_body(vector, body_of(ours), body_of(golden))


def assert_same_body(vector: Vector, ours: bytes, golden: bytes) -> None:
    assert bool(ours) == bool(golden), vector["name"]
    if not golden:
        return
    kind = RESPONSE_BODIES[vector["code"]]
    if isinstance(kind, BodyKind):
        assert_same_settings(ours, golden)
    else:
        found, expected = kind.decode(ours), kind.decode(golden)
        assert in_order(to_builtins(found)) == in_order(to_builtins(expected)), vector["name"]


def assert_same_settings(ours: bytes, golden: bytes) -> None:
    """Most of Apache RocketMQ's settings are for its threads and buffers; we share only some."""
    found, expected = parse_properties(ours.decode()), parse_properties(golden.decode())
    assert found.keys() & expected.keys() == {"listenPort", "kvConfigPath", "orderMessageEnable"}
    assert found["orderMessageEnable"] == expected["orderMessageEnable"]
    assert found["listenPort"] == expected["listenPort"]


def in_order(value: object) -> object:
    """Sort lists of names: Java writes them in hash order."""
    if isinstance(value, dict):
        return {key: in_order(item) for key, item in value.items()}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    return [in_order(item) for item in value] if isinstance(value, list) else value


@virtual_time()
async def test_routes_equal_those_of_apache_rocketmq_byte_for_byte(tmp_path: Path) -> None:
    """The Go client parses old routes by hand: neither a space nor a field may differ."""
    wanted = {"broker_register.request", "topic_create.REGISTER_BROKER.request"}
    routes = {"route_existing.request", "route_old_version.request", "route_template_topic.request"}
    network = MemoryNetwork()
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as peer,
    ):
        for vector in recorded_requests():
            if vector["name"] in wanted | routes:
                ours = await peer.pool.request(server.address, command(vector), TIMEOUT_MS)
                golden = recorded_answer(vector)
                assert golden is not None
                assert body_of(ours) == body_of(golden)
