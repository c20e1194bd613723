from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appending import append
from brokers import BROKER_HOST, SMALL_STORE, Client, client_of, config_at, running_broker
from turbopump.broker.broker import Broker
from turbopump.broker.config import LimitsConfig
from turbopump.broker.delays import Level
from turbopump.errors import WriteFailed
from turbopump.machine.files import REAL_FILES
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.testing import (
    Disk,
    MemoryNetwork,
    VirtualClock,
    virtual_loop,
    virtual_machine,
    virtual_time,
    wait_until,
)
from turbopump.wire.bodies import KeyValues
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import whole_body
from turbopump.wire.delay_levels import parse_delay_levels
from unit.store.support import record


def delivered(broker: Broker) -> int:
    return broker.queue_end("T", 0)


async def send_delayed(client: Client, level: int, body: bytes = b"later") -> None:
    answer = await client.send(body, named={"DELAY": str(level), "TAGS": "a"})
    assert answer.code == ResponseCode.SUCCESS


@virtual_time()
async def test_never_early_and_barely_late(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        for level, seconds in ((1, 1), (2, 5), (3, 10), (18, 7200)):
            before = delivered(broker)
            stored_ms = virtual_loop().clock.now_ms()
            await send_delayed(client, level)
            await asyncio.sleep(seconds - 0.05)
            assert delivered(broker) == before, level
            await asyncio.sleep(0.15)
            message = (await client.messages())[-1]
            late_ms = message.store_timestamp_ms - stored_ms - seconds * 1000
            assert 0 <= late_ms < 100, (level, late_ms)


@virtual_time()
async def test_what_is_delivered(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_delayed(client, 1, b"body")
        [waiting] = await client.messages("SCHEDULE_TOPIC_XXXX", 0)
        await asyncio.sleep(2)
        [message] = await client.messages()
        assert (message.topic, message.queue_id, message.body) == ("T", 0, b"body")
        assert message.tags == "a"
        assert message.born_timestamp_ms == waiting.born_timestamp_ms
        assert message.properties["DELAY"] == "1"
        assert message.properties["REAL_TOPIC"] == "T"
        assert message.properties["REAL_QID"] == "0"


@virtual_time()
async def test_a_queue_whose_file_lost_its_units_is_tried_again(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        for _ in range(2):
            await send_delayed(client, 2)
        await asyncio.sleep(3)
        [file] = (tmp_path / "consumequeue/SCHEDULE_TOPIC_XXXX/1").iterdir()
        units = file.read_bytes()
        file.write_bytes(b"")
        await asyncio.sleep(30)
        assert delivered(broker) == 0
        info = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        failures = KeyValues.decode(whole_body(info)).table["backgroundFailures"]
        assert "queue 1 of SCHEDULE_TOPIC_XXXX cannot be read at offset 0" in failures
        file.write_bytes(units)
        await asyncio.sleep(60)
        assert delivered(broker) == 2


@virtual_time()
async def test_levels_beyond_the_last_count_as_the_last(tmp_path: Path) -> None:
    store = replace(SMALL_STORE, delay_levels=parse_delay_levels("1s 2s"))
    async with running_broker(tmp_path, store=store) as (broker, client):
        await send_delayed(client, 99)
        await asyncio.sleep(1.9)
        assert delivered(broker) == 0
        await asyncio.sleep(0.3)
        assert delivered(broker) == 1


@virtual_time()
async def test_an_invalid_delay_is_ignored(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        for text in ("0", "-1", "soon", "1.5"):
            await client.send(named={"DELAY": text})
        assert delivered(broker) == 4


@virtual_time()
async def test_order_within_a_level_is_preserved(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        for number in range(600):
            await send_delayed(client, 1, b"%d" % number)
        await asyncio.sleep(3)
        bodies = [int(message.body) for message in await client.messages()]
        assert bodies == list(range(600))


@virtual_time()
async def test_progress_survives_a_restart_and_overdue_messages_are_delivered(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_delayed(client, 1, b"before")
        await asyncio.sleep(2)
        await send_delayed(client, 3, b"meanwhile")
        await send_delayed(client, 4, b"after")
    assert '"1":1' in (tmp_path / "config" / "delayOffset.json").read_text().replace(" ", "")
    await asyncio.sleep(20)
    async with running_broker(tmp_path) as (_, client):
        await asyncio.sleep(0.2)
        bodies = [message.body for message in await client.messages()]
        assert bodies == [b"before", b"meanwhile"]
        await asyncio.sleep(20)
        assert (await client.messages())[-1].body == b"after"


@virtual_time()
async def test_a_rejected_append_is_retried(tmp_path: Path, monkeypatch: Any) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await send_delayed(client, 1)
        refusals = 0

        def refuse(*_: object, **__: object) -> None:
            nonlocal refusals
            refusals += 1
            raise WriteFailed("no")

        with monkeypatch.context() as patched:
            patched.setattr(broker.store, "append", refuse)
            await asyncio.sleep(3)
        assert refusals > 5
        await asyncio.sleep(0.5)
        assert len(await client.messages()) == 1


@pytest.mark.parametrize("is_idle", [False, True])
@pytest.mark.parametrize("set_by_s", [-3600, -1, 25, 3600])
@virtual_time()
async def test_delays_follow_elapsed_time_even_if_the_clock_is_set(
    tmp_path: Path, set_by_s: int, is_idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await send_delayed(client, 4, b"before")
        await asyncio.sleep(6)
        virtual_loop().clock.jump_wall(set_by_s)
        if is_idle:
            await asyncio.sleep(6)
            await send_delayed(client, 4, b"after")
        else:
            await send_delayed(client, 4, b"after")
            await asyncio.sleep(6)
        await asyncio.sleep(17.9)
        assert delivered(broker) == 0, "29.9 s"
        await asyncio.sleep(0.2)
        assert [message.body for message in await client.messages()] == [b"before"]
        await asyncio.sleep(11.7 if is_idle else 5.7)
        assert delivered(broker) == 1
        await asyncio.sleep(0.3)
        assert delivered(broker) == 2
    way = "forward" if set_by_s > 0 else "back"
    told = [line for line in caplog.messages if "the clock was set" in line]
    assert len(told) == 1
    assert f"{way} by {abs(set_by_s)}.0 s" in told[0]


@pytest.mark.parametrize("set_by_s", [-3600, 3600])
@virtual_time()
async def test_of_messages_stored_before_the_start_the_stored_times_count(
    tmp_path: Path, set_by_s: int
) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_delayed(client, 4)
        await asyncio.sleep(5)
    virtual_loop().clock.jump_wall(set_by_s)
    async with running_broker(tmp_path) as (broker, _):
        await asyncio.sleep(29.9)
        if set_by_s > 0:
            assert delivered(broker) == 1, "it appears to have waited for an hour"
        else:
            assert delivered(broker) == 0
            await asyncio.sleep(0.3)
            assert delivered(broker) == 1, "late by at most one more delay"


@pytest.mark.parametrize("set_by_s", [-3600, 3600])
@virtual_time()
async def test_setting_the_clock_delivers_no_message_of_an_earlier_run_early(
    tmp_path: Path, set_by_s: int
) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_delayed(client, 4)
        await asyncio.sleep(5)
    async with running_broker(tmp_path) as (broker, _):
        virtual_loop().clock.jump_wall(set_by_s)
        await asyncio.sleep(24.8)
        assert delivered(broker) == 0
        await asyncio.sleep(0.4 if set_by_s > 0 else 35)
        assert delivered(broker) == 1


class SuspendedClock:
    """The clock of a machine that was suspended: its timers did not run in the meantime."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.suspended_ms = 0

    def now_ms(self) -> int:
        return self._clock.now_ms() + self.suspended_ms

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def uptime_ms(self) -> int:
        return self._clock.monotonic_ms() + self.suspended_ms


@virtual_time()
async def test_time_in_suspension_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork()
    clock = SuspendedClock(virtual_loop().clock)
    machine = replace(virtual_machine(REAL_FILES), clock=clock)
    async with (
        Broker(config_at(tmp_path), network.host(BROKER_HOST), machine) as broker,
        client_of(network, broker.address) as client,
    ):
        await send_delayed(client, 5)
        await asyncio.sleep(1)
        clock.suspended_ms += 50_000
        await asyncio.sleep(8.8)
        assert delivered(broker) == 0
        await asyncio.sleep(0.4)
        assert delivered(broker) == 1
        assert not [line for line in caplog.messages if "the clock was set" in line]


@virtual_time()
async def test_levels_that_are_not_configured_for_a_while_keep_their_progress(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_delayed(client, 2)
        await asyncio.sleep(6)
    fewer = replace(SMALL_STORE, delay_levels=parse_delay_levels("1s"))
    async with running_broker(tmp_path, store=fewer) as (broker, client):
        await send_delayed(client, 1)
        await asyncio.sleep(2)
        assert delivered(broker) == 2
    async with running_broker(tmp_path) as (broker, _):
        await asyncio.sleep(10)
        assert delivered(broker) == 2, "nothing is delivered twice"


@virtual_time()
async def test_an_unexpected_error_stops_no_level(tmp_path: Path, monkeypatch: Any) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await send_delayed(client, 1)

        def fail(*_: object) -> None:
            raise OSError("the disk stumbled")

        with monkeypatch.context() as patched:
            patched.setattr(broker.store, "read_from_memory", fail)
            await asyncio.sleep(2)
        assert delivered(broker) == 0
        await asyncio.sleep(10)
        assert delivered(broker) == 1
        answer = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        failures = KeyValues.decode(whole_body(answer)).table["backgroundFailures"]
        assert "delay level 1: 2 failures, the last OSError('the disk stumbled')" in failures


@asynccontextmanager
async def cold_delays(directory: Path, count: int) -> AsyncIterator[tuple[Broker, Client, Disk]]:
    """Run a broker with delayed messages that are on a slow disk, and not in memory."""
    disk = Disk(virtual_loop())
    async with running_broker(directory, files=disk) as (_, client):
        for number in range(count):
            await send_delayed(client, 3, b"%d" % number)
    disk.close_all()
    async with running_broker(directory, files=disk) as (broker, client):
        disk.drop_caches("*/commitlog/*")
        disk.read_time = 0.7
        yield broker, client, disk
        disk.heal()


@virtual_time()
async def test_sends_are_answered_while_the_disk_reads_delayed_messages(tmp_path: Path) -> None:
    clock, count = virtual_loop().clock, 20
    async with cold_delays(tmp_path, count) as (broker, client, disk):
        await wait_until(lambda: disk.operations["fetch"] > 0)
        assert delivered(broker) == 0
        begun_ms = clock.monotonic_ms()
        # It needs no run of a level that has one coming.
        await send_delayed(client, 3, b"meanwhile")
        broker.path.delays.watch_clock()
        assert clock.monotonic_ms() - begun_ms < 50
        await asyncio.sleep(0.8)
        assert delivered(broker) == count
        assert disk.operations["fetch"] == 2, "of the log and of its queue"
        await asyncio.sleep(10)
        assert delivered(broker) == count + 1


@virtual_time()
async def test_delayed_messages_that_the_disk_cannot_read_are_tried_again(tmp_path: Path) -> None:
    """A page of a mapped file that cannot be read would end the process."""
    async with cold_delays(tmp_path, 2) as (broker, client, disk):
        disk.fail("fetch")
        await asyncio.sleep(60)
        assert delivered(broker) == 0
        info = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        failures = KeyValues.decode(whole_body(info)).table["backgroundFailures"]
        assert "delay level 3" in failures
        assert "cannot read: Input/output error" in failures
        disk.heal()
        await asyncio.sleep(60)
        assert delivered(broker) == 2


@virtual_time()
async def test_memory_that_keeps_nothing_stops_no_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cold_delays(tmp_path, 2) as (broker, _, disk):
        fetch = disk.fetch

        def fetch_and_drop(fd: int, at: int, size: int) -> None:
            fetch(fd, at, size)
            disk.drop_caches("*/commitlog/*")

        monkeypatch.setattr(disk, "fetch", fetch_and_drop)
        await asyncio.sleep(20)
        assert delivered(broker) == 2
        assert disk.operations["fetch"] == 6


@virtual_time()
async def test_a_message_that_can_no_longer_be_stored_does_not_block_later_ones(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as (_, client):
        await send_delayed(client, 3, b"x" * 500_000)
        await send_delayed(client, 3, b"small")
    smaller = replace(SMALL_STORE, record_bytes_max=200_000)
    limits = LimitsConfig(message_bytes_max=100_000)
    async with running_broker(tmp_path, store=smaller, limits=limits) as (_, client):
        await asyncio.sleep(12)
        assert [message.body for message in await client.messages()] == [b"small"]


@virtual_time()
async def test_a_message_that_names_no_valid_topic_does_not_block_later_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        delayed = record(topic="SCHEDULE_TOPIC_XXXX", DELAY="1", REAL_TOPIC="x" * 300, REAL_QID="0")
        append(broker.store, [delayed])
        await send_delayed(client, 1, b"next")
        await asyncio.sleep(2)
        assert [message.body for message in await client.messages()] == [b"next"]
    assert "skipped a delayed message that cannot be delivered" in caplog.text


def test_progress_does_not_count_before_all_its_copies_are_on_disk() -> None:
    """A message that cannot be delivered leaves no copy, but earlier ones may wait for theirs."""
    level = Level(1, 1000)
    for n in range(1, 65):
        level.note_delivered(PhysicalOffset(100 * n), QueueOffset(n))
    level.note_delivered(PhysicalOffset(0), QueueOffset(65))
    level.settle(PhysicalOffset(6300))
    assert level.safe_offset == 63
    level.settle(PhysicalOffset(6400))
    assert level.safe_offset == 65
