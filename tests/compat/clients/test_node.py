"""The Node client against a running server."""

from __future__ import annotations

import pytest

from compat.clients.operating import Operator
from compat.clients.peers import Got, Peers, attempts
from turbopump.wire.sysflag import COMPRESSED

pytestmark = pytest.mark.slow


def bodies(messages: list[Got]) -> list[str]:
    return [message.body for message in messages]


def test_everything_about_a_message_arrives(node: Peers, operator: Operator) -> None:
    operator.create_topic("NodeWhole")
    peer = node.start()
    named = {"colour": "red", "größe": "äöü 漢字"}
    sent = peer.send("NodeWhole", "hällo 世界", tags="a", keys="k1 k2", properties=named)
    peer.call("push", group="node-whole", topic="NodeWhole")
    [got] = node.inbox.wait_for("node-whole", 1)
    assert (got.topic, got.body, got.tags, got.keys) == ("NodeWhole", "hällo 世界", "a", "k1 k2")
    assert got.properties.items() >= named.items()
    assert (got.msg_id, got.queue_offset) == (sent.msg_id, sent.queue_offset)
    assert got.reconsume_times == 0
    assert got.born_ms <= got.stored_ms <= got.at_ms


def test_tag_expression_selects(node: Peers, operator: Operator) -> None:
    # One queue, so that the last message is the last to be examined.
    operator.create_topic("NodeTags", queues=1)
    peer = node.start()
    peer.call("push", group="node-tags", topic="NodeTags", expression="a || b")
    tags = ["a", "c", "b", "ab", ""] * 3
    for number, tag in enumerate(tags):
        peer.send("NodeTags", f"{tag}:{number}", tags=tag)
    peer.send("NodeTags", "last", tags="b")
    got = node.inbox.wait_for_bodies("node-tags", ["last"])
    wanted = [f"{tag}:{number}" for number, tag in enumerate(tags) if tag in {"a", "b"}]
    assert bodies(got) == [*wanted, "last"]


def test_sql92_expression_selects_retries_included(node: Peers, operator: Operator) -> None:
    operator.create_topic("NodeSql", queues=1)
    operator.create_group("node-sql")
    peer = node.start()
    expression = {"expressionType": "SQL92", "subString": "amount > 9 AND region IN ('eu', 'us')"}
    failures = {"20 us": 1}
    peer.call("push", group="node-sql", topic="NodeSql", expression=expression, failures=failures)
    for amount in ("5", "20", "many"):
        for region in ("eu", "us", "asia"):
            properties = {"amount": amount, "region": region}
            peer.send("NodeSql", f"{amount} {region}", properties=properties)
    peer.send("NodeSql", "none")
    peer.send("NodeSql", "last", properties={"amount": "10", "region": "eu"})
    got = node.inbox.wait_for("node-sql", 4)
    assert sorted((one.body, one.reconsume_times) for one in got) == [
        ("20 eu", 0),
        ("20 us", 0),
        ("20 us", 1),
        ("last", 0),
    ]


def test_large_body_is_compressed_in_transit_and_arrives_intact(
    node: Peers, operator: Operator
) -> None:
    operator.create_topic("NodeLarge", queues=1)
    peer = node.start()
    body = "".join(f"{number} bottles of beer; " for number in range(4000))
    peer.send("NodeLarge", body)
    peer.call("push", group="node-large", topic="NodeLarge")
    assert bodies(node.inbox.wait_for("node-large", 1)) == [body]
    [stored] = operator.messages("NodeLarge")
    assert stored.sys_flag & COMPRESSED
    assert len(stored.stored_body) < len(body) // 2


def test_delayed_message_is_neither_early_nor_late(node: Peers, operator: Operator) -> None:
    operator.create_topic("NodeDelayed", queues=1)
    peer = node.start()
    peer.call("push", group="node-delayed", topic="NodeDelayed")
    peer.send("NodeDelayed", "later", delay_level=1)
    peer.send("NodeDelayed", "at once")
    at_once, later = node.inbox.wait_for("node-delayed", 2)
    assert bodies([at_once, later]) == ["at once", "later"]
    assert later.at_ms - later.born_ms >= 1000


