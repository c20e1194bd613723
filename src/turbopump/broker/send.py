"""Accepting messages: check, create the topic if needed, store, and report the outcome."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from msgspec import Struct

from turbopump.broker.config import BrokerConfig
from turbopump.broker.durability import Late, Outcome, Promise
from turbopump.broker.groups import Groups
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.message_writer import (
    Draft,
    MessageWriter,
    delay_level_of,
    record_of,
    refusal,
    waits_for_disk,
)
from turbopump.broker.queueing_delay import QueueingDelay
from turbopump.broker.stats import Stats
from turbopump.broker.topics import Topics, queues_of
from turbopump.broker.transactions.half import half_draft, is_half
from turbopump.broker.transactions.transactions import prepare_topics
from turbopump.clock import Clock
from turbopump.core import HEADER_BYTES_MAX, SendFrame, parse_properties
from turbopump.errors import BodyError, InvalidArgument, RemoteError, WriteRefused
from turbopump.message import PhysicalOffset
from turbopump.store.append import add_record
from turbopump.store.outcomes import Appended
from turbopump.wire import properties as names
from turbopump.wire.bodies import TopicConfig
from turbopump.wire.codes import ResponseCode
from turbopump.wire.hosts import Host, host, split_address
from turbopump.wire.ids import offset_id
from turbopump.wire.names import RETRY_PREFIX, check_name, dead_letter_topic, is_forbidden_to_send
from turbopump.wire.sysflag import MULTI_TAGS, Transaction, transaction_of

_OTHER_FIELDS_BYTES = 4096
"""Room in the header of a response for what is beside the ids."""
_TARGETS_MAX = 65536
# Looking up a member of an enumeration takes as long as a call.
_DURABLE, _WRITTEN = Promise.DURABLE, Promise.WRITTEN
_CLIENT_LIMITS_RETRIES_SINCE = 121
"""From this version on, a client's own retry limit counts."""

UNIT_TOPIC = 1
UNIT_RETRY_TOPIC = 2

OnSent = Callable[["PendingSend", Outcome], None]
"""Called once with the outcome of a send."""


class _Target(Struct, frozen=True):
    """The destination of a message that has passed the checks of its topic and queue."""

    config: TopicConfig
    """The settings used for these checks."""
    topic: str
    stored_topic: bytes
    queue_id: int
    sys_flag: int
    """Bits that all messages of the topic get."""
    is_retry: bool
    """Whether a consumer sends a failed message as a new one, for a later retry."""


class PendingSend(Struct, eq=False):
    """A message or a batch from its arrival until its sender knows the outcome."""

    send: SendFrame
    sender: Any
    """Whom ``on_outcome`` answers; the domain does not need to know."""
    on_outcome: OnSent
    counted: Callable[[_Target, Outcome], Outcome]
    """Counts an outcome, and returns it as the sender gets it."""
    target: _Target | None = None
    promise: Promise = _DURABLE

    @property
    def queue_id(self) -> int:
        return self.send.queue_id if self.target is None else self.target.queue_id

    def report(self, outcome: Outcome) -> None:
        if self.target is not None:
            outcome = self.counted(self.target, outcome)
        self.on_outcome(self, outcome)


