"""Transactional messages: what a producer decides, and what consumers see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from brokers import SYNC_STORE, Client, StuckDisk, running_broker, stuck_disk, views
from transaction_peers import (
    COMMIT,
    GROUP,
    ROLLBACK,
    UNKNOWN,
    Place,
    Producer,
    place_of,
    producer_of,
)
from turbopump.broker.broker import Broker
from turbopump.broker.config import OverloadConfig, TopicsConfig, TransactionsConfig
from turbopump.broker.put import draft_like, record_of
from turbopump.broker.transactions import ledger
from turbopump.broker.transactions.half import (
    copy_of,
    final_draft,
    operation,
)
from turbopump.errors import RemoteError, WriteFailed
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.testing import (
    Disk,
    MemoryNetwork,
    VirtualTimeLoop,
    virtual_loop,
    virtual_time,
    wait_until,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request
from turbopump.wire.headers import ResumeCheck, UpdateConsumerOffset
from turbopump.wire.ids import offset_id
from turbopump.wire.names import CHECKED_TOO_OFTEN_TOPIC, HALF_OPERATIONS_TOPIC, HALF_TOPIC
from turbopump.wire.record import MessageView, Record

INTERVAL_S = 60
TIMEOUT_S = 6


@lru_cache(maxsize=1)
def disk_at(loop: VirtualTimeLoop, _: Path) -> Disk:
    """Return the same disk for the same place, as a broker may be started there again."""
    return Disk(loop)


@asynccontextmanager
async def world(
    directory: Path, decide: Any = None, **changes: Any
) -> AsyncIterator[tuple[Broker, Client, Producer]]:
    """Run a broker with a client and a producer."""
    network = MemoryNetwork()
    async with (
        running_broker(directory, network, disk_at(virtual_loop(), directory), **changes) as (
            broker,
            client,
        ),
        producer_of(network, broker.address, decide=decide) as producer,
    ):
        yield broker, client, producer


async def bodies(client: Client, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    return [message.body for message in await client.messages(topic, queue_id)]


# --- the records ----------------------------------------------------------------------------------


@virtual_time()
async def test_a_half_message_is_visible_after_its_commit_only(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x", KEYS="k1", TAGS="a")
        assert await bodies(client) == []
        [half] = await client.messages(HALF_TOPIC)
        assert (half.queue_offset, half.physical_offset) == (
            place.queue_offset,
            place.physical_offset,
        )
        assert (half.sys_flag, half.prepared_transaction_offset) == (0, 0)
        assert half.properties["REAL_TOPIC"] == "T"
        assert half.properties["REAL_QID"] == "0"
        assert half.properties["WAIT"] == "true"
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        [message] = await client.messages()
        assert (message.body, message.tags, message.keys) == (b"x", "a", ["k1"])
        assert message.properties == half.properties
        assert message.sys_flag == COMMIT
        assert message.prepared_transaction_offset == half.physical_offset
        assert message.born_timestamp_ms == half.born_timestamp_ms
        assert message.born_host == half.born_host


@virtual_time()
async def test_the_operation_is_that_of_the_original(tmp_path: Path) -> None:
    async with world(tmp_path) as (broker, client, producer):
        await producer.half(b"open")
        await producer.commit(b"committed")
        await producer.end(await producer.half(b"rolled back"), ROLLBACK)
        first, second = await client.messages(HALF_OPERATIONS_TOPIC)
        assert (first.body, second.body) == (b"1", b"2")
        assert first.stored_properties == b"WAIT\x01true\x02TAGS\x01d"
        assert str(first.born_host) == str(first.store_host) == broker.address
        assert first.born_timestamp_ms == first.store_timestamp_ms
        assert (first.sys_flag, first.flag, first.reconsume_times) == (0, 0, 0)
        assert await bodies(client) == [b"committed"]


@virtual_time()
async def test_answers_name_the_queue_that_was_asked_for(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        await producer.half()
        named = {"TRAN_MSG": "true", "PGROUP": GROUP}
        answer = await client.send(b"x", queue_id=2, named=named)
        assert (answer.ext_fields or {})["queueId"] == "2"
        place = place_of(answer)
        assert place.queue_offset == 1
        await producer.end(place)
        assert await bodies(client, queue_id=2) == [b"x"]


@virtual_time()
async def test_a_group_that_the_properties_do_not_name_is_that_of_the_request(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as (_, client, producer):
        answer = await client.send(b"x", named={"TRAN_MSG": "true"}, producer_group=GROUP)
        assert (await producer.end(place_of(answer))).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"x"]


@virtual_time()
async def test_delay_counts_from_the_commit(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"later", DELAY="2")
        await asyncio.sleep(5.5)
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        await asyncio.sleep(4.5)
        assert await bodies(client) == []
        await asyncio.sleep(1)
        [message] = await client.messages()
        assert (message.body, message.properties["DELAY"]) == (b"later", "2")


@virtual_time()
async def test_retried_copies_of_committed_messages_are_no_half_messages(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, _):
        named = {"TRAN_MSG": "true", "PGROUP": GROUP, "RETRY_TOPIC": "T"}
        answer = await client.send(b"again", "%RETRY%g", named=named, max_reconsume_times=3)
        assert answer.code == ResponseCode.SUCCESS
        assert await bodies(client, "%RETRY%g") == [b"again"]


@virtual_time()
async def test_half_messages_can_be_refused(tmp_path: Path) -> None:
    refused = TransactionsConfig(rejected=True)
    async with running_broker(tmp_path, transactions=refused) as (_, client):
        answer = await client.send(named={"TRAN_MSG": "true", "PGROUP": GROUP})
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "transaction" in (answer.remark or "")


@virtual_time()
async def test_a_commit_wakes_held_pulls_and_a_half_message_does_not(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        await client.send(b"first")
        held = asyncio.create_task(client.pull(1, hold_ms=10_000))
        await asyncio.sleep(1)
        place = await producer.half(b"x")
        await asyncio.sleep(1)
        assert not held.done()
        at_ms = virtual_loop().clock.now_ms()
        await producer.end(place)
        [message] = views(await held)
        assert message.body == b"x"
        assert virtual_loop().clock.now_ms() - at_ms < 100


# --- ends that are wrong, late or repeated --------------------------------------------------------


@virtual_time()
async def test_forged_ends_change_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        plain = await client.send(b"plain")
        place, other = await producer.half(b"x"), await producer.half(b"y")
        forged = [
            (place, "other group", "another producer group"),
            (replace(place, queue_offset=1), GROUP, "tranStateTableOffset"),
            (replace(place, queue_offset=99), GROUP, "tranStateTableOffset"),
            (replace(place, queue_offset=-1), GROUP, "tranStateTableOffset"),
            (replace(place, physical_offset=other.physical_offset), GROUP, "must be 1, got 0"),
            (replace(place, physical_offset=place.physical_offset + 1), GROUP, "no half message"),
            (replace(place, physical_offset=-5), GROUP, "no half message"),
            (replace(place, physical_offset=1 << 60), GROUP, "no half message"),
            (replace(place_of(plain), queue_offset=0), GROUP, "no half message"),
        ]
        for where, group, text in forged:
            for decision in (COMMIT, ROLLBACK):
                answer = await producer.end(where, decision, group)
                assert answer.code == ResponseCode.SYSTEM_ERROR, where
                assert text in (answer.remark or ""), (where, answer.remark)
        wrong = await producer.end(place, 4)
        assert "commitOrRollback must be" in (wrong.remark or "")
        assert await bodies(client) == [b"plain"]
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == []
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"plain", b"x"]


@virtual_time()
async def test_unknown_gets_no_answer_and_changes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x")
        header = producer.end_header(place, UNKNOWN)
        with pytest.raises(Exception, match="no answer"):
            await producer.client.ask(RequestCode.END_TRANSACTION, header, timeout_ms=500)
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"x"]


@virtual_time()
async def test_repeated_ends_are_acknowledged_once_more_and_change_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place, other = await producer.half(b"x"), await producer.half(b"y")
        for _ in range(3):
            assert (await producer.end(place)).code == ResponseCode.SUCCESS
            assert (await producer.end(other, ROLLBACK)).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"x"]
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == [b"0", b"1"]
        back = await producer.end(place, ROLLBACK)
        assert (back.code, "committed already" in (back.remark or "")) == (1, True)
        forth = await producer.end(other, COMMIT)
        assert (forth.code, "already" in (forth.remark or "")) == (1, True)
        assert await bodies(client) == [b"x"]


@virtual_time()
async def test_ends_are_known_after_a_restart(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        first, second, third = [await producer.half(body) for body in (b"1", b"2", b"3")]
        await producer.end(first)
        await producer.end(second, ROLLBACK)
    async with world(tmp_path) as (_, client, producer):
        assert (await producer.end(first)).code == ResponseCode.SUCCESS
        assert (await producer.end(second, ROLLBACK)).code == ResponseCode.SUCCESS
        assert (await producer.end(first, ROLLBACK)).code == ResponseCode.SYSTEM_ERROR
        assert (await producer.end(second)).code == ResponseCode.SYSTEM_ERROR
        assert (await producer.end(third)).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"1", b"3"]


@virtual_time()
async def test_oneway_ends_count(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x")
        connection = await producer.client.pool.connection(producer.client.address)
        for _ in range(5):
            connection.oneway(
                request(RequestCode.END_TRANSACTION, producer.end_header(place, COMMIT))
            )
        await asyncio.sleep(0.1)
        assert await bodies(client) == [b"x"]


# --- durability -----------------------------------------------------------------------------------


async def half_on(disk: StuckDisk, broker: Broker, producer: Producer) -> Place:
    """Send a half message, and let the disk have it."""
    sending = asyncio.create_task(producer.half(b"x"))
    await asyncio.sleep(0.1)
    disk.flush(broker.store)
    return await sending


@virtual_time()
async def test_an_end_is_acknowledged_when_it_is_on_disk(tmp_path: Path) -> None:
    with stuck_disk() as disk:
        async with world(tmp_path, store=SYNC_STORE) as (broker, client, producer):
            place = await half_on(disk, broker, producer)
            ends = [asyncio.create_task(producer.end(place)) for _ in range(3)]
            await asyncio.sleep(1)
            assert not any(end.done() for end in ends)
            other_way = await producer.end(place, ROLLBACK)
            assert other_way.code == ResponseCode.SYSTEM_ERROR
            assert await bodies(client) == []
            disk.flush(broker.store)
            assert {(await end).code for end in ends} == {ResponseCode.SUCCESS}
            assert await bodies(client) == [b"x"]
            disk.flush(broker.store)
            await asyncio.sleep(0.1)
            assert await bodies(client, HALF_OPERATIONS_TOPIC) == [b"0"]


@virtual_time()
async def test_a_slow_disk_is_reported_and_the_commit_counts_once(tmp_path: Path) -> None:
    overload = OverloadConfig(sync_flush_timeout_ms=1000)
    with stuck_disk() as disk:
        async with world(tmp_path, store=SYNC_STORE, overload=overload) as (
            broker,
            client,
            producer,
        ):
            place = await half_on(disk, broker, producer)
            late = await producer.end(place)
            assert late.code == ResponseCode.FLUSH_DISK_TIMEOUT
            again = asyncio.create_task(producer.end(place))
            await asyncio.sleep(0.5)
            disk.flush(broker.store)
            assert (await again).code == ResponseCode.SUCCESS
            disk.flush(broker.store)
            assert await bodies(client) == [b"x"]


# --- check-backs ----------------------------------------------------------------------------------


@virtual_time()
async def test_a_producer_is_asked_about_what_does_not_end(tmp_path: Path) -> None:
    async with world(tmp_path, decide=lambda _: COMMIT) as (_, client, producer):
        await producer.commit(b"ended")
        place = await producer.half(b"x", KEYS="k")
        await asyncio.sleep(INTERVAL_S + 1)
        [asked] = producer.asked
        assert asked.place != place
        assert asked.message.body == b"x"
        assert (asked.message.topic, asked.message.queue_id) == ("T", 0)
        assert asked.message.queue_offset == asked.place.queue_offset
        assert asked.message.physical_offset == asked.place.physical_offset
        assert asked.message.properties["TRANSACTION_CHECK_TIMES"] == "1"
        assert asked.message.properties["WAIT"] == "false"
        assert asked.header.msg_id == asked.header.transaction_id == asked.message.unique_key
        assert asked.header.offset_msg_id == asked.message.offset_id
        assert await bodies(client) == [b"ended", b"x"]
        await asyncio.sleep(3 * INTERVAL_S)
        assert len(producer.asked) == 1
        assert await bodies(client) == [b"ended", b"x"]


@virtual_time()
async def test_fifteen_checks_and_then_operators_have_to_look(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        await producer.half(b"x")
        start_ms = virtual_loop().clock.now_ms()
        await asyncio.sleep(20 * INTERVAL_S)
        counts = [asked.message.properties["TRANSACTION_CHECK_TIMES"] for asked in producer.asked]
        assert counts == [str(number) for number in range(1, 16)]
        minutes = [round((asked.at_ms - start_ms) / 60_000) for asked in producer.asked]
        assert minutes == list(range(1, 16))
        [given_up] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        assert given_up.body == b"x"
        assert given_up.properties["TRANSACTION_CHECK_TIMES"] == "15"
        assert await bodies(client) == []
        # Copies and what replaces them: nothing is left open.
        halves = [view.queue_offset for view in await client.messages(HALF_TOPIC)]
        assert [b"%d" % offset for offset in halves] == await bodies(client, HALF_OPERATIONS_TOPIC)


@virtual_time()
async def test_a_late_commit_of_what_was_given_up_counts(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x")
        await asyncio.sleep(20 * INTERVAL_S)
        for asked in (place, producer.asked[-1].place, producer.asked[3].place):
            assert (await producer.end(asked)).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"x"]
        [given_up] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        resumed = await resume(client, given_up.offset_id)
        assert (resumed.code, "committed" in (resumed.remark or "")) == (1, True)


async def resume(client: Client, message_id: str) -> Any:
    return await client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, ResumeCheck(msg_id=message_id))


@virtual_time()
async def test_what_was_given_up_can_be_resumed(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        await producer.half(b"x")
        await asyncio.sleep(20 * INTERVAL_S)
        [given_up] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        producer.asked.clear()
        for _ in range(2):
            assert (await resume(client, given_up.offset_id)).code == ResponseCode.SUCCESS
        await asyncio.sleep(2 * INTERVAL_S + 1)
        counts = [asked.message.properties["TRANSACTION_CHECK_TIMES"] for asked in producer.asked]
        assert counts == ["1", "2"]
        producer.decide = lambda _: COMMIT
        await asyncio.sleep(INTERVAL_S)
        assert await bodies(client) == [b"x"]
        assert (await resume(client, given_up.offset_id)).code == ResponseCode.SYSTEM_ERROR


@virtual_time()
async def test_what_was_resumed_and_rolled_back_has_ended(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x")
        await asyncio.sleep(17 * INTERVAL_S)
        [letter] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        header = ResumeCheck(msg_id=letter.offset_id)
        assert (await client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, header)).code == 0
        producer.decide = lambda _: ROLLBACK
        await asyncio.sleep(INTERVAL_S + 10)
        assert (await producer.end(place)).code == ResponseCode.SYSTEM_ERROR
        refused = await client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, header)
        assert "ended already" in (refused.remark or "")
        assert await bodies(client) == []


@virtual_time()
async def test_what_was_given_up_and_rolled_back_has_ended(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x")
        await asyncio.sleep(17 * INTERVAL_S)
        [letter] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        for _ in range(2):
            assert (await producer.end(place, ROLLBACK)).code == ResponseCode.SUCCESS
            assert "rolled back" in ((await producer.end(place)).remark or "")
    async with world(tmp_path) as (_, client, producer):
        assert (await producer.end(place, ROLLBACK)).code == ResponseCode.SUCCESS
        assert "rolled back" in ((await producer.end(place)).remark or "")
        assert "ended already" in ((await resume(client, letter.offset_id)).remark or "")
        await asyncio.sleep(3 * INTERVAL_S)
        assert producer.asked == []
        assert await bodies(client) == []


@virtual_time()
async def test_only_half_messages_can_be_resumed(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        sent = await client.send(b"plain")
        ended = await producer.half(b"x")
        await producer.end(ended, ROLLBACK)
        plain_id = (sent.ext_fields or {})["msgId"]
        [half] = await client.messages(HALF_TOPIC)
        nowhere = offset_id(half.store_host, PhysicalOffset(1 << 40))
        for wrong in (plain_id, half.offset_id, nowhere, "nonsense"):
            assert (await resume(client, wrong)).code == ResponseCode.SYSTEM_ERROR, wrong
        open_half = await producer.half(b"y")
        await asyncio.sleep(2 * INTERVAL_S + 1)
        copy = producer.asked[-1]
        assert (await resume(client, copy.message.offset_id)).code == ResponseCode.SUCCESS
        await asyncio.sleep(INTERVAL_S)
        assert producer.asked[-1].message.properties["TRANSACTION_CHECK_TIMES"] == "1"
        assert (await producer.end(open_half)).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"plain", b"y"]


@virtual_time()
async def test_ends_may_name_an_older_copy(tmp_path: Path) -> None:
    """The producer answers the first check after the third was sent; its own end comes late too."""
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x")
        await asyncio.sleep(3 * INTERVAL_S + 1)
        assert len(producer.asked) == 3
        for where in (producer.asked[0].place, place, producer.asked[2].place):
            assert (await producer.end(where)).code == ResponseCode.SUCCESS
        await asyncio.sleep(3 * INTERVAL_S)
        assert len(producer.asked) == 3
        assert await bodies(client) == [b"x"]


@virtual_time()
async def test_young_and_immune_half_messages_are_not_checked(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, _client, producer):
        await producer.half(b"immune", CHECK_IMMUNITY_TIME_IN_SECONDS="200")
        await asyncio.sleep(INTERVAL_S - TIMEOUT_S + 1)
        await producer.half(b"young")
        await producer.half(b"odd", CHECK_IMMUNITY_TIME_IN_SECONDS="soon")
        await asyncio.sleep(TIMEOUT_S)
        assert producer.asked == []
        await asyncio.sleep(INTERVAL_S)
        assert [asked.message.body for asked in producer.asked] == [b"young", b"odd"]
        await asyncio.sleep(2 * INTERVAL_S)
        assert producer.asked[-3].message.body == b"immune"
        assert producer.asked[-3].message.properties["TRANSACTION_CHECK_TIMES"] == "1"


@virtual_time()
async def test_an_immune_half_message_is_not_used_up_by_waiting(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x", CHECK_IMMUNITY_TIME_IN_SECONDS="3600")
        await asyncio.sleep(3540)
        assert producer.asked == []
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        await asyncio.sleep(300)
        assert (await bodies(client), producer.asked) == ([b"x"], [])


@virtual_time()
async def test_a_day_without_a_producer_costs_no_check(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        async with producer_of(network, broker.address) as producer:
            await producer.half(b"x")
        await asyncio.sleep(24 * 3600)
        assert len(await client.messages(HALF_TOPIC)) == 1
        async with producer_of(network, broker.address, decide=lambda _: COMMIT) as producer:
            await asyncio.sleep(INTERVAL_S + 1)
            assert producer.asked[0].message.properties["TRANSACTION_CHECK_TIMES"] == "1"
        assert await bodies(client) == [b"x"]


@pytest.mark.slow
@virtual_time()
async def test_half_messages_older_than_the_log_keeps_are_given_up(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send(b"x", named={"TRAN_MSG": "true", "PGROUP": GROUP})
        await asyncio.sleep(71 * 3600)
        assert await bodies(client, CHECKED_TOO_OFTEN_TOPIC) == []
        # Renewed once, so that it is not deleted with the log before.
        assert len(await client.messages(HALF_TOPIC)) == 2
        await asyncio.sleep(2 * 3600)
        assert await bodies(client, CHECKED_TOO_OFTEN_TOPIC) == [b"x"]


@virtual_time()
async def test_producers_of_a_group_are_asked_in_turn(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        running_broker(tmp_path, network) as (broker, client),
        producer_of(network, broker.address, "p1") as first,
        producer_of(network, broker.address, "p2", decide=lambda _: COMMIT) as second,
        producer_of(network, broker.address, "p3", group="others") as other,
    ):
        for number in range(20):
            await first.half(b"%d" % number)
        await asyncio.sleep(INTERVAL_S + 1)
        assert (len(first.asked), len(second.asked), len(other.asked)) == (10, 10, 0)
        assert len(await bodies(client)) == 10
        first.decide = lambda _: ROLLBACK
        await asyncio.sleep(INTERVAL_S)
        assert len(await bodies(client)) == 15
        await asyncio.sleep(INTERVAL_S)
        assert (len(first.asked), len(second.asked)) == (15, 15)


@virtual_time()
async def test_checks_go_on_after_a_restart_where_they_were(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, _client, producer):
        await producer.half(b"x")
        await asyncio.sleep(5 * INTERVAL_S + 1)
        assert len(producer.asked) == 5
        early = producer.asked[1].place
    async with world(tmp_path) as (broker, client, producer):
        await asyncio.sleep(2 * INTERVAL_S + 1)
        counts = [asked.message.properties["TRANSACTION_CHECK_TIMES"] for asked in producer.asked]
        assert counts == ["6", "7"]
        assert (await producer.end(early)).code == ResponseCode.SUCCESS
        await asyncio.sleep(2 * INTERVAL_S)
        assert await bodies(client) == [b"x"]
        offsets = broker.state.offsets
        assert offsets.find("CID_RMQ_SYS_TRANS", HALF_TOPIC, 0) == broker.queue_end(HALF_TOPIC, 0)
        operations = broker.queue_end(HALF_OPERATIONS_TOPIC, 0)
        assert offsets.find("CID_RMQ_SYS_TRANS", HALF_OPERATIONS_TOPIC, 0) == operations


@virtual_time()
async def test_an_end_for_an_old_copy_just_after_a_restart(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, _client, producer):
        place = await producer.half(b"x")
        await asyncio.sleep(2 * INTERVAL_S + 1)
    async with world(tmp_path) as (_, client, producer):
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        await asyncio.sleep(3 * INTERVAL_S)
        assert (await bodies(client), producer.asked) == ([b"x"], [])


@virtual_time()
async def test_thousands_open_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as (broker, client, producer):
        places = [await producer.half(b"%d" % number) for number in range(2000)]
        producer.decide = lambda asked: COMMIT if int(asked.message.body) % 2 else ROLLBACK
        await asyncio.sleep(INTERVAL_S + 5)
        assert sorted(map(int, await bodies(client))) == list(range(1, 2000, 2))
        assert len(producer.asked) == 2000
        await asyncio.sleep(INTERVAL_S)
        assert len(producer.asked) == 2000
        assert not broker.path.transactions.ledger.open
        for place in places[:4]:
            await producer.end(place)
        assert len(await bodies(client)) == 1000


@virtual_time()
async def test_what_stays_open_for_long_is_copied_behind_what_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a restart would read everything since; the copy costs no check."""
    monkeypatch.setattr(ledger, "CLOSED_MAX", 10)
    async with world(tmp_path) as (broker, client, producer):
        place = await producer.half(b"x", CHECK_IMMUNITY_TIME_IN_SECONDS="3600")
        for _ in range(20):
            await producer.commit()
        await asyncio.sleep(2 * INTERVAL_S + 20)
        copy = (await client.messages(HALF_TOPIC))[-1]
        assert copy.queue_offset == 21
        assert copy.properties["TRANSACTION_CHECK_TIMES"] == "0"
        assert broker.state.offsets.find("CID_RMQ_SYS_TRANS", HALF_TOPIC, 0) == 21
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        await asyncio.sleep(3600)
        assert (await bodies(client))[-1] == b"x"
        assert len(await bodies(client)) == 21
        assert producer.asked == []


