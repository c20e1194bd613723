"""The C++ client, through its Python wrapper, against a running server."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import pytest

from compat.clients.operating import Operator
from compat.clients.peers import Got, Peer, Peers, Sent, attempts
from turbopump.wire.sysflag import COMPRESSED

pytestmark = pytest.mark.slow

QUEUES = 4
"""The number of queues that the C++ client requests when its sends create a topic."""


def bodies(messages: Iterable[Got]) -> list[str]:
    return [message.body for message in messages]


def bodies_by_queue(messages: Iterable[Got]) -> dict[int, list[str]]:
    """Return the bodies of each queue in order of arrival."""
    found = defaultdict(list)
    for message in messages:
        found[message.queue_id].append(message.body)
    return dict(found)


def send_to_all_queues(peer: Peer, topic: str, stem: str, tags: str = "") -> list[str]:
    """Send a message to each queue of a topic; return their bodies, by queue."""
    sent = [f"{stem}-{queue_id}" for queue_id in range(QUEUES)]
    for queue_id, body in enumerate(sent):
        peer.send(topic, body, "ordered", shard=queue_id, tags=tags)
    return sent


# --- sending --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sync", "async", "ordered"])
def test_everything_about_a_message_arrives(cpp: Peers, how: str) -> None:
    peer, topic, group = cpp.start(), f"CppWhole-{how}", f"cpp-whole-{how}"
    named = {"colour": "red", "größe": "äöü 漢字"}
    sent = peer.send(topic, "hällo 世界", how, tags="a", keys="k1 k2", properties=named)
    peer.call("push", group=group, topic=topic, properties=list(named))
    [got] = cpp.inbox.wait_for(group, 1)
    assert (got.topic, got.body, got.tags, got.keys) == (topic, "hällo 世界", "a", "k1 k2")
    assert got.properties == named
    assert (got.msg_id, got.queue_offset) == (sent.msg_id, sent.queue_offset)
    assert got.reconsume_times == 0
    assert got.born_ms <= got.stored_ms <= got.at_ms


def test_oneway_sends_arrive(cpp: Peers) -> None:
    peer = cpp.start()
    peer.send("CppOneway", "first")
    for number in range(10):
        peer.send_oneway("CppOneway", f"oneway-{number}")
        peer.send_oneway("CppOneway", f"ordered-{number}", "oneway-ordered", shard=1)
    peer.call("push", group="cpp-oneway", topic="CppOneway")
    got = cpp.inbox.wait_for("cpp-oneway", 21)
    oneway = [f"{how}-{number}" for how in ("oneway", "ordered") for number in range(10)]
    assert sorted(bodies(got)) == sorted(["first", *oneway])
    assert {one.queue_id for one in got if one.body.startswith("ordered")} == {1}


def test_ordered_sends_stay_in_one_queue_and_in_order(cpp: Peers) -> None:
    peer = cpp.start()
    for number in range(8):
        for shard in range(QUEUES + 1):
            peer.send("CppOrdered", f"{shard}-{number}", "ordered", shard=shard)
    pulled = bodies_by_queue(peer.pull("cpp-ordered", "CppOrdered"))
    assert pulled == {
        # The selector takes the shard modulo the number of queues.
        0: [f"{shard}-{number}" for number in range(8) for shard in (0, QUEUES)],
        **{shard: [f"{shard}-{number}" for number in range(8)] for shard in range(1, QUEUES)},
    }


def test_batch_is_stored_in_one_queue_in_order(cpp: Peers) -> None:
    peer = cpp.start()
    batch = [
        {"topic": "CppBatch", "body": f"b{number}", "tags": f"t{number}", "keys": f"k{number}"}
        for number in range(10)
    ]
    sent = msgspec.convert(peer.call("batch", messages=batch), Sent)
    assert sent.status == 0
    pulled = peer.pull("cpp-batch", "CppBatch")
    assert [(one.body, one.tags, one.keys) for one in pulled] == [
        (f"b{number}", f"t{number}", f"k{number}") for number in range(10)
    ]
    assert len({one.queue_id for one in pulled}) == 1
    assert [one.queue_offset for one in pulled] == list(range(10))


@pytest.mark.parametrize(("level", "delay_ms"), [(1, 1000), (2, 2000)])
def test_delayed_message_is_neither_early_nor_late(cpp: Peers, level: int, delay_ms: int) -> None:
    peer, topic, group = cpp.start(), f"CppDelayed{level}", f"cpp-delayed-{level}"
    peer.send(topic, "now")
    peer.call("push", group=group, topic=topic)
    cpp.inbox.wait_for(group, 1)
    peer.send(topic, "later", delay_level=level, tags="a", keys="k")
    peer.send(topic, "at once")
    now, at_once, later = cpp.inbox.wait_for(group, 3)
    assert bodies((now, at_once, later)) == ["now", "at once", "later"]
    assert (later.topic, later.tags, later.keys) == (topic, "a", "k")
    assert later.at_ms - later.born_ms >= delay_ms


def test_large_body_is_compressed_in_transit_and_arrives_intact(
    cpp: Peers, operator: Operator
) -> None:
    peer = cpp.start()
    body = "".join(f"{number} bottles of beer; " for number in range(4000))
    peer.send("CppLarge", body, "ordered", shard=0)
    peer.call("push", group="cpp-large", topic="CppLarge")
    assert bodies(cpp.inbox.wait_for("cpp-large", 1)) == [body]
    assert bodies(peer.pull("cpp-large-pull", "CppLarge")) == [body]
    [stored] = operator.messages("CppLarge")
    assert stored.sys_flag & COMPRESSED
    assert len(stored.stored_body) < len(body) // 2


# --- consuming ------------------------------------------------------------------------------------


def test_tag_expression_selects(cpp: Peers) -> None:
    peer = cpp.start()
    # "Aa" and "BB" have the same hash, and the broker compares only hashes.
    tags = ["a", "c", "Aa", "b", "BB", "ab", ""] * 3
    for number, tag in enumerate(tags):
        peer.send("CppTags", f"{tag}:{number}", "ordered", shard=number, tags=tag)
    peer.call("push", group="cpp-tags", topic="CppTags", expression="a || b || Aa")
    wanted = [f"{tag}:{number}" for number, tag in enumerate(tags) if tag in {"a", "b", "Aa"}]
    cpp.inbox.wait_for("cpp-tags", len(wanted))
    # When the last message of each queue has arrived, all earlier ones have been examined.
    last = send_to_all_queues(peer, "CppTags", "last", tags="b")
    got = cpp.inbox.wait_for_bodies("cpp-tags", last)
    assert sorted(bodies(got)) == sorted(wanted + last)


def test_pull_consumer_pulls_everything(cpp: Peers) -> None:
    peer = cpp.start()
    sent = [f"m{number}" for number in range(150)]
    for number, body in enumerate(sent):
        tag = "odd" if number % 2 else "even"
        peer.send("CppPull", body, "ordered", shard=number, tags=tag)
    pulled = bodies_by_queue(peer.pull("cpp-pull", "CppPull"))
    assert pulled == {queue_id: sent[queue_id::QUEUES] for queue_id in range(QUEUES)}
    even = bodies_by_queue(cpp.start().pull("cpp-pull-even", "CppPull", "even"))
    assert even == {0: sent[0::QUEUES], 2: sent[2::QUEUES]}


def test_consumer_resumes_from_the_committed_offset(cpp: Peers) -> None:
    first, group = cpp.start(), "cpp-restart"
    before = send_to_all_queues(first, "CppRestart", "before")
    first.call("push", group=group, topic="CppRestart")
    cpp.inbox.wait_for(group, QUEUES)
    first.call("stop", group=group)
    after = send_to_all_queues(first, "CppRestart", "after")
    # Its last heartbeat may arrive after it has left the group: only its exit is certain.
    first.close()
    second = cpp.start()
    second.call("push", group=group, topic="CppRestart")
    got = cpp.inbox.wait_for(group, 2 * QUEUES)
    assert sorted((one.peer, one.body) for one in got) == sorted(
        [(0, body) for body in before] + [(1, body) for body in after]
    )


def test_two_consumers_of_a_group_share_its_queues(cpp: Peers) -> None:
    peers, topic, group = (cpp.start(), cpp.start()), "CppShared", "cpp-shared"
    send_to_all_queues(peers[0], topic, "first")
    for peer in peers:
        peer.call("push", group=group, topic=topic)
    for attempt in attempts():
        owners = wait_for_owners(cpp, peers[0], topic, group, {0: 2, 1: 2})
        sent = [
            body
            for number in range(10)
            for body in send_to_all_queues(peers[0], topic, f"shared{attempt}-{number}")
        ]
        shared = [one for one in cpp.inbox.wait_for_bodies(group, sent) if one.body in sent]
        # Until the first has heard of the second, both consume the queues that move.
        if len(shared) == len(sent):
            assert {(one.queue_id, one.peer) for one in shared} == set(owners.items())
            break

    # One leaves, and the other takes over all queues.
    peers[0].call("stop", group=group)
    wait_for_owners(cpp, peers[1], topic, group, {1: QUEUES})


def wait_for_owners(
    cpp: Peers, sender: Peer, topic: str, group: str, shares: dict[int, int]
) -> dict[int, int]:
    """Send to all queues until each client consumes its share; return the owner of each queue."""
    for _ in attempts():
        probes = set(send_to_all_queues(sender, topic, f"probe{time.monotonic_ns()}"))
        got = cpp.inbox.wait_for_bodies(group, probes)
        came = [one for one in got if one.body in probes]
        owners = {one.queue_id: one.peer for one in came}
        counts = [owners.get(queue_id) for queue_id in range(QUEUES)]
        if len(came) == QUEUES and {peer: counts.count(peer) for peer in counts} == shares:
            return owners
    raise AssertionError


def test_orderly_consumer_keeps_the_order_of_a_queue_when_one_fails(cpp: Peers) -> None:
    peer, group = cpp.start(), "cpp-orderly"
    numbers = range(10)
    for number in numbers:
        send_to_all_queues(peer, "CppOrderly", str(number))
    failing = {"3-1": 2, "0-2": 1}
    peer.call("push", group=group, topic="CppOrderly", orderly=True, failures=failing)
    got = cpp.inbox.wait_for(group, QUEUES * len(numbers) + 3)
    expected = {
        queue_id: [
            body
            for number in numbers
            for body in [f"{number}-{queue_id}"] * (1 + failing.get(f"{number}-{queue_id}", 0))
        ]
        for queue_id in range(QUEUES)
    }
    assert bodies_by_queue(got) == expected


def test_broadcasting_consumers_get_everything_each(cpp: Peers) -> None:
    peers, topic, group = (cpp.start(), cpp.start()), "CppBroadcast", "cpp-broadcast"
    # They start at the end: earlier messages may or may not be delivered.
    send_to_all_queues(peers[0], topic, "before")
    for peer in peers:
        peer.call("push", group=group, topic=topic, broadcasting=True)
    wait_for_broadcast(cpp, peers[0], topic, group)
    sent = [body for n in range(5) for body in send_to_all_queues(peers[0], topic, f"all{n}")]
    cpp.inbox.wait(group, lambda got: len([b for b in bodies(got) if b in sent]) >= 2 * len(sent))
    for peer in peers:
        mine = [one.body for one in cpp.inbox.of(group) if one.peer == peer.number]
        assert sorted(body for body in mine if body.startswith("all")) == sorted(sent)


def wait_for_broadcast(cpp: Peers, sender: Peer, topic: str, group: str) -> None:
    """Send to all queues repeatedly until both clients consume from all of them."""
    for _ in attempts():
        probes = set(send_to_all_queues(sender, topic, f"probe{time.monotonic_ns()}"))
        got = cpp.inbox.wait_for_bodies(group, probes)
        listening = {(one.peer, one.queue_id) for one in got}
        if len(listening) == 2 * QUEUES:
            return


# --- failing --------------------------------------------------------------------------------------


def test_failed_message_is_redelivered_until_dead_lettered(cpp: Peers, operator: Operator) -> None:
    # Only one fails: this client sends back every message of a batch that contains a failed one.
    peer, group, named = cpp.start(), "cpp-retry", {"colour": "red"}
    operator.create_group(group, retries_max=2)
    peer.send("CppRetry", "fine", tags="a")
    sent = peer.send("CppRetry", "hopeless", tags="a", keys="k", properties=named)
    options = {"expression": "a", "failures": {"hopeless": 99}, "properties": ["colour"]}
    peer.call("push", group=group, topic="CppRetry", **options)
    letter = operator.wait_for_message(f"%DLQ%{group}")
    got = cpp.inbox.of(group)
    assert bodies(got).count("fine") == 1
    tries = [one for one in got if one.body != "fine"]
    assert [(one.body, one.reconsume_times) for one in tries] == [
        ("hopeless", 0),
        ("hopeless", 1),
        ("hopeless", 2),
    ]
    for one in tries:
        assert (one.topic, one.tags, one.keys) == ("CppRetry", "a", "k")
        assert (one.properties, one.msg_id) == (named, sent.msg_id)
    assert (letter.stored_body, letter.reconsume_times) == (b"hopeless", 3)
    assert letter.properties["RETRY_TOPIC"] == "CppRetry"
    assert bodies(peer.pull("cpp-dead", f"%DLQ%{group}")) == ["hopeless"]


def test_group_that_never_consumed_before_retries_too(cpp: Peers) -> None:
    peer = cpp.start()
    peer.send("CppFresh", "fails once")
    peer.call("push", group="cpp-fresh", topic="CppFresh", failures={"fails once": 1})
    # Takes a while: the client finds the retry topic only when it next refreshes its routes.
    got = cpp.inbox.wait_for("cpp-fresh", 2)
    assert [(one.body, one.reconsume_times) for one in got] == [
        ("fails once", 0),
        ("fails once", 1),
    ]
