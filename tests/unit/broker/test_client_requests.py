from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker_parts import FakePeer, Parts, finished
from turbopump.errors import Overloaded
from turbopump.message import MessageQueue
from turbopump.wire import headers
from turbopump.wire.bodies import (
    CheckClientConfig,
    ConsumerData,
    ConsumerIds,
    GroupConfig,
    Heartbeat,
    LockedQueues,
    LockQueues,
    ProducerData,
    Subscription,
    TopicConfig,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.schema import Body

SECOND_NS = 1_000_000_000


def beat(
    *groups: str, client_id: str = "c", producers: tuple[str, ...] = (), unit: bool = False
) -> Heartbeat:
    return Heartbeat(
        client_id=client_id,
        consumer_data_set=[
            ConsumerData(
                group_name=group,
                subscription_data_set=[Subscription(topic="T", sub_string="*")],
                unit_mode=unit,
            )
            for group in groups
        ],
        producer_data_set=[ProducerData(group_name=group) for group in producers],
    )


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def heartbeat(parts: Parts, body: Heartbeat, peer: FakePeer) -> Command:
    return parts.ask(RequestCode.HEART_BEAT, body=body, peer=peer)


# --- heartbeats -----------------------------------------------------------------------------------


def test_a_heartbeat_creates_group_retry_topic_and_members(parts: Parts) -> None:
    finished(parts.groups.update(GroupConfig(group_name="g", retry_queue_nums=3)))
    peer = FakePeer()
    answer = heartbeat(parts, beat("g", "h", producers=("p",), unit=True), peer)
    assert (answer.code, answer.ext_fields, answer.version) == (ResponseCode.SUCCESS, None, 409)
    topic = parts.topics.find("%RETRY%g")
    assert topic is not None
    assert (topic.read_queue_nums, topic.perm, topic.topic_sys_flag) == (3, 6, 2)
    assert parts.groups.table["h"].group_name == "h"
    assert parts.consumers.member("g", "c") is not None
    assert parts.producers.by_client_id("c") is not None


def test_a_group_without_retries_gets_no_retry_topic(parts: Parts) -> None:
    finished(parts.groups.update(GroupConfig(group_name="g", retry_queue_nums=0)))
    heartbeat(parts, beat("g"), FakePeer())
    assert parts.topics.find("%RETRY%g") is None


def test_clients_of_an_unknown_group_are_members_even_if_it_may_not_be_created(
    parts: Parts,
) -> None:
    parts.groups.config = replace(parts.groups.config, auto_create=False)
    heartbeat(parts, beat("g"), FakePeer())
    assert parts.consumers.find("g") is not None
    assert parts.topics.find("%RETRY%g") is None


@pytest.mark.parametrize("group", ["", "../../x", "a/b", "g" * 121])
def test_a_group_with_an_invalid_name_is_rejected_without_effect(parts: Parts, group: str) -> None:
    answer = heartbeat(parts, beat("fine", group, producers=("p",)), FakePeer())
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "group" in (answer.remark or "")
    assert not parts.consumers.groups
    assert not parts.producers.groups


def test_only_small_heartbeats_are_remembered(parts: Parts) -> None:
    peer = FakePeer()
    small, large = beat("g"), beat("g", *(f"group-{at:03}" for at in range(300)))
    for body, remembered in ((small, [small]), (large, []), (small, [small])):
        for _ in range(2):
            assert heartbeat(parts, body, peer).code == ResponseCode.SUCCESS
            assert [read for _, read in parts.clients._beats.values()] == remembered
    assert parts.consumers.member("group-299", "c") is not None
    parts.clients.connection_closed(peer)
    assert not parts.clients._beats


def test_groups_beyond_the_limit_are_rejected(parts: Parts) -> None:
    answer = heartbeat(parts, beat(*(f"g{number}" for number in range(1001))), FakePeer())
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "1000" in (answer.remark or "")
    assert not parts.consumers.groups


def test_producer_groups_beyond_the_limit_are_rejected(parts: Parts) -> None:
    names = tuple(f"p{number}" for number in range(1001))
    answer = heartbeat(parts, beat(producers=names), FakePeer())
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "at most 1000 producer groups, got 1001" in (answer.remark or "")
    assert not parts.producers.groups


def test_several_heartbeats_of_one_client_are_counted_together(parts: Parts) -> None:
    peer = FakePeer()
    names = tuple(f"p{number}" for number in range(1000))
    assert heartbeat(parts, beat(producers=names), peer).code == ResponseCode.SUCCESS
    assert heartbeat(parts, beat(producers=names), peer).code == ResponseCode.SUCCESS
    assert heartbeat(parts, beat(producers=("one-more",)), peer).code == ResponseCode.SYSTEM_ERROR
    assert heartbeat(parts, beat("g"), peer).code == ResponseCode.SUCCESS
    parts.clients.connection_closed(peer)
    assert heartbeat(parts, beat(producers=("one-more",)), peer).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("group", ["", " ", "p" * 256])
def test_a_producer_group_with_an_invalid_name_is_rejected(parts: Parts, group: str) -> None:
    answer = heartbeat(parts, beat("fine", producers=("p", group)), FakePeer())
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "producer group" in (answer.remark or "")
    assert not parts.consumers.groups
    assert not parts.producers.groups


def test_one_heartbeat_changes_the_topics_once(parts: Parts) -> None:
    heartbeat(parts, beat(*(f"g{number}" for number in range(50))), FakePeer())
    assert parts.topics.saving.changes == 1
    assert parts.topics.find("%RETRY%g49") is not None


def test_a_group_beyond_the_limit_does_not_affect_the_others(parts: Parts) -> None:
    most = len(parts.groups.table) + 1
    parts.groups.config = replace(parts.groups.config, groups_max=most)
    assert heartbeat(parts, beat("g", "h"), FakePeer()).code == ResponseCode.SUCCESS
    assert parts.topics.find("%RETRY%g") is not None
    assert parts.topics.find("%RETRY%h") is None
    assert parts.consumers.groups.keys() == {"g", "h"}


def test_heartbeats_of_one_host_do_not_use_up_all_groups(parts: Parts) -> None:
    parts.groups.config = replace(parts.groups.config, groups_max=1000)
    for number in range(10):
        names = (f"g{number}-{group}" for group in range(200))
        heartbeat(parts, beat(*names, client_id=f"c{number}"), FakePeer(f"10.9.9.9:{number + 1}"))
    assert 400 <= len(parts.groups.table) <= 600
    heartbeat(parts, beat("honest"), FakePeer("10.1.1.1:1"))
    assert "honest" in parts.groups.table
    assert parts.topics.find("%RETRY%honest") is not None


@pytest.mark.parametrize("code", [RequestCode.HEART_BEAT, RequestCode.LOCK_BATCH_MQ])
def test_client_ids_are_bounded(parts: Parts, code: int) -> None:
    name = "x" * 1001
    bodies: dict[int, Body] = {
        RequestCode.HEART_BEAT: Heartbeat(client_id=name),
        RequestCode.LOCK_BATCH_MQ: LockQueues(client_id=name, consumer_group="g"),
    }
    answer = parts.ask(code, body=bodies[code])
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "client id must be at most 1000 characters, got 1001"


def test_a_full_disk_prevents_no_client_from_consuming(parts: Parts) -> None:
    parts.groups_file.full = parts.topics_file.full = True
    assert heartbeat(parts, beat("g"), FakePeer()).code == ResponseCode.SUCCESS
    assert parts.consumers.find("g") is not None
    parts.groups_file.full = parts.topics_file.full = False
    heartbeat(parts, beat("g"), FakePeer())
    assert parts.topics.find("%RETRY%g") is not None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b'{"clientID":7}', b'{"clientID":"c","consumerDataSet":7}'],
)
def test_garbage_is_an_error(parts: Parts, body: bytes) -> None:
    answer = parts.ask(RequestCode.HEART_BEAT, body=body)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark


