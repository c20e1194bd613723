"""An overloaded broker reports busy, drops clients that do not read, and bounds its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from brokers import (
    SYNC_STORE,
    Client,
    StuckDisk,
    client_of,
    running_broker,
    send_header,
    stuck_disk,
)
from store_work import sync_log
from turbopump.broker.broker import Broker
from turbopump.broker.config import OverloadConfig
from turbopump.broker.message_writer import MessageWriter
from turbopump.errors import NetworkError, WriteFailed
from turbopump.store.outcomes import Appended
from turbopump.store.store import Store
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time, wait_until
from turbopump.wire.codes import RequestCode, ResponseCode


@pytest.fixture
def disk() -> Iterator[StuckDisk]:
    with stuck_disk() as stuck:
        yield stuck


def test_a_send_is_not_answered_before_the_flush(tmp_path: Path, disk: StuckDisk) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path, store=SYNC_STORE) as (broker, client):
            sending = asyncio.create_task(client.send())
            await wait_until(lambda: disk.flushes)
            await asyncio.sleep(1)
            assert not sending.done()
            assert (await client.pull(0)).code == ResponseCode.PULL_NOT_FOUND, "not readable yet"
            sync_log(broker.store)
            disk.flushes[-1].set_result(None)
            assert (await sending).code == ResponseCode.SUCCESS
            assert len(await client.messages()) == 1

    run()


def test_a_slow_and_a_failed_flush_are_distinguished(tmp_path: Path, disk: StuckDisk) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path, store=SYNC_STORE) as (_, client):
            send = (RequestCode.SEND_MESSAGE_V2, send_header(), b"x", 20_000)
            slow = await client.ask(*send)
            assert slow.code == ResponseCode.FLUSH_DISK_TIMEOUT
            assert "msgId" in (slow.ext_fields or {}), "stored nevertheless"
            disk.flushes[-1].set_result(None)
            failing = asyncio.create_task(client.ask(*send))
            await wait_until(lambda: not disk.flushes[-1].done())
            disk.flushes[-1].set_exception(WriteFailed("the disk said no"))
            failed = await failing
            assert failed.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert "the disk said no" in (failed.remark or "")

    run()


@pytest.mark.parametrize("others", [0, 1])
def test_a_delivery_whose_flush_failed_is_retried_without_waiting(
    tmp_path: Path, disk: StuckDisk, others: int
) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path, store=SYNC_STORE) as (broker, client):
            for _ in range(1 + others):
                await send_delayed(broker, client, disk)
                await asyncio.sleep(600)
            # By then the level knows that nothing else is due, or when.
            await asyncio.sleep(7200 - (1 + others) * 600 + 10)
            assert has_unflushed(broker)
            written = broker.store.written_end
            disk.flushes[-1].set_exception(WriteFailed("the disk said no"))
            await asyncio.sleep(0.2)
            assert broker.store.written_end > written

    run()


def test_a_delivery_whose_flush_fails_immediately_is_retried_after_a_pause(
    tmp_path: Path, disk: StuckDisk
) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path, store=SYNC_STORE) as (broker, client):
            await send_delayed(broker, client, disk)
            failed: Future[None] = Future()
            failed.set_exception(WriteFailed("the disk said no"))
            await asyncio.sleep(7190)
            with (
                patch.object(disk, "join", lambda _: failed),
                patch.object(
                    MessageWriter,
                    "append_all",
                    autospec=True,
                    side_effect=MessageWriter.append_all,
                ) as tried,
            ):
                await asyncio.sleep(11)
                assert 5 < tried.call_count <= 11, "one attempt every 100 ms"

    run()


def has_unflushed(broker: Broker) -> bool:
    return broker.store.flushed_end < broker.store.written_end


async def send_delayed(broker: Broker, client: Client, disk: StuckDisk) -> None:
    """Send a message that is due in two hours, and complete its flush."""
    sending = asyncio.create_task(client.send(named={"DELAY": "18"}))
    await wait_until(lambda: has_unflushed(broker))
    sync_log(broker.store)
    disk.flushes[-1].set_result(None)
    assert (await sending).code == ResponseCode.SUCCESS


def test_a_closing_broker_acknowledges_what_it_has_stored(tmp_path: Path, disk: StuckDisk) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path, store=SYNC_STORE) as (broker, client):
            sending = [asyncio.create_task(client.send()) for _ in range(5)]
            await wait_until(lambda: disk.flushes)
            closing = asyncio.create_task(broker.close())
            await asyncio.sleep(0.1)
            late = await client.send()
            assert late.code == ResponseCode.SERVICE_NOT_AVAILABLE
            disk.flushes[-1].set_result(None)
            assert [answer.code for answer in await asyncio.gather(*sending)] == [0] * 5
            await closing

    run()


def test_too_many_sends_that_wait_for_the_disk(tmp_path: Path, disk: StuckDisk) -> None:
    @virtual_time()
    async def run() -> None:
        overload = OverloadConfig(sends_waiting_max=3)
        async with running_broker(tmp_path, store=SYNC_STORE, overload=overload) as (_, client):
            sending = [asyncio.create_task(client.send()) for _ in range(3)]
            await asyncio.sleep(0.1)
            refused = await client.send()
            assert refused.code == ResponseCode.SYSTEM_BUSY
            assert "[OVERLOAD]3 messages of " in (refused.remark or "")
            disk.flushes[-1].set_result(None)
            assert [answer.code for answer in await asyncio.gather(*sending)] == [0, 0, 0]
            last = asyncio.create_task(client.send())
            await wait_until(lambda: not disk.flushes[-1].done())
            disk.flushes[-1].set_result(None)
            assert (await last).code == ResponseCode.SUCCESS

    run()


@pytest.mark.parametrize(
    "bound", [OverloadConfig(sends_waiting_max=3), OverloadConfig(unflushed_bytes_max=350)]
)
def test_unflushed_messages_are_bounded_without_waiters(
    tmp_path: Path, disk: StuckDisk, bound: OverloadConfig
) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path, store=SYNC_STORE, overload=bound) as (broker, client):
            answers = [await client.send(named={"WAIT": "false"}) for _ in range(6)]
            assert [answer.code for answer in answers] == [0, 0, 0, 2, 2, 2]
            written = broker.store.written_end
            await client.send_oneway()
            assert (await client.send()).code == ResponseCode.SYSTEM_BUSY
            await asyncio.sleep(10)
            assert (await client.send()).code == ResponseCode.SYSTEM_BUSY, "the disk still hangs"
            assert broker.store.written_end == written
            sync_log(broker.store)
            disk.flushes[-1].set_result(None)
            await asyncio.sleep(0)
            assert (await client.send(named={"WAIT": "false"})).code == ResponseCode.SUCCESS
            assert len(await client.messages()) == 3

    run()


def test_dropped_one_way_sends_are_logged_and_counted(
    tmp_path: Path, disk: StuckDisk, caplog: pytest.LogCaptureFixture
) -> None:
    @virtual_time()
    async def run() -> None:
        bound = OverloadConfig(sends_waiting_max=1)
        async with running_broker(tmp_path, store=SYNC_STORE, overload=bound) as (broker, client):
            await client.send(named={"WAIT": "false"})
            for _ in range(5):
                await client.send_oneway()
            assert (await client.send()).code == ResponseCode.SYSTEM_BUSY
            assert broker.state.stats.failures.times == 6
            dropped = [line for line in caplog.messages if "one-way sends dropped" in line]
            assert len(dropped) == 1, "one line in 10 s"
            disk.flushes[-1].set_result(None)

    run()


def test_delayed_deliveries_do_not_pile_up_while_the_disk_hangs(
    tmp_path: Path, disk: StuckDisk
) -> None:
    @virtual_time()
    async def run() -> None:
        bound = OverloadConfig(sends_waiting_max=2)
        async with running_broker(tmp_path, store=SYNC_STORE, overload=bound) as (broker, client):
            for level in (1, 2, 3):
                sending = asyncio.create_task(client.send(named={"DELAY": str(level)}))
                await wait_until(lambda: has_unflushed(broker))
                sync_log(broker.store)
                disk.flushes[-1].set_result(None)
                assert (await sending).code == ResponseCode.SUCCESS
            flushed = len(disk.flushes)
            await asyncio.sleep(60)
            assert len(disk.flushes) == flushed + 1
            assert len(broker.path.durability) == 2, "the third waits for its turn"
            sync_log(broker.store)
            disk.flushes[-1].set_result(None)
            await asyncio.sleep(1)
            assert len(broker.path.durability) == 1

    run()


def slow_down_appends(monkeypatch: pytest.MonkeyPatch, append_ms: int) -> None:
    append = Store.append

    def slowly(store: Store, *args: Any, **kwargs: Any) -> list[Appended]:
        virtual_loop().clock.advance_ns(append_ms * 1_000_000)
        return append(store, *args, **kwargs)

    monkeypatch.setattr(Store, "append", slowly)


async def send_concurrently(network: MemoryNetwork, address: str, count: int) -> list[int]:
    """Send a message from each of n connections, all at the same time."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(client_of(network, address, f"10.0.1.{number}"))
            for number in range(count)
        ]
        await asyncio.gather(*[client.pool.connection(address) for client in clients])
        answers = await asyncio.gather(*[client.send() for client in clients])
    return [answer.code for answer in answers]


