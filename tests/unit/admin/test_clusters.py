"""Clusters and their brokers, administered in virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from administered import administered, queue
from turbopump.admin import Earliest, GroupSettings
from turbopump.aio import Admin
from turbopump.broker.broker import Broker
from turbopump.client.config import ClientConfig
from turbopump.client.producer import Producer
from turbopump.client.session import Session
from turbopump.errors import (
    NoNameServer,
    NotRunning,
    NotThere,
)
from turbopump.machine.files import REAL_FILES
from turbopump.message import Message
from turbopump.testing import MemoryNetwork, virtual_machine, virtual_time

CLUSTER = "DefaultCluster"


@virtual_time()
async def test_clusters_list_their_brokers_and_their_status(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        (found,) = await admin.clusters.list()
        assert (found.name, found.brokers) == (CLUSTER, ("a", "b"))
        (status,) = await admin.clusters.status()
        assert [each.node.address for each in status.brokers] == [
            broker.address for broker in world.brokers.values()
        ]
        for each in status.brokers:
            assert each.version == "V4_9_8"
            assert (each.in_per_s, each.error) == (0.0, None)
        info = await admin.clusters.runtime_info("b")
        assert info["brokerVersionDesc"] == "V4_9_8"


@virtual_time()
async def test_an_unresponsive_broker_is_shown_with_the_reason(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        world.network.stop_reading("10.0.0.2")
        (status,) = await admin.clusters.status()
        first, second = status.brokers
        assert first.error is None
        assert second.error is not None
        assert second.version is None


@virtual_time()
async def test_a_drained_broker_accepts_no_messages(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", queues=2)
        assert await admin.clusters.wipe_write_permission("a") > 0
        permissions = {
            each.broker: each.permission for each in (await admin.topics.route("T")).on_brokers
        }
        assert permissions == {"a": "r", "b": "rw"}
        await admin.clusters.add_write_permission("a")
        assert {each.permission for each in (await admin.topics.route("T")).on_brokers} == {"rw"}


@virtual_time()
async def test_an_unknown_name_is_reported_with_similar_names(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("orders")
        with pytest.raises(NotThere, match="no topic 'order'; similar: orders") as caught:
            await admin.topics.route("order")
        assert (caught.value.kind, caught.value.similar) == ("topic", ("orders",))
        with pytest.raises(NotThere, match=r"no cluster 'DefaultCluste'.*DefaultCluster"):
            await admin.clusters.status("DefaultCluste")
        with pytest.raises(NotThere, match="no broker 'c'"):
            await admin.clusters.runtime_info("c")
        with pytest.raises(NotThere, match=r"no group 'TOOLS_CONSUME'.*TOOLS_CONSUMER"):
            await admin.groups.progress("TOOLS_CONSUME")


@virtual_time()
async def test_the_address_of_a_broker_is_no_name_server(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, _):
        address = world.brokers["a"].address
        wrong = (
            rf"{address}: not a name server, perhaps a broker \(request type.*listen at port 9876"
        )
        session = world.session("10.0.5.5", nameserver=address)
        async with Admin(session=session) as admin:
            with pytest.raises(NoNameServer, match=wrong):
                await admin.topics.names()
            with pytest.raises(NoNameServer, match=wrong):
                await admin.configuration.name_servers()
        async with Producer("pg", session=world.session("10.0.5.6", nameserver=address)) as one:
            with pytest.raises(NoNameServer, match=wrong):
                await one.send(Message("T", b"x"), timeout=1)
        both = world.session("10.0.5.7", nameserver=f"{address};{world.nameserver}")
        async with Producer("pg", session=both) as other:
            await other.send(Message("T", b"x"))


@virtual_time()
async def test_missing_name_server_is_named(tmp_path: Path) -> None:
    network = MemoryNetwork()
    session = Session(
        ClientConfig("10.9.9.9:9876;10.9.9.8:9876", host="10.0.1.1", instance="t"),
        network.host("10.0.1.1"),
        virtual_machine(),
    )
    async with Admin(session=session) as admin:
        with pytest.raises(NoNameServer, match=r"10\.9\.9\.9:9876;10\.9\.9\.8:9876"):
            await admin.topics.names()
        with pytest.raises(NoNameServer, match=r"10\.9\.9\.9:9876"):
            await admin.configuration.name_servers()


@virtual_time()
async def test_an_administration_that_is_not_started_says_how() -> None:
    with pytest.raises(NotRunning, match=r"is not running: use it inside `async with`, or await"):
        await Admin("127.0.0.1:9876").topics.names()


@virtual_time()
async def test_several_clusters_are_distinguished(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        config = world.brokers["a"].config
        identity = replace(
            config.identity, broker_name="z", cluster="other", bind_host="10.0.7.7", port=10911
        )
        other = replace(config, directory=tmp_path / "z", identity=identity)
        async with Broker(
            other,
            world.network.host("10.0.7.7"),
            virtual_machine(REAL_FILES, seed=7),
        ):
            assert [each.name for each in await admin.clusters.list()] == [CLUSTER, "other"]
            (status,) = await admin.clusters.status("other")
            assert [each.node.broker for each in status.brokers] == ["z"]
            await admin.topics.create("T", cluster="other", queues=1)
            await admin.topics.create("U", queues=1)
            names = {each.name for each in await admin.topics.list(CLUSTER)}
            assert names & {"T", "U"} == {"U"}
            assert [each.broker for each in (await admin.topics.route("U")).on_brokers] == [
                "a",
                "z",
            ]
            await admin.groups.create(GroupSettings("g"), cluster="other")
            assert (await admin.groups.list("other"))[0].brokers == ("z",)
            await admin.messages.send(Message("U", b"1"), queue=queue(0, "z", "U"))
            await admin.offsets.reset("g", "U", Earliest())
            assert (await admin.groups.progress("g")).lag == 1
            assert await admin.topics.delete("U", cluster="other") == ("z",)
            assert [each.broker for each in (await admin.topics.route("U")).on_brokers] == ["a"]
