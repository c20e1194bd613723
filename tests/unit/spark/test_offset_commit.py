"""What a group commits for a topic that was deleted, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

import clusters
from turbopump.admin.administration import Admin
from turbopump.broker.offsets import Offsets as GroupOffsets
from turbopump.broker.progress import Progress
from turbopump.client.session import Session
from turbopump.errors import RemoteError
from turbopump.message import MessageQueue
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.micro_batch_planner import MicroBatchPlanner
from turbopump.spark.reading.options import SourceOptions
from turbopump.testing import virtual_time
from turbopump.wire.codes import ResponseCode

T0 = MessageQueue("T", "a", 0)


def options(session: Session) -> SourceOptions:
    return SourceOptions.for_stream(
        {
            "nameserver": ";".join(session.config.nameserver_addresses),
            "assign": '{"T": [0]}',
            "group": "g",
            "failOnDataLoss": "false",
            "idleWait": "100ms",
        }
    )


def following(session: Session) -> MicroBatchPlanner:
    return MicroBatchPlanner(Cluster(session, options(session)), options(session), session.clock)


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