@virtual_time()
async def test_a_stall_of_the_process_rejects_no_send(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        for stall_ms in (201, 700, 60_000):
            await client.send()
            await asyncio.sleep(0.01)
            virtual_loop().clock.advance_ns(stall_ms * 1_000_000)
            assert (await client.send()).code == ResponseCode.SUCCESS, stall_ms
            assert await send_concurrently(network, broker.address, 10) == [0] * 10
            assert broker.path.load.send_wait_ms < 200


@virtual_time()
async def test_one_slow_request_rejects_no_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        await client.send()
        slow_down_appends(monkeypatch, 700)
        assert await send_concurrently(network, broker.address, 3) == [0] * 3


@pytest.mark.parametrize("append_ms", [10, 100])
@virtual_time()
async def test_sends_queued_for_too_long_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, append_ms: int
) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        await client.send()
        slow_down_appends(monkeypatch, append_ms)
        codes = await send_concurrently(network, broker.address, 200)
        taken = codes.count(ResponseCode.SUCCESS)
        assert taken + codes.count(ResponseCode.SYSTEM_BUSY) == 200
        # 250 ms of work, of which one request counts for at most 20, and not much more.
        assert 250 / min(append_ms, 20) <= taken <= 300 / min(append_ms, 20)
        await asyncio.sleep(0.5)
        assert (await client.send()).code == ResponseCode.SUCCESS


