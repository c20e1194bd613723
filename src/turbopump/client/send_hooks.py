"""What is known of a message that was sent, and who may look on while it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from msgspec import Struct

from turbopump.client.calls import SendStatus
from turbopump.client.outgoing import Outgoing
from turbopump.message import Message, MessageQueue, QueueOffset


class SendReceipt(Struct, frozen=True):
    """Where a message was stored.

    ::

        receipt = producer.send(Message("orders", b"hello"))
        print(receipt.message_id, receipt.queue, receipt.queue_offset)
    """

    message_id: str
    """The id that consumers see; those of a batch joined by ","."""

    offset_id: str
    """The id that says where the message lies; those of a batch joined by ","."""

    queue: MessageQueue
    queue_offset: QueueOffset
    status: SendStatus = SendStatus.OK
    region: str | None = None


OnSent = Callable[[SendReceipt | None, Exception | None], None]
"""Hears of a receipt, or of the error that took its place."""


class SendHook(Protocol):
    """Sees every message on its way out; what it raises is what the sender gets.

    ::

        class Count:
            def before_send(self, group, sent, queue): ...
            def after_send(self, group, sent, queue, outcome): ...
    """

    def before_send(self, group: str, sent: Outgoing, queue: MessageQueue) -> None:
        """See a message before each try."""
        ...

    def after_send(
        self, group: str, sent: Outgoing, queue: MessageQueue, outcome: SendReceipt | Exception
    ) -> None:
        """See what became of a try; one-way messages have no outcome and are not shown."""
        ...


@runtime_checkable
class SendScope(SendHook, Protocol):
    """A hook that also stands around each send with all its tries, and may change what is sent.

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
        """Give the messages to send instead: one, or those of a batch."""
        ...
