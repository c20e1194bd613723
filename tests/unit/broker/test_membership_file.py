"""Members and locks that are remembered across a restart, and the file that stores them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import msgspec
import pytest

from broker_parts import FakePeer, Parts, finished
from turbopump.broker import membership_file
from turbopump.broker.clients import Consumers
from turbopump.broker.membership_file import MembershipFile, RememberedGroup, encoded
from turbopump.broker.queue_locks import QueueLocks
from turbopump.errors import RemoteError, WriteFailed
from turbopump.message import MessageQueue
from turbopump.tables import TableFile, TableWriter
from turbopump.testing import VirtualClock, virtual_time
from turbopump.testing.background import VirtualBackground
from turbopump.wire import headers
from turbopump.wire.bodies import (
    ConsumeFrom,
    ConsumerConnections,
    ConsumerData,
    ConsumerIds,
    ConsumeType,
    DataVersion,
    Heartbeat,
    LockedQueues,
    LockQueues,
    MessageModel,
    Subscription,
    TopicConfig,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body

MS_NS = 1_000_000
GRACE_MS = 35_000
QUEUES = [MessageQueue("T", "broker-a", number) for number in range(4)]


def beat(
    client_id: str,
    group: str = "g",
    *,
    version: int = 7,
    model: MessageModel = MessageModel.CLUSTERING,
    topics: tuple[str, ...] = ("T",),
) -> Heartbeat:
    data = ConsumerData(
        group_name=group,
        consume_type=ConsumeType.PUSH,
        message_model=model,
        consume_from_where=ConsumeFrom.FIRST_OFFSET,
        subscription_data_set=[
            Subscription(topic=topic, sub_string="a || b", sub_version=version, code_set=[97, 98])
            for topic in topics
        ],
    )
    return Heartbeat(client_id=client_id, consumer_data_set=[data])


def join(parts: Parts, client_id: str, group: str = "g", **fields: object) -> FakePeer:
    peer = FakePeer()
    body = beat(client_id, group, **fields)  # type: ignore[arg-type]
    assert parts.ask(RequestCode.HEART_BEAT, body=body, peer=peer).code == ResponseCode.SUCCESS
    return peer


def lock(parts: Parts, client_id: str, *queues: MessageQueue) -> list[MessageQueue]:
    body = LockQueues(client_id=client_id, consumer_group="g", queues=list(queues))
    answer = parts.ask(RequestCode.LOCK_BATCH_MQ, body=body)
    return LockedQueues.decode(whole_body(answer)).queues


def restarted(before: Parts, tmp_path: Path, epoch: int = 0) -> Parts:
    """Return a broker that starts with what another one wrote when it stopped."""
    before.members.saving.save_now()
    return after_crash(before, tmp_path, epoch)


def after_crash(before: Parts, tmp_path: Path, epoch: int = 0) -> Parts:
    """Return a broker that starts with what another one wrote before it was killed."""
    after = Parts(tmp_path)
    after.members_file.saved = before.members_file.saved
    finished(
        after.topics.update(TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4))
    )
    after.members.load(100, epoch)
    return after


def end_grace(parts: Parts) -> None:
    """Drop members that have not reconnected in time."""
    parts.clock.advance_ns(GRACE_MS * MS_NS)
    assert parts.membership.forget_absent() == 0


@pytest.fixture
def before(tmp_path: Path) -> Parts:
    parts = Parts(tmp_path)
    finished(
        parts.topics.update(TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4))
    )
    return parts


def ids(parts: Parts, group: str = "g") -> list[str]:
    answer = parts.ask(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, headers.ConsumerGroup(consumer_group=group)
    )
    if answer.code != ResponseCode.SUCCESS:
        return []
    return ConsumerIds.decode(whole_body(answer)).consumer_id_list


def leave(parts: Parts, client_id: str, group: str = "g") -> None:
    header = headers.UnregisterClient(client_id=client_id, consumer_group=group)
    answer = parts.ask(RequestCode.UNREGISTER_CLIENT, header, peer=FakePeer())
    assert answer.code == ResponseCode.SUCCESS


# --- after a promotion ----------------------------------------------------------------------------


def refusal(parts: Parts, client_id: str) -> tuple[int, str]:
    body = LockQueues(client_id=client_id, consumer_group="g", queues=QUEUES)
    answer = parts.ask(RequestCode.LOCK_BATCH_MQ, body=body)
    return answer.code, answer.remark or ""


def test_a_promoted_broker_grants_no_lock_while_those_of_the_old_master_are_valid(
    before: Parts, tmp_path: Path
) -> None:
    """Listeners run for up to 30 s under a lock that the old master has renewed."""
    lock(before, "c1", *QUEUES)
    promoted = restarted(before, tmp_path, epoch=1)
    for client_id in ("c1", "c2"):
        code, remark = refusal(promoted, client_id)
        # An error: a client that is granted nothing assumes that another one holds the lock.
        assert code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert "in 30000 ms" in remark
    promoted.clock.advance_ns(29_999 * MS_NS)
    assert refusal(promoted, "c2")[0] == ResponseCode.SERVICE_NOT_AVAILABLE
    promoted.clock.advance_ns(MS_NS)
    assert lock(promoted, "c2", *QUEUES) == QUEUES, "locks of another epoch are no longer valid"


def test_a_replaced_master_renews_no_lock(before: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor withholds locks only for as long as those granted before are valid."""
    replaced = RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, "replaced by b2")
    assert lock(before, "c1", QUEUES[0]) == [QUEUES[0]]
    before.suspension = replaced
    assert refusal(before, "c1") == (replaced.code, "replaced by b2")
    before.suspension = None
    save = before.members_file.save

    def save_and_suspend(body: bytes, version: DataVersion) -> None:
        save(body, version)
        before.suspension = replaced

    monkeypatch.setattr(before.members_file, "save", save_and_suspend)
    assert refusal(before, "c1") == (replaced.code, "replaced by b2"), "replaced while it saved"

    def fail_and_suspend(_body: bytes, _version: DataVersion) -> None:
        before.suspension = replaced
        raise WriteFailed("no space is left")

    before.suspension = None
    before.locks.unlock("g", "c1", QUEUES[:1])
    monkeypatch.setattr(before.members_file, "save", fail_and_suspend)
    assert refusal(before, "c1") == (replaced.code, "replaced by b2"), "saved ones neither"


