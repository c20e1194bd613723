"""Bodies that contain the bytes of a record, at the position that those bytes name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from brokers import Client, running_broker
from store_work import log_of
from turbopump.broker.broker import Broker
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store import record_starts
from turbopump.store.log_scan import scan
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire import properties
from turbopump.wire.bodies import ConsumerData, Heartbeat
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.headers import (
    ConsumeDirectly,
    EndTransaction,
    ResumeCheck,
    SendBack,
    ViewMessage,
)
from turbopump.wire.hosts import host
from turbopump.wire.ids import offset_id
from turbopump.wire.names import HALF_TOPIC
from turbopump.wire.record import FIXED_BYTES, Record, decode_record
from turbopump.wire.sysflag import Transaction

HOST = host("10.0.0.1", 10911)
NAMED = {"UNIQ_KEY": "U", "PGROUP": "pg", "REAL_TOPIC": "T", "REAL_QID": "0"}


async def forge(
    broker: Broker, client: Client, topic: str = "T", claimed: str = HALF_TOPIC
) -> PhysicalOffset:
    """Send a body that looks like the first message of a queue; return where it begins."""
    position = PhysicalOffset(broker.store.written_end + FIXED_BYTES - 3)
    forged = Record(
        topic=claimed.encode(),
        queue_id=0,
        body=b"forged",
        properties=properties.encode(NAMED).encode(),
        born_timestamp_ms=1,
        born_host=HOST,
        store_host=HOST,
    ).encode(QueueOffset(0), position, 2)
    await client.send(forged, topic=topic)
    at = log_of(broker.store).entry_at(position)
    assert at is not None
    assert at.topic == claimed.encode()
    return position


async def view(client: Client, position: int) -> Command:
    return await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessage(offset=position))


async def send_back(client: Client, position: int) -> Command:
    header = SendBack(offset=position, group="g", delay_level=1, origin_topic="T")
    return await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)


async def resume(client: Client, position: int) -> Command:
    header = ResumeCheck(msg_id=offset_id(HOST, PhysicalOffset(position)))
    return await client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, header)


async def end(client: Client, position: int) -> Command:
    header = EndTransaction(
        producer_group="pg",
        tran_state_table_offset=0,
        commit_log_offset=position,
        commit_or_rollback=int(Transaction.COMMIT),
        from_transaction_check=False,
        msg_id="U",
        transaction_id="U",
    )
    return await client.ask(RequestCode.END_TRANSACTION, header)


async def consume(client: Client, position: int) -> Command:
    data = ConsumerData(group_name="g", subscription_data_set=[])
    beat = Heartbeat(client_id="c", consumer_data_set=[data])
    await client.ask(RequestCode.HEART_BEAT, body=beat.encode())
    message_id = offset_id(HOST, PhysicalOffset(position))
    header = ConsumeDirectly(consumer_group="g", client_id="c", msg_id=message_id)
    return await client.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)


REFUSALS = {
    view: "can not find message by the offset",
    send_back: "look message by offset failed",
    resume: "no open or abandoned half message",
    end: "no half message at commitLogOffset",
    consume: "no message",
}


@pytest.mark.parametrize("request_of", REFUSALS, ids=lambda each: each.__name__)
def test_a_record_in_a_body_is_no_message(tmp_path: Path, request_of: object) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path) as (broker, client):
            await client.send(b"before")
            position = await forge(broker, client)
            assert callable(request_of)
            before = broker.store.written_end
            answer = await request_of(client, position)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert REFUSALS[request_of] in (answer.remark or "")
            assert broker.store.written_end == before

    run()


@virtual_time()
async def test_a_forged_record_of_the_own_queue_is_no_message(tmp_path: Path) -> None:
    """It names a queue that exists, and an offset that another message has."""
    async with running_broker(tmp_path) as (broker, client):
        await client.send(b"before")
        position = await forge(broker, client, claimed="T")
        assert (await view(client, position)).code == ResponseCode.SYSTEM_ERROR


@virtual_time()
async def test_messages_of_deleted_topics_are_found_unlike_what_is_in_their_bodies(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        for number in range(3):
            await client.send(b"%d" % number)
        position = await forge(broker, client)
        [*_, last] = await client.messages()
        await broker.administration.operations.delete_topic("T")
        found = decode_record(whole_body(await view(client, last.physical_offset)))
        assert found.body == last.body
        assert (await send_back(client, last.physical_offset)).code == ResponseCode.SUCCESS
        for request_of in (view, send_back):
            assert (await request_of(client, position)).code == ResponseCode.SYSTEM_ERROR


@virtual_time()
async def test_the_log_is_searched_in_one_slice_per_turn_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_starts, "SLICE_BYTES", 1000)
    slices, in_turn, most = 0, 0, 0

    def end_turn() -> None:
        nonlocal in_turn
        in_turn = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal slices, in_turn, most
        if not in_turn:
            virtual_loop().call_soon(end_turn)
        slices, in_turn = slices + 1, in_turn + 1
        most = max(most, in_turn)
        return scan(*args, **options)

    monkeypatch.setattr(record_starts, "scan", counted)
    async with running_broker(tmp_path) as (broker, client):
        for _ in range(50):
            await client.send(b"x" * 900)
        position = await forge(broker, client)
        await broker.administration.operations.delete_topic("T")
        searching = [ask(client, position) for ask in REFUSALS for _ in range(5)]
        answers = await asyncio.gather(*searching)
        assert {answer.code for answer in answers} == {ResponseCode.SYSTEM_ERROR}
    assert slices >= 50 * 15
    assert most == 1
