"""Messages whose bodies are damaged on the broker's disk: failed messages, never data."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from clusters import Cluster, cluster
from consumers import Seen, committed, consuming
from turbopump.admin.range_reader import RangeReader
from turbopump.aio import Admin
from turbopump.client.calls import Found, view_message
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.pull_consumer import PullConsumer
from turbopump.errors import DamagedMessage, RecordError
from turbopump.machine.files import read_file
from turbopump.message import Message, MessageQueue, PhysicalOffset, QueueOffset
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.record import MessageView

COUNT = 20
BAD = 7
QUEUE = MessageQueue("T", "a", 0)


def damage(world: Cluster, message: MessageView) -> None:
    """Flip a bit of a body in the log of a running broker."""
    disk, log = world.disk(), world.broker().config.directory / "commitlog" / ("0" * 20)
    at = read_file(disk, log).index(message.stored_body, message.physical_offset)
    disk.flip_bit(log, at, bit=2)


async def fill(world: Cluster) -> MessageView:
    """Store messages, and return the one to be damaged."""
    await world.make_topic("T", queues=1)
    for number in range(COUNT):
        await world.send(Message("T", b"message %02d" % number))
    stored = world.messages("T")[BAD]
    damage(world, stored)
    return stored


def expected() -> list[bytes]:
    return [b"message %02d" % number for number in range(COUNT) if number != BAD]


@pytest.mark.parametrize("is_orderly", [False, True])
@virtual_time()
async def test_listeners_never_see_a_damaged_message_and_it_is_dead_lettered(
    tmp_path: Path, is_orderly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as world:
        await fill(world)
        seen = Seen()
        with caplog.at_level(logging.ERROR):
            async with consuming(world, seen, orderly=is_orderly):
                await wait_until(lambda: seen.count == COUNT - 1)
                await wait_until(lambda: bool(world.dead_letters("g")))
        found = seen.bodies if is_orderly else sorted(seen.bodies)
        assert found == expected()
        assert await committed(world, 0) == COUNT
        (letter,) = world.dead_letters("g")
        assert letter.properties["DAMAGED_BODY_CRC"] != str(letter.body_crc)
        assert letter.properties["RETRY_TOPIC"] == "T"
        assert world.broker().store.damage.messages == 1
    assert f"topic T, broker a, queue 0, offset {BAD}" in caplog.text


@virtual_time()
async def test_a_broadcast_consumer_skips_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await fill(world)
        seen = Seen()
        async with consuming(world, seen, broadcast=True, offsets_directory=tmp_path / "own"):
            await wait_until(lambda: seen.count == COUNT - 1)
        assert sorted(seen.bodies) == expected()
        assert world.dead_letters("g") == []


@virtual_time()
async def test_pulling_raises_with_the_offset_to_continue_from(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await fill(world)
        async with PullConsumer("g", session=world.session()) as consumer:
            found: list[bytes] = []
            offset, raised = 0, []
            while offset < COUNT:
                try:
                    outcome = await consumer.pull(QUEUE, offset)
                except DamagedMessage as error:
                    raised.append((error.topic, error.broker, error.queue_id, error.offset))
                    offset = error.next_offset
                    continue
                assert isinstance(outcome, Found)
                found += [message.body for message in outcome.messages]
                offset = outcome.next_offset
        assert found == expected()
        assert raised == [("T", "a", 0, BAD)]


@virtual_time()
async def test_polling_raises_in_queue_order_and_continues(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await fill(world)
        arguments: dict[str, Any] = {"session": world.session(), "start_from": "first"}
        async with LitePullConsumer("g", subscriptions={"T": "*"}, **arguments) as consumer:
            found: list[bytes | int] = []
            async with asyncio.timeout(60):
                while len(found) < COUNT:
                    try:
                        found += [message.body for message in await consumer.poll()]
                    except DamagedMessage as error:
                        found.append(error.offset)
        assert found == [*expected()[:BAD], BAD, *expected()[BAD:]]


@virtual_time()
async def test_tools_omit_it_or_refuse_to_show_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        bad = await fill(world)
        session = world.session()
        async with Admin(session=session):
            reading, found, offset = RangeReader(session), [], QueueOffset(0)
            while offset < COUNT:
                page, offset = await reading.page(QUEUE, offset)
                found += [message.body for message in page]
            assert found == expected()
            with pytest.raises(RecordError, match="does not match its checksum"):
                await view_message(
                    session, world.broker().address, PhysicalOffset(bad.physical_offset), 3000
                )


@virtual_time()
async def test_a_message_sent_back_by_another_client_gets_no_valid_checksum(tmp_path: Path) -> None:
    """A client that does not check: its retries would deliver the damaged body as a valid one."""
    async with cluster(tmp_path) as world:
        bad = await fill(world)
        queue = QUEUE
        async with PullConsumer("g", session=world.session()) as consumer:
            await consumer.send_back(bad, queue)
        assert world.retrying("g") == []
        (letter,) = world.dead_letters("g")
        assert letter.properties["DAMAGED_BODY_CRC"] == str(bad.body_crc)
        assert letter.body_crc != bad.body_crc


@virtual_time()
async def test_a_damaged_delayed_message_is_reported_and_does_not_hold_up_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as world:
        await world.make_topic("T", queues=1)
        for number in range(3):
            await world.send(Message("T", b"delayed %d" % number, delay_level=2))
        damage(world, world.messages("SCHEDULE_TOPIC_XXXX")[1])
        await asyncio.sleep(10)
        assert [message.body for message in world.messages("T")] == [b"delayed 0", b"delayed 2"]
        assert world.broker().store.damage.messages == 1
    assert "delayed message, not delivered" in caplog.text
