"""Pulling a range without an event loop: the usual case, where every answer has messages.

A task only waits for messages and decodes them, so it reads the socket itself: no thread to wake
up, no object per message, no copy between the socket and the columns. Anything unexpected ends the
pull at an offset, and `RetryingPull` resumes from there: it handles unavailable brokers, slaves and
deleted messages.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

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
from turbopump.spark.reading.prefetch import Prefetch
from turbopump.spark.reading.pull_responses import PullResponse, UnexpectedResponse
from turbopump.spark.reading.response_buffer import ResponseBuffer
from turbopump.spark.records.record_run import Span
from turbopump.spark.shared_session import SharedSession
from turbopump.wire.headers import PullMessage
from turbopump.wire.pull_request_frames import PullRequestFrames

_log = logging.getLogger(__name__)

ENOUGH_ROWS = 4096
ENOUGH_BYTES = 2 * 1024 * 1024
"""With so much a chunk is not worth waiting for more, and is decoded while it comes."""
CHUNK_ROWS = 8192
CHUNK_BYTES = 4 * 1024 * 1024
"""With so much a chunk ends even if more is there, so that it stays in the processor's cache."""


@dataclass(frozen=True, slots=True)
class BufferedChunk:
    """Records from ``start`` to before ``end`` in some stretches of a buffer, until the next."""

    data: memoryview
    spans: list[Span]
    start: int
    end: int


class BlockingPull:
    """Pulls one range over a connection of its own, as long as nothing unusual happens."""

    def __init__(
        self,
        connection: BlockingConnection,
        of: QueueRange,
        header: PullMessage,
        pulling: Pulling,
        pool: BlockingPool,
        *,
        follows_suggestions: bool = True,
    ) -> None:
        self._connection = connection
        self._buffer = ResponseBuffer(connection, follows_suggestions=follows_suggestions)
        self._pool = pool
        self._range = of
        self._requests = PullRequestFrames(header)
        self._timeout_ms = pulling.timeout_ms
        self._prefetch: Prefetch[int] = Prefetch(
            of.start,
            of.end,
            self._ask,
            count_max=pulling.count_max,
            in_flight_max=pulling.in_flight_max,
        )
        self._answers: dict[int, PullResponse | int] = {}
        """To what was asked, by its number; until it comes, the offset that was asked for."""
        self._trouble: str | None = None

    def next_chunk(self) -> BufferedChunk | None:
        """Return the next records, None at the end or where something unusual begins.

        Their memory is used again for the chunk after them.
        """
        self._keep_early()
        self._buffer.forget()
        ahead, start = self._prefetch, self._prefetch.at
        parts: list[PullResponse] = []
        size = 0
        while ahead.at < ahead.end:
            ahead.ask()
            taken = self._take(parts)
            if taken is not None:
                size += taken
                continue
            if isinstance(self._answers[ahead.asked[0].answer], PullResponse):
                # What it repeats can be cut off only where a chunk begins.
                break
            if ahead.at - start >= CHUNK_ROWS or size >= CHUNK_BYTES:
                break
            is_enough = ahead.at - start >= ENOUGH_ROWS or size >= ENOUGH_BYTES
            if not self._receive(is_enough=is_enough, is_begun=bool(parts)):
                break
        self._flush()
        return self._chunk(parts, start) if parts else None

    def _take(self, parts: list[PullResponse]) -> int | None:
        """Take the answers that are next, return the bytes of their records; None if none is."""
        ahead, answers = self._prefetch, self._answers
        size = None
        while ahead.asked:
            head = ahead.asked[0]
            answer, at = answers[head.answer], ahead.at
            if isinstance(answer, int) or head.offset > at:
                break
            if head.offset < at < answer.next_offset and parts:
                break
            del answers[head.answer]
            size = size or 0
            ahead.take(answer.next_offset)
            if answer.next_offset > at:
                parts.append(answer)
                size += answer.end - answer.start
        return size

    def close(self) -> None:
        """Release the connection; one with requests in flight cannot be used again."""
        if self._trouble is not None or self._answers:
            self._connection.close()
        else:
            self._pool.give_back(self._connection)
        self._buffer.free()

    # --- out --------------------------------------------------------------------------------------

    def _ask(self, offset: int, count: int) -> int:
        number = self._connection.unused_opaque()
        self._connection.put(self._requests.frame(number, offset, count))
        self._answers[number] = offset
        return number

    def _flush(self) -> None:
        """Let requests leave before the time that decoding takes."""
        if self._trouble is None:
            try:
                self._connection.flush()
            except TurbopumpError as error:
                self._stop(str(error))

    # --- in ---------------------------------------------------------------------------------------

    def _receive(self, *, is_enough: bool, is_begun: bool) -> bool:
        """Take more answers, waiting unless there are enough; return whether to go on."""
        if self._trouble is not None or (is_begun and self._buffer.is_full):
            return False
        if self._buffer.is_full:
            # One answer that is larger than all others: room is made for it.
            self._keep_early()
            self._buffer.forget()
        try:
            self._connection.flush()
            if not self._buffer.receive(0 if is_enough else self._timeout_ms):
                return False
            self._note_all()
        except (TurbopumpError, UnexpectedResponse) as error:
            self._stop(str(error))
        return True

    def _note_all(self) -> None:
        answers = self._answers
        for answer in self._buffer.responses():
            number, offset = answer.number, answers.get(answer.number)
            if not isinstance(offset, int):
                raise UnexpectedResponse(f"frame {number} answers no pending request")
            if answer.next_offset <= offset:
                raise UnexpectedResponse(
                    f"the response goes from {offset} back to {answer.next_offset}"
                )
            answers[number] = answer

    def _keep_early(self) -> None:
        """Copy answers that came before their turn out of the buffer."""
        data = self._buffer.data
        for number, each in self._answers.items():
            if isinstance(each, PullResponse) and each.kept is None:
                kept = bytes(data[each.start : each.end])
                self._answers[number] = PullResponse(number, each.next_offset, 0, len(kept), kept)

    def _chunk(self, parts: list[PullResponse], start: int) -> BufferedChunk:
        data = self._buffer.data
        spans = [(part.start, part.end) for part in parts]
        if any(part.kept is not None for part in parts) or spans != sorted(spans):
            found = [part.kept or data[part.start : part.end] for part in parts]
            data = memoryview(b"".join(found))
            spans = [(0, len(data))]
        return BufferedChunk(data, spans, start, self._prefetch.at)

    def _stop(self, why: str) -> None:
        _log.info(
            "%s: retrying through the session from offset %d: %s",
            self._range,
            self._prefetch.at,
            why,
        )
        self._trouble = why
        self._connection.close()


