"""How messages are sent: route, queue, attempt, outcome, then the next attempt or an error.

The decisions are the same for event loops and for threads. Whatever takes time goes through a
`SendIO`, and nothing else is awaited. With one that blocks, `run_to_end` runs a send on the
caller's thread, without any event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from turbopump.client import calls
from turbopump.client.background import LoopThread
from turbopump.client.calls import SendStatus, Stored
from turbopump.client.config import own_address
from turbopump.client.names import with_namespace, without_namespace
from turbopump.client.outgoing import Outgoing, outgoing, outgoing_batch
from turbopump.client.producer_config import ProducerConfig
from turbopump.client.queue_choice import FAILURE_LATENCY_MS, BrokerFaults, QueueChoice
from turbopump.client.selectors import Selector
from turbopump.client.send_hooks import SendHook, SendReceipt, SendScope
from turbopump.client.send_retries import SendRetries
from turbopump.client.session import Session
from turbopump.errors import (
    InvalidArgument,
    NetworkError,
    NoRoute,
    RemoteError,
    RequestTimeout,
    TurbopumpError,
)
from turbopump.message import Message, MessageQueue
from turbopump.net.in_order import InOrder
from turbopump.net.limits import require_at_least
from turbopump.wire.command import Command
from turbopump.wire.headers import SendMessage
from turbopump.wire.hosts import host
from turbopump.wire.ids import UniqueIds

_log = logging.getLogger(__name__)

To = MessageQueue | Selector | None
"""Where to: a queue, a function that chooses one, or None for the next in turn."""

T = TypeVar("T")
R = TypeVar("R", bound=SendReceipt | None)


class SendIO(calls.Caller, Protocol):
    """What a send waits for."""

    async def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something that needs the session's event loop, such as a route lookup."""
        ...


class LoopIO:
    """Sends over the session's connections, on its event loop."""

    def __init__(self, session: Session) -> None:
        self.request = session.request
        self.oneway = session.oneway

    async def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await work()


