"""Operators and running clients: resets, relays, settings, and internal state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import vectors
from broker_parts import Parts, finished
from turbopump.core import CORE_NAME
from turbopump.message import MessageQueue, PhysicalOffset, QueueOffset
from turbopump.settings import parse_properties
from turbopump.wire import bodies, headers
from turbopump.wire.bodies import (
    ConsumerStatus,
    KeyValues,
    QueueOffsets,
    TopicConfig,
)
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import FLAG_RESPONSE, Command, whole_body
from turbopump.wire.framing import decode
from turbopump.wire.hosts import host
from turbopump.wire.ids import offset_id

OK = ResponseCode.SUCCESS
ERROR = ResponseCode.SYSTEM_ERROR


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    made = Parts(tmp_path)
    finished(made.topics.update(TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2)))
    made.store.put("T", 0, 1000, 2000, 3000)
    return made


# --- resets ---------------------------------------------------------------------------------------


def reset(parts: Parts, timestamp: int, *, force: bool = True, **changes: Any) -> Command:
    header = headers.ResetOffset(topic="T", group="g", timestamp=timestamp, is_force=force)
    return parts.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header, **changes)


def targets(answer: Command) -> list[int]:
    assert answer.code == OK, answer.remark
    return list(QueueOffsets.decode(whole_body(answer)).offset_table.values())


def test_resets_go_to_a_timestamp_or_to_the_end(parts: Parts) -> None:
    peer = parts.join()
    parts.offsets.commit_all("g", "T", {0: 1, 1: 0})
    assert targets(reset(parts, 2500)) == [2, 0]
    assert targets(reset(parts, -1)) == [3, 0]
    assert targets(reset(parts, 2500, force=False)) == [1, 0], "without force only backwards"
    assert targets(reset(parts, 0, force=False)) == [0, 0]
    assert [command.code for command in peer.sent] == [220] * 4
    assert parts.offsets.find("g", "T", 0) == 1, "members commit it, not the broker"


def test_commits_during_a_search_by_time_are_not_taken_back(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.join()
    parts.offsets.commit_all("g", "T", {0: 1, 1: 0})
    find_offset = parts.store.find_offset

    def slow(topic: str, queue_id: int, timestamp_ms: int) -> Iterator[QueueOffset]:
        if queue_id == 1:
            parts.offsets.commit("g", "T", 0, 3)
        yield from find_offset(topic, queue_id, timestamp_ms)

    monkeypatch.setattr(parts.store, "find_offset", slow)
    parts.store.put("T", 0, 4000)
    assert targets(reset(parts, 5000, force=False)) == [3, 0]


def test_c_plus_plus_gets_a_list(parts: Parts) -> None:
    peer = parts.join()
    parts.offsets.commit_all("g", "T", {0: 1, 1: 0})
    reset(parts, -1, language=Language.CPP)
    assert whole_body(peer.sent[-1]).startswith(b'{"offsetTable":[{')
    reset(parts, -1)
    assert whole_body(peer.sent[-1]).startswith(b'{"offsetTable":{{')


def test_invalid_resets(parts: Parts) -> None:
    assert reset(parts, 0).code == ERROR, "no offset is stored"
    parts.offsets.commit("g", "T", 0, 1)
    answer = reset(parts, 0)
    assert (answer.code, "queue 1" in (answer.remark or "")) == (ERROR, True)
    parts.offsets.commit("g", "T", 1, 0)
    assert reset(parts, 0).code == ResponseCode.CONSUMER_NOT_ONLINE
    parts.join(version=27)
    assert reset(parts, 0).code == ERROR
    finished(parts.topics.delete("T"))
    assert "T" in (reset(parts, 0).remark or "")


# --- relays ---------------------------------------------------------------------------------------


def answered(code: int, body: bytes = b"", remark: str | None = None) -> Command:
    return Command(code, flag=FLAG_RESPONSE, opaque=99, remark=remark, body=body, language=1)


def test_a_clients_answer_is_forwarded_unchanged(parts: Parts) -> None:
    peer = parts.join()
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


def test_clients_that_are_disconnected_silent_or_too_old(parts: Parts) -> None:
    asked = headers.RunningInfoOf(consumer_group="g", client_id="c1")
    assert parts.ask(307, asked).code == ERROR
    parts.join()
    assert parts.ask(307, asked).code == ResponseCode.CONSUME_MSG_TIMEOUT
    parts.join(version=61)
    old = headers.RunningInfoOf(consumer_group="g", client_id="c2")
    answer = parts.ask(307, old)
    assert (answer.code, "too low" in (answer.remark or "")) == (ERROR, True)


def test_a_message_is_consumed_directly(parts: Parts) -> None:
    peer = parts.join()
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
    first, second, silent = parts.join(), parts.join(), parts.join()
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
def test_invalid_settings(parts: Parts, body: bytes, code: int, told: str) -> None:
    answer = parts.ask(25, body=body)
    assert answer.code == code
    assert told in (answer.remark or "")
    assert parts.live.current == parts.config


def test_an_empty_change_is_fine(parts: Parts) -> None:
    assert parts.ask(25).code == OK


# --- internal state -------------------------------------------------------------------------------


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
    assert table["core"] == CORE_NAME
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


def test_every_figure_of_an_apache_broker_is_reported(parts: Parts) -> None:
    for elapsed_ms, writes in ((0, 22), (3, 29), (10, 1), (49, 1)):
        parts.info.put_times.note(elapsed_ms, writes)
    answer = decode(vectors.frame("broker_runtime_info.response"))
    recorded = KeyValues.decode(whole_body(answer)).table
    table = KeyValues.decode(whole_body(parts.ask(28))).table
    key = "putMessageDistributeTime"
    assert table[key] == recorded[key]
    assert table["putMessageEntireTimeMax"] == "49"
    ours = {name for name, text in table.items() if text != ""}
    # One has a path in its name, the others are there once a level is used.
    others = {name for name in recorded if name.startswith(("commitLogDiskRatio_", "schedule"))}
    assert ours >= recorded.keys() - others
    for name in (each for each in recorded if each.endswith("Capacity")):
        assert table[name] != "0"


@pytest.mark.parametrize("code", [37, 323, 52])
def test_unimplemented_requests_are_not_supported(parts: Parts, code: int) -> None:
    answer = parts.ask(code)
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert str(code) in (answer.remark or "")


@pytest.mark.parametrize(("code", "failed"), [(50, 209), (51, 210), (53, 211)])
def test_access_control_is_off(parts: Parts, code: int, failed: int) -> None:
    assert parts.ask(code).code == failed
