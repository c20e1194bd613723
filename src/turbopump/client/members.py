"""The producers and consumers that share a session, and their interface to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

from turbopump.client.names import INNER_PRODUCER_GROUP
from turbopump.errors import InvalidArgument, RemoteError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.supervisor import Watch
from turbopump.wire.bodies import (
    ConsumerData,
    DirectConsumption,
    Heartbeat,
    ProducerData,
    RunningInfo,
)
from turbopump.wire.codes import ResponseCode
from turbopump.wire.headers import CheckTransactionState
from turbopump.wire.record import MessageView


class ProducerMember:
    """A producer as its session sees it; ``group`` is the name as brokers know it."""

    group: str

    def topics(self) -> Iterable[str]:
        """Return the topics whose brokers must know the group before the first send."""
        return ()

    def check_transaction(
        self, broker_address: str, asked: CheckTransactionState, message: MessageView
    ) -> None:
        """Handle a broker's check of a half message (39)."""


class ConsumerMember:
    """A consumer as its session sees it; ``group`` is the name as brokers know it.

    The defaults are those of a consumer without the feature.
    """

    group: str

    def heartbeat_data(self) -> ConsumerData:
        """Return the data for brokers: kind, model, start, subscriptions."""
        raise NotImplementedError

    def topics(self) -> Iterable[str]:
        """Return the topics whose routes to keep up to date, as brokers name them."""
        return [each.topic for each in self.heartbeat_data().subscription_data_set]

    @property
    def watches(self) -> Iterable[Watch]:
        """The background tasks and their failures, besides the session's."""
        return ()

    def members_changed(self) -> None:
        """Handle a change of the group's members (40)."""

    def route_changed(self, topic: str) -> None:
        """Handle a change of a topic's queues or brokers."""

    async def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, QueueOffset]) -> None:
        """Reset offsets at an operator's request (220)."""

    def progress(self, topic: str) -> Mapping[MessageQueue, int]:  # noqa: ARG002 - for overrides
        """Return the position of each owned queue, in memory (221)."""
        return {}

    async def running_info(self, *, with_stacks: bool) -> RunningInfo:  # noqa: ARG002 - for overrides
        """Return the internal state that operators can inspect (307)."""
        return RunningInfo(subscription_set=list(self.heartbeat_data().subscription_data_set))

    async def consume_directly(
        self,
        message: MessageView,  # noqa: ARG002 - for overrides
        broker_name: str | None,  # noqa: ARG002 - for overrides
    ) -> DirectConsumption:
        """Consume one message at an operator's request (309)."""
        raise RemoteError(ResponseCode.SYSTEM_ERROR, f"{self.group} does not consume by push")


class Members:
    """Producers and consumers by group; each kind has a group at most once."""

    def __init__(self) -> None:
        self.producers: dict[str, ProducerMember] = {}
        self.consumers: dict[str, ConsumerMember] = {}
        # Weak: a member whose start failed must not occupy its group forever.
        self._joining: WeakSet[ProducerMember | ConsumerMember] = WeakSet()

    def has(self, member: ProducerMember | ConsumerMember) -> bool:
        """Whether another member of this kind already has the group."""
        return self._of_kind(member).get(member.group, member) is not member

    def expects(self, member: ProducerMember | ConsumerMember) -> bool:
        """Whether another member of this kind has the group, or is about to join with it."""
        is_producer = isinstance(member, ProducerMember)
        return self.has(member) or any(
            each.group == member.group and isinstance(each, ProducerMember) == is_producer
            for each in self._joining
            if each is not member
        )

    def expect(self, member: ProducerMember | ConsumerMember) -> None:
        self._joining.add(member)

    def add(self, member: ProducerMember | ConsumerMember) -> None:
        """Add a member; raises InvalidArgument if its group is taken."""
        if self.has(member):
            kind = "producer" if isinstance(member, ProducerMember) else "consumer"
            raise InvalidArgument(
                f"this client has a {kind} of group {member.group!r} already; give the second one "
                "another ClientConfig(instance=...)"
            )
        self._of_kind(member)[member.group] = member

    def remove(self, member: ProducerMember | ConsumerMember) -> bool:
        """Remove a member; return whether it existed."""
        self._joining.discard(member)
        if self._of_kind(member).get(member.group) is not member:
            return False
        del self._of_kind(member)[member.group]
        return True

    def topics(self) -> set[str]:
        """Return the topics whose routes are needed, even if nothing was sent to them."""
        found = {topic for producer in self.producers.values() for topic in producer.topics()}
        return found.union(*(consumer.topics() for consumer in self.consumers.values()))

    def heartbeat(self, client_id: str) -> Heartbeat:
        return Heartbeat(
            client_id=client_id,
            producer_data_set=[
                ProducerData(group_name=group)
                for group in dict.fromkeys((INNER_PRODUCER_GROUP, *self.producers))
            ],
            consumer_data_set=[each.heartbeat_data() for each in self.consumers.values()],
        )

    def _of_kind(self, member: ProducerMember | ConsumerMember) -> dict[str, Any]:
        return self.producers if isinstance(member, ProducerMember) else self.consumers
