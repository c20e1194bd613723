"""Messages are acknowledged when they are as durable as the mode guarantees."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from brokers import SYNC_STORE, Client, StuckDisk, running_broker, send_header, stuck_disk
from turbopump.broker.broker import Broker
from turbopump.broker.config import OverloadConfig
from turbopump.broker.replies import Replies
from turbopump.errors import RequestTimeout, WriteFailed
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.batch import BatchEntry, encode_batch
from turbopump.wire.bodies import GroupConfig
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.headers import SendBack
from turbopump.wire.record import MessageView

Ask = Callable[[Client, MessageView], Awaitable[Command]]

ASK: dict[str, Ask] = {
    "send": lambda client, _: client.send(),
    "delayed send": lambda client, _: client.send(named={"DELAY": "18"}),
    "batch": lambda client, _: client.send(encode_batch([BatchEntry(b"1")] * 3), batch=True),
    "half message": lambda client, _: client.send(
        named={"TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": "0" * 32}, sys_flag=4
    ),
    "send-back": lambda client, failed: client.send_back(failed),
    "dead letter": lambda client, failed: client.send_back(failed, delay_level=-1),
    # What clients do when a send-back fails; the copy has WAIT=false if it was retried before.
    "retry sent as a new message": lambda client, _: client.send(
        topic="%RETRY%g", named={"WAIT": "false"}
    ),
    "dead letter sent as a new message": lambda client, _: client.send(
        topic="%RETRY%g", named={"WAIT": "false"}, reconsume_times=16
    ),
    "reply": lambda client, _: client.ask(
        RequestCode.SEND_REPLY_MESSAGE_V2, send_header(topic="DefaultCluster_REPLY_TOPIC"), b"pong"
    ),
}


def moved(view: MessageView, position: int) -> MessageView:
    """Return a message as if it were at another position of the log."""
    kind, fields = view.__reduce__()
    values: list[Any] = list(fields)
    values[values.index(view.physical_offset, 6)] = position
    return kind(*values)


BY_CONSUMERS = [what for what in ASK if "retry" in what or "dead" in what or "back" in what]


async def failing_message(broker: Broker, client: Client, disk: StuckDisk) -> MessageView:
    """Return a message that is on disk, and that its consumer cannot handle."""
    await broker.state.groups.update(GroupConfig(group_name="g"))
    sending = asyncio.create_task(client.send(b"fails"))
    await wait_until(lambda: len(broker.path.durability) == 1)
    disk.flush(broker.store)
    assert (await sending).code == ResponseCode.SUCCESS
    [message] = await client.messages()
    return message


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replies reach the requesting client."""

    async def push(*_: object) -> None:
        return None

    monkeypatch.setattr(Replies, "_push", push)


@pytest.mark.usefixtures("pushed")
@pytest.mark.parametrize("what", ASK)
def test_not_before_the_flush_and_not_after_it_failed(tmp_path: Path, what: str) -> None:
    @virtual_time()
    async def run(disk: StuckDisk) -> None:
        async with running_broker(tmp_path, store=SYNC_STORE) as (broker, client):
            failed = await failing_message(broker, client, disk)
            asking = asyncio.ensure_future(ASK[what](client, failed))
            await wait_until(lambda: len(broker.path.durability) > 0)
            await asyncio.sleep(1)
            assert not asking.done()
            disk.flush(broker.store)
            assert (await asking).code == ResponseCode.SUCCESS

            asking = asyncio.ensure_future(ASK[what](client, failed))
            await wait_until(lambda: len(broker.path.durability) > 0)
            disk.flushes[-1].set_exception(WriteFailed("the disk said no"))
            answer = await asking
            assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert "the disk said no" in (answer.remark or "")

    with stuck_disk() as disk:
        run(disk)


@pytest.mark.usefixtures("pushed")
@pytest.mark.parametrize("what", ASK)
def test_a_slow_flush_is_not_a_success(tmp_path: Path, what: str) -> None:
    """Senders get a stored status; consumers must not commit what may still be lost."""

    @virtual_time()
    async def run(disk: StuckDisk) -> None:
        overload = OverloadConfig(sync_flush_timeout_ms=1000)
        async with running_broker(tmp_path, store=SYNC_STORE, overload=overload) as (
            broker,
            client,
        ):
            failed = await failing_message(broker, client, disk)
            answer = await ASK[what](client, failed)
            assert "FLUSH_DISK_TIMEOUT" in (answer.remark or "")
            if what in BY_CONSUMERS:
                assert answer.code == ResponseCode.SYSTEM_ERROR
            else:
                assert answer.code == ResponseCode.FLUSH_DISK_TIMEOUT
                assert "msgId" in (answer.ext_fields or {})
            disk.flush(broker.store)

    with stuck_disk() as disk:
        run(disk)


