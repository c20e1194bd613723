"""Brokers that find name servers by HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from address_servers import AddressServer, address_server, http
from promotable import PromotableBrokers, mastership_of
from turbopump.broker.config import BrokerConfig, RegistrationConfig
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.codes import ResponseCode

URL = "http://web:8080/ns"
NAMES = ("10.0.1.1:9876", "10.0.1.2:9876")


class Fetching(PromotableBrokers):
    """Brokers with a URL, and two name servers."""

    def config_of(self, number: int) -> BrokerConfig:
        registration = RegistrationConfig(name_servers=(URL,), interval_ms=10_000)
        return replace(super().config_of(number), registration=registration)

    def web(self, *names: str) -> AddressServer:
        return address_server(self.network.host("web"), ";".join(names), host="web", port=8080)

    def is_registered(self, nameserver: int) -> bool:
        return bool(self.nameservers[nameserver]._routes.cluster_info().broker_addr_table)


@asynccontextmanager
async def fetching(directory: Path) -> AsyncIterator[Fetching]:
    made = Fetching(directory, nameservers=2)
    try:
        for number in range(2):
            await made.start_nameserver(number)
        yield made
    finally:
        await made.close()


@virtual_time()
async def test_a_broker_registers_where_the_url_says(tmp_path: Path) -> None:
    async with fetching(tmp_path) as brokers, brokers.web(NAMES[0]) as web:
        await brokers.start(0)
        assert brokers.is_registered(0)
        assert not brokers.is_registered(1)
        web.answer = http(";".join(NAMES))
        await wait_until(lambda: brokers.is_registered(1), 125)
        assert brokers.is_registered(0)
        web.answer = http(NAMES[1])
        # Its connection closes, so the name server forgets the broker.
        await wait_until(lambda: not brokers.is_registered(0), 125)
        assert brokers.is_registered(1)


@virtual_time()
async def test_a_broker_starts_without_the_server_and_registers_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fetching(tmp_path) as brokers:
        await brokers.start(0)
        assert "web:8080: connection refused" in caplog.text
        assert (await brokers.client(0).send()).code == ResponseCode.SUCCESS
        async with brokers.web(NAMES[0]):
            await wait_until(lambda: brokers.is_registered(0), 10)


@virtual_time()
async def test_a_master_with_slaves_refuses_writes_until_name_servers_are_known(
    tmp_path: Path,
) -> None:
    async with fetching(tmp_path) as brokers:
        async with brokers.web(NAMES[0]):
            await brokers.start(0)
            await brokers.start(1)
            mastership = mastership_of(brokers.broker(0))
            await wait_until(
                lambda: mastership.record.has_slaves and not mastership.saving.is_dirty
            )
            await brokers.stop(0)
        await brokers.start(0)
        refused = await brokers.client(0).send()
        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        async with brokers.web(NAMES[0]):
            writer = brokers.broker(0).path.writer
            await wait_until(lambda: writer.suspension is None, 30)
            await wait_until(lambda: brokers.is_registered(0), 30)


@virtual_time()
async def test_some_name_servers_confirm_no_master_while_others_are_unknown(
    tmp_path: Path,
) -> None:
    async with fetching(tmp_path) as brokers:
        config = brokers.config_of(0)
        mixed = replace(config.registration, name_servers=(NAMES[0], URL))
        config = replace(config, registration=mixed)
        async with brokers.web(NAMES[1]):
            await brokers.start(0, config)
            await brokers.start(1)
            mastership = mastership_of(brokers.broker(0))
            await wait_until(
                lambda: mastership.record.has_slaves and not mastership.saving.is_dirty
            )
            await brokers.stop(0)
        await brokers.start(0, config)
        assert brokers.broker(0).path.writer.suspension is not None


@virtual_time()
async def test_a_slave_is_not_promoted_before_name_servers_are_known(tmp_path: Path) -> None:
    async with fetching(tmp_path) as brokers:
        await brokers.start(1)
        refused = await brokers.promote(1)
        assert refused.code != ResponseCode.SUCCESS
        assert "http://web:8080/ns has not returned the name servers yet" in (refused.remark or "")


@virtual_time()
async def test_a_promotion_keeps_the_name_servers(tmp_path: Path) -> None:
    async with fetching(tmp_path) as brokers:
        async with brokers.web(NAMES[0]):
            await brokers.start(0)
            await brokers.start(1)
            mastership = mastership_of(brokers.broker(0))
            await wait_until(
                lambda: mastership.record.has_slaves and not mastership.saving.is_dirty
            )
        await brokers.promote(1)
        await wait_until(lambda: _is_master(brokers, 1), 60)


def _is_master(brokers: Fetching, number: int) -> bool:
    broker = brokers.broker(number)
    is_running = broker._ready and not broker.config.identity.is_slave
    return is_running and broker.path.writer.suspension is None
