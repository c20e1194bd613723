"""Answering pulls: immediately, or held until a message arrives that the puller wants."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVarTuple

import msgspec
from msgspec import Struct

from turbopump.broker.arrivals import Arrivals, HeldPull, Wants
from turbopump.broker.clients import Consumers, Peer
from turbopump.broker.config import BrokerConfig
from turbopump.broker.durability import Outcome, Promise
from turbopump.broker.groups import Groups
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.message_writer import Draft, MessageWriter
from turbopump.broker.offsets import Offsets
from turbopump.broker.pull_status import MASTER_ID, ReadRules, Status
from turbopump.broker.stats import Stats
from turbopump.broker.subscription_filters import SubscriptionFilters
from turbopump.broker.topics import Topics, is_readable
from turbopump.clock import Clock
from turbopump.errors import RemoteError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.store import outcomes
from turbopump.store.outcomes import Filter, ReadOutcome
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.bodies import GroupConfig, MessageModel, Subscription, TopicConfig
from turbopump.wire.codes import ResponseCode
from turbopump.wire.hosts import Host
from turbopump.wire.names import OFFSET_MOVED_TOPIC

Ts = TypeVarTuple("Ts")


class Expression(Struct, frozen=True):
    """A filter expression carried by a pull."""

    text: str | None
    kind: str | None
    """TAG, which is also None, or SQL92."""


class Pull(Struct, frozen=True, kw_only=True):
    """A request for the messages of a queue from an offset on."""

    client: Peer
    """Its pulls are dropped together when it disconnects."""
    group: str
    topic: str
    queue_id: int
    offset: int
    count_max: int
    expression: Expression | None
    """None for the group's subscription, as its heartbeats say."""
    sub_version: int
    """Of the subscription that the client knows."""
    commit_offset: int | None
    """The group's offset, if it is to be committed."""
    hold_ms: int | None
    """How long to wait for messages; None for an immediate answer."""
    is_bulk: bool
    """Whether the client accepts large answers."""


class Held(Struct, eq=False):
    """A waiting pull. `then` sets the callback, called once unless the client disconnects."""

    pull: Pull
    wanted: Filter
    _on_outcome: Callable[..., None] | None = None
    _args: tuple[object, ...] = ()

    def then(self, on_outcome: Callable[[ReadOutcome | Exception, *Ts], None], *args: *Ts) -> None:
        """Set the callback; call it in the loop iteration that returned this."""
        self._on_outcome, self._args = on_outcome, args

    def report(self, outcome: ReadOutcome | Exception) -> None:
        if self._on_outcome is not None:
            self._on_outcome(outcome, *self._args)


