"""Pulling ranges without an event loop: the usual case, where messages are where they should be.

A task only waits for messages and decodes them, so it reads the socket itself: no thread to wake
up, no object per message, no copy between the socket and the columns. Anything unexpected ends the
pull at an offset, and `RetryingPull` resumes from there: it handles unavailable brokers, slaves and
deleted messages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

from msgspec import Struct, structs

from turbopump.client.names import with_namespace
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.replicas import Replica, first_slave_id
from turbopump.client.routes import MASTER_ID
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import TurbopumpError
from turbopump.message import QueueOffset
from turbopump.net.blocking_connection import BlockingConnection
from turbopump.net.blocking_pool import BlockingPool
from turbopump.spark.reading.options import Pulling
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.prefetch import ROWS_AHEAD, Prefetch
from turbopump.spark.reading.pull_responses import (
    PullResponse,
    PullResponseReader,
    ResponseBuffer,
    UnexpectedResponse,
)
from turbopump.spark.shared_session import SharedSession
from turbopump.wire.headers import PullMessage
from turbopump.wire.prepared_requests import PullRequest, pull_requests
from turbopump.wire.record import FIXED_BYTES

_log = logging.getLogger(__name__)

Span: TypeAlias = tuple[int, int]
"""The start and the end of a range, of bytes or of offsets."""

ENOUGH_ROWS = 4096
ENOUGH_BYTES = 2 * 1024 * 1024
"""With this much, a chunk is decoded instead of waiting for more."""
CHUNK_ROWS = 8192
CHUNK_BYTES = 4 * 1024 * 1024
"""At this size a chunk ends even if more is available, to stay in the CPU cache."""


@dataclass(frozen=True, slots=True)
class BufferedChunk:
    """Records of some ranges in parts of a buffer, valid until the next chunk."""

    data: memoryview
    spans: list[Span]
    wanted: list[Span]
    """The offset range of each span; other records may surround it."""
    sources: list[QueueRange]
    """The planned range that each span belongs to."""
    ranges: list[QueueRange]
    is_filtered: bool
    """Whether some offsets of the ranges have no record."""


_Part = tuple[PullResponse, Span, QueueRange]
"""A response, the offsets wanted of it, and the range it belongs to."""


class _RangePull(Struct):
    """A range whose messages are being requested."""

    of: QueueRange
    at: int
    """Up to where everything was taken."""
    first: int
    """The number of the first request, which is often the only one."""
    prefetch: Prefetch | None = None
    """The others, once the first response shows how many messages the broker returns."""


class BlockingPull:
    """Pulls ranges of one broker over its own connection, while nothing unexpected happens.

    Small ranges are requested together: in sequence, each would cost a round trip.
    """

    def __init__(
        self,
        connection: BlockingConnection,
        ranges: Iterable[QueueRange],
        headers: Mapping[str, PullMessage],
        pulling: Pulling,
        pool: BlockingPool,
        *,
        follows_suggestions: bool = True,
    ) -> None:
        self._connection = connection
        reader = PullResponseReader(
            follows_suggestions=follows_suggestions,
            is_filtered=pulling.is_filtered,
            show=connection.show if connection.has_hooks else None,
        )
        self._has_hooks = connection.has_hooks
        self._buffer = ResponseBuffer(connection, reader)
        self._pool = pool
        self._pulling = pulling
        self._headers = headers
        self._frames = {topic: pull_requests(header).frame for topic, header in headers.items()}
        self._unopened = deque(ranges)
        self._open: deque[_RangePull] = deque()
        self._rows_open = 0
        self._answers: dict[int, PullResponse | int] = {}
        """Responses by request number; until one arrives, the requested offset."""
        self._unwanted: set[int] = set()
        """The numbers of requests whose responses are dropped on arrival."""
        self._trouble: str | None = None

    def next_chunk(self) -> BufferedChunk | None:
        """Return the next records, or None at the end or where something unexpected begins.

        Their memory is reused for the next chunk.
        """
        self._keep_early()
        self._buffer.forget()
        parts: list[_Part] = []
        ranges: list[QueueRange] = []
        offsets = size = 0
        while self._open or self._unopened:
            self._ask()
            head = self._open[0]
            of, start = head.of, head.at
            taken = self._take(head, parts)
            offsets, size = offsets + head.at - start, size + (taken or 0)
            # At most: a filter leaves fewer records than offsets.
            rows = min(offsets, size // FIXED_BYTES)
            is_large = rows >= CHUNK_ROWS or size >= CHUNK_BYTES
            if taken is not None:
                _extend(ranges, of, start, head.at)
                if head.at == of.end:
                    self._close_first()
                    if is_large:
                        break
                continue
            is_enough = rows >= ENOUGH_ROWS or size >= ENOUGH_BYTES
            if is_large or not self._receive(is_enough=is_enough, is_begun=bool(parts)):
                break
        self._flush()
        return self._chunk(parts, ranges) if parts else None

    def _take(self, head: _RangePull, parts: list[_Part]) -> int | None:
        """Take the responses that are next, return their records' bytes; None if there are none."""
        ahead = head.prefetch
        if ahead is None:
            return self._take_first(head, parts)
        answers = self._answers
        size: int | None = None
        while ahead.asked:
            asked, at = ahead.asked[0], ahead.at
            answer = answers[asked.answer]
            if isinstance(answer, int) or asked.offset > at:
                break
            del answers[asked.answer]
            size = size or 0
            ahead.take(answer.next_offset)
            if ahead.at > at:
                parts.append((answer, (at, ahead.at), head.of))
                size += answer.end - answer.start
        head.at = ahead.at
        return size

    def _take_first(self, head: _RangePull, parts: list[_Part]) -> int | None:
        answer, of = self._answers[head.first], head.of
        if isinstance(answer, int):
            return None
        del self._answers[head.first]
        head.at = min(answer.next_offset, of.end)
        parts.append((answer, (of.start, head.at), of))
        if head.at < of.end:
            head.prefetch = self._prefetch(of, head.at)
        return answer.end - answer.start

    def unread(self) -> list[QueueRange]:
        """Return what no chunk has contained yet."""
        begun = [replace(each.of, start=each.at) for each in self._open]
        return [*begun, *self._unopened]

    def close(self) -> None:
        """Release the connection; with requests in flight it cannot be reused."""
        if self._trouble is not None or self._answers or self._unwanted:
            self._connection.close()
        else:
            self._pool.give_back(self._connection)
        self._buffer.free()

    # --- out --------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Request more of the first range, and later ranges once all of it is requested."""
        if not self._open:
            self._open_next()
        ahead = self._open[0].prefetch
        if ahead is not None:
            ahead.ask()
        in_flight_max = self._pulling.in_flight_max
        if len(self._answers) > in_flight_max // 2:
            # Requests sent together cost one write, and one wake-up of the broker.
            return
        while (
            self._unopened
            and len(self._answers) < in_flight_max
            and self._rows_open < ROWS_AHEAD
            and self._is_all_asked(self._open[-1])
        ):
            self._open_next()

    def _is_all_asked(self, last: _RangePull) -> bool:
        if last.prefetch is None:
            return last.of.rows <= self._pulling.count_max
        return last.prefetch.is_all_asked

    def _open_next(self) -> None:
        of = self._unopened.popleft()
        rows = of.rows
        self._rows_open += rows
        number = self._put(of, of.start, min(rows, self._pulling.count_max))
        self._open.append(_RangePull(of, of.start, number))

    def _prefetch(self, of: QueueRange, at: int) -> Prefetch:
        return Prefetch(
            at,
            of.end,
            at - of.start,
            lambda offset, count: self._put(of, offset, count),
            count_max=self._pulling.count_max,
            in_flight_max=self._pulling.in_flight_max,
            is_filtered=self._pulling.is_filtered,
        )

    def _put(self, of: QueueRange, offset: int, count: int) -> int:
        """Add a request to the next write; return its number."""
        connection = self._connection
        if self._has_hooks:
            # Hooks may change each request, as a signature does: 9 µs instead of 1.
            header = structs.replace(
                self._headers[of.topic],
                queue_id=of.queue_id,
                queue_offset=offset,
                max_msg_nums=count,
            )
            number = connection.put_request(PullRequest(header).command())
        else:
            number = connection.unused_opaque()
            connection.put(self._frames[of.topic](number, of.queue_id, offset, count))
        self._answers[number] = offset
        return number

    def _close_first(self) -> None:
        closed = self._open.popleft()
        self._rows_open -= closed.of.rows
        # Including messages that came with another response.
        for asked in closed.prefetch.asked if closed.prefetch is not None else ():
            if isinstance(self._answers.pop(asked.answer), int):
                self._unwanted.add(asked.answer)

    def _flush(self) -> None:
        """Send requests before spending time on decoding."""
        if self._trouble is None:
            try:
                self._connection.flush()
            except TurbopumpError as error:
                self._stop(str(error))

    # --- in ---------------------------------------------------------------------------------------

    def _receive(self, *, is_enough: bool, is_begun: bool) -> bool:
        """Receive more responses, waiting unless there are enough; return whether to continue."""
        if self._trouble is not None or (is_begun and self._buffer.is_full):
            return False
        if self._buffer.is_full:
            # One response larger than all others: make room for it.
            self._keep_early()
            self._buffer.forget()
        try:
            self._connection.flush()
            if not self._buffer.receive(0 if is_enough else self._pulling.timeout_ms):
                return False
            self._note_all()
        except (TurbopumpError, UnexpectedResponse) as error:
            self._stop(str(error))
        return True

    def _note_all(self) -> None:
        answers = self._answers
        for answer in self._buffer.responses():
            number, offset = answer.number, answers.get(answer.number)
            if number in self._unwanted:
                self._unwanted.remove(number)
                continue
            if not isinstance(offset, int):
                raise UnexpectedResponse(f"frame {number} answers no pending request")
            if answer.next_offset <= offset:
                raise UnexpectedResponse(
                    f"the response goes from {offset} back to {answer.next_offset}"
                )
            if self._pulling.is_filtered and answer.min_offset > offset:
                raise UnexpectedResponse(
                    f"messages {offset} to {answer.min_offset - 1} were deleted"
                )
            answers[number] = answer

    def _keep_early(self) -> None:
        """Copy responses that arrived before their turn out of the buffer."""
        data = self._buffer.data
        for number, each in self._answers.items():
            if isinstance(each, PullResponse) and each.kept is None:
                kept = bytes(data[each.start : each.end])
                self._answers[number] = PullResponse(
                    number, each.next_offset, 0, len(kept), each.min_offset, kept
                )

    def _chunk(self, parts: list[_Part], ranges: list[QueueRange]) -> BufferedChunk:
        data = self._buffer.data
        found = [part for part in parts if part[0].end > part[0].start]
        responses = [response for response, _, _ in found]
        spans = [(each.start, each.end) for each in responses]
        if any(each.kept is not None for each in responses) or spans != sorted(spans):
            records = [each.kept or data[each.start : each.end] for each in responses]
            data = memoryview(b"".join(records))
            spans = list(pairwise(accumulate(map(len, records), initial=0)))
        wanted, sources = [wanted for _, wanted, _ in found], [of for _, _, of in found]
        return BufferedChunk(data, spans, wanted, sources, ranges, self._pulling.is_filtered)

    def _stop(self, why: str) -> None:
        unread = self.unread()
        _log.info("%s: retrying through the session: %s", unread[0] if unread else "end", why)
        self._trouble = why
        self._connection.close()