def test_a_promoted_broker_that_restarts_soon_waits_again(before: Parts, tmp_path: Path) -> None:
    promoted = restarted(before, tmp_path, epoch=1)
    join(promoted, "c1")
    again = restarted(promoted, tmp_path, epoch=1)
    assert refusal(again, "c1")[0] == ResponseCode.SERVICE_NOT_AVAILABLE
    again.clock.advance_ns(30_000 * MS_NS)
    assert lock(again, "c1", *QUEUES) == QUEUES
    later = restarted(again, tmp_path, epoch=1)
    assert lock(later, "c1", *QUEUES) == QUEUES
    assert lock(later, "c2", *QUEUES) == [], "remembered as after any restart"


# --- after a restart ------------------------------------------------------------------------------


def test_everything_of_a_group_is_remembered(before: Parts, tmp_path: Path) -> None:
    join(before, "c1")
    join(before, "c2", version=9)
    known = before.consumers.find("g")
    after = restarted(before, tmp_path)
    found = after.consumers.find("g")
    assert known is not None
    assert found is not None
    for name in ("consume_type", "message_model", "consume_from", "subscriptions"):
        assert getattr(found, name) == getattr(known, name), name
    assert ids(after) == ["c1", "c2"]
    subscription = after.consumers.subscription("g", "T")
    assert subscription is not None
    assert subscription.sub_version == 9
    assert [(m.language, m.version, m.is_absent) for m in after.consumers.members("g")] == [
        (m.language, m.version, True) for m in before.consumers.members("g")
    ]


def test_a_returning_client_resumes_its_membership_without_notifications(
    before: Parts, tmp_path: Path
) -> None:
    join(before, "c1")
    join(before, "c2")
    after = restarted(before, tmp_path)
    first, second = join(after, "c1"), join(after, "c2")
    assert sorted(ids(after)) == ["c1", "c2"]
    assert (first.sent, second.sent) == ([], [])
    assert not after.consumers.absent
    third = join(after, "c3")
    assert [len(peer.sent) for peer in (first, second, third)] == [1, 1, 1]


