from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from broker_parts import FakePeer
from brokers import running_broker
from turbopump.broker.clients import Peer
from turbopump.broker.group_notices import NOTIFIED_PER_TURN, GroupNotices
from turbopump.net.deadlines import Deadlines
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire.bodies import ConsumerData, Heartbeat, Subscription

PER_S = 1000
COUNT = 1000


class Group:
    """A group whose members are notified of changes."""

    def __init__(self) -> None:
        self.members: list[FakePeer] = []
        self.sent: Counter[Peer] = Counter()
        self.sent_in_turn: list[int] = []
        self.last_sent_s: dict[Peer, float] = {}
        self.notices = GroupNotices(
            Deadlines(virtual_loop().clock), lambda _: self.members, self._notify, lambda: PER_S
        )

    def _notify(self, group: str, peers: Iterable[Peer]) -> None:
        assert group == "g"
        self.sent.update(peers)
        self.sent_in_turn.append(len(list(peers)))
        self.last_sent_s.update(dict.fromkeys(peers, virtual_loop().time()))

    def join(self) -> None:
        self.members.append(FakePeer())
        self.notices.group_changed("g")


@virtual_time()
async def test_joins_in_one_turn_lead_to_one_notice_for_each_member() -> None:
    group = Group()
    for _ in range(COUNT):
        group.join()
    assert not group.sent
    await asyncio.sleep(0)
    assert group.sent.total() == NOTIFIED_PER_TURN, "the next turn begins, and others get theirs"
    await asyncio.sleep(60)
    assert group.sent == Counter(group.members)
    assert max(group.sent_in_turn) == NOTIFIED_PER_TURN


@virtual_time()
async def test_the_notices_of_a_group_that_keeps_changing_are_limited_and_none_is_missed() -> None:
    group, seconds = Group(), 10
    for _ in range(COUNT):
        group.join()
        await asyncio.sleep(seconds / COUNT)
    joined_s = virtual_loop().time()
    await asyncio.sleep(60)
    assert group.sent.total() <= PER_S * seconds + 2 * COUNT, "half a million if all at each join"
    assert group.last_sent_s.keys() == set(group.members)
    assert all(at_s >= joined_s - seconds / COUNT for at_s in group.last_sent_s.values())
    assert max(group.last_sent_s.values()) < joined_s + 3 * COUNT / PER_S


@virtual_time()
async def test_a_change_of_a_quiet_group_is_reported_in_the_next_turn() -> None:
    group = Group()
    for count in range(1, 4):
        group.join()
        await asyncio.sleep(0)
        assert group.sent.total() == sum(range(count + 1))
        await asyncio.sleep(1)
    assert group.sent.total() == 6, "nothing is repeated"


@virtual_time()
async def test_a_broker_notifies_a_reconnecting_group_once(tmp_path: Path) -> None:
    wanted = [Subscription(topic="T", sub_string="*")]
    data = ConsumerData(group_name="g", subscription_data_set=wanted)
    async with running_broker(tmp_path) as (broker, _):
        membership, peers = broker.administration.membership, []
        for number in range(COUNT):
            peers.append(FakePeer(f"10.0.1.1:{number}"))
            beat = Heartbeat(client_id=f"c{number}", consumer_data_set=[data])
            membership.heartbeat(peers[-1], beat, None, 0)
        await asyncio.sleep(5)
        assert {len(peer.sent) for peer in peers} == {1}
        for peer in peers[:-1]:
            membership.connection_closed(peer)
        await asyncio.sleep(5)
        assert sum(len(peer.sent) for peer in peers) == COUNT + 1


@virtual_time()
async def test_joining_and_leaving_a_large_group_takes_no_more_work(tmp_path: Path) -> None:
    def calls(action: Callable[[], None]) -> int:
        """Count the calls of functions, and the steps of generators, of an action."""
        count = 0

        def count_event(_frame: FrameType, event: str, _arg: object) -> None:
            nonlocal count
            count += event == "call"

        # A collection calls what others have registered, such as Hypothesis.
        gc.disable()
        sys.setprofile(count_event)
        try:
            action()
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    async with running_broker(tmp_path) as (broker, _):
        membership = broker.administration.membership

        def join(number: int) -> FakePeer:
            wanted = [Subscription(topic="T", sub_string="*")]
            data = ConsumerData(group_name="g", subscription_data_set=wanted)
            peer = FakePeer(f"10.0.1.1:{number}")
            beat = Heartbeat(client_id=f"c{number}", consumer_data_set=[data])
            membership.heartbeat(peer, beat, None, 0)
            return peer

        costs = []
        for size in (10, 500):
            peers = [join(number) for number in range(size)]
            joining, leaving = calls(lambda: peers.append(join(size))), peers[0]  # noqa: B023
            costs.append((joining, calls(lambda: membership.connection_closed(leaving))))  # noqa: B023
            for peer in peers[1:]:
                membership.connection_closed(peer)
            await asyncio.sleep(5)
        assert costs[0] == costs[1]
