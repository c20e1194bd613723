"""Check-backs: producers are asked about half messages that stay open."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from appending import append
from brokers import SMALL_STORE, SYNC_STORE, Client, StuckDisk, running_broker, stuck_disk
from transaction_peers import (
    COMMIT,
    GROUP,
    INTERVAL_S,
    ROLLBACK,
    TIMEOUT_S,
    Place,
    Producer,
    bodies,
    disk_at,
    half_on,
    producer_of,
    world,
)
from turbopump.broker.broker import Broker
from turbopump.broker.config import TopicsConfig
from turbopump.broker.message_writer import record_of
from turbopump.broker.transactions import ledger, queues, transactions
from turbopump.broker.transactions.half import final_draft
from turbopump.broker.transactions.transactions import Transactions
from turbopump.errors import RemoteError, WriteFailed
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.testing import (
    MemoryNetwork,
    virtual_loop,
    virtual_time,
    wait_until,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.headers import ResumeCheck, UpdateConsumerOffset
from turbopump.wire.hosts import host
from turbopump.wire.ids import offset_id
from turbopump.wire.names import CHECKED_TOO_OFTEN_TOPIC, HALF_OPERATIONS_TOPIC, HALF_TOPIC


@virtual_time()
async def test_a_producer_is_asked_about_open_transactions(tmp_path: Path) -> None:
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
async def test_after_fifteen_checks_the_transaction_is_left_to_operators(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        await producer.half(b"x")
        start_ms = virtual_loop().clock.now_ms()
        await asyncio.sleep(20 * INTERVAL_S)
        counts = [asked.message.properties["TRANSACTION_CHECK_TIMES"] for asked in producer.asked]
        assert counts == [str(number) for number in range(1, 16)]
        minutes = [round((asked.at_ms - start_ms) / 60_000) for asked in producer.asked]
        assert minutes == list(range(1, 16))
        [abandoned] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        assert abandoned.body == b"x"
        assert abandoned.properties["TRANSACTION_CHECK_TIMES"] == "15"
        assert await bodies(client) == []
        # Copies and their replacements: nothing is left open.
        halves = [view.queue_offset for view in await client.messages(HALF_TOPIC)]
        assert [b"%d" % offset for offset in halves] == await bodies(client, HALF_OPERATIONS_TOPIC)


@virtual_time()
async def test_a_late_commit_of_an_abandoned_transaction_counts(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        place = await producer.half(b"x")
        await asyncio.sleep(20 * INTERVAL_S)
        for asked in (place, producer.asked[-1].place, producer.asked[3].place):
            assert (await producer.end(asked)).code == ResponseCode.SUCCESS
        assert await bodies(client) == [b"x"]
        [abandoned] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        resumed = await resume(client, abandoned.offset_id)
        assert (resumed.code, "committed" in (resumed.remark or "")) == (1, True)


async def resume(client: Client, message_id: str) -> Command:
    return await client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, ResumeCheck(msg_id=message_id))


@virtual_time()
async def test_an_abandoned_transaction_can_be_resumed(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, client, producer):
        await producer.half(b"x")
        await asyncio.sleep(20 * INTERVAL_S)
        [abandoned] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        producer.asked.clear()
        for _ in range(2):
            assert (await resume(client, abandoned.offset_id)).code == ResponseCode.SUCCESS
        await asyncio.sleep(2 * INTERVAL_S + 1)
        counts = [asked.message.properties["TRANSACTION_CHECK_TIMES"] for asked in producer.asked]
        assert counts == ["1", "2"]
        producer.decide = lambda _: COMMIT
        await asyncio.sleep(INTERVAL_S)
        assert await bodies(client) == [b"x"]
        assert (await resume(client, abandoned.offset_id)).code == ResponseCode.SYSTEM_ERROR


@virtual_time()
async def test_a_resumed_and_rolled_back_transaction_has_ended(tmp_path: Path) -> None:
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
        assert "already ended" in (refused.remark or "")
        assert await bodies(client) == []


@virtual_time()
async def test_an_abandoned_and_rolled_back_transaction_has_ended(tmp_path: Path) -> None:
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
        assert "already ended" in ((await resume(client, letter.offset_id)).remark or "")
        await asyncio.sleep(3 * INTERVAL_S)
        assert producer.asked == []
        assert await bodies(client) == []


# --- without an index, the broker knows what it has abandoned since its start ---------------------

NO_INDEX = replace(SMALL_STORE, index_enabled=False)


@pytest.mark.parametrize("named", [0, 4, -1])
@virtual_time()
async def test_a_late_commit_needs_no_index(tmp_path: Path, named: int) -> None:
    async with world(tmp_path, store=NO_INDEX) as (_, client, producer):
        first = await producer.half(b"x")
        await asyncio.sleep(20 * INTERVAL_S)
        places = [first, *(asked.place for asked in producer.asked)]
        for place in (places[named], places[-1], first):
            assert (await producer.end(place)).code == ResponseCode.SUCCESS
            assert "committed" in ((await producer.end(place, ROLLBACK)).remark or "")
        assert await bodies(client) == [b"x"]
        [abandoned] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        assert "already ended" in ((await resume(client, abandoned.offset_id)).remark or "")


@virtual_time()
async def test_a_late_rollback_needs_no_index(tmp_path: Path) -> None:
    async with world(tmp_path, store=NO_INDEX) as (_, client, producer):
        place = await producer.half(b"x")
        await asyncio.sleep(20 * INTERVAL_S)
        for where in (place, producer.asked[-1].place):
            assert (await producer.end(where, ROLLBACK)).code == ResponseCode.SUCCESS
            assert "rolled back" in ((await producer.end(where)).remark or "")
        [abandoned] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        assert "already ended" in ((await resume(client, abandoned.offset_id)).remark or "")
        assert await bodies(client) == []


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
@virtual_time()
async def test_resuming_needs_no_index(tmp_path: Path, decision: int) -> None:
    async with world(tmp_path, store=NO_INDEX) as (_, client, producer):
        await producer.half(b"x")
        await asyncio.sleep(20 * INTERVAL_S)
        [abandoned] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
        given_up = producer.asked[-1].place
        producer.asked.clear()
        assert (await resume(client, abandoned.offset_id)).code == ResponseCode.SUCCESS
        producer.decide = lambda _: decision
        await asyncio.sleep(2 * INTERVAL_S)
        assert len(producer.asked) == 1
        # It no longer counts as abandoned.
        assert "replaced by a copy" in ((await producer.end(given_up)).remark or "")
        assert "already ended" in ((await resume(client, abandoned.offset_id)).remark or "")
        assert await bodies(client) == ([b"x"] if decision == COMMIT else [])


@virtual_time()
async def test_a_transaction_being_committed_late_cannot_be_resumed(tmp_path: Path) -> None:
    with stuck_disk() as disk:
        async with world(tmp_path, store=SYNC_STORE) as (broker, client, producer):
            place = await half_on(disk, broker, producer)
            flushing = asyncio.create_task(flush_always(disk, broker))
            await asyncio.sleep(20 * INTERVAL_S)
            flushing.cancel()
            [abandoned] = await client.messages(CHECKED_TOO_OFTEN_TOPIC)
            ending = asyncio.create_task(producer.end(place))
            await asyncio.sleep(0.1)
            resumed = await resume(client, abandoned.offset_id)
            assert "being ended" in (resumed.remark or "")
            disk.flush(broker.store)
            assert (await ending).code == ResponseCode.SUCCESS
            assert await bodies(client) == [b"x"]


async def flush_always(disk: StuckDisk, broker: Broker) -> None:
    while True:
        await asyncio.sleep(0.1)
        if not disk.flushes[-1].done():
            disk.flush(broker.store)


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
    """The producer answers the first check after the third was sent; its own end is late too."""
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
async def test_several_ends_for_old_copies_just_after_a_restart(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, _client, producer):
        places = [await producer.half(body) for body in (b"x", b"y", b"z")]
        await asyncio.sleep(2 * INTERVAL_S + 1)
    async with world(tmp_path) as (_, client, producer):
        begun_s = virtual_loop().time()
        ends = await asyncio.gather(*map(producer.end, places))
        assert {end.code for end in ends} == {ResponseCode.SUCCESS}
        assert virtual_loop().time() - begun_s < 1
        assert sorted(await bodies(client)) == [b"x", b"y", b"z"]


@pytest.mark.slow
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
async def test_half_messages_older_than_the_retention_are_abandoned(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send(b"x", named={"TRAN_MSG": "true", "PGROUP": GROUP})
        await asyncio.sleep(71 * 3600)
        assert await bodies(client, CHECKED_TOO_OFTEN_TOPIC) == []
        # Renewed once, so that it is not deleted with the previous log file.
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
async def test_checks_resume_after_a_restart(tmp_path: Path) -> None:
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


@pytest.mark.slow
@virtual_time()
async def test_thousands_of_open_transactions(tmp_path: Path) -> None:
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
async def test_long_open_transactions_are_copied_behind_ended_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a restart would read everything since; the copy costs no check."""
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
async def test_a_transaction_copied_without_a_check_is_open_after_a_restart(
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
    """Clients that commit offsets for its group cannot make it skip open transactions."""
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
async def test_operations_that_a_full_disk_rejects_are_written_later(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as (broker, client, producer):
        places = [await producer.half(b"%d" % number) for number in range(3)]
        right = broker.path.writer.append_all

        def refuse(*_: object) -> None:
            raise error

        monkeypatch.setattr(broker.path.writer, "append_all", refuse)
        for place in places:
            assert (await producer.end(place)).code == ResponseCode.SUCCESS
        assert await bodies(client, HALF_OPERATIONS_TOPIC) == []
        assert (await producer.end(places[0])).code == ResponseCode.SUCCESS
        monkeypatch.setattr(broker.path.writer, "append_all", right)
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


@virtual_time()
async def test_transactions_of_an_earlier_run_are_read_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer names a half message that has a newer copy, known only from the queue."""
    async with world(tmp_path) as (_, _, producer):
        places = [await producer.half(b"%d" % number) for number in range(2)]
        await asyncio.sleep(INTERVAL_S + 1)
        for _ in range(60):
            await producer.half(b"open")
    slices = in_turn = most = 0
    load_open = Transactions.load_open

    def end_turn() -> None:
        nonlocal in_turn
        in_turn = 0

    async def counted(*args: Any) -> bool:
        nonlocal slices, in_turn, most
        if not in_turn:
            virtual_loop().call_soon(end_turn)
        slices, in_turn = slices + 1, in_turn + 1
        most = max(most, in_turn)
        return await load_open(*args)

    monkeypatch.setattr(transactions, "RUN_COUNT", 10)
    monkeypatch.setattr(Transactions, "load_open", counted)
    async with world(tmp_path) as (_, client, producer):
        second = (await client.messages(HALF_TOPIC))[1]
        answers = await asyncio.gather(
            *(producer.end(places[0]) for _ in range(3)), resume(client, second.offset_id)
        )
        assert [answer.code for answer in answers] == [ResponseCode.SUCCESS] * 4
        await asyncio.sleep(1)
        assert await bodies(client) == [b"0"]
    assert slices >= 7
    assert most == 1


# --- half messages that are not in memory ---------------------------------------------------------

READ_MS = 700


@asynccontextmanager
async def cold_halves(
    directory: Path, after_s: float = 0, committed: int = 0
) -> AsyncIterator[tuple[Client, Producer, list[Place]]]:
    """Run a broker, for some time until its half messages are only on a slow disk."""
    async with world(directory) as (broker, _, producer):
        places = [await producer.half(b"half") for _ in range(5)]
        for place in places[:committed]:
            # A crash came before their operations.
            view = broker.path.transactions.queues.half(QueueOffset(place.queue_offset))
            assert view is not None
            append(broker.store, [record_of(final_draft(view))])
    async with world(directory) as (_, client, producer):
        await asyncio.sleep(after_s)
        disk = disk_at(virtual_loop(), directory)
        disk.drop_caches("*/commitlog/*")
        disk.drop_caches("*/index/*")
        disk.read_time = READ_MS / 1000
        yield client, producer, places
        disk.heal()
        assert disk.operations["fetch"]


async def end_first(_client: Client, producer: Producer, first: Place) -> Command:
    return await producer.end(first)


async def resume_first(client: Client, _producer: Producer, first: Place) -> Command:
    position = PhysicalOffset(first.physical_offset)
    return await resume(client, offset_id(host("10.0.0.1", 10911), position))


@pytest.mark.parametrize("request_of", [end_first, resume_first])
@virtual_time()
async def test_sends_are_answered_while_the_disk_reads_half_messages_for_a_request(
    tmp_path: Path, request_of: Callable[[Client, Producer, Place], Awaitable[Command]]
) -> None:
    async with cold_halves(tmp_path) as (client, producer, places):
        answer = asyncio.ensure_future(request_of(client, producer, places[0]))
        begun_ms = virtual_loop().clock.monotonic_ms()
        await sends_until(answer.done, client)
        assert (await answer).code == ResponseCode.SUCCESS
        # Of the log, and of the index.
        assert virtual_loop().clock.monotonic_ms() - begun_ms >= 2 * READ_MS


@virtual_time()
async def test_ends_in_an_earlier_run_are_searched_for_on_disk(tmp_path: Path) -> None:
    """Requests about a transaction are decided in their order."""
    async with cold_halves(tmp_path, committed=3) as (client, producer, places):
        decisions = (COMMIT, ROLLBACK, COMMIT)
        committed, opened = places[2:4]
        answers = asyncio.gather(
            *(producer.end(place, each) for place in (committed, opened) for each in decisions),
            *(producer.end(places[4], each) for each in (ROLLBACK, COMMIT)),
        )
        await sends_until(answers.done, client)
        expected = [ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR, ResponseCode.SUCCESS] * 2
        expected += expected[:2]
        assert [answer.code for answer in await answers] == expected
        assert (await bodies(client)).count(b"half") == 3 + 1


@virtual_time()
async def test_sends_are_answered_while_the_disk_reads_half_messages_for_checks(
    tmp_path: Path,
) -> None:
    async with cold_halves(tmp_path, INTERVAL_S - 1, committed=2) as (client, producer, places):
        await sends_until(lambda: len(producer.asked) == len(places) - 2, client)


@virtual_time()
async def test_a_half_message_that_the_disk_cannot_read_keeps_no_others_from_being_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    immunity = {"CHECK_IMMUNITY_TIME_IN_SECONDS": str(int(1.5 * INTERVAL_S))}
    async with world(tmp_path) as (_, _, producer):
        for _ in range(5):
            await producer.half(b"half", **immunity)
    async with world(tmp_path) as (_, _, producer):
        disk = disk_at(virtual_loop(), tmp_path)
        await asyncio.sleep(INTERVAL_S + 1)
        assert not producer.asked
        disk.drop_caches("*/commitlog/*")
        disk.fail("fetch", times=1)
        await asyncio.sleep(INTERVAL_S)
        assert len({asked.message.unique_key for asked in producer.asked}) == 4
        assert "half message 0 of group 'pg' cannot be checked" in caplog.text
        await asyncio.sleep(INTERVAL_S)
        assert len({asked.message.unique_key for asked in producer.asked}) == 5


async def sends_until(condition: Callable[[], bool], client: Client) -> None:
    """Send messages until something is true; the broker must answer each immediately."""
    clock = virtual_loop().clock
    while not condition():
        begun_ms = clock.monotonic_ms()
        await asyncio.sleep(0.01)
        assert (await client.send(b"meanwhile", queue_id=1)).code == ResponseCode.SUCCESS
        assert clock.monotonic_ms() - begun_ms < 50


# --- the cost of a round --------------------------------------------------------------------------


async def reads_of_rounds(directory: Path, ended: int) -> list[Counter[str]]:
    """Return what three rounds read from the store, with five transactions open among others."""
    reads: Counter[str] = Counter()
    async with world(directory) as (broker, _, producer):
        for _ in range(5):
            await producer.half(b"open")
            for number in range(ended):
                place = await producer.half(b"ended")
                await producer.end(place, COMMIT if number % 2 else ROLLBACK)
        rounds = []
        with counted(broker, reads):
            for _ in range(3):
                await asyncio.sleep(INTERVAL_S)
                rounds.append(reads.copy())
                reads.clear()
        assert len(producer.asked) == 3 * 5
    return rounds


@contextmanager
def counted(broker: Broker, calls: Counter[str]) -> Iterator[None]:
    """Count the reads of a broker's store, and the records that transactions decode."""

    def counting(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return right(*args, **options)

        return call

    with ExitStack() as patches:
        for where, name in (
            (broker.store, "read"),
            (broker.store, "message_at"),
            (broker.store, "find_by_key"),
            (queues, "decode_record"),
        ):
            wrapped = counting(name, getattr(where, name))
            patches.enter_context(patch.object(where, name, wrapped))
        yield


@virtual_time()
async def test_the_cost_of_a_round_depends_on_open_not_on_sent_transactions(tmp_path: Path) -> None:
    few = await reads_of_rounds(tmp_path / "few", 3)
    many = await reads_of_rounds(tmp_path / "many", 60)
    assert many == few
    # Each open one is read once from its queue, then once for each of its copies.
    assert few[0]["decode_record"] == 10
    assert few[1]["decode_record"] == few[2]["decode_record"] == 5