@virtual_time()
async def test_what_was_copied_without_a_check_is_open_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "CLOSED_MAX", 10)
    async with world(tmp_path) as (broker, _, producer):
        place = await producer.half(b"x", CHECK_IMMUNITY_TIME_IN_SECONDS="3600")
        for _ in range(20):
            await producer.commit()
        await asyncio.sleep(INTERVAL_S - 2)
        # The operation of the second one must be read again, and with it that of the older copy.
        await producer.half(b"young")
        await producer.commit()
        await asyncio.sleep(10)
        assert list(broker.path.transactions.ledger.open) == [23]
    async with world(tmp_path) as (broker, client, producer):
        await asyncio.sleep(INTERVAL_S + 1)
        assert [asked.message.body for asked in producer.asked] == [b"young"]
        assert len(broker.path.transactions.ledger.open) == 2
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        assert (await bodies(client))[-1] == b"x"


@virtual_time()
async def test_progress_is_the_brokers_own(tmp_path: Path) -> None:
    """Clients that commit offsets for its group cannot make it pass over what is open."""
    async with world(tmp_path) as (broker, client, producer):
        await producer.half(b"x")
        await asyncio.sleep(INTERVAL_S + 10)
        offsets = broker.state.offsets
        before = offsets.find("CID_RMQ_SYS_TRANS", HALF_TOPIC, 0)
        forged = UpdateConsumerOffset(
            consumer_group="CID_RMQ_SYS_TRANS", topic=HALF_TOPIC, queue_id=0, commit_offset=2
        )
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, forged)
        await asyncio.sleep(6)
        assert offsets.find("CID_RMQ_SYS_TRANS", HALF_TOPIC, 0) == before == 1