@virtual_time()
async def test_load_is_not_measured_while_no_requests_arrive(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        await asyncio.sleep(1)
        assert broker.path.queueing_delay._timer is None


@virtual_time()
async def test_a_consumer_that_does_not_read_costs_bounded_memory_and_slows_no_other(
    tmp_path: Path,
) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        for _ in range(64):
            await client.send(body=b"x" * 8000)
        async with client_of(network, broker.address, "10.0.0.8") as sluggish:
            connection = await sluggish.pool.connection(broker.address)
            await sluggish.pull(0)
            network.stop_reading("10.0.0.8")
            pulls = [asyncio.create_task(sluggish.pull(0)) for _ in range(500)]
            await asyncio.sleep(1)
            [served] = [
                end for end in broker.connections if end.peer_address == connection.local_address
            ]
            assert served.unwritten_bytes < 2 * 1024 * 1024, "reading stops when answers pile up"
            assert (await client.send()).code == ResponseCode.SUCCESS
            for pull in pulls:
                pull.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)


@virtual_time()
async def test_the_number_of_connections_is_bounded(tmp_path: Path) -> None:
    network = MemoryNetwork()
    overload = OverloadConfig(connections_max=2)
    async with running_broker(tmp_path, network, overload=overload) as (broker, client):
        await client.send()
        async with (
            client_of(network, broker.address, "10.0.0.8") as second,
            client_of(network, broker.address, "10.0.0.7") as third,
        ):
            await second.send()
            with pytest.raises(NetworkError):
                await third.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
            assert (await client.send()).code == ResponseCode.SUCCESS
