"""Our push consumer and other clients in one group: all agree on which member owns which queue."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from compat.clients.peers import Peers, attempts
from servers import Standalone, standalone
from turbopump import (
    ConsumeContext,
    ConsumeResult,
    Message,
    Producer,
    PushConsumer,
    SendReceipt,
)
from turbopump.client import calls
from turbopump.errors import TurbopumpError
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.record import MessageView

pytestmark = pytest.mark.slow


@pytest.fixture(params=["cpp", "node"])
def others(request: pytest.FixtureRequest) -> Peers:
    peers = request.getfixturevalue(request.param)
    assert isinstance(peers, Peers)
    return peers


class Ours:
    """The queues of what our own member received, by body."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.queue_ids: dict[str, list[int]] = defaultdict(list)

    def __call__(self, messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        with self._lock:
            for message in messages:
                self.queue_ids[message.body.decode()].append(message.queue_id)
        return ConsumeResult.SUCCESS


def send_round(producer: Producer, topic: str, number: int) -> list[SendReceipt]:
    """Send a message to each queue."""
    queues = producer.queues(topic)
    return [
        producer.send(Message(topic, f"{number}-{queue.queue_id}".encode()), to=queue)
        for queue in sorted(queues)
    ]


def test_members_share_the_queues_and_take_over(
    others: Peers, server: Standalone, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["others"]
    topic, group = f"Mixed-{name}", f"mixed-{name}"
    ours, peer = Ours(), others.start()
    with Producer("pg", nameserver=server.nameserver) as producer:
        producer.send(Message(topic, b"first"))
        peer.call("push", group=group, topic=topic)
        with PushConsumer(
            group,
            ours,
            nameserver=server.nameserver,
            subscriptions={topic: "*"},
            start_from="first",
        ) as consumer:
            mine, theirs = _settled_shares(producer, topic, group, ours, others)
            assert len(mine) == len(theirs) == 2
            assert mine == {
                queue.queue_id for queue in consumer.assignment() if queue.topic == topic
            }
        # Ours has left: the other one takes over all queues.
        for number in attempts():
            send_round(producer, topic, 1000 + number)
            got = others.inbox.wait_for_bodies(group, [f"{1000 + number}-{q}" for q in theirs])
            bodies = {one.body for one in got}
            if all(f"{1000 + number}-{queue_id}" in bodies for queue_id in range(4)):
                break


@pytest.mark.parametrize("waits_for_other", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_server_moves_no_queue(
    tmp_path: Path, cpp_of: Callable[[str], Peers], waits_for_other: bool
) -> None:
    """The C++ client's heartbeat arrives up to 30 s after the restart, long after ours.

    The short variant ends when ours has consumed and the server still lists both members.
    `faults/test_group_restart.py` covers the rest in virtual time, with members that behave the
    same.
    """
    topic, group, ours = "Kept", "kept", Ours()
    with ExitStack() as stack:
        with standalone(tmp_path / "server") as first:
            others = stack.enter_context(cpp_of(first.nameserver))
            producer = stack.enter_context(Producer("pg", nameserver=first.nameserver))
            producer.send(Message(topic, b"first"))
            others.start().call("push", group=group, topic=topic)
            consumer = stack.enter_context(
                PushConsumer(
                    group,
                    ours,
                    nameserver=first.nameserver,
                    subscriptions={topic: "*"},
                    start_from="first",
                )
            )
            mine, theirs = _settled_shares(producer, topic, group, ours, others)
            first.kill()
        # Without waiting for the other one, the check must not come too late on a busy machine.
        patient = {} if waits_for_other else {"memberReconnectTimeout": "300000"}
        with standalone(tmp_path / "server", patient, first.ports) as second:
            for number in attempts():
                with suppress(TurbopumpError):
                    send_round(producer, topic, 1000 + number)
                    break
                threading.Event().wait(0.1)
            wanted = {f"{1000 + number}-{queue_id}" for queue_id in range(4)}
            if waits_for_other:
                # Takes 30 s: the C++ client's pull timeout.
                assert _wait_for(wanted, group, ours, others) == (mine, theirs)
                got = [one.body for one in others.inbox.of(group) if one.body in wanted]
                assert len(got) == len(theirs)
            else:
                _wait_for_ours({f"{1000 + number}-{queue_id}" for queue_id in mine}, ours)
                members = asyncio.run(_member_ids(second.broker, group))
                assert len(members) == 2, second.log.read_text()
            # Ours was never assigned the other's queues.
            assert mine == _queue_ids(wanted & ours.queue_ids.keys())
            assert mine == {
                queue.queue_id for queue in consumer.assignment() if queue.topic == topic
            }
            assert all(len(ours.queue_ids[body]) == 1 for body in wanted & ours.queue_ids.keys())


def _settled_shares(
    producer: Producer, topic: str, group: str, ours: Ours, others: Peers
) -> tuple[set[int], set[int]]:
    """Send rounds until both members share one without duplicates."""
    for number in attempts():
        sent = send_round(producer, topic, number)
        wanted = {f"{number}-{receipt.queue.queue_id}" for receipt in sent}
        mine, theirs = _wait_for(wanted, group, ours, others)
        if mine and theirs and not mine & theirs:
            return mine, theirs
    raise AssertionError


def _wait_for(wanted: set[str], group: str, ours: Ours, others: Peers) -> tuple[set[int], set[int]]:
    """Wait until each message reached a member; return the queues of ours and of the other."""
    for _ in attempts():
        mine = wanted & ours.queue_ids.keys()
        theirs = wanted & {one.body for one in others.inbox.of(group)}
        if mine | theirs == wanted:
            return _queue_ids(mine), _queue_ids(theirs)
        threading.Event().wait(0.05)
    raise AssertionError


def _wait_for_ours(wanted: set[str], ours: Ours) -> None:
    for _ in attempts():
        if wanted <= ours.queue_ids.keys():
            return
        threading.Event().wait(0.05)


async def _member_ids(broker: str, group: str) -> list[str]:
    async with ConnectionPool(SocketNetwork()) as pool:
        return await calls.consumer_ids(pool, broker, group, timeout_ms=3000)


def _queue_ids(bodies: set[str]) -> set[int]:
    return {int(body.partition("-")[2]) for body in bodies}
