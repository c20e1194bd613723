"""A second protocol: the domain serves clients without commands and connections."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from brokers import Client, running_broker
from imports import SOURCE, imported, modules, name_of
from turbopump.broker.broker import Broker
from turbopump.broker.clients import Member
from turbopump.broker.durability import Outcome
from turbopump.broker.handlers.clients import notify_clients
from turbopump.broker.pull import Expression, Held, Pull
from turbopump.broker.pull_status import ReadRules, Status
from turbopump.broker.replies import PushedReply
from turbopump.broker.resets import APPLIED_WITHIN_MS, NEWEST, Reset
from turbopump.broker.retries import Dropped, SendBack
from turbopump.core import FrameDecoder, SendFrame, SendTemplate
from turbopump.errors import RemoteError
from turbopump.message import MessageQueue
from turbopump.store.outcomes import Appended, Found, OffsetTooLarge, ReadOutcome, UpToDate
from turbopump.testing import virtual_time
from turbopump.wire.batch import BatchEntry, encode_batch
from turbopump.wire.bodies import (
    ConsumerData,
    GroupConfig,
    Heartbeat,
    LockQueues,
    MessageModel,
    ProducerData,
    Subscription,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.headers import ConsumerGroup
from turbopump.wire.record import decode_record

PROTOCOL_SIDE = ("broker/handlers/", "broker/admin/")
"""Read requests and write responses."""

WIRING = {
    "broker/broker.py",
    "broker/message_path.py",
    "broker/administration.py",
    "broker/registration.py",
    "broker/replication/claims.py",
    "broker/replication/replica.py",
    "broker/replication/role_changes.py",
    "broker/replication/table_copy.py",
}
"""Connect both sides, or are clients of name servers or other brokers."""

PROTOCOL = {
    "turbopump.wire.command",
    "turbopump.wire.headers",
    "turbopump.net.connection",
    "turbopump.net.router",
    "turbopump.broker.handlers",
    "turbopump.broker.admin",
}


THIN = (
    *(f"handlers/{name}" for name in ("send", "pull", "reply", "offsets", "clients")),
    *(f"admin/{name}" for name in ("groups", "progress")),
)
"""Handlers of sends, pulls, offsets and groups: they read, call the domain, and answer."""

STATE = {
    "turbopump.store.store",
    "turbopump.tables",
    *(f"turbopump.broker.{name}" for name in ("groups", "offsets", "queue_locks", "topics")),
}
"""State that only the domain reads and changes."""


def domain_modules() -> list[str]:
    names = map(name_of, modules("broker"))
    return [name for name in names if not name.startswith(PROTOCOL_SIDE) and name not in WIRING]


def imported_of(name: str, parts: set[str]) -> set[str]:
    found = imported(SOURCE / name)
    return {each for each in found for part in parts if f"{each}.".startswith(f"{part}.")}


@pytest.mark.parametrize("name", domain_modules())
def test_the_domain_imports_nothing_of_the_protocol(name: str) -> None:
    assert not imported_of(name, PROTOCOL)


@pytest.mark.parametrize("name", THIN)
def test_handlers_leave_messages_offsets_and_groups_to_the_domain(name: str) -> None:
    assert not imported_of(f"broker/{name}.py", STATE)


def test_the_modules_that_issue_messages_and_progress_are_domain() -> None:
    messages = ("send", "pull", "retries", "replies", "durability", "message_writer")
    groups = ("progress", "membership", "resets", "lag", "operations")
    assert {f"broker/{name}.py" for name in (*messages, *groups)} <= set(domain_modules())


class Visitor:
    """A client of another protocol."""

    def __init__(self, address: str = "10.9.9.9:1") -> None:
        self.peer_address = address
        self.closed: str | None = None

    @property
    def is_open(self) -> bool:
        return self.closed is None

    def close(self, reason: str = "") -> None:
        self.closed = reason


VISITOR = "10.9.9.9:1"


def a_send(
    body: bytes = b"hello",
    *,
    topic: str = "T",
    properties: str = "",
    is_batch: bool = False,
    queue_id: int = 0,
) -> SendFrame:
    template = SendTemplate("pg", topic, None, default_topic_queue_nums=4, is_batch=is_batch)
    parts = template.frame(1, queue_id, 0, 1, 0, properties, 0, body, 1 << 20)
    [send] = FrameDecoder(typed_requests=True).feed(b"".join(parts))
    assert isinstance(send, SendFrame)
    return send


def a_pull(client: Visitor, offset: int = 0, **changes: Any) -> Pull:
    plain = Pull(
        client=client,
        group="g",
        topic="T",
        queue_id=0,
        offset=offset,
        count_max=32,
        expression=Expression("*", None),
        sub_version=0,
        commit_offset=None,
        hold_ms=None,
        is_bulk=False,
    )
    return replace(plain, **changes)


def sent(broker: Broker, send: SendFrame) -> Outcome:
    """Store a message; return the outcome."""
    outcomes: list[Outcome] = []
    broker.path.sends.accept(send, VISITOR, None, lambda _, outcome: outcomes.append(outcome))
    broker.path.settle()
    [outcome] = outcomes
    return outcome


def pulled(broker: Broker, pull: Pull) -> ReadOutcome | Held:
    return broker.path.pulls.read(pull, broker.path.pulls.admit(pull))


def bodies(outcome: object) -> list[bytes]:
    assert isinstance(outcome, Found), outcome
    return [decode_record(message).body for message in outcome.messages]


@virtual_time()
async def test_messages_accepted_by_one_protocol_are_served_by_the_other(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        first = sent(broker, a_send(b"1"))
        assert isinstance(first, Appended)
        assert first.queue_offset == 0
        batch = encode_batch([BatchEntry(b"2"), BatchEntry(b"3")])
        several = sent(broker, a_send(batch, is_batch=True))
        assert isinstance(several, Appended)
        assert len(several.physical_offsets) == 2
        await client.send(b"4")
        assert [message.body for message in await client.messages()] == [b"1", b"2", b"3", b"4"]
        assert bodies(pulled(broker, a_pull(Visitor()))) == [b"1", b"2", b"3", b"4"]
        tagged = pulled(broker, a_pull(Visitor(), expression=Expression("none", None)))
        assert ReadRules().status_of(tagged, 0) is Status.RETRY  # type: ignore[arg-type]


@virtual_time()
async def test_a_delayed_message_is_delivered_later(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, _):
        assert isinstance(sent(broker, a_send(properties="DELAY\x011\x02")), Appended)
        assert not isinstance(pulled(broker, a_pull(Visitor())), Found)
        await asyncio.sleep(2)
        assert bodies(pulled(broker, a_pull(Visitor()))) == [b"hello"]


@virtual_time()
async def test_a_rejection_is_an_outcome(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, _):
        for wrong, code in (
            (a_send(queue_id=99), ResponseCode.SYSTEM_ERROR),
            (a_send(topic="no/name"), ResponseCode.SYSTEM_ERROR),
            (a_send(b"", is_batch=True), ResponseCode.MESSAGE_ILLEGAL),
        ):
            outcome = sent(broker, wrong)
            assert isinstance(outcome, RemoteError)
            assert outcome.code == code
        with pytest.raises(RemoteError, match="not exist"):
            pulled(broker, a_pull(Visitor(), topic="Unknown"))


@virtual_time()
async def test_a_held_pull_is_reported_once(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(b"old")
        woken: list[object] = []
        held = pulled(broker, a_pull(Visitor(), 1, hold_ms=5000))
        assert isinstance(held, Held)
        held.then(woken.append)
        assert not woken
        await client.send(b"new")
        await asyncio.sleep(10)
        assert [bodies(outcome) for outcome in woken] == [[b"new"]]

        late: list[object] = []
        held = pulled(broker, a_pull(Visitor(), 2, hold_ms=5000))
        assert isinstance(held, Held)
        held.then(late.append)
        await asyncio.sleep(10)
        assert [type(outcome) for outcome in late] == [UpToDate]

        gone = Visitor()
        never: list[object] = []
        held = pulled(broker, a_pull(gone, 2, hold_ms=5000))
        assert isinstance(held, Held)
        held.then(never.append)
        broker.path.arrivals.forget(gone)
        await client.send(b"newest")
        await asyncio.sleep(10)
        assert not never
        assert len(broker.path.arrivals) == 0


@virtual_time()
async def test_an_error_during_a_held_pull_is_its_outcome(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        woken: list[Any] = []
        held = pulled(broker, a_pull(Visitor(), 1, hold_ms=5000))
        assert isinstance(held, Held)
        held.then(woken.append)
        await broker.state.groups.update(GroupConfig(group_name="g", consume_enable=False))
        await asyncio.sleep(10)
        [outcome] = woken
        assert isinstance(outcome, RemoteError)
        assert outcome.code == ResponseCode.NO_PERMISSION


@virtual_time()
async def test_a_missing_offset_is_recorded_for_operators(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        outcome = pulled(broker, a_pull(Visitor(), 1000))
        assert isinstance(outcome, OffsetTooLarge)
        assert ReadRules().status_of(outcome, 1000) is Status.MOVED
        [note] = await client.messages("OFFSET_MOVED_EVENT")
        assert b'"offsetRequest":1000' in note.body


@virtual_time()
async def test_progress_is_committed_and_reported(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        for _ in range(3):
            await client.send()
        progress = broker.administration.progress
        assert progress.find("g", "T", 0) == 0
        progress.commit("g", "T", 0, 2)
        assert progress.find("g", "T", 0) == 2
        pulled(broker, a_pull(Visitor(), 2, commit_offset=3))
        assert progress.find("g", "T", 0) == 3
        with pytest.raises(RemoteError, match="must be 0 to 3"):
            progress.commit("g", "T", 0, 4)
        assert progress.slowest("T", ["other"]) == {0: 3}
        progress.clone("g", "copy", "T", offline=True)
        assert progress.find("copy", "T", 0) == 3


@virtual_time()
async def test_commits_below_the_stored_offset_are_logged_except_resets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        for _ in range(3):
            await client.send()
        administration = broker.administration

        def lowered(queue_id: int = 0) -> list[str]:
            """Commit to the end and back to 1; return what is logged."""
            caplog.clear()
            administration.progress.commit("g", "T", queue_id, 3)
            administration.progress.commit("g", "T", queue_id, 1)
            return [record.message for record in caplog.records]

        assert lowered() == [], "without members, a tool has reset the group"
        administration.membership.heartbeat(Visitor(), beat("visitor"), None, 400)
        (text,) = lowered()
        assert text.startswith("g commits offset 1 in queue 0 of T, below the stored 3")
        assert lowered() == [], "once a minute"
        await asyncio.sleep(61)
        pulled(broker, a_pull(Visitor(), 2, commit_offset=2))
        caplog.clear()
        pulled(broker, a_pull(Visitor(), 2, commit_offset=1))
        assert "below the stored 2" in caplog.text

        reset = Reset(group="g", topic="T", timestamp_ms=0, is_forced=False, offsets={})
        administration.progress.commit_all("g", "T", range(4), [3, 0, 0, 0])
        await administration.resets.plan(reset)
        await asyncio.sleep(61)
        assert lowered() == []
        await asyncio.sleep(APPLIED_WITHIN_MS / 1000)
        administration.membership.heartbeat(Visitor(), beat("visitor"), None, 400)
        assert len(lowered()) == 1


@virtual_time()
async def test_a_group_is_reset_measured_and_deleted(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        for queue_id in range(4):
            await client.send(queue_id=queue_id)
            broker.administration.progress.commit("g", "T", queue_id, 1)
        resets, lag = broker.administration.resets, broker.administration.lag
        reset = Reset(group="g", topic="T", timestamp_ms=0, is_forced=False, offsets={})
        with pytest.raises(RemoteError, match="not online"):
            await resets.plan(reset)
        visitor = Visitor()
        broker.administration.membership.heartbeat(visitor, beat("visitor"), None, 400)
        queues = [MessageQueue("T", "broker-a", queue_id) for queue_id in range(4)]
        planned = await resets.plan(reset)
        assert planned.targets == dict.fromkeys(queues, 0)
        assert [member.connection for member in planned.members] == [visitor]
        newest = replace(reset, timestamp_ms=NEWEST)
        assert (await resets.plan(newest)).targets == dict.fromkeys(queues, 1)
        given = {queues[2]: 1}
        assert (await resets.plan(replace(reset, offsets=given))).targets == given
        with pytest.raises(RemoteError, match="has no offset 2"):
            await resets.plan(replace(reset, offsets={queues[2]: 2}))

        await client.send()
        found = (await lag.of_group("g", "T")).offset_table[queues[0]]
        assert (found.broker_offset, found.consumer_offset) == (2, 1)
        assert (await lag.of_all_groups(ordered_only=False)).total_diff == 1
        assert (await lag.of_all_groups(ordered_only=True)).total_diff == 0
        assert [span.message_queue for span in await lag.time_spans("g", "T")] == queues

        operations = broker.administration.operations
        await operations.delete_group("g", with_offsets=False)
        assert "g" not in broker.state.groups.table
        assert broker.state.offsets.find("g", "T", 0) == 1
        await operations.delete_group("g", with_offsets=True)
        assert broker.state.offsets.find("g", "T", 0) is None
        await operations.update_group(GroupConfig(group_name="g", retry_max_times=3))
        assert broker.state.groups.table["g"].retry_max_times == 3


def beat(client_id: str) -> Heartbeat:
    wanted = Subscription(topic="T", sub_string="*")
    consumer = ConsumerData(
        group_name="g", message_model=MessageModel.CLUSTERING, subscription_data_set=[wanted]
    )
    producer = ProducerData(group_name="pg")
    return Heartbeat(
        client_id=client_id, consumer_data_set=[consumer], producer_data_set=[producer]
    )


@virtual_time()
async def test_members_of_both_protocols_share_a_group(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.ask(RequestCode.HEART_BEAT, body=beat("by command").encode())
        membership, visitor = broker.administration.membership, Visitor()
        membership.heartbeat(visitor, beat("visitor"), None, 0)
        answer = await client.ask(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroup(consumer_group="g")
        )
        assert b'"by command","visitor"' in bytes(answer.body)  # type: ignore[arg-type]
        # A pull with the group's subscription.
        await client.send()
        assert bodies(pulled(broker, a_pull(visitor, expression=None))) == [b"hello"]
        queue = MessageQueue("T", "broker-a", 0)
        wanted = LockQueues(consumer_group="g", client_id="visitor", queues=[queue])
        assert await membership.lock(wanted, visitor.peer_address) == [queue]
        other = replace(wanted, client_id="by command")
        assert await membership.lock(other, "10.0.0.9:1") == []
        membership.unlock(wanted)
        assert await membership.lock(other, "10.0.0.9:1") == [queue]
        membership.leave(visitor, "visitor", "pg", "g")
        assert membership.client_ids("g") == ["by command"]
        membership.heartbeat(visitor, beat("visitor"), None, 0)
        membership.connection_closed(visitor)
        assert membership.client_ids("g") == ["by command"]
        notify_clients("g", [visitor])


@virtual_time()
async def test_silent_clients_are_closed(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, _):
        visitor = Visitor()
        broker.administration.membership.heartbeat(visitor, beat("visitor"), None, 0)
        await asyncio.sleep(200)
        assert visitor.closed is not None
        assert "no heartbeat" in visitor.closed


@virtual_time()
async def test_failed_messages_are_sent_back(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await broker.state.groups.update(GroupConfig(group_name="g"))
        await broker.state.groups.update(GroupConfig(group_name="never", retry_queue_nums=0))
        stored = sent(broker, a_send(b"fails"))
        assert isinstance(stored, Appended)
        failed = SendBack(
            client="10.9.9.9:1",
            group="g",
            position=stored.physical_offset,
            message_id=None,
            delay_level=-1,
            retries_max=None,
            unit_mode=False,
        )
        outcomes: list[object] = []
        for each in (failed, replace(failed, group="never"), replace(failed, position=1 << 40)):
            broker.path.retries.accept(each, outcomes.append)
            broker.path.settle()
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds == [Appended, Dropped, RemoteError]
        assert [message.body for message in await client.messages("%DLQ%g")] == [b"fails"]


@virtual_time()
async def test_replies_reach_members_of_the_other_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, bytes]] = []

    async def push(asker: Member, reply: PushedReply) -> str | None:
        pushed.append((asker.client_id, bytes(reply.reply.body)))
        return None

    async with running_broker(tmp_path) as (broker, _):
        monkeypatch.setattr(broker.path.replies, "push", push)
        broker.administration.membership.heartbeat(Visitor(), beat("asker"), None, 0)
        reply = a_send(
            b"pong", topic="DefaultCluster_REPLY_TOPIC", properties="REPLY_TO_CLIENT\x01asker"
        )
        replied = await broker.path.replies.accept(reply, VISITOR)
        assert replied.push_failure is None
        assert isinstance(replied.kept, Appended)
        assert pushed == [("asker", b"pong")]


@virtual_time()
async def test_a_closed_connection_drops_its_held_pulls(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        waiting = asyncio.ensure_future(client.pull(1, hold_ms=15_000))
        await asyncio.sleep(1)
        assert len(broker.path.arrivals) == 1
        await hang_up(client)
        assert len(broker.path.arrivals) == 0
        waiting.cancel()


async def hang_up(client: Client) -> None:
    connection = await client.pool.connection(client.address)
    connection.close()
    await asyncio.sleep(1)
