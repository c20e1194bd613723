"""Administration: changes, rejections, and the errors for bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from broker_parts import IDENTITY, Parts, finished
from header_catalogue import REQUEST_HEADERS
from turbopump.broker.config import Role
from turbopump.message import MessageQueue
from turbopump.wire import bodies, headers
from turbopump.wire.bodies import (
    ConsumerOffsets,
    ConsumeStats,
    ConsumeTimeSpans,
    CorrectionOffsets,
    GroupConfig,
    GroupList,
    MessageModel,
    TopicConfig,
    TopicStats,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body

OK = ResponseCode.SUCCESS
ERROR = ResponseCode.SYSTEM_ERROR


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    made = Parts(tmp_path)
    finished(made.topics.update(TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2)))
    made.store.put("T", 0, 1000, 2000, 3000)
    return made


def create(parts: Parts, name: str, **changes: Any) -> Command:
    header = headers.CreateTopic(
        topic=name,
        default_topic="TBW102",
        read_queue_nums=4,
        write_queue_nums=4,
        perm=6,
        topic_filter_type="SINGLE_TAG",
    )
    return parts.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, structs.replace(header, **changes))


# --- invalid requests -----------------------------------------------------------------------------

WITH_FIELDS = [14, 15, 17, 35, 38, 202, 203, 204, 207, 208, 215, 222, 223, 300, 303, 307, 308, 309]
WITH_FIELDS += [314, 315, 317, 321]


@pytest.mark.parametrize("code", WITH_FIELDS)
def test_missing_fields_are_named(parts: Parts, code: int) -> None:
    answer = parts.ask(code)
    assert answer.code == ERROR
    assert "missing required field" in (answer.remark or "")
    assert REQUEST_HEADERS[code].__name__ in (answer.remark or "")


@pytest.mark.parametrize("code", [34, 41, 42, 46, 200])
@pytest.mark.parametrize("body", [b"", b"\xff", b"[1]", b"{", b"{}"])
def test_garbage_bodies_are_errors(parts: Parts, code: int, body: bytes) -> None:
    answer = parts.ask(code, body=body)
    assert answer.code == ERROR
    assert answer.remark


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (14, {"consumerGroup": "g", "topic": "T", "queueId": "x"}),
        (15, {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": str(2**63)}),
        (222, {"topic": "T", "group": "g", "timestamp": "", "isForce": "true"}),
    ],
)
def test_invalid_numbers_are_errors(parts: Parts, code: int, fields: dict[str, str]) -> None:
    answer = parts.ask(code, ext_fields=fields)
    assert answer.code == ERROR
    assert answer.remark


# --- topics ---------------------------------------------------------------------------------------


def test_a_topic_is_created_registered_and_changed(parts: Parts) -> None:
    assert create(parts, "New", topic_sys_flag=1, order=True).code == OK
    made = parts.topics.find("New")
    assert made == TopicConfig(
        topic_name="New", read_queue_nums=4, write_queue_nums=4, perm=6, topic_sys_flag=1
    )
    assert parts.announced == [made]
    assert create(parts, "New", perm=4).code == OK
    assert parts.topics.table["New"].perm == 4


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("../x", {}, "illegal"),
        ("", {}, "blank"),
        ("TBW102", {}, "system topic"),
        ("rmq_sys_x", {}, "system topic"),
        ("New", {"topic_filter_type": "OTHER"}, "OTHER"),
        ("New", {"read_queue_nums": -1}, "readQueueNums"),
        ("New", {"write_queue_nums": 1_000_000}, "writeQueueNums"),
        ("New", {"perm": 64}, "perm"),
    ],
)
def test_invalid_topics(parts: Parts, name: str, changes: dict[str, Any], told: str) -> None:
    answer = create(parts, name, **changes)
    assert answer.code == ERROR
    assert told in (answer.remark or "")
    assert not parts.announced


def test_a_slave_changes_nothing(tmp_path: Path) -> None:
    slave = Parts(tmp_path, identity=replace(IDENTITY, role=Role.SLAVE))
    answers = (
        create(slave, "New"),
        slave.ask(RequestCode.DELETE_TOPIC_IN_BROKER, headers.TopicName(topic="T")),
        slave.ask(200, body=GroupConfig(group_name="g")),
        slave.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, headers.DeleteGroup(group_name="g")),
    )
    for answer in answers:
        assert answer.code == ERROR
        assert "slave" in (answer.remark or "")


def test_a_full_disk_is_a_clear_error(parts: Parts) -> None:
    parts.topics_file.full = True
    answer = create(parts, "New")
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "no space" in (answer.remark or "")
    assert parts.topics.find("New") is None
    assert not parts.announced
    delete = headers.TopicName(topic="T")
    answer = parts.ask(RequestCode.DELETE_TOPIC_IN_BROKER, delete)
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert not parts.store.removed
    parts.groups_file.full = True
    answer = parts.ask(200, body=GroupConfig(group_name="g"))
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_deleting_a_topic_removes_its_queues_counters_and_offsets(parts: Parts) -> None:
    parts.offsets.commit("g", "T", 0, 3)
    parts.offsets.commit("g", "Other", 0, 4)
    parts.stats.put("T", 0, 1, 1)
    delete = headers.TopicName(topic="T")
    assert parts.ask(RequestCode.DELETE_TOPIC_IN_BROKER, delete).code == OK
    assert parts.topics.find("T") is None
    assert parts.store.removed == ["T"]
    assert parts.stats.view("TOPIC_PUT_NUMS", "T") is None
    # A new topic with this name starts at 0: remaining offsets of the old one would skip messages.
    assert parts.offsets.snapshot.offset_table == {"Other@g": {0: 4}}
    assert ConsumerOffsets.decode(parts.offsets_file.saved[-1]) == parts.offsets.snapshot
    assert parts.ask(RequestCode.DELETE_TOPIC_IN_BROKER, delete).code == OK
    system = headers.TopicName(topic="TBW102")
    assert parts.ask(RequestCode.DELETE_TOPIC_IN_BROKER, system).code == ERROR


def test_cleaning_removes_queues_of_topics_that_do_not_exist(parts: Parts) -> None:
    for topic in ("Gone", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_OP_HALF_TOPIC"):
        parts.store.put(topic, 0, 1)
    assert parts.ask(RequestCode.CLEAN_UNUSED_TOPIC).code == OK
    assert parts.store.removed == ["Gone"]


def test_limits_of_queues(parts: Parts) -> None:
    answer = parts.ask(RequestCode.GET_TOPIC_STATS_INFO, headers.TopicName(topic="T"))
    table = TopicStats.decode(whole_body(answer)).offset_table
    first, second = (table[MessageQueue("T", "broker-a", n)] for n in (0, 1))
    assert (first.min_offset, first.max_offset, first.last_update_timestamp) == (0, 3, 3000)
    assert (second.min_offset, second.max_offset, second.last_update_timestamp) == (0, 0, 0)


def test_the_consumers_of_a_topic(parts: Parts) -> None:
    parts.join("online")
    parts.offsets.commit("past", "T", 0, 1)
    answer = parts.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, headers.TopicName(topic="T"))
    assert GroupList.decode(whole_body(answer)).group_list == ["online", "past"]
    nobody = headers.TopicName(topic="Nowhere")
    answer = parts.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, nobody)
    assert (answer.code, GroupList.decode(whole_body(answer)).group_list) == (OK, [])


# --- groups ---------------------------------------------------------------------------------------


def test_a_group_is_created_and_deleted_with_its_offsets(parts: Parts) -> None:
    group = GroupConfig(group_name="g", retry_max_times=2)
    assert parts.ask(200, body=group).code == OK
    assert parts.groups.find("g") == group
    parts.offsets.commit("g", "T", 0, 1)
    delete = headers.DeleteGroup(group_name="g")
    assert parts.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, delete).code == OK
    assert parts.offsets.find("g", "T", 0) == 1
    with_offsets = headers.DeleteGroup(group_name="g", remove_offset=True)
    assert parts.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, with_offsets).code == OK
    assert parts.offsets.find("g", "T", 0) is None
    assert parts.ask(200, body=GroupConfig(group_name="a/b")).code == ERROR


# --- progress -------------------------------------------------------------------------------------


def test_progress_of_a_group(parts: Parts) -> None:
    parts.offsets.commit("g", "T", 0, 2)
    parts.offsets.commit("g", "Gone", 0, 2)
    asked = headers.ConsumeStatsOf(consumer_group="g")
    stats = ConsumeStats.decode(whole_body(parts.ask(RequestCode.GET_CONSUME_STATS, asked)))
    first, second = (stats.offset_table[MessageQueue("T", "broker-a", n)] for n in (0, 1))
    assert (first.broker_offset, first.consumer_offset, first.last_timestamp) == (3, 2, 2000)
    assert (second.broker_offset, second.consumer_offset, second.last_timestamp) == (0, 0, 0)
    assert len(stats.offset_table) == 2


def asked_stats(parts: Parts, topic: str | None = None) -> dict[MessageQueue, tuple[int, int]]:
    """Return the committed and the last offset of each queue of the group."""
    asked = headers.ConsumeStatsOf(consumer_group="g", topic=topic)
    stats = ConsumeStats.decode(whole_body(parts.ask(RequestCode.GET_CONSUME_STATS, asked)))
    return {
        queue: (each.consumer_offset, each.broker_offset)
        for queue, each in stats.offset_table.items()
    }


def test_messages_of_a_topic_without_commits_count_while_members_subscribe_to_it(
    parts: Parts,
) -> None:
    parts.groups.find("g")
    parts.join("g", "T")
    queues = [MessageQueue("T", "broker-a", number) for number in (0, 1)]
    assert asked_stats(parts) == {queues[0]: (0, 3), queues[1]: (0, 0)}
    asked = headers.BrokerConsumeStatsOf(is_order=False)
    answer = parts.ask(RequestCode.GET_BROKER_CONSUME_STATS, asked)
    assert bodies.BrokerConsumeStats.decode(whole_body(answer)).total_diff == 3


def test_messages_of_a_retry_topic_without_commits_count(parts: Parts) -> None:
    finished(parts.topics.update(TopicConfig(topic_name="%RETRY%g", read_queue_nums=1)))
    parts.store.put("%RETRY%g", 0, 1000, 2000)
    assert asked_stats(parts) == {MessageQueue("%RETRY%g", "broker-a", 0): (0, 2)}


def test_offsets_of_broadcasting_members_are_not_those_of_the_broker(parts: Parts) -> None:
    parts.join("g", "T", model=MessageModel.BROADCASTING)
    assert asked_stats(parts) == {}
    parts.offsets.commit("g", "T", 0, 2)
    assert asked_stats(parts)[MessageQueue("T", "broker-a", 0)] == (2, 3)


def test_topics_that_a_running_group_has_unsubscribed_do_not_count(parts: Parts) -> None:
    parts.offsets.commit("g", "T", 0, 2)
    parts.join("g", "Other")
    asked = headers.ConsumeStatsOf(consumer_group="g", topic="T")
    stats = ConsumeStats.decode(whole_body(parts.ask(RequestCode.GET_CONSUME_STATS, asked)))
    assert stats.offset_table == {}


def test_progress_of_all_groups(parts: Parts) -> None:
    parts.groups.find("g")
    parts.offsets.commit("g", "T", 0, 1)
    asked = headers.BrokerConsumeStatsOf(is_order=False)
    answer = parts.ask(RequestCode.GET_BROKER_CONSUME_STATS, asked)
    found = bodies.BrokerConsumeStats.decode(whole_body(answer))
    assert (found.total_diff, found.broker_addr) == (2, "10.20.30.40:10911")
    ordered = headers.BrokerConsumeStatsOf(is_order=True)
    answer = parts.ask(RequestCode.GET_BROKER_CONSUME_STATS, ordered)
    assert bodies.BrokerConsumeStats.decode(whole_body(answer)).total_diff == 0


def test_time_spans(parts: Parts) -> None:
    parts.offsets.commit("g", "T", 0, 1)
    asked = headers.TopicAndGroup(topic="T", group="g")
    answer = parts.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, asked)
    first, second = ConsumeTimeSpans.decode(whole_body(answer)).consume_time_span_set
    assert (first.min_time_stamp, first.max_time_stamp, first.consume_time_stamp) == (
        1000,
        3000,
        1000,
    )
    assert first.delay_time == parts.clock.now_ms() - 2000
    assert (second.min_time_stamp, second.max_time_stamp, second.delay_time) == (-1, -1, 0)
    missing = headers.TopicAndGroup(topic="Nowhere", group="g")
    answer = parts.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, missing)
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


def test_the_delay_is_that_of_the_oldest_message_that_is_left(parts: Parts) -> None:
    parts.store.first["T", 0] = 2
    asked = headers.TopicAndGroup(topic="T", group="g")
    answer = parts.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, asked)
    first, _ = ConsumeTimeSpans.decode(whole_body(answer)).consume_time_span_set
    assert (first.min_time_stamp, first.delay_time) == (1000, parts.clock.now_ms() - 1000)


# --- offsets --------------------------------------------------------------------------------------


def query(parts: Parts, queue_id: int = 0) -> Command:
    asked = headers.QueryConsumerOffset(consumer_group="g", topic="T", queue_id=queue_id)
    return parts.ask(RequestCode.QUERY_CONSUMER_OFFSET, asked)


def test_young_queues_begin_at_zero_others_are_not_found(parts: Parts) -> None:
    assert query(parts).ext_fields == {"offset": "0"}
    assert query(parts, 99).ext_fields == {"offset": "0"}
    parts.store.on_disk = True
    assert query(parts).code == ResponseCode.QUERY_NOT_FOUND
    parts.store.on_disk = False
    parts.store.first["T", 0] = 7
    assert query(parts).code == ResponseCode.QUERY_NOT_FOUND
    parts.offsets.commit("g", "T", 0, 0)
    assert query(parts).ext_fields == {"offset": "0"}


@pytest.mark.parametrize(
    ("group", "topic", "queue_id", "offset"),
    [
        ("g", "Nowhere", 0, 1),
        ("g", "T", -1, 1),
        ("g", "T", 2, 1),
        ("g", "T", 2**31 - 1, 1),
        ("g", "T", 0, -1),
        ("a/b", "T", 0, 1),
        ("g" * 121, "T", 0, 1),
    ],
)
def test_invalid_offsets_are_not_stored(
    parts: Parts, group: str, topic: str, queue_id: int, offset: int
) -> None:
    known = set(parts.groups.table)
    commit = headers.UpdateConsumerOffset(
        consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset
    )
    answer = parts.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    assert (answer.code, answer.ext_fields) == (OK, {})
    assert not parts.offsets.snapshot.offset_table
    assert parts.groups.table.keys() == known


def test_offsets_are_stored_only_for_groups_within_the_limit(parts: Parts) -> None:
    parts.groups.config = replace(parts.groups.config, groups_max=1)
    for group, code in (("g", OK), ("h", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)):
        commit = headers.UpdateConsumerOffset(
            consumer_group=group, topic="T", queue_id=1, commit_offset=0
        )
        assert parts.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit).code == code
        clone = headers.CloneGroupOffset(src_group="g", dest_group=group, topic="T")
        assert parts.ask(RequestCode.CLONE_GROUP_OFFSET, clone).code == code
    assert parts.offsets.groups_of("T") == {"g"}
    commit = headers.UpdateConsumerOffset(
        consumer_group=next(iter(parts.groups.table)), topic="T", queue_id=1, commit_offset=0
    )
    assert parts.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit).code == OK, "the group exists"
    for forget in (parts.offsets.remove_group, lambda _: parts.offsets.remove_topic("T")):
        forget("g")
        assert not parts.offsets.has_group("g")
        parts.offsets.commit("g", "T", 0, 0)
    clone = headers.CloneGroupOffset(src_group="g", dest_group="a/b", topic="T")
    assert parts.ask(RequestCode.CLONE_GROUP_OFFSET, clone).code != OK


@pytest.mark.parametrize("offset", [4, 10**15, 2**63 - 1])
def test_offsets_beyond_the_end_of_a_queue_are_rejected(parts: Parts, offset: int) -> None:
    for commit_offset, code in ((3, OK), (offset, ERROR), (2, OK), (offset, ERROR)):
        commit = headers.UpdateConsumerOffset(
            consumer_group="g", topic="T", queue_id=0, commit_offset=commit_offset
        )
        answer = parts.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
        assert answer.code == code
        if code == ERROR:
            assert f"must be 0 to 3, the end of the queue, got {offset}" in (answer.remark or "")
    assert parts.offsets.find("g", "T", 0) == 2


def test_all_offsets(parts: Parts) -> None:
    nothing = parts.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)
    assert (nothing.code, whole_body(nothing)) == (OK, b'{"offsetTable":{}}')
    parts.offsets.commit("g", "T", 0, 1)
    answer = parts.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)
    assert ConsumerOffsets.decode(whole_body(answer)).offset_table == {"T@g": {0: 1}}


def test_the_slowest_group_decides_and_nothing_is_forgotten(parts: Parts) -> None:
    for group, offset in (("slow", 1), ("fast", 3), ("left-out", 0)):
        parts.offsets.commit(group, "T", 0, offset)
    asked = headers.CorrectionOffsetOf(topic="T", compare_group="x", filter_groups="left-out")
    answer = parts.ask(RequestCode.QUERY_CORRECTION_OFFSET, asked)
    assert CorrectionOffsets.decode(whole_body(answer)).correction_offsets == {0: 1}
    assert parts.offsets.find("left-out", "T", 0) == 0


def test_cloning(parts: Parts) -> None:
    create(parts, "U")
    parts.offsets.commit_all("src", "T", {0: 1, 1: 2})
    parts.offsets.commit_all("src", "U", {0: 3})
    parts.offsets.commit_all("src", "Gone", {0: 4})
    clone = headers.CloneGroupOffset(src_group="src", dest_group="dest", topic="T")
    assert parts.ask(RequestCode.CLONE_GROUP_OFFSET, clone).code == OK
    assert parts.offsets.topics_of("dest") == {"T"}
    everything = headers.CloneGroupOffset(src_group="src", dest_group="all")
    assert parts.ask(RequestCode.CLONE_GROUP_OFFSET, everything).code == OK
    assert parts.offsets.topics_of("all") == {"T", "U"}
    parts.join("src", "U")
    online = headers.CloneGroupOffset(src_group="src", dest_group="online")
    parts.ask(RequestCode.CLONE_GROUP_OFFSET, online)
    assert parts.offsets.topics_of("online") == {"U"}
    forced = headers.CloneGroupOffset(src_group="src", dest_group="forced", offline=True)
    parts.ask(RequestCode.CLONE_GROUP_OFFSET, forced)
    assert parts.offsets.topics_of("forced") == {"T", "U"}
    commit = headers.UpdateConsumerOffset(
        consumer_group="committed", topic="T", queue_id=0, commit_offset=1
    )
    assert parts.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit).code == OK
    assert parts.offsets.find("committed", "T", 0) == 1
    new = {"dest", "all", "online", "forced", "committed"}
    assert parts.groups.table.keys().isdisjoint(new), "offsets create no groups"
