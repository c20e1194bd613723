"""Our producer and lite pull consumer with the C++ client on the other side."""

from __future__ import annotations

import pytest

from compat.clients.peers import Peers
from servers import Standalone
from turbopump import LitePullConsumer, Message, MessageView, Producer

pytestmark = pytest.mark.slow


def test_the_cpp_client_reads_what_we_send(server: Standalone, cpp: Peers) -> None:
    topic, group, large = "OwnToCpp", "own-to-cpp", "äöü 漢字 " * 1000
    named = {"colour": "red", "größe": "groß"}
    with Producer("own", nameserver=server.nameserver) as producer:
        plain = Message(topic, "hällo".encode(), tags="a", keys=["k1", "k2"], properties=named)
        receipts = [
            producer.send(plain),
            producer.send(Message(topic, large.encode())),
            producer.send_batch([Message(topic, b"one"), Message(topic, b"two")]),
        ]
    cpp.start().call("push", group=group, topic=topic, properties=list(named))
    got = {message.body: message for message in cpp.inbox.wait_for(group, 4)}
    assert set(got) == {"hällo", large, "one", "two"}
    first = got["hällo"]
    assert (first.tags, first.keys, first.properties) == ("a", "k1 k2", named)
    assert first.msg_id == receipts[0].message_id
    assert f"{got['one'].msg_id},{got['two'].msg_id}" == receipts[2].message_id


def test_we_read_what_the_cpp_client_sends(server: Standalone, cpp: Peers) -> None:
    topic, peer, large = "CppToOwn", cpp.start(), "x" * 10_000
    sent = [
        peer.send(topic, "hällo", tags="a", keys="k1 k2", properties={"colour": "red"}),
        peer.send(topic, large, tags="b"),
    ]
    with LitePullConsumer(
        "cpp-to-own", nameserver=server.nameserver, subscriptions={topic: "a || b"}
    ) as consumer:
        got: dict[str, MessageView] = {}
        while len(got) < 2:
            got |= {message.body.decode(): message for message in consumer.poll()}
    assert set(got) == {"hällo", large}
    assert (got["hällo"].tags, got["hällo"].keys) == ("a", ["k1", "k2"])
    assert got["hällo"].properties["colour"] == "red"
    assert [got["hällo"].message_id, got[large].message_id] == [each.msg_id for each in sent]