def test_all_members_are_notified_of_a_new_member(parts: Parts) -> None:
    first, second = FakePeer("10.0.0.1:1"), FakePeer("10.0.0.2:1")
    heartbeat(parts, beat("g"), first)
    heartbeat(parts, beat("g"), second)
    heartbeat(parts, beat("g"), second)
    assert [(c.code, c.ext_fields) for c in first.sent] == [(40, {"consumerGroup": "g"})] * 2
    assert len(second.sent) == 1


def test_a_member_that_cannot_be_notified_does_not_affect_the_others(parts: Parts) -> None:
    class Deaf(FakePeer):
        def oneway(self, command: Command) -> None:
            raise Overloaded("does not read")

    peer = FakePeer()
    heartbeat(parts, beat("g"), Deaf())
    assert heartbeat(parts, beat("g"), peer).code == ResponseCode.SUCCESS
    assert len(peer.sent) == 1


def test_notifications_can_be_disabled_for_a_group_or_a_broker(parts: Parts) -> None:
    peer = FakePeer()
    finished(
        parts.groups.update(GroupConfig(group_name="g", notify_consumer_ids_changed_enable=False))
    )
    heartbeat(parts, beat("g"), peer)
    parts.membership.config = replace(parts.membership.config, notify_changes=False)
    heartbeat(parts, beat("h"), peer)
    assert peer.sent == []


