"""Settings of brokers and name servers, and the values that name servers store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from administered import administered
from turbopump.admin.configuration import _is_stored
from turbopump.aio import Admin
from turbopump.errors import (
    InvalidArgument,
    NotThere,
    RemoteError,
)
from turbopump.testing import virtual_time


@virtual_time()
async def test_settings_of_brokers_and_name_servers(tmp_path: Path) -> None:
    async with administered(tmp_path, nameservers=2) as (_, admin):
        changes = await admin.configuration.change_brokers({"fileReservedTime": "48"}, dry_run=True)
        assert [(c.server, c.key, c.old, c.new) for c in changes] == [
            (name, "fileReservedTime", "72", "48") for name in "ab"
        ]
        assert (await admin.configuration.broker("a"))["fileReservedTime"] == "72"
        await admin.configuration.change_brokers({"fileReservedTime": "48"}, broker="a")
        assert (await admin.configuration.broker("a"))["fileReservedTime"] == "48"
        assert (await admin.configuration.broker("b"))["fileReservedTime"] == "72"
        for dry_run in (True, False):
            for settings, said in (
                ({"fileReservedTime": "x"}, "fileReservedTime"),
                ({"fileReservedTim": "9"}, "no setting 'fileReservedTim'; did you mean 'file"),
                ({"aclEnable": "true"}, "no setting 'aclEnable': not supported by Turbopump$"),
                ({"serverWorkerThreads": "8"}, "'serverWorkerThreads': no effect in Turbopump$"),
                ({"authEnable": "1"}, "broker . has no setting 'authEnable'$"),
                ({"listenPort": "9"}, "listenPort takes effect only at start"),
            ):
                with pytest.raises(InvalidArgument, match=said):
                    await admin.configuration.change_brokers(settings, dry_run=dry_run)
        # Another notation of the same value is not a change.
        assert not await admin.configuration.change_brokers({"fileReservedTime": "048"}, broker="a")
        with pytest.raises(InvalidArgument, match=r"name server .* has no setting 'nonsense'"):
            await admin.configuration.change_name_servers({"nonsense": "1"}, dry_run=True)
        with pytest.raises(InvalidArgument, match="specify at least one setting"):
            await admin.configuration.change_brokers({})
        changes = await admin.configuration.change_name_servers({"orderMessageEnable": "true"})
        assert len(changes) == 2
        servers = await admin.configuration.name_servers()
        assert [each["orderMessageEnable"] for each in servers.values()] == ["true"] * 2
        with pytest.raises(RemoteError, match=r"name server .*listenPort"):
            await admin.configuration.change_name_servers({"listenPort": "1"})


@virtual_time()
async def test_key_values_are_on_every_name_server(tmp_path: Path) -> None:
    async with administered(tmp_path, "a", nameservers=2) as (world, admin):
        assert await admin.configuration.key_values("n") == {}
        await admin.configuration.put_key_value("n", "k", "v")
        for server in world.nameservers:
            session = world.session("10.0.5.5", nameserver=server.address)
            async with Admin(session=session) as one:
                assert await one.configuration.key_value("n", "k") == "v"
        await admin.configuration.delete_key_value("n", "k")
        with pytest.raises(NotThere, match="no key 'n k'"):
            await admin.configuration.delete_key_value("n", "k")


@virtual_time()
async def test_brokers_report_what_mqadmin_exports(tmp_path: Path) -> None:
    exported = (
        "brokerClusterName brokerId brokerName brokerRole fileReservedTime filterServerNums "
        "flushDiskType maxMessageSize messageDelayLevel msgTraceTopicName slaveReadEnable traceOn "
        "traceTopicEnable useTLS autoCreateTopicEnable autoCreateSubscriptionGroup "
        "clientCallbackExecutorThreads"
    )
    async with administered(tmp_path, "a") as (_, admin):
        reported = await admin.configuration.broker("a")
        assert set(exported.split()) <= reported.keys()
        assert reported["clientCallbackExecutorThreads"] == str(os.cpu_count())


@pytest.mark.parametrize(
    ("settings", "is_stored"),
    [({}, None), ({"brokerConfigPath": ""}, False), ({"brokerConfigPath": "/b.conf"}, True)],
)
def test_servers_report_whether_changes_are_stored(
    settings: dict[str, str], is_stored: bool | None
) -> None:
    assert _is_stored(settings) is is_stored