@dataclass(eq=False, kw_only=True)
class Sends:
    config: LiveConfig
    store_host: Host
    writer: MessageWriter
    queueing_delay: QueueingDelay
    topics: Topics
    groups: Groups
    stats: Stats
    clock: Clock
    chance: Random

    def __post_init__(self) -> None:
        id_bytes = len(offset_id(self.store_host, PhysicalOffset(0))) + 1
        self._batch_messages_max = (HEADER_BYTES_MAX - _OTHER_FIELDS_BYTES) // id_bytes
        self._packed_store_host = self.store_host.packed
        self._is_closed = False
        # Queues to which most messages may go without further checks, by topic and queue.
        self._targets: dict[tuple[str, int], _Target] = {}
        self._take_over(self.config.current)
        self.config.listen(lambda _, changed: self._take_over(changed))

    def _take_over(self, config: BrokerConfig) -> None:
        """Prepare what every message is checked with, and what it gets."""
        overload = config.overload
        self._cluster = names.encode({names.CLUSTER: config.identity.cluster}).encode()
        self._body_bytes_max = config.limits.message_bytes_max
        self._sends_from_ms = config.access.sends_from_ms
        self._wait_max_ms = overload.send_wait_max_ms if overload.fast_failure else sys.maxsize

    def accept(self, send: SendFrame, client: str, sender: Any, on_outcome: OnSent) -> None:
        """Refuse immediately, or report the outcome when the message is stored.

        ``client`` is the sender's address, as ``host:port``.
        """
        pending = PendingSend(send, sender, on_outcome, self._counted)
        try:
            if self._is_closed or self.queueing_delay.wait_ms > self._wait_max_ms:
                raise self._busy()
            target = self._target(send, client)
            try:
                waits = (
                    self._add_batch(send, target, client)
                    if send.batch
                    else self._add_single(send, target, client)
                )
            except InvalidArgument as error:
                raise RemoteError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        except (RemoteError, WriteRefused) as error:
            self.stats.failures.add()
            # The latter: a new topic that could not be saved.
            pending.report(refusal(error))
            return
        pending.target = target
        # Retried copies inherit WAIT=false: their consumer commits the original once they are
        # acknowledged, so the broker's mode decides.
        pending.promise = _DURABLE if waits or target.is_retry else _WRITTEN
        self.writer.add(pending)

    def _counted(self, target: _Target, outcome: Outcome) -> Outcome:
        """Count a send; return its outcome as its sender gets it."""
        if isinstance(outcome, Late) and target.is_retry:
            outcome = outcome.for_consumer()
        appended = outcome.appended if isinstance(outcome, Late) else outcome
        if isinstance(appended, Appended):
            positions = appended.physical_offsets
            size = appended.end_offset - positions[0]
            self.stats.put(target.topic, target.queue_id, len(positions), size)
        else:
            self.stats.failures.add()
        return outcome

    def close(self) -> None:
        """Accept no further messages; outcomes of those accepted are still reported."""
        self._is_closed = True

    def _busy(self) -> RemoteError:
        if self._is_closed:
            return RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, "the broker is closing")
        return RemoteError(
            ResponseCode.SYSTEM_BUSY,
            "[TIMEOUT_CLEAN_QUEUE]broker busy, requests wait behind"
            f" {self.queueing_delay.wait_ms} ms of work: start flow control for a while",
        )

    # --- checks -----------------------------------------------------------------------------------

    def _target(self, send: SendFrame, client: str) -> _Target:
        if send.body_length > self._body_bytes_max:
            raise self._too_large(send.body_length)
        target = self._targets.get((send.topic, send.queue_id))
        if (
            target is not None
            and target.config is self.topics.find(send.topic)
            and self.writer.suspension is None
            and not self._sends_from_ms
        ):
            return target
        return self._checked_target(send, client)

    def _checked_target(self, send: SendFrame, client: str) -> _Target:
        topic = self.admit(send, client)
        queue_id = send.queue_id
        if queue_id < 0:
            queue_id = self.chance.randrange(topic.write_queue_nums)
        name = topic.topic_name
        is_retry = name.startswith(RETRY_PREFIX)
        if is_retry and self._is_hopeless(send, client):
            dead_letters = dead_letter_topic(name.removeprefix(RETRY_PREFIX))
            name, queue_id = self.topics.create_internal(dead_letters, queues=1).topic_name, 0
        multi_tags = MULTI_TAGS if topic.topic_filter_type == "MULTI_TAG" else 0
        target = _Target(topic, name, name.encode(), queue_id, multi_tags, is_retry)
        if queue_id == send.queue_id and not is_retry and not topic.order:
            # The settings of a topic are replaced when they change: then it is checked again.
            if len(self._targets) >= _TARGETS_MAX:
                self._targets.clear()
            self._targets[send.topic, queue_id] = target
        return target

    def admit(self, send: SendFrame, client: str) -> TopicConfig:
        """Return the topic to store a message in, created from its template if needed."""
        self.writer.refuse_if_suspended()
        starts_ms = self._sends_from_ms
        if starts_ms and starts_ms > self.clock.now_ms():
            raise RemoteError.system(
                f"broker unable to service, until {starts_ms} (startAcceptSendRequestTimeStamp)"
            )
        if is_forbidden_to_send(send.topic):
            raise RemoteError(
                ResponseCode.NO_PERMISSION, f"Sending message to topic[{send.topic}] is forbidden."
            )
        topic = self.topics.find(send.topic)
        if topic is None:
            topic = self._create_topic(send, client)
        # A broker without write permission still takes plain sends: routes keep clients away.
        if topic.order and not self.config.current.access.can_write:
            raise self._forbidden("sending message")
        if not 0 <= send.queue_id < topic.write_queue_nums:
            _check_queue(send.queue_id, topic)
        return topic

    def _create_topic(self, send: SendFrame, client: str) -> TopicConfig:
        wrong = check_name(send.topic)
        if wrong is not None:
            raise RemoteError.system(wrong)
        unit = 0
        if send.unit_mode:
            is_retry = send.topic.startswith(RETRY_PREFIX)
            unit = UNIT_RETRY_TOPIC if is_retry else UNIT_TOPIC
        topic = self.topics.create_by_send(
            send.topic, send.default_topic, send.default_topic_queue_nums, unit, client
        )
        if topic is None:
            raise RemoteError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{send.topic}] not exist, apply first please! No topic can be created from"
                f" the template {send.default_topic!r} here.",
            )
        return topic

    def _is_hopeless(self, send: SendFrame, client: str) -> bool:
        """Whether a message was retried as often as its group allows."""
        name = send.topic.removeprefix(RETRY_PREFIX)
        group = self.groups.find(name, client)
        if group is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {name}"
            )
        wanted = retries_max_of(send.version, send.max_reconsume_times)
        most = group.retry_max_times if wanted is None else wanted
        return send.reconsume_times >= most

    def _too_large(self, size: int) -> RemoteError:
        return RemoteError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the message is illegal: the body must be at most {self._body_bytes_max} bytes "
            f"(maxMessageSize), got {size}",
        )

    def _forbidden(self, what: str) -> RemoteError:
        place = self.config.current.identity.reachable_host
        return RemoteError(ResponseCode.NO_PERMISSION, f"the broker[{place}] {what} is forbidden")

    # --- storing ----------------------------------------------------------------------------------

    def _add_single(self, send: SendFrame, target: _Target, client: str) -> bool:
        """Add a message to those to be stored; return whether its sender waits for the disk."""
        waits = self.writer.block.add_send(
            send,
            target.stored_topic,
            target.queue_id,
            target.sys_flag,
            self._cluster,
            packed_host(client),
            self._packed_store_host,
        )
        return self._add_special(send, target, client) if waits is None else waits

    def _add_special(self, send: SendFrame, target: _Target, client: str) -> bool:
        """Do the same for a message that may be delayed or part of a transaction."""
        properties = parse_properties(send.properties)
        waits, half = waits_for_disk(properties), is_half(properties, send.topic)
        if target.topic != send.topic:
            # A dead letter; the delay was that of the next attempt.
            properties.pop(names.DELAY, None)
        if delay_level_of(properties) == 0 and not half:
            # Delayed messages keep it, as in Apache RocketMQ.
            properties.pop(names.WAIT, None)
        properties[names.CLUSTER] = self.config.current.identity.cluster
        draft = Draft(
            topic=target.topic,
            queue_id=target.queue_id,
            properties=properties,
            body=bytes(send.body),
            flag=send.message_flag,
            sys_flag=send.sys_flag | target.sys_flag,
            born_timestamp_ms=send.born_timestamp,
            born_host=host_of(client),
            store_host=self.store_host,
            reconsume_times=send.reconsume_times,
        )
        if half and self.config.current.transactions.rejected:
            raise self._forbidden("sending transaction message")
        if half:
            prepare_topics(self.topics)
            record = record_of(half_draft(draft, send.producer_group))
        else:
            record = self.writer.record(draft)
        add_record(self.writer.block, record)
        return waits

    def _add_batch(self, send: SendFrame, target: _Target, client: str) -> bool:
        """Add a batch to those to be stored; return whether its sender waits for the disk."""
        in_transaction = transaction_of(send.sys_flag) is not Transaction.NONE
        cluster = self.config.current.identity.cluster
        shared, waits, is_delayed = _shared_properties(send.properties, cluster)
        if not send.body_length or is_delayed or in_transaction:
            raise RemoteError(
                ResponseCode.MESSAGE_ILLEGAL,
                "a batch must have messages, and cannot be delayed or transactional",
            )
        try:
            self.writer.block.add_batch(
                target.stored_topic,
                target.queue_id,
                send.body,
                shared,
                send.sys_flag | target.sys_flag,
                send.born_timestamp,
                packed_host(client),
                self._packed_store_host,
                send.reconsume_times,
                self._batch_messages_max,
            )
        except BodyError as error:
            raise RemoteError(ResponseCode.MESSAGE_ILLEGAL, f"batch: {error}") from error
        return waits