@pytest.mark.parametrize("is_new", [False, True], ids=["known-group", "new-group"])
def test_failed_message_is_redelivered_until_dead_lettered(
    node: Peers, operator: Operator, is_new: bool
) -> None:
    topic, group = f"NodeRetry{is_new:d}", f"node-retry-{is_new:d}"
    operator.create_topic(topic)
    if not is_new:
        operator.create_group(group)
    peer = node.start()
    for body in ("fine", "fails once", "hopeless"):
        peer.send(topic, body, tags="a", keys=body)
    failures = {"fails once": 1, "hopeless": 99}
    settings = {"maxReconsumeTimes": 2}
    peer.call("push", group=group, topic=topic, failures=failures, settings=settings)
    letter = operator.wait_for_message(f"%DLQ%{group}")
    got = node.inbox.of(group)
    assert sorted((one.body, one.reconsume_times) for one in got) == [
        ("fails once", 0),
        ("fails once", 1),
        ("fine", 0),
        ("hopeless", 0),
        ("hopeless", 1),
        ("hopeless", 2),
    ]
    assert {(one.topic, one.tags, one.keys == one.body) for one in got} == {(topic, "a", True)}
    assert (letter.stored_body, letter.reconsume_times) == (b"hopeless", 3)
    assert letter.properties["RETRY_TOPIC"] == topic


def test_consumer_resumes_from_the_committed_offset(node: Peers, operator: Operator) -> None:
    topic, group = "NodeRestart", "node-restart"
    operator.create_topic(topic, queues=1)
    first, second = node.start(), node.start()
    first.send(topic, "before")
    first.call("push", group=group, topic=topic)
    node.inbox.wait_for(group, 1)
    first.call("stop", group=group)
    first.send(topic, "after")
    second.call("push", group=group, topic=topic)
    got = node.inbox.wait_for_bodies(group, ["after"])
    assert [(one.peer, one.body) for one in got] == [(0, "before"), (1, "after")]


def test_two_consumers_of_a_group_share_its_queues(node: Peers, operator: Operator) -> None:
    topic, group = "NodeShared", "node-shared"
    operator.create_topic(topic)
    peers = (node.start(), node.start())
    for peer in peers:
        peer.call("push", group=group, topic=topic)

    def owners_now(attempt: int) -> dict[int, int]:
        """Send to each queue, and return which client consumed it."""
        probes = {f"probe{attempt}-{queue_id}" for queue_id in range(4)}
        for probe in probes:
            peers[0].send(topic, probe)
        came = [one for one in node.inbox.wait_for_bodies(group, probes) if one.body in probes]
        return {one.queue_id: one.peer for one in came} if len(came) == len(probes) else {}

    for attempt in attempts():
        owners = owners_now(attempt)
        if sorted(owners.values()) != [0, 0, 1, 1]:
            continue
        sent = [f"shared{attempt}-{number}" for number in range(40)]
        for body in sent:
            peers[0].send(topic, body)
        shared = [one for one in node.inbox.wait_for_bodies(group, sent) if one.body in sent]
        # Until the first has heard of the second, both consume the queues that move.
        if len(shared) == len(sent):
            assert {(one.queue_id, one.peer) for one in shared} == set(owners.items())
            break


def test_broadcasting_consumers_get_everything_each(node: Peers, operator: Operator) -> None:
    topic, group = "NodeBroadcast", "node-broadcast"
    operator.create_topic(topic)
    peers = (node.start(), node.start())
    for peer in peers:
        peer.call("push", group=group, topic=topic, broadcasting=True)

    for attempt in attempts():
        peers[0].send(topic, f"probe{attempt}")
        got = node.inbox.wait_for_bodies(group, [f"probe{attempt}"])
        if len({(one.peer, one.queue_id) for one in got}) == 8:
            break
    sent = [f"all{n}" for n in range(20)]
    for body in sent:
        peers[0].send(topic, body)
    node.inbox.wait(group, lambda got: len([b for b in bodies(got) if b in sent]) >= 40)
    for peer in peers:
        mine = [one.body for one in node.inbox.of(group) if one.peer == peer.number]
        assert sorted(body for body in mine if body in sent) == sorted(sent)
