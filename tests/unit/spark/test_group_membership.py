"""A query in its group, in virtual time: what is rejected, noticed and reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import clusters
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.producer import Producer
from turbopump.client.push_consumer import PushConsumer
from turbopump.client.routes import MASTER_ID, Route
from turbopump.client.session import Session
from turbopump.errors import ConnectFailed, GroupInUse, TurbopumpError
from turbopump.message import Message, MessageQueue
from turbopump.spark.reading import stream_driver
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.group_membership import (
    GroupJoin,
    QueryMember,
    join_group,
    other_members,
)
from turbopump.spark.reading.micro_batch_planner import MicroBatchPlanner
from turbopump.spark.reading.options import SourceOptions
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.bodies import RunningInfo
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.headers import RunningInfoOf
from turbopump.wire.record import MessageView

A0 = MessageQueue("T", "a", 0)


async def handle(_messages: Sequence[MessageView], _context: ConsumeContext) -> ConsumeResult:
    return ConsumeResult.SUCCESS


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[tuple[clusters.Cluster, Session]]:
    async with clusters.cluster(directory) as made, made.session("10.0.1.2") as session:
        async with Producer("pg", session=made.session()) as producer:
            await producer.send(Message("T", b"hello"))
        yield made, session


def pushing(made: clusters.Cluster, group: str = "g") -> PushConsumer:
    return PushConsumer(group, handle, session=made.session("10.0.1.9"), subscriptions={"T": "*"})


def topics_of(*names: str) -> Callable[[], Awaitable[Sequence[str]]]:
    async def topics() -> Sequence[str]:
        return names

    return topics


def options(session: Session, **given: str) -> SourceOptions:
    plain = {
        "nameserver": ";".join(session.config.nameserver_addresses),
        "topic": "T",
        "group": "g",
    }
    return SourceOptions.for_stream({**plain, **given})


@virtual_time()
async def test_a_query_does_not_join_push_consumers(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, session), pushing(made):
        with pytest.raises(GroupInUse, match=r"group 'g' already has push consumers: 10\.0\.1\.9@"):
            await join_group(session, options(session), ["T"])
        shared = options(session, allowSharedGroup="true")
        assert await join_group(session, shared, ["T"]) is None
        other = await join_group(session, options(session, group="g2"), ["T"])
        assert isinstance(other, QueryMember)


@virtual_time()
async def test_a_deleted_topic_does_not_prevent_joining_the_group(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, session), pushing(made):
        wanted = ["gone", "T", "%RETRY%g"]
        assert isinstance(
            await join_group(session, options(session, group="g2"), wanted), QueryMember
        )
        with pytest.raises(GroupInUse):
            await join_group(session, options(session), wanted)


@virtual_time()
async def test_a_broker_that_is_down_does_not_delay_a_resumed_query(tmp_path: Path) -> None:
    async with (
        clusters.cluster(tmp_path, names=("a", "b")) as made,
        made.session("10.0.1.2") as session,
    ):
        await made.make_topic("T", "a")
        await made.make_topic("T", "b")
        await session.route("T")
        await made.crash("b")
        joining = GroupJoin(session, options(session), topics_of("T"))
        with pytest.raises(TurbopumpError):
            await GroupJoin(session, options(session), topics_of("T")).join(is_patient=True)
        started_ms = made.clock.monotonic_ms()
        for _ in range(20):
            await joining.join(is_patient=False)
        assert made.clock.monotonic_ms() - started_ms < 500
        assert joining.member is None
        await made.start_broker("b")
        await wait_until(lambda: joining.member is not None)
        await joining.join(is_patient=False)
        await joining.leave()
        assert joining.member is None


@virtual_time()
async def test_push_consumers_are_rejected_as_soon_as_brokers_report_them(tmp_path: Path) -> None:
    asked = clusters.Recorder()
    async with (
        world(tmp_path) as (made, _),
        pushing(made),
        made.session("10.0.1.3", hooks=[asked]) as session,
    ):

        def refuse(address: str, command: Command) -> None:
            if command.code == RequestCode.GET_CONSUMER_CONNECTION_LIST:
                raise ConnectFailed(f"{address} is away")

        asked.refuse = refuse
        joining = GroupJoin(session, options(session), topics_of("T"))
        await joining.join(is_patient=False)
        await asyncio.sleep(20)
        await joining.join(is_patient=False)
        asked.refuse = None
        await asyncio.sleep(10)
        with pytest.raises(GroupInUse):
            await joining.join(is_patient=False)
        await joining.leave()


@asynccontextmanager
async def world_of_two(directory: Path) -> AsyncIterator[tuple[clusters.Cluster, Session]]:
    """Run two brokers with one queue of a topic each."""
    async with (
        clusters.cluster(directory, names=("a", "b")) as made,
        made.session("10.0.1.2", route_interval=5) as session,
    ):
        for broker in ("a", "b"):
            await made.make_topic("T", broker, queues=1)
        await session.route("T")
        yield made, session


@virtual_time()
async def test_a_broker_that_is_down_hides_no_push_consumers(tmp_path: Path) -> None:
    async with world_of_two(tmp_path) as (made, session), pushing(made):
        await asyncio.sleep(5)
        await made.crash("b")
        joining = GroupJoin(session, options(session), topics_of("T"))
        with pytest.raises(GroupInUse, match=r"has push consumers: 10\.0\.1\.9@"):
            await joining.join(is_patient=False)
        assert not joining.has_joined


class Linked:
    """A link whose work is awaited by the test itself."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, work: Callable[[Session], Any]) -> Any:
        return work(self.session)


