from __future__ import annotations

import pytest

from header_catalogue import REQUEST_HEADERS, RESPONSE_HEADERS
from turbopump.errors import HeaderError
from turbopump.wire.codes import RequestCode
from turbopump.wire.headers import (
    PullMessage,
    QueueOfTopic,
    ResetOffset,
    SendMessage,
    SendMessageAnswer,
    SendMessageV2,
    UnregisterClient,
)

SEND = {
    "producer_group": "pg",
    "topic": "T",
    "default_topic": "TBW102",
    "default_topic_queue_nums": 4,
    "queue_id": -1,
    "sys_flag": 0,
    "born_timestamp": 1_600_000_000_000,
    "flag": 7,
    "batch": False,
}


def test_letters_carry_the_same_fields() -> None:
    long = SendMessage.from_ext_fields(
        {
            "producerGroup": "pg", "topic": "T", "defaultTopic": "TBW102", "queueId": "-1",
            "defaultTopicQueueNums": "4", "sysFlag": "0", "bornTimestamp": "1600000000000",
            "flag": "7", "batch": "false",
        }
    )  # fmt: skip
    short = SendMessageV2.from_ext_fields(
        {"a": "pg", "b": "T", "c": "TBW102", "d": "4", "e": "-1", "f": "0", "g": "1600000000000",
         "h": "7", "m": "false"}
    )  # fmt: skip
    for name, value in SEND.items():
        assert getattr(long, name) == getattr(short, name) == value
    assert isinstance(short, SendMessage)
    assert set(short.to_ext_fields()) == set("abcdefghm")


def test_values_are_sent_as_text_and_none_is_omitted() -> None:
    fields = ResetOffset(topic="T", group="g", timestamp=-1, is_force=True).to_ext_fields()
    assert fields == {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true"}
    assert UnregisterClient(client_id="c").to_ext_fields() == {"clientID": "c"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("TRUE", True), ("false", False), ("yes", False), ("", False), ("1", True)],
)
def test_booleans_as_java_reads_them(text: str, value: bool) -> None:
    fields = {"topic": "T", "group": "g", "timestamp": "0", "isForce": text}
    assert ResetOffset.from_ext_fields(fields).is_force is value


def test_numbers_with_a_sign() -> None:
    fields = {"topic": "+T", "group": "g", "timestamp": "+5", "isForce": "true"}
    read = ResetOffset.from_ext_fields(fields)
    assert (read.timestamp, read.topic) == (5, "+T")


def test_unknown_fields_are_ignored() -> None:
    answer = SendMessageAnswer.from_ext_fields(
        {"msgId": "m", "queueId": "0", "queueOffset": "5", "TRACE_ON": "true", "new": "x"}
    )
    assert (answer.queue_offset, answer.trace_on, answer.region) == (5, True, None)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (None, "PullMessage: Object missing required field `consumerGroup`"),
        ({"queueId": "seven"}, "which is 'seven'"),
        ({"queueId": str(2**31)}, "queueId"),
        ({"queueOffset": str(2**63)}, "queueOffset"),
        ({"queueId": ""}, "queueId"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, str] | None, complaint: str) -> None:
    good = {
        "consumerGroup": "g", "topic": "T", "queueId": "0", "queueOffset": "0",
        "maxMsgNums": "32", "sysFlag": "2", "commitOffset": "0", "suspendTimeoutMillis": "15000",
        "subVersion": "0",
    }  # fmt: skip
    with pytest.raises(HeaderError, match=complaint):
        PullMessage.from_ext_fields(fields and {**good, **fields})


def test_every_listed_code_exists() -> None:
    assert REQUEST_HEADERS.keys() <= set(RequestCode)
    assert RESPONSE_HEADERS.keys() <= set(RequestCode)


def test_long_values_are_not_quoted_whole() -> None:
    with pytest.raises(HeaderError) as caught:
        QueueOfTopic.from_ext_fields({"topic": "T", "queueId": "x" * 1_000_000})
    assert "queueId" in str(caught.value)
    assert len(str(caught.value)) < 500
