"""Queries for many queues of a topic on a broker, in one request if the broker supports it.

Apache brokers refuse these requests, and get their own instead: topic statistics, or one request
per queue.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, repeat
from typing import TypeAlias, TypeVar

from msgspec import Struct

from turbopump.client import bulk_calls, calls
from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.queue_reader import QueueReader
from turbopump.client.replicas import Replica
from turbopump.client.session import Session
from turbopump.errors import RemoteError
from turbopump.message import MessageQueue
from turbopump.spark.reading.offsets import Limits, Mark, Offsets, Place
from turbopump.wire.bodies import ConsumeStats, QueueEnds, QueuePositions, TopicStats
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.headers import ConsumeStatsOf, QueueEndsAnswer, QueueEndsOf, TopicName

T = TypeVar("T")

_log = logging.getLogger(__name__)

QUEUES_PER_REQUEST = 2000
"""A broker serves nothing else while it answers."""
_WAIT_MARGIN_MS = 10_000
_NO_MARK = (-1, -1)


Newest: TypeAlias = tuple[str, int | None, int]
"""The address of a broker, and position and store timestamp of a topic's last message there."""


class _Ends(Struct, frozen=True):
    """A broker's response about all queues of a topic."""

    address: str
    lows: list[int]
    """By queue id; missing queues must be queried individually."""
    highs: list[int]
    position: int | None = None
    """Behind the topic's last message in the log; None if the broker cannot wait for more."""
    read_queues: int = 0
    newest_ms: int = 0
    """When the topic's last message was stored, if there is no position: other messages have other
    ends, even if their number is the same."""


class _Known(Struct, frozen=True):
    """The last response for some queues."""

    ends: _Ends
    queues: Sequence[MessageQueue]
    limits: Mapping[MessageQueue, Limits]


