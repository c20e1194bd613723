"""Receipts of sent messages, and hooks around sending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from turbopump.client.calls import SendStatus
from turbopump.client.outgoing import Outgoing
from turbopump.message import Message, MessageQueue, QueueOffset


class SendReceipt(Struct, frozen=True, gc=False):
    """Where a message was stored.

    ::

        receipt = producer.send(Message("orders", b"hello"))
        print(receipt.message_id, receipt.queue, receipt.queue_offset)
    """

    message_id: str
    """The id that consumers see; for a batch, the ids joined by ","."""

    offset_id: str
    """The id that encodes where the message is stored; for a batch, the ids joined by ","."""

    queue: MessageQueue
    queue_offset: QueueOffset
    status: SendStatus = SendStatus.OK
    region: str | None = None


OnSent = Callable[[SendReceipt | None, Exception | None], None]
"""Called with the receipt, or with the error instead of it."""


class SendHook(Protocol):
    """Sees every outgoing message; its exceptions propagate to the sender.

    ::

        class Count:
            def before_send(self, group, sent, queue): ...
            def after_send(self, group, sent, queue, outcome): ...
    """

    def before_send(self, group: str, sent: Outgoing, queue: MessageQueue) -> None:
        """See a message before each attempt."""

    def after_send(
        self, group: str, sent: Outgoing, queue: MessageQueue, outcome: SendReceipt | Exception
    ) -> None:
        """See the outcome of an attempt; not called for one-way messages, which have none."""


class SendScope(SendHook, Protocol):
    """A hook that also wraps each send with all its attempts, and may change what is sent.

    ::

        class Mark:
            @contextmanager
            def sending(self, group, messages):
                yield [msgspec.structs.replace(one, tags="marked") for one in messages]

            def before_send(self, group, sent, queue): ...
            def after_send(self, group, sent, queue, outcome): ...
    """

    def sending(
        self, group: str, messages: Sequence[Message]
    ) -> AbstractContextManager[Sequence[Message]]:
        """Yield the messages to send instead: one, or those of a batch."""