def test_members_that_have_not_returned_are_not_notified_of_changes(
    before: Parts, tmp_path: Path
) -> None:
    join(before, "c1")
    after = restarted(before, tmp_path)
    new = join(after, "c2")
    assert len(new.sent) == 1
    assert sorted(ids(after)) == ["c1", "c2"]


def test_members_that_do_not_return_are_dropped_and_others_notified_once(
    before: Parts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("c1", "c2", "c3"):
        join(before, name)
    after = restarted(before, tmp_path)
    peer = join(after, "c2")
    end_grace(after)
    assert ids(after) == ["c2"]
    assert len(peer.sent) == 1
    assert "2 members did not reconnect within 35000 ms" in caplog.text
    assert "c1 of g, c3 of g" in caplog.text


def test_a_group_to_which_no_member_returns_is_dropped(before: Parts, tmp_path: Path) -> None:
    join(before, "c1")
    after = restarted(before, tmp_path)
    end_grace(after)
    assert ids(after) == []
    assert after.consumers.find("g") is None
    assert not after.consumers.groups


def test_clients_that_left_or_were_closed_are_not_remembered(before: Parts, tmp_path: Path) -> None:
    peers = {name: join(before, name) for name in ("c1", "c2", "c3")}
    before.clients.connection_closed(peers["c1"])
    header = headers.UnregisterClient(client_id="c2", consumer_group="g")
    before.ask(RequestCode.UNREGISTER_CLIENT, header, peer=peers["c2"])
    assert ids(restarted(before, tmp_path)) == ["c3"]


def test_a_client_may_leave_without_a_heartbeat(before: Parts, tmp_path: Path) -> None:
    for name in ("c1", "c2"):
        join(before, name)
    lock(before, "c1", *QUEUES)
    after = restarted(before, tmp_path)
    peer = join(after, "c2")
    leave(after, "c1", "another-group")
    leave(after, "stranger")
    assert sorted(ids(after)) == ["c1", "c2"]
    leave(after, "c1")
    assert ids(after) == ["c2"]
    assert len(peer.sent) == 1
    assert lock(after, "c2", *QUEUES) == QUEUES


def test_clients_of_several_groups_return_group_by_group(before: Parts, tmp_path: Path) -> None:
    for group in ("g", "h"):
        join(before, "c1", group)
    after = restarted(before, tmp_path)
    join(after, "c1", "h")
    assert list(after.consumers.absent) == [("g", "c1")]
    assert (ids(after, "g"), ids(after, "h")) == (["c1"], ["c1"])
    end_grace(after)
    assert (ids(after, "g"), ids(after, "h")) == ([], ["c1"])


def test_a_client_id_with_two_connections_returns_as_one(before: Parts, tmp_path: Path) -> None:
    join(before, "same")
    join(before, "same")
    assert ids(before) == ["same", "same"]
    after = restarted(before, tmp_path)
    assert ids(after) == ["same"]
    join(after, "same")
    assert ids(after) == ["same"]
    # A second process with the same id is one more member, as usual.
    join(after, "same")
    assert ids(after) == ["same", "same"]


def test_members_that_have_not_returned_are_remembered_across_another_restart(
    before: Parts, tmp_path: Path
) -> None:
    for name in ("c1", "c2"):
        join(before, name)
    lock(before, "c1", QUEUES[0])
    between = restarted(before, tmp_path)
    join(between, "c2")
    after = restarted(between, tmp_path)
    assert sorted(ids(after)) == ["c1", "c2"]
    assert lock(after, "c2", *QUEUES) == QUEUES[1:]


def test_broadcasting_groups_are_remembered(before: Parts, tmp_path: Path) -> None:
    join(before, "c1", model=MessageModel.BROADCASTING)
    after = restarted(before, tmp_path)
    assert after.consumers.groups["g"].message_model is MessageModel.BROADCASTING


def test_a_group_without_subscriptions_is_remembered(before: Parts, tmp_path: Path) -> None:
    join(before, "c1", topics=())
    after = restarted(before, tmp_path)
    assert ids(after) == ["c1"]
    assert after.consumers.subscription("g", "T") is None


def test_members_that_have_not_returned_do_not_count_as_silent(
    before: Parts, tmp_path: Path
) -> None:
    join(before, "c1")
    after = restarted(before, tmp_path)
    after.clock.advance_ns(1_000_000 * MS_NS)
    after.membership.sweep()
    assert ids(after) == ["c1"]


# --- locks ----------------------------------------------------------------------------------------


def test_locks_stay_with_their_owner(before: Parts, tmp_path: Path) -> None:
    for name in ("c1", "c2"):
        join(before, name)
    lock(before, "c1", *QUEUES[:2])
    after = restarted(before, tmp_path)
    assert lock(after, "c2", *QUEUES) == QUEUES[2:]
    assert lock(after, "c1", *QUEUES) == QUEUES[:2]


def test_locks_are_on_disk_before_they_are_granted(before: Parts, tmp_path: Path) -> None:
    assert lock(before, "c1", *QUEUES[:2]) == QUEUES[:2]
    after = after_crash(before, tmp_path)
    assert lock(after, "c2", *QUEUES) == QUEUES[2:]


def test_no_lock_is_granted_that_cannot_be_saved(before: Parts, tmp_path: Path) -> None:
    before.members_file.full = True
    refused = (ResponseCode.SERVICE_NOT_AVAILABLE, "no space is left")
    assert refusal(before, "c1") == refused
    # Nor when it is requested again: the client does not have it yet.
    assert refusal(before, "c1") == refused
    assert lock(after_crash(before, tmp_path), "c2", *QUEUES) == QUEUES
    before.members_file.full = False
    assert lock(before, "c1", *QUEUES) == QUEUES


def test_saved_locks_are_renewed_whatever_the_disk_does(before: Parts) -> None:
    lock(before, "c1", *QUEUES[:2])
    before.members_file.full = True
    join(before, "c3")
    assert lock(before, "c1", *QUEUES[:2]) == QUEUES[:2]
    # A new one beside them is not granted.
    assert lock(before, "c1", *QUEUES[:3]) == QUEUES[:2]
    # A lock that changes its holder has to be saved again.
    before.locks.unlock("g", "c1", QUEUES[:1])
    assert refusal(before, "c2")[0] == ResponseCode.SERVICE_NOT_AVAILABLE


def test_locks_of_members_that_do_not_return_are_released(before: Parts, tmp_path: Path) -> None:
    for name in ("c1", "c2", "c3"):
        join(before, name)
    lock(before, "c1", QUEUES[0])
    lock(before, "c3", QUEUES[1])
    after = restarted(before, tmp_path)
    join(after, "c2")
    # It is alive, although it has not sent a heartbeat: it renews its lock.
    assert lock(after, "c3", QUEUES[1]) == [QUEUES[1]]
    end_grace(after)
    assert lock(after, "c2", *QUEUES[:2]) == [QUEUES[0]]


def test_locks_of_members_that_return_expire_as_usual(before: Parts, tmp_path: Path) -> None:
    join(before, "c1")
    lock(before, "c1", QUEUES[0])
    after = restarted(before, tmp_path)
    join(after, "c1")
    end_grace(after)
    assert lock(after, "c2", QUEUES[0]) == []
    after.clock.advance_ns(60_001 * MS_NS)
    assert lock(after, "c2", QUEUES[0]) == [QUEUES[0]]


def test_locks_that_expired_are_not_remembered(before: Parts, tmp_path: Path) -> None:
    join(before, "c1")
    lock(before, "c1", QUEUES[0])
    before.clock.advance_ns(60_001 * MS_NS)
    lock(before, "c1", QUEUES[1])
    after = restarted(before, tmp_path)
    assert lock(after, "c2", *QUEUES) == [QUEUES[0], *QUEUES[2:]]


@pytest.mark.parametrize("others", [[], ["c2"]])
def test_locks_of_clients_that_were_disconnected_end_with_the_grace_of_members(
    before: Parts, tmp_path: Path, others: list[str]
) -> None:
    peer = join(before, "c1")
    for name in others:
        join(before, name)
    lock(before, "c1", QUEUES[0])
    before.clients.connection_closed(peer)
    after = restarted(before, tmp_path)
    assert ids(after) == others
    assert lock(after, "c3", *QUEUES) == QUEUES[1:]
    end_grace(after)
    assert lock(after, "c3", *QUEUES) == QUEUES


@pytest.mark.parametrize("renews", [False, True])
def test_locks_of_disconnected_clients_that_return_expire_as_usual(
    before: Parts, tmp_path: Path, renews: bool
) -> None:
    peer = join(before, "c1")
    lock(before, "c1", QUEUES[0])
    before.clients.connection_closed(peer)
    after = restarted(before, tmp_path)
    if renews:
        lock(after, "c1", QUEUES[0])
    else:
        join(after, "c1")
    end_grace(after)
    assert lock(after, "c2", QUEUES[0]) == []


@pytest.mark.parametrize("was_connected", [True, False])
def test_restarts_do_not_prolong_the_grace(
    before: Parts, tmp_path: Path, was_connected: bool
) -> None:
    """Only the time counts in which the broker ran: clients cannot reconnect in any other."""
    peer = join(before, "c1")
    lock(before, "c1", QUEUES[0])
    if not was_connected:
        before.clients.connection_closed(peer)
    parts = before
    for run in range(3):
        parts = restarted(parts, tmp_path)
        assert parts.membership.forget_absent() == GRACE_MS - run * 10_000
        parts.clock.advance_ns(10_000 * MS_NS)
        assert parts.membership.forget_absent() == GRACE_MS - (run + 1) * 10_000
        assert ids(parts) == (["c1"] if was_connected else [])
        assert lock(parts, "c2", QUEUES[0]) == []
    last = restarted(parts, tmp_path)
    last.clock.advance_ns(4_999 * MS_NS)
    assert last.membership.forget_absent() == 1
    assert lock(last, "c2", QUEUES[0]) == []
    last.clock.advance_ns(MS_NS)
    assert last.membership.forget_absent() == 0
    assert ids(last) == []
    assert lock(last, "c2", QUEUES[0]) == QUEUES[:1]


def test_a_member_that_returned_has_the_whole_grace_after_the_next_restart(
    before: Parts, tmp_path: Path
) -> None:
    peers = {name: join(before, name) for name in ("c1", "c2", "c3")}
    for number, name in enumerate(peers):
        lock(before, name, QUEUES[number])
    for name in ("c2", "c3"):
        before.clients.connection_closed(peers[name])
    between = restarted(before, tmp_path)
    between.clock.advance_ns(30_000 * MS_NS)
    peers = {name: join(between, name) for name in ("c1", "c2")}
    between.membership.forget_absent()
    between.clients.connection_closed(peers["c2"])
    after = restarted(between, tmp_path)
    assert after.membership.forget_absent() == 5_000, "for c3"
    after.clock.advance_ns(5_000 * MS_NS)
    assert after.membership.forget_absent() == 30_000
    assert lock(after, "c4", *QUEUES) == QUEUES[2:]


@pytest.mark.parametrize("absent_ms", [None, -1_000_000, 1_000_000])
def test_the_grace_is_never_longer_than_configured(
    before: Parts, tmp_path: Path, absent_ms: int | None
) -> None:
    """Whatever the file says; those of older versions say nothing."""
    join(before, "c1")
    before.members.saving.save_now()
    saved = json.loads(before.members_file.saved[-1])
    [member] = saved["groups"]["g"]["members"]
    del member["absentMs"]
    if absent_ms is not None:
        member["absentMs"] = absent_ms
    before.members_file.saved.append(json.dumps(saved).encode())
    after = after_crash(before, tmp_path)
    assert after.membership.forget_absent() == (GRACE_MS if absent_ms != 1_000_000 else 0)


# --- what operators see ---------------------------------------------------------------------------


def test_operators_see_members_that_have_not_reconnected(before: Parts, tmp_path: Path) -> None:
    join(before, "c1")
    after = restarted(before, tmp_path)
    group = headers.ConsumerGroup(consumer_group="g")
    answer = after.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, group)
    (seen,) = ConsumerConnections.decode(whole_body(answer)).connection_set
    assert (seen.client_id, seen.client_addr) == ("c1", "not reconnected")


