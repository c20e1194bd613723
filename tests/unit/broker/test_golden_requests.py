"""Requests recorded from Java clients, answered as the Java broker answered them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from broker_parts import IDENTITY, FakePeer, Parts, finished
from turbopump.broker.config import Role
from turbopump.message import MessageQueue
from turbopump.wire import bodies
from turbopump.wire.bodies import ConsumerOffsets, DelayOffsets, TopicConfig
from turbopump.wire.catalogue import RESPONSE_BODIES
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, Serialize, whole_body
from turbopump.wire.framing import FrameDecoder
from turbopump.wire.schema import Body
from vectors import Vector, frame, frames

TOPIC_TEST_TIMES = {
    0: [1794728307364, 1794728307714, *[1794728308000] * 6, 1794728355845],
    1: [1794728307610, 1794728308000, 1794728309000, 1794728317898],
    2: [1794728307893, 1794728308000, 1794728308691],
}

SERVED = {
    *(14, 15, 17, 21, 25, 26, 28, 34, 35, 38, 41, 42, 43, 45, 46, 50, 51, 52, 53, 200, 201),
    *(202, 203, 204, 207, 208, 215, 222, 223, 300, 301, 303, 305, 306, 307, 308, 309, 314, 315),
    *(316, 317, 321, 328, 329),
}

DIFFERENT = {
    # Access control is not implemented.
    "acl_cluster_info.request": ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
    "acl_update_config.request": ResponseCode.UPDATE_AND_CREATE_ACL_CONFIG_FAILED,
    "acl_global_white.request": ResponseCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED,
    "acl_delete_config.request": ResponseCode.DELETE_ACL_CONFIG_FAILED,
}

CONSUMERS = {
    "10.20.30.40:42032": "heartbeat_concurrent_consumer",
    "10.20.30.40:37710": "sql_consumer_start.HEART_BEAT",
    "10.20.30.40:42048": "heartbeat_orderly_consumer",
    "10.20.30.40:37720": "heartbeat_broadcast_consumer",
    "10.20.30.40:45834": "heartbeat_pull_consumer.HEART_BEAT",
    "10.20.30.40:45818": "heartbeat_producer",
}


def command(name: str) -> Command:
    [decoded] = FrameDecoder().feed(frame(name))
    return decoded


def mine() -> list[Vector]:
    return [
        vector
        for vector in frames()
        if vector["kind"] == "request"
        and "broker" in vector["direction"].partition("->")[2]
        and vector["code"] in SERVED
    ]


@pytest.fixture
def world(tmp_path: Path) -> Parts:
    """A broker in the recorded one's state at the time of the operators' requests."""
    parts = Parts(tmp_path)
    for name, queues in {"TopicTest": 4, "OrderTopic": 2, "FilterTopic": 2, "AutoTopic": 4}.items():
        finished(
            parts.topics.update(
                TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues)
            )
        )
    for queue_id, times in TOPIC_TEST_TIMES.items():
        parts.store.put("TopicTest", queue_id, *times)
    parts.store.put("%RETRY%cg_push", 0, 1794728330000, 1794728336766)
    parts.store.put("OldTopic", 0, 1)
    parts.store.first["OldTopic", 0] = 5
    parts.store.units["TopicTest", 0] = [(0, 178, 0), (352, 259, 2598919), (611, 171, 0)]
    stored = ConsumerOffsets.decode(whole_body(command("all_consumer_offset.response")))
    for key, queues_of in stored.offset_table.items():
        topic, _, group = key.partition("@")
        parts.offsets.commit_all(group, topic, queues_of)
    parts.offsets.commit("cg_pull", "TopicTest", 0, 2)
    parts.delays = DelayOffsets(offset_table={1: 1, 2: 1, 3: 3})
    for address, name in CONSUMERS.items():
        assert parts.serve(command(f"{name}.request"), FakePeer(address)).code == 0
    second = structs.replace(command("heartbeat_concurrent_consumer.request"))
    beat = bodies.Heartbeat.decode(whole_body(second))
    renamed = structs.replace(beat, client_id="10.20.30.40@consumer-2").encode()
    parts.serve(structs.replace(second, body=renamed), FakePeer("10.20.30.40:42042"))
    for member in parts.consumers.members("cg_push"):
        peer = member.connection
        assert isinstance(peer, FakePeer)
        peer.answers = {
            RequestCode.GET_CONSUMER_RUNNING_INFO: command("running_info.to_client.response"),
            RequestCode.CONSUME_MESSAGE_DIRECTLY: command("consume_directly.to_client.response"),
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: command(
                "consume_status.GET_CONSUMER_STATUS_FROM_CLIENT.response"
            ),
        }
        peer.sent.clear()
    for member in parts.consumers.members("cg_order"):
        peer = member.connection
        assert isinstance(peer, FakePeer)
        peer.answers = {
            RequestCode.GET_CONSUMER_RUNNING_INFO: command(
                "running_info_orderly.to_client.response"
            )
        }
    parts.store.records[0x160] = whole_body(command("consume_directly.to_client.request"))
    queues_locked = [MessageQueue("OrderTopic", "broker-a", queue_id) for queue_id in (0, 1)]
    parts.locks.lock("cg_order", "10.20.30.40@orderly", queues_locked, parts.clock.monotonic_ms())
    parts.stats.put("TopicTest", 0, 16, 1000)
    return parts


@pytest.mark.parametrize("vector", mine(), ids=lambda vector: vector["name"])
def test_answered_as_recorded(vector: Vector, world: Parts, tmp_path: Path) -> None:
    name = vector["name"]
    asked = command(name)
    if vector["direction"].endswith("slave broker"):
        world = Parts(tmp_path / "slave", identity=replace(IDENTITY, role=Role.SLAVE))
    answer = world.serve(asked)
    recorded = command(name.replace(".request", ".response"))
    assert answer.is_response
    assert answer.opaque == asked.opaque
    if name in DIFFERENT:
        assert answer.code == DIFFERENT[name]
        assert answer.remark
        return
    assert answer.code == recorded.code, answer.remark
    assert ext_fields(answer) == ext_fields(recorded)
    assert bool(whole_body(answer)) == bool(whole_body(recorded))
    if recorded.body and asked.code != RequestCode.GET_BROKER_CONFIG:
        kind = RESPONSE_BODIES[asked.code]
        assert isinstance(kind, type)
        compare(asked.code, kind.decode(whole_body(answer)), kind.decode(whole_body(recorded)))


def ext_fields(answer: Command) -> Any:
    """Return what can be compared: in the binary form, no fields and no header are the same."""
    if answer.serialize == Serialize.ROCKETMQ:
        return answer.ext_fields or None
    if answer.ext_fields and answer.ext_fields.keys() <= {"version", "offset"}:
        # Their values were from an earlier time.
        return answer.ext_fields.keys()
    return answer.ext_fields


EXACT = {202, 222, 223, 300, 307, 308, 309, 41, 45}
"""Codes whose responses, given the same state, are equal in everything."""


def compare(code: int, ours: Body, theirs: Body) -> None:
    assert type(ours) is type(theirs)
    if code in EXACT:
        assert _sorted(ours) == _sorted(theirs)
        return
    match ours, theirs:
        case bodies.ConsumeStats(), bodies.ConsumeStats():
            assert ours.offset_table == theirs.offset_table
        case bodies.ConsumerIds(), bodies.ConsumerIds():
            assert set(theirs.consumer_id_list) <= set(ours.consumer_id_list)
        case bodies.TopicList(), bodies.TopicList():
            assert set(ours.topic_list) == set(theirs.topic_list)
        case bodies.ConsumeTimeSpans(), bodies.ConsumeTimeSpans():
            assert _spans(ours) == _spans(theirs)
        case bodies.ConsumerConnections(), bodies.ConsumerConnections():
            assert {c.client_addr for c in theirs.connection_set} == {
                c.client_addr for c in ours.connection_set
            }
            assert ours.subscription_table.keys() == theirs.subscription_table.keys()
            assert _rest(ours) == _rest(theirs)
        case bodies.ConsumeQueuePage(), bodies.ConsumeQueuePage():
            assert ours.queue_data == theirs.queue_data
            assert (ours.max_queue_index, ours.filter_data) == (9, "null")
        case bodies.KeyValues(), bodies.KeyValues():
            assert _keys(theirs) - _keys(ours) == set()
        case bodies.BrokerConsumeStats(), bodies.BrokerConsumeStats():
            assert theirs.broker_addr == ours.broker_addr
            assert _group(ours, "cg_push") == _group(theirs, "cg_push")
        case _:
            pass


def _sorted(body: Body) -> Any:
    if isinstance(body, bodies.GroupList):
        # cg_lite was online there.
        return set(body.group_list) | {"cg_lite"}
    return body


def _spans(body: bodies.ConsumeTimeSpans) -> Any:
    return [
        structs.replace(
            span,
            # Written in the recorder's time zone.
            min_time_stamp_str=None,
            max_time_stamp_str=None,
            consume_time_stamp_str=None,
        )
        for span in body.consume_time_span_set
    ]


def _rest(body: bodies.ConsumerConnections) -> Any:
    return structs.replace(body, connection_set=[], subscription_table={})


def _keys(body: bodies.KeyValues) -> set[str]:
    return {key for key in body.table if not key.startswith("commitLogDiskRatio_")}


def _group(body: bodies.BrokerConsumeStats, name: str) -> Any:
    [found] = [table[name] for table in body.consume_stats_list if name in table]
    return sorted((sorted(stats.offset_table.items()) for stats in found), key=str)


def test_pushes_are_as_recorded(world: Parts) -> None:
    for name in ("reset_offset", "reset_offset_list_form"):
        world.serve(command(f"{name}.INVOKE_BROKER_TO_RESET_OFFSET.request"))
        recorded = command(f"{name}.RESET_CONSUMER_CLIENT_OFFSET.oneway")
        for member in world.consumers.members("cg_push"):
            assert isinstance(member.connection, FakePeer)
            pushed = member.connection.sent[-1]
            assert (pushed.code, pushed.ext_fields) == (recorded.code, recorded.ext_fields)
            kind = bodies.QueueOffsetRows if "list" in name else bodies.QueueOffsets
            ours = kind.decode(whole_body(pushed)).offset_table
            theirs = kind.decode(whole_body(recorded)).offset_table
            assert sorted(ours, key=str) == sorted(theirs, key=str)
            if isinstance(ours, dict):
                assert ours == theirs


def test_relayed_requests_are_as_recorded(world: Parts) -> None:
    for name in ("running_info", "consume_directly"):
        world.serve(command(f"{name}.request"))
        recorded = command(f"{name}.to_client.request")
        member = world.consumers.member("cg_push", "10.20.30.40@consumer-1")
        assert member is not None
        assert isinstance(member.connection, FakePeer)
        sent = member.connection.sent[-1]
        assert (sent.code, sent.ext_fields) == (recorded.code, recorded.ext_fields)
        assert whole_body(sent) == whole_body(recorded)


def test_new_members_are_announced_as_recorded(tmp_path: Path) -> None:
    parts, peer = Parts(tmp_path), FakePeer()
    parts.serve(command("push_consumer_start.HEART_BEAT.request"), peer)
    recorded = command("push_consumer_start.NOTIFY_CONSUMER_IDS_CHANGED.oneway")
    [sent] = peer.sent
    assert (sent.code, sent.ext_fields) == (recorded.code, recorded.ext_fields)
