"""When name servers are fetched from a URL, and what happens if that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

import pytest

from address_servers import AddressServer, address_server, http
from turbopump.errors import InvalidArgument, NoNameServer
from turbopump.net.name_server_list import (
    INTERVAL_MS,
    PAUSE_MS,
    RETRY_MS,
    NameServerList,
    check_source,
    nameserver_from_environment,
    parse_addresses,
)
from turbopump.supervisor import Supervisor
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time

URL = "http://web:8080/ns"
OTHER_URL = "http://other:8080/ns"


class Listed:
    """A list, and the changes that it reports."""

    def __init__(self, *sources: str) -> None:
        self.network = MemoryNetwork()
        self.work = Supervisor()
        self.removed: list[Collection[str]] = []
        self.names = NameServerList(
            sources,
            self.network.host("client"),
            virtual_loop().clock,
            self.work,
            self._changed,
        )

    async def _changed(self, removed: Collection[str]) -> None:
        self.removed.append(removed)

    def server(self, text: str, host: str = "web") -> AddressServer:
        return address_server(self.network.host(host), text, host=host, port=8080)


@virtual_time()
async def test_a_url_is_fetched_every_two_minutes() -> None:
    listed = Listed(URL)
    async with listed.server("a:1;b:2") as server:
        listed.names.start()
        assert await listed.names.addresses() == ("a:1", "b:2")
        server.answer = http("b:2;c:3")
        await asyncio.sleep(INTERVAL_MS / 1000 - 1)
        assert (listed.names.current, len(server.requests)) == (("a:1", "b:2"), 1)
        await asyncio.sleep(2)
        assert (listed.names.current, len(server.requests)) == (("b:2", "c:3"), 2)
        assert listed.removed == [[], ["a:1"]]
        server.answer = http("c:3;b:2")
        await asyncio.sleep(INTERVAL_MS / 1000)
        # The order means nothing.
        assert (listed.names.current, len(server.requests)) == (("b:2", "c:3"), 3)
    await listed.work.stop()


@virtual_time()
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (http("", "500 Internal Server Error"), "status 500 Internal Server Error"),
        (http(" \n"), "the answer is empty, expected host:port;host:port"),
        (http("<html>"), "address '<html>': expected host:port"),
        (http("a:1;http://b:2"), "address 'http://b:2': expected host:port"),
        (None, "no answer within 3000 ms"),
    ],
)
async def test_the_last_known_addresses_are_kept(
    caplog: pytest.LogCaptureFixture, answer: bytes | None, reason: str
) -> None:
    listed = Listed(URL)
    async with listed.server("a:1") as server:
        await listed.names.addresses()
        server.answer = answer
        for _ in range(3):
            await listed.names.refresh()
            await asyncio.sleep(1)
    assert listed.names.current == ("a:1",)
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.getMessage().startswith(
        "name servers not found, keeping a:1: http://web:8080/ns: "
    )
    assert reason in warning.getMessage()


@virtual_time()
async def test_while_none_are_known_it_is_tried_again_soon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listed = Listed(URL)
    listed.names.start()
    refused = "^no name servers found: http://web:8080/ns: web:8080: connection refused$"
    with pytest.raises(NoNameServer, match=refused):
        await listed.names.addresses()
    await asyncio.sleep(50)
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    async with listed.server("a:1"):
        await asyncio.sleep(RETRY_MS / 1000 + 1)
        assert listed.names.current == ("a:1",)
    await listed.work.stop()


@virtual_time()
async def test_concurrent_callers_share_a_fetch() -> None:
    listed = Listed(URL)
    async with listed.server("a:1") as server:
        waiting = [asyncio.create_task(listed.names.addresses()) for _ in range(5)]
        await asyncio.sleep(0)
        waiting.pop(0).cancel()
        assert await asyncio.gather(*waiting) == [("a:1",)] * 4
    assert len(server.requests) == 1


@virtual_time()
async def test_callers_that_ask_often_share_a_failure() -> None:
    listed = Listed(URL)
    async with listed.server("") as server:
        for _ in range(100):
            with pytest.raises(NoNameServer, match="the answer is empty"):
                await listed.names.addresses()
            await asyncio.sleep(0.01)
        assert len(server.requests) in (2, 3)
        server.answer = http("a:1")
        await asyncio.sleep(PAUSE_MS / 1000)
        assert await listed.names.addresses() == ("a:1",)


@virtual_time()
async def test_callers_do_not_wait_for_a_list_that_was_stopped() -> None:
    listed = Listed(URL)
    async with listed.server("") as server:
        server.answer = None
        waiting = asyncio.create_task(listed.names.addresses())
        await asyncio.sleep(1)
        await listed.work.stop()
        with pytest.raises(NoNameServer, match="closed meanwhile"):
            await waiting


@virtual_time()
async def test_addresses_and_urls_are_joined() -> None:
    listed = Listed("a:1", URL, OTHER_URL, URL)
    assert await listed.names.addresses() == ("a:1",)
    async with listed.server("b:2;a:1"), listed.server("c:3", "other"):
        await listed.names.refresh()
    assert listed.names.is_complete
    assert listed.names.current == ("a:1", "b:2", "c:3")
    async with listed.server("d:4"):
        await listed.names.refresh()
    # The other server is down, and does not hide what this one says.
    assert listed.names.current == ("a:1", "d:4", "c:3")


@virtual_time()
async def test_addresses_alone_need_no_network() -> None:
    listed = Listed("a:1", "b:2")
    listed.names.start()
    assert await listed.names.addresses() == ("a:1", "b:2")
    assert listed.work.watches == ()


def test_an_answer_is_one_line_of_addresses() -> None:
    assert parse_addresses("\n a:1 ; b:2;;a:1 \r\nrest") == ("a:1", "b:2")


@pytest.mark.parametrize("source", ["here", "file:///etc/passwd", "http://", "a:1/path"])
def test_another_source_is_refused(source: str) -> None:
    with pytest.raises(InvalidArgument):
        check_source(source)


def test_the_environment_names_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAMESRV_ADDR", "ROCKETMQ_NAMESRV_DOMAIN", "ROCKETMQ_NAMESRV_DOMAIN_SUBGROUP"):
        monkeypatch.delenv(name, raising=False)
    assert nameserver_from_environment() == ""
    monkeypatch.setenv("ROCKETMQ_NAMESRV_DOMAIN", "names.example")
    assert nameserver_from_environment() == "http://names.example:8080/rocketmq/nsaddr"
    monkeypatch.setenv("ROCKETMQ_NAMESRV_DOMAIN", "names.example:81")
    monkeypatch.setenv("ROCKETMQ_NAMESRV_DOMAIN_SUBGROUP", "north-unit?nofix=1")
    url = "http://names.example:81/rocketmq/north-unit?nofix=1"
    assert nameserver_from_environment() == url
    monkeypatch.setenv("NAMESRV_ADDR", "a:1")
    assert nameserver_from_environment() == "a:1"
