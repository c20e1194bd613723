"""Looking up messages and offsets: by id, by key, by time, and the limits of a queue."""

from __future__ import annotations

from collections.abc import Sequence

from turbopump.broker.handlers.common import answer_fast, positions_of
from turbopump.broker.live_config import LiveConfig
from turbopump.errors import RemoteError
from turbopump.message import PhysicalOffset
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.store.store import Store
from turbopump.wire.bodies import MessageMarks
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.framing import FRAME_BYTES_MAX
from turbopump.wire.headers import (
    OffsetAnswer,
    QueryMessage,
    QueryMessageAnswer,
    QueueOfTopic,
    SearchOffset,
    TimestampAnswer,
    TopicName,
    ViewMessage,
)

_NO_TIME = -1
_NO_MARK = (-1, -1)
_ANSWER_BYTES_MAX = FRAME_BYTES_MAX // 2
"""Messages of one answer, so that it fits into a frame with room to spare."""


def _fitting(messages: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """Return as many messages as fit into one answer."""
    total = 0
    fitting: list[memoryview] = []
    for message in messages:
        total += len(message)
        if fitting and total > _ANSWER_BYTES_MAX:
            break
        fitting.append(message)
    return tuple(fitting)


class QueryRequests:
    """Serves look-ups; none of them changes anything."""

    def __init__(self, config: LiveConfig, store: Store) -> None:
        self._config = config
        self._store = store

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.QUERY_MESSAGE: self.by_key,
            RequestCode.VIEW_MESSAGE_BY_ID: self.by_position,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.offset_by_time,
            RequestCode.GET_MAX_OFFSET: self.max_offset,
            RequestCode.GET_MIN_OFFSET: self.min_offset,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest_time,
            RequestCode.GET_MESSAGE_MARKS: self.marks,
        }

    def by_key(self, request: Command, _peer: Connection) -> Command:
        """Return the messages whose key has the same hash; the caller compares the keys."""
        header = QueryMessage.from_ext_fields(request.ext_fields)
        wanted = header.max_num
        if header.unique_key_query:
            wanted = self._config.current.limits.query_count_max
        found = self._store.messages_by_key(
            header.topic, header.key, wanted, header.begin_timestamp, header.end_timestamp
        )
        indexed_ms, indexed_to = self._store.indexed_to
        answer = QueryMessageAnswer(
            index_last_update_timestamp=indexed_ms,
            index_last_update_phyoffset=indexed_to,
        )
        if not found:
            remark = f"can not find message, maybe time range not correct: key {header.key}"
            return request.answer(ResponseCode.QUERY_NOT_FOUND, answer, remark=remark)
        return request.answer(ResponseCode.SUCCESS, answer, body=_fitting(found))

    def by_position(self, request: Command, _peer: Connection) -> Command:
        """Return the message at a position of the log."""
        header = ViewMessage.from_ext_fields(request.ext_fields)
        message = self._store.message_at(PhysicalOffset(header.offset))
        if message is None:
            raise RemoteError(
                ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {header.offset}"
            )
        return request.answer(ResponseCode.SUCCESS, body=message)

    def offset_by_time(self, request: Command, _peer: Connection) -> Command:
        header = SearchOffset.from_ext_fields(request.ext_fields)
        offset = self._store.offset_by_time(header.topic, header.queue_id, header.timestamp)
        return request.answer(ResponseCode.SUCCESS, OffsetAnswer(offset=offset))

    def max_offset(self, request: Command, _peer: Connection) -> Command:
        header = QueueOfTopic.from_ext_fields(request.ext_fields)
        _, offset = self._store.queue_range(header.topic, header.queue_id)
        return request.answer(ResponseCode.SUCCESS, OffsetAnswer(offset=offset))

    def min_offset(self, request: Command, _peer: Connection) -> Command:
        header = QueueOfTopic.from_ext_fields(request.ext_fields)
        offset, _ = self._store.queue_range(header.topic, header.queue_id)
        return request.answer(ResponseCode.SUCCESS, OffsetAnswer(offset=offset))

    def earliest_time(self, request: Command, _peer: Connection) -> Command:
        header = QueueOfTopic.from_ext_fields(request.ext_fields)
        offset, _ = self._store.queue_range(header.topic, header.queue_id)
        time_ms = self._store.store_timestamp_ms(header.topic, header.queue_id, offset)
        answer = TimestampAnswer(timestamp=_NO_TIME if time_ms is None else time_ms)
        return request.answer(ResponseCode.SUCCESS, answer)

    def marks(self, request: Command, _peer: Connection) -> Command:
        """Return when and where messages were stored, one in each of several queues."""
        topic = TopicName.from_ext_fields(request.ext_fields).topic
        marks = self._store.message_marks(topic, positions_of(request))
        found = [mark or _NO_MARK for mark in marks]
        return answer_fast(
            request,
            MessageMarks(
                store_timestamps=[time_ms for time_ms, _ in found],
                positions=[position for _, position in found],
            ),
        )
