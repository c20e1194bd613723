"""Administration: what changes, what is refused, and what bad input is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from broker_parts import IDENTITY, FakePeer, Parts
from turbopump.broker.config import Role
from turbopump.message import MessageQueue, PhysicalOffset
from turbopump.settings import parse_properties
from turbopump.wire import bodies, headers
from turbopump.wire.bodies import (
    ConsumerStatus,
    ConsumeStats,
    ConsumeTimeSpans,
    CorrectionOffsets,
    GroupConfig,
    GroupList,
    Heartbeat,
    KeyValues,
    QueueOffsets,
    Subscription,
    TopicConfig,
    TopicStats,
)
from turbopump.wire.catalogue import REQUEST_HEADERS
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import FLAG_RESPONSE, Command, whole_body
from turbopump.wire.hosts import host
from turbopump.wire.ids import offset_id

OK = ResponseCode.SUCCESS
ERROR = ResponseCode.SYSTEM_ERROR


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    made = Parts(tmp_path)
    made.topics.update(TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2))
    made.store.put("T", 0, 1000, 2000, 3000)
    return made


def joined(parts: Parts, group: str = "g", topic: str = "T", **changes: Any) -> FakePeer:
    peer = FakePeer(f"10.0.0.{len(parts.consumers.members(group)) + 1}:1")
    beat = Heartbeat(
        client_id=f"c{len(parts.consumers.members(group)) + 1}",
        consumer_data_set=[
            bodies.ConsumerData(
                group_name=group,
                subscription_data_set=[Subscription(topic=topic, sub_string="*")],
            )
        ],
    )
    parts.ask(RequestCode.HEART_BEAT, body=beat, peer=peer, **changes)
    peer.sent.clear()
    return peer


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


# --- whatever is asked wrongly --------------------------------------------------------------------

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
def test_numbers_that_are_none_are_errors(parts: Parts, code: int, fields: dict[str, str]) -> None:
    answer = parts.ask(code, ext_fields=fields)
    assert answer.code == ERROR
    assert answer.remark


# --- topics ---------------------------------------------------------------------------------------


def test_a_topic_is_made_announced_and_changed(parts: Parts) -> None:
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
def test_topics_that_cannot_be(parts: Parts, name: str, changes: dict[str, Any], told: str) -> None:
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


def test_a_full_disk_is_an_error_that_says_so(parts: Parts) -> None:
    parts.topics_file.full = True
    answer = create(parts, "New")
    assert answer.code == ERROR
    assert "no space" in (answer.remark or "")
    assert parts.topics.find("New") is None
    assert not parts.announced


def test_deleting_a_topic_takes_its_queues_and_counters_but_no_offsets(parts: Parts) -> None:
    parts.offsets.commit("g", "T", 0, 3)
    parts.stats.put("T", 0, 1, 1)
    delete = headers.TopicName(topic="T")
    assert parts.ask(RequestCode.DELETE_TOPIC_IN_BROKER, delete).code == OK
    assert parts.topics.find("T") is None
    assert parts.store.removed == ["T"]
    assert parts.stats.view("TOPIC_PUT_NUMS", "T") is None
    assert parts.offsets.find("g", "T", 0) == 3
    assert parts.ask(RequestCode.DELETE_TOPIC_IN_BROKER, delete).code == OK
    system = headers.TopicName(topic="TBW102")
    assert parts.ask(RequestCode.DELETE_TOPIC_IN_BROKER, system).code == ERROR


def test_cleaning_takes_queues_of_topics_that_are_not_there(parts: Parts) -> None:
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


def test_who_consumes_a_topic(parts: Parts) -> None:
    joined(parts, "online")
    parts.offsets.commit("past", "T", 0, 1)
    answer = parts.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, headers.TopicName(topic="T"))
    assert GroupList.decode(whole_body(answer)).group_list == ["online", "past"]
    nobody = headers.TopicName(topic="Nowhere")
    answer = parts.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, nobody)
    assert (answer.code, GroupList.decode(whole_body(answer)).group_list) == (OK, [])


# --- groups ---------------------------------------------------------------------------------------


def test_a_group_is_made_and_deleted_with_its_offsets(parts: Parts) -> None:
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


def test_topics_that_a_running_group_no_longer_wants_do_not_count(parts: Parts) -> None:
    parts.offsets.commit("g", "T", 0, 2)
    joined(parts, "g", "Other")
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


def test_all_offsets(parts: Parts) -> None:
    assert parts.ask(RequestCode.GET_ALL_CONSUMER_OFFSET).code == ERROR
    parts.offsets.commit("g", "T", 0, 1)
    answer = parts.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)
    assert whole_body(answer) == b'{"offsetTable":{"T@g":{0:1}}}'


def test_the_slowest_group_decides_and_nothing_is_forgotten(parts: Parts) -> None:
    for group, offset in (("slow", 1), ("fast", 3), ("left-out", 0)):
        parts.offsets.commit(group, "T", 0, offset)
    asked = headers.CorrectionOffsetOf(topic="T", compare_group="x", filter_groups="left-out")
    answer = parts.ask(RequestCode.QUERY_CORRECTION_OFFSET, asked)
    assert CorrectionOffsets.decode(whole_body(answer)).correction_offsets == {0: 1}
    assert parts.offsets.find("left-out", "T", 0) == 0


def test_cloning(parts: Parts) -> None:
    create(parts, "U")
    parts.offsets.reset("src", "T", {0: 1, 1: 2})
    parts.offsets.reset("src", "U", {0: 3})
    parts.offsets.reset("src", "Gone", {0: 4})
    clone = headers.CloneGroupOffset(src_group="src", dest_group="dest", topic="T")
    assert parts.ask(RequestCode.CLONE_GROUP_OFFSET, clone).code == OK
    assert parts.offsets.topics_of("dest") == {"T"}
    everything = headers.CloneGroupOffset(src_group="src", dest_group="all")
    assert parts.ask(RequestCode.CLONE_GROUP_OFFSET, everything).code == OK
    assert parts.offsets.topics_of("all") == {"T", "U"}
    joined(parts, "src", "U")
    online = headers.CloneGroupOffset(src_group="src", dest_group="online")
    parts.ask(RequestCode.CLONE_GROUP_OFFSET, online)
    assert parts.offsets.topics_of("online") == {"U"}
    forced = headers.CloneGroupOffset(src_group="src", dest_group="forced", offline=True)
    parts.ask(RequestCode.CLONE_GROUP_OFFSET, forced)
    assert parts.offsets.topics_of("forced") == {"T", "U"}


# --- resets ---------------------------------------------------------------------------------------


def reset(parts: Parts, timestamp: int, *, force: bool = True, **changes: Any) -> Command:
    header = headers.ResetOffset(topic="T", group="g", timestamp=timestamp, is_force=force)
    return parts.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header, **changes)


def targets(answer: Command) -> list[int]:
    assert answer.code == OK, answer.remark
    return list(QueueOffsets.decode(whole_body(answer)).offset_table.values())


def test_resets_go_to_a_moment_or_to_the_end(parts: Parts) -> None:
    peer = joined(parts)
    parts.offsets.reset("g", "T", {0: 1, 1: 0})
    assert targets(reset(parts, 2500)) == [2, 0]
    assert targets(reset(parts, -1)) == [3, 0]
    assert targets(reset(parts, 2500, force=False)) == [1, 0], "without force only backwards"
    assert targets(reset(parts, 0, force=False)) == [0, 0]
    assert [command.code for command in peer.sent] == [220] * 4
    assert parts.offsets.find("g", "T", 0) == 1, "members commit it, not the broker"


def test_c_plus_plus_gets_a_list(parts: Parts) -> None:
    peer = joined(parts)
    parts.offsets.reset("g", "T", {0: 1, 1: 0})
    reset(parts, -1, language=Language.CPP)
    assert whole_body(peer.sent[-1]).startswith(b'{"offsetTable":[{')
    reset(parts, -1)
    assert whole_body(peer.sent[-1]).startswith(b'{"offsetTable":{{')


def test_resets_that_cannot_be(parts: Parts) -> None:
    assert reset(parts, 0).code == ERROR, "no offset is stored"
    parts.offsets.commit("g", "T", 0, 1)
    answer = reset(parts, 0)
    assert (answer.code, "queue 1" in (answer.remark or "")) == (ERROR, True)
    parts.offsets.commit("g", "T", 1, 0)
    assert reset(parts, 0).code == ResponseCode.CONSUMER_NOT_ONLINE
    joined(parts, version=27)
    assert reset(parts, 0).code == ERROR
    parts.topics.delete("T")
    assert "T" in (reset(parts, 0).remark or "")


# --- relays ---------------------------------------------------------------------------------------


def answered(code: int, body: bytes = b"", remark: str | None = None) -> Command:
    return Command(code, flag=FLAG_RESPONSE, opaque=99, remark=remark, body=body, language=1)


def test_a_clients_answer_is_handed_on_as_it_is(parts: Parts) -> None:
    peer = joined(parts)
    peer.answers[307] = answered(1, b"body", "its own words")
    asked = headers.RunningInfoOf(consumer_group="g", client_id="c1", jstack_enable=True)
    answer = parts.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, asked, opaque=5)
    assert (answer.code, answer.remark, answer.body) == (1, "its own words", b"body")
    assert (answer.opaque, answer.language, answer.is_response) == (5, 1, True)
    assert peer.sent[-1].ext_fields == {
        "consumerGroup": "g",
        "clientId": "c1",
        "jstackEnable": "true",
    }


def test_clients_that_are_gone_silent_or_too_old(parts: Parts) -> None:
    asked = headers.RunningInfoOf(consumer_group="g", client_id="c1")
    assert parts.ask(307, asked).code == ERROR
    joined(parts)
    assert parts.ask(307, asked).code == ResponseCode.CONSUME_MSG_TIMEOUT
    joined(parts, version=61)
    old = headers.RunningInfoOf(consumer_group="g", client_id="c2")
    answer = parts.ask(307, old)
    assert (answer.code, "too low" in (answer.remark or "")) == (ERROR, True)


def test_a_message_is_consumed_directly(parts: Parts) -> None:
    peer = joined(parts)
    peer.answers[309] = answered(0, b'{"consumeResult":"CR_SUCCESS"}')
    parts.store.records[7] = b"a record"
    message_id = offset_id(host("10.0.0.1", 10911), PhysicalOffset(7))
    asked = headers.ConsumeDirectly(consumer_group="g", client_id="c1", msg_id=message_id)
    assert parts.ask(309, asked).code == OK
    assert peer.sent[-1].body == b"a record"
    assert (peer.sent[-1].ext_fields or {})["brokerName"] == "broker-a"
    for bad in ("", "zz", offset_id(host("10.0.0.1", 10911), PhysicalOffset(8))):
        answer = parts.ask(309, structs.replace(asked, msg_id=bad))
        assert answer.code == ERROR
        assert answer.remark


def test_the_status_of_all_clients_or_of_one(parts: Parts) -> None:
    first, second, silent = joined(parts), joined(parts), joined(parts)
    queue = MessageQueue("T", "broker-a", 0)
    for peer, offset in ((first, 1), (second, 2)):
        status = ConsumerStatus(message_queue_table={queue: offset})
        peer.answers[221] = answered(0, status.encode())
    silent.answers[221] = answered(0, b"garbage")
    asked = headers.ConsumerStatusOf(topic="T", group="g")
    found = ConsumerStatus.decode(whole_body(parts.ask(223, asked)))
    assert found.consumer_table == {"c1": {queue: 1}, "c2": {queue: 2}}
    one = headers.ConsumerStatusOf(topic="T", group="g", client_addr="c2")
    assert ConsumerStatus.decode(whole_body(parts.ask(223, one))).consumer_table.keys() == {"c2"}
    nobody = headers.ConsumerStatusOf(topic="T", group="nobody")
    assert parts.ask(223, nobody).code == ERROR


# --- settings -------------------------------------------------------------------------------------


def test_settings_are_changed_and_shown(parts: Parts) -> None:
    assert parts.ask(25, body=b"brokerPermission=4\n# comment\nunknownKey=1\n").code == OK
    assert parts.live.current.access.permission == 4
    answer = parts.ask(26)
    assert parse_properties(whole_body(answer).decode())["brokerPermission"] == "4"
    assert '"counter":1' in (answer.ext_fields or {})["version"]


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (b"brokerPermission=ninety", ERROR, "brokerPermission"),
        (b"nonsense", ERROR, "line 1"),
        (b"\xff\xfe", ERROR, "utf-8"),
        (b"listenPort=1", ERROR, "only at start"),
        (b"regionId=x\nconfigBlackList=", ResponseCode.NO_PERMISSION, "black list"),
    ],
)
def test_settings_that_cannot_be(parts: Parts, body: bytes, code: int, told: str) -> None:
    answer = parts.ask(25, body=body)
    assert answer.code == code
    assert told in (answer.remark or "")
    assert parts.live.current == parts.config


def test_an_empty_change_is_fine(parts: Parts) -> None:
    assert parts.ask(25).code == OK


# --- looking inside -------------------------------------------------------------------------------


def test_units_of_a_queue(parts: Parts) -> None:
    parts.store.units["T", 0] = [(0, 10, 1), (10, 20, 2), (30, 30, 3)]
    asked = headers.ConsumeQueuePart(topic="T", queue_id=0, index=1, count=1)
    page = bodies.ConsumeQueuePage.decode(whole_body(parts.ask(321, asked)))
    assert [(u.physic_offset, u.physic_size, u.tags_code) for u in page.queue_data] == [(10, 20, 2)]
    assert (page.min_queue_index, page.max_queue_index, page.filter_data) == (0, 3, None)
    with_group = structs.replace(asked, consumer_group="g")
    page = bodies.ConsumeQueuePage.decode(whole_body(parts.ask(321, with_group)))
    assert page.filter_data == "g@T is not online!"
    for outside in (-1, 3):
        answer = parts.ask(321, structs.replace(asked, index=outside))
        assert (answer.code, answer.body) == (OK, b"")
        assert answer.remark
    assert parts.ask(321, structs.replace(asked, queue_id=9)).code == ERROR


def test_cleaning_the_log(parts: Parts) -> None:
    assert parts.ask(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE).code == OK
    assert parts.ask(RequestCode.DELETE_EXPIRED_COMMITLOG).code == OK
    assert parts.store.cleaned == [False, True]


def test_runtime_info(parts: Parts) -> None:
    parts.clock.advance_ns((26 * 3600 + 61) * 1_000_000_000)
    parts.stats.put("T", 0, 2, 300)
    parts.delays = bodies.DelayOffsets(offset_table={3: 7})
    parts.store.put("SCHEDULE_TOPIC_XXXX", 2, *range(9))
    table = KeyValues.decode(whole_body(parts.ask(28))).table
    assert table["runtime"] == "[ 1 days, 2 hours, 1 minutes, 1 seconds ]"
    assert table["brokerVersionDesc"] == "V4_9_8"
    assert table["putMessageTimesTotal"] == "2"
    assert table["putMessageAverageSize"] == "150.0"
    assert table["scheduleMessageOffset_3"] == "7,9"
    assert table["earliestMessageTimeStamp"] == "-1"
    assert table["putTps"] == "  "
    parts.clock.advance_ns(10_000_000_000)
    parts.stats.sample()
    table = KeyValues.decode(whole_body(parts.ask(28))).table
    assert table["msgPutTotalTodayNow"] == "2"
    assert float(table["putTps"].split(" ")[0]) >= 0


@pytest.mark.parametrize("code", [37, 301, 323, 52])
def test_what_is_not_there_yet_is_not_supported(parts: Parts, code: int) -> None:
    answer = parts.ask(code)
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert str(code) in (answer.remark or "")


@pytest.mark.parametrize(("code", "failed"), [(50, 209), (51, 210), (53, 211)])
def test_access_control_is_off(parts: Parts, code: int, failed: int) -> None:
    assert parts.ask(code).code == failed
