"""Sends the rows of a task through the session, with retries; in order where rows require it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from turbopump.client.calls import SendStatus
from turbopump.client.message_sender import unique_ids
from turbopump.client.names import check_topic_for_sending, with_namespace
from turbopump.client.outgoing import (
    MessageRules,
    Outgoing,
    check_message,
    encoded_batch,
    outgoing,
    outgoing_batch,
    properties_text,
)
from turbopump.client.producer import Producer
from turbopump.client.queue_choice import QueueChoice
from turbopump.client.send_hooks import SendReceipt
from turbopump.client.send_retries import RETRIED_CODES, is_refusal
from turbopump.client.session import Session
from turbopump.clock import Clock
from turbopump.errors import (
    InvalidArgument,
    NetworkError,
    NoRoute,
    RemoteError,
    SparkError,
    TurbopumpError,
)
from turbopump.message import Message, MessageQueue
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.row_converter import ConvertedRows
from turbopump.spark.writing.row_encoder import EncodedRows
from turbopump.spark.writing.send_planner import BatchLimits, EncodedSend, Send, topic_of
from turbopump.spark.writing.send_window import SendWindow
from turbopump.spark.writing.write_lease import WriteLease
from turbopump.wire.codes import ResponseCode

_log = logging.getLogger(__name__)

_FIRST_PAUSE_MS = 100
_LONGEST_PAUSE_MS = 2000

Passing = NetworkError | NoRoute | RemoteError
"""Errors that a retry, later or on another broker, may fix."""

Refused = Passing | InvalidArgument

_LOOKED_UP = "; whether it was stored is looked up when Spark retries the task"


@dataclass(slots=True)
class SendCounts:
    """What a task has sent so far."""

    rows: int = 0
    sends: int = 0
    body_bytes: int = 0
    repeated: int = 0
    """Retries; messages may be stored twice because of them."""

    def add(self, send: Send | EncodedSend) -> None:
        """Count a stored send."""
        self.rows += len(send.rows)
        self.sends += 1
        self.body_bytes += send.body_bytes


@dataclass(frozen=True, slots=True)
class Targets:
    """Queues and broker addresses, as known recently."""

    queues: Mapping[str, tuple[MessageQueue, ...]]
    """By topic."""

    addresses: Mapping[str, str]
    """Of the masters of brokers, where they are known."""


@dataclass(frozen=True, slots=True)
class UnfinishedSend:
    """A send whose first attempt, by `BlockingSender`, did not succeed."""

    send: Send | EncodedSend
    queue: MessageQueue
    outcome: Refused | SendStatus

    def status(self) -> SendStatus:
        """Return the status of the first attempt, or raise its error."""
        if isinstance(self.outcome, SendStatus):
            return self.outcome
        raise self.outcome


class RetryBudget:
    """Limits the retries of a send.

    ``retries`` times; refusals by busy brokers do not count before the send's timeout.
    """

    def __init__(self, options: SinkOptions, clock: Clock) -> None:
        self._left = options.retries
        self._clock = clock
        self._refused_until_ms = clock.monotonic_ms() + options.send_timeout_ms

    def allows(self, error: Passing | None = None) -> bool:
        """Record a failed attempt; return whether to retry."""
        is_refused = error is not None and is_refusal(error)
        if is_refused and self._clock.monotonic_ms() < self._refused_until_ms:
            return True
        self._left -= 1
        return self._left >= 0


class RetryingSender:
    """Sends the rows of one task; belongs to the event loop of its session.

    Sends to a queue that rows asked for are sequential, so that retries keep the order. All others
    are concurrent.
    """

    def __init__(self, session: Session, options: SinkOptions, partition: int) -> None:
        self.counts = SendCounts()
        self._session = session
        self._options = options
        self.partition = partition
        self.producer = Producer(options.group, session=session, config=options.producer())
        rules = options.rules()
        self._rules = rules
        self._ids = unique_ids(session)
        # A batch is checked like a body.
        bytes_max = min(options.batch_bytes, rules.body_bytes_max)
        self.cuts = BatchLimits(options.batch_size, bytes_max, rules.compress_from_bytes)
        self._choice = QueueChoice(session.random)
        self._places = asyncio.Semaphore(options.max_in_flight)
        self.window = SendWindow(options.max_in_flight)
        self._running: set[asyncio.Task[None]] = set()
        self._last_of_queue: dict[MessageQueue, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self.lease: WriteLease | None = None
        """Of an idempotent write: without it nothing is sent."""

    def require_lease(self) -> None:
        """Raise SparkError if another attempt of the task may send."""
        if self.lease is not None:
            self.lease.require()

    async def targets(self, rows: ConvertedRows | EncodedRows) -> Targets:
        """Look up the queues of rows; raises SparkError after all retries."""
        await self.producer.start()
        queues = {topic: await self._queues(topic, rows) for topic in dict.fromkeys(rows.topics)}
        brokers = {queue.broker for of_topic in queues.values() for queue in of_topic}
        session = self._session
        masters = {
            name: session.address_to_write(name) for name in brokers if session.has_master(name)
        }
        return Targets(queues, masters)

    async def retry(self, tried: Iterable[UnfinishedSend]) -> None:
        """Retry sends that `BlockingSender` could not complete, and wait; raises as `finish`."""
        for each in tried:
            await self.begin(each.send, each)
        await self.finish()

    async def begin(self, send: Send | EncodedSend, tried: UnfinishedSend | None = None) -> None:
        """Start a send when there is room for it; ``tried`` is its first attempt, if any."""
        await self._places.acquire()
        self._raise_failure()
        if isinstance(send.destination, MessageQueue):
            before = self._last_of_queue.get(send.destination)
            task = asyncio.create_task(self._in_turn(send, tried, before))
            self._last_of_queue[send.destination] = task
        else:
            task = asyncio.create_task(self._deliver(send, tried))
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def finish(self) -> SendCounts:
        """Wait until all rows are stored; raises if any send has failed."""
        await asyncio.gather(*self._running, return_exceptions=True)
        self._raise_failure()
        return self.counts

    async def close(self) -> None:
        """Abandon pending sends and close the producer."""
        self._give_up()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.producer.close()

    # --- internals --------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._places.release()
        if not task.cancelled() and self._failure is None:
            self._failure = task.exception()
            if self._failure is not None:
                # The task fails anyway: further sends would only become duplicates.
                self._give_up()

    def _give_up(self) -> None:
        for task in self._running:
            task.cancel()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _in_turn(
        self,
        send: Send | EncodedSend,
        tried: UnfinishedSend | None,
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await before
        await self._deliver(send, tried)

    async def _deliver(self, send: Send | EncodedSend, tried: UnfinishedSend | None) -> None:
        """Send until it is stored; raises SparkError with the last error."""
        queue: MessageQueue | None = None if tried is None else tried.queue
        refused: set[str] = set()
        budget = RetryBudget(self._options, self._session.clock)
        for pauses in itertools.count():
            try:
                if tried is not None:
                    first, tried = tried, None
                    status = first.status()
                else:
                    queue = await self._next_queue(send, queue)
                    status = (await self._send(send, queue)).status
            except InvalidArgument as error:
                raise self._blamed(send, error) from error
            except (NetworkError, NoRoute, RemoteError) as error:
                if queue is not None:
                    refused.add(queue.broker)
                if not self._is_worth_a_try(send, error, refused) or not budget.allows(error):
                    looked_up = _LOOKED_UP if self._must_be_looked_up(error) else ""
                    raise self._failed(send, queue, f"{error}{looked_up}") from error
                why = str(error)
            else:
                if status is SendStatus.OK or not self._options.retry_unless_ok:
                    break
                why = f"stored, but {status.name}"
                if not budget.allows():
                    raise self._failed(send, queue, why)
            await self._pause(send, why, pauses)
        self.counts.add(send)

    async def _send(self, send: Send | EncodedSend, queue: MessageQueue) -> SendReceipt:
        clock = self._session.clock
        async with self.window.place() as cuts:
            start_ms = clock.monotonic_ms()
            self.require_lease()
            try:
                receipt = await self.producer.send_ready(self.outgoing(send), to=queue)
            except (NetworkError, RemoteError) as error:
                if error.retriable:
                    self.window.busy(cuts)
                raise
            self.window.answered(clock.monotonic_ms() - start_ms)
            return receipt

    def outgoing(self, send: Send | EncodedSend) -> Outgoing:
        """Return a send as brokers receive it; raises InvalidArgument."""
        rules, namespace = self._rules, self._options.namespace
        if isinstance(send, EncodedSend):
            topic = topic_of(send.destination)
            return encoded_batch(topic, send.message_id, send.body, rules, namespace)
        if len(send.messages) == 1:
            return outgoing(send.messages[0], self._ids.next(), rules, namespace)
        return outgoing_batch(send.messages, self._ids.many(len(send.messages)), rules, namespace)

    async def _next_queue(
        self, send: Send | EncodedSend, failed: MessageQueue | None
    ) -> MessageQueue:
        if isinstance(send.destination, MessageQueue):
            return send.destination
        queues = await self.producer.queues(topic_of(send.destination))
        now_ms = self._session.clock.monotonic_ms()
        return self._choice.next(queues, () if failed is None else {failed.broker}, now_ms)

    def _must_be_looked_up(self, error: Passing) -> bool:
        """Whether an idempotent write does not know if a send was stored."""
        if self.lease is None:
            return False
        if isinstance(error, RemoteError):
            return error.code == ResponseCode.SYSTEM_ERROR
        return not is_refusal(error)

    def _is_worth_a_try(self, send: Send | EncodedSend, error: Passing, refused: set[str]) -> bool:
        if self._must_be_looked_up(error):
            return False
        if error.retriable:
            return True
        if isinstance(send.destination, MessageQueue) or not isinstance(error, RemoteError):
            return False
        route = self._session.cached_route(self._known_as(topic_of(send.destination)))
        others = route is not None and {queue.broker for queue in route.writable} - refused
        return bool(others) and error.code in RETRIED_CODES

    async def _pause(self, send: Send | EncodedSend, why: str, tries: int) -> None:
        """Back off, then refresh the route."""
        self.counts.repeated += 1
        longest_ms = min(_FIRST_PAUSE_MS << tries, _LONGEST_PAUSE_MS)
        # With jitter, or sends refused together would return together.
        pause_ms = round(longest_ms * self._session.random.uniform(0.5, 1))
        _log.info("%s: %s; retrying in %d ms", self._named(send), why, pause_ms)
        await asyncio.sleep(pause_ms / 1000)
        try:
            await self._session.refresh_route(self._known_as(topic_of(send.destination)))
        except TurbopumpError as error:
            _log.info("cannot refresh the route of topic %s: %s", topic_of(send.destination), error)

    async def _queues(
        self, topic: str, rows: ConvertedRows | EncodedRows
    ) -> tuple[MessageQueue, ...]:
        """Return the queues of a topic, with the same retries as a send."""
        row = rows.first_row + rows.topics.index(topic)
        send = Send(topic, (), [row])
        try:
            check_topic_for_sending(self._known_as(topic))
        except InvalidArgument as error:
            raise InvalidArgument(
                f"row {row} of partition {self.partition}, column topic: {error}"
            ) from error
        budget = RetryBudget(self._options, self._session.clock)
        for pauses in itertools.count():
            try:
                return await self.producer.queues(topic)
            except (NetworkError, NoRoute) as error:
                # An unknown topic is a mistake more often than a restart.
                if not budget.allows(None if isinstance(error, NoRoute) else error):
                    raise self._failed(send, None, str(error)) from error
                await self._pause(send, str(error), pauses)
        raise AssertionError("it returns or raises")

    # --- words ------------------------------------------------------------------------------------

    def _failed(self, send: Send | EncodedSend, queue: MessageQueue | None, why: str) -> SparkError:
        return SparkError(
            f"{self._named(send)} could not be sent to {queue or topic_of(send.destination)}: "
            f"{why} (group {self._options.group}, retries {self._options.retries})"
        )

    def _named(self, send: Send | EncodedSend) -> str:
        first, last = send.rows[0], send.rows[-1]
        rows = f"row {first}" if first == last else f"{len(send.rows)} rows, {first} to {last},"
        return f"{rows} of partition {self.partition}"

    def _blamed(self, send: Send | EncodedSend, error: InvalidArgument) -> InvalidArgument:
        """Return the error with the row and column that caused it."""
        if isinstance(send, EncodedSend):
            # Its rows have passed all checks: the error is about the batch.
            return InvalidArgument(f"{self._named(send)}: {error}")
        for row, message in zip(send.rows, send.messages, strict=True):
            column = wrong_column(message, self._rules, self._options.namespace)
            if column is not None:
                return InvalidArgument(
                    f"row {row} of partition {self.partition}, column {column[0]}: {column[1]}"
                )
        return InvalidArgument(f"{self._named(send)}: {error}")

    def _known_as(self, topic: str) -> str:
        return with_namespace(self._options.namespace, topic)


def wrong_column(
    message: Message, rules: MessageRules, namespace: str = ""
) -> tuple[str, str] | None:
    """Return the invalid column of a message and the error, None if all are valid."""
    topic, body = message.topic, b"-"
    parts = {
        "topic": Message(topic, body),
        "body": Message(topic, message.body),
        "tags": Message(topic, body, tags=message.tags),
        "keys": Message(topic, body, keys=message.keys),
        "properties": Message(topic, body, properties=message.properties),
        "delayLevel": Message(topic, body, delay_level=message.delay_level),
    }
    for column, part in parts.items():
        try:
            check_topic_for_sending(with_namespace(namespace, part.topic))
            check_message(part, rules)
            properties_text(part, "")
        except InvalidArgument as error:
            return column, str(error)
    return None
