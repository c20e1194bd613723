"""Writes that send no row twice: rows stored by earlier attempts are looked up and skipped.

ADR 13 explains why this is correct, and what it requires.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.producer import Producer
from turbopump.client.session import Session
from turbopump.core import parse_properties
from turbopump.errors import DataLost, SparkError, TurbopumpError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.spark.reading.retry import with_retries
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.row_encoder import STAMP_PROPERTY, EncodedRows, Origin
from turbopump.spark.writing.write_lease import WriteLease
from turbopump.spark.writing.write_marks import Mark, MarkLog, MarkSurvey, Messages, marks_queue
from turbopump.wire import properties
from turbopump.wire.batch import decode_batch
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """Which task has started, and where its first marks are, by broker."""

    origin: Origin
    marks: Mapping[str, int]


class TaskWrite:
    """One attempt of a task; belongs to the event loop of its session."""

    def __init__(
        self,
        session: Session,
        producer: Producer,
        options: SinkOptions,
        origin: Origin,
        survey: MarkSurvey | None = None,
    ) -> None:
        self._session = session
        self._producer = producer
        self._options = options
        self._origin = origin
        self._survey = survey
        self._topic = _topic(options)
        self._log = MarkLog(session, producer, options)
        self._messages = Messages(session, options)
        self._name = f"partition {origin.partition} of write {origin.query} to {self._topic}"
        self.lease = WriteLease(session, self._log, self._name)
        self._firsts: dict[str, int] = {}

    async def begin(self) -> SentRows:
        """Wait until no earlier attempt is sending, and return the rows not to send."""
        await self._producer.start()
        queues = await _queues(self._producer, self._options)
        brokers = sorted({queue.broker for queue in queues})
        starts = await self._ends(queues)
        await self.lease.start(brokers)
        earlier: list[Mark] = []
        # One broker after another, so that attempts never wait for each other.
        for broker in brokers:
            marks = await self._exchange(broker, starts)
            if any(each.partition is None for each in marks):
                return SentRows(self._origin, is_all=True)
            own = [each for each in marks if each.partition == self._origin.partition]
            await self.lease.wait_for(broker, {each.attempt for each in own})
            earlier += own
        if not earlier:
            return SentRows(self._origin)
        return await self._stored(_starts(earlier), queues)

    def begun(self) -> Begun:
        """Return what the driver needs to know when all tasks have ended."""
        return Begun(self._origin, self._firsts)

    # --- marks ------------------------------------------------------------------------------------

    async def _exchange(self, broker: str, starts: dict[str, dict[int, int]]) -> list[Mark]:
        """Store a mark at a broker, and return those before it of the same write and batch."""
        origin = self._origin
        same = (origin.query, origin.batch, self._topic)
        mark = Mark(*same, origin.partition, self.lease.attempt, starts)
        end = await self._log.put(broker, mark)
        found = await self._log.read(broker, await self._since(broker), end + 1)
        if self._survey is not None:
            found += [each for each in self._survey.marks if each.broker == broker]
        found = [
            each for each in found if (each.mark.write, each.mark.batch, each.mark.topic) == same
        ]
        # Its own mark is among them: once it can be read, so can those before it.
        self._firsts[broker] = min(each.offset for each in found)
        # It is stored again if a response is lost. The first one counts: an attempt that stored a
        # mark behind it has seen it, and waits for this attempt.
        own = min(each.offset for each in found if each.mark.attempt == mark.attempt)
        return [each.mark for each in found if each.offset < own]

    async def _since(self, broker: str) -> int:
        if self._survey is not None:
            return self._survey.ends.get(broker, 0)
        group = Messages(self._session, self._options, _hint_group(self._origin.query))
        queue, retries = marks_queue(broker), self._options.retries
        return await with_retries(lambda: group.queues.committed(queue), retries, broker) or 0

    # --- rows -------------------------------------------------------------------------------------

    async def _ends(self, queues: Iterable[MessageQueue]) -> dict[str, dict[int, int]]:
        route = self._session.cached_route(self._messages.queues.wire_topic(self._topic))
        if route is None or route.is_borrowed:
            # The first row creates the topic.
            found = dict.fromkeys(queues, 0)
        else:
            found = await gather_by_key(queues, self._messages.end)
        ends: dict[str, dict[int, int]] = {}
        for queue, end in found.items():
            ends.setdefault(queue.broker, {})[queue.queue_id] = end
        return ends

    async def _stored(
        self, starts: Mapping[MessageQueue, int], queues: Iterable[MessageQueue]
    ) -> SentRows:
        """Return the rows of this task in the topic, from where its first attempt started."""
        sent = SentRows(self._origin)
        for broker in sorted({queue.broker for queue in starts}):
            if not self._session.has_master(broker):
                raise SparkError(
                    f"broker {broker} may have rows of an earlier attempt of {self._name}, but no "
                    "name server knows its master; retry when it is back"
                )
        for queue in sorted({*starts, *queues}):
            low, high = await self._messages.start(queue), await self._messages.end(queue)
            start = starts.get(queue, low)
            if start < low:
                raise DataLost(
                    f"{queue}: messages {start} to {low} were deleted since an earlier attempt of "
                    f"{self._name} began, so the rows that it stored cannot be determined; set "
                    "idempotent to false for this run"
                )
            for message in await self._messages.read(queue, start, high):
                sent.note(message)
        _log.info("%s: earlier attempts have stored %d rows", self._name, len(sent.rows))
        return sent


async def survey(session: Session, options: SinkOptions, write: str) -> MarkSurvey:
    """Read the marks of a batch write on the driver, before its tasks start."""
    async with Producer(options.group, session=session, config=options.producer()) as producer:
        queues = await _queues(producer, options)
        log = MarkLog(session, producer, options)
        return await log.survey(write, _topic(options), sorted({each.broker for each in queues}))


async def finish(
    session: Session, options: SinkOptions, begun: Sequence[Begun], *, is_stream: bool
) -> None:
    """Mark a write complete, and commit where the marks of a stream's newest batch start.

    Both only save work: a failure is logged.
    """
    origin = begun[0].origin
    firsts: dict[str, int] = {}
    for each in begun:
        for broker, offset in each.marks.items():
            firsts[broker] = min(offset, firsts.get(broker, offset))
    hints = Messages(session, options, _hint_group(origin.query))
    try:
        async with Producer(options.group, session=session, config=options.producer()) as producer:
            log = MarkLog(session, producer, options)
            for broker, offset in firsts.items():
                await log.put(broker, Mark(origin.query, origin.batch, _topic(options)))
                if is_stream:
                    await hints.queues.commit(marks_queue(broker), QueueOffset(offset))
    except TurbopumpError as error:
        _log.warning(
            "write %s, batch %s: not marked complete: %s", origin.query, origin.batch, error
        )


async def _queues(producer: Producer, options: SinkOptions) -> tuple[MessageQueue, ...]:
    topic = _topic(options)
    return await with_retries(lambda: producer.queues(topic), options.retries, topic)


def _topic(options: SinkOptions) -> str:
    assert options.topic is not None, "options of an idempotent write have a topic"
    return options.topic


def _starts(marks: Iterable[Mark]) -> dict[MessageQueue, int]:
    """Return where rows of a task may start: where the first of its attempts started."""
    found: dict[MessageQueue, int] = {}
    for mark in marks:
        for broker, ends in mark.starts.items():
            for queue_id, offset in ends.items():
                queue = MessageQueue(mark.topic, broker, queue_id)
                found[queue] = min(offset, found.get(queue, offset))
    return found


def _hint_group(query: str) -> str:
    return f"spark-sink-{query}"


# --- the rows that earlier attempts have stored, compared with the current ones: pure -------------


class SentRows:
    """Row numbers to skip, each with a digest of its content.

    A row is skipped by its number. If the input is not deterministic, another row may have that
    number now, and skipping it would lose it: so contents are compared before.
    """

    def __init__(self, origin: Origin, *, is_all: bool = False) -> None:
        self.is_all = is_all
        """Whether the write is complete: nothing is sent or compared."""
        self._origin = origin
        self._digests: dict[int, int] = {}

    @property
    def rows(self) -> Collection[int]:
        return self._digests.keys()

    def note(self, stored: MessageView) -> None:
        """Remember a stored message if it is a row of this task."""
        stamp = stored.properties.get(STAMP_PROPERTY, "")
        number = stamp.removeprefix(self._origin.prefix)
        # The id of a write may contain slashes: then the rest is not a number.
        if number != stamp and number.isdecimal():
            self._digests[int(number)] = _digest(stored.body, stored.tags, stored.keys)

    def has_any(self, first_row: int, count: int) -> bool:
        """Whether one of the rows with these numbers is stored."""
        if not self._digests:
            return False
        return any(row in self._digests for row in range(first_row, first_row + count))

    def require_same(self, rows: EncodedRows) -> None:
        """Compare rows with the stored ones of the same number; raises SparkError."""
        for place in range(len(rows.topics)):
            row = rows.first_row + place
            if row not in self._digests:
                continue
            (entry,) = decode_batch(rows.entries[place].as_py())
            own = parse_properties(entry.properties)
            keys = own.get(properties.KEYS, "").split()
            if self._digests[row] != _digest(entry.body, own.get(properties.TAGS), keys):
                raise SparkError(
                    f"row {row} of {self._task} differs from the row that an earlier attempt "
                    f"stored under this number; {_DETERMINISTIC}"
                )

    def require_no_more(self, count: int) -> None:
        """Check at the end that no row is stored beyond the last one; raises SparkError."""
        most = max(self._digests, default=-1)
        if most >= count:
            raise SparkError(
                f"{self._task} has {count} rows now, but an earlier attempt stored row {most}; "
                f"{_DETERMINISTIC}"
            )

    @property
    def _task(self) -> str:
        origin = self._origin
        return f"partition {origin.partition} of write {origin.query}, batch {origin.batch}"


_DETERMINISTIC = (
    "an idempotent write needs the same rows in the same order and partitions each time: sort "
    "within partitions by a unique column, or set idempotent to false for this run"
)


def _digest(body: bytes, tags: str | None, keys: Sequence[str]) -> int:
    # Of this process only: both sides are computed in one task.
    return hash((body, tags or None, tuple(keys)))
