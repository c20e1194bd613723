"""Transactional messages: what a producer decides, and what consumers see of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from appending import append
from brokers import SYNC_STORE, running_broker, stuck_disk, views
from transaction_peers import (
    COMMIT,
    GROUP,
    INTERVAL_S,
    ROLLBACK,
    UNKNOWN,
    bodies,
    half_on,
    place_of,
    world,
)
from turbopump.broker.config import OverloadConfig, TransactionsConfig
from turbopump.broker.message_writer import draft_like, record_of
from turbopump.broker.transactions.half import (
    copy_of,
    final_draft,
    operation,
)
from turbopump.message import QueueOffset
from turbopump.testing import (
    virtual_loop,
    virtual_time,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request
from turbopump.wire.names import HALF_OPERATIONS_TOPIC, HALF_TOPIC
from turbopump.wire.record import MessageView, Record

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
async def test_the_operation_equals_that_of_apache_rocketmq(tmp_path: Path) -> None:
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
async def test_responses_name_the_requested_queue(tmp_path: Path) -> None:
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
async def test_half_messages_can_be_rejected(tmp_path: Path) -> None:
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


# --- invalid, late and repeated ends --------------------------------------------------------------


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


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
@virtual_time()
async def test_an_end_of_a_lost_half_message_does_not_end_another_at_its_place(
    tmp_path: Path, decision: int
) -> None:
    """A power loss took it, in asynchronous mode, before its producer decided."""
    lost, key = f"{1:032X}", f"{2:032X}"
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x", UNIQ_KEY=key)
        refused = await producer.end(place, decision, message_id=lost)
        assert refused.code == ResponseCode.SYSTEM_ERROR
        assert f"is {key}, not {lost}" in (refused.remark or "")
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == []
        # Whatever else a client names it by: the unique key, the position, or something useless.
        [half] = await client.messages(HALF_TOPIC)
        for message_id in (key, key.lower(), half.offset_id, "x", ""):
            answer = await producer.end(place, message_id=message_id)
            assert answer.code == ResponseCode.SUCCESS, message_id
        assert await bodies(client) == [b"x"]


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
async def test_repeated_ends_are_acknowledged_again_and_change_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place, other = await producer.half(b"x"), await producer.half(b"y")
        for _ in range(3):
            assert (await producer.end(place)).code == ResponseCode.SUCCESS
            assert (await producer.end(other, ROLLBACK)).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"x"]
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == [b"0", b"1"]
        back = await producer.end(place, ROLLBACK)
        assert (back.code, "already committed" in (back.remark or "")) == (1, True)
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


@virtual_time()
async def test_an_end_that_a_bug_kept_from_being_stored_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LookupError("a bug")

    async with world(tmp_path) as (broker, client, producer):
        places = [await producer.half(body) for body in (b"x", b"y", b"z")]
        with monkeypatch.context() as bug:
            bug.setattr(broker.store, "append", fail)
            # The first is stored alone, the others together.
            answers = await asyncio.gather(*(producer.end(place) for place in places))
            assert {answer.code for answer in answers} == {ResponseCode.SYSTEM_ERROR}
        assert (await producer.end(places[0], ROLLBACK)).code == ResponseCode.SUCCESS
        for place in places[1:]:
            assert (await producer.end(place)).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"y", b"z"]


# --- leftovers of other runs and other brokers ----------------------------------------------------


@virtual_time()
async def test_a_copy_without_an_operation_for_the_older_one_replaces_it(tmp_path: Path) -> None:
    """A power failure happened between the two."""
    async with world(tmp_path) as (broker, _, producer):
        place = await producer.half(b"x")
        view = broker.path.transactions.queues.half(QueueOffset(0))
        assert view is not None
        append(broker.store, [copy_of(view, 1)])
    async with world(tmp_path) as (_, client, producer):
        await asyncio.sleep(INTERVAL_S + 1)
        [asked] = producer.asked
        assert asked.message.properties["TRANSACTION_CHECK_TIMES"] == "2"
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == [b"0", b"1"]
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        await asyncio.sleep(2 * INTERVAL_S)
        assert (await bodies(client), len(producer.asked)) == ([b"x"], 1)


def immune_copy(view: MessageView) -> Record:
    """Return a copy as Apache RocketMQ creates them of half messages that are still immune."""
    first = {"TRAN_PREPARED_QUEUE_OFFSET": str(view.queue_offset)}
    return record_of(draft_like(view, HALF_TOPIC, 0, {**view.properties, **first}))


@virtual_time()
async def test_a_copy_that_names_the_first_one_stays_open_across_restarts(tmp_path: Path) -> None:
    async with world(tmp_path) as (broker, _, producer):
        await producer.half(b"x", CHECK_IMMUNITY_TIME_IN_SECONDS="600")
        view = broker.path.transactions.queues.half(QueueOffset(0))
        assert view is not None
        append(broker.store, [immune_copy(view)])
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
        append(broker.store, [immune_copy(view)])
        append(broker.store, [operation(QueueOffset(0), 0, view.store_host)])
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
            append(broker.store, [record_of(final_draft(view))])
    async with world(tmp_path, decide=lambda _: COMMIT) as (_, client, producer):
        assert (await producer.end(places[0], ROLLBACK)).code == ResponseCode.SYSTEM_ERROR
        assert (await producer.end(places[0])).code == ResponseCode.SUCCESS
        await asyncio.sleep(2 * INTERVAL_S)
        assert producer.asked == []
        assert await bodies(client) == [b"x", b"y"]
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == [b"0", b"1"]


@virtual_time()
async def test_a_commit_recreates_a_deleted_topic(tmp_path: Path) -> None:
    async with world(tmp_path) as (broker, client, producer):
        place = await producer.half(b"x", "New")
        assert await broker.state.topics.delete("New")
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        assert await bodies(client, "New") == [b"x"]


@virtual_time()
async def test_a_commit_goes_to_another_queue_if_its_own_no_longer_exists(tmp_path: Path) -> None:
    async with world(tmp_path) as (broker, client, producer):
        producer.queue_id = 3
        place = await producer.half(b"x", "New")
        topic = broker.state.topics.required("New")
        await broker.state.topics.update(
            msgspec.structs.replace(topic, read_queue_nums=2, write_queue_nums=2)
        )
        assert (await producer.end(place)).code == ResponseCode.SUCCESS
        assert await bodies(client, "New", 3 % 2) == [b"x"]


@virtual_time()
async def test_requests_with_missing_fields_are_rejected(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, _):
        for code in (RequestCode.END_TRANSACTION, RequestCode.RESUME_CHECK_HALF_MESSAGE):
            assert (await client.ask(code)).code == ResponseCode.SYSTEM_ERROR