def test_a_client_that_has_not_reconnected_cannot_be_queried(before: Parts, tmp_path: Path) -> None:
    peer = join(before, "c1")
    before.consumers.heartbeat(
        msgspec.structs.replace(before.consumers.members("g")[0], version=400, connection=peer),
        beat("c1", version=8).consumer_data_set[0],
    )
    after = restarted(before, tmp_path)
    header = headers.RunningInfoOf(consumer_group="g", client_id="c1", jstack_enable=False)
    answer = after.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "has not reconnected since the broker restarted" in (answer.remark or "")


def test_a_reset_waits_for_all_members(before: Parts, tmp_path: Path) -> None:
    join(before, "c1")
    after = restarted(before, tmp_path)
    after.store.put("T", 0, 1, 2, 3)
    for queue_id in range(4):
        after.offsets.commit("g", "T", queue_id, 1)
    header = headers.ResetOffset(topic="T", group="g", timestamp=-1, is_force=True)
    answer: Command = after.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "client c1 of g has not reconnected" in (answer.remark or "")
    peer = join(after, "c1")
    answer = after.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
    assert answer.code == ResponseCode.SUCCESS
    assert [command.code for command in peer.sent] == [RequestCode.RESET_CONSUMER_CLIENT_OFFSET]


# --- the file -------------------------------------------------------------------------------------


