"""What a name server says to requests that are damaged, incomplete or too many."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

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
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.registration import encode_compressed

Code = RequestCode


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
        "negative id": ({"brokerId": "-1"}, good, "brokerId is -1"),
        "blank cluster": ({"clusterName": " "}, good, "clusterName"),
        "lines in a name": ({"brokerName": "a\nb"}, good, "printable"),
        "odd address": ({"brokerAddr": "nowhere"}, good, "'nowhere'"),
        "no json": ({}, b"{", "JSON"),
        "no object": ({}, b"[]", "BrokerRegistration"),
        "no topics": ({}, b"{}", "BrokerRegistration"),
        "no zlib": ({"compressed": "true"}, good, "ZLIB"),
        "cut zlib": ({"compressed": "true"}, compressed[:-9], "ZLIB"),
        "empty zlib": ({"compressed": "true"}, zlib.compress(b""), "registration ends"),
    }


@pytest.mark.parametrize("case", damaged_registrations())
@virtual_time()
async def test_damaged_registration_is_refused_and_changes_nothing(
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
async def test_full_table_refuses_and_says_so(tmp_path: Path) -> None:
    network = MemoryNetwork()
    config = dataclasses.replace(config_at(tmp_path), brokers_max=2, topics_max=1)
    async with name_server_on(network, config) as server, peer_on(network) as peer:
        answer = await peer.register(server, T=6, U=6)
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert answer.remark == "2 topics would be registered: 1 may be"
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
async def test_question_without_a_version(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with name_server_on(network, config_at(tmp_path)) as server, peer_on(network) as peer:
        answer = await peer.ask(server, Code.QUERY_DATA_VERSION, peer.registration())
        assert answer.code == ResponseCode.SYSTEM_ERROR


@virtual_time()
async def test_code_that_nobody_serves_is_answered(tmp_path: Path) -> None:
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