def start_blocking_pull(
    shared: SharedSession, of: QueueRange, group: str, pulling: Pulling
) -> BlockingPull | None:
    """Begin to pull a range directly; None if that is not possible, or not worth trying."""
    pulling = pulling.of(of.topic)
    session = shared.session
    if not session.has_blocking_pool or pulling.is_filtered or of.start >= of.end:
        return None
    pool = session.blocking_pool()
    if pool.has_hooks:
        # They must see each request, and these are made from a template.
        return None
    try:
        replica = shared.run(lambda session: _replica(session, of, pulling))
        connection = pool.take(replica.address)
    except TurbopumpError as error:
        _log.info("%s: no direct connection: %s", of, error)
        return None
    header = _header(session, of, group, pulling)
    # Whoever reads from a slave has a reason that outweighs the group's.
    return BlockingPull(
        connection, of, header, pulling, pool, follows_suggestions=replica.is_master
    )


async def _replica(session: Session, of: QueueRange, pulling: Pulling) -> Replica:
    """Return where to read; raises NoRoute."""
    if not session.has_broker(of.broker):
        await session.refresh_route(with_namespace(session.config.namespace, of.topic))
    slave_id = first_slave_id(session.replicas(of.broker))
    return session.replica_to_read(of.broker, slave_id if pulling.prefers_slave else MASTER_ID)


def _header(session: Session, of: QueueRange, group: str, pulling: Pulling) -> PullMessage:
    times = PullTimes(timeout_ms=pulling.timeout_ms)
    name = with_namespace(session.config.namespace, group)
    reader = QueueReader(session, name, times, in_bulk=True)
    wanted = subscription(reader.wire_topic(of.topic), pulling.expression, 0)
    return reader.header_to_pull(of.queue, QueueOffset(of.start), wanted, pulling.count_max)