@virtual_time()
async def test_nothing_is_committed_before_the_group_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of_two(tmp_path) as (made, session):
        monkeypatch.setattr(stream_driver, "shared_session", lambda _: Linked(session))
        monkeypatch.setattr(stream_driver, "_exit_on_sigterm", lambda: None)
        query: Any = stream_driver.StreamDriver(options(session, idleWait="100ms"))
        async with Producer("pg", session=made.session()) as producer:
            for _ in range(3):
                await producer.send(Message("T", b"hello"), to=lambda _: A0)
        await made.crash("b")
        at = {A0: 2, MessageQueue("T", "b", 0): 0}

        async def look(follow: MicroBatchPlanner) -> Mapping[MessageQueue, int]:
            await follow.commit(at)
            return await follow.latest(at, is_limited=True)

        group = Cluster(session, options(session))
        for _ in range(3):
            assert (await query.run(look))[A0] == 3
        assert await group.committed([A0]) == {A0: None}
        await made.start_broker("b")
        await asyncio.sleep(20)
        await query.run(look)
        assert await group.committed([A0]) == {A0: 2}
        await query._joining.leave()


@virtual_time()
async def test_a_permanently_removed_broker_does_not_prevent_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of_two(tmp_path) as (made, session):
        await made.make_topic("U", "b", queues=1)
        await session.route("U")
        monkeypatch.setattr(stream_driver, "shared_session", lambda _: Linked(session))
        monkeypatch.setattr(stream_driver, "_exit_on_sigterm", lambda: None)
        plain = {
            "nameserver": ";".join(session.config.nameserver_addresses),
            "topics": "T,U",
            "group": "g",
        }
        query: Any = stream_driver.StreamDriver(SourceOptions.for_stream(plain))
        async with Producer("pg", session=made.session()) as producer:
            for _ in range(2):
                await producer.send(Message("T", b"hello"), to=lambda _: A0)
        await made.crash("b")

        async def commit(follow: MicroBatchPlanner) -> None:
            await follow.commit({A0: 2, MessageQueue("U", "b", 0): 0})

        group = Cluster(session, options(session))
        await query.run(commit)
        await asyncio.sleep(3)
        await query.run(commit)
        assert await group.committed([A0]) == {A0: None}, "it may just be restarting"
        await asyncio.sleep(20)
        await query.run(commit)
        assert await group.committed([A0]) == {A0: 2}
        await query._joining.leave()


