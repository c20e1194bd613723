"""Cached route texts equal newly created ones; silent brokers are removed from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from nameserver_peers import Peer, config_at, name_server_on, peer_on
from turbopump.nameserver import NameServer
from turbopump.nameserver.handlers import RouteTexts
from turbopump.nameserver.routes import SILENCE_MAX_MS, Registration, RouteTable
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time
from turbopump.wire.bodies import DataVersion, TopicConfig


def broker(name: str = "a", counter: int = 1, *servers: str) -> Registration:
    return Registration(
        name=name,
        address=f"{name}:1",
        cluster="c",
        broker_id=0,
        ha_address=f"{name}:2",
        version=DataVersion(counter=counter),
        topics={topic: TopicConfig(topic_name=topic, perm=6) for topic in ("T", "U")},
        filter_servers=servers,
    )


def all_texts(texts: RouteTexts) -> list[bytes | None]:
    return [
        texts.find(topic, order, is_standard=is_standard)
        for topic in ("T", "U")
        for order in (None, "a:4")
        for is_standard in (True, False)
    ]


CHANGES: dict[str, Callable[[RouteTable], object]] = {
    "another broker": lambda routes: routes.register(broker("b"), 0),
    "a filter server": lambda routes: routes.register(broker("a", 1, "f:1"), 0),
    "no write": lambda routes: routes.wipe_write_permission("a"),
    "no topic": lambda routes: routes.delete_topic("T"),
    "no topic in a cluster": lambda routes: routes.delete_topic("T", "c"),
    "good-bye": lambda routes: routes.unregister("a", 0, "a:1"),
    "silence": lambda routes: routes.expire(SILENCE_MAX_MS + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_texts_follow_every_change(change: Callable[[RouteTable], object]) -> None:
    routes = RouteTable()
    texts = RouteTexts(routes)
    assert all_texts(texts) == [None] * 8
    routes.register(broker(), 0)
    before = all_texts(texts)
    assert None not in before
    change(routes)
    assert all_texts(texts) == all_texts(RouteTexts(routes)) != before
    routes.add_write_permission("a")
    routes.register(broker("a", 2), 0)
    assert all_texts(texts) == all_texts(RouteTexts(routes))


def test_texts_stay_cached_while_brokers_only_send_heartbeats() -> None:
    routes = RouteTable()
    texts = RouteTexts(routes)
    routes.register(broker(), 0)
    before = all_texts(texts)
    routes.register(broker(), 30_000)
    assert all(now is old for now, old in zip(all_texts(texts), before, strict=True))


async def silence_s(server: NameServer, broker: Peer) -> float:
    """Return how long a broker is routed to after its last registration."""
    await broker.register(server, broker.host, **{broker.host: 6})
    started_s = virtual_loop().time()
    while await broker.has_route(server, broker.host):
        # The connection stays in use: being idle would also remove the broker.
        await asyncio.sleep(1)
        assert virtual_loop().time() - started_s < 200, "it stays forever"
    return virtual_loop().time() - started_s


@virtual_time()
async def test_silent_brokers_are_removed_after_a_bug_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network, expire, bugs = MemoryNetwork(), RouteTable.expire, [LookupError("a bug")] * 2

    def fail(self: RouteTable, now_ms: int) -> list[str]:
        if bugs:
            raise bugs.pop()
        return expire(self, now_ms)

    monkeypatch.setattr(RouteTable, "expire", fail)
    async with (
        name_server_on(network, config_at(tmp_path)) as server,
        peer_on(network) as broker,
    ):
        assert 120 < await silence_s(server, broker) < 140
    assert caplog.text.count("silent brokers failed and is started again") == 2


@virtual_time()
async def test_silent_brokers_are_removed_whenever_they_registered(tmp_path: Path) -> None:
    network = MemoryNetwork()

    async def silence_from_s(start_s: float, server: NameServer) -> float:
        await asyncio.sleep(start_s)
        async with peer_on(network) as broker:
            return await silence_s(server, broker)

    async with name_server_on(network, config_at(tmp_path)) as server:
        starts_s = (1, 4.9, 7, 60, 124, 300, 301, 309, 1000)
        took_s = await asyncio.gather(*(silence_from_s(at, server) for at in starts_s))
    assert all(120 < took < 132 for took in took_s), took_s
