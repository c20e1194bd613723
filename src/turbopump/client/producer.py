"""Sending messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, TypeVar

from turbopump.client import calls
from turbopump.client.calls import SendStatus, Stored
from turbopump.client.config import ClientConfig, own_address
from turbopump.client.members import ProducerMember
from turbopump.client.names import check_group, with_namespace, without_namespace
from turbopump.client.outgoing import Outgoing, outgoing, outgoing_batch
from turbopump.client.producer_config import ProducerConfig
from turbopump.client.queue_choice import FAILURE_LATENCY_MS, BrokerFaults, QueueChoice
from turbopump.client.replies import Reply, reply_properties, reply_topic, request_properties
from turbopump.client.selectors import Selector
from turbopump.client.send_hooks import OnSent, SendHook, SendReceipt, SendScope
from turbopump.client.send_retries import SendRetries
from turbopump.client.session import Session
from turbopump.client.shared_sessions import client_config, shared_session
from turbopump.client.submitted import Submitted
from turbopump.errors import (
    NetworkError,
    NoRoute,
    NotRunning,
    RemoteError,
    RequestTimeout,
    TurbopumpError,
)
from turbopump.message import Message, MessageQueue
from turbopump.supervisor import Supervisor
from turbopump.wire.headers import CheckTransactionState, SendMessage
from turbopump.wire.hosts import host
from turbopump.wire.ids import UniqueIds
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

To = MessageQueue | Selector | None
"""Where to: a queue, a function that chooses one, or None for the next in turn."""

R = TypeVar("R", bound=SendReceipt | None)


class Producer(ProducerMember):
    """Sends messages to a cluster.

    ::

        async with Producer("orders-producer", nameserver="127.0.0.1:9876") as producer:
            receipt = await producer.send(Message("orders", b"hello", tags="created"))

    Many sends may run at the same time; they share connections, and their number is what makes a
    producer fast. ``session`` is for those who share one by hand or run in virtual time.
    """

    def __init__(
        self,
        group: str,
        *,
        nameserver: str = "",
        namespace: str = "",
        config: ProducerConfig | None = None,
        client: ClientConfig | None = None,
        session: Session | None = None,
        hooks: Sequence[SendHook] = (),
    ) -> None:
        check_group(group)
        self._client = client_config(nameserver, namespace, client, session)
        self.group = with_namespace(self._client.namespace, group)
        self._config = config or ProducerConfig()
        self._given_session = session
        self._hooks = tuple(hooks)
        self._scopes = tuple(hook for hook in self._hooks if isinstance(hook, SendScope))
        self._running: Running | None = None

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin; connects to nobody before the first message."""
        if self._running is not None:
            return
        session = self._given_session or shared_session(self._client, self)
        await session.start()
        try:
            await session.join(self)
        except BaseException:
            await session.leave(self)
            await session.close()
            raise
        self._running = Running(session, self._config)

    async def close(self) -> None:
        """Wait for messages on their way, then leave."""
        running, self._running = self._running, None
        if running is not None:
            running.session.require_own_process()
            try:
                await running.finish()
            finally:
                await running.session.leave(self)
                await running.session.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- sending ----------------------------------------------------------------------------------

    async def send(
        self, message: Message, *, to: To = None, timeout_ms: int | None = None
    ) -> SendReceipt:
        """Send a message and return where it was stored.

        Without ``to`` the queues of the topic take turns and a failed try is repeated elsewhere;
        with it there is one try, since order would suffer from a second. In both cases the send
        waits within its time for a broker that is busy, restarting or not reachable.

        ::

            receipt = await producer.send(Message("orders", b"hello"), to=by_hash("customer-42"))
        """
        return await self._send(self._require_running(), message, to, timeout_ms)

    async def send_batch(
        self, messages: Sequence[Message], *, to: To = None, timeout_ms: int | None = None
    ) -> SendReceipt:
        """Send messages of one topic to one queue, together or not at all; see `split_batch`.

        ::

            await producer.send_batch([Message("orders", b"1"), Message("orders", b"2")])
        """
        running = self._require_running()
        with self._around(messages) as given:
            ids = [running.ids.next() for _ in given]
            sent = outgoing_batch(given, ids, self._config.messages, self._client.namespace)
            return await self._deliver(running, sent, to, timeout_ms, self._try)

    async def send_ready(
        self, sent: Outgoing, *, to: To = None, timeout_ms: int | None = None
    ) -> SendReceipt:
        """Send what is encoded already, see `turbopump.client.outgoing`; no scope is entered.

        ::

            await producer.send_ready(encoded_batch("orders", message_id, body, rules))
        """
        running = self._require_running()
        return await self._deliver(running, sent, to, timeout_ms, self._try)

    async def submit(
        self,
        message: Message,
        *,
        to: To = None,
        timeout_ms: int | None = None,
        on_sent: OnSent | None = None,
    ) -> asyncio.Future[SendReceipt]:
        """Hand a message over and return a promise of its receipt, to send many at a time.

        Waits for a place when too many are on their way. ``on_sent`` is called on the event loop,
        exactly once, and must not block.

        ::

            promises = [await producer.submit(message) for message in messages]
            receipts = await asyncio.gather(*promises)
        """
        running = self._require_running()
        await running.submitted.places.acquire()
        try:
            self._require_running()
            task = running.tasks.start(self._send(running, message, to, timeout_ms))
        except BaseException:
            running.submitted.places.release()
            raise
        running.submitted.follow(task, on_sent)
        return task

    async def send_oneway(
        self, message: Message, *, to: To = None, timeout_ms: int | None = None
    ) -> None:
        """Send a message without hearing what becomes of it: fastest, and it may be lost.

        ::

            await producer.send_oneway(Message("metrics", b"42"))
        """
        running = self._require_running()
        with self._around([message]) as (given,):
            sent = self._ready(running, given, None)
            await self._deliver(running, sent, to, timeout_ms, self._try_oneway)

    async def request(
        self, message: Message, *, to: To = None, timeout_ms: int | None = None
    ) -> Reply:
        """Send a message that somebody replies to, and return the reply; raises RequestTimeout.

        Who consumes the message replies with `reply`.

        ::

            reply = await producer.request(Message("prices", b"EUR"), timeout_ms=2000)
        """
        running = self._require_running()
        session = running.session
        limit_ms = timeout_ms or self._config.send_timeout_ms
        if session.cached_route(self._known_as(message.topic)) is None:
            # Brokers push replies to clients that they have heard of.
            end_ms = self._end_ms(running, timeout_ms)
            await self._route(running, self._known_as(message.topic), end_ms)
            await session.heartbeat()
        with session.replies.expected() as (correlation_id, promise):
            extra = request_properties(correlation_id, session.client_id, limit_ms)
            try:
                async with asyncio.timeout(limit_ms / 1000):
                    await self._send(running, message, to, limit_ms, extra)
                    return await promise
            except TimeoutError:
                raise RequestTimeout(f"no reply came within {limit_ms} ms") from None

    async def reply(
        self, request: MessageView, body: bytes, *, timeout_ms: int | None = None
    ) -> None:
        """Reply to a message that was sent with `request`; raises when nobody waits any more.

        ::

            await producer.reply(message, b"1.08")
        """
        running = self._require_running()
        message = Message(reply_topic(request), body)
        rules, extra = self._config.messages, reply_properties(request)
        sent = outgoing(message, running.ids.next(), rules, extra=extra)
        # To the broker that has the request: it knows the client that sent it.
        queue, address = MessageQueue(sent.topic, "", 0), str(request.store_host)
        header = self._header(running, sent, queue)
        limit_ms = timeout_ms or self._config.send_timeout_ms
        await calls.send_reply(running.session, address, header, sent.body, limit_ms)

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues that messages of a topic can be sent to.

        ::

            queues = await producer.queues("orders")
        """
        running = self._require_running()
        end_ms = self._end_ms(running, None)
        route = await self._route(running, self._known_as(topic), end_ms)
        return tuple(self._shown(queue) for queue in route)

    def check_transaction(
        self, broker_address: str, asked: CheckTransactionState, message: MessageView
    ) -> None:
        """Say that the question is lost here: a broker picks any producer of the group."""
        _log.error(
            "broker %s asked for the state of transaction %s, which a Producer cannot tell: all"
            " producers of group %s must be TransactionProducer",
            broker_address,
            asked.transaction_id or message.message_id,
            self.group,
        )

    # --- one message, try by try ------------------------------------------------------------------

    async def _send(
        self,
        running: Running,
        message: Message,
        to: To,
        timeout_ms: int | None,
        extra: Mapping[str, str] | None = None,
    ) -> SendReceipt:
        if not self._scopes:
            ready = self._ready(running, message, extra)
            return await self._deliver(running, ready, to, timeout_ms, self._try)
        with self._around([message]) as (given,):
            ready = self._ready(running, given, extra)
            return await self._deliver(running, ready, to, timeout_ms, self._try)

    def _ready(
        self, running: Running, message: Message, extra: Mapping[str, str] | None
    ) -> Outgoing:
        namespace = self._client.namespace
        return outgoing(message, running.ids.next(), self._config.messages, namespace, extra)

    @contextmanager
    def _around(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Enter the scopes, the first one outermost."""
        with ExitStack() as stack:
            for scope in self._scopes:
                messages = stack.enter_context(scope.sending(self.group, messages))
            yield messages

    async def _deliver(
        self,
        running: Running,
        sent: Outgoing,
        to: To,
        timeout_ms: int | None,
        attempt: Callable[[Running, Outgoing, MessageQueue, int], Awaitable[R]],
    ) -> R:
        clock = running.session.clock
        limit_ms = timeout_ms or self._config.send_timeout_ms
        end_ms = self._end_ms(running, limit_ms)
        retries: SendRetries | None = None
        while True:
            queue = None
            try:
                avoided = () if retries is None else retries.avoided
                queue = await self._queue(running, sent, to, avoided, end_ms)
                left_ms = end_ms - clock.monotonic_ms()
                if left_ms <= 0:
                    raise RequestTimeout(f"no broker took the message within {limit_ms} ms")
                receipt = await attempt(running, sent, queue, left_ms)
            except (NetworkError, NoRoute, RemoteError) as error:
                retries = retries or self._retries(running, sent, to, end_ms)
                if not retries.after_error(error, queue):
                    raise
                _log.info("message %s to %s: %s; trying again", sent.message_id, queue, error)
            else:
                if receipt is None or receipt.status is SendStatus.OK:
                    return receipt
                retries = retries or self._retries(running, sent, to, end_ms)
                if not self._config.retry_unless_ok or not retries.after_failure(queue):
                    return receipt
            if to is not None and queue is not None:
                # Whatever a function would choose now: the messages before are in this queue.
                to = queue
            await retries.pause()

    def _retries(self, running: Running, sent: Outgoing, to: To, end_ms: int) -> SendRetries:
        # A second copy of a half message would be committed too, by the broker's check.
        return SendRetries(
            running.session,
            sent.topic,
            self._config,
            end_ms,
            is_chosen=to is not None,
            may_repeat=not sent.is_half,
        )

    async def _try(
        self, running: Running, sent: Outgoing, queue: MessageQueue, timeout_ms: int
    ) -> SendReceipt:
        for hook in self._hooks:
            hook.before_send(self.group, sent, queue)
        clock = running.session.clock
        start_ms = clock.monotonic_ms()
        try:
            address = running.session.address_to_write(queue.broker)
            header = self._header(running, sent, queue)
            stored = await calls.send(running.session, address, header, sent.body, timeout_ms)
        except TurbopumpError as error:
            running.note(queue.broker, FAILURE_LATENCY_MS)
            for hook in self._hooks:
                hook.after_send(self.group, sent, queue, error)
            raise
        running.note(queue.broker, clock.monotonic_ms() - start_ms)
        receipt = self._receipt(sent, queue, stored)
        for hook in self._hooks:
            hook.after_send(self.group, sent, queue, receipt)
        return receipt

    async def _try_oneway(
        self, running: Running, sent: Outgoing, queue: MessageQueue, timeout_ms: int
    ) -> None:
        address = running.session.address_to_write(queue.broker)
        for hook in self._hooks:
            hook.before_send(self.group, sent, queue)
        header = self._header(running, sent, queue)
        await calls.send_oneway(running.session, address, header, sent.body, timeout_ms)

    def _end_ms(self, running: Running, timeout_ms: int | None) -> int:
        """Return until when something may take."""
        limit_ms = timeout_ms or self._config.send_timeout_ms
        return running.session.clock.monotonic_ms() + limit_ms

    async def _queue(
        self, running: Running, sent: Outgoing, to: To, avoided: Collection[str], end_ms: int
    ) -> MessageQueue:
        if isinstance(to, MessageQueue):
            if not running.session.has_broker(to.broker):
                await self._route(running, sent.topic, end_ms)
            return MessageQueue(self._known_as(to.topic), to.broker, to.queue_id)
        queues = await self._route(running, sent.topic, end_ms)
        if to is None:
            return running.choice.next(queues, avoided, running.session.clock.monotonic_ms())
        chosen = to(tuple(map(self._shown, queues)) if self._client.namespace else queues)
        return MessageQueue(sent.topic, chosen.broker, chosen.queue_id)

    async def _route(self, running: Running, topic: str, end_ms: int) -> tuple[MessageQueue, ...]:
        cached = running.session.cached_route(topic)
        if cached is not None and cached.writable:
            return cached.writable
        wanted = self._config.messages.new_topic_queues
        left_ms = max(end_ms - running.session.clock.monotonic_ms(), 0)
        try:
            async with asyncio.timeout(left_ms / 1000):
                return (await running.session.route_to_send(topic, wanted)).writable
        except TimeoutError as error:
            raise RequestTimeout(f"no name server told in time where {topic} is") from error

    def _header(self, running: Running, sent: Outgoing, queue: MessageQueue) -> SendMessage:
        wanted = self._config.messages.new_topic_queues
        return sent.header(self.group, queue, running.session.clock.now_ms(), wanted)

    def _receipt(self, sent: Outgoing, queue: MessageQueue, stored: Stored) -> SendReceipt:
        place = MessageQueue(sent.topic, queue.broker, stored.queue_id)
        return SendReceipt(
            sent.message_id,
            stored.offset_id,
            self._shown(place),
            stored.queue_offset,
            stored.status,
            stored.region,
        )

    def _known_as(self, topic: str) -> str:
        return with_namespace(self._client.namespace, topic)

    def _shown(self, queue: MessageQueue) -> MessageQueue:
        """Return a queue as the application knows it."""
        if not self._client.namespace:
            return queue
        topic = without_namespace(self._client.namespace, queue.topic)
        return MessageQueue(topic, queue.broker, queue.queue_id)

    def _require_running(self) -> Running:
        if self._running is None:
            raise NotRunning(
                f"producer {self.group!r} is not running: use it inside `with`, or call start()"
            )
        return self._running


class Running:
    """What a producer has from its start to its close."""

    def __init__(self, session: Session, config: ProducerConfig) -> None:
        self.session = session
        self.tasks = Supervisor()
        self.submitted = Submitted(config.in_flight_max)
        self._faults = BrokerFaults() if config.avoid_slow_brokers else None
        self.choice = QueueChoice(session.random, self._faults)
        self.ids = unique_ids(session)

    def note(self, broker: str, latency_ms: int) -> None:
        """Remember how fast a broker was, if that is wanted."""
        if self._faults is not None:
            self._faults.note(broker, latency_ms, self.session.clock.monotonic_ms())

    async def finish(self) -> None:
        """Wait for all that was submitted; each has its own time limit."""
        await self.tasks.wait()
        self.submitted.close()


def unique_ids(session: Session) -> UniqueIds:
    """Return what makes ids that nobody else in the process makes."""
    ip = host(own_address(), 0).ip
    maker = session.random.getrandbits(32)
    return UniqueIds(session.clock, ip, session.pid, maker)
