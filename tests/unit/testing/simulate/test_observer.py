"""What the simulator sees of brokers, even while they stop."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from turbopump.testing import virtual_time
from turbopump.testing.loop import wait_until
from turbopump.testing.simulate.checks import all_checks
from turbopump.testing.simulate.events import BrokerUp, Committed, Down
from turbopump.testing.simulate.history import History
from turbopump.testing.simulate.ledger import Ledger
from turbopump.testing.simulate.observer import Observer
from turbopump.testing.simulate.plan import planned
from turbopump.testing.simulate.roles import is_ready
from turbopump.testing.simulate.world import World

PLAN = replace(planned(2), nameservers=1, brokers=("broker-a",))
TOPIC, GROUP = next(iter(PLAN.queues)), PLAN.groups[0].name


@pytest.mark.parametrize("last", [1, 3], ids=["lower", "higher"])
@virtual_time()
async def test_a_commit_accepted_while_a_broker_stops_is_seen(last: int) -> None:
    """As from a new owner of a queue, which started before the previous owner had committed."""
    history = History(all_checks(Ledger(PLAN)))
    world = World(PLAN, history)
    async with world:
        observer, broker = Observer(world), world.broker("broker-a")
        observer.look()
        broker.state.offsets.commit(GROUP, TOPIC, 0, 2)
        observer.look()
        stop = asyncio.create_task(world.end_broker("broker-a", Down.STOPPED))
        await asyncio.sleep(0)
        broker.state.offsets.commit(GROUP, TOPIC, 0, last)
        await stop
        await world.begin_broker("broker-a")
        observer.look()
    commits = [event for event in history.events if isinstance(event, Committed)]
    assert [event.offset for event in commits] == [2, last]
    assert history.violations == []


@virtual_time()
async def test_a_commit_is_no_part_of_a_start_that_waits_for_name_servers() -> None:
    """A broker serves before they answer: consumers that miss lost messages rewind by then."""
    history = History(all_checks(Ledger(PLAN)))
    world = World(PLAN, history)
    async with world:
        observer, broker = Observer(world), world.broker("broker-a")
        observer.look()
        broker.state.offsets.commit(GROUP, TOPIC, 0, 2)
        observer.look()
        await world.end_broker("broker-a", Down.STOPPED)
        world.network.partition("ns0", *world.host_names("broker-a"))
        start = asyncio.create_task(world.begin_broker("broker-a"))
        await wait_until(lambda: any(map(is_ready, world.starting.values())))
        observer.look()
        world.starting["broker-a"].state.offsets.commit(GROUP, TOPIC, 0, 1)
        await start
        observer.look()
    last_start = [event for event in history.events if isinstance(event, BrokerUp)][-1]
    # Lowered to the end of the empty queue.
    assert list(last_start.committed.values()) == [0]
    commits = [event for event in history.events if isinstance(event, Committed)]
    assert [event.offset for event in commits] == [2, 1]
    assert history.violations == []