@virtual_time()
async def test_a_full_table_of_topics_does_not_stop_the_checks(tmp_path: Path) -> None:
    async with world(tmp_path) as (broker, _, producer):
        await producer.half(b"x")
        topics = len(broker.state.topics.table)
    full = TopicsConfig(topics_max=topics)
    async with world(tmp_path, topics=full) as (_, client, producer):
        await asyncio.sleep(17 * INTERVAL_S)
        assert len(producer.asked) == 15
        assert await bodies(client, CHECKED_TOO_OFTEN_TOPIC) == [b"x"]


@virtual_time()
async def test_a_check_whose_copy_is_lost_is_repeated(tmp_path: Path) -> None:
    with stuck_disk() as disk:
        async with world(tmp_path, store=SYNC_STORE) as (broker, client, producer):
            place = await half_on(disk, broker, producer)
            flushes = len(disk.flushes)
            await wait_until(lambda: len(disk.flushes) > flushes, 2 * INTERVAL_S)
            account = broker.path.transactions.ledger
            assert list(account.open) == [1]
            disk.flushes[-1].set_exception(WriteFailed("the disk said no"))
            await asyncio.sleep(1)
            assert list(account.open) == [0]
            assert account.is_open(QueueOffset(0))
            assert producer.asked == []
            ending = asyncio.create_task(producer.end(place))
            await asyncio.sleep(0.1)
            disk.flush(broker.store)
            assert (await ending).code == ResponseCode.SUCCESS
            disk.flush(broker.store)
            assert await bodies(client) == [b"x"]


