"""Administration of groups: settings, progress, members and their queues."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from administered import administered, commit, queue, virtual_sleep
from consumers import Seen, always, consuming, send
from turbopump.admin import Destination, GroupSettings
from turbopump.admin.members import Difference, version_name
from turbopump.broker.lag import Lag
from turbopump.client.delivery.results import ConsumeResult
from turbopump.client.producer import Producer
from turbopump.client.push_consumer import PushConsumer
from turbopump.client.start_position import StartFrom
from turbopump.errors import (
    AdministrationError,
    AlreadyThere,
    InvalidArgument,
    NotThere,
    StillInUse,
)
from turbopump.filters.sql92 import Sql
from turbopump.message import Message
from turbopump.store.store import Store
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.bodies import ConsumeStats, GroupConfig

CLUSTER = "DefaultCluster"


@virtual_time()
async def test_a_group_is_created_changed_and_deleted(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        settings = GroupSettings("g", retries_max=3)
        assert await admin.groups.create(settings) == ("a", "b")
        with pytest.raises(AlreadyThere, match="group 'g'"):
            await admin.groups.create(settings)
        one, other = await admin.groups.update("g", retries_max=5, can_consume=False)
        after = one.after
        assert (one.before.retries_max, after.retries_max, after.can_consume) == (3, 5, False)
        assert (one.broker, other.broker, other.after) == ("a", "b", after)
        found = {each.settings.group: each for each in await admin.groups.list()}
        assert found["g"].settings == after
        assert (found["g"].brokers, found["g"].members) == (("a", "b"), 0)
        await admin.topics.create("%DLQ%g", queues=1)
        await admin.topics.create("%RETRY%g", queues=1)
        assert await admin.groups.delete("g") == ("%RETRY%g",)
        assert "%DLQ%g" in await admin.topics.names()
        assert all("g" not in broker.state.groups.table for broker in world.brokers.values())
        for refused in (admin.groups.delete("g"), admin.groups.update("g", retries_max=1)):
            with pytest.raises(NotThere, match="no group 'g'"):
                await refused
        for bad, named in (
            (GroupSettings("h", retry_queues=-1), "retry_queues must be 0 to 1024, got -1"),
            (GroupSettings("h", retry_queues=1025), "retry_queues must be 0 to 1024, got 1025"),
            (GroupSettings("h", retries_max=-2), "retries_max must be -1 to"),
        ):
            with pytest.raises(InvalidArgument, match=named):
                await admin.groups.create(bad)
        with pytest.raises(InvalidArgument, match="nothing to change; specify"):
            await admin.groups.update("h")


@virtual_time()
async def test_an_update_changes_only_given_settings_and_creates_no_group(
    tmp_path: Path,
) -> None:
    async with administered(tmp_path, "abc") as (world, admin):
        tables = {name: broker.state.groups for name, broker in world.brokers.items()}
        for name, retries in (("a", 3), ("b", 7)):
            await tables[name].update(GroupConfig(group_name="g", retry_max_times=retries))
        changes = await admin.groups.update("g", can_broadcast=False)
        assert [(each.broker, each.after.retries_max) for each in changes] == [("a", 3), ("b", 7)]
        assert [tables[name].table["g"].retry_max_times for name in "ab"] == [3, 7]
        assert not any(tables[name].table["g"].consume_broadcast_enable for name in "ab")
        assert "g" not in tables["c"].table


@virtual_time()
async def test_the_replicas_that_a_group_reads_from(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.groups.create(GroupSettings("g", slow_broker_id=2))
        await admin.groups.update("g", broker_id=1)
        for broker in world.brokers.values():
            config = broker.state.groups.table["g"]
            assert (config.broker_id, config.which_broker_when_consume_slowly) == (1, 2)
        [change] = {each.after for each in await admin.groups.update("g", slow_broker_id=3)}
        assert (change.broker_id, change.slow_broker_id) == (1, 3)
        with pytest.raises(InvalidArgument, match="slow_broker_id must be 0 to"):
            await admin.groups.update("g", slow_broker_id=-1)


@virtual_time()
async def test_progress_of_a_stopped_group(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=2)
        await send(world, [b"1", b"2", b"3"], to=queue(1, "b"))
        await commit(world, {queue(1, "b"): 1})
        await virtual_sleep(60)
        progress = await admin.groups.progress("g")
        assert not progress.is_running
        assert progress.lag == 2
        behind = next(each for each in progress.queues if each.lag)
        assert behind.queue == queue(1, "b")
        assert (behind.committed, behind.max_offset, behind.client_id) == (1, 3, None)
        assert behind.delay_ms == pytest.approx(60_000, abs=1000)
        assert progress.delay_ms == behind.delay_ms
        assert (await admin.groups.progress("g", "T")).lag == 2
        with pytest.raises(NotThere, match="no group 'h'"):
            await admin.groups.progress("h")


@virtual_time()
async def test_the_lag_of_a_running_group_that_has_committed_nothing(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=2)
        await send(world, [b"%d" % number for number in range(203)])
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen, start_from="last"):
            await wait_until(lambda: seen.running > 0, 60)
            await virtual_sleep(30)
            progress = await admin.groups.progress("g")
            assert progress.is_running
            assert (progress.lag, progress.known_lag) == (203, 203)
            assert progress.delay_ms == pytest.approx(30_000, abs=5000)
            seen.hold.set()
            await wait_until(lambda: seen.count == 203, 60)
            await virtual_sleep(30)
            assert (await admin.groups.progress("g")).lag == 0


@virtual_time()
async def test_progress_includes_the_rate_of_failures(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=2)
        await send(world, [b"%d" % number for number in range(12)])
        seen = Seen(always(ConsumeResult.RETRY_LATER))
        async with consuming(world, seen):
            await wait_until(lambda: seen.count == 12, 60)
            assert (await admin.groups.progress("g")).failed_per_s == 0, "not sampled yet"
            seen.decide = always(ConsumeResult.SUCCESS)
            await virtual_sleep(59)
            progress = await admin.groups.progress("g")
            assert progress.failed_per_s == pytest.approx(12 / 60, rel=0.25)
            assert (await admin.groups.progress("g", "T")).failed_per_s == progress.failed_per_s
            await virtual_sleep(120)
            assert (await admin.groups.progress("g")).failed_per_s == 0


@virtual_time()
async def test_redriven_letters_count_before_the_group_has_retried_any(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("%DLQ%g", queues=1)
        await send(world, [b"%d" % number for number in range(10)], "%DLQ%g")
        await admin.topics.create("T", queues=1)
        await admin.topics.create("%RETRY%g", queues=1)
        await commit(world, {queue(0): 0})
        assert (await admin.groups.progress("g")).lag == 0
        redriven = [each async for each in admin.dead_letters.redrive("g", to=Destination.RETRY)]
        progress = await admin.groups.progress("g")
        assert (len(redriven), progress.lag) == (10, 10)
        assert {each.queue.topic for each in progress.queues if each.lag} == {"%RETRY%g"}


@pytest.mark.parametrize(
    ("start_from", "lag"), [("first", 3), ("last", None), (datetime(2026, 1, 1, tzinfo=UTC), None)]
)
@virtual_time()
async def test_the_lag_where_only_members_may_know_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_from: StartFrom, lag: int | None
) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=2)
        # Too many messages for members to start with the first, whatever they want.
        monkeypatch.setattr(Store, "is_far_behind", lambda *_: True)
        await send(world, [b"1", b"2", b"3"], to=queue(0))
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen, start_from=start_from) as consumer:
            await wait_until(lambda: owned_by(consumer) == 2, 60)
            progress = await admin.groups.progress("g", "T")
        assert progress.lag == lag
        assert progress.unknown_queues == (() if lag else (queue(0),))


@virtual_time()
async def test_the_start_of_a_stopped_group_is_unknown_in_long_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=2)
        for number in (0, 1):
            await send(world, [b"1", b"2", b"3"], to=queue(number))
        await commit(world, {queue(0): 1})
        assert (await admin.groups.progress("g")).lag == 5
        monkeypatch.setattr(Store, "is_far_behind", lambda *_: True)
        progress = await admin.groups.progress("g")
        assert (progress.lag, progress.known_lag, progress.delay_ms) == (None, 2, None)
        first, second = progress.queues
        assert (first.lag, second.committed, second.lag, second.delay_ms) == (2, None, None, None)
        await admin.groups.create(GroupSettings("new"))
        assert (await admin.groups.progress("new")).lag is None, "it may subscribe to anything"


@virtual_time()
async def test_members_that_broadcast_keep_their_offsets(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"1", b"2", b"3"])
        # Of members that once shared the messages.
        await commit(world, {queue(0): 1})
        seen = Seen()
        async with consuming(world, seen, broadcast=True, offsets_directory=tmp_path / "offsets"):
            await wait_until(lambda: seen.count == 3, 60)
            progress = await admin.groups.progress("g")
            assert (progress.lag, progress.unknown_queues) == (None, (queue(0),))


@virtual_time()
async def test_brokers_that_leave_out_topics_without_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Apache RocketMQ's do."""
    of_group = Lag.of_group

    async def of_committed(lag: Lag, group: str, topic: str | None) -> ConsumeStats:
        found = await of_group(lag, group, topic)
        if topic is not None:
            return found
        having = lag.offsets.topics_of(group)
        table = {q: each for q, each in found.offset_table.items() if q.topic in having}
        return ConsumeStats(offset_table=table)

    monkeypatch.setattr(Lag, "of_group", of_committed)
    async with administered(tmp_path, "a") as (world, admin):
        await admin.topics.create("T", queues=1)
        await send(world, [b"1", b"2", b"3"])
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen):
            await wait_until(lambda: seen.running > 0, 60)
            assert (await admin.groups.progress("g")).lag == 3
            seen.hold.set()


