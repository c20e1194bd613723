"""Offsets of groups: resets with previews, of running and stopped ones, and clones."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from administered import administered, commit, queue, virtual_sleep
from consumers import Seen, consuming, send
from turbopump.admin import (
    AtOffset,
    AtTime,
    Earliest,
    GroupSettings,
    Last,
    Latest,
)
from turbopump.broker.runtime_info import RuntimeInfo
from turbopump.errors import (
    AdministrationError,
    InvalidArgument,
    NotThere,
    RemoteError,
)
from turbopump.message import QueueOffset
from turbopump.testing import virtual_loop, virtual_time, wait_until


@virtual_time()
async def test_reset_of_a_stopped_group_is_previewed_and_done(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"1", b"2", b"3"], to=queue(0, "a"))
        await send(world, [b"1"], to=queue(0, "b"))
        await commit(world, {queue(0, "a"): 2, queue(0, "b"): 0})
        plan = await admin.offsets.plan("g", "T", AtOffset(1))
        assert not plan.is_running
        assert [(each.current, each.target) for each in plan.changes] == [(2, 1), (0, 1)]
        assert (plan.repeats, plan.skips) == (1, 1)
        assert (await admin.groups.progress("g")).lag == 2, "a plan changes nothing"
        await admin.offsets.apply(plan)
        assert [each.committed for each in (await admin.groups.progress("g", "T")).queues] == [1, 1]
        plan = await admin.offsets.reset("g", "T", Earliest(), [queue(0, "a")])
        assert [each.committed for each in (await admin.groups.progress("g", "T")).queues] == [0, 1]
        assert (await admin.offsets.skip("g", "T")).skips == 3
        assert (await admin.groups.progress("g")).lag == 0


@virtual_time()
async def test_reset_by_time_finds_the_first_message_since_then(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        times_ms = []
        for number in range(4):
            await send(world, [b"%d" % number] * 40, to=queue(0))
            times_ms.append(virtual_loop().clock.now_ms())
            await virtual_sleep(10)
        await admin.groups.create(GroupSettings("g"))

        async def target(epoch_ms: int) -> int:
            moment = datetime.fromtimestamp(epoch_ms / 1000, UTC)
            (change,) = (await admin.offsets.plan("g", "T", AtTime(moment))).changes
            return change.target

        assert await target(times_ms[0] - 60_000) == 0
        assert await target(times_ms[0] + 1000) == 40
        # Closer to the message before than to the one after.
        assert await target(times_ms[1] + 500) == 80
        assert await target(times_ms[1] + 9500) == 80
        assert await target(times_ms[3] + 5000) == 160


@virtual_time()
async def test_running_group_is_reset_by_offset_and_queue(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"1", b"2", b"3"], to=queue(0, "a"))
        await send(world, [b"4", b"5"], to=queue(0, "b"))
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 5, 60)
            plan = await admin.offsets.reset("g", "T", AtOffset(1), [queue(0, "a")])
            assert plan.is_running
            await wait_until(lambda: seen.count == 7, 60)
            assert sorted(seen.bodies[5:]) == [b"2", b"3"]
            await virtual_sleep(10)
            assert (await admin.groups.progress("g")).lag == 0
            await admin.offsets.reset("g", "T", Earliest())
            await wait_until(lambda: seen.count == 12, 60)


@virtual_time()
async def test_queues_that_are_now_read_only_are_included(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=2)
        began = datetime.fromtimestamp(virtual_loop().clock.now_ms() / 1000, UTC)
        await virtual_sleep(1)
        for number in range(2):
            await send(world, [b"%d" % number] * 3, to=queue(number))
        await admin.topics.update("T", queues=1)
        status = await admin.topics.status("T")
        assert [(each.queue, each.messages) for each in status.queues] == [
            (queue(0), 3),
            (queue(1), 3),
        ]
        assert all(each.last_stored_ms for each in status.queues)
        span = await admin.messages.span("T", began)
        assert span.messages == 6
        await commit(world, {queue(0): 0, queue(1): 0})
        plan = await admin.offsets.skip("g", "T")
        assert {each.queue: each.target for each in plan.changes} == {queue(0): 3, queue(1): 3}
        # Once it is closed, there is nothing left to see.
        await admin.topics.update("T", read_queues=1)
        assert (await admin.topics.status("T")).messages == 3


@virtual_time()
async def test_a_later_reset_supersedes_one_in_progress(tmp_path: Path) -> None:
    """Members pause for ten seconds before they continue."""
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"%d" % number for number in range(10)])
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 10, 60)
            await admin.offsets.reset("g", "T", AtOffset(1))
            await virtual_sleep(2)
            await admin.offsets.reset("g", "T", AtOffset(8))
            await virtual_sleep(60)
            assert seen.bodies[10:] == [b"8", b"9"]
            # Nor is one lost that arrives while a queue is released and gained again.
            for pause_ms in range(9_996, 10_012, 2):
                at = len(seen.bodies)
                await admin.offsets.reset("g", "T", AtOffset(7))
                await virtual_sleep(pause_ms / 1000)
                await admin.offsets.reset("g", "T", AtOffset(9))
                await virtual_sleep(30)
                assert seen.bodies[at:] in ([b"9"], [b"7", b"8", b"9", b"9"]), pause_ms
            at = len(seen.bodies)
            # One that arrives when the first is done and others wait is not lost either.
            for target in (2, 5, 9):
                await admin.offsets.reset("g", "T", AtOffset(target))
                await virtual_sleep(6)
            await virtual_sleep(60)
            assert seen.bodies[-1] == b"9"
            assert b"2" not in seen.bodies[at:]
            await send(world, [b"new"])
            await wait_until(lambda: seen.bodies[-1] == b"new", 60)


@virtual_time()
async def test_a_suspended_member_stays_suspended_across_overlapping_resets(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"1"])
        seen = Seen()
        async with consuming(world, seen) as consumer:
            await wait_until(lambda: seen.count == 1, 60)
            await admin.offsets.reset("g", "T", Earliest())
            await virtual_sleep(2)
            consumer.suspend()
            await admin.offsets.reset("g", "T", Earliest())
            await virtual_sleep(60)
            assert seen.count == 1
            consumer.resume()
            await wait_until(lambda: seen.count == 2, 60)


@virtual_time()
async def test_other_brokers_reset_running_groups_by_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = RuntimeInfo.__call__

    def theirs(self: RuntimeInfo) -> dict[str, str]:
        return {key: text for key, text in ours(self).items() if key != "turbopumpVersion"}

    monkeypatch.setattr(RuntimeInfo, "__call__", theirs)
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"1", b"2", b"3"], to=queue(0))
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 3, 60)
            await virtual_sleep(11)
            with pytest.raises(AdministrationError, match=r"broker a at .* by time; stop"):
                await admin.offsets.reset("g", "T", AtOffset(1))
            await admin.offsets.reset("g", "T", AtTime(datetime.fromtimestamp(0, UTC)))
            await wait_until(lambda: seen.count == 6, 60)
            await virtual_sleep(11)
            await admin.offsets.reset("g", "T", Earliest())
            await wait_until(lambda: seen.count == 9, 60)


@virtual_time()
async def test_other_brokers_reset_queues_that_have_no_offset_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = RuntimeInfo.__call__
    monkeypatch.setattr(
        RuntimeInfo,
        "__call__",
        lambda self: {k: v for k, v in ours(self).items() if k != "turbopumpVersion"},
    )
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=2)
        await send(world, [b"1"], to=queue(0))
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 1, 60)
            await admin.offsets.reset("g", "T", Earliest())
            await wait_until(lambda: seen.count == 2, 60)


@virtual_time()
async def test_the_broker_rejects_a_reset_to_a_missing_offset(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"1"], to=queue(0))
        seen = Seen()
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 1, 60)
            plan = await admin.offsets.plan("g", "T", Latest())
            far = replace(plan.changes[0], target=QueueOffset(7))
            with pytest.raises(RemoteError, match=r"broker a at .*T@a:0 has no offset 7"):
                await admin.offsets.apply(replace(plan, changes=(far,)))


@virtual_time()
async def test_offsets_are_cloned(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"1", b"2", b"3"], to=queue(0, "b"))
        await commit(world, {queue(0, "b"): 2})
        changes = await admin.offsets.plan_clone("g", "h")
        assert [(e.queue, e.current, e.target) for e in changes if e.target] == [
            (queue(0, "b"), None, 2)
        ]
        with pytest.raises(NotThere, match="no group 'h'"):
            await admin.offsets.clone("g", "h")
        await admin.offsets.clone("g", "h", create=True)
        assert "h" in world.brokers["a"].state.groups.table
        assert (await admin.groups.progress("h")).lag == 1


@virtual_time()
async def test_the_reset_error_names_what_does_not_exist(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        await admin.topics.create("T", queues=1)
        await admin.groups.create(GroupSettings("g"))
        with pytest.raises(NotThere, match="no group 'h'"):
            await admin.offsets.plan("h", "T", Latest())
        with pytest.raises(NotThere, match="no topic 'U'"):
            await admin.offsets.plan("g", "U", Latest())
        with pytest.raises(InvalidArgument, match="queue T@a:7 does not exist; there are a:0"):
            await admin.offsets.plan("g", "T", Latest(), [queue(7)])
        with pytest.raises(InvalidArgument, match="offset must be 0 or more, got -1"):
            AtOffset(-1)
        with pytest.raises(InvalidArgument, match="count must be at least 1, got 0"):
            Last(0)