@virtual_time()
async def test_a_commit_that_is_lost_can_be_repeated(tmp_path: Path) -> None:
    with stuck_disk() as disk:
        async with world(tmp_path, store=SYNC_STORE) as (broker, _client, producer):
            place = await half_on(disk, broker, producer)
            ending = asyncio.create_task(producer.end(place))
            await asyncio.sleep(0.1)
            disk.flushes[-1].set_exception(WriteFailed("the disk said no"))
            assert (await ending).code == ResponseCode.SERVICE_NOT_AVAILABLE
            again = asyncio.create_task(producer.end(place, ROLLBACK))
            await asyncio.sleep(0.1)
            disk.flush(broker.store)
            assert (await again).code == ResponseCode.SUCCESS


@pytest.mark.parametrize(
    "error",
    [RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, "no space is left"), LookupError("a bug")],
)
@virtual_time()
async def test_operations_that_a_full_disk_refuses_are_written_later(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as (broker, client, producer):
        places = [await producer.half(b"%d" % number) for number in range(3)]
        groups = broker.path.put.groups

        def refuse(*_: object) -> None:
            raise error

        monkeypatch.setattr(broker.path.put, "groups", refuse)
        for place in places:
            assert (await producer.end(place)).code == ResponseCode.SUCCESS
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == []
        assert (await producer.end(places[0])).code == ResponseCode.SUCCESS
        monkeypatch.setattr(broker.path.put, "groups", groups)
        await asyncio.sleep(5)
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == [b"0", b"1", b"2"]
        assert await bodies(client) == [b"0", b"1", b"2"]


@virtual_time()
async def test_a_producer_that_does_not_read_uses_up_few_checks(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with (
        running_broker(tmp_path, network) as (broker, _client),
        producer_of(network, broker.address) as producer,
    ):
        for _ in range(300):
            await producer.half(bytes(50_000))
        await asyncio.sleep(INTERVAL_S - 1)
        network.stop_reading("10.0.8.1")
        await asyncio.sleep(INTERVAL_S)
        checked = [half for half in broker.path.transactions.ledger.open.values() if half.checks]
        assert 0 < len(checked) < 200


# --- what other runs and other brokers left -------------------------------------------------------


@virtual_time()
async def test_a_copy_without_an_operation_for_the_older_one_replaces_it(tmp_path: Path) -> None:
    """A power failure came between the two."""
    async with world(tmp_path) as (broker, _, producer):
        place = await producer.half(b"x")
        view = broker.path.transactions.queues.half(QueueOffset(0))
        assert view is not None
        broker.store.append([copy_of(view, 1)])
    async with world(tmp_path) as (_, client, producer):
        await asyncio.sleep(INTERVAL_S + 1)
        [asked] = producer.asked
        assert asked.message.properties["TRANSACTION_CHECK_TIMES"] == "2"
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == [b"0", b"1"]
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        await asyncio.sleep(2 * INTERVAL_S)
        assert (await bodies(client), len(producer.asked)) == ([b"x"], 1)


def immune_copy(view: MessageView) -> Record:
    """Return a copy as Apache RocketMQ makes them of half messages that wait out their immunity."""
    first = {"TRAN_PREPARED_QUEUE_OFFSET": str(view.queue_offset)}
    return record_of(draft_like(view, HALF_TOPIC, 0, {**view.properties, **first}))


@virtual_time()
async def test_a_copy_that_names_the_first_one_stays_open_over_restarts(tmp_path: Path) -> None:
    async with world(tmp_path) as (broker, _, producer):
        await producer.half(b"x", CHECK_IMMUNITY_TIME_IN_SECONDS="600")
        view = broker.path.transactions.queues.half(QueueOffset(0))
        assert view is not None
        broker.store.append([immune_copy(view)])
    for _ in range(2):
        async with world(tmp_path) as (broker, _, producer):
            await asyncio.sleep(INTERVAL_S + 1)
            assert list(broker.path.transactions.ledger.open) == [1]
    async with world(tmp_path, decide=lambda _: COMMIT) as (_, client, producer):
        await asyncio.sleep(600)
        assert (await bodies(client), len(producer.asked)) == ([b"x"], 1)


@virtual_time()
async def test_a_copy_ends_with_the_first_one_that_it_names(tmp_path: Path) -> None:
    """Apache RocketMQ copies immune half messages, and ends them by the first copy's offset."""
    async with world(tmp_path) as (broker, _, producer):
        await producer.half(b"x", CHECK_IMMUNITY_TIME_IN_SECONDS="1")
        view = broker.path.transactions.queues.half(QueueOffset(0))
        assert view is not None
        broker.store.append([immune_copy(view)])
        broker.store.append([operation(QueueOffset(0), 0, view.store_host)])
    async with world(tmp_path) as (broker, client, producer):
        await asyncio.sleep(2 * INTERVAL_S)
        assert producer.asked == []
        assert not broker.path.transactions.ledger.open
        assert await bodies(client) == []


@virtual_time()
async def test_a_commit_without_an_operation_is_found(tmp_path: Path) -> None:
    async with world(tmp_path) as (broker, _, producer):
        places = [await producer.half(body) for body in (b"x", b"y")]
        for place in places:
            view = broker.path.transactions.queues.half(QueueOffset(place.queue_offset))
            assert view is not None
            broker.store.append([record_of(final_draft(view))])
    async with world(tmp_path, decide=lambda _: COMMIT) as (_, client, producer):
        assert (await producer.end(places[0], ROLLBACK)).code == ResponseCode.SYSTEM_ERROR
        assert (await producer.end(places[0])).code == ResponseCode.SUCCESS
        await asyncio.sleep(2 * INTERVAL_S)
        assert producer.asked == []
        assert await bodies(client) == [b"x", b"y"]
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == [b"0", b"1"]


@virtual_time()
async def test_a_commit_makes_its_topic_if_that_is_gone(tmp_path: Path) -> None:
    async with world(tmp_path) as (broker, client, producer):
        place = await producer.half(b"x", "New")
        assert await broker.state.topics.delete("New")
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        assert await bodies(client, "New") == [b"x"]


@virtual_time()
async def test_requests_without_their_fields_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, _):
        for code in (RequestCode.END_TRANSACTION, RequestCode.RESUME_CHECK_HALF_MESSAGE):
            assert (await client.ask(code)).code == ResponseCode.SYSTEM_ERROR
