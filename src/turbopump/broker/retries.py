"""Failed messages: back to their group after a delay, or to its dead letters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from msgspec.structs import replace

from turbopump.broker.durability import Late, Outcome, Promise
from turbopump.broker.groups import Groups
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.put import Draft, Put
from turbopump.broker.send import UNIT_RETRY_TOPIC, retries_max
from turbopump.broker.stats import Stats
from turbopump.broker.topics import Topics, is_writable
from turbopump.errors import RemoteError
from turbopump.message import PhysicalOffset
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.bodies import GroupConfig, TopicConfig
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.hashing import body_crc
from turbopump.wire.headers import SendBack
from turbopump.wire.names import dead_letter_topic, retry_topic
from turbopump.wire.record import MessageView, decode_record

FIRST_RETRY_LEVEL = 3
"""The delay level of the first retry: 10 s with the default levels."""

GIVE_UP = -1
"""The delay level by which a consumer says that it will never succeed."""


class Retries:
    """Serves the requests that send a message back."""

    def __init__(
        self,
        *,
        config: LiveConfig,
        store: Store,
        put: Put,
        topics: Topics,
        groups: Groups,
        stats: Stats,
        chance: Random,
    ) -> None:
        self._config = config
        self._store = store
        self._put = put
        self._topics = topics
        self._groups = groups
        self._stats = stats
        self._chance = chance

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, request: Command, peer: Connection) -> Command | None:
        """Store a failed message again, for a later try or as a dead letter.

        Answered when that is as durable as the broker's mode promises, whatever the WAIT property
        of the copy says: the consumer commits the failed message then.
        """
        header = SendBack.from_ext_fields(request.ext_fields)
        group = self._group(header.group, peer.peer_address)
        if group.retry_queue_nums <= 0:
            # The group wants no retries: what fails is dropped.
            return request.answer(ResponseCode.SUCCESS)
        retry = self._retry_topic(header, group)
        failed = self._failed_message(header)
        most = retries_max(request, header.max_reconsume_times, group.retry_max_times)
        is_damaged = body_crc(failed.stored_body) != failed.body_crc
        if is_damaged:
            # The copy gets a checksum that fits; it must not pass for a good message.
            reason = "the body does not match its checksum, sent back as a dead letter"
            self._store.note_damaged(failed.physical_offset, reason)
            damaged = {**failed.properties, names.DAMAGED_BODY_CRC: str(failed.body_crc)}
            failed = replace(failed, _properties=damaged)
        gives_up = failed.reconsume_times >= most or header.delay_level < 0 or is_damaged
        if gives_up:
            target = self._topics.create_internal(dead_letter_topic(header.group), queues=1)
            level = 0
        else:
            target = retry
            level = header.delay_level or FIRST_RETRY_LEVEL + failed.reconsume_times
        if target.write_queue_nums < 1:
            raise _not_writable(target.topic_name)
        queue_id = self._chance.randrange(target.write_queue_nums)
        record = self._put.record(_again(failed, target.topic_name, queue_id, level))
        note = partial(self._stats.sent_back, header.group, failed.topic)
        self._put.soon([record], Promise.DURABLE, self._stored, request, peer, note)
        return None

    def _stored(
        self, outcome: Outcome, request: Command, peer: Connection, note: Callable[[], None]
    ) -> None:
        """Answer a send-back: anything but success makes the consumer keep the message."""
        if isinstance(outcome, Late):
            outcome = outcome.as_failure()
        if not isinstance(outcome, RemoteError):
            note()
            peer.answer(request, request.answer(ResponseCode.SUCCESS))
        elif request.language != Language.GO:
            # The Go client takes every answer for success, and tries again only without one.
            peer.answer(request, request.answer(outcome.code, remark=outcome.remark))

    def _group(self, name: str, client: str) -> GroupConfig:
        group = self._groups.find(name, client)
        if group is None:
            raise RemoteError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {name}"
            )
        if not self._config.current.access.can_write:
            host = self._config.current.identity.reachable_host
            raise RemoteError(
                ResponseCode.NO_PERMISSION, f"the broker[{host}] sending message is forbidden"
            )
        return group

    def _retry_topic(self, header: SendBack, group: GroupConfig) -> TopicConfig:
        unit = UNIT_RETRY_TOPIC if header.unit_mode else 0
        name = retry_topic(header.group)
        topic = self._topics.create_internal(name, queues=group.retry_queue_nums, sys_flag=unit)
        if not is_writable(topic):
            raise _not_writable(name)
        return topic

    def _failed_message(self, header: SendBack) -> MessageView:
        stored = self._store.message_at(PhysicalOffset(header.offset))
        if stored is None:
            raise RemoteError(
                ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {header.offset}"
            )
        return decode_record(stored)


def _not_writable(topic: str) -> RemoteError:
    return RemoteError(
        ResponseCode.NO_PERMISSION, f"the topic[{topic}] sending message is forbidden"
    )


def _again(failed: MessageView, topic: str, queue_id: int, level: int) -> Draft:
    """Make the next version of a failed message: same body and origin, counted once more."""
    properties = dict(failed.properties)
    properties.setdefault(names.RETRY_TOPIC, failed.topic)
    properties.setdefault(names.ORIGIN_MESSAGE_ID, failed.offset_id)
    properties[names.WAIT] = "false"
    properties[names.DELAY] = str(level)
    return Draft(
        topic=topic,
        queue_id=queue_id,
        properties=properties,
        body=failed.stored_body,
        flag=failed.flag,
        sys_flag=failed.sys_flag,
        born_timestamp_ms=failed.born_timestamp_ms,
        born_host=failed.born_host,
        store_host=failed.store_host,
        reconsume_times=failed.reconsume_times + 1,
    )