def table(path: Path, consumers: Consumers, locks: QueueLocks) -> MembershipFile:
    file = TableFile(path, writer=TableWriter(VirtualBackground(None)))
    return MembershipFile(file, consumers, locks, VirtualClock())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "null",
        '{"groups": []}',
        '{"groups": {"g": 5}}',
        '{"groups": {"g": {"members": [{"clientId": 5}], "subscriptions": []}}}',
        '{"groups": {"g": {"members": [], "subscriptions": [], "messageModel": "ODD"}}}',
    ],
)
def test_a_damaged_file_counts_as_empty(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "groupMembers.json"
    path.write_text(text)
    consumers, locks = Consumers(), QueueLocks()
    table(path, consumers, locks).load(100)
    assert not consumers.groups
    assert locks.withheld_ms(VirtualClock().monotonic_ms()) > 0, "it may have had locks"
    expected = "is empty" if text in ("", "{}") else "not remembered over this restart"
    assert expected in caplog.text


def test_an_unreadable_file_does_not_prevent_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "groupMembers.json"
    path.mkdir()
    consumers, locks = Consumers(), QueueLocks()
    table(path, consumers, locks).load(100)
    assert not consumers.groups
    assert locks.withheld_ms(VirtualClock().monotonic_ms()) > 0, "it may have had locks"
    assert "not remembered over this restart" in caplog.text


def test_locks_of_a_backup_may_be_old(before: Parts, tmp_path: Path) -> None:
    join(before, "c1")
    lock(before, "c1", *QUEUES)
    path = tmp_path / "groupMembers.json"
    path.with_name(path.name + ".bak").write_bytes(before.members_file.saved[-1])
    path.write_text("damaged")
    consumers, locks = Consumers(), QueueLocks()
    table(path, consumers, locks).load(100)
    assert list(consumers.groups) == ["g"]
    assert not locks.groups
    assert locks.withheld_ms(VirtualClock().monotonic_ms()) > 0


def test_a_missing_file_withholds_no_locks(tmp_path: Path) -> None:
    locks = QueueLocks()
    table(tmp_path / "groupMembers.json", Consumers(), locks).load(100)
    assert locks.withheld_ms(VirtualClock().monotonic_ms()) == 0


def test_invalid_groups_and_those_beyond_the_limit_are_skipped(
    before: Parts, tmp_path: Path
) -> None:
    for number in range(5):
        join(before, "c", f"g{number}")
    before.members.saving.save_now()
    saved = json.loads(before.members_file.saved[-1])
    saved["groups"] = {"a/b": saved["groups"]["g0"], **saved["groups"]}
    path = tmp_path / "groupMembers.json"
    path.write_text(json.dumps(saved))
    consumers = Consumers()
    table(path, consumers, QueueLocks()).load(groups_max=3)
    assert list(consumers.groups) == ["g0", "g1"]


def test_groups_that_need_too_much_room_are_omitted() -> None:
    def group(size: int) -> RememberedGroup:
        subscription = Subscription(topic="T", sub_string="x" * size)
        return RememberedGroup(
            consume_type=None,
            message_model=None,
            consume_from_where=None,
            subscriptions=[subscription],
            members=[],
        )

    groups = {"small": group(10), "large": group(5000), "other": group(10), "odd": group(10)}
    groups["odd"] = msgspec.structs.replace(
        groups["odd"], subscriptions=[Subscription(topic="\ud800", sub_string="*")]
    )
    body, left_out = encoded(groups, 2000)
    assert left_out == ["large", "odd"]
    assert json.loads(body)["groups"].keys() == {"small", "other"}


def test_omitted_groups_are_logged_once(
    before: Parts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_file, "TABLE_BYTES_MAX", 100)
    for number in range(3):
        join(before, f"c{number}")
        before.members.saving.save_now()
    assert caplog.text.count("will not be remembered over a restart") == 1
    assert json.loads(before.members_file.saved[-1]) == {"groups": {}, "epoch": 0}


@virtual_time()
async def test_changes_are_written_soon_and_together(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    file = parts.members_file
    peers = [join(parts, f"c{number}") for number in range(20)]
    await asyncio.sleep(0.5)
    assert len(file.saved) == 1
    for peer in peers:
        # The same state again is not a change.
        parts.ask(RequestCode.HEART_BEAT, body=beat("c0"), peer=peer)
    await asyncio.sleep(0.5)
    written = len(file.saved)
    join(parts, "c0", version=8)
    await asyncio.sleep(0.5)
    assert len(file.saved) == written + 1
    parts.clients.connection_closed(peers[0])
    await asyncio.sleep(0.5)
    assert len(file.saved) == written + 2
    assert not parts.members.saving.is_dirty


@virtual_time()
async def test_a_failed_write_is_retried_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    parts = Parts(tmp_path)
    parts.members_file.full = True
    join(parts, "c1")
    await asyncio.sleep(5)
    assert caplog.text.count("cannot be saved until this is fixed: no space is left") == 1
    parts.members_file.full = False
    await asyncio.sleep(2)
    assert "members of groups are being saved again" in caplog.text
    assert ids(restarted(parts, tmp_path)) == ["c1"]


# --- connections without a heartbeat --------------------------------------------------------------


def test_connections_that_pull_for_an_absent_member_are_notified_of_changes(
    before: Parts, tmp_path: Path
) -> None:
    join(before, "c1")
    after = restarted(before, tmp_path)
    puller, closed, stranger = FakePeer(), FakePeer(), FakePeer()
    for peer in (puller, closed):
        after.consumers.note_puller("g", peer)
    after.consumers.note_puller("unknown", stranger)
    after.clients.connection_closed(closed)
    join(after, "c2")
    assert [len(peer.sent) for peer in (puller, closed, stranger)] == [1, 0, 0]
    # Once its member is known, it is notified as a member, and once.
    after.ask(RequestCode.HEART_BEAT, body=beat("c1"), peer=puller)
    assert not after.consumers.has_absent
    join(after, "c3")
    assert len(puller.sent) == 2


def test_pullers_are_forgotten_with_the_absent_members(before: Parts, tmp_path: Path) -> None:
    for name in ("c1", "c2"):
        join(before, name)
    after = restarted(before, tmp_path)
    member = join(after, "c1")
    after.consumers.note_puller("g", member)
    assert after.consumers.pullers("g") == ()
    after.consumers.note_puller("g", FakePeer())
    end_grace(after)
    assert after.consumers.pullers("g") == ()


def test_connections_that_pull_for_a_group_are_forgotten_with_it(
    before: Parts, tmp_path: Path
) -> None:
    join(before, "c1")
    after = restarted(before, tmp_path)
    after.consumers.note_puller("g", FakePeer())
    assert after.consumers.forget_absent(after.clock.monotonic_ms()) == [("g", "c1")]
    assert after.consumers.find("g") is None
    assert after.consumers.pullers("g") == ()