@pytest.mark.parametrize("what", ASK)
def test_busy_while_too_much_waits_for_the_disk(tmp_path: Path, what: str) -> None:
    @virtual_time()
    async def run(disk: StuckDisk) -> None:
        overload = OverloadConfig(sends_waiting_max=1)
        async with running_broker(tmp_path, store=SYNC_STORE, overload=overload) as (
            broker,
            client,
        ):
            failed = await failing_message(broker, client, disk)
            await client.send(named={"WAIT": "false"})
            written = broker.store.written_end
            assert (await ASK[what](client, failed)).code == ResponseCode.SYSTEM_BUSY
            assert broker.store.written_end == written
            disk.flush(broker.store)

    with stuck_disk() as disk:
        run(disk)


async def sent_back_by_go(client: Client, position: int) -> Command:
    header = SendBack(offset=position, group="g", delay_level=0, origin_topic="T")
    command = replace(request(RequestCode.CONSUMER_SEND_MSG_BACK, header), language=Language.GO)
    return await client.pool.request(client.address, command, 3000)


def test_the_go_client_gets_no_answer_rather_than_an_error(tmp_path: Path) -> None:
    """It treats any response to a send-back as success, and retries if there is none."""

    @virtual_time()
    async def run(disk: StuckDisk) -> None:
        async with running_broker(tmp_path, store=SYNC_STORE) as (broker, client):
            failed = await failing_message(broker, client, disk)
            asking = asyncio.ensure_future(sent_back_by_go(client, failed.physical_offset))
            await wait_until(lambda: len(broker.path.durability) > 0)
            disk.flushes[-1].set_exception(WriteFailed("the disk said no"))
            with pytest.raises(RequestTimeout):
                await asking

    with stuck_disk() as disk:
        run(disk)


@pytest.mark.parametrize("refusal", ["no such message", "no retry topic", "a bug"])
def test_nor_if_nothing_was_stored(
    tmp_path: Path, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("a bug") if refusal == "a bug" else WriteFailed("no space is left")

    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path) as (broker, client):
            await broker.state.groups.update(GroupConfig(group_name="g"))
            await client.send()
            [failed] = await client.messages()
            if refusal != "no such message":
                monkeypatch.setattr(broker.state.topics, "create_internal", refuse)
            position = failed.physical_offset + (refusal == "no such message")
            with pytest.raises(RequestTimeout):
                await sent_back_by_go(client, position)
            answer = await client.send_back(moved(failed, position))
            assert answer.code != ResponseCode.SUCCESS

    run()


def test_the_progress_of_delays_waits_for_the_disk_in_asynchronous_mode_too(tmp_path: Path) -> None:
    """Otherwise a power failure would lose messages that were acknowledged long before."""

    def saved() -> str:
        return (tmp_path / "config" / "delayOffset.json").read_text().replace(" ", "")

    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path) as (broker, client):
            await client.send(b"delayed", named={"DELAY": "1"})
            broker.store.flush()
            flushed = broker.store.flushed_end
            with stuck_disk():
                await asyncio.sleep(30)
                assert len(await client.messages()) == 1
                assert broker.store.flushed_end == flushed
                assert broker.path.delays.progress.offset_table == {1: 0}
                assert '"1":1' not in saved()
            broker.store.flush()
            assert broker.path.delays.progress.offset_table == {1: 1}
            await asyncio.sleep(10)
            assert '"1":1' in saved()

    run()


def test_the_progress_of_delays_waits_for_the_flush_in_synchronous_mode(tmp_path: Path) -> None:
    @virtual_time()
    async def run(disk: StuckDisk) -> None:
        async with running_broker(tmp_path, store=SYNC_STORE) as (broker, client):
            sending = asyncio.create_task(client.send(named={"DELAY": "1"}))
            await wait_until(lambda: len(broker.path.durability) == 1)
            disk.flush(broker.store)
            await sending
            await asyncio.sleep(30)
            assert broker.store.flushed_end < broker.store.written_end, "its copy is not on disk"
            assert broker.path.delays.progress.offset_table == {1: 0}
            disk.flush(broker.store)
            await asyncio.sleep(1)
            assert broker.path.delays.progress.offset_table == {1: 1}
            assert len(await client.messages()) == 1

    with stuck_disk() as disk:
        run(disk)