def owned_by(consumer: PushConsumer) -> int:
    return sum(each.topic == "T" for each in consumer.assignment())


@virtual_time()
async def test_members_and_their_queues(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=2)
        await admin.groups.create(GroupSettings("g"))
        empty = await admin.groups.members("g")
        assert (empty.members, empty.message_model) == ((), None)
        with pytest.raises(AdministrationError, match="group 'g' has no members"):
            await admin.groups.inspect("g")
        seen = Seen()
        async with (
            consuming(world, seen, "10.0.1.1") as one,
            consuming(world, seen, "10.0.1.2") as other,
        ):
            await wait_until(lambda: owned_by(one) == 2 == owned_by(other), 60)
            found = await admin.groups.members("g")
            owned = [q for m in found.members for q in m.queues or () if q.topic == "T"]
            assert sorted(owned) == [queue(n, b) for b in "ab" for n in range(2)]
            assert [member.connection.client_id for member in found.members] == [
                "10.0.1.1@test",
                "10.0.1.2@test",
            ]
            assert found.members[0].connection.language == "PYTHON"
            assert found.members[0].connection.version == "V4_9_8"
            assert found.message_model == "CLUSTERING"
            assert found.subscriptions["T"] == "*"
            inside = await admin.groups.inspect("g", "10.0.1.1@test")
            assert [each.queue for each in inside.queues] == list(found.members[0].queues or ())
            assert inside.settings["PROP_CONSUMEORDERLY"] == "false"
            assert inside.stacks is None
            with pytest.raises(InvalidArgument, match=r"several members; .* 10\.0\.1\.1@test"):
                await admin.groups.inspect("g")
            with pytest.raises(NotThere, match="no member of group 'g' 'x'"):
                await admin.groups.inspect("g", "x")
            progress = await admin.groups.progress("g", with_owners=True)
            assert progress.is_running
            assert await admin.topics.groups("T") == ("g",)
            with pytest.raises(StillInUse, match=r"2 members: 10\.0\.1\.1@test"):
                await admin.groups.delete("g")
            with pytest.raises(StillInUse, match="group 'g'"):
                await admin.offsets.clone("TOOLS_CONSUMER", "g")


