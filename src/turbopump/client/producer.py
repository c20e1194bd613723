"""Sending messages."""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
from collections.abc import Sequence
from typing import Unpack

from turbopump.client import calls
from turbopump.client.arguments import check_kind, checked, checked_hooks
from turbopump.client.config import ClientConfig
from turbopump.client.life_cycle import LifeCycle, leave, require_running, started
from turbopump.client.members import ProducerMember
from turbopump.client.message_sender import LoopIO, MessageSender, To
from turbopump.client.names import check_group, with_namespace
from turbopump.client.outgoing import Outgoing, outgoing
from turbopump.client.producer_config import ProducerConfig
from turbopump.client.replies import Reply, reply_properties, reply_topic, request_properties
from turbopump.client.send_hooks import OnSent, SendHook, SendReceipt
from turbopump.client.session import Session
from turbopump.client.shared_sessions import client_config, shared_session
from turbopump.durations import Duration
from turbopump.errors import NotRunning, RequestTimeout
from turbopump.machine.process import process_id
from turbopump.message import Message, MessageFields, MessageQueue
from turbopump.supervisor import Supervisor
from turbopump.timeouts import timeout as time_limit
from turbopump.wire.headers import CheckTransactionState
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)


class Producer(LifeCycle, ProducerMember):
    """Sends messages to a cluster.

    ::

        async with Producer("orders-producer", nameserver="127.0.0.1:9876") as producer:
            receipt = await producer.send(Message("orders", b"hello", tags="created"))

    Sends may run concurrently and share connections; throughput comes from concurrent sends. Pass
    ``session`` to share one explicitly or to run in virtual time.
    """

    def __init__(
        self,
        group: str,
        *,
        nameserver: str | Sequence[str] = "",
        namespace: str = "",
        config: ProducerConfig | None = None,
        client: ClientConfig | None = None,
        session: Session | None = None,
        hooks: Sequence[SendHook] = (),
    ) -> None:
        check_group(group)
        self._client = client_config(nameserver, namespace, client, session)
        self.group = with_namespace(self._client.namespace, group)
        self._config = checked("config", config, ProducerConfig)
        self._given_session = session
        self._hooks = checked_hooks("hooks", hooks, "before_send", "after_send")
        self._running: Running | None = None

    # --- life cycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start; connections open with the first message."""
        if self._running is not None:
            return
        session = self._given_session or shared_session(self._client, self)
        async with started(session, self):
            await session.join(self)
        sender = MessageSender(self.group, session, self._config, self._hooks)
        self._running = Running(session, sender, self._config.in_flight_max)

    async def close(self) -> None:
        """Wait for submitted messages, then leave the session."""
        running, self._running = self._running, None
        if running is not None:
            running.session.require_own_process()
            try:
                await running.finish()
            finally:
                await leave(running.session, self)

    # --- sending ----------------------------------------------------------------------------------

    async def send(
        self, message: Message, *, to: To = None, timeout: Duration | None = None
    ) -> SendReceipt:
        """Send a message and return its receipt.

        Without ``to``, the queues of the topic take turns and a failed attempt is retried
        elsewhere. With ``to``, there is a single attempt, since a retry could break the order. In
        both cases the send waits, up to its timeout, for a broker that is busy, restarting or
        unreachable.

        ::

            receipt = await producer.send(Message("orders", b"hello"), to=by_hash("customer-42"))
        """
        running = self._running or self.running
        return await running.sender.send(running.io, message, to=to, timeout=timeout)

    async def send_json(
        self,
        topic: str,
        value: object,
        *,
        to: To = None,
        timeout: Duration | None = None,
        **fields: Unpack[MessageFields],
    ) -> SendReceipt:
        """Send a value in JSON, as `send` does; ``fields`` are further fields of the `Message`.

        Functions decorated with `turbopump.consumer` and `MessageView.json` read the same types.

        ::

            await producer.send_json("orders", Order(42, 10.0), tags="created", keys=["42"])
        """
        message = Message.with_json(topic, value, **fields)
        return await self.send(message, to=to, timeout=timeout)

    async def send_batch(
        self, messages: Sequence[Message], *, to: To = None, timeout: Duration | None = None
    ) -> SendReceipt:
        """Send messages of one topic to one queue, all or none; see `split_batch`.

        ::

            await producer.send_batch([Message("orders", b"1"), Message("orders", b"2")])
        """
        running = self.running
        return await running.sender.send_batch(running.io, messages, to=to, timeout=timeout)

    async def send_ready(
        self, sent: Outgoing, *, to: To = None, timeout: Duration | None = None
    ) -> SendReceipt:
        """Send an encoded message, bypassing scopes; see `turbopump.client.outgoing`.

        ::

            await producer.send_ready(encoded_batch("orders", message_id, body, rules))
        """
        running = self.running
        return await running.sender.send_ready(running.io, sent, to=to, timeout=timeout)

    async def submit(
        self,
        message: Message,
        *,
        to: To = None,
        timeout: Duration | None = None,
        on_sent: OnSent | None = None,
    ) -> asyncio.Future[SendReceipt]:
        """Hand a message over and return a future of its receipt, to keep many sends in flight.

        Wait while too many sends are in flight. ``on_sent`` is called exactly once, on the event
        loop, and must not block.

        ::

            promises = [await producer.submit(message) for message in messages]
            receipts = await asyncio.gather(*promises)
        """
        running = self.running
        await running.submitted.places.acquire()
        try:
            # Raises if the producer was closed meanwhile.
            tasks = self.running.tasks
            task = tasks.start(running.send(message, to, timeout))
        except BaseException:
            running.submitted.places.release()
            raise
        running.submitted.follow(task, on_sent)
        return task

    async def send_oneway(
        self, message: Message, *, to: To = None, timeout: Duration | None = None
    ) -> None:
        """Send a message without an acknowledgement: fastest, but messages may be lost."""
        running = self.running
        await running.sender.send_oneway(running.io, message, to=to, timeout=timeout)

    async def request(
        self, message: Message, *, to: To = None, timeout: Duration | None = None
    ) -> Reply:
        """Send a message and return its reply; raises RequestTimeout.

        The consumer of the message replies with `reply`.

        ::

            reply = await producer.request(Message("prices", b"EUR"), timeout=2)
        """
        check_kind("request()", message, Message)
        running = self.running
        session, sender = running.session, running.sender
        limit_ms = sender.limit_ms(timeout)
        topic = sender.broker_topic(message.topic)
        if session.cached_route(topic) is None:
            # Brokers push replies only to clients that they know.
            await sender.route(running.io, topic, sender.end_ms(timeout))
            await session.heartbeat()
        with session.replies.expected() as (correlation_id, promise):
            extra = request_properties(correlation_id, session.client_id, limit_ms)
            try:
                async with time_limit(limit_ms / 1000):
                    await sender.send(
                        running.io, message, to=to, timeout=limit_ms / 1000, extra=extra
                    )
                    return await promise
            except TimeoutError:
                raise RequestTimeout(f"no reply came within {limit_ms} ms") from None

    async def reply(
        self, request: MessageView, body: bytes, *, timeout: Duration | None = None
    ) -> None:
        """Reply to a message sent with `request`; raises if the requester stopped waiting.

        ::

            await producer.reply(message, b"1.08")
        """
        check_kind("reply()", request, MessageView)
        running = self.running
        message = Message(reply_topic(request), body)
        rules, extra = self._config.messages, reply_properties(request)
        sent = outgoing(message, running.sender.ids.next(), rules, extra=extra)
        # To the broker that has the request: it knows the client that sent it.
        queue, address = MessageQueue(sent.topic, "", 0), str(request.store_host)
        header = running.sender.header(sent, queue)
        limit_ms = running.sender.limit_ms(timeout)
        await calls.send_reply(running.session, address, header, sent.body, limit_ms)

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues of a topic that accept messages."""
        running = self.running
        sender = running.sender
        route = await sender.route(running.io, sender.broker_topic(topic), sender.end_ms(None))
        return tuple(map(sender.user_queue, route))

    def check_transaction(
        self, broker_address: str, asked: CheckTransactionState, message: MessageView
    ) -> None:
        """Log that this producer cannot answer: a broker asks any producer of the group."""
        _log.error(
            "broker %s asked for the state of transaction %s, which a Producer cannot tell: all"
            " producers of group %s must be TransactionProducer",
            broker_address,
            asked.transaction_id or message.message_id,
            self.group,
        )

    @property
    def in_flight_max(self) -> int:
        """How many submitted messages may be in flight."""
        return self._config.in_flight_max

    @property
    def running(self) -> Running:
        """The state between start and close; raises NotRunning."""
        return require_running(self._running, "producer", self.group)


class Running:
    """The state of a producer between start and close."""

    def __init__(self, session: Session, sender: MessageSender, in_flight_max: int) -> None:
        self.session = session
        self.sender = sender
        self.io = LoopIO(session)
        self.tasks = Supervisor()
        self.submitted = Submitted(in_flight_max)

    async def send(self, message: Message, to: To, timeout: Duration | None) -> SendReceipt:
        """Send a message; defer its checks until this is awaited."""
        return await self.sender.send(self.io, message, to=to, timeout=timeout)

    async def finish(self) -> None:
        """Wait for all submitted messages; each has its own timeout."""
        await self.tasks.wait()
        self.submitted.close()


class Submitted:
    """The submitted messages of one running producer; the number without an outcome is bounded."""

    def __init__(self, count_max: int) -> None:
        self.places = asyncio.Semaphore(count_max)
        self._pending = 0
        self._cancelled = 0
        self._loop = asyncio.get_running_loop()
        self._pid = process_id()
        _running.add(self)

    def follow(self, task: asyncio.Task[SendReceipt], on_sent: OnSent | None) -> None:
        """Track a message that holds a slot, and free the slot when its outcome is known."""
        self._pending += 1
        task.add_done_callback(functools.partial(self._settle, on_sent))

    def close(self) -> None:
        """Expect no further messages."""
        _running.discard(self)

    def _settle(self, on_sent: OnSent | None, done: asyncio.Task[SendReceipt]) -> None:
        self.places.release()
        self._pending -= 1
        if done.cancelled():
            self._cancelled += 1
            if self._cancelled == 1:
                # A loop that ends cancels all of them together: log one line.
                self._loop.call_soon(self._report_cancelled)
            error: BaseException | None = NotRunning("the send was cancelled")
        else:
            error = done.exception()
            if on_sent is None and error is not None:
                # The future reports it too, but the program may never check it.
                _log.warning("a submitted message was not sent: %s", error)
        if on_sent is None:
            return
        if isinstance(error, Exception):
            _call_back(on_sent, None, error)
        elif error is None:
            _call_back(on_sent, done.result(), None)

    def _report_cancelled(self) -> None:
        _log.error(
            "%d submitted messages were cancelled before they were stored: close the producer"
            " before its event loop ends",
            self._cancelled,
        )
        self._cancelled = 0

    def report_lost(self) -> None:
        """Report messages whose event loop has ended, at process exit."""
        is_over = not self._loop.is_running()
        if self._pending and is_over and self._pid == process_id():
            _log.error(
                "%d submitted messages were not sent: their event loop ended, and the producer was"
                " not closed before",
                self._pending,
            )


def _call_back(on_sent: OnSent, receipt: SendReceipt | None, error: Exception | None) -> None:
    try:
        on_sent(receipt, error)
    except BaseException:  # noqa: BLE001 - the user's code must not end the loop
        _log.exception("the callback of a send failed")


_running: set[Submitted] = set()
"""Of open producers; not weak, or garbage collection would hide lost messages."""


@atexit.register
def _report_lost() -> None:
    for each in _running:
        each.report_lost()
