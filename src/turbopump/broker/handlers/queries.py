"""Looking up messages and offsets: by id, by key, by time, and the ends of queues."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from turbopump.broker.arrivals import WHOLE_TOPIC, Arrivals, HeldPull, Holder
from turbopump.broker.handlers.common import Requests, answer_fast, positions_of, serves
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.pull import Pulls
from turbopump.broker.searches import Searches
from turbopump.broker.topics import Topics, queues_of
from turbopump.core import FRAME_BYTES_MAX
from turbopump.errors import RemoteError
from turbopump.message import PhysicalOffset
from turbopump.net.connection import Connection
from turbopump.net.network import host_text
from turbopump.net.router import failure
from turbopump.store.store import Store
from turbopump.wire.bodies import MessageMarks, QueueEnds
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.headers import (
    OffsetAnswer,
    QueryMessage,
    QueryMessageAnswer,
    QueueEndsAnswer,
    QueueEndsOf,
    QueueOfTopic,
    SearchOffset,
    TimestampAnswer,
    TopicName,
    ViewMessage,
)

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


class QueryRequests(Requests):
    """Serves look-ups; none of them changes anything."""

    def __init__(self, config: LiveConfig, store: Store, searches: Searches) -> None:
        self._config = config
        self._store = store
        self._searches = searches

    @serves(RequestCode.QUERY_MESSAGE)
    async def by_key(self, request: Command, _peer: Connection) -> Command:
        """Return the messages whose key has the same hash; the caller compares the keys."""
        header = QueryMessage.from_ext_fields(request.ext_fields)
        limits = self._config.current.limits
        wanted = limits.query_count_max if header.unique_key_query else header.max_num
        search = self._store.find_by_key(
            header.topic,
            header.key,
            wanted,
            header.begin_timestamp,
            header.end_timestamp,
            limits.query_entries_max,
        )
        found = await self._searches.found(search)
        indexed_ms, indexed_to = self._store.indexed_to
        answer = QueryMessageAnswer(
            index_last_update_timestamp=indexed_ms,
            index_last_update_phyoffset=indexed_to,
        )
        remark = None
        if not found.is_complete:
            remark = (
                f"key {header.key}: stopped after {limits.query_entries_max} index entries; end the"
                " time range closer to the message, or raise maxQueryIndexEntries"
            )
            if not found.messages:
                return request.answer(ResponseCode.SYSTEM_ERROR, answer, remark=remark)
        elif not found.messages:
            remark = f"can not find message, maybe time range not correct: key {header.key}"
            return request.answer(ResponseCode.QUERY_NOT_FOUND, answer, remark=remark)
        body = _fitting(found.messages)
        return request.answer(ResponseCode.SUCCESS, answer, remark=remark, body=body)

    @serves(RequestCode.VIEW_MESSAGE_BY_ID)
    async def by_position(self, request: Command, _peer: Connection) -> Command:
        """Return the message at a position of the log."""
        header = ViewMessage.from_ext_fields(request.ext_fields)
        search = self._store.find_message(PhysicalOffset(header.offset))
        message = await self._searches.result(search)
        if message is None:
            raise RemoteError.system(f"can not find message by the offset, {header.offset}")
        return request.answer(ResponseCode.SUCCESS, body=message)

    @serves(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    async def offset_by_time(self, request: Command, _peer: Connection) -> Command:
        header = SearchOffset.from_ext_fields(request.ext_fields)
        search = self._store.find_offset(header.topic, header.queue_id, header.timestamp)
        offset = await self._searches.found(search)
        return request.answer(ResponseCode.SUCCESS, OffsetAnswer(offset=offset))

    @serves(RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
    def end_offset(self, request: Command, _peer: Connection) -> Command:
        header = QueueOfTopic.from_ext_fields(request.ext_fields)
        low, high = self._store.queue_range(header.topic, header.queue_id)
        offset = low if request.code == RequestCode.GET_MIN_OFFSET else high
        return request.answer(ResponseCode.SUCCESS, OffsetAnswer(offset=offset))

    @serves(RequestCode.GET_EARLIEST_MSG_STORETIME)
    async def earliest_time(self, request: Command, _peer: Connection) -> Command:
        header = QueueOfTopic.from_ext_fields(request.ext_fields)
        offset, _ = self._store.queue_range(header.topic, header.queue_id)
        search = self._store.find_marks(header.topic, [header.queue_id], [offset])
        [time_ms], _ = await self._searches.found(search)
        return request.answer(ResponseCode.SUCCESS, TimestampAnswer(timestamp=time_ms))

    @serves(RequestCode.GET_MESSAGE_MARKS)
    async def marks(self, request: Command, _peer: Connection) -> Command:
        """Return when and where messages were stored, one in each of several queues."""
        topic = TopicName.from_ext_fields(request.ext_fields).topic
        search = self._store.find_marks(topic, *positions_of(request))
        times_ms, positions = await self._searches.found(search)
        # Where units are missing, the message at an offset may be another one.
        times_ms = [-1 if at < 0 else ms for ms, at in zip(times_ms, positions, strict=True)]
        return answer_fast(request, MessageMarks(store_timestamps=times_ms, positions=positions))


class QueueEndsRequests(Requests):
    def __init__(self, topics: Topics, store: Store, pulls: Pulls, arrivals: Arrivals) -> None:
        self._topics = topics
        self._store = store
        self._pulls = pulls
        self._arrivals = arrivals

    @serves(RequestCode.GET_QUEUE_ENDS)
    def ends(self, request: Command, peer: Connection) -> Command | None:
        """Answer with the ends; hold the request while there is nothing after its position."""
        header = QueueEndsOf.from_ext_fields(request.ext_fields)
        if header.wait_ms > 0:
            self._pulls.require_readable(header.consumer_group, header.topic, peer)
        answer, position = self._ends(request, header.topic)
        if header.wait_ms <= 0 or position > header.since:
            return answer
        holder = Holder(peer, header.consumer_group, host_text(peer.peer_address))
        refusal = self._arrivals.refusal(holder)
        if refusal is not None:
            raise RemoteError(ResponseCode.SYSTEM_BUSY, refusal)
        # Many may be held: drop what was decoded of the request, and its body.
        slim = replace(request, ext_fields=None, body=b"")
        self._arrivals.hold(
            HeldPull(
                queue=(header.topic, WHOLE_TOPIC),
                offset=0,
                holder=holder,
                resume=lambda: self._resume(slim, peer, header),
            ),
            header.wait_ms,
        )
        return None

    def _resume(self, request: Command, peer: Connection, header: QueueEndsOf) -> None:
        """Answer a request that was held, if its group may still read the topic."""
        try:
            self._pulls.require_readable(header.consumer_group, header.topic, peer)
            answer, _ = self._ends(request, header.topic)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client waits for it
            answer = failure(request, peer, error)
        peer.answer(request, answer)

    def _ends(self, request: Command, name: str) -> tuple[Command, int]:
        topic = self._topics.required(name)
        lows, highs, position = self._store.topic_ranges(name, queues_of(topic))
        header = QueueEndsAnswer(position=position, read_queue_nums=topic.read_queue_nums)
        body = QueueEnds(min_offsets=lows, max_offsets=highs)
        return answer_fast(request, body, header), position