class ThreadIO:
    """Sends over a connection of the calling thread, and never suspends."""

    def __init__(self, session: Session, thread: LoopThread) -> None:
        self._session = session
        self._thread = thread

    async def request(self, address: str, command: Command, timeout_ms: int) -> Command:
        return self._session.blocking_pool().request(address, command, timeout_ms)

    async def oneway(self, address: str, command: Command, timeout_ms: int) -> None:
        self._session.blocking_pool().oneway(address, command, timeout_ms)

    async def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._thread.run(work())


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
        self._hooks = tuple(hooks)
        self._scopes = tuple(hook for hook in hooks if isinstance(hook, SendScope))
        self._faults = BrokerFaults() if config.avoid_slow_brokers else None
        self._choice = QueueChoice(session.random, self._faults)
        self._lookups: dict[str, InOrder] = {}
        """The sends that wait for the route of a topic."""
        self.ids = unique_ids(session)

    async def send(
        self,
        io: SendIO,
        message: Message,
        *,
        to: To = None,
        timeout_ms: int | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> SendReceipt:
        """Send a message; ``extra`` are properties of the protocol."""
        if not self._scopes:
            ready = self._ready(message, extra)
            return await self._deliver(io, ready, to, timeout_ms, self._attempt)
        with self._around([message]) as (given,):
            ready = self._ready(given, extra)
            return await self._deliver(io, ready, to, timeout_ms, self._attempt)

    async def send_batch(
        self,
        io: SendIO,
        messages: Sequence[Message],
        *,
        to: To = None,
        timeout_ms: int | None = None,
    ) -> SendReceipt:
        """Send messages of one topic as one batch."""
        with self._around(messages) as given:
            ids = [self.ids.next() for _ in given]
            ready = outgoing_batch(given, ids, self._config.messages, self._namespace)
            return await self._deliver(io, ready, to, timeout_ms, self._attempt)

    async def send_ready(
        self, io: SendIO, sent: Outgoing, *, to: To = None, timeout_ms: int | None = None
    ) -> SendReceipt:
        """Send what is encoded already, past the scopes."""
        return await self._deliver(io, sent, to, timeout_ms, self._attempt)

    async def send_oneway(
        self, io: SendIO, message: Message, *, to: To = None, timeout_ms: int | None = None
    ) -> None:
        """Send a message without waiting for the broker's answer."""
        with self._around([message]) as (given,):
            ready = self._ready(given, None)
            await self._deliver(io, ready, to, timeout_ms, self._attempt_oneway)

    async def route(self, io: SendIO, topic: str, end_ms: int) -> tuple[MessageQueue, ...]:
        """Return the queues to write to of a topic, as brokers name them."""
        cached = self._session.cached_route(topic)
        if cached is not None and cached.writable and topic not in self._lookups:
            return cached.writable
        return await io.wait(functools.partial(self._find_route, topic, end_ms))

    def header(self, sent: Outgoing, queue: MessageQueue) -> SendMessage:
        """Return the header of a request that sends a message to a queue."""
        wanted = self._config.messages.new_topic_queues
        return sent.header(self._group, queue, self._clock.now_ms(), wanted)

    def end_ms(self, timeout_ms: int | None) -> int:
        """Return the deadline of a call."""
        return self._clock.monotonic_ms() + self.limit_ms(timeout_ms)

    def limit_ms(self, timeout_ms: int | None) -> int:
        """Return how long a call may take; raises InvalidArgument for less than 1 ms."""
        if timeout_ms is None:
            return self._config.send_timeout_ms
        require_at_least("timeout_ms", timeout_ms, 1)
        return timeout_ms

    def broker_topic(self, topic: str) -> str:
        """Return the name that brokers have for a topic."""
        return with_namespace(self._namespace, topic)

    def user_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return a queue with the name that the application has for its topic."""
        if not self._namespace:
            return queue
        topic = without_namespace(self._namespace, queue.topic)
        return MessageQueue(topic, queue.broker, queue.queue_id)

    # --- one message ------------------------------------------------------------------------------

    def _ready(self, message: Message, extra: Mapping[str, str] | None) -> Outgoing:
        return outgoing(message, self.ids.next(), self._config.messages, self._namespace, extra)

    @contextmanager
    def _around(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Enter the scopes, the first one outermost."""
        with ExitStack() as stack:
            for scope in self._scopes:
                messages = stack.enter_context(scope.sending(self._group, messages))
            yield messages

    async def _deliver(
        self,
        io: SendIO,
        sent: Outgoing,
        to: To,
        timeout_ms: int | None,
        attempt: Callable[[SendIO, Outgoing, MessageQueue, int], Awaitable[R]],
    ) -> R:
        limit_ms = self.limit_ms(timeout_ms)
        end_ms = self.end_ms(limit_ms)
        retries: SendRetries | None = None
        while True:
            queue = None
            try:
                avoided = () if retries is None else retries.avoided
                queue = await self._queue(io, sent, to, avoided, end_ms)
                left_ms = end_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    raise RequestTimeout(f"no broker accepted the message within {limit_ms} ms")
                receipt = await attempt(io, sent, queue, left_ms)
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
                # Whatever a function would choose now: the messages before are in this queue.
                to = queue
            if retries.pause_ms:
                await io.wait(retries.pause)

    def _retries(self, sent: Outgoing, to: To, end_ms: int) -> SendRetries:
        # A second copy of a half message would be committed too, by the broker's check.
        return SendRetries(
            self._session,
            sent.topic,
            self._config,
            end_ms,
            is_chosen=to is not None,
            may_repeat=not sent.is_half,
        )

    async def _attempt(
        self, io: SendIO, sent: Outgoing, queue: MessageQueue, timeout_ms: int
    ) -> SendReceipt:
        for hook in self._hooks:
            hook.before_send(self._group, sent, queue)
        start_ms = self._clock.monotonic_ms()
        try:
            address = self._session.address_to_write(queue.broker)
            header = self.header(sent, queue)
            stored = await calls.send(io, address, header, sent.body, timeout_ms)
        except TurbopumpError as error:
            self._note_latency(queue.broker, FAILURE_LATENCY_MS)
            for hook in self._hooks:
                hook.after_send(self._group, sent, queue, error)
            raise
        self._note_latency(queue.broker, self._clock.monotonic_ms() - start_ms)
        receipt = self._receipt(sent, queue, stored)
        for hook in self._hooks:
            hook.after_send(self._group, sent, queue, receipt)
        return receipt

    async def _attempt_oneway(
        self, io: SendIO, sent: Outgoing, queue: MessageQueue, timeout_ms: int
    ) -> None:
        address = self._session.address_to_write(queue.broker)
        for hook in self._hooks:
            hook.before_send(self._group, sent, queue)
        await calls.send_oneway(io, address, self.header(sent, queue), sent.body, timeout_ms)

    async def _queue(
        self, io: SendIO, sent: Outgoing, to: To, avoided: Collection[str], end_ms: int
    ) -> MessageQueue:
        if isinstance(to, MessageQueue):
            if not self._session.has_broker(to.broker):
                await self.route(io, sent.topic, end_ms)
            return MessageQueue(self.broker_topic(to.topic), to.broker, to.queue_id)
        queues = await self.route(io, sent.topic, end_ms)
        if to is None:
            return self._choice.next(queues, avoided, self._clock.monotonic_ms())
        if not callable(to):
            raise InvalidArgument(
                f'to must be a MessageQueue or a function such as by_hash("key"), got {to!r}'
            )
        chosen = to(tuple(map(self.user_queue, queues)) if self._namespace else queues)
        return MessageQueue(sent.topic, chosen.broker, chosen.queue_id)

    async def _find_route(self, topic: str, end_ms: int) -> tuple[MessageQueue, ...]:
        wanted = self._config.messages.new_topic_queues
        left_ms = max(end_ms - self._clock.monotonic_ms(), 0)
        waiting = self._lookups.setdefault(topic, InOrder())
        try:
            async with asyncio.timeout(left_ms / 1000):
                found = await waiting.after(self._session.route_to_send(topic, wanted))
                return found.writable
        except TimeoutError as error:
            raise RequestTimeout(
                f"no name server answered in time where topic {topic} is"
            ) from error
        finally:
            if waiting.is_empty:
                self._lookups.pop(topic, None)

    def _note_latency(self, broker: str, latency_ms: int) -> None:
        if self._faults is not None:
            self._faults.note(broker, latency_ms, self._clock.monotonic_ms())

    def _receipt(self, sent: Outgoing, queue: MessageQueue, stored: Stored) -> SendReceipt:
        place = MessageQueue(sent.topic, queue.broker, stored.queue_id)
        return SendReceipt(
            sent.message_id,
            stored.offset_id,
            self.user_queue(place),
            stored.queue_offset,
            stored.status,
            stored.region,
        )


def unique_ids(session: Session) -> UniqueIds:
    """Return a maker of ids that no other maker of the process repeats."""
    ip = host(own_address(), 0).ip
    maker = session.random.getrandbits(32)
    return UniqueIds(session.clock, ip, session.pid, maker)