@virtual_time()
async def test_a_broker_that_name_servers_know_is_waited_for(tmp_path: Path) -> None:
    asked = clusters.Recorder()
    async with (
        world(tmp_path) as (made, _),
        made.session("10.0.1.3", hooks=[asked], route_interval=5) as session,
    ):
        hidden = {RequestCode.GET_CONSUMER_CONNECTION_LIST, RequestCode.GET_ROUTEINFO_BY_TOPIC}

        def refuse(address: str, command: Command) -> None:
            if command.code in hidden:
                raise ConnectFailed(f"{address} is away")

        await session.route("T")
        asked.refuse = refuse
        joining = GroupJoin(session, options(session), topics_of("T"))
        await joining.join(is_patient=False)
        await asyncio.sleep(60)
        assert not joining.has_joined, "name servers do not answer"
        hidden.remove(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        await asyncio.sleep(60)
        assert not joining.has_joined, "name servers know it"
        asked.refuse = None
        await asyncio.sleep(10)
        assert joining.has_joined
        await joining.leave()


@virtual_time()
async def test_a_broker_that_has_moved_is_queried_at_its_new_address(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, session), pushing(made):
        await asyncio.sleep(5)
        route = await session.route("T")
        old = Route("T", route.writable, route.readable, {"a": {MASTER_ID: "10.0.0.99:10911"}})
        session._routes._take(old)
        session._routes._answers.clear()
        with pytest.raises(TurbopumpError, match=r"10\.0\.0\.99"):
            await other_members(session, "g", ["T"], 0, that_push=True)
        found = await other_members(session, "g", ["T"], 0, that_push=True, without_lost=True)
        assert [each.split("@")[0] for each in found] == ["10.0.1.9"]


@virtual_time()
async def test_a_query_that_has_left_does_not_join_again(tmp_path: Path) -> None:
    async with world_of_two(tmp_path) as (made, session):
        await made.crash("b")
        joining = GroupJoin(session, options(session), topics_of("T"))
        await joining.join(is_patient=False)
        await joining.leave()
        await made.start_broker("b")
        await asyncio.sleep(60)
        assert joining.member is None
        assert not session.members.consumers


@virtual_time()
async def test_an_abandoned_join_leaves_no_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as (made, session), made.session("10.0.1.3") as other:
        beat = session.heartbeat

        async def slow() -> None:
            await beat()
            await asyncio.sleep(600)

        monkeypatch.setattr(session, "heartbeat", slow)
        joining = asyncio.create_task(join_group(session, options(session), ["T"]))
        await asyncio.sleep(5)
        assert await other_members(other, "g", ["T"]) == [session.client_id]
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        assert await other_members(other, "g", ["T"]) == []
        assert not session.members.consumers


@virtual_time()
async def test_two_queries_may_follow_each_other_in_a_group(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, session), made.session("10.0.1.3") as before:
        first = await join_group(before, options(before), ["T"])
        second = await join_group(session, options(session), ["T"])
        assert first is not None
        assert second is not None
        await before.leave(first)
        await session.leave(second)


@virtual_time()
async def test_push_consumers_that_join_later_are_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as (made, session):
        member = await join_group(session, options(session), ["T"])
        assert member is not None
        with caplog.at_level(logging.WARNING, "turbopump.spark"):
            async with pushing(made):
                await wait_until(lambda: "has other consumers" in caplog.text)
        assert "10.0.1.9@" in caplog.text


@virtual_time()
async def test_a_bug_in_the_membership_check_is_counted_and_checks_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, bugs = list[str](), [LookupError("a bug")]

    async def others(session: Session, group: str, *more: Any, **options: Any) -> list[str]:
        if options:
            return await other_members(session, group, *more, **options)
        asked.append(group)
        if bugs:
            raise bugs.pop()
        return []

    monkeypatch.setattr("turbopump.spark.reading.group_membership.other_members", others)
    async with world(tmp_path) as (made, session):
        member = await join_group(session, options(session), ["T"])
        assert member is not None
        member.members_changed()
        await wait_until(lambda: len(asked) == 2)
        header = RunningInfoOf(consumer_group="g", client_id=session.client_id)
        command = request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        answer = await session.request(made.brokers["a"].address, command, 5000)
        told = RunningInfo.decode(whole_body(answer)).properties
        assert (
            told["backgroundFailures"] == "members of g: 1 failures, the last LookupError('a bug')"
        )
        assert "heartbeat" in told["backgroundWork"]


@virtual_time()
async def test_operators_see_where_a_query_is(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, session):
        member = await join_group(session, options(session, tags="a || b"), ["T"])
        assert member is not None
        (wanted,) = member.heartbeat_data().subscription_data_set
        assert (wanted.topic, wanted.sub_string) == ("T", "a || b")
        # A query that is started later must replace what brokers store for this one.
        assert wanted.sub_version == session.clock.now_ms() > 0
        member.reached({MessageQueue("T", "a", 0): 5, MessageQueue("U", "a", 0): 7})
        assert member.progress("T") == {MessageQueue("T", "a", 0): 5}
        assert [each.topic for each in member.heartbeat_data().subscription_data_set] == ["T", "U"]


@virtual_time()
async def test_without_a_group_nothing_is_joined(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, session):
        plain = {"nameserver": ";".join(session.config.nameserver_addresses), "topic": "T"}
        alone = SourceOptions.for_stream(plain)
        assert await join_group(session, alone, ["T"]) is None

        async def topics() -> Sequence[str]:
            raise AssertionError("nobody needs to know them")

        for each in (alone, options(session, allowSharedGroup="true")):
            joining = GroupJoin(session, each, topics)
            await joining.join(is_patient=True)
            assert joining.has_joined
            assert joining.member is None
