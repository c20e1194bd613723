"""Failed messages: redelivered to their group after a delay, or dead-lettered."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVarTuple

from msgspec import Struct
from msgspec.structs import replace

from turbopump.broker.durability import Late, Outcome, Promise
from turbopump.broker.groups import Groups
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.message_writer import Draft, MessageWriter, draft_like, refusal
from turbopump.broker.searches import Searches
from turbopump.broker.send import UNIT_RETRY_TOPIC
from turbopump.broker.stats import Stats
from turbopump.broker.topics import Topics, is_writable
from turbopump.errors import RemoteError, WriteRefused
from turbopump.message import PhysicalOffset
from turbopump.store.outcomes import Appended, Cold
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.bodies import GroupConfig, TopicConfig
from turbopump.wire.codes import ResponseCode
from turbopump.wire.hashing import body_crc
from turbopump.wire.names import dead_letter_topic, retry_topic
from turbopump.wire.record import MessageView, decode_record

Ts = TypeVarTuple("Ts")

FIRST_RETRY_LEVEL = 3
"""The delay level of the first retry: 10 s with the default levels."""

_MESSAGE_ID = re.compile("[0-9A-Fa-f]{32,}")

_NO_MESSAGE = memoryview(b"")

GIVE_UP = -1
"""The delay level by which a consumer says that a message will never succeed."""


class SendBack(Struct, frozen=True):
    """A message that a consumer could not handle."""

    client: str
    """The consumer's address, as ``host:port``."""
    group: str
    position: int
    """Of the message in the log."""
    message_id: str | None
    """Of the message, as the consumer knows it."""
    delay_level: int
    """0 if the number of retries decides; see `GIVE_UP`."""
    retries_max: int | None
    """How often a message may be retried; None if its group decides."""
    unit_mode: bool
    origin_topic: str = ""
    """As the consumer names it."""


class Dropped(Struct, frozen=True):
    """Nothing is stored, because the group allows no retries."""


OnSentBack = Callable[[Appended | Dropped | RemoteError, *Ts], None]
"""Called once with the outcome; without success, the consumer has to keep the message."""


