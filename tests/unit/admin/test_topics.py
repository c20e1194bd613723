"""Administration of topics on two brokers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from administered import administered, queue
from clusters import Recorder
from consumers import Seen, consuming, send
from turbopump.admin import BrokerNode, TopicKind
from turbopump.admin.servers import Servers
from turbopump.aio import Admin
from turbopump.errors import (
    AdministrationError,
    AlreadyThere,
    ConnectionLost,
    DiskFailed,
    InvalidArgument,
    NotThere,
    RemoteError,
)
from turbopump.store import Store
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command

CLUSTER = "DefaultCluster"


@virtual_time()
async def test_a_topic_is_created_changed_and_deleted_on_all_brokers(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        made = await admin.topics.create("T", queues=2)
        assert [(each.broker, each.write_queues) for each in made.on_brokers] == [
            ("a", 2),
            ("b", 2),
        ]
        with pytest.raises(AlreadyThere, match="on a, b"):
            await admin.topics.create("T")
        before, after = await admin.topics.update("T", queues=4, permission="r")
        assert [each.write_queues for each in before.on_brokers] == [2, 2]
        assert [(each.read_queues, each.permission) for each in after.on_brokers] == [
            (4, "r"),
            (4, "r"),
        ]
        _, shrunk = await admin.topics.update("T", queues=1, brokers=["a"])
        assert [(e.broker, e.write_queues, e.read_queues) for e in shrunk.on_brokers] == [
            ("a", 1, 4)
        ]
        routes = {each.broker: each for each in (await admin.topics.route("T")).on_brokers}
        assert (routes["a"].write_queues, routes["b"].write_queues) == (1, 4)
        assert routes["a"].addresses == {0: world.brokers["a"].address}
        assert await admin.topics.delete("T") == ("a", "b")
        with pytest.raises(NotThere, match="no topic 'T'"):
            await admin.topics.status("T")
        with pytest.raises(NotThere, match="no topic 'T'"):
            await admin.topics.delete("T")
        with pytest.raises(NotThere, match="no topic 'T'"):
            await admin.topics.update("T", queues=2)


@virtual_time()
async def test_dry_update_changes_nothing(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        await admin.topics.create("T", queues=2)
        _, after = await admin.topics.update("T", queues=3, dry_run=True)
        assert after.write_queues == 3
        assert (await admin.topics.route("T")).on_brokers[0].write_queues == 2


@virtual_time()
async def test_topics_are_listed_by_what_they_are_for(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", brokers=["b"])
        await admin.topics.create("%RETRY%g", queues=1)
        found = {each.name: each for each in await admin.topics.list()}
        assert [each.broker for each in found["T"].on_brokers] == ["b"]
        kinds = {name: each.kind for name, each in found.items()}
        assert kinds["T"] is TopicKind.NORMAL
        assert kinds["%RETRY%g"] is TopicKind.RETRY
        assert kinds["TBW102"] is kinds[CLUSTER] is TopicKind.SYSTEM
        assert "T" in await admin.topics.names()


@virtual_time()
async def test_ordered_topic_has_fixed_queues_in_the_name_servers(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", queues=2, is_ordered=True)
        values = await admin.configuration.key_values("ORDER_TOPIC_CONFIG")
        assert values == {"T": "a:2;b:2"}
        await admin.topics.update("T", is_ordered=False)
        assert await admin.configuration.key_values("ORDER_TOPIC_CONFIG") == {}
        await admin.topics.update("T", queues=3, is_ordered=True)
        values = await admin.configuration.key_values("ORDER_TOPIC_CONFIG")
        assert values == {"T": "a:3;b:3"}
        await admin.topics.update("T", queues=5, brokers=["b"])
        values = await admin.configuration.key_values("ORDER_TOPIC_CONFIG")
        assert values == {"T": "a:3;b:5"}
        await admin.topics.delete("T")
        assert await admin.configuration.key_values("ORDER_TOPIC_CONFIG") == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"queues": 0}, "queues must be 1–65536, got 0"),
        ({"read_queues": -1}, "read_queues must be 1–65536, got -1"),
        ({"permission": "x"}, "permission must be one of r, w, rw, got 'x'"),
    ],
)
@virtual_time()
async def test_an_invalid_topic_is_rejected(tmp_path: Path, settings: Any, named: str) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        with pytest.raises(InvalidArgument, match=named):
            await admin.topics.create("T", **settings)
        with pytest.raises(InvalidArgument, match=r"topic must .* got 'a b'"):
            await admin.topics.create("a b")


@virtual_time()
async def test_status_shows_what_queues_hold(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", queues=1)
        await send(_, [b"1", b"2"], to=queue(0, "b"))
        status = await admin.topics.status("T")
        assert [(each.queue.broker, each.messages) for each in status.queues] == [
            ("a", 0),
            ("b", 2),
        ]
        assert status.messages == 2
        empty, full = status.queues
        assert empty.last_stored_ms is None
        assert full.last_stored_ms == pytest.approx(virtual_loop().clock.now_ms(), abs=1000)


@virtual_time()
async def test_a_purged_topic_is_empty_and_its_groups_begin_again(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=2, is_ordered=True)
        await admin.topics.update("T", queues=1, brokers=["b"])
        before = await admin.topics.route("T")
        seen = Seen()
        async with consuming(world, seen):
            await send(world, [b"1", b"2"], to=queue(0, "b"))
            await wait_until(lambda: seen.count == 2)
        assert (await admin.groups.progress("g")).lag == 0
        assert await admin.topics.purge("T") == ("a", "b")
        assert (await admin.topics.status("T")).messages == 0
        assert await admin.topics.route("T") == before, "settings and order are kept"
        await send(world, [b"3"], to=queue(0, "b"))
        async with consuming(world, seen):
            await wait_until(lambda: seen.bodies == [b"1", b"2", b"3"])
        with pytest.raises(NotThere, match="no topic 'U'"):
            await admin.topics.purge("U")


def failing(code: RequestCode, error: Exception, count: int, address: str = "") -> Recorder:
    """Return a hook that fails the first requests of a kind, at one broker or any."""
    left = count

    def refuse(at: str, command: Command) -> None:
        nonlocal left
        if command.code == code and at.startswith(address) and left:
            left -= 1
            raise error

    return Recorder(refuse=refuse)


async def queues_by_broker(admin: Admin) -> dict[str, int]:
    """Return what brokers have of topic T, whatever name servers know."""
    found = next(each for each in await admin.topics.list() if each.name == "T")
    return {each.broker: each.write_queues for each in found.on_brokers}


LOST = ConnectionLost("the connection was lost")


@virtual_time()
async def test_a_purge_restores_the_settings_of_a_broker_that_fails_meanwhile(
    tmp_path: Path,
) -> None:
    hooks = [failing(RequestCode.UPDATE_AND_CREATE_TOPIC, LOST, 3)]
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=3)
        async with Admin(session=world.session("10.0.3.9", hooks=hooks)) as purging:
            assert await purging.topics.purge("T") == ("a", "b")
        assert await queues_by_broker(admin) == {"a": 3, "b": 3}


@virtual_time()
async def test_a_purge_whose_deletion_is_not_answered_restores_the_settings(tmp_path: Path) -> None:
    class Losing(Recorder):
        def after_response(self, address: str, request: Command, response: Command) -> None:
            if request.code == RequestCode.DELETE_TOPIC_IN_BROKER:
                raise LOST

    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=3)
        async with Admin(session=world.session("10.0.3.9", hooks=[Losing()])) as purging:
            with pytest.raises(ConnectionLost):
                await purging.topics.purge("T")
        assert await queues_by_broker(admin) == {"a": 3}


@virtual_time()
async def test_a_purge_names_the_settings_that_it_could_not_restore(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=3, permission="r")
        code = RequestCode.UPDATE_AND_CREATE_TOPIC
        hooks = [failing(code, LOST, 1000, world.brokers["a"].address)]
        async with Admin(session=world.session("10.0.3.9", hooks=hooks)) as purging:
            with pytest.raises(AdministrationError) as raised:
                await purging.topics.purge("T")
        assert str(raised.value) == (
            "the messages of topic 'T' on broker a are deleted, but its settings are not restored: "
            "the connection was lost; create it there again with queues=3, read_queues=3, "
            "permission='r', is_ordered=False"
        )
        assert await queues_by_broker(admin) == {"b": 3}


@virtual_time()
async def test_a_broker_that_refuses_a_purge_does_not_interrupt_another(tmp_path: Path) -> None:
    refusal = RemoteError(ResponseCode.NO_PERMISSION, "no")
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=3)
        await send(world, [b"1"], to=queue(0, "b"))
        code = RequestCode.DELETE_TOPIC_IN_BROKER
        hooks = [failing(code, refusal, 1, world.brokers["a"].address)]
        async with Admin(session=world.session("10.0.3.9", hooks=hooks)) as purging:
            with pytest.raises(RemoteError, match=r"broker a at .*: no"):
                await purging.topics.purge("T")
        assert await queues_by_broker(admin) == {"a": 3, "b": 3}
        assert (await admin.topics.status("T")).messages == 0


@virtual_time()
async def test_a_topic_on_a_broker_without_a_master_is_not_purged_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Servers.nodes

    async def without_a_master(servers: Servers, *names: str | None) -> tuple[BrokerNode, ...]:
        found = await nodes(servers, *names)
        return tuple(replace(n, broker_id=1) if n.broker == "b" else n for n in found)

    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1)
        await admin.topics.create("U", queues=1, brokers=["a"])
        await send(world, [b"1"], to=queue(0))
        monkeypatch.setattr(Servers, "nodes", without_a_master)
        with pytest.raises(AdministrationError, match="'T' is also on broker b, which has no mast"):
            await admin.topics.purge("T")
        assert (await admin.topics.status("T")).messages == 1
        assert await admin.topics.purge("U") == ("a",)


@virtual_time()
async def test_a_purge_that_fails_after_the_topic_is_gone_restores_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DiskFailed("no space")

    async with administered(tmp_path, "a") as (_, admin):
        await admin.topics.create("T", queues=3)
        monkeypatch.setattr(Store, "remove_topic", fail)
        with pytest.raises(RemoteError, match="no space"):
            await admin.topics.purge("T")
        assert await queues_by_broker(admin) == {"a": 3}


@virtual_time()
async def test_a_purge_that_is_cancelled_ends_before_the_client_closes(tmp_path: Path) -> None:
    cancel: list[Callable[[], object]] = []

    def cancelling(_: str, command: Command) -> None:
        if command.code == RequestCode.UPDATE_AND_CREATE_TOPIC:
            cancel[0]()

    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=3)
        hooks = [Recorder(refuse=cancelling)]
        async with Admin(session=world.session("10.0.3.9", hooks=hooks)) as purging:
            task = asyncio.create_task(purging.topics.purge("T"))
            cancel.append(task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await queues_by_broker(admin) == {"a": 3, "b": 3}


@virtual_time()
async def test_a_cancelled_purge_logs_the_settings_that_it_could_not_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def cancelling(_: str, command: Command) -> None:
        if command.code == RequestCode.UPDATE_AND_CREATE_TOPIC:
            task.cancel()
            raise RemoteError(ResponseCode.NO_PERMISSION, "no")

    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=3)
        hooks = [Recorder(refuse=cancelling)]
        async with Admin(session=world.session("10.0.3.9", hooks=hooks)) as purging:
            task = asyncio.create_task(purging.topics.purge("T"))
            with pytest.raises(asyncio.CancelledError):
                await task
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(errors) == 1
    assert "create it there again with queues=3" in errors[0]