# --- leaving --------------------------------------------------------------------------------------


def test_unregistering_leaves_one_group(parts: Parts) -> None:
    peer = FakePeer()
    heartbeat(parts, beat("g", "h", producers=("p", "q")), peer)
    answer = parts.ask(
        RequestCode.UNREGISTER_CLIENT,
        headers.UnregisterClient(client_id="c", consumer_group="g", producer_group="p"),
        peer=peer,
    )
    assert (answer.code, answer.ext_fields) == (ResponseCode.SUCCESS, {})
    assert parts.consumers.groups.keys() == {"h"}
    assert parts.producers.groups.keys() == {"q"}
    parts.clients.connection_closed(peer)
    assert not parts.consumers.groups
    assert not parts.producers.groups


def test_the_silent_are_closed(parts: Parts) -> None:
    consumer, producer, loud = FakePeer(), FakePeer(), FakePeer()
    heartbeat(parts, beat("g"), consumer)
    heartbeat(parts, beat(producers=("p",)), producer)
    parts.clock.advance_ns(60 * SECOND_NS)
    heartbeat(parts, beat("g"), loud)
    parts.clock.advance_ns(60 * SECOND_NS)
    parts.membership.sweep()
    assert consumer.closed is None
    parts.clock.advance_ns(SECOND_NS)
    parts.membership.sweep()
    assert consumer.closed
    assert producer.closed
    assert loud.closed is None


def test_a_clock_set_forward_closes_no_client(parts: Parts) -> None:
    peer = FakePeer()
    heartbeat(parts, beat("g"), peer)
    parts.clock.jump_wall(3600)
    parts.membership.sweep()
    assert peer.closed is None


# --- lists and locks ------------------------------------------------------------------------------


def test_the_list_has_one_entry_per_connection(parts: Parts) -> None:
    for peer in (FakePeer(), FakePeer()):
        heartbeat(parts, beat("g"), peer)
    asked = headers.ConsumerGroup(consumer_group="g")
    answer = parts.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, asked)
    assert ConsumerIds.decode(whole_body(answer)).consumer_id_list == ["c", "c"]


