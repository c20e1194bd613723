"""Retries the sends that `BlockingSender` could not complete, through the session."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from turbopump.client.calls import SendStatus
from turbopump.client.names import check_topic_for_sending, with_namespace
from turbopump.client.outgoing import Outgoing, encoded_batch, encoded_message
from turbopump.client.producer import Producer
from turbopump.client.queue_choice import QueueChoice
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
from turbopump.message import MessageQueue
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.row_encoder import EncodedRows
from turbopump.spark.writing.send_planner import BatchLimits, Send, topic_of
from turbopump.spark.writing.write_lease import WriteLease
from turbopump.wire.batch import decode_batch
from turbopump.wire.codes import ResponseCode

_log = logging.getLogger(__name__)

_FIRST_PAUSE_MS = 100
_LONGEST_PAUSE_MS = 2000

Transient = NetworkError | NoRoute | RemoteError
"""Errors that a retry, later or on another broker, may fix."""

Refused = Transient | InvalidArgument
Attempt = Refused | SendStatus
"""The result of one attempt: an error, or how safely the send was stored."""

_LOOKED_UP = "; whether it was stored is looked up when Spark retries the task"


@dataclass(slots=True)
class SendCounts:
    """What a task has sent so far."""

    rows: int = 0
    sends: int = 0
    body_bytes: int = 0
    repeated: int = 0
    """Retries; messages may be stored twice because of them."""

    def add(self, send: Send) -> None:
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

    send: Send
    queue: MessageQueue
    outcome: Attempt


class RetryBudget:
    """Limits the retries of a send.

    ``retries`` times; refusals by busy brokers do not count before the send's timeout.
    """

    def __init__(self, options: SinkOptions, clock: Clock) -> None:
        self._left = options.retries
        self._clock = clock
        self._refused_until_ms = clock.monotonic_ms() + options.send_timeout_ms

    def allows(self, error: Transient | None = None) -> bool:
        """Record a failed attempt; return whether to retry."""
        is_refused = error is not None and is_refusal(error)
        if is_refused and self._clock.monotonic_ms() < self._refused_until_ms:
            return True
        self._left -= 1
        return self._left >= 0


class RetryingSender:
    """Retries the sends of one task; belongs to the event loop of its session."""

    def __init__(self, session: Session, options: SinkOptions, partition: int) -> None:
        self.counts = SendCounts()
        self._session = session
        self._options = options
        self.partition = partition
        self.producer = Producer(options.group, session=session, config=options.producer())
        rules = options.rules()
        self._rules = rules
        # A batch is checked like a body.
        bytes_max = min(options.batch_bytes, rules.body_bytes_max)
        self.cuts = BatchLimits(options.batch_size, bytes_max, rules.compress_from_bytes)
        self._choice = QueueChoice(session.random)
        self.window = SendWindow(options.max_in_flight)
        self.lease: WriteLease | None = None
        """Of an idempotent write: without it nothing is sent."""

    def require_lease(self) -> None:
        """Raise SparkError if another attempt of the task may send."""
        if self.lease is not None:
            self.lease.require()

    async def targets(self, rows: EncodedRows) -> Targets:
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
        """Retry sends concurrently until all are stored; raises the first failure.

        Of sends to a queue that rows asked for, at most one is unfinished, so order is kept.
        """
        tasks = [asyncio.create_task(self._deliver(each)) for each in tried]
        try:
            await asyncio.gather(*tasks)
        finally:
            # After a failure the task fails anyway: further sends would only become duplicates.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- internals --------------------------------------------------------------------------------

    async def _deliver(self, tried: UnfinishedSend) -> None:
        """Send until it is stored; raises SparkError with the last error."""
        send, queue, outcome = tried.send, tried.queue, tried.outcome
        refused: set[str] = set()
        budget = RetryBudget(self._options, self._session.clock)
        for pauses in itertools.count():
            if self.is_stored(outcome):
                break
            if isinstance(outcome, InvalidArgument):
                raise InvalidArgument(f"{self._named(send)}: {outcome}") from outcome
            if isinstance(outcome, SendStatus):
                why = f"stored, but {outcome.name}"
                if not budget.allows():
                    raise self._failed(send, queue, why)
            else:
                refused.add(queue.broker)
                if not self._is_retriable(send, outcome, refused) or not budget.allows(outcome):
                    looked_up = _LOOKED_UP if self._must_be_looked_up(outcome) else ""
                    raise self._failed(send, queue, f"{outcome}{looked_up}") from outcome
                why = str(outcome)
            await self._pause(send, why, pauses)
            try:
                queue = await self._next_queue(send, queue)
                outcome = await self._send(send, queue)
            except (InvalidArgument, NetworkError, NoRoute, RemoteError) as error:
                outcome = error
        self.counts.add(send)

    def is_stored(self, outcome: Attempt) -> bool:
        """Whether an attempt stored its messages as safely as the options ask for."""
        if isinstance(outcome, SendStatus):
            return outcome is SendStatus.OK or not self._options.retry_unless_ok
        return False

    async def _send(self, send: Send, queue: MessageQueue) -> SendStatus:
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
            return receipt.status

    def outgoing(self, send: Send) -> Outgoing:
        """Return a send as brokers receive it; raises InvalidArgument."""
        rules, namespace = self._rules, self._options.namespace
        topic, body = topic_of(send.destination), send.body
        if not send.is_alone:
            return encoded_batch(topic, send.message_id, body, rules, namespace)
        (entry,) = decode_batch(bytes(body))
        text, level = entry.properties.decode(), send.delay_level
        return encoded_message(topic, send.message_id, entry.body, text, level, rules, namespace)

    async def _next_queue(self, send: Send, failed: MessageQueue) -> MessageQueue:
        if isinstance(send.destination, MessageQueue):
            return send.destination
        queues = await self.producer.queues(send.destination)
        now_ms = self._session.clock.monotonic_ms()
        return self._choice.next(queues, {failed.broker}, now_ms)

    def _must_be_looked_up(self, error: Transient) -> bool:
        """Whether an idempotent write does not know if a send was stored."""
        if self.lease is None:
            return False
        if isinstance(error, RemoteError):
            return error.code == ResponseCode.SYSTEM_ERROR
        return not is_refusal(error)

    def _is_retriable(self, send: Send, error: Transient, refused: set[str]) -> bool:
        if self._must_be_looked_up(error):
            return False
        if error.retriable:
            return True
        if isinstance(send.destination, MessageQueue) or not isinstance(error, RemoteError):
            return False
        route = self._session.cached_route(self._wire_topic(topic_of(send.destination)))
        others = route is not None and {queue.broker for queue in route.writable} - refused
        return bool(others) and error.code in RETRIED_CODES

    async def _pause(self, send: Send, why: str, tries: int) -> None:
        """Back off, then refresh the route."""
        self.counts.repeated += 1
        longest_ms = min(_FIRST_PAUSE_MS << tries, _LONGEST_PAUSE_MS)
        # With jitter, or sends refused together would return together.
        pause_ms = round(longest_ms * self._session.random.uniform(0.5, 1))
        _log.info("%s: %s; retrying in %d ms", self._named(send), why, pause_ms)
        await asyncio.sleep(pause_ms / 1000)
        try:
            await self._session.refresh_route(self._wire_topic(topic_of(send.destination)))
        except TurbopumpError as error:
            _log.info("cannot refresh the route of topic %s: %s", topic_of(send.destination), error)

    async def _queues(self, topic: str, rows: EncodedRows) -> tuple[MessageQueue, ...]:
        """Return the queues of a topic, with the same retries as a send."""
        row = rows.first_row + rows.topics.index(topic)
        send = Send(topic, "", memoryview(b""), 0, [row])
        try:
            check_topic_for_sending(self._wire_topic(topic))
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

    def _failed(self, send: Send, queue: MessageQueue | None, why: str) -> SparkError:
        return SparkError(
            f"{self._named(send)} could not be sent to {queue or topic_of(send.destination)}: "
            f"{why} (group {self._options.group}, retries {self._options.retries})"
        )

    def _named(self, send: Send) -> str:
        first, last = send.rows[0], send.rows[-1]
        rows = f"row {first}" if first == last else f"{len(send.rows)} rows, {first} to {last},"
        return f"{rows} of partition {self.partition}"

    def _wire_topic(self, topic: str) -> str:
        return with_namespace(self._options.namespace, topic)


_WAITED_MS = 80
"""Responses slower than the fastest one by this much have queued at the broker.