@dataclass(eq=False, kw_only=True)
class Pulls:
    config: LiveConfig
    store_host: Host
    store: Store
    writer: MessageWriter
    arrivals: Arrivals
    topics: Topics
    groups: Groups
    consumers: Consumers
    filters: SubscriptionFilters
    offsets: Offsets
    stats: Stats
    clock: Clock

    def __post_init__(self) -> None:
        self._take_over(self.config.current)
        self.config.listen(lambda _, changed: self._take_over(changed))

    def _take_over(self, config: BrokerConfig) -> None:
        """Derive rules and limits from settings. Large pulls are limited no more strictly."""
        self._rules = ReadRules.of(config)
        usual, most = config.store.limits, config.limits
        self._bulk = dataclasses.replace(
            usual,
            memory_count_max=max(usual.memory_count_max, most.bulk_count_max),
            memory_bytes_max=max(usual.memory_bytes_max, most.bulk_bytes_max),
            disk_count_max=max(usual.disk_count_max, most.bulk_count_max),
            disk_bytes_max=max(usual.disk_bytes_max, most.bulk_bytes_max),
        )

    def admit(self, pull: Pull) -> Filter:
        """Check that a pull may read, and commit its group's offset; return its filter.

        Raises RemoteError.
        """
        group = self._check(pull)
        if self.consumers.has_absent:
            self.consumers.note_puller(pull.group, pull.client)
        wanted = self._wanted(pull, group)
        # Slaves copy offsets from their master: what is committed here would be lost.
        if self.writer.is_slave:
            return wanted
        if pull.commit_offset is not None:
            _, end = self.store.queue_range(pull.topic, pull.queue_id)
            if 0 <= pull.commit_offset <= end:
                self.offsets.commit(pull.group, pull.topic, pull.queue_id, pull.commit_offset)
        return wanted

    def read(self, pull: Pull, wanted: Filter) -> ReadOutcome | Held:
        """Read messages for a pull that was just admitted, or hold it if there are none yet."""
        outcome = self._read(pull, wanted)
        if (
            pull.hold_ms is not None
            and not isinstance(outcome, outcomes.Found)
            and not self.arrivals.is_full
            and self.status_of(pull, outcome) is Status.NOT_FOUND
        ):
            return self._hold(pull, wanted, outcome, pull.hold_ms)
        self._note(pull, outcome)
        return outcome

    def status_of(self, pull: Pull, outcome: ReadOutcome) -> Status:
        """Return the status that the puller gets for an outcome."""
        return self._rules.status_of(outcome, pull.offset)

    def suggested_broker_id(self, pull: Pull, outcome: ReadOutcome) -> int:
        """Return the id of the broker that the client should pull from next."""
        rules = self._rules
        if not rules.suggests_slaves and rules.corrects_offsets:
            return MASTER_ID
        group = self.groups.find(pull.group, pull.client.peer_address)
        known = GroupConfig(group_name=pull.group) if group is None else group
        return rules.suggested_broker_id(known, outcome, pull.offset)

    # --- checks, in the order of the protocol -----------------------------------------------------

    def _check(self, pull: Pull) -> GroupConfig:
        group, topic = self.require_readable(pull.group, pull.topic, pull.client)
        if not 0 <= pull.queue_id < topic.read_queue_nums:
            raise RemoteError.system(
                f"queueId[{pull.queue_id}] is illegal, topic:[{pull.topic}]"
                f" topicConfig.readQueueNums:[{topic.read_queue_nums}]"
                f" consumer:[{pull.group}]"
            )
        return group

    def require_readable(
        self, group_name: str, topic_name: str, client: Peer
    ) -> tuple[GroupConfig, TopicConfig]:
        """Return group and topic; raises RemoteError if the group may not read the topic."""
        config = self.config.current
        if not config.access.can_read:
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{config.identity.reachable_host}] pulling message is forbidden",
            )
        group = self.groups.find(group_name, client.peer_address)
        if group is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{group_name}] does not exist",
            )
        if not group.consume_enable:
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"subscription group no permission, {group_name}",
            )
        topic = self.topics.find(topic_name)
        if topic is None:
            raise RemoteError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{topic_name}] not exist, apply first please!",
            )
        if not is_readable(topic):
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"the topic[{topic_name}] pulling message is forbidden",
            )
        return group, topic

    def _wanted(self, pull: Pull, group: GroupConfig) -> Filter:
        if pull.expression is not None:
            return self.filters.of_request(pull.expression.text, pull.expression.kind)
        subscription = self._subscription(pull, group)
        return self.filters.of_subscription(pull.group, subscription)

    def _subscription(self, pull: Pull, group: GroupConfig) -> Subscription:
        name = pull.group
        online = self.consumers.find(name)
        if online is None or online.message_model is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group [{name}] is not online"
            )
        if online.message_model is MessageModel.BROADCASTING and not group.consume_broadcast_enable:
            raise RemoteError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{name}] can not consume by broadcast way",
            )
        subscription = online.subscriptions.get(pull.topic)
        if subscription is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group [{name}] has no subscription to {pull.topic}",
            )
        if subscription.sub_version < pull.sub_version:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the consumer's subscription of {pull.topic} is newer than the broker knows",
            )
        return subscription

    # --- reading and holding ----------------------------------------------------------------------

    def _read(self, pull: Pull, wanted: Filter) -> ReadOutcome:
        outcome = self.store.read(
            pull.topic,
            pull.queue_id,
            QueueOffset(pull.offset),
            pull.count_max,
            wanted,
            self._bulk if pull.is_bulk else None,
        )
        if (
            self.store.cut_ranges
            and not self._rules.corrects_offsets
            and self.store.was_cut(pull.topic, pull.queue_id, pull.offset)
        ):
            # It may have read messages of this slave that the master never had, or has lost: only
            # the master knows.
            limits = outcome.min_offset, outcome.max_offset
            outcome = outcomes.OffsetTooLarge(
                next_offset=QueueOffset(pull.offset), min_offset=limits[0], max_offset=limits[1]
            )
        return self._rules.reported(outcome, pull.offset)

    def _hold(self, pull: Pull, wanted: Filter, outcome: ReadOutcome, wait_ms: int) -> Held:
        polling = self.config.current.long_polling
        held = Held(pull, wanted)
        self.arrivals.hold(
            HeldPull(
                queue=(pull.topic, pull.queue_id),
                offset=pull.offset,
                owner=pull.client,
                resume=lambda: self._resume(held),
                tags_codes=wanted.tags_codes,
                wants=_wants(wanted),
                is_behind=isinstance(outcome, outcomes.UnitsMissing),
            ),
            max(0, wait_ms if polling.enabled else polling.short_hold_ms),
        )
        return held

    def _resume(self, held: Held) -> None:
        """Report the result of a pull whose wait is over, if it may still read."""
        outcome: ReadOutcome | Exception
        try:
            group = self._check(held.pull)
            wanted = held.wanted
            if held.pull.expression is None:
                # The group's subscription may have changed.
                wanted = self._wanted(held.pull, group)
            outcome = self._read(held.pull, wanted)
            self._note(held.pull, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it is, the puller waits for it
            outcome = error
        held.report(outcome)

    def _note(self, pull: Pull, outcome: ReadOutcome) -> None:
        """Count what a pull found, and record a pull at an invalid offset."""
        if isinstance(outcome, outcomes.Found):
            count, size = len(outcome.sizes), outcome.size
            self.stats.get(pull.group, pull.topic, pull.queue_id, count, size)
            return
        self.stats.misses.add()
        if self.status_of(pull, outcome) is Status.MOVED:
            self._report_offset_moved(pull, outcome.next_offset)

    def _report_offset_moved(self, pull: Pull, offset: int) -> None:
        """Store an event for operators: a group pulled at an offset without messages."""
        queue = MessageQueue(pull.topic, self.config.current.identity.broker_name, pull.queue_id)
        event = {
            "consumerGroup": pull.group,
            "messageQueue": queue,
            "offsetNew": offset,
            "offsetRequest": pull.offset,
        }
        # Only a note: a store that refuses writes must still answer reads.
        with contextlib.suppress(RemoteError):
            record = self.writer.record(
                Draft(
                    topic=OFFSET_MOVED_TOPIC,
                    queue_id=0,
                    properties={names.TAGS: pull.group, names.KEYS: pull.group},
                    body=msgspec.json.encode(event),
                    born_timestamp_ms=self.clock.now_ms(),
                    born_host=self.store_host,
                    store_host=self.store_host,
                )
            )
            self.writer.append_now([record], Promise.WRITTEN, _unreported)


def _unreported(_: Outcome) -> None:
    """Ignore the outcome of storing an event."""


def _wants(wanted: Filter) -> Wants | None:
    """Return the check beyond the tag that a held pull applies to an arriving message."""
    matches = wanted.properties
    return None if matches is None else lambda arrival: matches(arrival.properties)
