"""Delayed messages that were delivered shortly before a crash are not delivered again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from clusters import Cluster, cluster
from turbopump.broker import delay_recovery
from turbopump.machine.files import read_file, write_file
from turbopump.message import Message
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire import properties
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request
from turbopump.wire.headers import SendMessageV2

LEVEL = 2
DELAY_S = 5


async def send_raw(world: Cluster, bodies: Iterable[bytes], named: dict[str, str]) -> None:
    async with world.session("10.0.9.9") as session:
        for body in bodies:
            header = SendMessageV2(
                producer_group="pg",
                topic="T",
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=0,
                sys_flag=0,
                born_timestamp=1,
                flag=0,
                properties=properties.encode({**named, "DELAY": str(LEVEL)}),
            )
            command = request(RequestCode.SEND_MESSAGE_V2, header, body)
            answer = await session.request(world.brokers["a"].address, command, 3000)
            assert answer.code == ResponseCode.SUCCESS


def counts(world: Cluster) -> Counter[bytes]:
    return Counter(message.body for message in world.messages("T"))


def saved(world: Cluster) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = json.loads(read_file(world.disk(), progress_path(world)))
    return table


def progress_path(world: Cluster) -> Path:
    return world.directory / "broker-1" / "config" / "delayOffset.json"


async def restart(world: Cluster) -> None:
    await world.crash("a")
    await world.start_broker("a")
    await asyncio.sleep(2 * DELAY_S)


@virtual_time()
async def test_a_crash_repeats_no_delivery(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await world.make_topic("T")
        bodies = [b"%d" % number for number in range(600)]
        for at in range(0, 600, 100):
            # Saved every 10 s, delivered continuously.
            await world.send(
                *(Message("T", body, delay_level=LEVEL) for body in bodies[at : at + 100])
            )
            await asyncio.sleep(3)
        assert 0 < saved(world)["offsetTable"][str(LEVEL)] < sum(counts(world).values())
        for _ in range(3):
            await restart(world)
        assert counts(world) == Counter(bodies)


@virtual_time()
async def test_the_first_deliveries_of_a_level_are_not_repeated_either(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await world.make_topic("T")
        await world.send(Message("T", b"x", delay_level=LEVEL))
        await asyncio.sleep(DELAY_S + 1)
        assert counts(world) == {b"x": 1}
        await restart(world)
        assert counts(world) == {b"x": 1}


@pytest.mark.parametrize("skipped_min", [0, 500])
@virtual_time()
async def test_a_clock_that_was_set_back_repeats_no_delivery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped_min: int
) -> None:
    """The copies appear to be older than the messages themselves."""
    monkeypatch.setattr(delay_recovery, "_SKIPPED_MIN", skipped_min)
    async with cluster(tmp_path) as world:
        await world.make_topic("T")
        await world.send(*(Message("T", b"%d" % n, delay_level=LEVEL) for n in range(8)))
        virtual_loop().clock.jump_wall(-3600)
        await asyncio.sleep(DELAY_S + 1)
        await world.send(*(Message("T", b"later") for _ in range(8)))
        delivered = counts(world)
        assert sum(delivered.values()) == 16
        assert saved(world)["offsetTable"].get(str(LEVEL), 0) < 8, "not all of it is saved"
        await restart(world)
        assert counts(world) == delivered


@virtual_time()
async def test_many_messages_that_are_older_than_any_copy_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delay_recovery, "_SKIPPED_MIN", 20)
    async with cluster(tmp_path) as world:
        await world.make_topic("T", queues=1)
        await world.send(Message("T", b"x", delay_level=18))
        await world.send(*(Message("T", b"other") for _ in range(30)))
        await asyncio.sleep(7200 + 1)
        find: Callable[..., int] = delay_recovery.delivered_end
        # The delayed message and its copy, nothing else.
        store = world.brokers["a"].store
        assert find(store, 17, 0, 7_200_000, 0, examined_max=2) == 1


@virtual_time()
async def test_messages_that_are_not_delivered_yet_are_delivered(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await world.make_topic("T")
        await world.send(Message("T", b"early", delay_level=LEVEL))
        await asyncio.sleep(DELAY_S - 1)
        await world.send(Message("T", b"late", delay_level=LEVEL))
        await asyncio.sleep(2)
        await restart(world)
        assert counts(world) == {b"early": 1, b"late": 1}


@virtual_time()
async def test_the_same_message_sent_twice_is_two_messages(tmp_path: Path) -> None:
    """A copy of one does not prove that the other was delivered."""
    named = {"UNIQ_KEY": "0" * 32}
    async with cluster(tmp_path) as world:
        await world.make_topic("T")
        await send_raw(world, [b"x"], named)
        await asyncio.sleep(DELAY_S - 1)
        await send_raw(world, [b"x"] * 3, named)
        await asyncio.sleep(2)
        assert counts(world) == {b"x": 1}
        await restart(world)
        assert counts(world) == {b"x": 4}


@virtual_time()
async def test_messages_without_a_unique_key_are_repeated_rather_than_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await world.make_topic("T")
        await send_raw(world, [b"x", b"y"], {})
        await asyncio.sleep(DELAY_S + 1)
        await restart(world)
        assert counts(world) == {b"x": 2, b"y": 2}


@virtual_time()
async def test_a_file_without_log_end_positions_is_accepted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await world.make_topic("T")
        await world.send(Message("T", b"x", delay_level=LEVEL))
        await asyncio.sleep(20)
        await world.send(Message("T", b"y", delay_level=LEVEL))
        await asyncio.sleep(DELAY_S + 1)
        await world.crash("a")
        text = json.dumps({"offsetTable": {str(LEVEL): 1}})
        write_file(world.disk(), progress_path(world), text.encode())
        await world.start_broker("a")
        await asyncio.sleep(1)
        assert counts(world) == {b"x": 1, b"y": 2}


@virtual_time()
async def test_the_search_for_copies_is_bounded(tmp_path: Path) -> None:
    find: Callable[..., int] = delay_recovery.delivered_end
    async with cluster(tmp_path) as world:
        await world.make_topic("T")
        await send_raw(world, [b"x"] * 20, {"UNIQ_KEY": "0" * 32})
        await asyncio.sleep(DELAY_S + 1)
        store = world.brokers["a"].store
        assert find(store, LEVEL - 1, 0, DELAY_S * 1000, 0) == 20
        assert find(store, LEVEL - 1, 0, DELAY_S * 1000, 0, examined_max=0) == 0
        assert find(store, LEVEL - 1, 0, DELAY_S * 1000, store.written_end) == 0
