"""Sending a message: route, queue, attempt, outcome, then the next attempt or an error.

The decisions are the same for event loops and for threads. All waiting goes through a `SendIO`.
With one that blocks, `run_to_end` runs a send on the caller's thread, without an event loop.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from turbopump.client import calls
from turbopump.client.arguments import hooks_with
from turbopump.client.background import LoopThread
from turbopump.client.calls import SendStatus
from turbopump.client.config import own_address
from turbopump.client.names import with_namespace, without_namespace
from turbopump.client.outgoing import Outgoing, outgoing, outgoing_batch
from turbopump.client.producer_config import ProducerConfig
from turbopump.client.queue_choice import FAILURE_LATENCY_MS, BrokerFaults, QueueChoice
from turbopump.client.selectors import Selector
from turbopump.client.send_hooks import SendHook, SendReceipt, SendScope
from turbopump.client.send_retries import SendRetries
from turbopump.client.session import Session
from turbopump.durations import Duration, milliseconds
from turbopump.errors import (
    InvalidArgument,
    NetworkError,
    NoRoute,
    RemoteError,
    RequestTimeout,
    TurbopumpError,
)
from turbopump.message import Message, MessageQueue
from turbopump.net.fifo_waiters import FifoWaiters
from turbopump.net.thread_request import ThreadRequest
from turbopump.timeouts import timeout as time_limit
from turbopump.wire.command import Response
from turbopump.wire.headers import SendMessage
from turbopump.wire.hosts import host
from turbopump.wire.ids import UniqueIds
from turbopump.wire.prepared_requests import SendKind, SendRequest, send_kind

_log = logging.getLogger(__name__)

_KINDS_MAX = 16_384

To = MessageQueue | Selector | None
"""The target: a queue, a function that chooses one, or None for the next in turn."""

T = TypeVar("T")
A = TypeVar("A")
R = TypeVar("R", bound=SendReceipt | None)


class SendIO(Protocol):
    """The I/O of a send."""

    async def request(self, address: str, command: SendRequest, timeout_ms: int) -> Response:
        """Send a request and return its response, whatever its code."""

    async def oneway(self, address: str, command: SendRequest, timeout_ms: int) -> None:
        """Send a request without a response; the timeout covers connecting and writing."""

    async def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something that needs the session's event loop, such as a route lookup."""


Attempt = Callable[[SendIO, Outgoing, MessageQueue, int], Awaitable[A]]
"""Sends a message to a queue, within a timeout, and returns the broker's response, if any."""

ReceiptOf = Callable[[Outgoing, MessageQueue, A], R]


class LoopIO:
    """Sends over the session's connections, on its event loop."""

    def __init__(self, session: Session) -> None:
        self.request = session.request
        self.oneway = session.oneway

    async def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await work()


class ThreadIO:
    """Sends over a connection of the calling thread; never suspends."""

    def __init__(self, session: Session, thread: LoopThread) -> None:
        self._session = session
        self._thread = thread

    async def request(self, address: str, command: SendRequest, timeout_ms: int) -> Response:
        return self._session.blocking_pool().request(address, command, timeout_ms)

    async def oneway(self, address: str, command: SendRequest, timeout_ms: int) -> None:
        self._session.blocking_pool().oneway(address, command, timeout_ms)

    async def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._thread.run(_begun_there(work))


class TaskIO(ThreadIO):
    """Makes requests in tasks of an event loop, while the calling thread blocks."""

    async def request(self, address: str, command: SendRequest, timeout_ms: int) -> Response:
        return await self.wait(lambda: self._session.request(address, command, timeout_ms))

    async def oneway(self, address: str, command: SendRequest, timeout_ms: int) -> None:
        await self.wait(lambda: self._session.oneway(address, command, timeout_ms))


class HandOverIO(TaskIO):
    """Hands requests to the session's event loop, which writes those of many threads together.

    The calling thread blocks; never suspends.
    """

    async def request(self, address: str, command: SendRequest, timeout_ms: int) -> Response:
        session, waiting = self._session, ThreadRequest(command, timeout_ms)
        begin = functools.partial(session.start_request, address, waiting)
        self._thread.wait_for(waiting.finished, begin, waiting.abandon)
        outcome = waiting.outcome
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            # There is no connection or no room on it, or hooks must see the request.
            return await super().request(address, command, timeout_ms)
        return outcome


