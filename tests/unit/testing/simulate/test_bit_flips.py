"""Flipped bits: what they hit is known, and nothing else is lost."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from turbopump.message import Message
from turbopump.testing import virtual_time
from turbopump.testing.simulate.bit_flips import BitFlips
from turbopump.testing.simulate.bodies import body_of
from turbopump.testing.simulate.events import BitFlipped, Down, Stored
from turbopump.testing.simulate.history import History
from turbopump.testing.simulate.plan import PLAIN, planned
from turbopump.testing.simulate.store_contents import contents_of
from turbopump.testing.simulate.world import World

BROKER = "broker-a"
PLAN = replace(planned(2), nameservers=1, brokers=(BROKER,), faults=(), opens_twice=False)
KEYS = [f"m{number}" for number in range(20)]


async def start_with_messages(world: World) -> None:
    """Store messages and offsets, twice, so that the table has a backup; then stop the broker."""
    await world.make_topic(PLAIN, queues=1)
    await world.send(*(Message(PLAIN, body_of(key, 100)) for key in KEYS))
    for offset in (1, 2):
        world.broker().state.offsets.commit("g", PLAIN, 0, offset)
        await world.broker().state.offsets.saving.save()
    await world.end_broker(BROKER, Down.STOPPED)


async def restarted(world: World) -> list[Stored]:
    await world.begin_broker(BROKER)
    contents = contents_of(world.broker().store, BROKER, world.damaged)
    return next(list(found) for queue, (_, found) in contents.items() if queue.topic == PLAIN)


@virtual_time()
async def test_a_flipped_body_is_known_by_its_message() -> None:
    history = History()
    async with (world := World(PLAN, history)):
        await start_with_messages(world)
        assert BitFlips(world, BROKER, Random(1)).body()
        found = await restarted(world)
    (flip,) = (event for event in history.events if isinstance(event, BitFlipped))
    assert [message.key for message in found] == KEYS
    assert [message.key for message in found if message.is_damaged] == [flip.key]
    assert flip.queue is not None
    assert KEYS[flip.offset] == flip.key


@pytest.mark.parametrize("seed", range(8))
@virtual_time()
async def test_a_flipped_unit_is_rebuilt(seed: int) -> None:
    async with (world := World(PLAN, History())):
        await start_with_messages(world)
        assert BitFlips(world, BROKER, Random(seed)).unit()
        assert [message.key for message in await restarted(world)] == KEYS


@virtual_time()
async def test_a_damaged_table_names_what_its_backup_has() -> None:
    history = History()
    async with (world := World(PLAN, history)):
        await start_with_messages(world)
        chance = Random(0)
        while not any(
            isinstance(event, BitFlipped) and event.committed for event in history.events
        ):
            assert BitFlips(world, BROKER, chance).table()
        await restarted(world)
        assert world.broker().state.offsets.find("g", PLAIN, 0) == 1
