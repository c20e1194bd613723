"""Registries of clients against plain models, and the rules of the protocol one by one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker_parts import FakePeer
from example_counts import at_most
from turbopump.broker.clients import ConsumerGroup, Consumers, Member, Producers, merged
from turbopump.wire.bodies import (
    ConsumeFrom,
    ConsumerData,
    ConsumeType,
    MessageModel,
    Subscription,
)

EXPIRY_MS = 120_000


def subscription(topic: str, version: int = 1) -> Subscription:
    return Subscription(topic=topic, sub_string="*", sub_version=version)


def data(group: str, *topics: str, version: int = 1) -> ConsumerData:
    return ConsumerData(
        group_name=group,
        consume_type=ConsumeType.PUSH,
        message_model=MessageModel.CLUSTERING,
        consume_from_where=ConsumeFrom.LAST_OFFSET,
        subscription_data_set=[subscription(topic, version) for topic in topics],
    )


def member(peer: FakePeer, client_id: str = "c", at_ms: int = 0) -> Member:
    return Member(peer, client_id, 0, 409, at_ms, at_ms)


class Changes:
    """Records the groups whose changes were reported."""

    def __init__(self, consumers: Consumers) -> None:
        self.told: list[tuple[str, int]] = []
        consumers.listen(self._note)

    def _note(self, name: str, group: ConsumerGroup | None) -> None:
        self.told.append((name, 0 if group is None else len(group.members)))

    def taken(self) -> list[tuple[str, int]]:
        told, self.told = self.told, []
        return told


# --- consumers, one rule at a time ----------------------------------------------------------------


def test_members_are_notified_of_a_new_member_not_of_a_renewal() -> None:
    consumers = Consumers()
    changes = Changes(consumers)
    peer = FakePeer()
    consumers.heartbeat(member(peer), data("g", "T"))
    assert changes.taken() == [("g", 1)]
    consumers.heartbeat(member(peer, at_ms=30_000), data("g", "T"))
    assert changes.taken() == []
    assert consumers.members("g")[0].heartbeat_ms == 30_000


def test_members_are_notified_of_added_and_removed_topics_not_of_replacements() -> None:
    consumers = Consumers()
    changes = Changes(consumers)
    peer = FakePeer()
    consumers.heartbeat(member(peer), data("g", "T"))
    changes.taken()
    consumers.heartbeat(member(peer), data("g", "T", version=2))
    assert changes.taken() == []
    found = consumers.subscription("g", "T")
    assert found is not None
    assert found.sub_version == 2
    consumers.heartbeat(member(peer), data("g", "T", "U"))
    assert changes.taken() == [("g", 1)]
    consumers.heartbeat(member(peer), data("g", "U"))
    assert changes.taken() == [("g", 1)]
    assert consumers.subscription("g", "T") is None


def test_the_last_heartbeat_wins() -> None:
    consumers = Consumers()
    consumers.heartbeat(member(FakePeer(), "c1"), data("g", "T"))
    other = ConsumerData(
        group_name="g",
        consume_type=ConsumeType.PULL,
        message_model=MessageModel.BROADCASTING,
        subscription_data_set=[subscription("U")],
    )
    consumers.heartbeat(member(FakePeer(), "c2"), other)
    group = consumers.find("g")
    assert group is not None
    assert group.subscriptions.keys() == {"U"}
    assert (group.consume_type, group.message_model) == (
        ConsumeType.PULL,
        MessageModel.BROADCASTING,
    )
    assert group.consume_from is None
    assert consumers.find("h") is None


def test_older_subscriptions_do_not_replace_newer_ones() -> None:
    old = {"T": subscription("T", 5)}
    assert merged(old, [subscription("T", 4)])["T"].sub_version == 5
    assert merged(old, [subscription("T", 5)])["T"] is old["T"]
    assert merged(old, [subscription("T", 6)])["T"].sub_version == 6


def test_equal_client_ids_on_two_connections_are_two_members() -> None:
    consumers = Consumers()
    first, second = FakePeer(), FakePeer()
    consumers.heartbeat(member(first, "same"), data("g", "T"))
    consumers.heartbeat(member(second, "same"), data("g", "T"))
    assert [m.client_id for m in consumers.members("g")] == ["same", "same"]
    found = consumers.member("g", "same")
    assert found is not None
    assert found.connection is second
    assert consumers.member("g", "other") is None


def test_remaining_members_are_notified_when_one_leaves() -> None:
    consumers = Consumers()
    changes = Changes(consumers)
    first, second = FakePeer(), FakePeer()
    for peer in (first, second):
        consumers.heartbeat(member(peer), data("g", "T"))
        consumers.heartbeat(member(peer), data("h", "T"))
    changes.taken()
    consumers.unregister(first, "g")
    consumers.unregister(first, "g")
    consumers.unregister(first, "unknown")
    assert changes.taken() == [("g", 1)]
    consumers.connection_closed(first)
    assert changes.taken() == [("h", 1)]
    consumers.connection_closed(first)
    assert changes.taken() == []
    consumers.connection_closed(second)
    assert changes.taken() == [("g", 0), ("h", 0)]
    assert not consumers.groups


def test_groups_of_a_topic() -> None:
    consumers = Consumers()
    consumers.heartbeat(member(FakePeer()), data("g", "T", "U"))
    consumers.heartbeat(member(FakePeer()), data("h", "U"))
    assert consumers.groups_of_topic("T") == {"g"}
    assert consumers.groups_of_topic("U") == {"g", "h"}
    assert consumers.groups_of_topic("V") == set()


def test_silence_in_one_group_is_enough_to_be_closed() -> None:
    consumers = Consumers()
    peer = FakePeer()
    consumers.heartbeat(member(peer, at_ms=0), data("g", "T"))
    consumers.heartbeat(member(peer, at_ms=100_000), data("h", "T"))
    assert consumers.expired(EXPIRY_MS, EXPIRY_MS) == []
    assert consumers.expired(EXPIRY_MS + 1, EXPIRY_MS) == [peer]
    assert consumers.members("g"), "it leaves when its connection closes"


# --- producers ------------------------------------------------------------------------------------


def test_producers_are_found_by_group_and_by_id() -> None:
    producers = Producers()
    peer, later = FakePeer(), FakePeer()
    producers.heartbeat(member(peer, "p", 1), "pg")
    producers.heartbeat(member(peer, "p", 1), "other")
    assert [m.client_id for m in producers.members("pg")] == ["p"]
    found = producers.by_client_id("p")
    assert found is not None
    assert found.connection is peer
    producers.heartbeat(member(later, "p", 2), "pg")
    found = producers.by_client_id("p")
    assert found is not None
    assert found.connection is later
    producers.connection_closed(later)
    found = producers.by_client_id("p")
    assert found is not None
    assert found.connection is peer
    producers.unregister(peer, "pg")
    assert producers.by_client_id("p") is not None
    producers.unregister(peer, "other")
    producers.unregister(peer, "other")
    assert producers.by_client_id("p") is None
    assert not producers.groups


def test_a_producer_that_changes_its_id_loses_the_old_one() -> None:
    producers = Producers()
    peer = FakePeer()
    producers.heartbeat(member(peer, "old"), "pg")
    producers.heartbeat(member(peer, "new"), "pg")
    assert producers.by_client_id("old") is None
    assert producers.by_client_id("new") is not None
    assert len(producers.members("pg")) == 1


def test_silent_producers() -> None:
    producers = Producers()
    quiet, loud = FakePeer(), FakePeer()
    producers.heartbeat(member(quiet, "q", 0), "pg")
    producers.heartbeat(member(loud, "l", 60_000), "pg")
    assert producers.expired(EXPIRY_MS + 1, EXPIRY_MS) == [quiet]


# --- all operations together ----------------------------------------------------------------------

PEERS = [FakePeer(f"10.0.0.{number}:1") for number in range(3)]
peers = st.sampled_from(PEERS)
group_names = st.sampled_from(["g", "h"])
ids = st.sampled_from(["c1", "c2"])
versions = st.integers(1, 4)


class Membership(RuleBasedStateMachine):
    """Consumers and producers against dictionaries keyed by group and connection."""

    def __init__(self) -> None:
        super().__init__()
        self.consumers = Consumers()
        self.producers = Producers()
        self.changes = Changes(self.consumers)
        self.joined: dict[tuple[str, FakePeer], tuple[str, int]] = {}
        self.wanted: dict[str, dict[str, int]] = {}
        self.producing: dict[tuple[str, FakePeer], tuple[str, int]] = {}
        self.now_ms = 0

    def peers_of(self, group: str) -> set[FakePeer]:
        return {peer for name, peer in self.joined if name == group}

    @rule(peer=peers, group=group_names, client_id=ids, topics=st.sets(st.sampled_from("TUV")),
          version=versions)  # fmt: skip
    def consume(
        self, peer: FakePeer, group: str, client_id: str, topics: set[str], version: int
    ) -> None:
        is_new = (group, peer) not in self.joined
        old = self.wanted.get(group, {})
        self.consumers.heartbeat(
            member(peer, client_id, self.now_ms), data(group, *topics, version=version)
        )
        self.joined[group, peer] = (client_id, self.now_ms)
        self.wanted[group] = {topic: max(version, old.get(topic, 0)) for topic in topics}
        told = is_new or topics != old.keys()
        assert self.changes.taken() == ([(group, len(self.peers_of(group)))] if told else [])

    @rule(peer=peers, group=group_names, client_id=ids)
    def produce(self, peer: FakePeer, group: str, client_id: str) -> None:
        self.producers.heartbeat(member(peer, client_id, self.now_ms), group)
        self.producing[group, peer] = (client_id, self.now_ms)

    @rule(peer=peers, group=group_names)
    def leave(self, peer: FakePeer, group: str) -> None:
        self.consumers.unregister(peer, group)
        self.producers.unregister(peer, group)
        was_there = self.joined.pop((group, peer), None) is not None
        self.producing.pop((group, peer), None)
        self.forget_empty()
        told = [(group, len(self.peers_of(group)))] if was_there else []
        assert self.changes.taken() == told

    @rule(peer=peers)
    def close(self, peer: FakePeer) -> None:
        self.consumers.connection_closed(peer)
        self.producers.connection_closed(peer)
        left = sorted(group for group, member in self.joined if member is peer)
        for table in (self.joined, self.producing):
            for key in [key for key in table if key[1] is peer]:
                del table[key]
        self.forget_empty()
        assert self.changes.taken() == [(group, len(self.peers_of(group))) for group in left]

    @rule(passed_ms=st.integers(1, 90_000))
    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    def forget_empty(self) -> None:
        self.wanted = {name: topics for name, topics in self.wanted.items() if self.peers_of(name)}

    @invariant()
    def tables_agree(self) -> None:
        assert self.consumers.groups.keys() == self.wanted.keys()
        for name, group in self.consumers.groups.items():
            assert set(group.members) == self.peers_of(name)
            assert {t: s.sub_version for t, s in group.subscriptions.items()} == self.wanted[name]
            for peer, seat in group.members.items():
                assert isinstance(peer, FakePeer)
                assert (seat.client_id, seat.heartbeat_ms) == self.joined[name, peer]
        found = {(name, peer) for name, table in self.producers.groups.items() for peer in table}
        assert found == self.producing.keys()

    @invariant()
    def ids_lead_to_a_newest_producer(self) -> None:
        for client_id in ("c1", "c2"):
            times = [at_ms for name, at_ms in self.producing.values() if name == client_id]
            found = self.producers.by_client_id(client_id)
            assert (found is None) == (not times)
            assert found is None or found.heartbeat_ms == max(times)

    @invariant()
    def the_silent_are_found(self) -> None:
        for registry, table in ((self.consumers, self.joined), (self.producers, self.producing)):
            late = {
                peer for (_, peer), (_, at_ms) in table.items() if self.now_ms - at_ms > EXPIRY_MS
            }
            assert set(registry.expired(self.now_ms, EXPIRY_MS)) == late


Membership.TestCase.settings = settings(
    max_examples=at_most(60), stateful_step_count=30, deadline=None
)
TestMembership = Membership.TestCase
