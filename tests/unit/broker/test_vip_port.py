"""The VIP port, two below the broker's: older Java clients send to it, Apache slaves use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from brokers import BROKER_HOST, client_of, config_at, running_broker
from turbopump.broker.config import IdentityConfig
from turbopump.errors import ConnectFailed
from turbopump.net.router import Router
from turbopump.net.server import Server, ServerConfig
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time
from turbopump.wire.codes import RequestCode, ResponseCode

VIP_ADDRESS = f"{BROKER_HOST}:10909"


def identity(**changes: object) -> IdentityConfig:
    fields = {"broker_name": "broker-a", "bind_host": BROKER_HOST, "port": 10911, **changes}
    return IdentityConfig(**fields)  # type: ignore[arg-type]


@virtual_time()
async def test_the_vip_port_serves_everything_except_pulls(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        running_broker(tmp_path, network) as (_, client),
        client_of(network, VIP_ADDRESS) as vip,
    ):
        assert (await vip.send(b"one")).code == ResponseCode.SUCCESS
        topics = await vip.ask(RequestCode.GET_ALL_TOPIC_CONFIG)
        assert topics.code == ResponseCode.SUCCESS
        assert b'"T"' in topics.body
        assert (await vip.pull()).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        assert [bytes(message.body) for message in await client.messages()] == [b"one"]


@virtual_time()
async def test_a_vip_port_in_use_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork()
    clock = virtual_loop().clock
    config = ServerConfig(host=BROKER_HOST, port=10909)
    async with (
        Server(network.host(BROKER_HOST), Router(), config, clock=clock),
        running_broker(tmp_path, network) as (_, client),
    ):
        assert (await client.send()).code == ResponseCode.SUCCESS
    assert "the VIP port is not served" in caplog.text
    assert "10909: address already in use" in caplog.text


@virtual_time()
async def test_the_vip_port_can_be_disabled(tmp_path: Path) -> None:
    network = MemoryNetwork()
    own = identity(serves_vip=False)
    async with (
        running_broker(tmp_path, network, identity=own),
        client_of(network, VIP_ADDRESS) as vip,
    ):
        with pytest.raises(ConnectFailed):
            await vip.send()


@virtual_time()
async def test_the_vip_port_is_closed_with_the_broker(tmp_path: Path) -> None:
    network = MemoryNetwork()
    for _ in range(2):
        async with running_broker(tmp_path, network):
            assert (BROKER_HOST, 10909) in network.listeners
        assert (BROKER_HOST, 10909) not in network.listeners


@pytest.mark.parametrize(("port", "vip"), [(10911, 10909), (3, 1), (2, None), (0, None)])
def test_only_a_chosen_port_has_a_vip_port(tmp_path: Path, port: int, vip: int | None) -> None:
    assert config_at(tmp_path, identity=identity(port=port)).identity.vip_port == vip