By default brokers refuse requests that have queued for 200 ms.
"""


class SendWindow:
    """Halves when a broker is busy, shrinks when responses get slow, grows otherwise.

    Brokers refuse requests that have queued for long. Resending the same amount is refused again;
    sending less keeps a busy broker working without queueing.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._size = max(1.0, most / 2)
        self.cuts = 0
        """The argument of `busy` for a send that starts now."""
        self._active = 0
        self._changed = asyncio.Event()
        self._fastest_ms: int | None = None

    @property
    def size(self) -> int:
        """The current limit of concurrent sends."""
        return int(self._size)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[int]:
        """Wait for room and occupy it; yields the argument for `busy`."""
        while self._active >= self.size:
            self._changed.clear()
            await self._changed.wait()
        self._active += 1
        try:
            yield self.cuts
        finally:
            self._active -= 1
            self._changed.set()

    def answered(self, elapsed_ms: int | None) -> None:
        """Record a success, with its duration if known."""
        step = 1 / self._size
        if elapsed_ms is not None:
            if self._fastest_ms is None or elapsed_ms < self._fastest_ms:
                self._fastest_ms = elapsed_ms
            if elapsed_ms - self._fastest_ms > _WAITED_MS:
                step = -step
        self._size = max(1.0, min(self.most, self._size + step))
        self._changed.set()

    def busy(self, cuts: int) -> None:
        """Record a refusal; sends from before the last cut do not count again."""
        if cuts == self.cuts:
            self.cuts += 1
            self._size = max(1.0, self._size / 2)