def test_locks_through_requests(parts: Parts) -> None:
    finished(
        parts.topics.update(TopicConfig(topic_name="T", read_queue_nums=1, write_queue_nums=2))
    )
    queues = [MessageQueue("T", "broker-a", 0), MessageQueue("T", "broker-a", 1)]

    def ask(code: int, client: str, group: str = "g") -> list[MessageQueue]:
        body = LockQueues(client_id=client, consumer_group=group, queues=queues)
        answer = parts.ask(code, body=body)
        assert answer.code == ResponseCode.SUCCESS
        content = whole_body(answer)
        return LockedQueues.decode(content).queues if content else []

    assert ask(RequestCode.LOCK_BATCH_MQ, "c1") == queues
    assert ask(RequestCode.LOCK_BATCH_MQ, "c2") == []
    assert ask(RequestCode.LOCK_BATCH_MQ, "c2", "other") == queues
    ask(RequestCode.UNLOCK_BATCH_MQ, "c2")
    assert ask(RequestCode.LOCK_BATCH_MQ, "c2") == []
    ask(RequestCode.UNLOCK_BATCH_MQ, "c1")
    assert ask(RequestCode.LOCK_BATCH_MQ, "c2") == queues
    parts.clock.advance_ns(61 * SECOND_NS)
    assert ask(RequestCode.LOCK_BATCH_MQ, "c1") == queues
    parts.membership.config = replace(parts.membership.config, lock_expiry_ms=1000)
    parts.clock.advance_ns(2 * SECOND_NS)
    assert ask(RequestCode.LOCK_BATCH_MQ, "c2") == queues
    parts.clock.advance_ns(2 * SECOND_NS)
    parts.membership.sweep()
    assert not parts.locks.held("g", parts.clock.monotonic_ms())


def lock(parts: Parts, group: str, queues: list[MessageQueue]) -> Command:
    body = LockQueues(client_id="c", consumer_group=group, queues=queues)
    return parts.ask(RequestCode.LOCK_BATCH_MQ, body=body)


def test_only_queues_of_this_broker_are_locked_and_only_for_groups(parts: Parts) -> None:
    finished(
        parts.topics.update(TopicConfig(topic_name="T", read_queue_nums=1, write_queue_nums=1))
    )
    real = MessageQueue("T", "broker-a", 0)
    strange = [
        MessageQueue("Unknown", "broker-a", 0),
        MessageQueue("T", "broker-b", 0),
        MessageQueue("T", "broker-a", 1),
        MessageQueue("T", "broker-a", -1),
    ]
    granted = LockedQueues.decode(whole_body(lock(parts, "g", [*strange, real]))).queues
    assert granted == [real]
    assert LockedQueues.decode(whole_body(lock(parts, "a/b", [real]))).queues == []
    assert LockedQueues.decode(whole_body(lock(parts, "h", strange))).queues == []
    assert parts.locks._groups.keys() == {"g"}
    assert "h" not in parts.groups.table


def test_too_many_queues_to_lock_are_rejected(parts: Parts) -> None:
    answer = lock(parts, "g", [MessageQueue("T", "broker-a", n) for n in range(10_001)])
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "at most 10000" in (answer.remark or "")


# --- subscriptions --------------------------------------------------------------------------------


def check(parts: Parts, kind: str | None, text: str = "a > 3") -> Command:
    body = CheckClientConfig(
        client_id="c",
        group="g",
        subscription_data=Subscription(topic="T", sub_string=text, expression_type=kind),
    )
    return parts.ask(RequestCode.CHECK_CLIENT_CONFIG, body=body)


def test_expressions_are_checked(parts: Parts) -> None:
    assert check(parts, "TAG").code == ResponseCode.SUCCESS
    assert check(parts, None).code == ResponseCode.SUCCESS
    assert check(parts, "SQL92", "a > 3").code == ResponseCode.SUCCESS
    wrong = check(parts, "SQL92", "a >< 3")
    assert wrong.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert "found '<' (at character 4)" in (wrong.remark or "")
    unknown = check(parts, "XPATH", "//a")
    assert unknown.code == ResponseCode.SYSTEM_ERROR
    assert "XPATH" in (unknown.remark or "")