def retries_max_of(version: int, wanted: int | None) -> int | None:
    """Return how often a client lets a message be retried; None if its group decides."""
    return wanted if version >= _CLIENT_LIMITS_RETRIES_SINCE else None


def _check_queue(queue_id: int, topic: TopicConfig) -> None:
    """Refuse a queue that a topic does not have; fewer may be written to than read."""
    queues = queues_of(topic)
    if queue_id >= queues or (queue_id < 0 and topic.write_queue_nums < 1):
        raise RemoteError.system(
            f"request queueId[{queue_id}] is illegal: topic {topic.topic_name} has {queues} queues"
        )


@lru_cache(maxsize=16384)
def host_of(client: str) -> Host:
    """Return a client's address as messages keep it."""
    return host(*split_address(client))


@lru_cache(maxsize=16384)
def packed_host(client: str) -> bytes:
    """Return the same in the bytes of a record: IP address and port."""
    return host_of(client).packed


@lru_cache(maxsize=256)
def _shared_properties(text: bytes, cluster: str) -> tuple[bytes, bool, bool]:
    """Return a batch's shared properties, and whether it waits for the disk, or is delayed.

    Batches of a client mostly have the same ones.
    """
    shared = parse_properties(text)
    waits, is_delayed = waits_for_disk(shared), delay_level_of(shared) > 0
    shared[names.CLUSTER] = cluster
    return names.encode(shared).encode(), waits, is_delayed