class TopicQueries:
    """Queries queues; all queues of one call are of one topic on one broker.

    Returns None for what only a Turbopump broker can answer.
    """

    def __init__(self, session: Session, reader: QueueReader, group: str) -> None:
        self._session = session
        self._reader = reader
        self._group = group
        self._timeout_ms = session.config.request_timeout_ms
        self._without_bulk: set[str] = set()
        """Addresses of brokers that do not support such requests."""
        self._known: dict[Place, _Known] = {}

    # --- ends -------------------------------------------------------------------------------------

    async def limits(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, Limits]:
        """Return the ends of queues."""
        place, replica = await self._place(queues[0])
        ends = await self._ends(replica.address, self._reader.wire_topic(place[0]), queues)
        known = self._known.get(place)
        if known is not None and known.ends == ends and known.queues == queues:
            return known.limits
        count = len(ends.lows)
        inside = [queue for queue in queues if queue.queue_id < count]
        limits = _limits(ends, inside, is_certain=replica.is_master)
        if len(inside) < len(queues):
            # These are queried again next time.
            missing = (queue for queue in queues if queue.queue_id >= count)
            limits |= await gather_by_key(missing, lambda queue: self._queue(replica, queue))
            queues = ()
        self._known[place] = _Known(ends, queues, limits)
        return limits

    def newest(self) -> dict[Place, Newest] | None:
        """Return which message was the last one of each topic; None if that is unknown.

        A re-created topic has another one, even if its queues have the same ends.
        """
        known = self._known.items()
        if not all(each.queues for _, each in known):
            return None
        return {
            place: (each.ends.address, each.ends.position, each.ends.newest_ms)
            for place, each in known
        }

    async def _queue(self, replica: Replica, queue: MessageQueue) -> Limits:
        asked = replica.address, self._reader.wire_queue(queue), self._timeout_ms
        high = await calls.max_offset(self._session, *asked)
        return Limits(await calls.min_offset(self._session, *asked), high, replica.is_master)

    async def _ends(self, address: str, topic: str, queues: Sequence[MessageQueue]) -> _Ends:
        try:
            found = await self._bulk(
                address,
                lambda: bulk_calls.queue_ends(
                    self._session, address, QueueEndsOf(topic=topic), self._timeout_ms
                ),
            )
            if found is None:
                return await self._statistics(address, topic)
        except RemoteError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            # Brokers answer this way for a single queue.
            zeros = [0] * (1 + max(queue.queue_id for queue in queues))
            return _Ends(address, zeros, zeros)
        return _ends(address, *found)

    async def _statistics(self, address: str, topic: str) -> _Ends:
        """Query as Apache's tools do; read-only queues have no statistics."""
        command = request(RequestCode.GET_TOPIC_STATS_INFO, TopicName(topic=topic))
        answer = await self._session.request(address, command, self._timeout_ms)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            return _Ends(address, [], [])
        table = TopicStats.decode(whole_body(calls.require_success(answer))).offset_table
        by_id = {queue.queue_id: stats for queue, stats in table.items()}
        found = [by_id[number] for number in range(len(by_id)) if number in by_id]
        if len(found) < len(by_id):
            return _Ends(address, [], [])
        lows, highs = [each.min_offset for each in found], [each.max_offset for each in found]
        newest_ms = max((each.last_update_timestamp for each in found), default=0)
        return _Ends(address, lows, highs, newest_ms=newest_ms)

    # --- waiting ----------------------------------------------------------------------------------

    def can_wait(self, place: Place) -> bool:
        """Whether a broker can wait for messages beyond its last response."""
        known = self._known.get(place)
        return known is not None and known.ends.position is not None

    async def wait(self, place: Place, wait_ms: int) -> None:
        """Wait for a message beyond the broker's last response."""
        known = self._known[place].ends
        header = QueueEndsOf(
            topic=self._reader.wire_topic(place[0]),
            consumer_group=self._group,
            since=-1 if known.position is None else known.position,
            wait_ms=wait_ms,
        )
        found = await bulk_calls.queue_ends(
            self._session, known.address, header, wait_ms + _WAIT_MARGIN_MS
        )
        ends = _ends(known.address, *found)
        if ends != known:
            # The next look computes the limits.
            self._known[place] = _Known(ends, (), {})

    def news(self, place: Place, at: Offsets) -> tuple[bool, list[MessageQueue]]:
        """Return whether the broker has messages beyond some offsets, and queues now closed."""
        ends = self._known[place].ends
        highs, count, read_queues = ends.highs, len(ends.highs), ends.read_queues
        has_news = any(
            queue.queue_id < count and highs[queue.queue_id] > offset
            for queue, offset in at.items()
        )
        return has_news, [queue for queue in at if queue.queue_id >= read_queues]

    # --- messages and groups ----------------------------------------------------------------------

    async def marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None] | None:
        """Return the marks of the messages at some offsets, None where there are none."""
        found: dict[MessageQueue, Mark | None] = {}
        for place, address, part in await self._parts(offsets):
            topic = self._reader.wire_topic(place[0])
            asked = self._session, address, topic, _positions(part), self._timeout_ms
            marks = await self._bulk(address, partial(bulk_calls.message_marks, *asked))
            if marks is None:
                return None
            pairs = zip(marks.store_timestamps, marks.positions, strict=True)
            found.update(zip(part, pairs, strict=True))
            if _NO_MARK[0] in marks.store_timestamps:
                found |= {queue: None for queue in part if found[queue] == _NO_MARK}
        return found

    async def commit(self, offsets: Offsets) -> list[MessageQueue] | None:
        """Commit the group's offsets; return the queues that were refused."""
        refused: list[MessageQueue] = []
        for place, address, part in await self._parts(offsets, to_commit=True):
            topic, positions = self._reader.wire_topic(place[0]), _positions(part)
            asked = self._session, address, self._group, topic, positions, self._timeout_ms
            answer = await self._bulk(address, partial(bulk_calls.commit_offsets, *asked))
            if answer is None:
                return None
            refused += (MessageQueue(*place, number) for number in answer)
        return refused

    async def committed(
        self, queues: Sequence[MessageQueue]
    ) -> dict[MessageQueue, int | None] | None:
        """Return the group's committed offsets, None where there are none."""
        place, replica = await self._place(queues[0])
        asked = self._session, replica.address, self._group, self._reader.wire_topic(place[0])
        found = await self._bulk(
            replica.address, lambda: bulk_calls.committed_offsets(*asked, self._timeout_ms)
        )
        return None if found is None else {queue: found.get(queue.queue_id) for queue in queues}

    async def progress(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int | None]:
        """Return the group's committed offsets where the broker has any.

        Those of an Apache broker are those of its statistics, which show 0 where there are none.
        """
        found = await self.committed(queues)
        return await self._consume_stats(queues) if found is None else found

    async def _consume_stats(
        self, queues: Sequence[MessageQueue]
    ) -> dict[MessageQueue, int | None]:
        place, replica = await self._place(queues[0])
        header = ConsumeStatsOf(consumer_group=self._group, topic=self._reader.wire_topic(place[0]))
        command = request(RequestCode.GET_CONSUME_STATS, header)
        answer = await self._session.request(replica.address, command, self._timeout_ms)
        if answer.code != ResponseCode.SUCCESS:
            return {}
        table = ConsumeStats.decode(whole_body(answer)).offset_table
        offsets = {queue.queue_id: stats.consumer_offset for queue, stats in table.items()}
        return {each: offsets[each.queue_id] for each in queues if each.queue_id in offsets}

    # --- internals --------------------------------------------------------------------------------

    async def _place(self, queue: MessageQueue) -> tuple[Place, Replica]:
        replica = await self._session.replica_of(self._reader.wire_queue(queue))
        return (queue.topic, queue.broker), replica

    async def _parts(
        self, offsets: Offsets, *, to_commit: bool = False
    ) -> Iterator[tuple[Place, str, Offsets]]:
        """Split a query; a broker answers the parts one after another."""
        first = next(iter(offsets))
        place, on_wire = (first.topic, first.broker), self._reader.wire_queue(first)
        find = self._session.replica_to_commit if to_commit else self._session.replica_of
        address = (await find(on_wire)).address
        left = iter(offsets.items())
        parts = iter(lambda: dict(islice(left, QUEUES_PER_REQUEST)), {})
        return ((place, address, part) for part in parts)

    async def _bulk(self, address: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """Call, unless the broker does not support such requests."""
        if address in self._without_bulk:
            return None
        try:
            return await call()
        except RemoteError as error:
            if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            _log.info("%s: no bulk requests: %s", address, error)
            self._without_bulk.add(address)
            return None


def _limits(
    ends: _Ends, queues: Sequence[MessageQueue], *, is_certain: bool
) -> dict[MessageQueue, Limits]:
    ids = [queue.queue_id for queue in queues]
    lows, highs = map(ends.lows.__getitem__, ids), map(ends.highs.__getitem__, ids)
    return dict(zip(queues, map(Limits, lows, highs, repeat(is_certain)), strict=False))


def _positions(offsets: Offsets) -> QueuePositions:
    ids = [queue.queue_id for queue in offsets]
    return QueuePositions(queue_ids=ids, offsets=list(offsets.values()))


def _ends(address: str, header: QueueEndsAnswer, body: QueueEnds) -> _Ends:
    return _Ends(
        address, body.min_offsets, body.max_offsets, header.position, header.read_queue_nums
    )