async def _begun_there(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Defer the call to the loop: work that needs the running loop may look it up immediately."""
    return await work()


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, because its I/O blocks."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise AssertionError(f"{work!r} waits for an event loop")


class MessageSender:
    """Sends the messages of one running producer; threads may share it."""

    def __init__(
        self, group: str, session: Session, config: ProducerConfig, hooks: Sequence[SendHook]
    ) -> None:
        self._group = group
        self._session = session
        self._clock = session.clock
        self._namespace = session.config.namespace
        self._config = config
        self._limit_ms = config.send_timeout_ms
        self._new_topic_queues = config.messages.new_topic_queues
        self._unit_mode = session.config.unit_mode
        self._hooks = tuple(hooks)
        self._scopes: list[SendScope] = hooks_with(hooks, "sending")
        self._faults = BrokerFaults() if config.avoid_slow_brokers else None
        self._choice = QueueChoice(session.random, self._faults)
        self._kinds: dict[tuple[str, str, bool], SendKind] = {}
        self._lookups: dict[str, FifoWaiters] = {}
        """The sends waiting for the route of a topic."""
        self.ids = unique_ids(session)

    def send(
        self,
        io: SendIO,
        message: Message,
        *,
        to: To = None,
        timeout: Duration | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> Coroutine[Any, Any, SendReceipt]:
        """Send a message; ``extra`` are protocol properties. Checks it immediately."""
        if self._scopes:
            ready_of = functools.partial(self._ready_one, extra)
            return self._send_in_scopes(
                io, [message], ready_of, to, timeout, self._attempt, self._receipt
            )
        ready = self._ready(message, extra)
        return self._deliver(io, ready, to, timeout, self._attempt, self._receipt)

    def send_batch(
        self,
        io: SendIO,
        messages: Sequence[Message],
        *,
        to: To = None,
        timeout: Duration | None = None,
    ) -> Coroutine[Any, Any, SendReceipt]:
        """Send messages of one topic as one batch. Checks them immediately."""
        if self._scopes:
            return self._send_in_scopes(
                io, messages, self._ready_batch, to, timeout, self._attempt, self._receipt
            )
        ready = self._ready_batch(messages)
        return self._deliver(io, ready, to, timeout, self._attempt, self._receipt)

    def send_ready(
        self, io: SendIO, sent: Outgoing, *, to: To = None, timeout: Duration | None = None
    ) -> Coroutine[Any, Any, SendReceipt]:
        """Send an encoded message, bypassing scopes."""
        return self._deliver(io, sent, to, timeout, self._attempt, self._receipt)

    def send_oneway(
        self, io: SendIO, message: Message, *, to: To = None, timeout: Duration | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send a message without waiting for a response. Checks it immediately."""
        if self._scopes:
            ready_of = functools.partial(self._ready_one, None)
            return self._send_in_scopes(
                io, [message], ready_of, to, timeout, self._attempt_oneway, _no_receipt
            )
        ready = self._ready(message, None)
        return self._deliver(io, ready, to, timeout, self._attempt_oneway, _no_receipt)

    async def route(self, io: SendIO, topic: str, end_ms: int) -> tuple[MessageQueue, ...]:
        """Return the writable queues of a topic, as brokers name them."""
        known = self._known_queues(topic)
        if known is not None:
            return known
        return await io.wait(functools.partial(self._find_route, topic, end_ms))

    def _known_queues(self, topic: str) -> tuple[MessageQueue, ...] | None:
        cached = self._session.cached_route(topic)
        # Earlier waiters for the same route go first.
        if cached is None or not cached.writable or topic in self._lookups:
            return None
        return cached.writable

    def header(self, sent: Outgoing, queue: MessageQueue) -> SendMessage:
        return self._request(sent, queue).header

    def end_ms(self, timeout: Duration | None) -> int:
        return self._clock.monotonic_ms() + self.limit_ms(timeout)

    def limit_ms(self, timeout: Duration | None) -> int:
        """Return the time limit of a call; raises InvalidArgument for less than 1 ms."""
        if timeout is None:
            return self._limit_ms
        return milliseconds("timeout", timeout)

    def broker_topic(self, topic: str) -> str:
        """Return a topic's name as brokers know it."""
        return with_namespace(self._namespace, topic)

    def user_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return a queue with its topic's name as the application knows it."""
        if not self._namespace:
            return queue
        topic = without_namespace(self._namespace, queue.topic)
        return MessageQueue(topic, queue.broker, queue.queue_id)

    # --- one message ------------------------------------------------------------------------------

    def _ready(self, message: Message, extra: Mapping[str, str] | None) -> Outgoing:
        return outgoing(message, self.ids.next(), self._config.messages, self._namespace, extra)

    def _ready_batch(self, messages: Sequence[Message]) -> Outgoing:
        try:
            count = len(messages)
        except TypeError:
            kind = type(messages).__name__
            raise InvalidArgument(f"send_batch() expects a list of messages, got {kind}") from None
        ids = self.ids.many(count)
        return outgoing_batch(messages, ids, self._config.messages, self._namespace)

    def _ready_one(self, extra: Mapping[str, str] | None, messages: Sequence[Message]) -> Outgoing:
        (message,) = messages
        return self._ready(message, extra)

    async def _send_in_scopes(
        self,
        io: SendIO,
        messages: Sequence[Message],
        ready_of: Callable[[Sequence[Message]], Outgoing],
        to: To,
        timeout: Duration | None,
        attempt: Attempt[A],
        receipt_of: ReceiptOf[A, R],
    ) -> R:
        """Enter the scopes, the first one outermost, and send what they make of the messages."""
        with ExitStack() as stack:
            for scope in self._scopes:
                messages = stack.enter_context(scope.sending(self._group, messages))
            ready = ready_of(messages)
            return await self._deliver(io, ready, to, timeout, attempt, receipt_of)

    async def _deliver(
        self,
        io: SendIO,
        sent: Outgoing,
        to: To,
        timeout: Duration | None,
        attempt: Attempt[A],
        receipt_of: ReceiptOf[A, R],
    ) -> R:
        limit_ms = left_ms = self._limit_ms if timeout is None else self.limit_ms(timeout)
        now_ms = self._clock.monotonic_ms()
        end_ms = now_ms + limit_ms
        queues = self._known_queues(sent.topic) if to is None else None
        queue = None if queues is None else self._choice.next(queues, (), now_ms)
        retries: SendRetries | None = None
        while True:
            try:
                if queue is None:
                    avoided = () if retries is None else retries.avoided
                    queue = await self._queue(io, sent, to, avoided, end_ms)
                    left_ms = self._left_ms(end_ms, limit_ms)
                receipt = receipt_of(sent, queue, await attempt(io, sent, queue, left_ms))
            except (NetworkError, NoRoute, RemoteError) as error:
                retries = retries or self._retries(sent, to, end_ms)
                if not retries.after_error(error, queue):
                    raise
                _log.info("message %s to %s: %s; trying again", sent.message_id, queue, error)
            else:
                if receipt is None or receipt.status is SendStatus.OK:
                    return receipt
                retries = retries or self._retries(sent, to, end_ms)
                if not self._config.retry_unless_ok or not retries.after_failure(queue):
                    return receipt
            if to is not None and queue is not None:
                # Whatever a function would choose now: the messages before it are in this queue.
                to = queue
            queue = None
            if retries.pause_ms:
                await io.wait(retries.pause)

    def _left_ms(self, end_ms: int, limit_ms: int) -> int:
        left_ms = end_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            raise RequestTimeout(f"no broker accepted the message within {limit_ms} ms")
        return left_ms

    def _retries(self, sent: Outgoing, to: To, end_ms: int) -> SendRetries:
        # A second copy of a half message would also be committed by the broker's check.
        return SendRetries(
            self._session,
            sent.topic,
            self._config,
            end_ms,
            is_chosen=to is not None,
            may_repeat=not sent.is_half,
        )

    def _attempt(
        self, io: SendIO, sent: Outgoing, queue: MessageQueue, timeout_ms: int
    ) -> Awaitable[Response]:
        if self._hooks or self._faults is not None:
            return self._observed_attempt(io, sent, queue, timeout_ms)
        address = self._session.address_to_write(queue.broker)
        return io.request(address, self._request(sent, queue), timeout_ms)

    async def _observed_attempt(
        self, io: SendIO, sent: Outgoing, queue: MessageQueue, timeout_ms: int
    ) -> Response:
        for hook in self._hooks:
            hook.before_send(self._group, sent, queue)
        start_ms = self._clock.monotonic_ms()
        try:
            address = self._session.address_to_write(queue.broker)
            answer = await io.request(address, self._request(sent, queue), timeout_ms)
            receipt = self._receipt(sent, queue, answer)
        except TurbopumpError as error:
            self._note_latency(queue.broker, FAILURE_LATENCY_MS)
            for hook in self._hooks:
                hook.after_send(self._group, sent, queue, error)
            raise
        self._note_latency(queue.broker, self._clock.monotonic_ms() - start_ms)
        for hook in self._hooks:
            hook.after_send(self._group, sent, queue, receipt)
        return answer

    def _attempt_oneway(
        self, io: SendIO, sent: Outgoing, queue: MessageQueue, timeout_ms: int
    ) -> Awaitable[None]:
        address = self._session.address_to_write(queue.broker)
        for hook in self._hooks:
            hook.before_send(self._group, sent, queue)
        return io.oneway(address, self._request(sent, queue), timeout_ms)

    def _note_latency(self, broker: str, latency_ms: int) -> None:
        if self._faults is not None:
            self._faults.note(broker, latency_ms, self._clock.monotonic_ms())

    def _request(self, sent: Outgoing, queue: MessageQueue) -> SendRequest:
        key = sent.topic, queue.broker, sent.is_batch
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _KINDS_MAX:
                self._kinds.clear()
            topic, broker, is_batch = key
            kind = self._kinds[key] = send_kind(
                self._group, topic, broker, self._new_topic_queues, is_batch, self._unit_mode
            )
        return sent.request_of(kind, queue, self._clock.now_ms())

    async def _queue(
        self, io: SendIO, sent: Outgoing, to: To, avoided: Collection[str], end_ms: int
    ) -> MessageQueue:
        if isinstance(to, MessageQueue):
            topic = self.broker_topic(to.topic)
            if topic != sent.topic:
                raise InvalidArgument(
                    f"to must be a queue of the message's topic {sent.topic!r}, got {to}"
                )
            if not self._session.has_broker(to.broker):
                await self.route(io, sent.topic, end_ms)
            return MessageQueue(topic, to.broker, to.queue_id)
        queues = await self.route(io, sent.topic, end_ms)
        if to is None:
            return self._choice.next(queues, avoided, self._clock.monotonic_ms())
        if not callable(to):
            raise InvalidArgument(
                f'to must be a MessageQueue or a function such as by_hash("key"), got {to!r}'
            )
        chosen = to(tuple(map(self.user_queue, queues)) if self._namespace else queues)
        if not isinstance(chosen, MessageQueue):
            raise InvalidArgument(f"to() must return one of the queues, got {chosen!r}")
        return MessageQueue(sent.topic, chosen.broker, chosen.queue_id)

    async def _find_route(self, topic: str, end_ms: int) -> tuple[MessageQueue, ...]:
        left_ms = max(end_ms - self._clock.monotonic_ms(), 0)
        waiting = self._lookups.setdefault(topic, FifoWaiters())
        try:
            async with time_limit(left_ms / 1000):
                found = await waiting.after(
                    self._session.route_to_send(topic, self._new_topic_queues)
                )
                return found.writable
        except TimeoutError as error:
            raise RequestTimeout(
                f"no name server answered in time where topic {topic} is"
            ) from error
        finally:
            if waiting.is_empty:
                self._lookups.pop(topic, None)

    def _receipt(self, sent: Outgoing, queue: MessageQueue, answer: Response) -> SendReceipt:
        stored = calls.stored(answer)
        place = queue
        if stored.queue_id != queue.queue_id or sent.topic != queue.topic:
            place = MessageQueue(sent.topic, queue.broker, stored.queue_id)
        return SendReceipt(
            sent.message_id,
            stored.offset_id,
            self.user_queue(place) if self._namespace else place,
            stored.queue_offset,
            stored.status,
            stored.region,
        )


def _no_receipt(_: Outgoing, __: MessageQueue, ___: None) -> None:
    """Return the result of a one-way send."""


def unique_ids(session: Session) -> UniqueIds:
    """Return a generator function of ids that are unique within the process."""
    ip = host(own_address(), 0).ip
    maker = session.random.getrandbits(32)
    return UniqueIds(session.clock, ip, session.pid, maker)
