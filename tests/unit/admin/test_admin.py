"""Administration of a cluster of two brokers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from clusters import Cluster, cluster
from consumers import Seen, consuming, send
from turbopump.admin import (
    Admin,
    AtOffset,
    AtTime,
    Earliest,
    GroupSettings,
    Last,
    Latest,
    TopicKind,
)
from turbopump.admin.members import version_name
from turbopump.broker.broker import Broker
from turbopump.broker.runtime_info import RuntimeInfo
from turbopump.client.calls import commit_offset
from turbopump.client.config import ClientConfig
from turbopump.client.producer import Producer
from turbopump.client.push_consumer import PushConsumer
from turbopump.client.session import Session
from turbopump.errors import (
    AdministrationError,
    AlreadyThere,
    InvalidArgument,
    NoNameServer,
    NotThere,
    RemoteError,
    StillInUse,
)
from turbopump.message import Message, MessageQueue, QueueOffset
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time, wait_until
from turbopump.wire.bodies import GroupConfig

CLUSTER = "DefaultCluster"


@asynccontextmanager
async def administered(
    directory: Path, names: str = "ab", hooks: Any = (), **settings: Any
) -> AsyncIterator[tuple[Cluster, Admin]]:
    """Run brokers of these names, and somebody who administers them."""
    async with cluster(directory, tuple(names), **settings) as world:
        session = world.session("10.0.3.1", hooks=hooks)
        async with Admin(session=session) as admin:
            yield world, admin


def queue(number: int, broker: str = "a", topic: str = "T") -> MessageQueue:
    return MessageQueue(topic, broker, number)


async def commit(world: Cluster, offsets: dict[MessageQueue, int], group: str = "g") -> None:
    """Let a group have come so far, without ever having had a member."""
    async with world.session("10.0.3.2") as session:
        for each, offset in offsets.items():
            address = world.brokers[each.broker].address
            await commit_offset(
                session, address, group, each, QueueOffset(offset), 3000, is_oneway=False
            )


# --- clusters -------------------------------------------------------------------------------------


@virtual_time()
async def test_clusters_tell_their_brokers_and_how_they_do(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        (found,) = await admin.clusters.list()
        assert (found.name, found.brokers) == (CLUSTER, ("a", "b"))
        (status,) = await admin.clusters.status()
        assert [each.node.address for each in status.brokers] == [
            broker.address for broker in world.brokers.values()
        ]
        for each in status.brokers:
            assert each.version == "V4_9_8"
            assert (each.in_per_s, each.error) == (0.0, None)
        info = await admin.clusters.runtime_info("b")
        assert info["brokerVersionDesc"] == "V4_9_8"


@virtual_time()
async def test_silent_broker_is_shown_with_why(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        world.network.stop_reading("10.0.0.2")
        (status,) = await admin.clusters.status()
        first, second = status.brokers
        assert first.error is None
        assert second.error is not None
        assert second.version is None


@virtual_time()
async def test_drained_broker_takes_no_more_messages(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", queues=2)
        assert await admin.clusters.wipe_write_permission("a") > 0
        permissions = {
            each.broker: each.permission for each in (await admin.topics.route("T")).on_brokers
        }
        assert permissions == {"a": "r", "b": "rw"}
        await admin.clusters.add_write_permission("a")
        assert {each.permission for each in (await admin.topics.route("T")).on_brokers} == {"rw"}


@virtual_time()
async def test_what_is_missing_is_named_with_what_is_like_it(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("orders")
        with pytest.raises(NotThere, match="no topic 'order'; similar: orders") as caught:
            await admin.topics.route("order")
        assert (caught.value.kind, caught.value.similar) == ("topic", ("orders",))
        with pytest.raises(NotThere, match=r"no cluster 'DefaultCluste'.*DefaultCluster"):
            await admin.clusters.status("DefaultCluste")
        with pytest.raises(NotThere, match="no broker 'c'"):
            await admin.clusters.runtime_info("c")
        with pytest.raises(NotThere, match=r"no group 'TOOLS_CONSUME'.*TOOLS_CONSUMER"):
            await admin.groups.progress("TOOLS_CONSUME")


@virtual_time()
async def test_missing_name_server_is_named(tmp_path: Path) -> None:
    network = MemoryNetwork()
    session = Session(
        ClientConfig("10.9.9.9:9876;10.9.9.8:9876", host="10.0.1.1", instance="t"),
        network.host("10.0.1.1"),
        clock=virtual_loop().clock,
    )
    async with Admin(session=session) as admin:
        with pytest.raises(NoNameServer, match=r"10\.9\.9\.9:9876;10\.9\.9\.8:9876"):
            await admin.topics.names()
        with pytest.raises(NoNameServer, match=r"10\.9\.9\.9:9876"):
            await admin.configuration.name_servers()


@virtual_time()
async def test_several_clusters_are_told_apart(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        config = world.brokers["a"].config
        identity = replace(
            config.identity, broker_name="z", cluster="other", bind_host="10.0.7.7", port=10911
        )
        other = replace(config, directory=tmp_path / "z", identity=identity)
        async with Broker(other, world.network.host("10.0.7.7"), world.clock, seed=7):
            assert [each.name for each in await admin.clusters.list()] == [CLUSTER, "other"]
            (status,) = await admin.clusters.status("other")
            assert [each.node.broker for each in status.brokers] == ["z"]
            await admin.topics.create("T", cluster="other", queues=1)
            await admin.topics.create("U", queues=1)
            names = {each.name for each in await admin.topics.list(CLUSTER)}
            assert names & {"T", "U"} == {"U"}
            assert [each.broker for each in (await admin.topics.route("U")).on_brokers] == [
                "a",
                "z",
            ]
            await admin.groups.create(GroupSettings("g"), cluster="other")
            assert (await admin.groups.list("other"))[0].brokers == ("z",)
            await admin.messages.send(Message("U", b"1"), queue=queue(0, "z", "U"))
            await admin.offsets.reset("g", "U", Earliest())
            assert (await admin.groups.progress("g")).lag == 1
            assert await admin.topics.delete("U", cluster="other") == ("z",)
            assert [each.broker for each in (await admin.topics.route("U")).on_brokers] == ["a"]


# --- topics ---------------------------------------------------------------------------------------


@virtual_time()
async def test_topic_is_made_changed_and_deleted_on_all_brokers(tmp_path: Path) -> None:
    async with administered(tmp_path) as (world, admin):
        made = await admin.topics.create("T", queues=2)
        assert [(each.broker, each.write_queues) for each in made.on_brokers] == [
            ("a", 2),
            ("b", 2),
        ]
        with pytest.raises(AlreadyThere, match="on a, b"):
            await admin.topics.create("T")
        before, after = await admin.topics.update("T", queues=4, permission="r")
        assert [each.write_queues for each in before.on_brokers] == [2, 2]
        assert [(each.read_queues, each.permission) for each in after.on_brokers] == [
            (4, "r"),
            (4, "r"),
        ]
        _, shrunk = await admin.topics.update("T", queues=1, brokers=["a"])
        assert [(e.broker, e.write_queues, e.read_queues) for e in shrunk.on_brokers] == [
            ("a", 1, 4)
        ]
        routes = {each.broker: each for each in (await admin.topics.route("T")).on_brokers}
        assert (routes["a"].write_queues, routes["b"].write_queues) == (1, 4)
        assert routes["a"].addresses == {0: world.brokers["a"].address}
        assert await admin.topics.delete("T") == ("a", "b")
        with pytest.raises(NotThere, match="no topic 'T'"):
            await admin.topics.status("T")
        with pytest.raises(NotThere, match="no topic 'T'"):
            await admin.topics.delete("T")
        with pytest.raises(NotThere, match="no topic 'T'"):
            await admin.topics.update("T", queues=2)


@virtual_time()
async def test_dry_update_changes_nothing(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        await admin.topics.create("T", queues=2)
        _, after = await admin.topics.update("T", queues=3, dry_run=True)
        assert after.write_queues == 3
        assert (await admin.topics.route("T")).on_brokers[0].write_queues == 2


@virtual_time()
async def test_topics_are_listed_by_what_they_are_for(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", brokers=["b"])
        await admin.topics.create("%RETRY%g", queues=1)
        found = {each.name: each for each in await admin.topics.list()}
        assert [each.broker for each in found["T"].on_brokers] == ["b"]
        kinds = {name: each.kind for name, each in found.items()}
        assert kinds["T"] is TopicKind.NORMAL
        assert kinds["%RETRY%g"] is TopicKind.RETRY
        assert kinds["TBW102"] is kinds[CLUSTER] is TopicKind.SYSTEM
        assert "T" in await admin.topics.names()


@virtual_time()
async def test_ordered_topic_has_fixed_queues_in_the_name_servers(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", queues=2, is_ordered=True)
        values = await admin.configuration.key_values("ORDER_TOPIC_CONFIG")
        assert values == {"T": "a:2;b:2"}
        await admin.topics.update("T", is_ordered=False)
        assert await admin.configuration.key_values("ORDER_TOPIC_CONFIG") == {}
        await admin.topics.update("T", queues=3, is_ordered=True)
        values = await admin.configuration.key_values("ORDER_TOPIC_CONFIG")
        assert values == {"T": "a:3;b:3"}
        await admin.topics.update("T", queues=5, brokers=["b"])
        values = await admin.configuration.key_values("ORDER_TOPIC_CONFIG")
        assert values == {"T": "a:3;b:5"}
        await admin.topics.delete("T")
        assert await admin.configuration.key_values("ORDER_TOPIC_CONFIG") == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"queues": 0}, "queues is 0"),
        ({"read_queues": -1}, "read_queues is -1"),
        ({"permission": "x"}, "permission is 'x': r, w, rw"),
    ],
)
@virtual_time()
async def test_bad_topic_is_refused(tmp_path: Path, settings: Any, named: str) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        with pytest.raises(InvalidArgument, match=named):
            await admin.topics.create("T", **settings)
        with pytest.raises(InvalidArgument, match="topic is 'a b'"):
            await admin.topics.create("a b")


@virtual_time()
async def test_status_tells_what_queues_hold(tmp_path: Path) -> None:
    async with administered(tmp_path) as (_, admin):
        await admin.topics.create("T", queues=1)
        await send(_, [b"1", b"2"], to=queue(0, "b"))
        status = await admin.topics.status("T")
        assert [(each.queue.broker, each.messages) for each in status.queues] == [
            ("a", 0),
            ("b", 2),
        ]
        assert status.messages == 2
        empty, full = status.queues
        assert empty.last_stored_ms is None
        assert full.last_stored_ms == pytest.approx(virtual_loop().clock.now_ms(), abs=1000)


# --- groups ---------------------------------------------------------------------------------------


@virtual_time()
async def test_group_is_made_changed_and_deleted(tmp_path: Path) -> None:
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
            (GroupSettings("h", retry_queues=-1), "retry_queues is -1: 0 to 1024"),
            (GroupSettings("h", retry_queues=1025), "retry_queues is 1025"),
            (GroupSettings("h", retries_max=-2), "retries_max is -2: -1 to"),
        ):
            with pytest.raises(InvalidArgument, match=named):
                await admin.groups.create(bad)
        with pytest.raises(InvalidArgument, match="nothing to change is given"):
            await admin.groups.update("h")


@virtual_time()
async def test_group_is_changed_on_each_broker_in_what_is_given_and_made_on_none(
    tmp_path: Path,
) -> None:
    async with administered(tmp_path, "abc") as (world, admin):
        tables = {name: broker.state.groups for name, broker in world.brokers.items()}
        for name, retries in (("a", 3), ("b", 7)):
            tables[name].update(GroupConfig(group_name="g", retry_max_times=retries))
        changes = await admin.groups.update("g", can_broadcast=False)
        assert [(each.broker, each.after.retries_max) for each in changes] == [("a", 3), ("b", 7)]
        assert [tables[name].table["g"].retry_max_times for name in "ab"] == [3, 7]
        assert not any(tables[name].table["g"].consume_broadcast_enable for name in "ab")
        assert "g" not in tables["c"].table


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


async def virtual_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


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
            with pytest.raises(InvalidArgument, match=r"several members: 10\.0\.1\.1@test"):
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


# --- offsets --------------------------------------------------------------------------------------


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
        # Nearer to the message before than to the one after.
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
async def test_queues_that_are_only_read_by_now_are_seen(tmp_path: Path) -> None:
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
async def test_later_reset_wins_over_one_that_is_under_way(tmp_path: Path) -> None:
    """Members pause for ten seconds before they go on."""
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
            # Nor is one lost that comes while a queue is let go of and gained anew.
            for pause_ms in range(9_996, 10_012, 2):
                at = len(seen.bodies)
                await admin.offsets.reset("g", "T", AtOffset(7))
                await virtual_sleep(pause_ms / 1000)
                await admin.offsets.reset("g", "T", AtOffset(9))
                await virtual_sleep(30)
                assert seen.bodies[at:] in ([b"9"], [b"7", b"8", b"9", b"9"]), pause_ms
            at = len(seen.bodies)
            # What comes when the first is done, and others wait, is not lost either.
            for target in (2, 5, 9):
                await admin.offsets.reset("g", "T", AtOffset(target))
                await virtual_sleep(6)
            await virtual_sleep(60)
            assert seen.bodies[-1] == b"9"
            assert b"2" not in seen.bodies[at:]
            await send(world, [b"new"])
            await wait_until(lambda: seen.bodies[-1] == b"new", 60)


@virtual_time()
async def test_suspended_member_stays_so_over_resets_that_overlap(tmp_path: Path) -> None:
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
            await virtual_sleep(10)
            with pytest.raises(AdministrationError, match=r"broker a at .* by time only"):
                await admin.offsets.reset("g", "T", AtOffset(1))
            await admin.offsets.reset("g", "T", AtTime(datetime.fromtimestamp(0, UTC)))
            await wait_until(lambda: seen.count == 6, 60)


@virtual_time()
async def test_broker_refuses_a_reset_to_what_is_not_there(tmp_path: Path) -> None:
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
async def test_reset_names_what_is_not_there(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (_, admin):
        await admin.topics.create("T", queues=1)
        await admin.groups.create(GroupSettings("g"))
        with pytest.raises(NotThere, match="no group 'h'"):
            await admin.offsets.plan("h", "T", Latest())
        with pytest.raises(NotThere, match="no topic 'U'"):
            await admin.offsets.plan("g", "U", Latest())
        with pytest.raises(InvalidArgument, match="queue T@a:7 is not there: a:0 are"):
            await admin.offsets.plan("g", "T", Latest(), [queue(7)])
        with pytest.raises(InvalidArgument, match="offset is -1"):
            AtOffset(-1)
        with pytest.raises(InvalidArgument, match="count is 0"):
            Last(0)


# --- configuration --------------------------------------------------------------------------------


@virtual_time()
async def test_settings_of_brokers_and_name_servers(tmp_path: Path) -> None:
    async with administered(tmp_path, nameservers=2) as (_, admin):
        changes = await admin.configuration.change_brokers({"fileReservedTime": "48"}, dry_run=True)
        assert [(c.server, c.key, c.old, c.new) for c in changes] == [
            (name, "fileReservedTime", "72", "48") for name in "ab"
        ]
        assert (await admin.configuration.broker("a"))["fileReservedTime"] == "72"
        await admin.configuration.change_brokers({"fileReservedTime": "48"}, broker="a")
        assert (await admin.configuration.broker("a"))["fileReservedTime"] == "48"
        assert (await admin.configuration.broker("b"))["fileReservedTime"] == "72"
        for dry_run in (True, False):
            for settings, said in (
                ({"fileReservedTime": "x"}, "fileReservedTime"),
                ({"fileReservedTim": "9"}, "no setting 'fileReservedTim'; did you mean 'file"),
                ({"listenPort": "9"}, "listenPort takes effect only at start"),
            ):
                with pytest.raises(InvalidArgument, match=said):
                    await admin.configuration.change_brokers(settings, dry_run=dry_run)
        # Another way to write the same is no change.
        assert not await admin.configuration.change_brokers({"fileReservedTime": "048"}, broker="a")
        with pytest.raises(InvalidArgument, match=r"name server .* has no setting 'nonsense'"):
            await admin.configuration.change_name_servers({"nonsense": "1"}, dry_run=True)
        with pytest.raises(InvalidArgument, match="no setting"):
            await admin.configuration.change_brokers({})
        changes = await admin.configuration.change_name_servers({"orderMessageEnable": "true"})
        assert len(changes) == 2
        servers = await admin.configuration.name_servers()
        assert [each["orderMessageEnable"] for each in servers.values()] == ["true"] * 2
        with pytest.raises(RemoteError, match=r"name server .*listenPort"):
            await admin.configuration.change_name_servers({"listenPort": "1"})


@virtual_time()
async def test_key_values_are_on_every_name_server(tmp_path: Path) -> None:
    async with administered(tmp_path, "a", nameservers=2) as (world, admin):
        assert await admin.configuration.key_values("n") == {}
        await admin.configuration.put_key_value("n", "k", "v")
        for server in world.nameservers:
            session = world.session("10.0.5.5", nameserver=server.address)
            async with Admin(session=session) as one:
                assert await one.configuration.key_value("n", "k") == "v"
        await admin.configuration.delete_key_value("n", "k")
        with pytest.raises(NotThere, match="no key 'n k'"):
            await admin.configuration.delete_key_value("n", "k")