def _extend(ranges: list[QueueRange], of: QueueRange, start: int, end: int) -> None:
    """Add a part of a range to those of a chunk."""
    if ranges and start > of.start and ranges[-1].queue == of.queue:
        ranges[-1] = replace(of, start=ranges[-1].start, end=end)
    elif end > start:
        ranges.append(of if end - start == of.rows else replace(of, start=start, end=end))


def start_blocking_pull(
    shared: SharedSession, ranges: Sequence[QueueRange], group: str, pulling: Pulling
) -> BlockingPull | None:
    """Start pulling ranges of one broker; None if that is impossible, or not worth trying."""
    session = shared.session
    if not session.has_blocking_pool:
        return None
    pool = session.blocking_pool()
    first = ranges[0]
    try:
        replica = shared.run(lambda session: _replica(session, first, pulling))
        connection = pool.take(replica.address)
    except TurbopumpError as error:
        _log.info("%s: no direct connection: %s", first, error)
        return None
    # One per topic: in a template, any queue and offset will do.
    samples = {each.topic: each for each in reversed(ranges)}
    name, times = (
        with_namespace(session.config.namespace, group),
        PullTimes(pulling.timeout_ms / 1000),
    )
    reader = QueueReader(session, name, times, in_bulk=True)
    headers = {}
    for topic, of in samples.items():
        wanted, at = subscription(reader.wire_topic(topic), pulling.expression, 0), of.start
        headers[topic] = reader.header_to_pull(of.queue, QueueOffset(at), wanted, pulling.count_max)
    # Reading from a slave is explicitly requested, which outweighs the group's setting.
    return BlockingPull(
        connection, ranges, headers, pulling, pool, follows_suggestions=replica.is_master
    )


async def _replica(session: Session, of: QueueRange, pulling: Pulling) -> Replica:
    """Return where to read; raises NoRoute."""
    if not session.has_broker(of.broker):
        await session.refresh_route(with_namespace(session.config.namespace, of.topic))
    slave_id = first_slave_id(session.replicas(of.broker))
    return session.replica_to_read(of.broker, slave_id if pulling.prefers_slave else MASTER_ID)