@dataclass(slots=True, eq=False, kw_only=True)
class Retries:
    """Stores failed messages again."""

    config: LiveConfig
    store: Store
    writer: MessageWriter
    topics: Topics
    groups: Groups
    stats: Stats
    chance: Random
    searches: Searches

    def accept(
        self, failed: SendBack, on_outcome: OnSentBack[*Ts], *args: *Ts
    ) -> Awaitable[None] | None:
        """Store a failed message again, for a later retry or as a dead letter.

        Reported when that is as durable as the broker's mode promises, whatever the WAIT property
        of the copy says: the consumer then commits the failed message. If the message is not in
        memory, or has to be searched for, as in a deleted topic, the caller awaits the result.
        """
        search = self.store.find_message(PhysicalOffset(failed.position))
        found = next(search, _NO_MESSAGE)
        if found is None or isinstance(found, Cold):
            return self._accept_found(failed, search, found, on_outcome, args)
        self._store(failed, found, on_outcome, args)
        return None

    async def _accept_found(
        self,
        failed: SendBack,
        search: Iterator[memoryview | Cold | None],
        paused: Cold | None,
        on_outcome: Callable[..., None],
        args: tuple[object, ...],
    ) -> None:
        found = await self.searches.rest(search, paused)
        self._store(failed, found or _NO_MESSAGE, on_outcome, args)

    def _store(
        self,
        failed: SendBack,
        found: memoryview,
        on_outcome: Callable[..., None],
        args: tuple[object, ...],
    ) -> None:
        try:
            self.writer.refuse_if_suspended()
            group = self._group(failed.group, failed.client)
            if group.retry_queue_nums <= 0:
                # Counted, unlike by Apache RocketMQ: nothing else tells that messages are lost.
                self._count(failed.group, failed.origin_topic, retry_topic(failed.group))
                on_outcome(Dropped(), *args)
                return
            retry = self._retry_topic(failed, group)
            message = _failed_message(failed, found)
            draft = self._next_version(failed, message, group, retry)
            record = self.writer.record(draft)
        except (RemoteError, WriteRefused) as error:
            on_outcome(refusal(error), *args)
            return
        stored = partial(self._stored, failed.group, draft, on_outcome, args)
        self.writer.append_soon(record, Promise.DURABLE, stored)

    def _next_version(
        self, failed: SendBack, message: MessageView, group: GroupConfig, retry: TopicConfig
    ) -> Draft:
        """Return the copy to be retried later, or the dead letter."""
        most = group.retry_max_times if failed.retries_max is None else failed.retries_max
        is_damaged = body_crc(message.stored_body) != message.body_crc
        if is_damaged:
            # The copy gets a valid checksum; it must not pass for an intact message.
            reason = "the body does not match its checksum, sent back as a dead letter"
            self.store.note_damaged(message.physical_offset, reason)
            damaged = {**message.properties, names.DAMAGED_BODY_CRC: str(message.body_crc)}
            message = message.replaced(properties=damaged)
        gives_up = message.reconsume_times >= most or failed.delay_level < 0 or is_damaged
        if gives_up:
            target = self.topics.create_internal(dead_letter_topic(failed.group), queues=1)
            level = 0
        else:
            target = retry
            level = failed.delay_level or FIRST_RETRY_LEVEL + message.reconsume_times
        if target.write_queue_nums < 1:
            raise _not_writable(target.topic_name)
        queue_id = self.chance.randrange(target.write_queue_nums)
        return _again(message, target.topic_name, queue_id, level)

    def _stored(
        self,
        group: str,
        draft: Draft,
        on_outcome: Callable[..., None],
        args: tuple[object, ...],
        outcome: Outcome,
    ) -> None:
        """Count a send-back and report its outcome; a late flush is a failure."""
        if isinstance(outcome, Late):
            outcome = outcome.for_consumer()
        if isinstance(outcome, Appended):
            size = outcome.end_offset - outcome.physical_offsets[0]
            self.stats.put(draft.topic, draft.queue_id, 1, size)
            self._count(group, draft.properties[names.RETRY_TOPIC], draft.topic)
        on_outcome(outcome, *args)

    def _count(self, group: str, *topics: str) -> None:
        """Count a send-back for the first topic that exists, or for the last one given."""
        # Producers choose properties: no counters for topics that do not exist.
        known = (topic for topic in topics if self.topics.find(topic))
        self.stats.sent_back(group, next(known, topics[-1]))

    def _group(self, name: str, client: str) -> GroupConfig:
        group = self.groups.find(name, client)
        if group is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {name}"
            )
        if not self.config.current.access.can_write:
            host = self.config.current.identity.reachable_host
            raise RemoteError(
                ResponseCode.NO_PERMISSION, f"the broker[{host}] sending message is forbidden"
            )
        return group

    def _retry_topic(self, failed: SendBack, group: GroupConfig) -> TopicConfig:
        unit = UNIT_RETRY_TOPIC if failed.unit_mode else 0
        name = retry_topic(failed.group)
        topic = self.topics.create_internal(name, queues=group.retry_queue_nums, sys_flag=unit)
        if not is_writable(topic):
            raise _not_writable(name)
        return topic


def _failed_message(failed: SendBack, stored: memoryview) -> MessageView:
    if not stored:
        raise RemoteError.system(f"look message by offset failed, {failed.position}")
    found = decode_record(stored)
    if not _is_called(found, failed.message_id):
        # The consumer's own was lost in a power failure, and this one has its place in the log.
        raise RemoteError.system(
            f"look message by offset failed, {failed.position}: found {found.message_id},"
            f" expected {failed.message_id}"
        )
    return found


def _is_called(message: MessageView, message_id: str | None) -> bool:
    """Whether a message may be the one that a consumer means; not all of them send proper ids."""
    if message_id is None or not _MESSAGE_ID.fullmatch(message_id):
        return True
    origin = message.properties.get(names.ORIGIN_MESSAGE_ID)
    return message_id.upper() in {message.message_id, message.offset_id, origin}


def _not_writable(topic: str) -> RemoteError:
    return RemoteError(
        ResponseCode.NO_PERMISSION, f"the topic[{topic}] sending message is forbidden"
    )


def _again(failed: MessageView, topic: str, queue_id: int, level: int) -> Draft:
    """Return the next copy of a failed message: same body and origin, one more try counted."""
    properties = dict(failed.properties)
    properties.setdefault(names.RETRY_TOPIC, failed.topic)
    properties.setdefault(names.ORIGIN_MESSAGE_ID, failed.offset_id)
    properties[names.WAIT] = "false"
    properties[names.DELAY] = str(level)
    draft = draft_like(failed, topic, queue_id, properties)
    return replace(draft, reconsume_times=failed.reconsume_times + 1)
