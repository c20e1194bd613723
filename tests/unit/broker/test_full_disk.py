"""A broker on a full disk starts, serves readers, and accepts messages once there is space."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from brokers import BROKER_HOST, SMALL_STORE, Client, client_of, config_at, running_broker
from turbopump.broker.broker import Broker
from turbopump.broker.config import LimitsConfig
from turbopump.machine.files import read_file, read_text, write_file
from turbopump.testing import (
    Disk,
    MemoryNetwork,
    virtual_loop,
    virtual_machine,
    virtual_time,
    wait_until,
)
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import whole_body
from turbopump.wire.headers import UpdateConsumerOffset

LIMITS = LimitsConfig(message_bytes_max=100_000)
STORE = replace(SMALL_STORE, segment_bytes=180_000, record_bytes_max=170_000)
COUNT = 12
"""Four messages fit into a file."""


def body(number: int) -> bytes:
    return b"%02d" % number * 20_000


async def runtime(client: Client) -> dict[str, str]:
    answer = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
    return KeyValues.decode(whole_body(answer)).table


async def commit(client: Client, offset: int) -> None:
    header = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=offset)
    answer = await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    assert answer.code == ResponseCode.SUCCESS


def saved_offset(disk: Disk, directory: Path) -> int:
    table = json.loads(read_file(disk, directory / "config" / "consumerOffset.json"))
    return int(table["offsetTable"]["T@g"]["0"])


async def fill(directory: Path, disk: Disk) -> None:
    async with running_broker(directory, files=disk, store=STORE, limits=LIMITS) as (_, client):
        for number in range(COUNT):
            assert (await client.send(body(number))).code == ResponseCode.SUCCESS
        await commit(client, 3)
    disk.close_all()


async def bodies(client: Client) -> list[bytes]:
    return [message.body for message in await client.messages()]


@pytest.mark.parametrize("crashed", [False, True])
@virtual_time()
async def test_the_broker_serves_readers_and_accepts_messages_again(
    tmp_path: Path, crashed: bool
) -> None:
    expected = [body(number) for number in range(COUNT)]
    disk = Disk(virtual_loop())
    await fill(tmp_path, disk)
    if crashed:
        write_file(disk, tmp_path / "abort", b"")
    disk.fail_writes()
    async with running_broker(tmp_path, files=disk, store=STORE, limits=LIMITS) as (broker, client):
        assert await bodies(client) == expected
        refused = await client.send(b"refused")
        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert "No space left" in (refused.remark or "")
        assert "No space left" in (await runtime(client))["messagesRefused"]
        await commit(client, 7)
        await asyncio.sleep(20)
        assert saved_offset(disk, tmp_path) == 3
        disk.heal()
        await wait_until(lambda: broker.store.refusal is None)
        assert (await client.send(b"after")).code == ResponseCode.SUCCESS
        assert (await runtime(client))["messagesRefused"] == ""
        assert await bodies(client) == [*expected, b"after"]
    assert saved_offset(disk, tmp_path) == 7
    assert not disk.exists(tmp_path / "abort")


@virtual_time()
async def test_the_broker_frees_space_by_itself(tmp_path: Path) -> None:
    """However young the messages: the disk is full of them."""
    log = tmp_path / "commitlog"
    segments = -1

    class FullOfMessages(Disk):
        def used_ratio(self, path: Path) -> float:
            left = len(self.entries(log))
            if left < segments:
                self.heal()
            return 1.0 if left == segments else 0.8

    disk = FullOfMessages(virtual_loop())
    await fill(tmp_path, disk)
    segments = len(disk.entries(log))
    disk.fail_writes()
    async with running_broker(tmp_path, files=disk, store=STORE, limits=LIMITS) as (broker, client):
        assert len(await bodies(client)) == COUNT
        assert (await client.send(b"refused")).code == ResponseCode.SERVICE_NOT_AVAILABLE
        await wait_until(lambda: broker.store.refusal is None)
        assert (await client.send(b"after")).code == ResponseCode.SUCCESS
        low, high = broker.store.queue_range("T", 0)
        assert (low, high) == (4, COUNT + 1)


@virtual_time()
async def test_a_setting_that_cannot_be_saved_is_not_applied(tmp_path: Path) -> None:
    disk, network, path = Disk(virtual_loop()), MemoryNetwork(), tmp_path / "broker.conf"
    disk.make_directory(tmp_path)
    write_file(disk, path, b"traceOn=true\n")
    config = config_at(tmp_path / "store")
    host = network.host(BROKER_HOST)
    async with (
        Broker(config, host, virtual_machine(disk), config_path=path) as broker,
        client_of(network, broker.address) as client,
    ):
        disk.fail_writes()
        answer = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"traceOn=false")
        disk.heal()
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert "broker.conf" in (answer.remark or "")
        assert broker.config.identity.trace_on
        answer = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"traceOn=false")
        assert answer.code == ResponseCode.SUCCESS
    assert "traceOn=false" in read_text(disk, path)
