"""Replays, byte by byte, what a RocketMQ Java client sent for its SQL92 subscriptions.

The C++ client does not support SQL92 subscriptions; `test_node` covers the Node client.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from servers import Standalone
from turbopump import Message, Producer
from turbopump.admin import Admin
from turbopump.wire import framing
from turbopump.wire.bodies import CheckClientConfig, ConsumerData, Heartbeat, MessageModel
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.record import decode_records
from vectors import frame

TOPIC = "FilterTopic"
NEWER = b"1794728334015"
TIMEOUT_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def _topic(server: Standalone) -> None:
    with Admin(server.nameserver) as admin:
        admin.topics.create(TOPIC, queues=1)


@pytest.fixture
def peer(server: Standalone) -> Iterator[socket.socket]:
    """A connection to the broker, like a Java client's."""
    host, _, port = server.broker.rpartition(":")
    with closing(socket.create_connection((host, int(port)), TIMEOUT_S)) as connected:
        yield connected


def answer(peer: socket.socket) -> Command:
    """Wait for the broker's next answer; ignore requests that it sends."""
    while True:
        length = _exactly(peer, 4)
        found = framing.decode(length + _exactly(peer, int.from_bytes(length)))
        if found.is_response:
            return found


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        assert more, "the broker has closed the connection"
        data += more
    return data


def asked(peer: socket.socket, name: str) -> Command:
    """Send a recorded request, and return the answer."""
    peer.sendall(frame(f"{name}.request"))
    return answer(peer)


def test_a_subscriber_is_checked_registered_and_woken_by_a_match(
    server: Standalone, peer: socket.socket
) -> None:
    assert asked(peer, "sql_consumer_start.CHECK_CLIENT_CONFIG").code == ResponseCode.SUCCESS
    assert asked(peer, "sql_consumer_start.HEART_BEAT").code == ResponseCode.SUCCESS
    # The client then learned of its queues, which made its subscription newer.
    assert asked(peer, "sql_messages").code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    beat = frame("sql_consumer_start.HEART_BEAT.request").replace(b"1794728333842", NEWER)
    peer.sendall(beat)
    assert answer(peer).code == ResponseCode.SUCCESS
    pull = frame("sql_messages.request")
    assert NEWER in pull
    expected = framing.decode(frame("sql_messages.response"))
    (wanted,) = decode_records(whole_body(expected))
    with Producer("shop", nameserver=server.nameserver) as producer:
        for number in range(5):
            unwanted = Message(TOPIC, b"%d" % number, properties={"a": "1", "b": "yes"})
            assert producer.send(unwanted).queue_offset == number
        peer.sendall(pull)
        # A connection's requests are served in order: after this answer, the pull is held.
        peer.sendall(beat)
        assert answer(peer).opaque == framing.decode(beat).opaque
        own = {name: wanted.properties[name] for name in ("a", "b", "x", "region")}
        producer.send(Message(TOPIC, wanted.body, properties=own))
    assert_as_recorded(answer(peer), expected)
    # From the first message on, those that do not match are skipped.
    peer.sendall(pull.replace(b'"queueOffset":"5"', b'"queueOffset":"0"'))
    assert_as_recorded(answer(peer), expected)


def assert_as_recorded(found: Command, expected: Command) -> None:
    assert (found.code, found.ext_fields) == (expected.code, expected.ext_fields)
    both = (found, expected)
    bodies = [[view.body for view in decode_records(whole_body(each))] for each in both]
    assert bodies[0] == bodies[1]


def test_an_invalid_expression_is_rejected_and_its_pulls_get_the_recorded_code(
    server: Standalone, peer: socket.socket
) -> None:
    assert asked(peer, "sql_bad_expression").code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    checked = CheckClientConfig.decode(
        whole_body(framing.decode(frame("sql_bad_expression.request")))
    )
    data = ConsumerData(
        group_name=checked.group,
        message_model=MessageModel.CLUSTERING,
        subscription_data_set=[checked.subscription_data],
    )
    beat = Heartbeat(client_id=checked.client_id, consumer_data_set=[data])
    peer.sendall(framing.encode(request(RequestCode.HEART_BEAT, body=beat.encode())))
    assert answer(peer).code == ResponseCode.SUCCESS
    found = asked(peer, "pull_filter_data_not_exist")
    assert found.code == ResponseCode.FILTER_DATA_NOT_EXIST
    assert "(at character 4)" in (found.remark or "")
