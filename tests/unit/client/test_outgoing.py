"""From messages to requests: batches, sizes, properties, names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump import LitePullConsumer, PushConsumer
from turbopump.client.names import check_group, check_topic, with_namespace, without_namespace
from turbopump.client.outgoing import (
    MessageRules,
    check_batch,
    outgoing,
    outgoing_batch,
    split_batch,
)
from turbopump.errors import InvalidArgument
from turbopump.message import Message
from turbopump.wire import properties
from turbopump.wire.batch import decode_batch
from turbopump.wire.compression import inflate
from turbopump.wire.sysflag import Compression, compression_of

ID = "7F00000116C74E0E2F2A49BCC3FD0002"
RULES = MessageRules()

words = st.text("abcdefgäß城", min_size=1, max_size=8)
messages = st.builds(
    Message,
    st.just("T"),
    st.binary(min_size=1, max_size=300),
    tags=st.none() | words,
    keys=st.lists(words, max_size=3),
    properties=st.dictionaries(words, words, max_size=3),
    flag=st.integers(-(2**31), 2**31 - 1),
)


@given(messages)
def test_sent_messages_can_be_read_back(message: Message) -> None:
    sent = outgoing(message, ID, RULES)
    named = properties.decode(sent.properties)
    assert named.pop("UNIQ_KEY") == ID
    assert named.pop("WAIT") == "true"
    assert named.pop("TAGS", None) == message.tags
    assert named.pop("KEYS", "").split() == list(message.keys)
    assert named == dict(message.properties)
    assert (sent.body, sent.sys_flag, sent.flag) == (message.body, 0, message.flag)


def test_bodies_that_compression_would_enlarge_are_sent_uncompressed() -> None:
    body = bytes(range(256))
    sent = outgoing(Message("T", body), "id", MessageRules(compress_from_bytes=10))
    assert (sent.body, sent.sys_flag) == (body, 0)


@pytest.mark.parametrize("compression", list(Compression))
def test_every_compression_can_be_undone(compression: Compression) -> None:
    rules = MessageRules(compress_from_bytes=10, compression=compression)
    sent = outgoing(Message("T", b"x" * 1000), ID, rules)
    assert compression_of(sent.sys_flag) is compression
    assert inflate(bytes(sent.body), compression) == b"x" * 1000


@given(st.lists(messages, max_size=40), st.integers(1, 2000), st.integers(1, 20))
def test_split_batches_keep_everything_in_order_and_to_the_limits(
    many: list[Message], bytes_max: int, count_max: int
) -> None:
    batches = list(split_batch(many, bytes_max, count_max))
    assert [message for batch in batches for message in batch] == many
    for batch in batches:
        sent = outgoing_batch(batch, [ID] * len(batch), RULES)
        assert 1 <= len(batch) <= count_max
        assert len(batch) == 1 or len(sent.body) <= bytes_max
        entries = list(decode_batch(bytes(sent.body)))
        assert [entry.body for entry in entries] == [message.body for message in batch]


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ([], "a batch must have at least one message"),
        ([Message("T", b"x"), Message("U", b"x")], "must have the same topic"),
        ([Message("T", b"x"), Message("T", b"x", wait_stored=False)], "wait_stored"),
        ([Message("T", b"x", delay_level=1)], "must have no delay"),
        ([Message("%RETRY%g", b"x")], "and no retry topic"),
        ([Message("T", b"")], "body must be 1–"),
    ],
)
def test_messages_that_cannot_share_a_batch(batch: list[Message], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        check_batch(batch, RULES)


def test_a_batch_has_a_size_too() -> None:
    batch = [Message("T", b"x" * 60)] * 2
    with pytest.raises(InvalidArgument, match="split_batch"):
        outgoing_batch(batch, [ID, ID], MessageRules(body_bytes_max=100))


def test_a_key_alone_is_one_key() -> None:
    sent = outgoing(Message("T", b"x", keys="order-42"), ID, RULES)
    assert properties.decode(sent.properties)["KEYS"] == "order-42"


def test_a_namespace_counts_for_the_length_of_a_topic() -> None:
    with pytest.raises(InvalidArgument, match="topic must be 1–127 of"):
        outgoing(Message("T" * 120, b"x"), ID, RULES, namespace="n" * 20)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("orders", "ns%orders"),
        ("ns%orders", "ns%orders"),
        ("%RETRY%g", "%RETRY%ns%g"),
        ("%DLQ%g", "%DLQ%ns%g"),
        ("TBW102", "TBW102"),
        ("CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_TRANS"),
    ],
)
def test_namespaces(name: str, inside: str) -> None:
    assert with_namespace("ns", name) == inside
    assert with_namespace("", name) == name
    assert without_namespace("ns", inside) == name.replace("ns%", "")


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "ü", "x" * 256])
def test_names_of_groups_and_topics(name: str) -> None:
    with pytest.raises(InvalidArgument, match="group must be"):
        check_group(name)
    with pytest.raises(InvalidArgument, match="topic must be"):
        check_topic(name)


@pytest.mark.parametrize("name", ["RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"])
def test_uncommitted_messages_are_not_shown_to_consumers(name: str) -> None:
    listener: Any = print
    with pytest.raises(InvalidArgument, match="it holds messages of open transactions"):
        PushConsumer("g", listener, subscriptions={name: "*"}, nameserver="127.0.0.1:1")
    with pytest.raises(InvalidArgument, match="it holds messages of open transactions"):
        LitePullConsumer("g", subscriptions={name: "*"}, nameserver="127.0.0.1:1")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"body_bytes_max": 0}, "body_bytes_max must be .*, got 0"),
        ({"compress_from_bytes": 0}, "compress_from_bytes must be .*, got 0"),
        ({"new_topic_queues": 0}, "new_topic_queues must be .*, got 0"),
        ({"compression_level": 10}, "compression_level must be 0–9, got 10"),
    ],
)
def test_rules_are_checked(changes: dict[str, int], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        MessageRules(
            body_bytes_max=changes.get("body_bytes_max", 1),
            compress_from_bytes=changes.get("compress_from_bytes", 1),
            new_topic_queues=changes.get("new_topic_queues", 1),
            compression_level=changes.get("compression_level", 1),
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"body": "text"}, "body must be bytes, got str"),
        ({"tags": ["a"]}, "tags must be one string or None, got \\['a'\\]"),
        ({"keys": [1]}, "keys must be strings, got \\[1\\]"),
        ({"keys": 5}, "keys must be strings, got 5"),
        ({"keys": iter(["a"])}, "keys must be strings, got <list_iterator"),
        ({"properties": [("n", "5")]}, "properties must map names to values, got "),
        ({"properties": {"n": 5}}, "property 'n' must be a string, got 5"),
        ({"delay_level": "1"}, "delay_level must be an integer, got '1'"),
    ],
)
def test_values_of_the_wrong_type_are_rejected_by_name(changes: dict[str, Any], words: str) -> None:
    values: dict[str, Any] = {"topic": "T", "body": b"x", **changes}
    with pytest.raises(InvalidArgument, match=words):
        outgoing(Message(**values), ID, MessageRules())


def test_only_messages_are_sent() -> None:
    not_a_message: Any = "hello"
    with pytest.raises(InvalidArgument, match="send\\(\\) expects a Message, got str"):
        outgoing(not_a_message, ID, MessageRules())
