"""A name server's answers to damaged, incomplete and too many requests."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nameserver_peers import (
    TIMEOUT_MS,
    config_at,
    name_server_on,
    peer_on,
    registration,
    registration_body,
)
from turbopump.errors import NetworkError
from turbopump.testing import MemoryNetwork, virtual_time
from turbopump.wire.bodies import BrokerRegistration, DataVersion, TopicConfig, TopicConfigTable
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.registration import INFLATED_BYTES_MAX, encode_compressed

Code = RequestCode


def of_topic(**fields: Any) -> BrokerRegistration:
    topic = TopicConfig(**{"topic_name": "T", **fields})
    table = TopicConfigTable(data_version=DataVersion(), topic_config_table={"T": topic})
    return BrokerRegistration(topic_config_serialize_wrapper=table)


def with_topic(**fields: Any) -> bytes:
    return of_topic(**fields).encode()


def many_filter_servers() -> bytes:
    return replace(of_topic(), filter_server_list=["a:1"] * 1001).encode()


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@functools.cache
def damaged_registrations() -> dict[str, tuple[dict[str, str], bytes, str]]:
    """By name: fields to change (empty removes one), the body, and what the answer must name."""
    good = registration_body(T=6)
    compressed = encode_compressed(registration(T=6))
    return {
        "checksum": ({"bodyCrc32": "12345"}, good, "crc32 not match"),
        "checksum without body": ({"bodyCrc32": "12345"}, b"", "crc32 not match"),
        "no name": ({"brokerName": ""}, good, "brokerName"),
        "no id": ({"brokerId": ""}, good, "brokerId"),
        "odd id": ({"brokerId": "first"}, good, "'first'"),
        "negative id": ({"brokerId": "-1"}, good, "brokerId must be 0"),
        "blank cluster": ({"clusterName": " "}, good, "clusterName"),
        "lines in a name": ({"brokerName": "a\nb"}, good, "printable"),
        "odd address": ({"brokerAddr": "nowhere"}, good, "'nowhere'"),
        "port 0": ({"brokerAddr": "10.0.0.1:0"}, good, "port of 1 to 65535"),
        "blank in a host": ({"brokerAddr": "10.0. 0.1:1"}, good, "brokerAddr"),
        "long name": ({"brokerName": "b" * 600}, good, "1 to 512"),
        "long cluster": ({"clusterName": "b" * 600}, good, "1 to 512"),
        "long address": ({"brokerAddr": "b" * 600 + ":1"}, good, "brokerAddr"),
        "absurd queues": ({}, with_topic(read_queue_nums=2**31 - 1), "expected 0 to 65536"),
        "negative queues": ({}, with_topic(write_queue_nums=-1), "writeQueueNums -1"),
        "odd perm": ({}, with_topic(perm=4096), "perm of topic T must be 0 to 15"),
        "long topic": ({}, with_topic(topic_name="T" * 600), "topicName"),
        "many filter servers": ({}, many_filter_servers(), "filterServerList"),
        "compressed absurd queues": (
            {"compressed": "true"},
            encode_compressed(of_topic(write_queue_nums=2**31 - 1)),
            "expected 0 to 65536",
        ),
        "many compressed topics": (
            {"compressed": "true"},
            zlib.compress(_sized(b"{}") + (2**31 - 1).to_bytes(4, "big")),
            "at most 100000 topics",
        ),
        "zlib that grows": (
            {"compressed": "true"},
            zlib.compress(bytes(INFLATED_BYTES_MAX + 1)),
            "inflates to more",
        ),
        "no json": ({}, b"{", "JSON"),
        "no object": ({}, b"[]", "BrokerRegistration"),
        "no topics": ({}, b"{}", "BrokerRegistration"),
        "no zlib": ({"compressed": "true"}, good, "ZLIB"),
        "cut zlib": ({"compressed": "true"}, compressed[:-9], "ZLIB"),
        "empty zlib": ({"compressed": "true"}, zlib.compress(b""), "registration ends"),
    }


@pytest.mark.parametrize("case", damaged_registrations())
@virtual_time()
async def test_damaged_registration_is_rejected_and_changes_nothing(
    tmp_path: Path, case: str
) -> None:
    changes, body, named = damaged_registrations()[case]
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        good = request(Code.REGISTER_BROKER, peer.registration(), body)
        fields = {**(good.ext_fields or {}), **changes}
        bad = replace(good, ext_fields={name: text for name, text in fields.items() if text})
        answer = await peer.pool.request(server.address, bad, TIMEOUT_MS)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert named in (answer.remark or "")
        info = whole_body(await peer.ask(server, Code.GET_BROKER_CLUSTER_INFO))
        assert info == b'{"brokerAddrTable":{},"clusterAddrTable":{}}'


@virtual_time()
async def test_a_full_table_rejects_with_a_clear_error(tmp_path: Path) -> None:
    network = MemoryNetwork()
    config = dataclasses.replace(config_at(tmp_path), brokers_max=2, topics_max=1)
    async with name_server_on(network, config) as server, peer_on(network) as peer:
        answer = await peer.register(server, T=6, U=6)
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert answer.remark == "at most 1 topics can be registered, got 2"
        assert await peer.topics(server) == b'{"topicList":[]}'


@pytest.mark.parametrize(
    "code",
    [
        Code.PUT_KV_CONFIG,
        Code.GET_KV_CONFIG,
        Code.DELETE_KV_CONFIG,
        Code.REGISTER_BROKER,
        Code.UNREGISTER_BROKER,
        Code.GET_ROUTEINFO_BY_TOPIC,
        Code.WIPE_WRITE_PERM_OF_BROKER,
        Code.DELETE_TOPIC_IN_NAMESRV,
        Code.GET_KVLIST_BY_NAMESPACE,
        Code.GET_TOPICS_BY_CLUSTER,
        Code.QUERY_DATA_VERSION,
        Code.ADD_WRITE_PERM_OF_BROKER,
    ],
)
@virtual_time()
async def test_missing_field_is_named(tmp_path: Path, code: int) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        answer = await peer.ask(server, code)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "missing required field" in (answer.remark or "")


@virtual_time()
async def test_version_query_without_a_version(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        answer = await peer.ask(server, Code.QUERY_DATA_VERSION, peer.registration())
        assert answer.code == ResponseCode.SYSTEM_ERROR


@virtual_time()
async def test_an_unsupported_request_code_is_answered(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        answer = await peer.ask(server, Code.SEND_MESSAGE)
        assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@virtual_time()
async def test_connections_beyond_the_limit_are_closed(tmp_path: Path) -> None:
    network = MemoryNetwork()
    config = dataclasses.replace(config_at(tmp_path), connections_max=1)
    async with (
        name_server_on(network, config) as server,
        peer_on(network) as one,
        peer_on(network) as other,
    ):
        await one.topics(server)
        with pytest.raises(NetworkError):
            await other.topics(server)
        await one.topics(server)


@pytest.mark.parametrize("code", [Code.REGISTER_BROKER, Code.QUERY_DATA_VERSION, 60])
@virtual_time()
async def test_oversized_body_is_rejected_and_the_connection_stays_open(
    tmp_path: Path, code: int
) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        large = request(code, peer.registration(), b"{" * 100_000)
        answer = await peer.pool.request(server.address, large, TIMEOUT_MS)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        wanted = (
            "object keys" if code == Code.REGISTER_BROKER else "at most 65536 bytes, got 100000"
        )
        assert wanted in (answer.remark or "")
        await peer.topics(server)
        (connection,) = server._server.connections
        assert connection.is_open


@pytest.mark.slow
@virtual_time()
async def test_registration_with_very_many_topics(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        body = registration_body(**{f"topic-{number}": 6 for number in range(30_000)})
        answer = await peer.ask(server, Code.REGISTER_BROKER, peer.registration(), body)
        assert answer.code == ResponseCode.SUCCESS
