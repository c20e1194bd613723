"""Promotion and the state of replicas, as operators see them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from promotable import NAME, PromotableBrokers, mastership_of, promotable_brokers
from turbopump.admin import BrokerNode, BrokerStatus
from turbopump.admin.cluster import broker_status, with_lags
from turbopump.aio import Admin
from turbopump.broker.config import Role
from turbopump.client.config import ClientConfig
from turbopump.client.session import Session
from turbopump.errors import AdministrationError, InvalidArgument, NoBroker, NotThere, RemoteError
from turbopump.testing import virtual_machine, virtual_time, wait_until
from turbopump.wire.bodies import BrokerData
from turbopump.wire.codes import ResponseCode


@asynccontextmanager
async def administered(
    directory: Path, slaves: int = 1
) -> AsyncIterator[tuple[PromotableBrokers, Admin]]:
    async with promotable_brokers(directory, slaves=slaves) as replicas:
        config = ClientConfig(nameserver="10.0.1.1:9876", host="10.0.3.1", instance="test")
        session = Session(config, replicas.network.host("10.0.3.1"), virtual_machine(seed=50))
        async with Admin(session=session) as admin:
            yield replicas, admin


async def until_copied(replicas: PromotableBrokers, number: int) -> None:
    master, slave = replicas.broker(0).store, replicas.broker(number).store
    await wait_until(lambda: slave.written_end == master.written_end > 0, 60)


async def until_registered(replicas: PromotableBrokers, ids: set[int]) -> None:
    routes = replicas.nameservers[0]._routes
    none = BrokerData(cluster="", broker_name=NAME, broker_addrs={})
    await wait_until(
        lambda: routes.cluster_info().broker_addr_table.get(NAME, none).broker_addrs.keys() == ids,
        60,
    )


async def statuses(admin: Admin) -> dict[str, BrokerStatus]:
    [cluster] = await admin.clusters.status()
    return {status.node.address: status for status in cluster.brokers}


@virtual_time()
async def test_roles_links_and_lags_are_shown(tmp_path: Path) -> None:
    async with administered(tmp_path) as (replicas, admin):
        assert (await replicas.client(0).send()).code == ResponseCode.SUCCESS
        await until_copied(replicas, 1)
        found = await statuses(admin)
        master, slave = found["10.0.0.1:10911"], found["10.0.0.2:10911"]
        assert (master.role, master.epoch, master.lag_bytes) == ("ASYNC_MASTER", 0, None)
        assert master.link == "1 of 1 slaves in sync"
        assert (slave.role, slave.link) == ("SLAVE", "in sync")
        assert (slave.lag_bytes, slave.lag_ms) == (0, 0)


@virtual_time()
async def test_a_master_that_is_down_is_shown(tmp_path: Path) -> None:
    async with administered(tmp_path) as (replicas, admin):
        await replicas.crash(0)
        await until_registered(replicas, {1})
        [cluster] = await admin.clusters.status()
        missing, slave = cluster.brokers
        assert missing.node == BrokerNode(slave.node.cluster, NAME, 0, "")
        assert missing.error is not None
        assert "no master is registered" in missing.error
        assert (slave.node.broker_id, slave.error, slave.lag_bytes) == (1, None, None)
        await replicas.crash(1)
        await until_registered(replicas, set())
        with pytest.raises(NoBroker, match=r"none is registered .* 10\.0\.1\.1:9876"):
            await admin.clusters.status()
        with pytest.raises(NoBroker):
            await admin.topics.status("T")
        assert await admin.clusters.list() == ()


@virtual_time()
async def test_a_promotion_is_done_when_name_servers_know_it(tmp_path: Path) -> None:
    async with administered(tmp_path) as (replicas, admin):
        assert (await replicas.client(0).send()).code == ResponseCode.SUCCESS
        await until_copied(replicas, 1)
        node = await admin.clusters.promotable(NAME)
        assert (node.broker_id, node.address) == (1, "10.0.0.2:10911")
        done = await admin.clusters.promote(node, "SYNC_MASTER")
        assert (done.epoch, done.missing_bytes, done.old_master) == (1, 0, "10.0.0.1:10911")
        assert replicas.role(1) == (Role.SYNC_MASTER, 0)
        assert (await replicas.addresses())[0] == node.address


@virtual_time()
async def test_a_promoted_slave_has_the_role_of_the_old_master(tmp_path: Path) -> None:
    async with administered(tmp_path) as (replicas, admin):
        await until_master_role(replicas, 1, "ASYNC_MASTER")
        done = await admin.clusters.promote(await admin.clusters.promotable(NAME), "SYNC_MASTER")
        assert (done.role, done.old_role) == ("SYNC_MASTER", "ASYNC_MASTER")
        await wait_until(lambda: replicas.role(0) == (Role.SLAVE, 1), 60)
        await until_master_role(replicas, 0, "SYNC_MASTER")
        await replicas.crash(1)
        # It is on disk.
        await replicas.stop(0)
        await replicas.start(0)
        await until_registered(replicas, {1})
        done = await admin.clusters.promote(await admin.clusters.promotable(NAME))
        assert (done.role, done.old_role) == ("SYNC_MASTER", "SYNC_MASTER")
        assert replicas.role(0) == (Role.SYNC_MASTER, 0)


async def until_master_role(replicas: PromotableBrokers, number: int, role: str) -> None:
    await wait_until(lambda: mastership_of(replicas.broker(number)).record.master_role == role, 60)


@virtual_time()
async def test_masters_and_slaves_have_settings_of_their_own(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        key, change = "fileReservedTime", admin.configuration.change_brokers
        nodes = {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}

        async def values() -> list[str]:
            return [(await admin.configuration.broker(NAME, number))[key] for number in nodes]

        [one] = await change({key: "48"})
        assert (one.server, one.broker_id, one.address, one.old, one.new, one.is_stored) == (
            *(NAME, 0, nodes[0], "72", "48"),
            False,
        )
        assert await values() == ["48", "72"]
        [one] = await change({key: "24"}, broker=NAME, broker_id=1)
        assert (one.broker_id, one.address, one.old, one.new) == (1, nodes[1], "72", "24")
        assert await values() == ["48", "24"]
        changes = await change({key: "12"}, broker_id=None)
        assert {each.broker_id: each.address for each in changes} == nodes
        assert await values() == ["12", "12"]
        with pytest.raises(NotThere, match="no slave of any broker with id '2'"):
            await change({key: "9"}, broker_id=2)
        with pytest.raises(InvalidArgument, match=f"slave 1 of {NAME} has no setting 'nonsense'"):
            await change({"nonsense": "9"}, broker_id=1)


@virtual_time()
async def test_the_slave_that_has_most_is_chosen(tmp_path: Path) -> None:
    async with administered(tmp_path, slaves=2) as (replicas, admin):
        await replicas.crash(1)
        assert (await replicas.client(0).send()).code == ResponseCode.SUCCESS
        await until_copied(replicas, 2)
        replicas.network.isolate(replicas.host_of(0))
        replicas.network.cut(replicas.host_of(0))
        await replicas.start(1)
        assert (await admin.clusters.promotable(NAME)).broker_id == 2
        assert (await admin.clusters.promotable(NAME, 1)).broker_id == 1
        with pytest.raises(NotThere, match="no slave of broker 'broker-a' with id '7'"):
            await admin.clusters.promotable(NAME, 7)


@virtual_time()
async def test_no_slave_is_chosen_while_name_servers_lack_one(tmp_path: Path) -> None:
    """A name server that has restarted knows the brokers that have registered since."""
    async with administered(tmp_path, slaves=2) as (replicas, admin):
        await wait_until(lambda: mastership_of(replicas.broker(1)).slave_ids == "1,2", 40)
        await replicas.crash(0)
        replicas.network.partition(replicas.host_of(2), "10.0.1.1")
        await replicas.stop_nameserver()
        await replicas.start_nameserver()
        await until_registered(replicas, {1})
        with pytest.raises(
            AdministrationError, match=r"not registered .*: slave 2 of broker broker-a"
        ):
            await admin.clusters.promotable(NAME)
        assert (await admin.clusters.promotable(NAME, 1)).broker_id == 1
        replicas.network.heal()
        await until_registered(replicas, {1, 2})
        assert (await admin.clusters.promotable(NAME)).broker_id in (1, 2)


@virtual_time()
async def test_slaves_that_have_left_are_forgotten(tmp_path: Path) -> None:
    async with administered(tmp_path, slaves=2) as (replicas, admin):
        await wait_until(lambda: mastership_of(replicas.broker(1)).slave_ids == "1,2", 40)
        await replicas.stop(2)
        await wait_until(lambda: mastership_of(replicas.broker(1)).slave_ids == "1", 60)
        assert (await admin.clusters.promotable(NAME)).broker_id == 1


@virtual_time()
async def test_brokers_without_slaves_have_none_to_promote(tmp_path: Path) -> None:
    async with administered(tmp_path, slaves=0) as (_, admin):
        with pytest.raises(NotThere, match="slave of broker"):
            await admin.clusters.promotable(NAME)
        [cluster] = await admin.clusters.list()
        with pytest.raises(RemoteError, match="master already"):
            await admin.clusters.promote(cluster.nodes[0])


def test_lags_count_what_slaves_have_not_copied() -> None:
    def status(broker_id: int, end: str | None) -> BrokerStatus:
        node = BrokerNode("c", "b", broker_id, f"h:{broker_id}")
        return broker_status(node, {} if end is None else {"commitLogMaxOffset": end})

    known = with_lags([status(0, "100"), status(1, "70"), status(2, "101"), status(3, None)])
    assert [each.lag_bytes for each in known] == [None, 30, 0, None]
    alone = with_lags([status(1, "70")])
    assert alone[0].lag_bytes is None
