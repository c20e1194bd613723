"""Answering pulls: immediately, or held until a message arrives that the puller wants."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVarTuple

import msgspec
from msgspec import Struct

from turbopump.broker.arrivals import Arrivals, HeldPull, Holder, Wants
from turbopump.broker.clients import Consumers, Peer
from turbopump.broker.config import BrokerConfig
from turbopump.broker.durability import Outcome, Promise
from turbopump.broker.groups import Groups
from turbopump.broker.jobs import when_done
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
from turbopump.net.network import host_text
from turbopump.store import outcomes
from turbopump.store.outcomes import Filter, ReadOutcome
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.bodies import GroupConfig, MessageModel, Subscription, TopicConfig
from turbopump.wire.codes import ResponseCode
from turbopump.wire.hosts import Host
from turbopump.wire.names import OFFSET_MOVED_TOPIC

Ts = TypeVarTuple("Ts")

_USUAL_TAGS = 8
_USUAL_CHARS = 64
"""A held pull takes a few KiB with a filter of this size, and nearly 1 MiB with the largest one."""
_FETCHES_MAX = 3


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
    """A waiting pull. `then` sets the callback, called once unless the client disconnects.

    It waits for messages, or for the disk to read them.
    """

    pull: Pull
    wanted: Filter
    has_waited: bool = False
    """Whether it waits, or has waited, for messages."""
    fetches: int = 0
    """How often the disk has read what it needs."""
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
        self._fetching = 0
        """Pulls that wait for the disk."""
        self._take_over(self.config.current)
        self.config.listen(lambda _, changed: self._take_over(changed))

    def _take_over(self, config: BrokerConfig) -> None:
        """Derive rules and limits from settings. Large pulls are limited no more strictly."""
        self._rules = ReadRules.of(config)
        usual, most = config.store.limits, config.limits
        self._fetching_max = config.long_polling.held_max
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
        """Read messages for a pull that was just admitted, or hold it if there are none yet.

        Raises RemoteError if too many are held, or wait for the disk: answers without messages
        would make clients pull again immediately.
        """
        outcome = self._read(pull, wanted)
        if not isinstance(outcome, outcomes.Found):
            held = Held(pull, wanted)
            if isinstance(outcome, outcomes.Cold):
                self._fetch(held, outcome)
                return held
            if self._hold(held, outcome):
                return held
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

    def _read(
        self, pull: Pull, wanted: Filter, *, may_wait: bool = False
    ) -> ReadOutcome | outcomes.Cold:
        """Read messages, or return what to fetch first unless the disk may be waited for."""
        read = self.store.read if may_wait else self.store.read_from_memory
        outcome = read(
            pull.topic,
            pull.queue_id,
            QueueOffset(pull.offset),
            pull.count_max,
            wanted,
            self._bulk if pull.is_bulk else None,
        )
        if isinstance(outcome, outcomes.Cold):
            return outcome
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

    def _hold(self, held: Held, outcome: ReadOutcome) -> bool:
        """Hold a pull that has just found nothing, if it is to wait; return whether it is held."""
        pull, wanted = held.pull, held.wanted
        if pull.hold_ms is None or self.status_of(pull, outcome) is not Status.NOT_FOUND:
            return False
        holder = Holder(pull.client, pull.group, host_text(pull.client.peer_address))
        refusal = self.arrivals.refusal(holder)
        if refusal is not None:
            raise RemoteError(ResponseCode.SYSTEM_BUSY, refusal)
        held.has_waited = True
        self.arrivals.hold(
            HeldPull(
                queue=(pull.topic, pull.queue_id),
                offset=pull.offset,
                holder=holder,
                resume=lambda: self._resume(held),
                tags_codes=wanted.tags_codes,
                wants=_wants(wanted),
                is_behind=isinstance(outcome, outcomes.UnitsMissing),
                is_subscribed=pull.expression is None,
                weight=_weight(pull, wanted),
            ),
            pull.hold_ms,
        )
        return True

    def _fetch(self, held: Held, cold: outcomes.Cold, failure: BaseException | None = None) -> None:
        """Have the disk read what a pull needs, and then read again.

        Raises RemoteError if it has failed to do that, for whatever ``failure``, or if too many
        wait for it.
        """
        if failure is not None:
            raise RemoteError.system(f"the store's files cannot be read: {failure}")
        if self._fetching >= self._fetching_max:
            raise RemoteError(
                ResponseCode.SYSTEM_BUSY,
                "too many pulls wait for the disk: pullThreadPoolQueueCapacity is"
                f" {self._fetching_max}; pull later",
            )
        if held.fetches >= _FETCHES_MAX:
            # Memory is so scarce that what was fetched is dropped before it is read.
            asyncio.get_running_loop().call_soon(self._resume, held, True)
            return
        held.fetches += 1
        self._fetching += 1
        when_done(self.store.fetch(cold), lambda fetched: self._fetched(held, fetched))

    def _fetched(self, held: Held, fetched: Future[None]) -> None:
        self._fetching -= 1
        self._resume(held, failure=fetched.exception())

    def _resume(
        self, held: Held, may_wait: bool = False, failure: BaseException | None = None
    ) -> None:
        """Report the result of a pull whose wait is over, if it may still read.

        With a ``failure``, the disk could not read all that was to be fetched.
        """
        outcome: ReadOutcome | outcomes.Cold | Exception
        try:
            group = self._check(held.pull)
            if held.pull.expression is None:
                # The group's subscription may have changed.
                held.wanted = self._wanted(held.pull, group)
            outcome = self._read(held.pull, held.wanted, may_wait=may_wait)
            if isinstance(outcome, outcomes.Cold):
                self._fetch(held, outcome, failure)
                return
            # Pulls of a client that has gone were dropped before: this one would stay.
            may_hold = not held.has_waited and held.pull.client.is_open
            is_found = isinstance(outcome, outcomes.Found)
            if not is_found and may_hold and self._hold(held, outcome):
                return
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
            self.writer.append_soon(record, Promise.WRITTEN, _unreported)


def _unreported(_: Outcome) -> None:
    """Ignore the outcome of storing an event."""


def _weight(pull: Pull, wanted: Filter) -> int:
    """Return the number of usual pulls that a held one counts as, by the size of its filter."""
    text = "" if pull.expression is None else pull.expression.text or ""
    return 1 + max(len(wanted.tags_codes or ()) // _USUAL_TAGS, len(text) // _USUAL_CHARS)


def _wants(wanted: Filter) -> Wants | None:
    """Return the check beyond the tag that a held pull applies to an arriving message."""
    matches = wanted.properties
    return None if matches is None else lambda arrival: matches(arrival.properties)
