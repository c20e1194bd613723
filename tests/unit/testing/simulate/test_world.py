"""Machines of a run: name servers that crash with their disks, and clocks that differ."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from turbopump.testing import virtual_time
from turbopump.testing.simulate.events import BrokerDown, Down, KeyValuesRead, KeyValueStored
from turbopump.testing.simulate.history import History
from turbopump.testing.simulate.key_values import read_key_values, store_key_values
from turbopump.testing.simulate.machine_plan import MachinePlan
from turbopump.testing.simulate.plan import planned
from turbopump.testing.simulate.world import World

PLAN = replace(
    planned(2),
    nameservers=1,
    brokers=("broker-a", "broker-b"),
    machine=MachinePlan(values=((0.0, "k0"), (1.0, "k1"), (2.0, "k2"))),
)


def keys_of(history: History, kind: type[KeyValueStored]) -> set[str]:
    return {event.key for event in history.events if isinstance(event, kind)}


def keys_read(history: History) -> set[str]:
    return {key for each in history.events if isinstance(each, KeyValuesRead) for key in each.keys}


@pytest.mark.parametrize("how", [Down.KILLED, Down.POWER_LOST])
@virtual_time()
async def test_a_name_server_has_its_values_after_a_crash(how: Down) -> None:
    history = History()
    world = World(PLAN, history)
    async with world:
        await store_key_values(world)
        assert keys_of(history, KeyValueStored) == {"k0", "k1", "k2"}
        await world.kill_nameserver(0, how)
        await world.restart_nameserver(0)
        await read_key_values(world)
    assert keys_read(history) == {"k0", "k1", "k2"}
    assert world.open_nameserver_files() == []


@pytest.mark.parametrize("changes", [1, 3, 6, 9])
@virtual_time()
async def test_a_name_server_crashes_at_a_change_on_its_disk(changes: int) -> None:
    history, struck = History(), asyncio.Event()
    world = World(PLAN, history)
    async with world:
        world.crash_nameserver_at_change(0, changes, struck.set)
        storing = asyncio.create_task(store_key_values(world))
        await struck.wait()
        await world.kill_nameserver(0, Down.POWER_LOST)
        await world.restart_nameserver(0)
        await storing
        await read_key_values(world)
    assert keys_of(history, KeyValueStored) <= keys_read(history)


@virtual_time()
async def test_a_name_server_with_a_full_disk_stores_nothing_and_loses_nothing() -> None:
    history = History()
    world = World(PLAN, history)
    async with world:
        storing = asyncio.create_task(store_key_values(world))
        await asyncio.sleep(0.5)
        world.fill_disk("ns0")
        await asyncio.sleep(1)
        world.calm_disk("ns0")
        await storing
        await world.kill_nameserver(0, Down.POWER_LOST)
        await world.restart_nameserver(0)
        await read_key_values(world)
    assert keys_of(history, KeyValueStored) == keys_read(history) == {"k0", "k2"}


@virtual_time()
async def test_the_clock_of_one_machine_is_set() -> None:
    world = World(PLAN, History())
    async with world:
        clocks = {name: world.broker(name)._machine.clock for name in PLAN.brokers}
        world.machine_clock("broker-b").jump_wall(60)
        assert clocks["broker-b"].now_ms() - clocks["broker-a"].now_ms() == 60_000
        assert clocks["broker-b"].monotonic_ms() == clocks["broker-a"].monotonic_ms()
        await world.stop_broker("broker-b")
        await world.start_broker("broker-b")
        restarted = world.broker("broker-b")._machine.clock
        assert restarted.now_ms() - clocks["broker-a"].now_ms() == 60_000


@virtual_time()
async def test_a_broker_whose_disk_begins_to_fail_while_it_stops_counts_as_killed() -> None:
    history = History()
    world = World(PLAN, history)
    async with world:
        world.broker("broker-a").state.offsets.commit("g", "plain", 0, 1)
        stop = asyncio.create_task(world.end_broker("broker-a", Down.STOPPED))
        await asyncio.sleep(0)
        world.disk("broker-a").fail_syncs()
        await stop
        world.calm_disk("broker-a")
        await world.begin_broker("broker-a")
    downs = [event.how for event in history.events if isinstance(event, BrokerDown)]
    assert downs == [Down.STOPPED, Down.KILLED]
