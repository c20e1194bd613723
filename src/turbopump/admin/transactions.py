"""Transactions that have not ended: half messages that are open, and abandoned ones.

Everything is read from the brokers' own topics, so this works with Apache RocketMQ too. Its brokers
do not let the operations be pulled; there they are read by the units of their queue.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum

from turbopump.admin.messages import Messages
from turbopump.admin.servers import ANSWER_MS, TOOLS_GROUP, BrokerNode, Servers
from turbopump.client import calls
from turbopump.errors import DamagedMessage, NotThere, RemoteError
from turbopump.message import MessageQueue, PhysicalOffset, QueueOffset
from turbopump.wire import properties
from turbopump.wire.bodies import ConsumeQueuePage
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.headers import ConsumeQueuePart, PullMessage, ResumeCheck
from turbopump.wire.names import CHECKED_TOO_OFTEN_TOPIC, HALF_OPERATIONS_TOPIC, HALF_TOPIC
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import PULL_SUBSCRIPTION, Transaction

PROGRESS_GROUP = "CID_RMQ_SYS_TRANS"

_PAGE_MESSAGES = 32
_PAGE_UNITS = 256

_Identity = tuple[str | None, int, str]


class PendingState(Enum):
    """How a transaction stands that has not ended."""

    OPEN = "open"
    ABANDONED = "abandoned"
    """Its producers were asked as often as the broker asks; it can be resumed."""


@dataclass(frozen=True, slots=True)
class PendingTransaction:
    """A transaction that has neither been committed nor rolled back."""

    message: MessageView
    """The half message, or its last copy."""
    broker: str
    state: PendingState

    @property
    def group(self) -> str | None:
        """The group of its producers."""
        return self.message.properties.get(properties.PRODUCER_GROUP)

    @property
    def topic(self) -> str | None:
        """Where the message goes when it is committed."""
        return self.message.properties.get(properties.REAL_TOPIC)

    @property
    def checks(self) -> int:
        """How often producers were asked."""
        text = self.message.properties.get(properties.TRANSACTION_CHECK_TIMES, "0")
        return int(text) if text.isdecimal() else 0

    @property
    def ids(self) -> frozenset[str]:
        """The ids that it is known by."""
        return frozenset({self.message.message_id, self.message.offset_id})


class Transactions:
    """What can be done about transactions.

    ::

        async for pending in admin.transactions.list():
            print(pending.group, pending.checks, pending.state)
    """

    def __init__(self, servers: Servers, messages: Messages) -> None:
        self._servers = servers
        self._messages = messages

    async def list(
        self, *, group: str | None = None, broker: str | None = None
    ) -> AsyncGenerator[PendingTransaction, None]:
        """Give all transactions that have not ended, of one producer group or broker if given.

        By broker: those that are open, oldest copy first, then the abandoned ones.
        """
        for node in await self._servers.masters(broker=broker):
            async with aclosing(self._of(node)) as found:
                async for pending in found:
                    if group in (None, pending.group):
                        yield pending

    async def find(self, message_id: str) -> PendingTransaction:
        """Return a transaction by the id of its message, or of its half message; or NotThere."""
        async with aclosing(self.list()) as found:
            async for pending in found:
                if message_id in pending.ids:
                    return pending
        raise NotThere("transaction that has not ended, of message", message_id)

    async def resume(self, pending: PendingTransaction) -> None:
        """Resume the checks of a transaction, as often as for a new one; raises RemoteError."""
        [node] = await self._servers.masters(broker=pending.broker)
        header = ResumeCheck(msg_id=pending.message.offset_id)
        await self._servers.ask(node, RequestCode.RESUME_CHECK_HALF_MESSAGE, header)

    # --- one broker -------------------------------------------------------------------------------

    async def _of(self, node: BrokerNode) -> AsyncGenerator[PendingTransaction, None]:
        known: set[_Identity] = set()
        ended = await self._ended(node)
        begin = await self._progress(node, HALF_TOPIC)
        async with aclosing(self._messages_of(node, HALF_TOPIC, begin)) as halves:
            async for half in halves:
                if not _has_ended(half, ended):
                    known.add(_identity(half))
                    yield PendingTransaction(half, node.broker, PendingState.OPEN)
        first = QueueOffset(0)
        async with aclosing(self._messages_of(node, CHECKED_TOO_OFTEN_TOPIC, first)) as letters:
            async for letter in letters:
                identity = _identity(letter)
                if identity not in known and await self._is_abandoned(node, letter):
                    known.add(identity)
                    yield PendingTransaction(letter, node.broker, PendingState.ABANDONED)

    async def _progress(self, node: BrokerNode, topic: str) -> QueueOffset:
        """Return from where on a broker itself reads one of its queues."""
        queue = MessageQueue(topic, node.broker, 0)
        session = self._servers.session
        found = await calls.committed_offset(
            session, node.address, PROGRESS_GROUP, queue, ANSWER_MS
        )
        first = await calls.min_offset(session, node.address, queue, ANSWER_MS)
        return max(first, found or QueueOffset(0))

    async def _ended(self, node: BrokerNode) -> set[int]:
        """Return the half messages that operations name."""
        begin = await self._progress(node, HALF_OPERATIONS_TOPIC)
        operations = self._messages_of(node, HALF_OPERATIONS_TOPIC, begin)
        try:
            bodies = [operation.stored_body async for operation in operations]
        except RemoteError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            bodies = [body async for body in self._operations_by_units(node, begin)]
        return {int(body) for body in bodies if body.isdigit()}

    async def _messages_of(
        self, node: BrokerNode, topic: str, offset: QueueOffset
    ) -> AsyncGenerator[MessageView, None]:
        """Read queue 0 of a topic from an offset on; nothing if there is no such topic."""
        while True:
            header = PullMessage(
                consumer_group=TOOLS_GROUP,
                topic=topic,
                queue_id=0,
                queue_offset=offset,
                max_msg_nums=_PAGE_MESSAGES,
                sys_flag=PULL_SUBSCRIPTION,
                commit_offset=0,
                suspend_timeout_millis=0,
                subscription="*",
                sub_version=0,
            )
            try:
                page = await calls.pull(self._servers.session, node.address, header, ANSWER_MS)
            except DamagedMessage as error:
                offset = QueueOffset(error.next_offset)
                continue
            except RemoteError as error:
                if error.code != ResponseCode.TOPIC_NOT_EXIST or topic == HALF_OPERATIONS_TOPIC:
                    raise
                return
            if isinstance(page, calls.Found):
                for message in page.messages:
                    yield message
            if page.next_offset <= offset or isinstance(page, calls.NothingNew):
                return
            offset = page.next_offset

    async def _operations_by_units(
        self, node: BrokerNode, offset: QueueOffset
    ) -> AsyncGenerator[bytes, None]:
        """Read operations one by one: slow, but the only way with Apache RocketMQ."""
        session, queue = self._servers.session, MessageQueue(HALF_OPERATIONS_TOPIC, node.broker, 0)
        end = await calls.max_offset(session, node.address, queue, ANSWER_MS)
        while offset < end:
            header = ConsumeQueuePart(
                topic=queue.topic, queue_id=0, index=offset, count=min(_PAGE_UNITS, end - offset)
            )
            code = RequestCode.QUERY_CONSUME_QUEUE
            units = (await self._servers.read(ConsumeQueuePage, node, code, header)).queue_data
            for unit in units:
                position = PhysicalOffset(unit.physic_offset)
                message = await calls.view_message(session, node.address, position, ANSWER_MS)
                yield message.stored_body
            if not units:
                return
            offset = QueueOffset(offset + len(units))

    async def _is_abandoned(self, node: BrokerNode, letter: MessageView) -> bool:
        """Whether an abandoned half message has been neither committed nor resumed since."""
        topic, key = letter.properties.get(properties.REAL_TOPIC), letter.unique_key
        if topic is None or key is None:
            return True
        same = [
            each
            for place in (topic, HALF_TOPIC)
            for each in await self._messages.by_unique_key_at([node], place, key)
            if _identity(each) == _identity(letter)
        ]
        return not any(
            each.transaction is Transaction.COMMIT
            or (each.topic == HALF_TOPIC and each.physical_offset > letter.physical_offset)
            for each in same
        )


def _identity(message: MessageView) -> _Identity:
    return message.unique_key, message.born_timestamp_ms, str(message.born_host)


def _has_ended(half: MessageView, ended: set[int]) -> bool:
    first = half.properties.get(properties.TRANSACTION_PREPARED_QUEUE_OFFSET, "")
    return half.queue_offset in ended or (first.isdecimal() and int(first) in ended)
