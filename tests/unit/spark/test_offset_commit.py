"""What a group commits again, or for a topic that was deleted, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import clusters
from consumers import send
from replicas import MASTER, replicas
from turbopump.admin.administration import Admin
from turbopump.broker.offsets import Offsets as GroupOffsets
from turbopump.broker.progress import Progress
from turbopump.client.session import Session
from turbopump.errors import RemoteError
from turbopump.message import MessageQueue
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.micro_batch_planner import MicroBatchPlanner
from turbopump.spark.reading.offsets import Offsets
from turbopump.spark.reading.options import SourceOptions
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire.codes import RequestCode, ResponseCode

T0 = MessageQueue("T", "a", 0)


def options(session: Session, **changes: str) -> SourceOptions:
    return SourceOptions.for_stream(
        {
            "nameserver": ";".join(session.config.nameserver_addresses),
            "assign": '{"T": [0]}',
            "group": "g",
            "failOnDataLoss": "false",
            "idleWait": "100ms",
            **changes,
        }
    )


def following(session: Session, **changes: str) -> MicroBatchPlanner:
    given = options(session, **changes)
    return MicroBatchPlanner(Cluster(session, given), given, session.clock)


def refuse_commits(monkeypatch: pytest.MonkeyPatch, code: ResponseCode) -> None:
    def refused(_self: Progress, _topic: str) -> range:
        raise RemoteError(code, "no")

    # The broker already has its handlers; this is what the commit handler calls.
    monkeypatch.setattr(Progress, "_queue_ids", refused)


@virtual_time()
async def test_a_deleted_queue_stays_in_the_checkpoint_until_its_broker_recorded_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Older brokers keep the offsets of deleted topics.
    monkeypatch.setattr(Progress, "_queue_ids", lambda *_: range(1000))
    monkeypatch.setattr(GroupOffsets, "remove_topic", lambda *_: None)
    async with clusters.cluster(tmp_path) as made, made.session("10.0.1.2") as before:
        await made.make_topic("T", queues=1)
        await before.route("T")
        made.brokers["a"].state.offsets.commit("g", "T", 0, 10)
        kept = Cluster(before, options(before))
        await Admin(session=before).topics.delete("T")
        # Without the old route, as after a restart.
        async with made.session("10.0.1.3") as session:
            follow = following(session)
            with monkeypatch.context() as patch:
                refuse_commits(patch, ResponseCode.SYSTEM_BUSY)
                assert await follow.latest({T0: 10}, is_limited=False) == {T0: 10}
                assert follow.committed.get(T0) != 0
                assert await kept.committed([T0]) == {T0: 10}
            assert await follow.latest({T0: 10}, is_limited=False) == {}
            assert await kept.committed([T0]) == {T0: 0}


@virtual_time()
@pytest.mark.parametrize(
    "code", [ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST]
)
async def test_a_broker_without_offsets_of_the_group_need_not_record_a_deleted_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ResponseCode
) -> None:
    async with clusters.cluster(tmp_path) as made, made.session("10.0.1.2") as session:
        refuse_commits(monkeypatch, code)
        group = Cluster(session, options(session))
        assert await group.commit({T0: 0}) == {T0: 0}
        await made.make_topic("T", queues=1)
        assert await group.commit({T0: 0}) == {T0: 0}
        assert await group.commit({T0: 1}) == {}


# --- commits that a broker has lost ---------------------------------------------------------------


async def followed(follow: MicroBatchPlanner, at: Offsets, wait_s: int) -> None:
    """Let an idle stream look for messages for some time."""
    end = virtual_loop().time() + wait_s
    while virtual_loop().time() < end:
        assert await follow.latest(at, is_limited=False) == at


@virtual_time()
async def test_an_idle_stream_commits_again_what_its_broker_lost_in_a_crash(tmp_path: Path) -> None:
    async with clusters.cluster(tmp_path) as made, made.session("10.0.1.2") as session:
        await made.make_topic("T", queues=1)
        await made.make_topic("U", queues=1)
        both = {T0: 3, MessageQueue("U", "a", 0): 3}
        for queue in both:
            await send(made, [b"x"] * 3, queue.topic, to=queue)
        follow = following(session, assign='{"T": [0], "U": [0]}')
        await follow.commit(dict.fromkeys(both, 1))
        # Everything so far is on disk.
        await asyncio.sleep(10)
        await followed(follow, both, 1)
        await made.crash("a")
        broker = await made.start_broker("a")
        assert broker.state.offsets.find("g", "T", 0) == 1, "the broker has lost nothing"
        await followed(follow, both, 2)
        for queue in both:
            assert broker.state.offsets.find("g", queue.topic, 0) == 3


@virtual_time()
async def test_offsets_that_differ_from_those_committed_are_committed_again(tmp_path: Path) -> None:
    async with clusters.cluster(tmp_path) as made, made.session("10.0.1.2") as session:
        await made.make_topic("T", queues=1)
        await send(made, [b"x"] * 3, to=T0)
        follow = following(session)
        await followed(follow, {T0: 3}, 1)
        offsets = made.brokers["a"].state.offsets
        offsets.commit("g", "T", 0, 1)
        await followed(follow, {T0: 3}, 1 + session.config.route_interval_ms // 1000)
        assert offsets.find("g", "T", 0) == 3


@virtual_time()
async def test_commits_wait_for_the_master_and_resume_immediately(tmp_path: Path) -> None:
    asked = clusters.Recorder()
    async with (
        replicas(tmp_path) as made,
        made.session("10.0.1.2", hooks=[asked]) as session,
    ):
        await send(made, [b"x"] * 3, to=T0)
        await made.copy()
        follow = following(session)
        await follow.commit({T0: 2})
        await made.crash(MASTER)
        # Until the driver's route names only the slave.
        await asyncio.sleep(2 * session.config.route_interval_ms / 1000)
        assert not session.has_master(MASTER)
        asked.requests.clear()
        await followed(follow, {T0: 3}, 10)
        for code in (RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSETS):
            assert asked.addresses_of(code) == [], "a slave keeps no offsets"
        assert len(asked.of(RequestCode.GET_ROUTEINFO_BY_TOPIC)) <= 15
        await made.start_broker(MASTER)
        await followed(follow, {T0: 3}, 3)
        assert made.master.state.offsets.find("g", "T", 0) == 3
