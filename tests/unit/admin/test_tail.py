"""Watching a topic: where it starts, and what happens when brokers and queues change."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from administered import administered, bodies, now
from consumers import send
from turbopump.admin import (
    AtTime,
    Earliest,
    Last,
)
from turbopump.admin.range_reader import RangeReader
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time


@virtual_time()
async def test_tail_starts_at_the_given_position_and_follows(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=2)
        for number in range(6):
            await send(world, [b"%d" % number], tags="odd" if number % 2 else "even")
            await asyncio.sleep(1)
        tail = admin.messages.tail
        assert await bodies(tail("T", start=Earliest(), follow=False)) == [
            b"%d" % number for number in range(6)
        ]
        assert await bodies(tail("T", follow=False)) == []
        assert await bodies(tail("T", start=Last(2), follow=False)) == [b"4", b"5"]
        assert await bodies(tail("T", start=Last(99), tags="odd", follow=False)) == [
            b"1",
            b"3",
            b"5",
        ]
        since = AtTime(datetime.fromtimestamp(now().timestamp() - 2.5, UTC))
        assert await bodies(tail("T", start=since, follow=False)) == [b"4", b"5"]
        async with aclosing(tail("T", start=Last(1), tags="odd")) as coming:
            assert (await anext(coming)).body == b"5"
            next_one = asyncio.ensure_future(anext(coming))
            await asyncio.sleep(60)
            await send(world, [b"6"], tags="even")
            await send(world, [b"7"], tags="odd")
            assert (await next_one).body == b"7"


@virtual_time()
async def test_queues_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=2, read_queues=1)
        for number in range(2):
            await send(world, [b"%d" % number], to=MessageQueue("T", "a", number))
        assert await bodies(admin.messages.tail("T", start=Earliest(), follow=False)) == [b"0"]
        span = await admin.messages.span("T", datetime.fromtimestamp(0, UTC))
        assert await bodies(admin.messages.read(span)) == [b"0"]


@virtual_time()
async def test_tail_resumes_when_a_broker_returns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        async with aclosing(admin.messages.tail("T")) as coming:
            next_one = asyncio.ensure_future(anext(coming))
            await asyncio.sleep(5)
            world.network.isolate("10.0.3.1")
            world.network.cut("10.0.3.1")
            await asyncio.sleep(30)
            world.network.heal()
            await send(world, [b"late"])
            assert (await next_one).body == b"late"
        said = [each for each in caplog.messages if "cannot be read now" in each]
        assert len(said) == 1


@virtual_time()
async def test_tail_sees_queues_that_are_added_later(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1, brokers=("a",))
        async with aclosing(admin.messages.tail("T")) as coming:
            next_one = asyncio.ensure_future(anext(coming))
            await asyncio.sleep(5)
            await admin.topics.update("T", queues=2)
            await send(world, [b"second queue"], to=MessageQueue("T", "a", 1))
            assert (await next_one).body == b"second queue"
            world.network.isolate("10.0.3.1")
            await asyncio.sleep(45)
            world.network.heal()
            await admin.topics.create("T", queues=1, brokers=("b",))
            await send(world, [b"second broker"], to=MessageQueue("T", "b", 0))
            assert (await anext(coming)).body == b"second broker"
            await send(world, [b"first queue"], to=MessageQueue("T", "a", 0))
            assert (await anext(coming)).body == b"first queue"


@virtual_time()
async def test_tail_shows_a_new_brokers_new_messages_not_its_old_ones(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"before"], to=MessageQueue("T", "b", 0))
        await world.stop_broker("b")
        await asyncio.sleep(60)
        async with aclosing(admin.messages.tail("T")) as coming:
            next_one = asyncio.ensure_future(anext(coming))
            await asyncio.sleep(60)
            await world.start_broker("b")
            await asyncio.sleep(60)
            assert not next_one.done()
            await world.stop_broker("b")
            await asyncio.sleep(180)
            await world.start_broker("b")
            await send(world, [b"since"], to=MessageQueue("T", "b", 0))
            assert (await next_one).body == b"since"


@virtual_time()
async def test_a_reader_that_is_cancelled_from_outside_ends_the_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", queues=1)
        monkeypatch.setattr(RangeReader, "page", cancelled)
        async with aclosing(admin.messages.tail("T")) as coming:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(anext(coming), 60)