@virtual_time()
async def test_different_subscriptions_of_members_are_shown(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        await admin.topics.create("T", queues=2)
        async with consuming(world, Seen(), "10.0.1.1", subscriptions={"T": "a || b"}):
            async with consuming(world, Seen(), "10.0.1.2", subscriptions={"T": Sql("n > 1")}):
                found = await admin.groups.members("g")
                assert found.differences == (
                    Difference("T", "TAG", "a || b", ("10.0.1.1@test",)),
                    Difference("T", "SQL92", "n > 1", ("10.0.1.2@test",)),
                )
                listed = {each.settings.group: each for each in await admin.groups.list()}
                assert not listed["g"].is_consistent
                assert listed["TOOLS_CONSUMER"].is_consistent
            assert (await admin.groups.members("g")).differences == ()
            assert all(each.is_consistent for each in await admin.groups.list())


@virtual_time()
async def test_producers_are_found(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        assert await admin.groups.producers("pg") == ()
        async with Producer("pg", session=world.session("10.0.1.7")) as producer:
            await producer.send(Message("T", b"x"))
            await virtual_sleep(2)
            (found,) = await admin.groups.producers("pg")
            assert found.client_id == "10.0.1.7@test"


@pytest.mark.parametrize(
    ("number", "name"),
    [(409, "V4_9_8"), (408, "V4_9_8_SNAPSHOT"), (317, "V4_5_2"), (413, "V5_0_0"), (121, "121")],
)
def test_version_numbers_have_names(number: int, name: str) -> None:
    assert version_name(number) == name
