"""Send failed messages back to the broker for redelivery, with two fallbacks."""

from __future__ import annotations

import logging

from turbopump.client import calls
from turbopump.client.delivery.results import DEAD_LETTER_LEVEL
from turbopump.client.names import INNER_PRODUCER_GROUP, with_namespace
from turbopump.client.session import Session
from turbopump.errors import NoRoute, TurbopumpError
from turbopump.message import MessageQueue
from turbopump.wire import properties, sysflag
from turbopump.wire.headers import SendBack, SendMessage, SendMessageV2
from turbopump.wire.names import TEMPLATE_TOPIC, retry_topic
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

_TIMEOUT_MS = 5000
_RETRY_QUEUES = 4
_FIRST_DELAY_LEVEL = 3
_COMPRESSION_BITS = sysflag.COMPRESSED | 0x700
USUAL_ATTEMPTS_MAX = 16
"""The limit of a group, unless it is changed on its brokers."""


class RetrySender:
    """Sends messages of one group back to their broker.

    Without ``max_attempts``, the limit of the group applies, which brokers know. A message that is
    sent again instead names the usual limit.
    """

    def __init__(self, session: Session, group: str, max_attempts: int | None) -> None:
        self._session = session
        self._group = group
        self._max_attempts = max_attempts

    async def send_back(self, queue: MessageQueue, message: MessageView, delay_level: int) -> bool:
        """Have the broker redeliver it later, or send it again; return whether that worked.

        Level 0 lets the delay grow with each attempt; a negative level dead-letters the message.
        """
        try:
            await self._by_position(queue, message, delay_level)
        except TurbopumpError as error:
            _log.warning("%s not sent back, sending it again: %s", message.message_id, error)
            return await self._resend(message, self._resent_properties(message, delay_level))
        return True

    async def dead_letter_damaged(self, queue: MessageQueue, message: MessageView) -> bool:
        """Have the broker dead-letter its own copy; return whether that worked.

        Not sent as a new message: that would give the damaged body a valid checksum.
        """
        try:
            await self._by_position(queue, message, DEAD_LETTER_LEVEL)
        except TurbopumpError as error:
            _log.warning("%s not sent back: %s", message.message_id, error)
            return False
        return True

    async def dead_letter(self, message: MessageView) -> bool:
        """Dead-letter a message without attempts left; return whether that worked.

        Sent as a new message: only the consumer knows how often it was tried.
        """
        return await self._resend(message, self._resent_properties(message, DEAD_LETTER_LEVEL))

    async def _by_position(
        self, queue: MessageQueue, message: MessageView, delay_level: int
    ) -> None:
        header = SendBack(
            offset=message.physical_offset,
            group=self._group,
            delay_level=delay_level,
            origin_msg_id=message.message_id,
            origin_topic=self._wire_topic(message),
            unit_mode=self._session.config.unit_mode,
            max_reconsume_times=self._max_attempts,
        )
        await calls.send_back(self._session, self._address(queue, message), header, _TIMEOUT_MS)

    def _address(self, queue: MessageQueue, message: MessageView) -> str:
        try:
            return self._session.address_to_write(queue.broker)
        except NoRoute:
            return str(message.store_host)

    async def _resend(self, message: MessageView, named: dict[str, str]) -> bool:
        try:
            topic = retry_topic(self._group)
            route = await self._session.route_to_send(topic, _RETRY_QUEUES)
            if not route.writable:
                raise NoRoute(f"topic {topic!r} has no queue to send to")
            target = self._session.random.choice(route.writable)
            header = self._header(message, target, named)
            address = self._session.address_to_write(target.broker)
            await calls.send(self._session, address, header, message.stored_body, _TIMEOUT_MS)
        except TurbopumpError as error:
            _log.warning("%s not sent again either: %s", message.message_id, error)
            return False
        return True

    def _resent_properties(self, message: MessageView, delay_level: int) -> dict[str, str]:
        """Return the properties of a message that is sent as new instead of sent back."""
        if delay_level >= 0:
            named = self._retry_properties(message, message.reconsume_times + 1)
            # For a sent message, brokers compare its own count; for one sent back, that of the
            # failed attempt. The same limit would end one attempt early, as that of a group would.
            # And early 4.x brokers of Apache fail on either request without a limit.
            limit = USUAL_ATTEMPTS_MAX if self._max_attempts is None else self._max_attempts
            named[properties.MAX_RECONSUME_TIMES] = str(limit + 1)
            return {**named, properties.DELAY: str(delay_level)} if delay_level else named
        # Brokers dead-letter a message at its attempt limit, which it has reached if none are
        # left. A delay would apply to dead letters too.
        named = self._retry_properties(message, message.reconsume_times)
        del named[properties.DELAY]
        return {**named, properties.MAX_RECONSUME_TIMES: str(message.reconsume_times)}

    def _retry_properties(self, message: MessageView, reconsume_times: int) -> dict[str, str]:
        named = {
            **message.properties,
            properties.RETRY_TOPIC: self._wire_topic(message),
            properties.ORIGIN_MESSAGE_ID: message.properties.get(
                properties.ORIGIN_MESSAGE_ID, message.message_id
            ),
            properties.RECONSUME_TIME: str(reconsume_times),
            properties.DELAY: str(_FIRST_DELAY_LEVEL + message.reconsume_times),
        }
        named.pop(properties.TRANSACTION_PREPARED, None)
        return named

    def _header(
        self, message: MessageView, target: MessageQueue, named: dict[str, str]
    ) -> SendMessage:
        return SendMessageV2(
            producer_group=INNER_PRODUCER_GROUP,
            topic=target.topic,
            default_topic=TEMPLATE_TOPIC,
            default_topic_queue_nums=_RETRY_QUEUES,
            queue_id=target.queue_id,
            sys_flag=message.sys_flag & _COMPRESSION_BITS,
            born_timestamp=self._session.clock.now_ms(),
            flag=message.flag,
            properties=properties.encode(named),
            reconsume_times=int(named[properties.RECONSUME_TIME]),
            unit_mode=self._session.config.unit_mode,
            max_reconsume_times=int(named[properties.MAX_RECONSUME_TIMES]),
            batch=False,
        )

    def _wire_topic(self, message: MessageView) -> str:
        return with_namespace(self._session.config.namespace, message.topic)
