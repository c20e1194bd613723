"""Producers: each sends what the plan says, one message after the other or several concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar

from turbopump.client.calls import SendStatus
from turbopump.client.outgoing import Outgoing
from turbopump.client.producer import Producer
from turbopump.client.selectors import by_hash
from turbopump.client.send_hooks import SendReceipt
from turbopump.errors import TurbopumpError
from turbopump.message import Message, MessageQueue
from turbopump.testing.simulate.bodies import body_of
from turbopump.testing.simulate.events import (
    US_PER_S,
    Acknowledged,
    SendBegan,
    SendFailed,
    SendTried,
)
from turbopump.testing.simulate.plan import DELAYS_S, Send, SendMode
from turbopump.testing.simulate.world import World
from turbopump.wire.ids import parse_offset_id

_sending: ContextVar[tuple[str, ...]] = ContextVar("sending", default=())
"""The keys of the request that the running task sends."""


class Sender:
    """One producer, across its successive processes."""

    def __init__(self, world: World, name: str, sends: Sequence[Send]) -> None:
        self.name = name
        self._world = world
        self._sends = sends
        self._producer: Producer | None = None
        self._session = world.client(name)

    async def run(self) -> None:
        """Send everything."""
        await self._start()
        for send in self._sends:
            await asyncio.sleep(send.pause_s)
            await self.send(send)

    async def close(self) -> None:
        """Stop cleanly."""
        if self._producer is not None:
            await self._producer.close()

    async def crash(self) -> None:
        """Die and restart as another process; the message in flight may be sent or not."""
        producer, session = self._producer, self._session
        self._world.kill_client(session)
        self._session = self._world.client(self.name)
        await self._start()
        if producer is not None:
            await producer.close()

    async def _start(self) -> None:
        producer = Producer(self.name, session=self._session, hooks=[Tries(self.tried)])
        await producer.start()
        self._producer = producer

    # --- one message ------------------------------------------------------------------------------

    async def send(self, send: Send) -> None:
        """Send a message, a batch or several messages concurrently, and record the outcomes."""
        if send.beside:
            await asyncio.gather(*(self._send_one(part, in_burst=True) for part in send.parts()))
        else:
            await self._send_one(send)

    async def _send_one(self, send: Send, *, in_burst: bool = False) -> None:
        assert self._producer is not None, "started"
        _sending.set(send.keys)
        delay_us = DELAYS_S[send.delay_level - 1] * US_PER_S if send.delay_level else 0
        is_durable = send.mode not in (SendMode.UNFLUSHED, SendMode.ONE_WAY)
        for key in send.keys:
            self._note(
                SendBegan(
                    self._world.now_us, self.name, key, send.topic, delay_us, is_durable, in_burst
                )
            )
        try:
            receipt = await self._call(self._producer, send)
        except TurbopumpError as error:
            self._failed(send, type(error).__name__)
        else:
            self._stored(send, receipt)

    def tried(self) -> None:
        """Record that a request is sent."""
        for key in _sending.get():
            self._note(SendTried(self._world.now_us, self.name, key))

    def _call(self, producer: Producer, send: Send) -> Awaitable[SendReceipt | None]:
        messages = [
            Message(
                send.topic,
                body_of(key, send.size),
                delay_level=send.delay_level,
                wait_stored=send.mode is not SendMode.UNFLUSHED,
            )
            for key in send.keys
        ]
        match send.mode:
            case SendMode.BATCH:
                return producer.send_batch(messages)
            case SendMode.ORDERED:
                return producer.send(messages[0], to=by_hash(send.shard))
            case SendMode.ONE_WAY:
                return producer.send_oneway(messages[0])
            case _:
                return producer.send(messages[0])

    def _stored(self, send: Send, receipt: SendReceipt | None) -> None:
        if receipt is None:
            self._failed(send, "sent one way")
        elif receipt.status is not SendStatus.OK:
            self._failed(send, receipt.status.name)
        else:
            now_us, machine = self._world.now_us, self._machine_of(receipt)
            for offset, key in enumerate(send.keys, receipt.queue_offset):
                self._note(Acknowledged(now_us, self.name, key, receipt.queue, offset, machine))

    def _machine_of(self, receipt: SendReceipt) -> str:
        """Return which machine has stored a message, where that is not always the same."""
        if not self._world.plan.replicas.promotes:
            return ""
        store_host, _ = parse_offset_id(receipt.offset_id.partition(",")[0])
        return self._world.machine_at(store_host.address)

    def _failed(self, send: Send, reason: str) -> None:
        for key in send.keys:
            self._note(SendFailed(self._world.now_us, self.name, key, reason))

    def _note(self, event: SendBegan | SendTried | Acknowledged | SendFailed) -> None:
        self._world.history.add(event)


class Tries:
    """Records each request of a producer, retries included."""

    def __init__(self, tried: Callable[[], None]) -> None:
        self._tried = tried

    def before_send(self, group: str, sent: Outgoing, queue: MessageQueue) -> None:  # noqa: ARG002 - as the protocol has it
        self._tried()

    def after_send(
        self, group: str, sent: Outgoing, queue: MessageQueue, outcome: SendReceipt | Exception
    ) -> None:
        """See nothing: the send itself reports its outcome."""
