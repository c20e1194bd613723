"""A broker restarts under a consumer group: no member loses a queue or gains another's.

Members that behave like third-party clients send heartbeats up to 30 s after the restart; the
broker has to remember them until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from clusters import Cluster, Recorder, cluster
from consumers import Seen, consuming, send
from foreign_member import AFTER_ERROR_S, ForeignMember
from turbopump.client import calls
from turbopump.client.push_consumer import PushConsumer
from turbopump.errors import RemoteError
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.codes import RequestCode, ResponseCode

pytestmark = pytest.mark.slow

QUEUES = tuple(MessageQueue("T", "a", number) for number in range(5))
GRACE_S = 35

Restart = Callable[[Cluster, Recorder | None], Awaitable[None]]


async def clean(world: Cluster, recorder: Recorder | None = None) -> None:
    await world.stop_broker("a")
    await start(world, recorder)


async def kill(world: Cluster, recorder: Recorder | None = None) -> None:
    await world.crash("a")
    await start(world, recorder)


async def start(world: Cluster, recorder: Recorder | None) -> None:
    """Restart the broker; ``recorder`` keeps only the requests to the new one."""
    if recorder is not None:
        # By then the client knows that the old connection is closed.
        await asyncio.sleep(0.1)
        recorder.requests.clear()
    await world.start_broker("a")


RESTARTS = pytest.mark.parametrize("restart", [clean, kill])


def foreign(world: Cluster, number: int, **settings: object) -> ForeignMember:
    address = world.brokers["a"].address
    return ForeignMember(world.network, f"10.0.2.{number}", address, QUEUES, **settings)  # type: ignore[arg-type]


@asynccontextmanager
async def foreign_group(
    world: Cluster, phases_s: Sequence[float], **settings: object
) -> AsyncIterator[list[ForeignMember]]:
    """Run members with staggered heartbeats; yield once each has its share."""
    await world.make_topic("T", queues=5)
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(foreign(world, number, **settings).running(phase_s))
            for number, phase_s in enumerate(phases_s)
        ]
        # A lock that another member still holds is retried at the next rebalance.
        await wait_until(lambda: is_shared([member.owned for member in members]), 120)
        for member in members:
            member.moves.clear()
            member.pull_codes.clear()
        yield members


def is_shared(shares: Sequence[set[MessageQueue]]) -> bool:
    """Whether each queue has one owner, and each member a queue."""
    return all(shares) and sorted(queue for share in shares for queue in share) == sorted(QUEUES)


def owned(consumer: PushConsumer) -> set[MessageQueue]:
    running = consumer._running
    assert running is not None
    return {q for q, each in running.owned.items() if q.topic == "T" and not each.is_dropped}


async def ids(world: Cluster, group: str = "g") -> list[str]:
    async with world.session("10.0.9.7") as session:
        try:
            return await calls.consumer_ids(session, world.brokers["a"].address, group, 3000)
        except RemoteError as error:
            assert error.code == ResponseCode.SYSTEM_ERROR
            return []


# --- members that stay ----------------------------------------------------------------------------


@RESTARTS
@pytest.mark.parametrize("is_go", [False, True])
@virtual_time()
async def test_no_queue_moves_when_a_broker_restarts(
    tmp_path: Path, restart: Restart, is_go: bool
) -> None:
    async with (
        cluster(tmp_path) as world,
        foreign_group(world, (0, 9, 22), is_go=is_go) as members,
    ):
        for _ in range(4):
            # The phase differs between members and between restarts.
            await asyncio.sleep(47)
            await restart(world, None)
            assert len(await ids(world)) == 3
            await asyncio.sleep(90)
            assert [member.moves for member in members] == [[], [], []]
        for member in members:
            # Pulls work without a heartbeat, with the subscriptions that the broker has stored.
            assert set(member.pull_codes) <= {ResponseCode.PULL_NOT_FOUND}, member.pull_codes


@RESTARTS
@virtual_time()
async def test_own_and_foreign_members_keep_their_queues(tmp_path: Path, restart: Restart) -> None:
    async with cluster(tmp_path) as world:
        await world.make_topic("T", queues=5)
        async with (
            foreign(world, 1).running(3) as other,
            consuming(world, Seen(), "10.0.1.1") as first,
            consuming(world, Seen(), "10.0.1.2") as second,
        ):

            def shares() -> list[set[MessageQueue]]:
                return [other.owned, owned(first), owned(second)]

            await wait_until(lambda: is_shared(shares()), 120)
            before = [set(share) for share in shares()]
            other.moves.clear()
            for _ in range(3):
                await restart(world, None)
                for _ in range(45):
                    await asyncio.sleep(1)
                    assert shares() == before
            assert other.moves == []


@RESTARTS
@virtual_time()
async def test_a_second_restart_before_any_member_returned_forgets_no_member(
    tmp_path: Path, restart: Restart
) -> None:
    async with cluster(tmp_path) as world, foreign_group(world, (0, 1)) as members:
        for _ in range(3):
            await restart(world, None)
        assert sorted(await ids(world)) == sorted(member.client_id for member in members)
        await asyncio.sleep(90)
        assert [member.moves for member in members] == [[], []]


@virtual_time()
async def test_a_member_joining_after_a_restart_is_noticed_without_a_heartbeat(
    tmp_path: Path,
) -> None:
    """They soon pull again, and can be notified over these connections."""
    async with cluster(tmp_path) as world, foreign_group(world, (0, 1)) as members:
        beats = [member.beats for member in members]
        await wait_until(lambda: all(m.beats > n for m, n in zip(members, beats, strict=True)), 60)
        for member in members:
            member.wake()
        await asyncio.sleep(1)
        beats = [member.beats for member in members]
        await clean(world, None)
        await asyncio.sleep(AFTER_ERROR_S + 1)
        async with foreign(world, 9).running() as late:
            all_members = [*members, late]
            await wait_until(lambda: is_shared([member.owned for member in all_members]), 5)
            assert [member.beats for member in members] == beats, "without a heartbeat"


# --- members that do not return -------------------------------------------------------------------


@RESTARTS
@virtual_time()
async def test_a_member_that_died_during_the_restart_is_replaced_after_the_grace_period(
    tmp_path: Path, restart: Restart
) -> None:
    async with cluster(tmp_path) as world, foreign_group(world, (0, 1)) as (dead, alive):
        world.network.isolate(dead.host)
        await restart(world, None)
        await dead.die()
        start_s = asyncio.get_running_loop().time()
        await asyncio.sleep(GRACE_S - 1)
        assert alive.moves == []
        await wait_until(lambda: alive.owned == set(QUEUES), 5)
        gained_s = [time_s - start_s for time_s, _, _ in alive.moves]
        assert max(gained_s) < GRACE_S + 2, "it was notified, not left to its next rebalance"
        assert await ids(world) == [alive.client_id]


@RESTARTS
@virtual_time()
async def test_a_group_that_had_left_starts_without_delay(tmp_path: Path, restart: Restart) -> None:
    async with cluster(tmp_path) as world:
        async with foreign_group(world, (0, 1)) as members:
            for member in members:
                await member.leave()
        await asyncio.sleep(1)
        await restart(world, None)
        assert await ids(world) == []
        async with foreign(world, 9).running() as fresh:
            await wait_until(lambda: fresh.owned == set(QUEUES), 1)


@RESTARTS
@virtual_time()
async def test_a_member_that_disconnected_before_the_restart_is_not_remembered(
    tmp_path: Path, restart: Restart
) -> None:
    async with cluster(tmp_path) as world, foreign_group(world, (0, 1)) as (dead, alive):
        await dead.die()
        await asyncio.sleep(1)
        await restart(world, None)
        assert await ids(world) == [alive.client_id]


@virtual_time()
async def test_a_remembered_member_may_leave_before_its_first_heartbeat(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, foreign_group(world, (0, 1)) as (leaving, alive):
        await clean(world)
        await asyncio.sleep(0.5)
        await leaving.leave()
        assert await ids(world) == [alive.client_id]


# --- order ----------------------------------------------------------------------------------------


@RESTARTS
@virtual_time()
async def test_locks_survive_a_restart(tmp_path: Path, restart: Restart) -> None:
    """A member that joins during the grace period gets no queue that another has locked."""
    async with (
        cluster(tmp_path) as world,
        foreign_group(world, (0, 1), is_orderly=True) as members,
    ):
        held = {queue: member.client_id for member in members for queue in member.owned}
        await asyncio.sleep(1)
        await restart(world, None)
        locks, clock = world.brokers["a"].state.locks, world.clock
        locked = locks.held("g", clock.monotonic_ms())
        found = {queue: client_id for client_id, queues in locked.items() for queue in queues}
        assert found == held
        async with foreign(world, 9, is_orderly=True).running() as late:
            await asyncio.sleep(5)
            assert late.owned == set()
            assert late.refused_locks != []


@virtual_time()
async def test_locks_of_members_that_do_not_return_expire_after_the_grace_period(
    tmp_path: Path,
) -> None:
    async with (
        cluster(tmp_path) as world,
        foreign_group(world, (0, 1), is_orderly=True) as (dead, alive),
    ):
        await asyncio.sleep(1)
        world.network.isolate(dead.host)
        await clean(world)
        await dead.die()
        # It is notified when the grace period ends, and the locks are free by then.
        await asyncio.sleep(GRACE_S + 1)
        assert alive.owned == set(QUEUES)


@RESTARTS
@virtual_time()
async def test_locks_of_a_member_that_died_before_the_restart_end_with_the_grace_period(
    tmp_path: Path, restart: Restart
) -> None:
    """All members died, as in a rollout; a later restart does not prolong the locks either."""
    async with cluster(tmp_path) as world:
        async with foreign_group(world, (0, 1), is_orderly=True) as members:
            for member in members:
                await member.die()
        await asyncio.sleep(1)
        await restart(world, None)
        async with foreign(world, 9, is_orderly=True).running() as fresh:
            await asyncio.sleep(GRACE_S + 1)
            await restart(world, None)
            # It tries to lock at each rebalance.
            await wait_until(lambda: fresh.owned == set(QUEUES), 20)


@RESTARTS
@pytest.mark.parametrize("died_before", [True, False])
@virtual_time()
async def test_restarts_in_quick_succession_do_not_prolong_the_locks_of_the_dead(
    tmp_path: Path, restart: Restart, died_before: bool
) -> None:
    """Members that live keep their queues, although their heartbeats come every 30 s."""
    period_s = 10
    async with (
        cluster(tmp_path) as world,
        foreign_group(world, (0, 9, 22), is_orderly=True) as (dead, *others),
    ):

        def holders() -> set[str]:
            held = world.brokers["a"].state.locks.held("g", world.clock.monotonic_ms())
            return set(held)

        if died_before:
            await dead.die()
        else:
            world.network.isolate(dead.host)
        await restart(world, None)
        await dead.die()
        loop = asyncio.get_running_loop()
        start_s, living = loop.time(), {member.client_id for member in others}
        while dead.client_id in holders():
            # The file may lack the last 2 s before each restart.
            assert loop.time() - start_s < GRACE_S + 2 * period_s
            await asyncio.sleep(period_s)
            await restart(world, None)
            assert holders() >= living
        assert loop.time() - start_s >= GRACE_S
        assert holders() == living
        await wait_until(lambda: is_shared([member.owned for member in others]), 60)


# --- our own client -------------------------------------------------------------------------------


@RESTARTS
@virtual_time()
async def test_our_client_sends_its_heartbeat_first_on_every_connection(
    tmp_path: Path, restart: Restart
) -> None:
    recorder = Recorder()
    async with cluster(tmp_path) as world:
        await send(world, [b"x"])
        session = world.session("10.0.1.1", hooks=[recorder])
        address = world.brokers["a"].address
        async with consuming(world, Seen(), session=session) as consumer:
            for _ in range(5):
                await restart(world, recorder)
                await wait_until(lambda: len(codes(recorder, address)) > 1, 5)
                assert codes(recorder, address)[0] == RequestCode.HEART_BEAT
                assert await ids(world) == [consumer._session.client_id]  # type: ignore[union-attr]


def codes(recorder: Recorder, address: str) -> list[int]:
    return [command.code for place, command in recorder.requests if place == address]
